"""From logits to the law that is really sampled from: transformers' logits processors at every position of a block."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

if TYPE_CHECKING:
    from specnb.decoding.contracts import Draft, Row

# Look at nothing but their own row of scores, so a whole block may be given at once.
_POINTWISE = {
    getattr(logits_process, name, None)
    for name in ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper",
                 "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization",
                 "InfNanRemoveLogitsProcessor", "SuppressTokensLogitsProcessor")
}  # fmt: skip
# transformers' own that remember earlier calls, or call code of the user's.
_STATEFUL = {
    getattr(logits_process, name, None)
    for name in ("SynthIDTextWatermarkLogitsProcessor", "PrefixConstrainedLogitsProcessor",
                 "UnbatchedClassifierFreeGuidanceLogitsProcessor")
}  # fmt: skip
_OF_ALL_ROWS = {
    getattr(logits_process, name, None)
    for name in ("EncoderRepetitionPenaltyLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor")
}
# Count from the padded prompt's end; a row has no padding.
_LENGTHS = ("prompt_length_to_skip", "regulation_start", "begin_index", "max_length", "min_length",
            "prompt_ignore_length")  # fmt: skip


class Processors:
    """The logits processors of one row.

    `pointwise`: all look at their own scores only. `stateful`: the names of those that may remember earlier calls (the
    user's own, some of transformers'); they are called once per token, in order, like in plain decoding.
    """

    def __init__(self, processors: Sequence[object] = ()) -> None:
        self.list = LogitsProcessorList(processors)
        self.pointwise = all(type(p) in _POINTWISE for p in processors)
        self.stateful = [type(p).__name__ for p in processors if not _pure(p)]

    def __call__(self, prefix: Tensor | None, scores: Tensor) -> Tensor:
        """Processed scores `[n, vocab]` float32; `prefix` is `[1, length]`, or None if `pointwise`."""
        scores = scores.float()
        if not self.list:
            return scores
        device = scores.device
        at = torch.empty(1, 0, dtype=torch.long, device=device) if prefix is None else prefix.to(device)
        out: Tensor = self.list(at, scores)
        return out

    def for_row(self, padding: int, fork: bool) -> Processors:
        """These processors for one row of a left-padded batch: lengths count from its own start, states are its own.

        Raises ValueError naming a processor that cannot be copied, or that holds all rows' prompts.
        """
        row = []
        for processor in self.list:
            lengths = [name for name in _LENGTHS if isinstance(getattr(processor, name, None), int)]
            if fork and type(processor) in _OF_ALL_ROWS:
                raise ValueError(
                    f"{type(processor).__name__} works on one prompt at a time; generate the prompts one by one."
                )
            if isinstance(
                getattr(processor, "prompt_ignore_length", None), Tensor
            ):  # the number of pads: a row has none
                processor = copy.copy(processor)
                processor.prompt_ignore_length = None
            elif padding and lengths and _ours(processor):
                processor = copy.copy(processor)
                for name in lengths:
                    setattr(processor, name, max(0, getattr(processor, name) - padding))
            elif fork and not _pure(processor):
                try:
                    processor = copy.deepcopy(processor)
                except Exception as error:
                    raise ValueError(
                        f"{type(processor).__name__} may keep state and cannot be copied for each row ({error}); generate the "
                        "prompts one by one."
                    ) from error
            row.append(processor)
        return Processors(row)

    @cached_property
    def for_draft(self) -> Processors:
        """Those a drafter may call too: out of order and again after a rejection. The law it draws from is its own affair."""
        return Processors([p for p in self.list if _pure(p)])


def _ours(processor: object) -> bool:
    return bool(type(processor).__module__ == logits_process.__name__)


def _pure(processor: object) -> bool:
    return _ours(processor) and type(processor) not in _STATEFUL


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

    def margins(self, n: int) -> tuple[float, ...]:
        """Gaps between the two best logits of the first n positions: near 0, other block sizes may round the other way in half precision."""
        best = self.logits[:n].float().topk(2).values
        return tuple((best[:, 0] - best[:, 1]).tolist())

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
