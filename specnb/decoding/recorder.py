"""What is recorded of a run in addition to its tokens: steps with their times, log-probabilities, margins, scores."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from specnb.decoding.distributions import BlockDistributions
from specnb.trace import Step


class RowStep:
    """One row's part in one step: its draft, the distributions over it, and the tokens committed so far."""

    __slots__ = ("accepted", "block", "draft", "emitted", "position", "replayed_tokens", "row")

    def __init__(self, block: BlockDistributions, replayed_tokens: int = 0) -> None:
        self.row, self.draft, self.block = block.row, block.draft, block
        self.position = len(block.row.ids)
        self.emitted: list[int] = []
        self.accepted = 0
        self.replayed_tokens = replayed_tokens


class StepClock:
    """The times at which a step began, had its drafts, and had the target's logits."""

    __slots__ = ("_began", "_drafted", "_verified")

    def __init__(self) -> None:
        self._began = self._drafted = self._verified = time.perf_counter()

    def drafted(self) -> None:
        """The drafts are complete."""
        self._drafted = time.perf_counter()

    def verified(self) -> None:
        """The target's logits are there."""
        self._verified = time.perf_counter()

    def seconds(self, rows: int) -> dict[str, Any]:
        """The seconds of each part up to now, in equal shares for `rows` rows, as fields of `Step`."""
        return {
            "draft_seconds": (self._drafted - self._began) / rows,
            "verify_seconds": (self._verified - self._drafted) / rows,
            "other_seconds": (time.perf_counter() - self._verified) / rows,
        }


@dataclass
class Recorder:
    """What to record, and what was recorded.

    Args:
        logprobs, top_logprobs, margins, probabilities: recorded in the steps (see `trace.Step`).
        scores, logits: those of generate()'s output, one `[rows, vocab]` per token; None if they are not requested.
        shows_scores: stopping criteria are given the scores.
    """

    logprobs: bool = False
    top_logprobs: int = 0
    margins: bool = False
    probabilities: bool = False
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    shows_scores: bool = False

    def __post_init__(self) -> None:
        self.keeps_outputs = self.scores is not None or self.logits is not None
        self._logprobs_only = self.logprobs and not (self.top_logprobs or self.margins or self.probabilities)

    def keep_outputs(self, row_steps: Sequence[RowStep], position: int) -> None:
        """Keep scores and logits of a position of the block, before a token is chosen there."""
        if self.logits is not None:
            self.logits += (torch.stack([row_step.block.logits[position] for row_step in row_steps]).float(),)
        if self.scores is not None:
            self.scores += (torch.stack([row_step.block.scores(position) for row_step in row_steps]),)

    def steps(self, row_steps: Sequence[RowStep], clock: StepClock) -> list[Step]:
        """The `Step` of each row that got tokens."""
        if not row_steps:
            return []
        measured = self._measured(row_steps)
        seconds = clock.seconds(len(row_steps))
        return [
            Step(
                position=row_step.position,
                drafted=tuple(row_step.draft.tokens),
                accepted=row_step.accepted,
                emitted=tuple(row_step.emitted),
                row=row_step.row.index,
                match_length=row_step.draft.match_length,
                lookahead_token=row_step.draft.lookahead_token,
                replayed_tokens=row_step.replayed_tokens,
                source=row_step.draft.source if row_step.draft.tokens else "",
                distances=tuple(row_step.block.distances) or None,
                draft_probabilities=tuple(row_step.draft.probabilities or ()) or None,
                **seconds,
                **fields,
            )
            for row_step, fields in zip(row_steps, measured, strict=True)
        ]

    def _measured(self, row_steps: Sequence[RowStep]) -> list[dict[str, Any]]:
        """Fields of the steps that come from logits. All numbers are read from the device at once."""
        if self._logprobs_only and len(row_steps) == 1 and len(row_steps[0].emitted) == 1:
            # mostly plain decoding: as few calls as possible
            logits, token = row_steps[0].block.logits[0], row_steps[0].emitted[0]
            return [{"logprobs": (logits.float().log_softmax(-1)[token].item(),)}]
        parts: list[Tensor] = []
        for row_step in row_steps:
            self._measure(row_step, parts)
        read = iter(parts[0].tolist() if len(parts) == 1 else torch.cat(parts).tolist() if parts else ())
        return [self._fields(row_step, read) for row_step in row_steps]

    def _measure(self, row_step: RowStep, parts: list[Tensor]) -> None:
        """Append what `_fields` reads, in the same order."""
        n = len(row_step.emitted)
        if self.logprobs:
            logits = row_step.block.logits[:n].float()
            tokens = torch.tensor(row_step.emitted, device=logits.device)
            parts.append(-cross_entropy(logits, tokens, reduction="none"))
        if self.top_logprobs:
            logits = row_step.block.logits[:n].float()
            best = logits.log_softmax(-1).topk(min(self.top_logprobs, logits.shape[-1]))
            parts += [best.values.flatten(), best.indices.flatten()]  # ids stay exact: float32 counts to 2**24
            drafted = row_step.draft.tokens[:n]
            parts += [_ranks(logits, row_step.emitted), _ranks(logits[: len(drafted)], drafted)]
            if row_step.draft.tops is not None:
                parts += [part.flatten() for part in row_step.draft.tops]
        if self.margins:
            parts.append(row_step.block.margins(n))

    def _fields(self, row_step: RowStep, read: Iterator[float]) -> dict[str, Any]:
        """One row's fields of `Step`, from the numbers that were read."""
        n, width = len(row_step.emitted), min(self.top_logprobs, row_step.block.logits.shape[-1])
        fields: dict[str, Any] = {}
        if self.logprobs:
            fields["logprobs"] = tuple(islice(read, n))
        if self.top_logprobs:
            fields["top_logprobs"] = _pairs(read, n, width)
            fields["ranks"] = tuple(map(int, islice(read, n)))
            fields["target_ranks"] = tuple(map(int, islice(read, min(n, len(row_step.draft.tokens))))) or None
            if row_step.draft.tops is not None:
                fields["draft_top_logprobs"] = _pairs(read, *row_step.draft.tops[0].shape)
        if self.margins:
            fields["margins"] = tuple(islice(read, n))
        if self.probabilities:
            positions = range(min(n, len(row_step.draft.tokens)))
            fields["target_probabilities"] = tuple(row_step.block.probability(i) for i in positions) or None
        return fields


def _ranks(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """The rank of a token at each position, from 1; equals share the best of their ranks."""
    ids = torch.tensor(tokens, dtype=torch.long, device=logits.device)[:, None]
    return (logits > logits.gather(1, ids)).sum(-1) + 1


def _pairs(read: Iterator[float], rows: int, width: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    values, ids = list(islice(read, rows * width)), list(islice(read, rows * width))
    pairs = [(int(i), value) for i, value in zip(ids, values, strict=True)]
    return tuple(tuple(pairs[r * width : (r + 1) * width]) for r in range(rows))
