"""One row's draft while it grows: how a drafter with a law of its own picks its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specnb.decoding.contracts import Draft, Row
from specnb.decoding.verify import draw


@dataclass(frozen=True)
class Drawing:
    """How tokens are picked from a drafter's logits.

    `sample`: draw from the processed law instead of taking the most probable token; `laws`: report the laws; `threshold`: a draft ends
    after a token that had less probability than this; `probabilities`: report each token's; laws and random numbers live on
    `device`, laws have the target's `vocab_size`; `top_logprobs`: report so many of the best tokens of the drafter's own logits.
    """

    sample: bool
    laws: bool
    threshold: float
    probabilities: bool
    device: torch.device
    vocab_size: int
    top_logprobs: int = 0


@dataclass
class Growing:
    """The draft of one row: as long as its schedule wants, at most `room` tokens."""

    row: Row
    room: int
    drawing: Drawing
    tokens: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    tops: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    doubted: bool = False

    def __post_init__(self) -> None:
        self.most = min(self.room, self.row.schedule.length())

    @property
    def open(self) -> bool:
        """Whether another token is wanted."""
        return len(self.tokens) < self.most and not self.doubted

    def add(self, logits: Tensor) -> None:
        """Pick the next token from the drafter's logits `[vocab]`; its vocabulary may be padded to another size."""
        how, processors = self.drawing, self.row.processors.for_draft
        logits = logits[None, : how.vocab_size].to(how.device)
        if logits.shape[-1] < how.vocab_size:  # before the processors: some know the target's size
            logits = torch.nn.functional.pad(logits, (0, how.vocab_size - logits.shape[-1]), value=-torch.inf)
        scores = processors(None if processors.pointwise else self.row.prefix(self.tokens), logits)[0]
        if how.laws:
            law = scores.softmax(-1)
            if law[0].isnan():  # the processors leave the draft model no token at all
                self.doubted = True
                return
            self.laws.append(law)
        token = draw(self.laws[-1], self.row.generator) if how.sample else int(scores.argmax())
        self.tokens.append(token)
        if how.top_logprobs:
            values, ids = logits[0].float().log_softmax(-1).topk(min(how.top_logprobs, how.vocab_size))
            self.tops.append((values, ids))
        if how.probabilities or (how.threshold and len(self.tokens) < self.most):  # a draft that is full ends anyway
            chance = (self.laws[-1] if how.laws else scores.softmax(-1))[token]
            self.doubted = bool(chance < how.threshold)
            if how.probabilities:
                self.probabilities.append(float(chance))

    def draft(self) -> Draft:
        laws = torch.stack(self.laws) if self.laws else None
        tops = None
        if self.tops:
            tops = torch.stack([values for values, _ in self.tops]), torch.stack([ids for _, ids in self.tops])
        return Draft(self.tokens, laws, probabilities=self.probabilities or None, tops=tops)
