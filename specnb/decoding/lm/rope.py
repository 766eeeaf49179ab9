"""Rotary embeddings that change with the length of the text: how far a draft may go without changing what stands before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def draft_limit(config: Any, length: int) -> int | None:
    """Most tokens that may be drafted behind `length` tokens; None where the rotary embedding does not depend on the length.

    "longrope" (2402.13753) has other factors from `original_max_position_embeddings` on, and a pass uses one kind for all of its
    tokens, so no block may cross that length. "dynamic" (NTK) scales with the length of each pass beyond the original, so
    there nothing can be drafted.
    """
    limits = []
    for rope in _rope_parameters(config):
        kind, original = rope.get("rope_type"), _original_length(config, rope)
        if kind == "longrope" and original is not None and length <= original:
            limits.append(original - length)
        elif kind == "dynamic" and original is not None:
            limits.append(max(0, original - length))
    return min(limits, default=None)


def _rope_parameters(config: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary embeddings of a config: one, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return
    if "rope_type" in rope:
        yield rope
    yield from (one for one in rope.values() if isinstance(one, Mapping) and "rope_type" in one)


def _original_length(config: Any, rope: Mapping[str, Any]) -> int | None:
    own = getattr(config, "original_max_position_embeddings", None)
    found = own if own is not None else rope.get("original_max_position_embeddings")
    return found if found is not None else getattr(config, "max_position_embeddings", None)
