"""Reads EAGLE-3 checkpoints: found by their config, in the format of speculators or of those who train for SGLang.

Checked in the producers' code:

- speculators 0.9.0: `speculators_model_type` is "eagle3". `eagle_aux_hidden_state_layer_ids` are indices of
  transformers' `hidden_states`; an absent `norm_before_residual` is False (vLLM's reader takes True, but the library
  always writes it).
- SafeAILab/EAGLE, SpecForge, AngelSlim, ModelOpt: a llama config with `draft_vocab_size`, or with an architecture such
  as `LlamaForCausalLMEagle3` or `Eagle3LlamaForCausalLM`; the first layer is stored as `midlayer`. Without numbers the
  states are those before layers 2, n // 2 and n - 3, the same as above. `eagle_config.eagle_aux_hidden_state_layer_ids`
  number the layers whose OUTPUT is read (SpecForge's default is 1, n // 2 - 1, n - 4; SGLang adds 1), so they are one
  less than transformers' indices. Residuals are not normalised, unless `norm_before_residual` says so.
- `norm_output` is False where absent, and fed back only if set (SpecForge's own code between July and September 2026
  meant something else by it: pull request 879).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specnb import compat
from specnb.models import int8_rows
from specnb.models.eagle3 import LAYER_TYPES, Eagle3Config, Eagle3Drafter
from specnb.models.errors import LoadError
from specnb.models.folder import check_weights_file
from specnb.models.report import mismatch_error

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_OWN = ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "eagle_config", *_FLAGS)
"""Keys of a SafeAILab config that do not belong to its layers."""
_NOT_READ = ("verifier_norm.", "verifier_lm_head.", "rotary_emb.")
"""Beginnings of the names of tensors that are not part of the drafter: copies of the target's, and computed ones."""
_OTHER_DRAFTERS = ("dflash", "peagle", "dspark", "domino")
_MAX_LISTED = 4


