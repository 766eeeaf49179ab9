"""Tiny checkpoints with the tensor names of released ones: MTP layers (GLM-4.5, DeepSeek-V3), Gemma 4 and its drafter.

With these weights drafts are right often, but not always: the next token is mostly a function of the last one (wide
embeddings, damped layers), and the drafting parts read the last token's embedding.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4Config,
    Gemma4TextConfig,
    PreTrainedModel,
)

VOCAB = 64
_FOLDER = TemporaryDirectory(prefix="checkpoints-")


def _quiet(model: PreTrainedModel) -> PreTrainedModel:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.float().eval()


def _redraw(model: PreTrainedModel, seed: int, damp: float, head: float = 1.0) -> None:
    """Seeded weights: embeddings and head of standard deviation 1 (and `head`), what layers add damped."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() < 2:
                continue
            std = head if "lm_head" in name else 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(damp)


# ---------------------------------------------------------------- MTP layers
def mtp_target(kind: str, layers: int, vocab: int = VOCAB, head: float = 1.0, seed: int = 21) -> PreTrainedModel:
    """The trunk: "glm4_moe" or "deepseek_v3"."""
    model = {"glm4_moe": tiny.glm4_moe, "deepseek_v3": tiny.deepseek_v3}[kind](seed=0, vocab=vocab, layers=layers)
    _redraw(model, seed, damp=0.4 if layers < 10 else 0.15, head=head)
    return model


def mtp_tensors(saved: dict[str, Tensor], layers: int, mtp: int, read: float, seed: int) -> dict[str, Tensor]:
    """MTP layer j as `model.layers.{layers + j}.*`: a noisy copy of the last trunk layer and the parts of its own.

    `read` is how much of the hidden state it takes in beside the next token's embedding. Like in released files,
    embedding and head are there again.
    """
    generator, hidden = torch.Generator().manual_seed(seed), saved["model.embed_tokens.weight"].shape[1]
    last, made = f"model.layers.{layers - 1}.", {}
    for j in range(mtp):
        own = f"model.layers.{layers + j}."
        for name, value in saved.items():
            if name.startswith(last):
                noise = 0.05 * torch.randn(value.shape, generator=generator) if value.dim() > 1 else 0
                made[own + name.removeprefix(last)] = value + noise
        for part in ("enorm", "hnorm", "shared_head.norm"):
            made[f"{own}{part}.weight"] = 1 + 0.1 * torch.rand(hidden, generator=generator)
        mixed = torch.cat([torch.eye(hidden), read * torch.randn(hidden, hidden, generator=generator)], 1)
        made[f"{own}eh_proj.weight"] = mixed
        made[f"{own}embed_tokens.weight"] = saved["model.embed_tokens.weight"].clone()
        made[f"{own}shared_head.head.weight"] = saved["lm_head.weight"].clone()
    return made


