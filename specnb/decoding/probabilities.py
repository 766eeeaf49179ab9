"""From logits to the law that is really sampled from: transformers' logits processors at every position of a block."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

if TYPE_CHECKING:
    from specnb.decoding.contracts import Draft, Row


def _named(*names: str) -> set[type]:
    return {getattr(logits_process, name) for name in names if hasattr(logits_process, name)}


# Look at nothing but their own row of scores, so a whole block may be given at once.
_POINTWISE = _named("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper",
                    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization",
                    "InfNanRemoveLogitsProcessor", "SuppressTokensLogitsProcessor")  # fmt: skip
# Look at one row's text and scores and keep nothing, so they may be called for a row alone, in any order.
_ROWWISE = _POINTWISE | _named(
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor", "WatermarkLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor")  # fmt: skip
_PER_ROW = ("prompt_ignore_length", "encoder_input_ids", "generated_ngrams")  # what some of those hold for all rows


class Processors:
    """Logits processors, called as generate() would call them.

    `pointwise`: all look at their own scores only. `foreign`: the names of those that may look at other rows or remember
    earlier calls (the user's own, some of transformers'); they are called once per token, in order, for all rows together.
    """

    def __init__(self, processors: Sequence[Any] = ()) -> None:
        self.list = list(processors)
        self.pointwise = all(type(p) in _POINTWISE for p in processors)
        self.foreign = [type(p).__name__ for p in processors if type(p) not in _ROWWISE]

    def __call__(self, prefix: Tensor | None, scores: Tensor) -> Tensor:
        """Processed scores `[n, vocab]` float32; `prefix` is `[n, length]`, or None if `pointwise`.

        Raises ValueError naming a processor that returns something else than scores of that shape.
        """
        scores = scores.to(torch.float32, copy=bool(self.foreign))  # one of the user's may write into them
        if not self.list:
            return scores
        device = scores.device
        at = torch.empty(1, 0, dtype=torch.long, device=device) if prefix is None else prefix.to(device)
        for processor in self.list:
            if type(processor) in _ROWWISE:
                scores = processor(at, scores)
                continue
            shape, scores = scores.shape, LogitsProcessorList([processor])(at, scores)  # which sees to its arguments
            if not isinstance(scores, Tensor) or scores.shape != shape:
                found = list(scores.shape) if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
                raise ValueError(
                    f"the logits processor {type(processor).__name__} was given scores {list(shape)} and returned {found}; "
                    "it must return scores of the same shape."
                )
        return scores

    def for_row(self, row: int, rows: int) -> Processors:
        """These processors for one of several rows: what transformers' own hold for all of them is cut to that row's."""
        return self if rows == 1 else Processors([_of_row(p, row, rows) for p in self.list])

    @cached_property
    def for_draft(self) -> Processors:
        """Those a drafter may call too: out of order and again after a rejection. The law it draws from is its own affair."""
        return Processors([p for p in self.list if type(p) in _ROWWISE])


def _of_row(processor: Any, row: int, rows: int) -> Any:
    if type(processor) not in _ROWWISE:
        return processor
    held = {name: value for name in _PER_ROW if isinstance(value := getattr(processor, name, None), (Tensor, list))}
    if held:
        processor = copy.copy(processor)
        for name, value in held.items():  # as many as prompts: fewer than rows where one prompt has several
            at = row * len(value) // rows
            setattr(processor, name, value[at : at + 1])
        if hasattr(processor, "batch_size"):
            processor.batch_size = 1
    return processor


class Law:
    """What the target says about the positions of one row's block.

    Position i (0 to k) is the law of the token after i drafted ones. Processors that depend on the text are applied only
    when a position is asked for, so that walking in order calls them exactly as plain decoding would. With an
    `ensemble_weight` w, drafted positions follow w p + (1 - w) q of the two processed laws (static ensemble, 2604.07622);
    `distances` then has the total variation to p of each position asked for.
    """

    def __init__(self, row: Row, draft: Draft, logits: Tensor, ensemble_weight: float | None = None) -> None:
        self.row, self.draft, self.logits, self.weight = row, draft, logits, ensemble_weight
        self.distances: list[float] = []
        self._length = len(row.ids)
        self._block: Tensor | None = None
        self._asked: dict[int, Tensor] = {}
        self._choices: list[int] | None = None

    def give(self, i: int, scores: Tensor) -> None:
        """The processed logits `[vocab]` of position i, where all rows' were processed together."""
        self._asked[i] = scores

    def scores(self, i: int) -> Tensor:
        """The target's processed logits `[vocab]`, float32."""
        processors = self.row.processors
        if processors.pointwise:
            return self._pointwise()[i]
        if i not in self._asked:  # once: a processor may count its calls
            committed = len(self.row.ids) - self._length
            prefix = self.row.prefix(self.draft.tokens[committed:i])
            self._asked[i] = processors(prefix, self.logits[i : i + 1])[0]
        return self._asked[i]

    def probs(self, i: int) -> Tensor:
        """The law `[vocab]` to sample from: what plain decoding would, but for an ensemble."""
        p, q = self.scores(i).softmax(-1), self.draft_probs(i)
        if self.weight is None or q is None:
            return p
        self.distances.append((1 - self.weight) * 0.5 * float((p - q).abs().sum()))
        return self.weight * p + (1 - self.weight) * q

    def choice(self, i: int) -> int:
        """The most probable token (the first of equals, as transformers takes it)."""
        if self.weight is not None:
            return int(self.probs(i).argmax())
        if not self.row.processors.pointwise:
            return int(self.scores(i).argmax())
        if self._choices is None:
            self._choices = self._pointwise().argmax(-1).tolist()
        return self._choices[i]

    def draft_probs(self, i: int) -> Tensor | None:
        """The law `[vocab]` that drafted token i was drawn from; None for a point mass, and behind the draft."""
        return None if self.draft.probs is None or i >= len(self.draft.tokens) else self.draft.probs[i]

    def probability(self, i: int) -> float:
        """What the target's processed law gives drafted token i; for a position that was asked for before."""
        return float(self.scores(i).softmax(-1)[self.draft.tokens[i]])

    def margins(self, n: int) -> Tensor:
        """Gaps `[n]` between the two best processed logits of the first n positions; for positions that were asked for before."""
        decided = (
            self._pointwise()[:n] if self.row.processors.pointwise else torch.stack([self._asked[i] for i in range(n)])
        )
        best = decided.topk(2).values
        return best[:, 0] - best[:, 1]

    def _pointwise(self) -> Tensor:
        if self._block is None:
            self._block = self.row.processors(None, self.logits)
        return self._block


def read_choices(laws: Sequence[Law]) -> None:
    """Bring the most probable tokens of all positions of a step from the device at once, where they are read as they stand."""
    best = [(law._pointwise() if law.row.processors.pointwise else law.logits).argmax(-1) for law in laws]
    read = torch.cat(best).tolist()
    for law in laws:
        if law.row.processors.pointwise:
            law._choices = read[: len(law.logits)]
        read = read[len(law.logits) :]
