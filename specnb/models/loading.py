"""`load`: a target, alone or with a draft model, from a hub id, a folder, a GGUF file or a registered name."""

from __future__ import annotations

import contextlib
import json
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specnb.models import folder, gguf
from specnb.models.drafter import drafter_kind, not_a_drafter, read_drafter
from specnb.models.errors import LoadError, load_errors, unknown_name
from specnb.models.hub import hub_options
from specnb.models.lock import LOADING
from specnb.models.pair import Pair, check_pair
from specnb.models.registry import REGISTERED
from specnb.models.report import load_report
from specnb.models.truncation import truncate
from specnb.text import text_tokenizer

SOURCES = ("hub", "package", "local")
ASSISTANT = "assistant"
"""The subfolder in which `save_pair` stores the draft model."""
_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_DEVICE_MAP_POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Values of `device_map` with which accelerate distributes the model."""
_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def load(
    name_or_path: str | os.PathLike[str],
    assistant: str | os.PathLike[str] | int | None = "auto",
    *,
    dtype: Any = "auto",
    device_map: Any = None,
    source: str | None = None,
    pack: bool | None = None,
    cuda_graphs: bool = False,
) -> Pair:
    """Load a target and, if given, a draft model, both in eval mode, and check that they fit each other.

    The draft model may be an EAGLE-3 drafter, in the format of speculators or of SafeAILab, SpecForge and AngelSlim, or
    a DFlash drafter, in the format of z-lab, speculators or transformers. The MTP layers of a checkpoint are read at
    once, so that later calls need neither disk nor network. GGUF files, alone or in a package, are converted on first
    use and kept in the cache folder ($SPECNB_CACHE, else specnb in $XDG_CACHE_HOME or ~/.cache). Code that comes with a
    checkpoint is never run. Checkpoints with tensors that are missing, superfluous or of another size are refused.

    Args:
        name_or_path: the target: a registered name (`tiny-llama`, `smollm2-135m`), a hub id, a folder in transformers'
            format, or a `.gguf` file.
        assistant: the draft model, given in the same way, or a number N for the target's own first N layers, which
            share its weights (`truncate`). "auto" takes what comes with the target: the draft model in a folder that
            `save_pair` wrote, or the drafter that specnb has for `smollm2-135m-q4`. None, or "none", takes none.
        dtype: as in transformers; "auto" is the format in which the weights are stored (float32 for GGUF).
        device_map: as in accelerate ("auto", "cuda", "cpu", a dict); None is the CPU.
        source: where the target comes from: "hub", "package" (a registered name whose weights are in a Python package)
            or "local" (a folder or file). None decides: a registered name first, then a path that exists or is written
            as one, else the hub. The source of the draft model is always decided.
        pack: store the weights a second time in the layout of the processor's fast kernels (`specnb.pack`; CPU and
            float32 only). Verifying several tokens becomes much cheaper; the weights take twice the memory. None does
            so if that takes at most a quarter of the free memory. `specnb.unpack(pair.target)` undoes it.
        cuda_graphs: run small blocks as CUDA graphs (`specnb.cuda_graphs`); each model must be on one CUDA device.

    Returns:
        The pair. Its card describes the weights.

    Raises:
        LoadError: something cannot be loaded. This is an OSError whose message says what to do.
        ValueError: an argument is not valid, or the two models do not fit each other.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise ValueError(f"the model must be a name or a path, not {_describe_value(name_or_path)}.")
    if not isinstance(assistant, str | os.PathLike | int | None) or isinstance(assistant, bool):
        raise ValueError(f"assistant must be a name, a path or a number of layers, not {_describe_value(assistant)}.")
    if source is not None and source not in SOURCES:
        raise ValueError(f"unknown source {source!r}. Allowed: {', '.join(SOURCES)}, or None to decide.")
    if pack not in (None, True, False):
        raise ValueError(f"pack={pack!r} is not valid: pack must be True, False or None (where the memory allows it).")
    if cuda_graphs and device_map in (None, "cpu"):
        raise ValueError("cuda_graphs=True needs the model on a CUDA device: give device_map='cuda' too.")
    _check_devices(device_map)
    dtype = _dtype(dtype)
    origin = _locate(os.fspath(name_or_path), source)
    assistant = origin.assistant or None if assistant == "auto" else None if assistant == "none" else assistant
    if drafter_kind(origin.place, hub_options(origin.local)):
        raise LoadError(
            f"{origin.name!r} is a drafter, which reads the states of the model that it was made for and "
            f"cannot generate alone: specnb.load(TARGET, {origin.name!r})."
        )
    with LOADING:
        target, tokenizer = _load(origin, dtype, device_map)
        _load_mtp_layers(target)
    pair = Pair(target, tokenizer, name=origin.name, card=origin.card)
    if isinstance(assistant, int):
        pair.assistant, pair.assistant_tokenizer = truncate(target, assistant), tokenizer
    elif assistant is not None:
        draft = _locate(os.fspath(assistant), None)
        with LOADING:
            drafter = read_drafter(draft.name, draft.place, draft.local, dtype, _last_device(target))
            pair.assistant, pair.assistant_tokenizer = (
                _load(draft, dtype, device_map, tokenizer_optional=True) if drafter is None else (drafter, None)
            )
        pair.card += f"\nDraft: {draft.card}"
    check_pair(pair.target, pair.tokenizer, pair.assistant, pair.assistant_tokenizer)
    from specnb.runtime import cuda_graphs as graphs  # imported here, since it imports torch
    from specnb.runtime import prepacked_linear

    for model in (pair.target, pair.assistant):
        if model is not None and cuda_graphs:
            graphs.cuda_graphs(model)
        if model is not None and (prepacked_linear.fits(model) if pack is None else pack):
            prepacked_linear.pack(model)
    if prepacked_linear.view(target) is not target:
        packed = prepacked_linear.packed_bytes(target) / 1e6
        pair.card += f"\nWeights packed for this processor: {packed:,.0f} MB more memory (pack=False: none)."
    return pair


