"""Tiny EAGLE-3 drafters for any target, as folders in the formats in which they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def tensors(
    size: int, vocab: int, draft: int, count: int = 3, kind: str = "llama", layers: int = 1, seed: int = 1, **flags: Any
) -> dict[str, Tensor]:
    """The tensors of a drafter in speculators' names; `size` is that of its states and the target's."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, count * size), "lm_head.weight": (draft, size)}
    shapes["norm.weight"] = (size,)
    for i in range(layers):
        layer, wide = f"layers.{i}.", size if i else 2 * size
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (n, wide) for name, n in (("q", 32), ("k", 16), ("v", 16))}
        shapes |= {f"{layer}self_attn.o_proj.weight": (size, 32), f"{layer}mlp.down_proj.weight": (size, 48)}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (48, size) for name in ("gate", "up")}
        shapes |= {f"{layer}{name}.weight": (size,) for name in ("input_layernorm", "post_attention_layernorm")}
        if i == 0:
            shapes[f"{layer}hidden_norm.weight"] = (size,)
        if kind == "qwen3":
            shapes |= {f"{layer}self_attn.{name}_norm.weight": (8,) for name in ("q", "k")}
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (size,) for i in range(count)}
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (count * size,)
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator) * 0.25
        made[name] = noise + 1 if len(shape) == 1 else noise
    if draft < vocab:
        kept = torch.randperm(vocab, generator=generator)[:draft].sort().values
        made["d2t"] = kept - torch.arange(draft)
        made["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
    return made


def drafter_folder(
    place: Path,
    target: PreTrainedModel,
    draft: int | None = None,
    read: tuple[int, ...] | None = (1, 2, 3),
    kind: str = "llama",
    layers: int = 1,
    **flags: Any,
) -> Path:
    """A drafter for `target` in the speculators format: right now and then, since its head is the target's.

    `read` are the target's layers whose states it reads, `draft` is the number of tokens that it can draft.
    """
    text = target.config.get_text_config(decoder=True)
    size, vocab = text.hidden_size, text.vocab_size
    draft = vocab if draft is None else draft
    made = tensors(size, vocab, draft, len(read or (2, 2, 1)), kind, layers, **flags)
    ids = torch.arange(draft) + made.get("d2t", torch.zeros(draft, dtype=torch.long))
    made["lm_head.weight"] = target.get_output_embeddings().weight.detach()[ids].clone()
    for name in [name for name in made if "o_proj" in name or "down_proj" in name]:
        made[name] *= 0.3
    made["fc.weight"] *= 0.1
    made["fc.weight"][:, -size:] += torch.eye(size)  # the last of the states goes through
    place.mkdir(parents=True, exist_ok=True)
    save_file(made, place / "model.safetensors")
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": draft,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None if read is None else list(read),
        **dict.fromkeys(FLAGS, False),
        **flags,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "/somewhere/else", "architectures": [type(target).__name__]},
        },
        "transformer_layer_config": layer_config(size, vocab, kind, layers),
    }
    (place / "config.json").write_text(json.dumps(config))
    return place


def safeai_folder(place: Path, source: Path, **changed: Any) -> Path:
    """The drafter in `source`, a folder in the speculators format, as SafeAILab and SpecForge would write it."""
    raw = json.loads((source / "config.json").read_text())
    read = raw["eagle_aux_hidden_state_layer_ids"]
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": raw["draft_vocab_size"]}
    if read is not None:  # they number the layers whose output is read
        own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in read]}
    flags = {name: raw[name] for name in FLAGS if raw[name]}
    place.mkdir(parents=True, exist_ok=True)
    config = {**raw["transformer_layer_config"], "torch_dtype": "float32", **own, **flags, **changed}
    (place / "config.json").write_text(json.dumps(config))
    named = load_file(source / "model.safetensors").items()
    torch.save({k.replace("layers.0.", "midlayer."): v for k, v in named}, place / "pytorch_model.bin")
    return place


def layer_config(size: int, vocab: int, kind: str = "llama", layers: int = 1) -> dict[str, Any]:
    """The config of a drafter's layers."""
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": size,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
