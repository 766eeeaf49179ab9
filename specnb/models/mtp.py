"""The multi-token-prediction (MTP) layers of a checkpoint: declared by the config, read once, kept with the model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from textwrap import shorten
from weakref import WeakKeyDictionary

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from specnb import compat
from specnb.models.lock import LOADING
from specnb.runtime.module_view import module_view

_MAX_LISTED = 8  # missing tensors that a message lists
_MTP_TENSORS = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
"""The tensors of an MTP layer, beside those of a decoder layer."""
_LOADED: WeakKeyDictionary[PreTrainedModel, MtpModel] = WeakKeyDictionary()


def num_mtp_layers(model: PreTrainedModel) -> int:
    """The number of MTP layers that the model's config declares."""
    return getattr(model.config.get_text_config(decoder=True), "num_mtp_layers", None) or 0


def load_mtp(model: PreTrainedModel) -> MtpModel:
    """Load the MTP layers of a model's checkpoint, on the device of its last layer.

    The layers are read on the first call and kept with the model, so that later calls need neither disk nor network.
    Embedding and head are the model's own.

    Args:
        model: a model that was loaded from a checkpoint with MTP layers.

    Returns:
        transformers' `MtpModel`.

    Raises:
        ValueError: the config declares no MTP layers, the model was not loaded from a checkpoint, tensors are missing,
            or the model is quantised or offloaded. The message says what to do.
    """
    with LOADING:
        return _load(model)


def _load(model: PreTrainedModel) -> MtpModel:
    if model in _LOADED:
        mtp = _LOADED[model]
        mtp.layers.to(_last_device(model), model.dtype)  # the model may have been moved since
        return mtp
    name, where = type(model).__name__, model.config.name_or_path
    if not num_mtp_layers(model):
        raise ValueError(
            f"{name} ({where or 'built from a config'}) has no MTP layers: its config declares "
            f"num_nextn_predict_layers = {num_mtp_layers(model)}. Use a checkpoint that has them (GLM-4.5, "
            "DeepSeek-V3, ...) or another method."
        )
    first, count = _num_layers(model), num_mtp_layers(model)
    expected = ", ".join(f"layers.{first + i}.*" for i in range(count))
    if not where:
        raise ValueError(
            f"{name} was not loaded from a checkpoint, so there is nowhere to read its MTP tensors ({expected}) from. "
            "Load it with from_pretrained()."
        )
    _check_loadable(model)
    try:
        model.config.get_mtp_config()
    except ValueError as error:
        raise ValueError(
            f"transformers {transformers.__version__} cannot make MTP layers for {name} ({error}). A newer version "
            "may; or use another method."
        ) from error
    try:
        mtp = MtpModel.from_pretrained(_with_mtp_config(model), device_map={"": _last_device(model)})
    except Exception as error:
        missing = missing_tensors(where, first, count)
        named = ", ".join(missing[:_MAX_LISTED]) + (
            f" and {len(missing) - _MAX_LISTED} more" if len(missing) > _MAX_LISTED else ""
        )
        what = f"it lacks {named}" if missing else shorten(str(error), 300)
        raise ValueError(
            f"the MTP layers of {where} could not be loaded: {what}. Needed are tensors {expected} (enorm, hnorm, "
            "eh_proj, shared_head.norm and a decoder block each). Some re-uploads and save_pretrained() drop them; get "
            "the original checkpoint."
        ) from error
    mtp.layers.eval().to(model.dtype)  # only the layers: embedding and head are the model's own
    _LOADED[model] = mtp
    return mtp


def missing_tensors(checkpoint: str, first: int, count: int) -> list[str]:
    """Names of the tensors that a checkpoint lacks for its MTP layers.

    An MTP layer has the tensors of a decoder layer, so the last decoder layer shows what is expected.

    Args:
        checkpoint: a folder, or a hub id.
        first: number of the first MTP layer.
        count: number of MTP layers.

    Returns:
        The names; `layers.N.*` for a layer that is missing as a whole. Empty if the checkpoint's files are not on this
        machine, or have other names.
    """
    names = {name.split("layers.", 1)[-1]: name for name in _tensor_names(checkpoint)}
    block = {name.removeprefix(f"{first - 1}.") for name in names if name.startswith(f"{first - 1}.")}
    head = next((full.split("layers.")[0] for name, full in names.items() if name.startswith(f"{first - 1}.")), "")
    missing = []
    for layer in range(first, first + count) if block else ():
        there = {name.removeprefix(f"{layer}.") for name in names if name.startswith(f"{layer}.")}
        fused = any(name.endswith("experts.gate_up_proj") for name in there)  # as save_pair writes them
        lacks = sorted(name for name in (block | _MTP_TENSORS) - there if not (fused and ".experts." in name))
        missing += [f"{head}layers.{layer}.{name}" for name in lacks] if there else [f"{head}layers.{layer}.*"]
    return missing


def _tensor_names(checkpoint: str) -> list[str]:
    """The names of all tensors of a checkpoint, if its files are on this machine."""

    def local(name: str) -> Path | None:
        if Path(checkpoint).exists():
            return Path(checkpoint, name) if Path(checkpoint, name).exists() else None
        try:
            found = try_to_load_from_cache(checkpoint, name)
        except HFValidationError:  # not a hub id, but a folder that does not exist any more
            return None
        return Path(found) if isinstance(found, str) else None

    if index := local("model.safetensors.index.json"):
        return list(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if single := local("model.safetensors"):
        with safe_open(single, "pt") as file:
            return list(file.keys())
    return []


def mtp_layer_patterns(model: PreTrainedModel) -> list[str]:
    """Patterns of the names of MTP layers, which are numbered after the model's own layers."""
    return [rf"(?:^|\.)layers\.{_num_layers(model) + i}\." for i in range(num_mtp_layers(model))]


def _with_mtp_config(model: PreTrainedModel) -> PreTrainedModel:
    """A view of the model for `MtpModel`; transformers only knows the layer numbers of released models."""
    seen = module_view(model, {})
    numbered = [pattern for pattern in compat.ignored_keys(model) if "mtp" in pattern]
    compat.set_ignored_keys(seen, mtp_layer_patterns(model) + numbered)
    seen.config = copy.deepcopy(model.config)
    seen.config.dtype = model.dtype  # save_pretrained() replaces it by a string
    text = seen.config.get_text_config(decoder=True)
    if hasattr(text, "first_k_dense_replace"):
        text.first_k_dense_replace = 0  # MTP layers are never dense, as the first layers are
    return seen


def _num_layers(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def _last_device(model: PreTrainedModel) -> torch.device:
    device: torch.device = next(model.get_decoder().layers[-1].parameters()).device
    return device


def _check_loadable(model: PreTrainedModel) -> None:
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            f"{type(model).__name__} is quantised; its MTP layers cannot be loaded beside it. Load it without "
            "quantization, or use another method."
        )
    if _last_device(model).type == "meta":
        raise ValueError(
            f"the last layer of {type(model).__name__} is offloaded; its MTP layers need a device. Give it more memory "
            "(device_map), or use another method."
        )