def _describe_value(value: Any) -> str:
    """A value in a message: the value if it is short, else its type."""
    return repr(value) if value is None or isinstance(value, bool | int | float) else f"a {type(value).__name__}"


def _dtype(dtype: Any) -> Any:
    """Check a dtype, and replace short names."""
    named = _ALIASES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if isinstance(named, str) and named not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} is not valid. Allowed: {', '.join(_DTYPES)}, or a torch.dtype.")
    return named


def _check_devices(device_map: Any) -> None:
    """Raise ValueError for a device that does not exist."""
    import torch

    places = list(device_map.values()) if isinstance(device_map, Mapping) else [device_map]
    for place in places:
        if place is None or place == "disk" or place in _DEVICE_MAP_POLICIES:
            continue
        if str(place) == "meta":
            raise ValueError(
                f"device_map={device_map!r} would leave the model without weights: the meta device holds none. "
                f"Give None or 'cpu', the name of a device that torch sees, or {', '.join(_DEVICE_MAP_POLICIES)}."
            )
        try:
            torch.empty(0, device=place)
        except Exception as error:  # errors of many kinds, from torch or the driver
            raise ValueError(
                f"device_map={device_map!r} cannot be used here: there is no device {place!r} "
                f"({textwrap.shorten(str(error), 80)}). Allowed: None or 'cpu', the name of a device that torch sees, "
                f"{', '.join(_DEVICE_MAP_POLICIES)}, or a dict from module names to devices."
            ) from error


def _last_device(target: Any) -> Any:
    """The device of the target's last weights; offloaded ones are on none."""
    devices = [parameter.device for parameter in target.parameters() if not parameter.is_meta]
    return devices[-1] if devices else None


def load_drafter(name_or_path: str | os.PathLike[str], *, dtype: Any = "auto", device_map: Any = None) -> Any:
    """Load an EAGLE-3 or DFlash drafter alone, to give it as `assistant_model`. `load(TARGET, DRAFTER)` loads both.

    Args:
        name_or_path: a hub id or a folder.
        dtype: as in `load`.
        device_map: the device to put it on; None is the CPU.

    Returns:
        The drafter, a model of transformers.

    Raises:
        LoadError: it cannot be loaded, or is no such drafter.
        ValueError: an argument is not valid.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise ValueError(f"the drafter must be a name or a path, not {_describe_value(name_or_path)}.")
    _check_devices(device_map)
    origin = _locate(os.fspath(name_or_path), None)
    with LOADING:
        drafter = read_drafter(origin.name, origin.place, origin.local, _dtype(dtype), device_map)
    if drafter is None:
        raise not_a_drafter(origin.name, origin.place, origin.local)
    return drafter


def _load_mtp_layers(target: Any) -> None:
    """Read the target's MTP layers, if it has any. Missing tensors only raise an error when the method is used."""
    from specnb.models.mtp import load_mtp, missing_tensors, num_mtp_layers

    if num_mtp_layers(target) and not missing_tensors(target):
        with contextlib.suppress(ValueError):
            load_mtp(target)