def is_eagle3_config(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 drafter."""
    kind = raw.get("speculators_model_type")
    if kind is not None:
        return bool(kind == "eagle3")
    names = " ".join(map(str, raw.get("architectures") or ())).casefold()
    if any(other in names for other in _OTHER_DRAFTERS) or "dflash_config" in raw:
        return False
    return "eagle3" in names or "draft_vocab_size" in raw


def eagle3_config(name: str, raw: Mapping[str, Any]) -> Eagle3Config:
    """The config for a config.json of either format.

    Args:
        name: the name of the drafter, for messages.
        raw: the contents of config.json.

    Raises:
        LoadError: the drafter is of a kind that is not built here.
    """
    if (quantised := raw.get("quantization_config")) and not int8_rows.is_int8_rows(quantised):
        raise LoadError(
            f"the EAGLE-3 drafter {name!r} is quantised in a way that is not read here, only int8 with a scale a row "
            "(compressed-tensors) is: get it as it was trained."
        )
    eagle = raw.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        raise LoadError(
            f"the EAGLE-3 drafter {name!r} reads only the target's last state (use_aux_hidden_state is false), which "
            "is not built here."
        )
    if "speculators_model_type" in raw:
        layer, layers = dict(raw.get("transformer_layer_config") or {}), raw.get("eagle_aux_hidden_state_layer_ids")
        layer.setdefault("model_type", "qwen3")  # speculators' default
    else:
        layer = {key: value for key, value in raw.items() if key not in _OWN}
        numbers = eagle.get("eagle_aux_hidden_state_layer_ids")
        layers = raw.get("eagle_aux_hidden_state_layer_ids") if numbers is None else [i + 1 for i in numbers]
    vocab = raw.get("draft_vocab_size") or layer.get("vocab_size")
    config = Eagle3Config(
        architectures=["Eagle3Speculator"],
        transformer_layer_config=_layer_config(name, layer),
        draft_vocab_size=vocab,
        target_hidden_size=raw.get("target_hidden_size"),
        eagle_aux_hidden_state_layer_ids=list(layers) if layers else None,
        speculators_config=raw.get("speculators_config"),
        tie_word_embeddings=False,
        **{flag: bool(raw.get(flag) or eagle.get(flag) or False) for flag in _FLAGS},
    )
    config.name_or_path = name
    return config


def _layer_config(name: str, fields: dict[str, Any]) -> Any:
    """The config of the drafter's layers."""
    from transformers import AutoConfig

    kind = fields.pop("model_type", "llama")
    if kind not in LAYER_TYPES:
        raise LoadError(
            f"the EAGLE-3 drafter {name!r} has {kind} layers, which are not built here: only those of "
            f"{' and '.join(LAYER_TYPES)} are."
        )
    for key in ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids"):
        fields.pop(key, None)
    for key in ("rope_scaling", "rope_parameters"):  # planes of positions (M-RoPE) are equal for text
        if isinstance(rope := fields.get(key), Mapping) and "mrope_section" in rope:
            fields[key] = {k: v for k, v in rope.items() if k not in ("mrope_section", "type")} | {
                "rope_type": "default"
            }
    return AutoConfig.for_model(kind, **fields)


def read_config(place: str, **options: Any) -> dict[str, Any]:
    """The contents of config.json in a folder or of a hub model; `options` are transformers'."""
    from transformers import PreTrainedConfig

    raw: dict[str, Any] = PreTrainedConfig.get_config_dict(place, **options)[0]
    return raw


def load_eagle3(
    name: str,
    place: str,
    dtype: Any = "auto",
    device: Any = None,
    raw: Mapping[str, Any] | None = None,
    **options: Any,
) -> Eagle3Drafter:
    """Load a drafter, in eval mode.

    Args:
        name: its name, for messages.
        place: a folder or hub id.
        dtype: a torch.dtype or its name; "auto" is that of the stored weights, float32 for int8.
        device: where to put it; None is the CPU.
        raw: the contents of config.json; None reads it.
        options: for transformers' look-up of files on the hub.

    Raises:
        LoadError: files are missing or damaged, the drafter is of a kind that is not built here, or its weights and its
            config do not fit.
    """
    config = eagle3_config(name, read_config(place, **options) if raw is None else raw)
    tensors = {_renamed(key): value for key, value in _read_tensors(name, place, options).items()}
    try:
        tensors = int8_rows.dequantize({k: v for k, v in tensors.items() if not k.startswith(_NOT_READ)})
    except ValueError as error:
        raise mismatch_error(name, [str(error).rstrip(".")]) from None
    stored = next((value.dtype for value in tensors.values() if value.is_floating_point()), torch.float32)
    dtype = stored if dtype == "auto" else getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.device("meta"):
        model = Eagle3Drafter(config)
    if "embed_tokens.weight" in tensors:
        rows, size = tensors["embed_tokens.weight"].shape
        model.embed_tokens = nn.Embedding(rows, size, device="meta")
    if config.draft_vocab_size == config.vocab_size:  # every token can be drafted
        tensors.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
    if "d2t" in tensors:
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"].long()
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(
            0, ids[(ids >= 0) & (ids < config.vocab_size)], True
        )
    _check_tensors(name, model, tensors)
    made = {key: value.to(dtype) if value.is_floating_point() else value for key, value in tensors.items()}
    model.load_state_dict(made, assign=True)
    parts = compat.decoder_parts(model.layer_config.model_type)
    assert parts is not None
    model.rotary_emb = parts.rotary(model.layer_config)  # computed, not stored
    model.config.dtype = dtype
    loaded: Eagle3Drafter = model.eval() if device is None else model.eval().to(device)
    return loaded


def _check_tensors(name: str, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    wanted = model.state_dict()
    wrong = [
        f"{key} is {list(tensors[key].shape)}, the config asks for {list(value.shape)}"
        for key, value in wanted.items()
        if key in tensors and tensors[key].shape != value.shape
    ][:_MAX_LISTED]
    missing, surplus = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    wrong += [f"there is no {', '.join(missing[:_MAX_LISTED])}"] if missing else []
    wrong += [f"the config has no place for {', '.join(surplus[:_MAX_LISTED])}"] if surplus else []
    if wrong:
        raise mismatch_error(name, wrong)


def _renamed(key: str) -> str:
    """A tensor's name as speculators writes it."""
    key = key.removeprefix("model.")
    return f"layers.0.{key.removeprefix('midlayer.')}" if key.startswith("midlayer.") else key


def _read_tensors(name: str, place: str, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors of a checkpoint. Pickles are read without running what is in them."""
    from safetensors.torch import load_file

    def find(file: str) -> Path | None:
        found = compat.find_file(place, file, **options)
        return None if found is None else Path(found)

    for single in ("model.safetensors", "pytorch_model.bin"):
        files = [path] if (path := find(single)) else []
        if not files and (index := find(f"{single}.index.json")):
            parts = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [path for part in parts if (path := find(part))]
            if len(files) < len(parts):
                raise LoadError(f"{name!r} is not whole: {index.name} lists files that are not there. Get it again.")
        tensors: dict[str, Tensor] = {}
        for path in files:
            check_weights_file(name, path)
            read = load_file(path) if path.suffix == ".safetensors" else _unpickled(path)
            tensors |= read
        if tensors:
            return tensors
    raise LoadError(f"{name!r} has no weights: neither model.safetensors nor pytorch_model.bin is there.")


def _unpickled(path: Path) -> dict[str, Tensor]:
    read: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return read
