"""Builds one row's draft token by token from a drafter's logits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specnb.decoding.contracts import Draft, Row
from specnb.decoding.verifiers import draw


@dataclass(frozen=True)
class DraftSampling:
    """How tokens are picked from a drafter's logits.

    Args:
        sample: draw from the processed distribution; else take the most probable token.
        keep_probs: the draft reports the distributions (`Draft.probs`).
        threshold: a draft ends after a token with less probability than this (`assistant_confidence_threshold`).
        probabilities: the draft reports the probability of each token.
        device: the device of distributions and random numbers, which is the target's.
        vocab_size: of the target, and so of the distributions.
        top_logprobs: the draft reports this many of the best tokens of the drafter's own logits.
    """

    sample: bool
    keep_probs: bool
    threshold: float
    probabilities: bool
    device: torch.device
    vocab_size: int
    top_logprobs: int = 0


@dataclass
class DraftBuilder:
    """The draft of one row: as long as its schedule wants, at most `max_draft_tokens` tokens.

    Attributes:
        ended: no more tokens are wanted, since one was below the threshold or the drafter has reached its end.
    """

    row: Row
    max_draft_tokens: int
    sampling: DraftSampling
    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    tops: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        self.length = min(self.max_draft_tokens, self.row.schedule.length())

    @property
    def open(self) -> bool:
        """Whether another token is wanted."""
        return len(self.tokens) < self.length and not self.ended

    def add(self, logits: Tensor, ids: Tensor | None = None) -> None:
        """Pick the next token.

        Args:
            logits: the drafter's, `[vocab]`. Its vocabulary may be padded to another size than the target's.
            ids: the target's ids `[vocab]` of the drafter's tokens, if it has a vocabulary of its own; all other tokens
                have the probability 0.
        """
        sampling, processors = self.sampling, self.row.processors.for_draft
        if ids is not None:
            if not (processors.list or sampling.keep_probs or sampling.top_logprobs):
                self._add_best(logits, ids)
                return
            logits = logits.new_full((sampling.vocab_size,), -torch.inf).index_copy_(0, ids, logits)
        logits = logits[None, : sampling.vocab_size].to(sampling.device)
        if logits.shape[-1] < sampling.vocab_size:  # before the processors, some of which expect the target's size
            logits = torch.nn.functional.pad(logits, (0, sampling.vocab_size - logits.shape[-1]), value=-torch.inf)
        scores = processors(None if processors.pointwise else self.row.input_ids(self.tokens), logits)[0]
        if sampling.keep_probs:
            q = scores.softmax(-1)
            if q[0].isnan():  # the processors leave the draft model no token
                self.ended = True
                return
            self.probs.append(q)
        token = draw(self.probs[-1], self.row.generator) if sampling.sample else int(scores.argmax())
        self.tokens.append(token)
        if sampling.top_logprobs:
            values, ids = logits[0].float().log_softmax(-1).topk(min(sampling.top_logprobs, sampling.vocab_size))
            self.tops.append((values, ids))
        # a full draft ends anyway
        if sampling.probabilities or (sampling.threshold and len(self.tokens) < self.length):
            probability = (self.probs[-1] if sampling.keep_probs else scores.softmax(-1))[token]
            self.ended = bool(probability < sampling.threshold)
            if sampling.probabilities:
                self.probabilities.append(float(probability))

    def _add_best(self, logits: Tensor, ids: Tensor) -> None:
        """Take the most probable token; a small vocabulary need not be spread over the target's for that."""
        best = int(logits.argmax())
        self.tokens.append(int(ids[best]))
        if self.sampling.probabilities or (self.sampling.threshold and len(self.tokens) < self.length):
            probability = float(logits.float().softmax(-1)[best])
            self.ended = probability < self.sampling.threshold
            if self.sampling.probabilities:
                self.probabilities.append(probability)

    def draft(self) -> Draft:
        """The draft so far."""
        tops = None
        if self.tops:
            tops = torch.stack([values for values, _ in self.tops]), torch.stack([ids for _, ids in self.tops])
        return Draft(
            tokens=self.tokens,
            probs=torch.stack(self.probs) if self.probs else None,
            probabilities=self.probabilities or None,
            tops=tops,
        )
