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
    gave each token, where it has one and the trace is to show it; `tops` the log-probabilities and ids `[k, n]` of the n tokens
    that were best in the drafter's own logits, where they are asked for.
    """

    tokens: list[int]
    probs: Tensor | None = None
    signal: int = 0
    withheld: int | None = None
    probabilities: list[float] | None = None
    tops: tuple[Tensor, Tensor] | None = None

    def cut(self, k: int) -> Draft:
        """The first k tokens of it."""
        if k >= len(self.tokens):
            return self
        probs = None if self.probs is None else self.probs[:k]
        chances = None if self.probabilities is None else self.probabilities[:k]
        tops = None if self.tops is None else (self.tops[0][:k], self.tops[1][:k])
        return Draft(self.tokens[:k], probs, self.signal, None, chances, tops)


class Verdict(NamedTuple):
    """A token that stands, and whether it is an accepted draft (else the correction, or the bonus)."""

    token: int
    accepted: bool


@dataclass(eq=False)
class Row:
    """One prompt and what was generated for it so far.

    `ids` are all committed tokens, prompt first; `room` how many more may be generated; `generator` draws everything random
    of this row, `processors` are its logits processors, `schedule` sets the length of its drafts. `shown` is the prompt as
    generate() has it, padding included, for those that are to see it so; left out, it is the prompt itself.
    """

    index: int
    ids: list[int]
    room: int
    generator: torch.Generator
    processors: Processors
    schedule: Schedule
    shown: Sequence[int] = ()
    steps: list[Step] = field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.ids)
        self.shown = self.shown or list(self.ids)
        self.padding = len(self.shown) - self.prompt_length
        self._buffer = torch.empty(0, dtype=torch.long, device=self.generator.device)
        self._copied = 0

    def prefix(self, extra: Sequence[int] = ()) -> Tensor:
        """What generate() would show of this row, and `extra` behind it: a tensor `[1, n]` of the caller's own."""
        n = self.padding + len(self.ids)
        if len(self._buffer) < n + len(extra):
            self._buffer, self._copied = self._buffer.new_empty(2 * (n + len(extra)) + 64), 0
        if self._copied < len(self.shown):
            self._copied = len(self.shown)
            self._buffer[: self._copied] = torch.tensor(self.shown)
        if self._copied < n:
            self._buffer[self._copied : n] = torch.tensor(self.ids[self._copied - self.padding :])
            self._copied = n
        if extra:
            self._buffer[n : n + len(extra)] = torch.tensor(extra)
        return self._buffer[None, : n + len(extra)].clone()  # who is given it may keep it


def seen(rows: Sequence[Row]) -> Tensor:
    """`[rows, n]`: what generate() would show of rows that have grown by the same number of tokens."""
    return rows[0].prefix() if len(rows) == 1 else torch.cat([row.prefix() for row in rows])


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
