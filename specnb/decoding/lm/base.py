"""LM: a language model whose cache follows the rows. It decides what is cached, what must be computed, what is forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.decoding.contracts import Row
from specnb.decoding.lm.rope import draft_limit
from specnb.runtime.module_view import Capture, module_view
from specnb.runtime.prepare import prepare


@dataclass(frozen=True)
class LMOptions:
    """What a drafter wants of an LM.

    Args:
        hidden_states: keep in `LM.hidden` the last hidden states of all tokens that a `logits()` call computed ("all"), or of
            those whose logits were asked for ("kept"); None keeps none.
        clamp_ids: ids beyond the model's vocabulary (of a target with a larger one) are read as its last token.
    """

    hidden_states: Literal["all", "kept"] | None = None
    clamp_ids: bool = False


class LM:
    """A causal language model that follows `rows`; how its passes run is up to the subclass (`_forward`).

    `logits()` brings the cache to a row's tokens plus some proposed ones and computes only what is new. Tokens that an earlier
    call proposed and that did not make it into the row are forgotten. Tokens that are cached already cost nothing.

    Args:
        model: any transformers causal LM; never changed.
        rows: the rows it will follow.
        options: what a drafter wants of it.
    """

    drafts_first = True
    """Whether drafted tokens may be in the pass that processes the prompt."""

    def __init__(self, model: PreTrainedModel, rows: Sequence[Row], options: LMOptions) -> None:
        self.config = model.config.get_text_config(decoder=True)
        self.model, self.runtime = prepare(model)
        self._max_token_id = int(model.get_input_embeddings().weight.shape[0]) - 1 if options.clamp_ids else None
        self._capture: Capture | None = None
        if options.hidden_states:
            body = model.base_model_prefix
            self._capture = Capture(getattr(self.model, body))
            self.model = module_view(self.model, {body: self._capture})
        self.device = model_device(model)
        self.vocab_size = int(self.config.vocab_size)
        self.passes = 0  # calls of logits()
        self.hidden_states: dict[
            int, tuple[int, Tensor]
        ] = {}  # by row index: first position, states [n, size] after the norm
        self._stores_all_hidden_states = options.hidden_states == "all"
        self._cached = {row.index: 0 for row in rows}  # tokens of row.ids that the cache holds for sure
        # cached after those: the last call's proposals
        self._proposed: dict[int, list[int]] = {row.index: [] for row in rows}
        self._prefill_chunk_size: int | None = None

    @property
    def limit(self) -> int | None:
        """Most tokens the model was made for; None where positions have no end."""
        return positions(self.config)

    @property
    def hard_limit(self) -> bool:
        """Whether positions beyond the limit do not exist (a table of learned positions)."""
        return has_learned_positions(self.config)

    def max_draft_tokens(self, length: int) -> int | None:
        """Most tokens that may be drafted behind `length` tokens without changing what the model says of them; None: any."""
        free = None if self.limit is None else max(0, self.limit - length)
        rope = draft_limit(self.config, length)
        return free if rope is None else rope if free is None else min(free, rope)

    def logits(
        self, rows: Sequence[Row], draft_tokens: Sequence[Sequence[int]], num_logits: Sequence[int]
    ) -> list[Tensor]:
        """Logits `[keep[i], vocab]` of the last `keep[i]` tokens of `rows[i].ids + extra[i]`: what may follow each."""
        self.passes += 1
        self.hidden_states.clear()
        self.keep_rows(rows)
        starts = [self._num_cached(row, draft_tokens[r], num_logits[r]) for r, row in enumerate(rows)]
        ends = [len(row.ids) + len(draft_tokens[r]) for r, row in enumerate(rows)]
        while self._prefill_chunk_size:
            stops = [
                max(s, min(e - k, s + self._prefill_chunk_size))
                for e, s, k in zip(ends, starts, num_logits, strict=True)
            ]
            if max(e - s - k for e, s, k in zip(ends, starts, num_logits, strict=True)) < self._prefill_chunk_size:
                break
            new_tokens = [
                slice_concatenated(row.ids, draft_tokens[r], starts[r], stops[r]) for r, row in enumerate(rows)
            ]
            self._forward(rows, new_tokens, starts, 0)
            starts = stops
        new_tokens = [slice_concatenated(row.ids, draft_tokens[r], starts[r], ends[r]) for r, row in enumerate(rows)]
        width = max(map(len, new_tokens))
        # rows of different lengths end at different columns
        first = min(len(f) - k for f, k in zip(new_tokens, num_logits, strict=True))
        out = self._forward(rows, new_tokens, starts, width - first)
        self.mark_cached(rows, draft_tokens)
        return [out[r, len(f) - num_logits[r] - first : len(f) - first] for r, f in enumerate(new_tokens)]

    def advance(self, rows: Sequence[Row], draft_tokens: Sequence[Sequence[int]]) -> None:
        """Bring the cache to the same tokens, without any logits."""
        self.keep_rows(rows)
        starts = [self._num_cached(row, draft_tokens[r], 0) for r, row in enumerate(rows)]
        new_tokens = [
            slice_concatenated(row.ids, draft_tokens[r], starts[r], len(row.ids) + len(draft_tokens[r]))
            for r, row in enumerate(rows)
        ]
        if any(new_tokens):
            self._forward(rows, new_tokens, starts, 0)
        self.mark_cached(rows, draft_tokens)

    # ---- what is cached
    def keep_rows(self, rows: Sequence[Row]) -> None:
        """Drop the rows that left."""

    def rewind(self, row: int, length: int) -> None:
        """Only the first `length` tokens of this row are still what they were."""
        if length < self._cached[row]:
            self._cached[row], self._proposed[row] = length, []

    def mark_cached(self, rows: Sequence[Row], draft_tokens: Sequence[Sequence[int]]) -> None:
        """The cache holds exactly these tokens."""
        for row, proposed in zip(rows, draft_tokens, strict=True):
            self._cached[row.index], self._proposed[row.index] = len(row.ids), list(proposed)

    def _num_cached(self, row: Row, draft_tokens: Sequence[int], num_logits: int) -> int:
        """How many tokens of row.ids + extra need no pass; the last `num_logits` always do, since their logits are wanted."""
        n, length = self._cached[row.index], len(row.ids)
        for token in self._proposed[row.index]:
            behind = n - length
            if (row.ids[n] if behind < 0 else draft_tokens[behind] if behind < len(draft_tokens) else None) != token:
                break
            n += 1
        return min(n, length + len(draft_tokens) - num_logits)

    # ---- one pass
    def _forward(
        self, rows: Sequence[Row], new_tokens: Sequence[Sequence[int]], starts: list[int], num_logits: int
    ) -> Tensor:
        """Run `fed[i]` at positions from `starts[i]` on; logits of the last `num_logits` columns (0: the head is not run)."""
        raise NotImplementedError

    def _store_hidden_states(
        self,
        rows: Sequence[Row],
        new_tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        num_logits: int,
        states: Tensor,
    ) -> None:
        missing = max(map(len, new_tokens)) - states.shape[1]  # some models drop the columns whose logits nobody wants
        for r, row in enumerate(rows):
            first = max(missing, 0 if self._stores_all_hidden_states else len(new_tokens[r]) - max(num_logits, 1))
            new = states[r, first - missing : len(new_tokens[r]) - missing]
            if not self._stores_all_hidden_states:  # a copy, so that the states of a long prompt can go
                self.hidden_states[row.index] = starts[r] + first, new.clone()
            elif row.index in self.hidden_states:  # a later chunk of the same call
                start, old = self.hidden_states[row.index]
                self.hidden_states[row.index] = start, torch.cat([old[: starts[r] - start], new])
            else:
                self.hidden_states[row.index] = starts[r], new

    def export_cache(self, cache: Any, rows: Sequence[Row]) -> Any:
        """Leave the rows' tokens but the last in a transformers cache, as plain decoding would have; returns it.

        None where that cannot be: the rows did not end together, or one that takes rows one at a time had padding.
        """
        raise NotImplementedError


def positions(config: Any) -> int | None:
    """Most tokens that a (text) config's model was made for; None where positions have no end."""
    limit = getattr(config, "max_position_embeddings", None)
    return limit if limit is not None and limit > 0 else None


def has_learned_positions(config: Any) -> bool:
    """Whether a (text) config's positions are a table of learned ones, which has an end."""
    return not hasattr(config, "rope_parameters") and not hasattr(config, "rope_theta")


def model_device(model: PreTrainedModel) -> torch.device:
    """Where the model takes its token ids."""
    device: torch.device = model.get_input_embeddings().weight.device
    if device.type != "meta":
        return device
    # offloaded by accelerate: its hooks bring the weights
    return torch.device(getattr(getattr(model, "_hf_hook", None), "execution_device", None) or "cpu")


def slice_concatenated(ids: Sequence[int], draft_tokens: Sequence[int], start: int, stop: int) -> list[int]:
    """(ids + extra)[start:stop] without building the sum."""
    n = len(ids)
    return [*ids[start:stop], *draft_tokens[max(0, start - n) : max(0, stop - n)]]
