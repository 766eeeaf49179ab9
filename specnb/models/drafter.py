"""Drafters that are no language models by themselves: which kind a checkpoint holds, by its config, and loading it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specnb.models.errors import LoadError, load_errors
from specnb.models.hub import hub_options


def drafter_kind(place: str, options: Mapping[str, Any]) -> str | None:
    """The method that a checkpoint is a drafter for, "eagle3" or "dflash"; None for any other checkpoint, or none.

    Args:
        place: a folder or hub id.
        options: for transformers' look-up of files (`hub_options`).
    """
    return _kind(_read_config(place, options))


def _read_config(place: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of config.json; nothing where it cannot be read."""
    from specnb.models.eagle3_files import read_config

    try:
        return read_config(place, **options)
    except Exception:  # of any kind: whoever loads the model says what is wrong with it
        return {}


def _kind(raw: Mapping[str, Any]) -> str | None:
    from specnb.models.dflash import is_dflash_config
    from specnb.models.eagle3_files import is_eagle3_config

    return "dflash" if is_dflash_config(raw) else "eagle3" if is_eagle3_config(raw) else None


def not_a_drafter(name: str, place: str, local: bool) -> LoadError:
    """The error about a model that `read_drafter` found to be none: it cannot be read, or is of another kind."""
    from specnb.models.eagle3_files import read_config

    try:
        with load_errors(name, from_hub=not local):
            read_config(place, **hub_options(local))
    except LoadError as error:
        return error
    return LoadError(f"{name!r} is no EAGLE-3 or DFlash drafter: load other models with specnb.load.")


def read_drafter(name: str, place: str, local: bool, dtype: Any, device: Any) -> Any:
    """Load a drafter; None if the checkpoint is not one.

    Args:
        name: its name, for messages.
        place: a folder or hub id.
        local: whether it is a folder.
        dtype: a torch.dtype or its name; "auto" is that of the stored weights.
        device: where to put it; None is the CPU.

    Raises:
        LoadError: it cannot be loaded.
    """
    options = hub_options(local)
    raw = _read_config(place, options)
    kind, other = _kind(raw), raw.get("speculators_model_type")
    if kind is None and other is not None:
        raise LoadError(
            f"{name!r} is a drafter of the type {other!r}, which is not built here: give one of the types eagle3, "
            "dflash or dflash2."
        )
    if kind is None:
        return None
    from specnb.models.dflash import load_dflash
    from specnb.models.eagle3_files import load_eagle3

    with load_errors(name, from_hub=not local):
        if kind == "dflash":
            return load_dflash(name, place, raw, dtype, device, **options)
        return load_eagle3(name, place, dtype, device, raw, **options)
