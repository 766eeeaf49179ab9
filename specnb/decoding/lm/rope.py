"""Rotary embeddings that change with the length of the text limit the length of a draft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def draft_limit(config: Any, length: int) -> int | None:
    """The most tokens that can be drafted after `length` tokens, because of the rotary embedding.

    "longrope" (2402.13753) has other factors from `original_max_position_embeddings` on. A pass uses the same factors
    for all its tokens, so no block may cross that length. "dynamic" (NTK) scales with the length of each pass beyond
    the original length, so nothing can be drafted there.

    Returns:
        None if the rotary embedding does not depend on the length.
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
    """The length that the model was trained with before its context was extended."""
    top_level = getattr(config, "original_max_position_embeddings", None)
    found = top_level if top_level is not None else rope.get("original_max_position_embeddings")
    return found if found is not None else getattr(config, "max_position_embeddings", None)
