"""The multi-token-prediction (MTP) layers of a checkpoint: found by its config, read once, kept with the model.

They are stored in one of three ways: as decoder layers after the model's own (`model.layers.{num_hidden_layers + i}.`,
as in GLM-4.5 and DeepSeek-V3), beside the model (`mtp.layers.{i}.`, as in Qwen3-Next, Qwen3.5 and Mellum), or as a part
of it (`model.mtp.layers.{i}.`, as in Inkling).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from weakref import WeakKeyDictionary

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from specnb import compat
from specnb.models.lock import LOADING
from specnb.runtime.module_view import layers_path, module_view

_MAX_LISTED = 8  # missing tensors that a message lists
_MTP_TENSORS = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
"""The tensors that an MTP layer has in addition to those of a decoder layer."""
BESIDE = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
"""Where MTP layers are stored beside the model: the names of the same parts after `mtp.`, by their names in memory."""
NESTED = {"mtp_block": "transformer_block", "eh_proj": "input_proj", "enorm": "embed_norm", "hnorm": "hidden_norm"}
"""Where they are stored as `model.mtp.*`: the names of the same parts in each layer, by their names in memory."""
NESTED_NORM = "model.mtp.chain_norm"
COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Names under which configs declare the number of MTP layers."""
_LOADED: WeakKeyDictionary[PreTrainedModel, MtpModel] = WeakKeyDictionary()
_STORED: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


def num_mtp_layers(model: PreTrainedModel) -> int:
    """The number of MTP layers of the model's checkpoint.

    The config declares it. Qwen3-Next's config does not, so its layers are counted in the checkpoint's files, once.
    """
    text = model.config.get_text_config(decoder=True)
    declared = [count for name in COUNTS if (count := getattr(text, name, None)) is not None]
    if declared or not stored_beside(model):
        return int(next(iter(declared), 0))
    if model not in _STORED:
        names = _tensor_names(model.config.name_or_path)
        _STORED[model] = len({found[1] for name in names if (found := re.match(r"mtp\.layers\.(\d+)\.", name))})
    return _STORED[model]


def stored_beside(model: PreTrainedModel) -> bool:
    """Whether checkpoints of the model's class have MTP layers beside the model, as `mtp.*`."""
    return any("^mtp" in pattern for pattern in compat.ignored_keys(model))


def stored_nested(model: PreTrainedModel) -> bool:
    """Whether checkpoints of the model's class have MTP layers as `model.mtp.*`."""
    return any(pattern.startswith(r"model\.mtp") for pattern in compat.ignored_keys(model))


def mtp_config(model: PreTrainedModel) -> PreTrainedConfig | None:
    """The config of the model's MTP layers; None if it has none, or if transformers cannot make one."""
    if model in _LOADED:
        return _LOADED[model].config
    if not num_mtp_layers(model):
        return None
    try:
        return _with_mtp_config(model).config.get_mtp_config()
    except ValueError:
        return None


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
        _follow(model, mtp)  # the model may have been moved since
        return mtp
    name, where = type(model).__name__, model.config.name_or_path
    if not num_mtp_layers(model):
        raise ValueError(
            f"{name} ({where or 'built from a config'}) has no MTP layers: its config declares "
            f"num_nextn_predict_layers = {num_mtp_layers(model)}. Use a checkpoint that has them (GLM-4.5, "
            "DeepSeek-V3, ...) or another method."
        )
    expected = ", ".join(f"{layer}.*" for layer in _layer_names(model))
    if not where:
        raise ValueError(
            f"{name} was not loaded from a checkpoint, so there is nowhere to read its MTP tensors ({expected}) from. "
            "Load it with from_pretrained()."
        )
    if not compat.was_loaded(model):
        raise ValueError(
            f"{name} was built from the config of {where}, but its weights were not loaded from there, so the MTP "
            "layers stored there are not this model's. Load it with from_pretrained()."
        )
    _check_loadable(model)
    seen = _with_mtp_config(model)
    try:
        seen.config.get_mtp_config()
    except ValueError as error:
        raise ValueError(
            f"transformers {transformers.__version__} cannot make MTP layers for {name} ({error}). A newer version "
            "may; or use another method."
        ) from error
    try:
        mtp = MtpModel.from_pretrained(seen, device_map={"": _last_device(model)})
    except Exception as error:
        missing = missing_tensors(model)
        named = ", ".join(missing[:_MAX_LISTED]) + (
            f" and {len(missing) - _MAX_LISTED} more" if len(missing) > _MAX_LISTED else ""
        )
        what = f"it lacks {named}" if missing else shorten(str(error), 300)
        if not missing and stored_beside(model):
            what += f" (transformers {transformers.__version__} may be too old for layers stored as mtp.*)"
        raise ValueError(
            f"the MTP layers of {where} could not be loaded: {what}. Needed are tensors {expected} (a decoder "
            f"block each) and {_own_names(model)}. Some re-uploads and save_pretrained() drop them; get "
            "the original checkpoint."
        ) from error
    mtp.layers.eval()
    if getattr(mtp.embed_tokens, "embed_norm", None) is not None:  # transformers copies the embedding, to drop its norm
        mtp.embed_tokens = module_view(model.get_input_embeddings(), {"embed_norm": torch.nn.Identity()})
    _follow(model, mtp)
    _LOADED[model] = mtp
    return mtp