@dataclass(frozen=True)
class _Source:
    """Where a model is read from. `place` is a hub id, or a folder if `local`; `assistant` comes with the model."""

    name: str
    place: str
    card: str
    local: bool
    assistant: str = ""


def _locate(name: str, source: str | None) -> _Source:
    """Find the model of that name. GGUF files are converted."""
    entry = REGISTERED.get(name)
    if source is None:
        source = entry.source if entry else "local" if _is_path(name) else "hub"
    if source == "local":
        return _local(name)
    if source == "package":
        if entry is None or entry.source != "package":
            packaged = ", ".join(key for key, value in REGISTERED.items() if value.source == "package")
            raise unknown_name(name, f"with source='package' there are only {packaged}")
        if entry.folder:
            return _Source(name, entry.folder, entry.card, True, entry.assistant)
        made = gguf.registered_folder(name, entry)
        return _Source(name, str(made), _card(made), True, entry.assistant)
    if entry is not None and not entry.hub:
        raise unknown_name(name, f"it comes from the package {entry.package or 'specnb'}, not from the hub")
    if entry is not None:
        return _Source(name, entry.hub, entry.card, False)
    return _Source(name, name, f"{name}, from the Hugging Face hub. Licence: see its page there.", False)


def _is_path(name: str) -> bool:
    written_as_one = name.startswith((".", "~", os.sep)) or name.lower().endswith(".gguf") or name.count("/") > 1
    return written_as_one or os.path.exists(name)


def _local(name: str) -> _Source:
    path, note = folder.find_model(name)
    if not path.is_dir():
        path = gguf.file_folder(path.absolute())
    stored = path / ASSISTANT  # as save_pair stores it
    return _Source(name, str(path), _card(path) + note, True, str(stored) if (stored / "config.json").exists() else "")


def _card(place: Path) -> str:
    card = place / gguf.CARD
    return card.read_text(encoding="utf-8").strip() if card.exists() else f"{place.name}, a local folder."


def _load(origin: _Source, dtype: Any, device_map: Any, tokenizer_optional: bool = False) -> tuple[Any, Any]:
    """The model, and its tokenizer or processor."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.utils.peft_utils import find_adapter_config_file

    # without trust_remote_code=False, transformers would ask on standard input whether to run code of the checkpoint
    options = hub_options(origin.local)
    safe = {**options, "trust_remote_code": False}
    with load_errors(origin.name, from_hub=not origin.local):
        if not origin.local and (found := find_adapter_config_file(origin.place, **options)):
            raise folder.adapter_error(origin.name, json.loads(Path(found).read_text(encoding="utf-8")))
        config = AutoConfig.from_pretrained(origin.place, **safe)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise LoadError(
                f"{origin.name!r} is a {config.model_type} model, which transformers cannot run as a causal language "
                "model."
            )
        try:
            tokenizer = _tokenizer(origin.place, config, safe)
        except (ImportError, OSError, ValueError) as error:
            none = origin.local and not folder.has_tokenizer(origin.place)
            if not tokenizer_optional and none:
                raise LoadError(
                    f"the folder {origin.name!r} has no tokenizer (tokenizer.json or the like): copy the tokenizer's "
                    "files of the model into it."
                ) from error
            if isinstance(error, json.JSONDecodeError):
                raise LoadError(
                    f"a file of the tokenizer of {origin.name!r} is not JSON ({error}): get it again."
                ) from error
            if not tokenizer_optional or (origin.local and not none):
                raise
            tokenizer = None
    with load_errors(origin.name, not origin.local, _quantised(config)), load_report(origin.name) as loading:
        model, info = AutoModelForCausalLM.from_pretrained(
            origin.place,
            dtype=dtype,
            device_map=device_map,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **safe,
        )
        loading.check(origin.name, model, info)
    return model.eval(), tokenizer


def _quantised(config: Any) -> str:
    """The quantisation method of a checkpoint; empty if it is not quantised."""
    found = getattr(config, "quantization_config", None) or {}
    method = found.get("quant_method") if isinstance(found, Mapping) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method) or "quantization_config") if found else ""


def _tokenizer(place: str, config: Any, options: dict[str, Any]) -> Any:
    """The processor of a multimodal checkpoint if it can be loaded, else the tokenizer."""
    from transformers import AutoProcessor, AutoTokenizer

    if config.get_text_config() is not config:
        try:
            processor = AutoProcessor.from_pretrained(place, **options)
            text_tokenizer(processor)
            return processor
        except (ImportError, OSError, ValueError, AttributeError):
            pass  # text only: an image library or the processor is missing
    return AutoTokenizer.from_pretrained(place, **options)
