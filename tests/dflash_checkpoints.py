"""Tiny DFlash drafters in the formats of z-lab and of speculators, with seeded weights, and their tiny targets.

The mask token is chosen so that a mask alone, without the drafter's layers, gives a token that the target writes often:
then drafts are right often, but not always.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

VOCAB, SIZE, WINDOW, BLOCK = 64, 32, 6, 6
PROMPT = tiny.ids(0, 7)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "use_sliding_window": True}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5}

ZLAB: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": SLIDING,  # causal where it slides
    "sliding, not causal": SLIDING | {"is_causal": False},
    "scaled": {"input_embedding_scale": 1.5, "output_multiplier": 0.5, "final_logit_softcapping": 2.0},
    "one layer": {"num_hidden_layers": 1, "layer_types": None},
    "bias": {"attention_bias": True, "default layers": True},
    "dflash 2": SLIDING | DFLASH2 | {"is_causal": False},
}
SPECULATORS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": SLIDING,
    "sliding, not causal": SLIDING | {"sliding_window_non_causal": True},
    "draft vocabulary": {"draft_vocab_size": 40},
    "from the anchor": {"sample_from_anchor": True},
    "dflash 2": SLIDING | DFLASH2,
}


@cache
def target() -> PreTrainedModel:
    """A Llama of 4 layers."""
    return tiny.llama(seed=8, layers=4, std=0.15)


STRONG, WEAK = 2.0, 0.03
"""Factors of what layers add. Drafts of strong layers differ from text to text, those of weak ones are often right."""
LENGTHS = (2, 5, 6, 7, 8, 13, 20, 31)
"""Lengths of the texts after which blocks were recorded: short of the window, at it, and beyond."""


@cache
def texts() -> list[list[int]]:
    """Texts of `LENGTHS` tokens: random ones and the token that the target writes next."""
    found = [tiny.ids(10 + length, length - 1) for length in LENGTHS]
    with torch.no_grad():
        return [[*one[0].tolist(), int(target()(one).logits[0, -1].argmax())] for one in found]


def mask_token(model: PreTrainedModel) -> int:
    """The token whose embedding gives the token that the model writes most often."""
    vocab = model.config.get_text_config().vocab_size
    prompt = PROMPT % vocab
    written: Any = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=60)
    counts = written[0, prompt.shape[1] :].bincount(minlength=vocab)
    rows = torch.nn.functional.normalize(model.get_input_embeddings().weight.detach(), dim=-1)
    with torch.no_grad():
        drafted = model.get_output_embeddings()(rows).argmax(-1)
    return int(counts[drafted].argmax())


def _layers(model: PreTrainedModel, options: dict[str, Any]) -> dict[str, Any]:
    text = model.config.get_text_config()
    shape = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
    }
    known = {*shape, *SLIDING, "attention_bias"}
    return shape | {name: value for name, value in options.items() if name in known}


def tensors(layers: dict[str, Any], taps: int, options: dict[str, Any], seed: int, damp: float) -> dict[str, Tensor]:
    """Weights with the names of released checkpoints; `damp` is the factor of what layers add."""
    generator = torch.Generator().manual_seed(seed)
    size, dim = layers["hidden_size"], layers["head_dim"]
    q, kv = layers["num_attention_heads"] * dim, layers["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, taps * size), "hidden_norm.weight": (size,)}
    shapes["norm.weight"] = (size,)
    for i in range(layers["num_hidden_layers"]):
        own = f"layers.{i}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{own}self_attn.{name}_proj.weight"] = rows, size
            if layers.get("attention_bias"):
                shapes[f"{own}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{own}self_attn.o_proj.weight"] = size, q
        if layers.get("attention_bias"):
            shapes[f"{own}self_attn.o_proj.bias"] = (size,)
        for name, width in (("self_attn.q_norm", dim), ("self_attn.k_norm", dim)):
            shapes[f"{own}{name}.weight"] = (width,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{own}{name}.weight"] = (size,)
        for name, shape in (("gate", (48, size)), ("up", (48, size)), ("down", (size, 48))):
            shapes[f"{own}mlp.{name}_proj.weight"] = shape
        if "selector_rank" in options:
            width = 2 * options["conv_kernel_size"] * size // options["conv_group_size"]
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"{own}{name}.base_kernel"] = 2, options["conv_kernel_size"], size
                shapes[f"{own}{name}.kernel_projection.weight"] = width, size
    if "selector_rank" in options:
        for name in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{name}"] = layers["vocab_size"], options["selector_rank"]
        shapes["candidate_selector.hidden_projection.weight"] = options["selector_rank"], size
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            made[name] = 1 + 0.2 * noise
        else:
            made[name] = noise * shape[-1] ** -0.5 * (damp if "o_proj" in name or "down_proj" in name else 1)
    return made


def _save(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def zlab(
    folder: Path, model: PreTrainedModel, options: dict[str, Any], block: int = BLOCK, seed: int = 0, damp: float = WEAK
) -> Path:
    """A checkpoint in z-lab's format."""
    layers, depth = _layers(model, options), model.config.get_text_config().num_hidden_layers
    own = {"mask_token_id": mask_token(model), "target_layer_ids": [0, depth // 2, depth - 1]}
    if options.get("default layers"):
        own.pop("target_layer_ids")
    taps = len(own.get("target_layer_ids", range(layers["num_hidden_layers"])))
    scales = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
    own |= {name: options[name] for name in (*DFLASH2, *scales) if name in options}
    config = layers | {
        "architectures": ["DFlash2DraftModel" if "selector_rank" in options else "DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "dtype": "float32",
        "tie_word_embeddings": False,
        "num_target_layers": depth,
        "block_size": block,
        "dflash_config": own,
    }
    if "is_causal" in options:
        config["is_causal"] = options["is_causal"]
    return _save(folder, config, tensors(layers, taps, options, seed, damp))


def speculators(
    folder: Path,
    model: PreTrainedModel,
    options: dict[str, Any],
    block: int = BLOCK,
    seed: int = 0,
    damp: float = WEAK,
    verifier: str = "",
) -> Path:
    """A checkpoint in speculators' format."""
    layers, depth = _layers(model, options), model.config.get_text_config().num_hidden_layers
    ids = [1, depth // 2, depth - 1]
    kind = "dflash2" if "selector_rank" in options else "dflash"
    weights = tensors(layers, len(ids), options, seed, damp)
    small = options.get("draft_vocab_size")
    if small:
        kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:small].sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[kept] = True
        head = model.get_output_embeddings().weight.detach()
        weights |= {"d2t": kept - torch.arange(small), "t2d": t2d, "lm_head.weight": head[kept].clone()}
    config = {
        "speculators_model_type": kind,
        "architectures": ["DFlash2DraftModel" if kind == "dflash2" else "DFlashSpeculator"],
        "speculators_version": "0.9.0",
        "dtype": "float32",
        "transformer_layer_config": {"model_type": "qwen3", "dtype": "float32"} | layers,
        "draft_vocab_size": small or layers["vocab_size"],
        "block_size": block,
        "aux_hidden_state_layer_ids": ids,
        "mask_token_id": mask_token(model),
        "sliding_window_non_causal": options.get("sliding_window_non_causal", kind == "dflash2"),
        "sample_from_anchor": options.get("sample_from_anchor", False),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": block - 1}],
            "verifier": {"name_or_path": verifier or None, "architectures": model.config.architectures or []},
        },
    }
    if kind == "dflash2":
        config |= {name: options[name] for name in DFLASH2}
    return _save(folder, config, weights)