def _follow(model: PreTrainedModel, mtp: MtpModel) -> None:
    """Move the MTP layers to the model's last device, and each tensor to the number format that the model's own has.

    Embedding and head are the model's own.
    """
    device = _last_device(model)
    formats: dict[str, torch.dtype] = {}
    for layer in model.get_decoder().layers:
        formats |= {name: tensor.dtype for name, tensor in _tensors(layer) if tensor.is_floating_point()}
    parts = [*mtp.layers, mtp.shared_post_norm] if getattr(mtp, "use_shared_post_norm", False) else list(mtp.layers)
    for part in parts:
        for name, tensor in _tensors(part):
            dtype = formats.get(name.removeprefix("mtp_block."), model.dtype)
            tensor.data = tensor.data.to(device, dtype if tensor.is_floating_point() else None)


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def missing_tensors(model: PreTrainedModel) -> list[str]:
    """Names of the tensors that a model's checkpoint lacks for its MTP layers.

    An MTP layer has the tensors of a decoder layer, so one of the model's own layers shows what is expected.

    Returns:
        The names; `layers.N.*` for a layer that is missing as a whole. Empty if the checkpoint's files are not on this
        machine, or have other names.
    """
    names = _tensor_names(model.config.name_or_path)
    beside, layers = stored_beside(model), _layer_names(model)
    blocks = _blocks(names)
    if stored_nested(model):
        return _missing_nested(model, names, {layer: blocks.get(layer, set()) for layer in layers})
    like = _like(model, blocks, layers[0])
    block = blocks.get(like, set())
    head = "" if beside else next((name.split(f"{like}.")[0] for name in names if f"{like}." in name), "")
    own = (f"mtp.{name}.weight" for name in sorted(BESIDE.values()))
    missing = [name for name in own if beside and names and name not in names]
    for layer in layers if block else ():
        there = blocks.get(layer, set())
        fused = any(name.endswith("experts.gate_up_proj") for name in there)  # as save_pair writes them
        wanted = block if beside else block | _MTP_TENSORS
        lacks = sorted(name for name in wanted - there if not (fused and ".experts." in f".{name}"))
        missing += [f"{head}{layer}.{name}" for name in lacks] if there else [f"{head}{layer}.*"]
    return missing


def _missing_nested(model: PreTrainedModel, names: Sequence[str], layers: Mapping[str, set[str]]) -> list[str]:
    """As `missing_tensors`, for layers that need not be like any of the model's own: compared to each other."""
    if not names:
        return []
    text = model.config.get_text_config(decoder=True)
    wanted: set[str] = set().union(*layers.values())
    missing = []
    if getattr(text, "chain_hidden_post_norm", False) and f"{NESTED_NORM}.weight" not in names:
        missing.append(f"{NESTED_NORM}.weight")
    for layer, there in layers.items():
        missing += [f"model.{layer}.{name}" for name in sorted(wanted - there)] if there else [f"model.{layer}.*"]
    return missing


def _layer_names(model: PreTrainedModel) -> list[str]:
    """The MTP layers' names in a checkpoint, without what comes before `layers.` or `mtp.`."""
    apart = stored_beside(model) or stored_nested(model)
    base, first = ("mtp.layers", 0) if apart else ("layers", _num_layers(model))
    return [f"{base}.{first + i}" for i in range(num_mtp_layers(model))]


def _own_names(model: PreTrainedModel) -> str:
    names = BESIDE.values() if stored_beside(model) else NESTED.values() if stored_nested(model) else _MTP_TENSORS
    return ", ".join(sorted(name.removesuffix(".weight") for name in names))


def _blocks(names: Iterable[str]) -> dict[str, set[str]]:
    """The tensors of each layer, by the layer's name."""
    blocks: dict[str, set[str]] = {}
    for name in names:
        if found := re.search(r"(?:^|\.)((?:mtp\.)?layers\.\d+)\.(.+)", name):
            blocks.setdefault(found[1], set()).add(found[2])
    return blocks


def _like(model: PreTrainedModel, blocks: Mapping[str, set[str]], layer: str) -> str:
    """The name of the model's own layer whose tensors are most like those of an MTP layer; of several, the last."""
    there = blocks.get(layer)
    own = [f"layers.{i}" for i in reversed(range(_num_layers(model)))]
    return own[0] if there is None else max(own, key=lambda name: len(blocks.get(name, set()) & there))


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
        text.first_k_dense_replace = 0  # MTP layers are never dense, unlike the first layers
    text.num_mtp_layers = num_mtp_layers(model)
    if getattr(text, "layer_types", None) is None or getattr(text, "mtp_layer_types", None) is not None:
        return seen
    blocks = _blocks(_tensor_names(model.config.name_or_path))
    like = [int(_like(model, blocks, name).split(".")[-1]) for name in _layer_names(model)]
    for kinds in ("layer_types", "mlp_layer_types"):
        if getattr(text, kinds, None) is not None:
            setattr(text, f"mtp_{kinds}", [getattr(text, kinds)[i] for i in like])
    path = layers_path(model)  # transformers builds MTP layers from the last layer's class and takes a norm from it
    last = module_view(model, {f"{path}.{_num_layers(model) - 1}": model.get_submodule(f"{path}.{like[0]}")})
    last.config = seen.config
    compat.set_ignored_keys(last, compat.ignored_keys(seen))
    return last


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
