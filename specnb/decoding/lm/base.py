"""LM: a language model whose kv cache follows the rows. It decides what is cached, computed and rolled back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb import compat
from specnb.decoding.contracts import Row
from specnb.decoding.lm.rope import draft_limit
from specnb.decoding.lm.snapshots import MAX_REPLAY, Snapshots
from specnb.decoding.lm.stepped import view_mixers
from specnb.runtime.prepare import prepare
from specnb.runtime.state_capture import StateCapture


@dataclass(frozen=True)
class LMOptions:
    """What a drafter needs of an LM.

    Args:
        hidden_states: keep in `LM.hidden_states` the hidden states of all tokens that a `logits()` call computed
            ("all"), or only of those whose logits were requested ("kept"). None keeps none.
        layers: whose states are kept, side by side, numbered as in transformers' `hidden_states` (0: the embeddings);
            empty for the last ones, after the final norm.
        clamp_ids: ids beyond the model's vocabulary (from a target with a larger one) are read as its last token.
    """

    hidden_states: Literal["all", "kept"] | None = None
    layers: tuple[int, ...] = ()
    clamp_ids: bool = False


class LM:
    """A causal language model that follows `rows`. Subclasses run the passes (`_forward`).

    `logits()` brings the cache to a row's tokens plus some drafted ones and computes only the new ones. Drafted tokens
    of an earlier call that were rejected are rolled back.

    Args:
        model: any transformers causal LM; it is not changed.
        rows: the rows to follow.
        options: what a drafter needs.

    Attributes:
        hidden_states: by row index, the position of the first state and the states `[n, size]` after the final norm, or
            `[n, layers * size]` of `LMOptions.layers`.
        passes: number of `logits()` calls.
        replayed_tokens: by row index, how many cached tokens the last call fed again after rolling back states.
    """

    drafts_first = True
    """Whether drafted tokens may be in the pass that processes the prompt."""

    def __init__(self, model: PreTrainedModel, rows: Sequence[Row], options: LMOptions) -> None:
        self.config = model.config.get_text_config(decoder=True)
        self.model, self.runtime = prepare(model)
        if compat.is_stateful(model):
            self.model = view_mixers(self.model)
        self._max_token_id = int(model.get_input_embeddings().weight.shape[0]) - 1 if options.clamp_ids else None
        self._capture: StateCapture | None = None
        if options.hidden_states:
            self._capture = StateCapture(self.model, options.layers)
            self.model = self._capture.view
        self.device = model_device(model)
        self.vocab_size = output_vocab_size(self.config)
        self.passes = 0
        self.replayed_tokens: dict[int, int] = {}
        self.hidden_states: dict[int, tuple[int, Tensor]] = {}
        self._stores_all_hidden_states = options.hidden_states == "all"
        self._cached = {row.index: 0 for row in rows}  # number of committed tokens in the cache
        self._proposed: dict[int, list[int]] = {row.index: [] for row in rows}  # drafted tokens cached after them
        self._prefill_chunk_size: int | None = None
        self._snapshots: Snapshots | None = None  # of a cache with running states, for one row

    @property
    def state_snapshot_bytes(self) -> int:
        """Memory of the copies of running states."""
        return 0 if self._snapshots is None else self._snapshots.nbytes

    @cached_property
    def limit(self) -> int | None:
        """Number of positions that the model was made for; None if positions have no end."""
        return max_positions(self.config)

    @cached_property
    def hard_limit(self) -> bool:
        """Whether there are no positions past the limit, as with learned position embeddings."""
        return has_learned_positions(self.config)

    @cached_property
    def _rope_varies(self) -> bool:
        """Whether the rotary embedding depends on the length of the text."""
        return draft_limit(self.config, 0) is not None

    def max_draft_tokens(self, length: int) -> int | None:
        """The most tokens that can be drafted after `length` tokens without changing their logits; None for any number.

        The limit is the end of the positions, or a rotary embedding that changes with the length.
        """
        free = None if self.limit is None else max(0, self.limit - length)
        rope = draft_limit(self.config, length) if self._rope_varies else None
        return free if rope is None else rope if free is None else min(free, rope)

    def logits(
        self, rows: Sequence[Row], draft_tokens: Sequence[Sequence[int]], num_logits: Sequence[int]
    ) -> list[Tensor]:
        """Run the model over what is not cached yet.

        Args:
            rows: some of the rows; the others are dropped from the cache.
            draft_tokens: the tokens after each row's ids.
            num_logits: for how many of the last tokens of `rows[i].ids + draft_tokens[i]` logits are needed.

        Returns:
            For each row `[num_logits[i], vocab]`: the logits of the token that follows each.
        """
        self.passes += 1
        self.hidden_states.clear()
        self.keep_rows(rows)
        starts = [self._start(row, draft_tokens[r], num_logits[r]) for r, row in enumerate(rows)]
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
        # rows with fewer new tokens end at an earlier column
        first = min(len(f) - k for f, k in zip(new_tokens, num_logits, strict=True))
        out = self._forward(rows, new_tokens, starts, width - first)
        self.mark_cached(rows, draft_tokens)
        return [out[r, len(f) - num_logits[r] - first : len(f) - first] for r, f in enumerate(new_tokens)]

    def advance(self, rows: Sequence[Row], draft_tokens: Sequence[Sequence[int]]) -> None:
        """Bring the cache to `rows[i].ids + draft_tokens[i]`, without logits."""
        self.keep_rows(rows)
        starts = [self._start(row, draft_tokens[r], 0) for r, row in enumerate(rows)]
        new_tokens = [
            slice_concatenated(row.ids, draft_tokens[r], starts[r], len(row.ids) + len(draft_tokens[r]))
            for r, row in enumerate(rows)
        ]
        if any(new_tokens):
            self._forward(rows, new_tokens, starts, 0)
        self.mark_cached(rows, draft_tokens)

    # ---- what is cached
    def keep_rows(self, rows: Sequence[Row]) -> None:
        """Drop all other rows from the cache."""

    def rewind(self, row: int, length: int) -> None:
        """Roll the row with index `row` back to its first `length` tokens."""
        if length < self._cached[row]:
            self._cached[row], self._proposed[row] = length, []

    def mark_cached(self, rows: Sequence[Row], draft_tokens: Sequence[Sequence[int]]) -> None:
        """Note that the cache holds exactly `rows[i].ids + draft_tokens[i]`."""
        for row, proposed in zip(rows, draft_tokens, strict=True):
            self._cached[row.index], self._proposed[row.index] = len(row.ids), list(proposed)
            if self._snapshots is not None:
                self._snapshots.length = len(row.ids) + len(proposed)

    def _num_cached(self, row: Row, draft_tokens: Sequence[int], num_logits: int) -> int:
        """How many of the tokens `row.ids + draft_tokens` are cached and need no pass.

        The last `num_logits` tokens always need one, for their logits.
        """
        n, length = self._cached[row.index], len(row.ids)
        for token in self._proposed[row.index]:
            i = n - length
            if (row.ids[n] if i < 0 else draft_tokens[i] if i < len(draft_tokens) else None) != token:
                break
            n += 1
        return min(n, length + len(draft_tokens) - num_logits)

    def _start(self, row: Row, draft_tokens: Sequence[int], num_logits: int) -> int:
        """The first position that a pass must compute. Rolls running states back, and copies them before a draft."""
        start = self._num_cached(row, draft_tokens, num_logits)
        if self._snapshots is None:
            return start
        agreed, start = start, self._snapshots.roll_back(start)
        self.replayed_tokens[row.index] = agreed - start
        if not draft_tokens:
            return start
        known = len(row.ids) - max(0, num_logits - len(draft_tokens))  # committed tokens that need no logits
        if known - start > (MAX_REPLAY if start else 0):  # a prompt always, or a rejection would repeat it
            self._forward([row], [row.ids[start:known]], [start], 0)
            start = self._snapshots.length = known
        if start <= len(row.ids):
            self._snapshots.save()
        return start

    def _replay_to_end(self, row: Row) -> bool:
        """Bring running states to all tokens of the row but the last. Returns whether that took a pass."""
        length = len(row.ids) - 1
        if self._snapshots is None or (start := self._snapshots.roll_back(length)) >= length:
            return False
        self._forward([row], [row.ids[start:length]], [start], 0)
        return True

    # ---- one pass
    def _forward(
        self, rows: Sequence[Row], new_tokens: Sequence[Sequence[int]], starts: list[int], num_logits: int
    ) -> Tensor:
        """Run one pass.

        Args:
            new_tokens: `new_tokens[i]` are at the positions from `starts[i]` on.
            num_logits: number of last columns that need logits; 0: the head need not run.

        Returns:
            Logits `[rows, num_logits, vocab]`.
        """
        raise NotImplementedError

    def _store_hidden_states(
        self,
        rows: Sequence[Row],
        new_tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        num_logits: int,
        states: Tensor,
    ) -> None:
        """Keep the states `[rows, width, size]` of a pass, or a part of them, in `hidden_states`."""
        missing = max(map(len, new_tokens)) - states.shape[1]  # some models drop the columns without logits
        for r, row in enumerate(rows):
            first = max(missing, 0 if self._stores_all_hidden_states else len(new_tokens[r]) - max(num_logits, 1))
            new = states[r, first - missing : len(new_tokens[r]) - missing]
            if not self._stores_all_hidden_states:  # a copy, so that the states of a long prompt can be freed
                self.hidden_states[row.index] = starts[r] + first, new.clone()
            elif row.index in self.hidden_states:  # a later chunk of the same call
                start, old = self.hidden_states[row.index]
                self.hidden_states[row.index] = start, torch.cat([old[: starts[r] - start], new])
            else:
                self.hidden_states[row.index] = starts[r], new

    def export_cache(self, cache: Any, rows: Sequence[Row]) -> Any:
        """Fill a transformers cache as plain decoding would: with all tokens of the rows but the last.

        Returns:
            The cache. None if the rows did not end at the same length, or if rows with padding were decoded one at a
            time.
        """
        raise NotImplementedError


def output_vocab_size(config: Any) -> int:
    """The number of tokens that a model gives logits for. Inkling drops the padding of its head."""
    return min(int(config.vocab_size), getattr(config, "unpadded_vocab_size", None) or int(config.vocab_size))


def max_positions(config: Any) -> int | None:
    """Number of positions that the model of a (text) config was made for; None if positions have no end."""
    limit = getattr(config, "max_position_embeddings", None)
    return limit if limit is not None and limit > 0 else None


def has_learned_positions(config: Any) -> bool:
    """Whether a (text) config has learned position embeddings, which have an end."""
    return not hasattr(config, "rope_parameters") and not hasattr(config, "rope_theta")


def model_device(model: PreTrainedModel) -> torch.device:
    """The device of the model's token ids."""
    device: torch.device = model.get_input_embeddings().weight.device
    if device.type != "meta":
        return device
    # offloaded by accelerate, whose hooks load the weights
    return torch.device(getattr(compat.hook_of(model), "execution_device", None) or "cpu")


def slice_concatenated(ids: Sequence[int], draft_tokens: Sequence[int], start: int, stop: int) -> list[int]:
    """(ids + draft_tokens)[start:stop], without building the whole list."""
    n = len(ids)
    return [*ids[start:stop], *draft_tokens[max(0, start - n) : max(0, stop - n)]]
