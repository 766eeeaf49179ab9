"""What is kept of a run beside its tokens: log-probabilities, margins, scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from specnb.decoding.contracts import Draft, Row
from specnb.decoding.probabilities import Law


class Turn:
    """One row's part in one step: what was drafted for it, what the target says, and what came of it so far."""

    __slots__ = ("accepted", "draft", "emitted", "law", "position", "row")

    def __init__(self, row: Row, draft: Draft, law: Law) -> None:
        self.row, self.draft, self.law = row, draft, law
        self.position = len(row.ids)
        self.emitted: list[int] = []
        self.accepted = 0


@dataclass
class Record:
    """What to keep, and what was kept.

    `logprobs`, `top_logprobs`, `margins` and `probabilities` go into the steps (see `trace.Step`). `scores` and `logits` are those of
    generate()'s output, one `[rows, vocab]` per token; None where nobody wants them. `shown`: criteria are given the scores.
    """

    logprobs: bool = False
    top_logprobs: int = 0
    margins: bool = False
    probabilities: bool = False
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    shown: bool = False

    def __post_init__(self) -> None:
        self.keeps = self.scores is not None or self.logits is not None
        self.alone = self.logprobs and not (self.top_logprobs or self.margins or self.probabilities)

    def column(self, turns: Sequence[Turn], i: int) -> None:
        """Keep scores and logits of position i of the block, before a token is chosen there."""
        if self.logits is not None:
            self.logits += (torch.stack([turn.law.logits[i] for turn in turns]).float(),)
        if self.scores is not None:
            self.scores += (torch.stack([turn.law.scores(i) for turn in turns]),)

    def of(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """Fields of the turns' steps. All numbers come from the device at once."""
        if (
            self.alone and len(turns) == 1 and len(turns[0].emitted) == 1
        ):  # plain decoding, mostly: as few calls as can be
            logits, token = turns[0].law.logits[0], turns[0].emitted[0]
            return [{"logprobs": (logits.float().log_softmax(-1)[token].item(),)}]
        parts: list[Tensor] = []
        for turn in turns:
            self._measure(turn, parts)
        read = iter(parts[0].tolist() if len(parts) == 1 else torch.cat(parts).tolist() if parts else ())
        return [self._fields(turn, read) for turn in turns]

    def _measure(self, turn: Turn, parts: list[Tensor]) -> None:
        """Append what `_fields` reads, in the same order."""
        n = len(turn.emitted)
        if self.logprobs:
            logits = turn.law.logits[:n].float()
            tokens = torch.tensor(turn.emitted, device=logits.device)
            parts.append(-cross_entropy(logits, tokens, reduction="none"))
        if self.top_logprobs:
            logits = turn.law.logits[:n].float()
            best = logits.log_softmax(-1).topk(min(self.top_logprobs, logits.shape[-1]))
            parts += [best.values.flatten(), best.indices.flatten()]  # ids stay exact: float32 counts to 2**24
            if turn.draft.tops is not None:
                parts += [part.flatten() for part in turn.draft.tops]
        if self.margins:
            parts.append(turn.law.margins(n))

    def _fields(self, turn: Turn, read: Iterator[float]) -> dict[str, Any]:
        n, width = len(turn.emitted), min(self.top_logprobs, turn.law.logits.shape[-1])
        fields: dict[str, Any] = {}
        if self.logprobs:
            fields["logprobs"] = tuple(islice(read, n))
        if self.top_logprobs:
            fields["top_logprobs"] = _pairs(read, n, width)
            if turn.draft.tops is not None:
                fields["draft_top_logprobs"] = _pairs(read, *turn.draft.tops[0].shape)
        if self.margins:
            fields["margins"] = tuple(islice(read, n))
        if self.probabilities:
            judged = range(min(n, len(turn.draft.tokens)))
            fields["target_probabilities"] = tuple(turn.law.probability(i) for i in judged) or None
        return fields


def _pairs(read: Iterator[float], rows: int, width: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    values, ids = list(islice(read, rows * width)), list(islice(read, rows * width))
    pairs = [(int(i), value) for i, value in zip(ids, values, strict=True)]
    return tuple(tuple(pairs[r * width : (r + 1) * width]) for r in range(rows))
