"""RowwiseLM: several rows of a model that can only decode one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from specnb.decoding.contracts import Row
from specnb.decoding.lm.base import LM


class RowwiseLM(LM):
    """One LM per row; each row's passes run alone.

    Args:
        lms: by row index. All follow one row of the same model.
    """

    def __init__(self, lms: Mapping[int, LM]) -> None:
        self.lms = dict(lms)
        one = next(iter(self.lms.values()))
        self.model, self.config, self.device, self.vocab_size = one.model, one.config, one.device, one.vocab_size
        self.runtime = one.runtime
        self.drafts_first = one.drafts_first
        self.passes = 0
        self.replayed_tokens: dict[int, int] = {}
        self.hidden_states: dict[int, tuple[int, Tensor]] = {}

    def logits(
        self, rows: Sequence[Row], draft_tokens: Sequence[Sequence[int]], num_logits: Sequence[int]
    ) -> list[Tensor]:
        """The rows' logits, see `LM.logits`."""
        self.passes += 1
        out = [
            self.lms[row.index].logits([row], [e], [k])[0]
            for row, e, k in zip(rows, draft_tokens, num_logits, strict=True)
        ]
        self.replayed_tokens = {row.index: n for row in rows for n in self.lms[row.index].replayed_tokens.values()}
        self.hidden_states = {row.index: found for row in rows for found in self.lms[row.index].hidden_states.values()}
        return out

    @property
    def state_snapshot_bytes(self) -> int:
        """Memory of the copies of running states, of all rows."""
        return sum(lm.state_snapshot_bytes for lm in self.lms.values())

    def advance(self, rows: Sequence[Row], draft_tokens: Sequence[Sequence[int]]) -> None:
        """Bring the caches to these tokens, without logits."""
        self._each(rows, draft_tokens, lambda lm, row, e: lm.advance([row], [e]))

    def mark_cached(self, rows: Sequence[Row], draft_tokens: Sequence[Sequence[int]]) -> None:
        """Note that the caches hold exactly these tokens."""
        self._each(rows, draft_tokens, lambda lm, row, e: lm.mark_cached([row], [e]))

    def rewind(self, row: int, length: int) -> None:
        """Roll one row back to its first `length` tokens."""
        self.lms[row].rewind(row, length)

    def export_cache(self, cache: Any, rows: Sequence[Row]) -> Any:
        """None: the rows' caches cannot be joined."""
        return None

    def _each(
        self, rows: Sequence[Row], draft_tokens: Sequence[Sequence[int]], do: Callable[[LM, Row, Sequence[int]], None]
    ) -> None:
        for row, e in zip(rows, draft_tokens, strict=True):
            do(self.lms[row.index], row, e)
