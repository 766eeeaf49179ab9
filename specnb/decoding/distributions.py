"""From logits to the distributions to sample from: transformers' logits processors at every position of a block."""

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


def _classes(names: str) -> set[type]:
    """The logits processors of these names that the installed transformers has."""
    return {getattr(logits_process, name) for name in names.split() if hasattr(logits_process, name)}


# These only look at the scores of their own position, so a whole block can be processed at once.
_POINTWISE = _classes(
    "TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper TopHLogitsWarper MinPLogitsWarper TypicalLogitsWarper "
    "EpsilonLogitsWarper EtaLogitsWarper LogitNormalization InfNanRemoveLogitsProcessor SuppressTokensLogitsProcessor"
)
# These only look at the text and scores of one row and keep no state, so they can be called for one row, in any order.
_ROWWISE = _POINTWISE | _classes(
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor RepetitionPenaltyLogitsProcessor "
    "NoRepeatNGramLogitsProcessor SequenceBiasLogitsProcessor NoBadWordsLogitsProcessor ForcedBOSTokenLogitsProcessor "
    "ForcedEOSTokenLogitsProcessor ExponentialDecayLengthPenalty SuppressTokensAtBeginLogitsProcessor "
    "WatermarkLogitsProcessor EncoderRepetitionPenaltyLogitsProcessor EncoderNoRepeatNGramLogitsProcessor"
)
_PER_ROW = ("prompt_ignore_length", "encoder_input_ids", "generated_ngrams")  # attributes with values of all rows


class Processors:
    """A list of logits processors, called as generate() would call them.

    Attributes:
        pointwise: all of them only look at the scores of their own position.
        stateful: the names of those that may look at other rows or keep state between calls (the user's own, and some
            of transformers'). These are called once per token, in order, for all rows together.
    """

    def __init__(self, processors: Sequence[Any] = ()) -> None:
        self.list = list(processors)
        self.pointwise = all(type(p) in _POINTWISE for p in processors)
        self.stateful = [type(p).__name__ for p in processors if type(p) not in _ROWWISE]

    def __call__(self, prefix: Tensor | None, scores: Tensor) -> Tensor:
        """Process scores.

        Args:
            prefix: the ids `[n, length]` in front of each position; None if `pointwise`.
            scores: `[n, vocab]`.

        Returns:
            `[n, vocab]`, float32.

        Raises:
            ValueError: a processor returns something else than scores of that shape.
        """
        scores = scores.to(torch.float32, copy=bool(self.stateful))  # the user's processors may write into them
        if not self.list:
            return scores
        device = scores.device
        ids = torch.empty(1, 0, dtype=torch.long, device=device) if prefix is None else prefix.to(device)
        for processor in self.list:
            if type(processor) in _ROWWISE:
                scores = processor(ids, scores)
                continue
            shape = scores.shape
            scores = LogitsProcessorList([processor])(ids, scores)  # passes further arguments
            if not isinstance(scores, Tensor) or scores.shape != shape:
                found = list(scores.shape) if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
                raise ValueError(
                    f"the logits processor {type(processor).__name__} was given scores {list(shape)} and returned "
                    f"{found}; it must return scores of the same shape."
                )
        return scores

    def for_row(self, row: int, rows: int) -> Processors:
        """The processors for one of several rows: of values that transformers' own hold for all rows, this row's."""
        return self if rows == 1 else Processors([_select_row(p, row, rows) for p in self.list])

    @cached_property
    def for_draft(self) -> Processors:
        """The processors that a drafter can call too: in any order, and again after a rejection."""
        return Processors([p for p in self.list if type(p) in _ROWWISE])


def _select_row(processor: Any, row: int, rows: int) -> Any:
    if type(processor) not in _ROWWISE:
        return processor
    held = {name: value for name in _PER_ROW if isinstance(value := getattr(processor, name, None), (Tensor, list))}
    if held:
        processor = copy.copy(processor)
        for name, value in held.items():  # one value per prompt; a prompt may have several rows
            at = row * len(value) // rows
            setattr(processor, name, value[at : at + 1])
        if hasattr(processor, "batch_size"):
            processor.batch_size = 1
    return processor


