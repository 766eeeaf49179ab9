"""The loop: draft, verify, commit, until every row has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from specnb.decoding.contracts import Draft, Drafter, Row, Verifier, input_ids
from specnb.decoding.distributions import BlockDistributions, Processors, read_choices
from specnb.decoding.lm.base import LM
from specnb.decoding.recorder import Recorder, RowStep, StepClock
from specnb.decoding.stops import StoppingChecker
from specnb.trace import Step

NO_DRAFT = Draft([])


def decode(
    target: LM,
    drafter: Drafter | None,
    rows: Sequence[Row],
    *,
    verifier: Verifier,
    stops: StoppingChecker,
    ensemble_weight: float | None = None,
    lockstep: Processors | None = None,
    pad: int = 0,
    recorder: Recorder | None = None,
) -> Iterator[Step]:
    """Generate until every row has a `finish_reason`; yields each step as soon as it is committed.

    Speculative sampling (Leviathan et al. 2211.17192, algorithm 1) for several rows: in each round the drafter proposes
    tokens x drawn from q, one target pass gives p at every drafted position, and the verifier keeps x with probability
    min(1, p(x) / q(x)) (see `verifiers`).

    Args:
        target, drafter: follow `rows`; without a drafter the target decodes plainly.
        verifier: decides which tokens are appended.
        stops: decides when a row ends; called after every token.
        ensemble_weight: drafted positions follow the static ensemble of target and drafter (2604.07622).
        lockstep: the logits processors of all rows, if all rows must grow by the same number of tokens per step because
            something (a processor, for example) looks at all rows at once. They are then called once per token, and a
            row that has ended goes on until all have.
        pad: the id that ended rows get in lockstep, if `stops.pads`.
        recorder: what is recorded in addition to the tokens.
    """
    recorder = recorder or Recorder()
    filler = pad if lockstep is not None and stops.pads else None
    skip_draft = drafter is not None and not _drafts_at_once(target, drafter, ensemble_weight)  # in the first pass
    while True:
        clock = StepClock()
        stops.before_step(rows, target.limit if target.hard_limit else None, lockstep is not None)
        active = [row for row in rows if row.finish_reason is None]
        if not active:
            return
        if lockstep is not None:
            active = list(rows)

        # draft: tokens x and the distributions q that they were drawn from
        drafts = [NO_DRAFT] * len(active)
        if drafter is not None and not skip_draft:
            most = [max_draft_tokens(row, target) for row in active]
            if lockstep is None:
                drafts = drafter.propose(active, most)
            else:
                ended = [filler is not None and row.finish_reason is not None for row in rows]
                drafts = drafter.propose(active, [0 if done else n for done, n in zip(ended, most, strict=True)])
                drafts = equal_lengths(drafts, most, ended, pad)
        clock.drafted()

        # verify: one pass of the target gives p at every drafted position and at the one after
        logits = target.logits(active, [d.tokens for d in drafts], [len(d.tokens) + 1 for d in drafts])
        blocks = [
            BlockDistributions(row, draft, out, ensemble_weight)
            for row, draft, out in zip(active, drafts, logits, strict=True)
        ]
        if not logits[0].is_cpu:
            read_choices(blocks)  # waits for the device, so that the clock measures the pass and not its launch
        clock.verified()

        # commit: the tokens that the verifier keeps, and one of the target's own
        row_steps = [RowStep(block, target.replayed_tokens.get(block.row.index, 0)) for block in blocks]
        steps: list[Step] = []
        try:
            if lockstep is not None:
                verify(row_steps, verifier, stops, recorder, lockstep, filler)
            else:
                for row_step in row_steps:
                    verify([row_step], verifier, stops, recorder)
        finally:  # tokens are kept also when one of the user's functions fails
            committed = [row_step for row_step in row_steps if row_step.emitted]
            steps = recorder.steps(committed, clock)
            for row_step, step in zip(committed, steps, strict=True):
                row_step.row.steps.append(step)
                row_step.row.schedule.update(step)
        yield from steps
        skip_draft = False


def verify(
    row_steps: Sequence[RowStep],
    verifier: Verifier,
    stops: StoppingChecker,
    recorder: Recorder,
    lockstep: Processors | None = None,
    filler: int | None = None,
) -> None:
    """Append the tokens that `verifier` yields, position by position, until a row rejects a token or ends.

    Args:
        row_steps: one row, or all rows that grow in lockstep.
        filler: the id that ended rows get instead of tokens.
    """
    rows = [row_step.row for row_step in row_steps]
    verified = [verifier(row_step.block, row_step.draft, row_step.row.generator) for row_step in row_steps]
    stateful = lockstep is not None and bool(lockstep.stateful)
    position, more = 0, True
    while more:
        if lockstep is not None and stateful:
            logits = torch.stack([row_step.block.logits[position] for row_step in row_steps])
            for row_step, scores in zip(row_steps, lockstep(input_ids(rows), logits), strict=True):
                row_step.block.set_scores(position, scores)
        if recorder.keeps_outputs:
            recorder.keep_outputs(row_steps, position)
        for row_step, tokens in zip(row_steps, verified, strict=True):
            row = row_step.row
            if row.finish_reason is None:
                token, accepted = next(tokens)
                row_step.emitted.append(token)
                row_step.accepted += accepted
            elif filler is None:
                token, accepted = next(tokens)
            else:
                token, accepted = filler, position < len(row_step.draft.tokens)
            row.ids.append(token)
            row.remaining_tokens -= 1
            more &= accepted
        if stops.end(rows, recorder.scores if recorder.shows_scores else None):
            more &= filler is None and any(row.finish_reason is None for row in rows)
        position += 1


def _drafts_at_once(target: LM, drafter: Drafter, ensemble_weight: float | None) -> bool:
    """Whether to draft before the target has read the prompt.

    A draft model would delay the first token, so it waits, except where the first token must follow the ensemble.
    """
    mixed = ensemble_weight is not None and not drafter.reads_target
    return target.drafts_first and (drafter.drafts_first or mixed)


def equal_lengths(drafts: Sequence[Draft], most: Sequence[int], ended: Sequence[bool], pad: int) -> list[Draft]:
    """Cut drafts to one length, for rows that grow in lockstep: tokens after the shortest draft could not be used.

    Args:
        most: number of tokens that may be drafted for each row.
        ended: rows that have ended; their draft is padding.
    """
    k = min(n if done else len(draft.tokens) for draft, n, done in zip(drafts, most, ended, strict=True))
    return [Draft([pad] * k) if done else draft.cut(k) for draft, done in zip(drafts, ended, strict=True)]


def max_draft_tokens(row: Row, target: LM) -> int:
    """Number of tokens worth drafting for a row: the step adds one itself, and the target's positions may end."""
    free, most = row.remaining_tokens - 1, target.max_draft_tokens(len(row.ids))
    return max(0, free if most is None else min(free, most))
