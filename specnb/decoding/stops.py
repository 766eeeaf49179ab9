"""When rows end. Checked after every token, so that nothing after a stop is emitted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from specnb.decoding.contracts import Row, input_ids


class StoppingChecker:
    """The stopping criteria that `generate()` prepared, sorted into simple ones and those that must be called.

    Args:
        criteria: transformers stopping criteria.
        cancel: when set, rows end before their next step.

    Attributes:
        max_length: the most tokens of a (padded) row; None without a limit. Rows count it in `remaining_tokens`.
        pads: a row that has ended is padded while others go on, as in generate() with an end-of-sequence token.
            Otherwise it goes on generating.
        lockstep: all rows must grow in lockstep, since a criterion looks at all of them or rows generate past their
            end.
    """

    def __init__(self, criteria: Sequence[Any], cancel: threading.Event | None = None) -> None:
        self.cancel = cancel
        self.eos: set[int] = set()
        self.max_length: int | None = None
        self.deadline: float | None = None
        self.other = []
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos.update(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:
                self.max_length = min(criterion.max_length, self.max_length or criterion.max_length)
            elif type(criterion) is MaxTimeCriteria:
                deadline = criterion.initial_timestamp + criterion.max_time
                self.deadline = min(deadline, self.deadline or deadline)
            else:
                self.other.append(criterion)
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.lockstep = any(type(c) is not StopStringCriteria or not self.pads for c in self.other)

    def end(self, rows: Sequence[Row], scores: tuple[Tensor, ...] | None = None) -> bool:
        """Set the `finish_reason` of rows that end with their last token.

        Args:
            rows: they have grown by one token each.
            scores: what generate() would pass to the criteria.

        Returns:
            Whether any row has ended.
        """
        reasons = self._reasons(rows, scores) if self.other else None
        late = self.deadline is not None and time.time() > self.deadline
        ended = False
        for i, row in enumerate(rows):
            if row.finish_reason is not None:
                continue
            if row.ids[-1] in self.eos:
                row.finish_reason = "eos"
            elif reasons and reasons[i]:
                row.finish_reason = reasons[i]
            elif row.remaining_tokens <= 0:
                row.finish_reason = "length"
            elif late:
                row.finish_reason = "max_time"
            else:
                continue
            ended = True
        return ended

    def _reasons(self, rows: Sequence[Row], scores: tuple[Tensor, ...] | None) -> list[str | None]:
        """The finish reason of each row by the other criteria. All are called, once per token, as in generate()."""
        reasons: list[str | None] = [None] * len(rows)
        for criterion in self.other:
            ids = input_ids(rows)
            name = "stop_string" if isinstance(criterion, StopStringCriteria) else "stopping_criteria"
            for i, done in enumerate(_done_by_row(criterion, criterion(ids, scores), ids)):
                reasons[i] = reasons[i] or (name if done else None)
        return reasons

    def before_step(self, rows: Sequence[Row], limit: int | None, lockstep: bool = False) -> None:
        """End rows that cannot take another step: cancelled, or out of positions.

        Args:
            limit: number of positions of the model; None if positions have no end.
            lockstep: all rows end when one is out of positions.
        """
        out_of_positions = [limit is not None and len(row.ids) > limit for row in rows]
        for row, past_limit in zip(rows, out_of_positions, strict=True):
            if row.finish_reason is not None:
                continue
            if self.cancel is not None and self.cancel.is_set():
                row.finish_reason = "cancelled"
            elif past_limit or (lockstep and any(out_of_positions)):
                row.finish_reason = "context"


def _done_by_row(criterion: Any, answer: Any, ids: Tensor) -> list[bool]:
    """Whether each row is done. A criterion answers for all rows at once, or for each."""
    n = len(ids)
    try:
        done = torch.zeros(n, dtype=torch.bool, device=ids.device) | answer
    except (TypeError, RuntimeError):
        done = None
    if done is None or done.numel() != n:
        found = f"a tensor {list(answer.shape)}" if isinstance(answer, Tensor) else f"{answer!r}"
        raise ValueError(
            f"the stopping criterion {type(criterion).__name__} returned {found}; it must return True or False, or a "
            f"tensor of them [{n}], one for each row."
        )
    per_row: list[bool] = done.flatten().bool().tolist()
    return per_row