class BlockDistributions:
    """The distributions of target and drafter at the positions of one row's block.

    Position i (0 to k) is that of the token after i drafted ones. Processors that depend on the text are applied only
    when a position is read. So reading the positions in order calls them exactly as plain decoding would.

    Args:
        row: the row before the block.
        draft: its drafted tokens and the distributions they were drawn from.
        logits: the target's, `[k + 1, vocab]`.
        ensemble_weight: w of the static ensemble w p + (1 - w) q at drafted positions (2604.07622).

    Attributes:
        distances: with an ensemble, the total variation distance to the target's distribution at each position read.
    """

    def __init__(self, row: Row, draft: Draft, logits: Tensor, ensemble_weight: float | None = None) -> None:
        self.row, self.draft, self.logits, self.weight = row, draft, logits, ensemble_weight
        self.distances: list[float] = []
        self._length = len(row.ids)
        self._all_scores: Tensor | None = None
        self._scores: dict[int, Tensor] = {}
        self._choices: list[int] | None = None

    def set_scores(self, i: int, scores: Tensor) -> None:
        """Set the processed logits `[vocab]` of position i, where all rows were processed together."""
        self._scores[i] = scores

    def scores(self, i: int) -> Tensor:
        """The target's processed logits `[vocab]` at position i, float32."""
        processors = self.row.processors
        if processors.pointwise:
            return self._pointwise()[i]
        if i not in self._scores:  # only once: a processor may count its calls
            committed = len(self.row.ids) - self._length
            ids = self.row.input_ids(self.draft.tokens[committed:i])
            self._scores[i] = processors(ids, self.logits[i : i + 1])[0]
        return self._scores[i]

    def target_probs(self, i: int) -> Tensor:
        """p `[vocab]` at position i, which plain decoding would sample from; with an ensemble, w p + (1 - w) q."""
        p, q = self.scores(i).softmax(-1), self.draft_probs(i)
        if self.weight is None or q is None:
            return p
        self.distances.append((1 - self.weight) * 0.5 * float((p - q).abs().sum()))
        return self.weight * p + (1 - self.weight) * q

    def draft_probs(self, i: int) -> Tensor | None:
        """q `[vocab]` that drafted token i was drawn from; None for a point mass, and after the draft."""
        return None if self.draft.probs is None or i >= len(self.draft.tokens) else self.draft.probs[i]

    def argmax(self, i: int) -> int:
        """The most probable token at position i (the first of equals, as in transformers)."""
        if self.weight is not None:
            return int(self.target_probs(i).argmax())
        if not self.row.processors.pointwise:
            return int(self.scores(i).argmax())
        if self._choices is None:
            self._choices = self._pointwise().argmax(-1).tolist()
        return self._choices[i]

    def probability(self, i: int) -> float:
        """The target's probability of drafted token i after all processors; position i must have been read."""
        return float(self.scores(i).softmax(-1)[self.draft.tokens[i]])

    def margins(self, n: int) -> Tensor:
        """The gaps `[n]` between the two best scores at the first n positions, which must have been read."""
        pointwise = self.row.processors.pointwise
        scores = self._pointwise()[:n] if pointwise else torch.stack([self._scores[i] for i in range(n)])
        best = scores.topk(2).values
        return best[:, 0] - best[:, 1]

    def _pointwise(self) -> Tensor:
        if self._all_scores is None:
            self._all_scores = self.row.processors(None, self.logits)
        return self._all_scores


def read_choices(blocks: Sequence[BlockDistributions]) -> None:
    """Read the most probable tokens of all positions of a step from the device in one transfer."""
    pointwise = [block.row.processors.pointwise for block in blocks]
    scores = [block._pointwise() if alone else block.logits for block, alone in zip(blocks, pointwise, strict=True)]
    read = torch.cat([one.argmax(-1) for one in scores]).tolist()
    for block, alone in zip(blocks, pointwise, strict=True):
        if alone:
            block._choices = read[: len(block.logits)]
        read = read[len(block.logits) :]
