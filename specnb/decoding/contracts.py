"""The contracts between the parts: a method is a drafter, a verifier and a draft-length schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from specnb.trace import Step

if TYPE_CHECKING:
    from specnb.decoding.distributions import BlockDistributions, Processors


class Unsupported(ValueError):
    """A model, or rows of it, cannot be decoded exactly; the message names what is in the way."""


class Draft(NamedTuple):
    """The tokens proposed for one row in one step.

    A registered drafter gives `tokens`, and `probs` or `probabilities` if it has them; the rest is of no use there.

    Args:
        tokens: the proposed token ids; empty for a step of plain decoding.
        probs: `[k, vocab]`, float32 (a registered drafter may give float64), on the target's device: row i is the
            distribution that token i was *sampled* from. None if the tokens were chosen (an argmax, a lookup): a
            point mass.
        match_length: number of matched tokens in prompt lookup and suffix decoding, for the schedule; 0 for other
            drafters.
        lookahead_token: the token that would have come next, if the drafter knows it at no cost.
        probabilities: the probability of each token under the drafter's own distribution, for the trace; a registered
            drafter's draft ends after one below `assistant_confidence_threshold`.
        tops: log-probabilities and ids `[k, n]` of the n best tokens of the drafter's own logits, for the trace.
        source: the method that drafted, in a hybrid of two.
    """

    tokens: list[int]
    probs: Tensor | None = None
    match_length: int = 0
    lookahead_token: int | None = None
    probabilities: list[float] | None = None
    tops: tuple[Tensor, Tensor] | None = None
    source: str = ""

    def cut(self, k: int) -> Draft:
        """The first k tokens of the draft."""
        if k >= len(self.tokens):
            return self
        return self._replace(
            tokens=self.tokens[:k],
            probs=None if self.probs is None else self.probs[:k],
            lookahead_token=None,
            probabilities=None if self.probabilities is None else self.probabilities[:k],
            tops=None if self.tops is None else (self.tops[0][:k], self.tops[1][:k]),
        )


class VerifiedToken(NamedTuple):
    """A token of the output, and whether it is an accepted draft (else it is the correction or the bonus token)."""

    token: int
    accepted: bool


@dataclass(eq=False)
class Row:
    """One prompt while it is decoded.

    Args:
        index: its number in the batch.
        ids: all committed token ids, prompt first.
        remaining_tokens: number of tokens that may still be generated.
        generator: draws all random numbers of this row.
        processors: its logits processors.
        schedule: sets the length of its drafts.
        padded_prompt: the prompt ids as generate() has them, with padding; empty if there is no padding.
    """

    index: int
    ids: list[int]
    remaining_tokens: int
    generator: torch.Generator
    processors: Processors
    schedule: Schedule
    padded_prompt: Sequence[int] = ()
    steps: list[Step] = field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.ids)
        self.padded_prompt = self.padded_prompt or list(self.ids)
        self.padding = len(self.padded_prompt) - self.prompt_length
        self._buffer = torch.empty(0, dtype=torch.long, device=self.generator.device)
        self._copied = 0

    def input_ids(self, drafted: Sequence[int] = ()) -> Tensor:
        """The ids that generate() would pass to processors and criteria, followed by `drafted`.

        Returns:
            A new tensor `[1, n]`, which the receiver may keep.
        """
        n = self.padding + len(self.ids)
        if len(self._buffer) < n + len(drafted):
            self._buffer, self._copied = self._buffer.new_empty(2 * (n + len(drafted)) + 64), 0
        if self._copied < len(self.padded_prompt):
            self._copied = len(self.padded_prompt)
            self._buffer[: self._copied] = torch.tensor(self.padded_prompt)
        if self._copied < n:
            self._buffer[self._copied : n] = torch.tensor(self.ids[self._copied - self.padding :])
            self._copied = n
        if drafted:
            self._buffer[n : n + len(drafted)] = torch.tensor(drafted)
        return self._buffer[None, : n + len(drafted)].clone()


def input_ids(rows: Sequence[Row]) -> Tensor:
    """The ids `[rows, n]` that generate() would pass on, for rows that have grown by the same number of tokens."""
    return rows[0].input_ids() if len(rows) == 1 else torch.cat([row.input_ids() for row in rows])


class Schedule(Protocol):
    """The length of the next draft of a row. It depends on the row's own steps alone."""

    def __init__(self, k: int) -> None: ...

    def length(self, match_length: int = 0, acceptance: Sequence[float] | None = None) -> int:
        """Number of tokens to draft next.

        Args:
            match_length: number of matched tokens in prompt lookup and suffix decoding; 0 for other drafters.
            acceptance: for each token that could be drafted, the probability that it is accepted if those before it
                are; None if the drafter has no estimate.
        """
        ...

    def update(self, step: Step) -> None:
        """Learn from the row's last step."""
        ...


class Drafter(Protocol):
    """Proposes tokens. It never changes a model or its configs.

    Args:
        drafts_first: it can draft before the target has read the prompt, without delaying the first token.
        reads_target: it cannot do so, since it needs the target's hidden states.
    """

    drafts_first: bool
    reads_target: bool

    def propose(self, rows: Sequence[Row], max_draft_tokens: Sequence[int]) -> list[Draft]:
        """A draft for each row: as long as its schedule wants or shorter, at most `max_draft_tokens[i]` tokens."""
        ...


Verifier = Callable[["BlockDistributions", Draft, torch.Generator], Iterator[VerifiedToken]]
"""Yields the tokens to append, in order; the last one is the correction or the bonus token. The loop may stop early."""