def write_mtp(
    folder: Path,
    kind: str,
    layers: int = 2,
    mtp: int = 1,
    *,
    prefix: bool = True,
    shards: bool = False,
    drop: str | None = None,
    read: float = 0.03,
    seed: int = 5,
    **shape: Any,
) -> Path:
    """A checkpoint on disk. `prefix`: names begin with "model."; `drop`: leave out MTP tensors so named."""
    model = mtp_target(kind, layers, **shape)
    model.save_pretrained(folder, **({"max_shard_size": "40KB"} if shards else {}))
    files = sorted(folder.glob("*.safetensors"))
    assert (len(files) > 1) is shards
    saved = {name: value for file in files for name, value in load_file(file).items()}
    more = mtp_tensors(saved, layers, mtp, read, seed)
    more = {name: value.contiguous() for name, value in more.items() if drop is None or drop not in name}
    index = folder / "model.safetensors.index.json"
    if shards:
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(more, "mtp.safetensors")
        index.write_text(json.dumps(content))
        save_file(more, folder / "mtp.safetensors", metadata={"format": "pt"})
    else:
        whole = saved | more
        if not prefix:
            whole = {name.removeprefix("model."): value for name, value in whole.items()}
        save_file(whole, files[0], metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("num_mtp_layers", None)
    config["num_nextn_predict_layers"] = mtp  # the key of the released configs
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path) -> PreTrainedModel:
    return _quiet(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@cache
def mtp_folder(kind: str, layers: int = 2, mtp: int = 1, **options: Any) -> Path:
    """A checkpoint that several tests read."""
    name = "-".join(map(str, (kind, layers, mtp, *sorted(options.items()))))
    return write_mtp(Path(_FOLDER.name) / name, kind, layers, mtp, **options)


@cache
def mtp_model(kind: str, layers: int = 2, mtp: int = 1, **options: Any) -> PreTrainedModel:
    """A target with MTP layers, shared by the tests that leave it as it is."""
    return load(mtp_folder(kind, layers, mtp, **options))


# ---------------------------------------------------------------- Gemma 4 and its drafter
GEMMA_WINDOW = 8


def _gemma_config(
    vocab: int, hidden: int, layers: int, shared: int, per_layer: int, types: list[str]
) -> dict[str, Any]:
    return {
        **tiny._shape(vocab, hidden=hidden, layers=layers),
        "num_key_value_heads": 1,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": GEMMA_WINDOW,
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": vocab if per_layer else 0,
        "use_double_wide_mlp": bool(per_layer),
        "enable_moe_block": False,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }


def _shape_gemma(model: PreTrainedModel, seed: int, spread: float, post: float) -> None:
    """Tied embeddings; what a layer adds is damped by its post-norms."""
    generator = torch.Generator().manual_seed(seed)
    post_norms = ("attention_layernorm.weight", "feedforward_layernorm.weight", "post_per_layer_input_norm.weight")
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() >= 2:
                std = spread if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
            elif "post_" in name and name.endswith(post_norms):
                parameter.fill_(post)


def gemma4_target(
    vocab: int = VOCAB,
    hidden: int = 32,
    shared: int = 2,
    per_layer: int = 8,
    spread: float = 0.25,
    *,
    composite: bool = False,
    vision: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """Six layers, sliding and full.

    Args:
        shared: how many of the last layers reuse keys and values.
        composite: the multimodal class.
        vision: the shape of its vision tower, if it has one.
    """
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma4TextConfig(**_gemma_config(vocab, hidden, 6, shared, per_layer, types))
    model = AutoModelForCausalLM.from_config(config)
    _shape_gemma(model, 11, spread, post=0.25)
    signs = torch.rand(model.model.norm.weight.shape, generator=torch.Generator().manual_seed(12))
    model.model.norm.weight.data.copy_(torch.where(signs < 0.5, -1.0, 1.0))  # a tied head would repeat the last token
    if composite:
        ids = {
            f"{kind}_token_id": vocab - 1 - i for i, kind in enumerate(("image", "video", "audio", "boi", "eoi", "boa"))
        }
        ids["eoa_token_index"] = vocab - 7
        reads = {"use_bidirectional_attention": "vision"} if vision else {}
        whole = Gemma4Config(text_config=config.to_dict() | reads, vision_config=vision, audio_config=None, **ids)
        text = model
        with torch.random.fork_rng():
            torch.manual_seed(15)
            model = AutoModelForCausalLM.from_config(whole)
        model.model.language_model.load_state_dict(text.model.state_dict())
        model.tie_weights()
    return _quiet(model)


def gemma4_drafter(
    target: PreTrainedModel, *, ordered: bool = False, spread: float = 0.05, **other: Any
) -> PreTrainedModel:
    """A drafter for `target`. `spread`: how much of the hidden state it takes in; `other`: parts of the text config."""
    config = target.config.get_text_config()
    vocab, hidden = config.vocab_size, config.hidden_size
    types = ["sliding_attention"] * 3 + ["full_attention"]
    own = {**_gemma_config(vocab, hidden, 4, 4, 0, types), "per_layer_config": {3: {"head_dim": 16}}} | other
    backbone = own.pop("backbone_hidden_size", hidden)
    text = Gemma4TextConfig(**own)
    more = {"use_ordered_embeddings": ordered, "num_centroids": 4, "centroid_intermediate_top_k": 2}
    model = AutoModelForCausalLM.from_config(
        Gemma4AssistantConfig(text_config=text.to_dict(), backbone_hidden_size=backbone, **more)
    )
    _shape_gemma(model, 13, 0.25, post=0.15)
    generator, decoder = torch.Generator().manual_seed(14), target.get_decoder()
    if other:
        return _quiet(model)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(decoder.embed_tokens.weight)
        model.model.norm.weight.copy_(decoder.norm.weight)
        noise = spread * torch.randn(hidden, hidden, generator=generator)
        model.pre_projection.weight.copy_(torch.cat([torch.eye(hidden), noise], 1))
        model.post_projection.weight.copy_(torch.eye(hidden))
        if ordered:
            order = torch.randperm(vocab, generator=generator)
            model.masked_embedding.token_ordering.copy_(order)
            clusters = model.lm_head.weight[order].view(4, -1, hidden)
            model.masked_embedding.centroids.weight.copy_(clusters.mean(1))
    model.tie_weights()
    return _quiet(model)
