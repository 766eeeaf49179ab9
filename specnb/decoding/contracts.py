"""The contracts between the parts: a method is a drafter, an acceptance rule and a draft-length schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from specnb.trace import Step

if TYPE_CHECKING:
    from specnb.decoding.probabilities import Law, Processors


class Unsupported(ValueError):
    """A model, or rows of it, cannot be decoded exactly; the message names what is in the way."""


class Draft(NamedTuple):
    """Proposed token ids, and the law each was drawn from.

    `probs` is `[k, vocab]` (float, on the target's device) when token i was *sampled* from row i; None when the tokens were
    chosen (argmax, a copy): a point mass. No tokens: the step is plain decoding. `signal` is what the schedule was told,
    `withheld` the token that would have come next, where that costs nothing to say; `probabilities` what the drafter's own law
    gave each token, where it has one and the trace is to show it.
    """

    tokens: list[int]
    probs: Tensor | None = None
    signal: int = 0
    withheld: int | None = None
    probabilities: list[float] | None = None


class Verdict(NamedTuple):
    """A token that stands, and whether it is an accepted draft (else the correction, or the bonus)."""

    token: int
    accepted: bool


@dataclass(eq=False)
class Row:
    """One prompt and what was generated for it so far.

    `ids` are all committed tokens, prompt first; `room` how many more may be generated; `generator` draws everything random
    of this row, `processors` are its logits processors, `schedule` sets the length of its drafts.
    """

    index: int
    ids: list[int]
    room: int
    generator: torch.Generator
    processors: Processors
    schedule: Schedule
    steps: list[Step] = field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.ids)
        self._buffer = torch.empty(0, dtype=torch.long, device=self.generator.device)
        self._copied = 0

    def prefix(self, extra: Sequence[int] = ()) -> Tensor:
        """The committed ids and `extra` behind them as a tensor `[1, n]` of the caller's own."""
        n = len(self.ids)
        if len(self._buffer) < n + len(extra):
            self._buffer, self._copied = self._buffer.new_empty(2 * (n + len(extra)) + 64), 0
        if self._copied < n:
            self._buffer[self._copied : n] = torch.tensor(self.ids[self._copied :])
            self._copied = n
        if extra:
            self._buffer[n : n + len(extra)] = torch.tensor(extra)
        return self._buffer[None, : n + len(extra)].clone()  # who is given it may keep it


class Schedule(Protocol):
    """How long the next draft of a row should be. Told every step of the row; depends on nothing else."""

    def __init__(self, k: int) -> None: ...

    def length(self, signal: int = 0) -> int:
        """The length wanted next; `signal` is the drafter's own measure of how sure it is (0 where it has none)."""
        ...

    def update(self, step: Step) -> None: ...


class Drafter(Protocol):
    """Proposes tokens. Never changes a model or its configs.

    `drafts_first` says whether it drafts before the target has seen the prompt at no cost to the first token, `reads_target`
    whether it cannot, since it starts from states of the target's.
    """

    drafts_first: bool
    reads_target: bool

    def propose(self, rows: Sequence[Row], room: Sequence[int]) -> list[Draft]:
        """As many tokens for each row as its schedule wants, at most `room[i]`; fewer where there is nothing to propose."""
        ...


Rule = Callable[["Law", Draft, torch.Generator], Iterator[Verdict]]
"""Yields the tokens that stand, in order; the last one is the correction or the bonus. The loop stops asking at a stop."""
