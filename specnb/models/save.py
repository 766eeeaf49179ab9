"""Saves a pair, including the MTP layers that transformers' `save_pretrained` leaves out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from specnb.models.loading import ASSISTANT
from specnb.models.pair import Pair

_SINGLE, _INDEX, _MTP = "model.safetensors", "model.safetensors.index.json", "model-mtp.safetensors"


def save_pair(pair: Pair, folder: str | os.PathLike[str]) -> None:
    """Save the target with its tokenizer in a folder, and the draft model in its subfolder `assistant`.

    MTP layers that the target's config declares are saved too, under the names of released checkpoints
    (`model.layers.{num_hidden_layers + i}.`). The models are not changed.

    Args:
        pair: the pair.
        folder: where to save it.

    Raises:
        ValueError: MTP layers are declared but cannot be read, or the folder has the draft model of another pair.
    """
    from specnb.models.mtp import load_mtp, num_mtp_layers

    if not isinstance(pair, Pair):
        raise ValueError(
            f"save_pair() takes a Pair, not a {type(pair).__name__}: specnb.Pair(model, tokenizer) makes one."
        )
    place = Path(folder)
    if pair.assistant is None and (place / ASSISTANT).exists():
        raise ValueError(
            f"{place} holds the draft model of another pair, and this pair has none: choose another folder, or remove "
            f"{ASSISTANT}/ there."
        )
    extra = mtp_tensors(pair.target, load_mtp(pair.target)) if num_mtp_layers(pair.target) else {}
    if (place / _MTP).exists():  # left by another pair that was saved here
        for stale in (_MTP, _INDEX):
            (place / stale).unlink(missing_ok=True)
    _save(pair.target, pair.tokenizer, place)
    if extra:
        _add(place, extra)
    if pair.assistant is not None:
        _save(pair.assistant, pair.assistant_tokenizer, place / ASSISTANT)


def mtp_tensors(model: Any, mtp: Any) -> dict[str, Any]:
    """The tensors of loaded MTP layers, under their names in a checkpoint."""
    from specnb.models.mtp import BESIDE, NESTED, NESTED_NORM, stored_beside, stored_nested

    depth, beside = model.config.get_text_config(decoder=True).num_hidden_layers, stored_beside(model)
    nested, named = stored_nested(model), {}
    if getattr(mtp, "use_shared_post_norm", False):
        named[f"{NESTED_NORM}.weight"] = mtp.shared_post_norm.weight.detach().cpu().contiguous()
    for name, tensor in mtp.layers.state_dict().items():
        layer, rest = name.split(".", 1)
        if nested:
            own, kind = rest.split(".", 1)
            stored = f"model.mtp.layers.{layer}.{NESTED[own]}.{kind}"
        elif rest.startswith("mtp_block."):
            rest = rest.removeprefix("mtp_block.")
            stored = f"mtp.layers.{layer}.{rest}" if beside else f"model.layers.{depth + int(layer)}.{rest}"
        elif beside:
            own, kind = rest.split(".", 1)
            stored = f"mtp.{BESIDE[own]}.{kind}"
        else:
            stored = f"model.layers.{depth + int(layer)}.{rest.replace('post_norm.', 'shared_head.norm.', 1)}"
        named[stored] = tensor.detach().cpu().contiguous()
    return named


def _save(model: Any, tokenizer: Any, place: Path) -> None:
    dtype = model.config.dtype
    model.save_pretrained(place)
    model.config.dtype = dtype  # save_pretrained replaces it by a string
    if tokenizer is not None:
        tokenizer.save_pretrained(place)


def _add(place: Path, tensors: dict[str, Any]) -> None:
    """Add tensors to a saved model, as another shard."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    index = place / _INDEX
    if not index.exists():
        first = "model-00001-of-00002.safetensors"
        (place / _SINGLE).rename(place / first)
        with safe_open(place / first, "pt") as file:
            weights = dict.fromkeys(file.keys(), first)
        content: dict[str, Any] = {"metadata": {"total_size": (place / first).stat().st_size}, "weight_map": weights}
    else:
        content = json.loads(index.read_text(encoding="utf-8"))
    shard = _MTP
    save_file(tensors, place / shard, metadata={"format": "pt"})
    content["weight_map"].update(dict.fromkeys(tensors, shard))
    content["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    index.write_text(json.dumps(content, indent=2), encoding="utf-8")
