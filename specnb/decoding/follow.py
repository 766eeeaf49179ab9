"""Which LM follows the rows of a model: the fast one, or the one that does what transformers does, one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.decoding.batch import planes
from specnb.decoding.cached import CachedLM, own_masks
from specnb.decoding.contracts import Row, Unsupported
from specnb.decoding.feed import (
    PER_TOKEN,
    Feed,
    cache_keyword,
    caches_more,
    drops_cache,
    forward_parameters,
    own_positions,
    own_preparation,
    types_at_first,
)
from specnb.decoding.lm import LM
from specnb.decoding.one_by_one import OneByOne
from specnb.decoding.prepared import PreparedLM, arguments_of
from specnb.decoding.store import other_layers


@dataclass(frozen=True)
class Given:
    """What `generate()` prepared for the target.

    `prompts` `[rows, length]` and `arguments` are as they came; `feed` has what is in the arguments aligned with the rows, without
    padding; `past` is the cache to use, empty or holding the beginning of the only row.
    """

    prompts: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))
    arguments: Mapping[str, Any] = field(default_factory=dict)
    feed: Feed = field(default_factory=Feed)
    past: Any = None

    def as_prepared(self, row: Row) -> Mapping[str, Any] | None:
        """The arguments, where `row` is the only one and came without padding, for decoding with a cache."""
        if self.arguments.get("use_cache") is False:
            return None
        return self.arguments if self.prompts.tolist() == [row.ids[: row.prompt_length]] else None


@dataclass(frozen=True)
class Size:
    """Of a cache: the token slots to allocate at first, and the chunk in which long prompts are processed."""

    capacity: int = 0
    prefill_chunk_size: int | None = None


_AHEAD = 64  # tokens that a draft may be ahead of a row's end


def follow(
    model: PreTrainedModel,
    rows: Sequence[Row],
    size: Size,
    *,
    given: Given | None = None,
    role: str = "target",
    rolls_back: bool = True,
    foreign_ids: bool = False,
    hidden_states: Literal["all", "kept"] | None = None,
    fast: Callable[..., CachedLM] = CachedLM,
) -> LM:
    """The LM for `rows` of `model`.

    Args:
        given: what `generate()` prepared; None for a draft model, which is asked to prepare the same for itself.
        role: "target" or "draft model", for messages.
        rolls_back: whether drafts will be rejected.
        fast: makes the LM of a model that keeps to the standard.

    Raises Unsupported for a model or rows that cannot be followed, naming what is in the way.
    """
    if rolls_back:
        check_rollback(model, role)
    feed = given.feed if given else Feed()
    past = given.past if given else None
    more: dict[str, Any] = {"foreign_ids": foreign_ids, "hidden_states": hidden_states}
    if not keeps_to_standard(model, _longest(rows)):
        if role == "target" and size.prefill_chunk_size is not None:
            raise Unsupported(
                f"prefill_chunk_size={size.prefill_chunk_size} cannot be followed with {type(model).__name__}, which prepares its "
                "inputs in a way of its own: leave it out."
            )
        if len(rows) == 1:
            arguments = given.as_prepared(rows[0]) if given else None
            extras = feed.with_positions()
            return PreparedLM(model, rows, arguments=arguments, extras=extras, past=past, rolls_back=rolls_back, **more)
        feeds = {row.index: of_row(model, feed, r, row).with_positions() for r, row in enumerate(rows)}
        lms: dict[int, LM] = {
            row.index: PreparedLM(model, [row], extras=feeds[row.index], rolls_back=rolls_back, **more) for row in rows
        }
        return OneByOne(lms)
    if given is None:
        feed = _own_feed(model, rows)
    more |= {"capacity": size.capacity, "prefill_chunk_size": size.prefill_chunk_size}
    if len(rows) > 1 and own_masks(model, feed):
        return OneByOne(
            {row.index: fast(model, [row], feed=of_row(model, feed, r, row), **more) for r, row in enumerate(rows)}
        )
    return fast(model, rows, feed=feed, past=past if len(rows) == 1 else None, **more)


def check(model: PreTrainedModel, rows: Sequence[Row], given: Given, rolls_back: bool) -> None:
    """Raise Unsupported for a target, or rows of it, of which can be told without a pass that they cannot be followed."""
    standard = keeps_to_standard(model, _longest(rows))
    if rolls_back:
        check_rollback(model, "target")
        if not standard:
            check_switch(model)
    if len(rows) > 1 and (not standard or own_masks(model, given.feed)):
        for r, row in enumerate(rows):
            of_row(model, given.feed, r, row)


def _longest(rows: Sequence[Row]) -> int:
    """Tokens that no row, nor a draft behind it, will outgrow."""
    return max(len(row.ids) + getattr(row, "room", 0) for row in rows) + _AHEAD


def keeps_to_standard(model: PreTrainedModel, longest: int | None = None) -> bool:
    """Whether `CachedLM` can feed the model rows of at most `longest` tokens and keep its cache."""
    if own_preparation(model, longest) or caches_more(model) or other_layers(model.config):
        return False
    return cache_keyword(parameters := forward_parameters(type(model))) in parameters


def check_rollback(model: PreTrainedModel, role: str) -> None:
    """Raise Unsupported, naming model and layers, where a rejected draft cannot be taken back."""
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        kinds = ", ".join(sorted({*other_layers(model.config).values()} - {"DynamicIndexedLayer"}))
        kinds = kinds or "kept outside the cache"
        raise Unsupported(
            f"the {role} ({name}) has layers with a running state ({kinds}) that cannot be rolled back after a rejection: "
            + ("use method='plain', or a target" if role == "target" else "use a draft model")
            + " whose layers are all attention layers."
        )


def check_switch(model: PreTrainedModel) -> None:
    """Raise Unsupported for a text that outgrows `original_max_position_embeddings` where transformers itself loses its beginning."""
    if drops_cache(model) and cache_keyword(forward_parameters(type(model))) == "past_key_values":
        limit = model.config.get_text_config(decoder=True).original_max_position_embeddings
        raise Unsupported(
            f"the text may outgrow {limit} tokens (original_max_position_embeddings), where {type(model).__name__} drops its cache, "
            "and this transformers loses what was in it: give a smaller max_new_tokens, update transformers, or use method='plain'."
        )


def _own_feed(model: PreTrainedModel, rows: Sequence[Row]) -> Feed:
    """The positions that a draft model prepares for itself, where it does so."""
    if not own_positions(model) or own_preparation(model):
        return Feed()
    prepared = [arguments_of(model, row.ids)["position_ids"] for row in rows]
    width = max(one.shape[-1] for one in prepared)
    table = torch.cat([torch.nn.functional.pad(one, (0, width - one.shape[-1])) for one in prepared], -2)
    lengths = [len(row.ids) for row in rows]
    return Feed(planes=planes(table, [row.ids for row in rows], [0] * len(rows)), lengths=lengths)


def of_row(model: PreTrainedModel, feed: Feed, r: int, row: Row) -> Feed:
    """What belongs to one of several rows. Raises Unsupported for what cannot be told apart."""
    n, extras = len(row.ids), {}
    for name, value in feed.extras.items():
        if name not in PER_TOKEN:
            raise Unsupported(
                f"several rows with {name} cannot be decoded with {type(model).__name__}, which takes one row at a time here: "
                "generate the prompts one by one."
            )
        extras[name] = value[min(r, len(value) - 1) :][:1, :n]
    own = None if feed.planes is None else feed.planes[..., min(r, feed.planes.shape[-2] - 1), None, :n]
    return Feed(extras, own, types_at_first(model), [n])
