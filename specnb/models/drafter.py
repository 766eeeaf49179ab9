"""Drafters that are no language models by themselves: which kind a checkpoint holds, by its config, and loading it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specnb.models.errors import load_errors
from specnb.models.hub import hub_options


def drafter_kind(place: str, options: Mapping[str, Any]) -> str | None:
    """The method that a checkpoint is a drafter for: "eagle3"; None for any other checkpoint, or none at all.

    Args:
        place: a folder or hub id.
        options: for transformers' look-up of files (`hub_options`).
    """
    from specnb.models.eagle3_files import is_eagle3_config, read_config

    try:
        raw = read_config(place, **options)
    except Exception:  # of any kind: whoever loads the model says what is wrong with it
        return None
    return "eagle3" if is_eagle3_config(raw) else None


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
    if drafter_kind(place, options) is None:
        return None
    from specnb.models.eagle3_files import load_eagle3

    with load_errors(name, from_hub=not local):
        return load_eagle3(name, place, dtype, device, **options)
