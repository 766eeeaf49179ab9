"""When a row ends. Asked after every single token, so that nothing beyond a stop is emitted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from specnb.decoding.contracts import Row


class Stops:
    """The stopping criteria that `generate()` prepared, sorted into what is cheap to ask and what is not.

    `max_length` is the most tokens of a (padded) row; the rest is answered by `reason`.
    """

    def __init__(self, criteria: StoppingCriteriaList, cancel: threading.Event | None = None) -> None:
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

    def reason(self, row: Row) -> str | None:
        """Why the row ends with its last token (one of `trace.FINISH_REASONS`), or None."""
        if row.ids[-1] in self.eos:
            return "eos"
        for criterion in self.other:
            done = criterion(row.prefix(), None)
            if bool(done.all() if isinstance(done, torch.Tensor) else done):
                return "stop_string" if isinstance(criterion, StopStringCriteria) else "stopping_criteria"
        if row.room <= 0:
            return "length"
        if self.deadline is not None and time.time() > self.deadline:
            return "max_time"
        return None

    def before_step(self, rows: Sequence[Row], limit: int | None) -> None:
        """End rows that may not take another step: cancelled, or at the end of the model's positions."""
        for row in rows:
            if self.cancel is not None and self.cancel.is_set():
                row.finish_reason = "cancelled"
            elif limit is not None and len(row.ids) > limit:
                row.finish_reason = "context"
