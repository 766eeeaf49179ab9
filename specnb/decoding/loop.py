"""The loop: draft, verify, commit; until every row has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from specnb.decoding.contracts import Draft, Drafter, Row, Rule, seen
from specnb.decoding.lm import LM
from specnb.decoding.probabilities import Law, Processors, read_choices
from specnb.decoding.record import Record, Turn
from specnb.decoding.stops import Stops
from specnb.trace import Step

NOTHING = Draft([])


def decode(
    target: LM,
    drafter: Drafter | None,
    rows: Sequence[Row],
    *,
    rule: Rule,
    stops: Stops,
    ensemble_weight: float | None = None,
    together: Processors | None = None,
    pad: int = 0,
    record: Record | None = None,
) -> Iterator[Step]:
    """Generate until every row has a `finish_reason`; yields each step as soon as it is committed.

    Each round is one target pass over all active rows: `drafter` proposes, `rule` says what stands, each row's schedule is told.
    With `ensemble_weight` drafted positions follow the mixed law. `record` says what else is kept.

    Rows are decoded each as if alone. With `together` (the logits processors of all rows) they grow in step, as in generate():
    what looks at all rows is called once per token, and a row that has ended goes on, with `pad` where `stops.pads`, until all have.
    """
    record = record or Record()
    mixed = ensemble_weight is not None
    filler = pad if together is not None and stops.pads else None
    first = True  # the first token waits for no draft model, unless it is to follow the mix
    while True:
        began = time.perf_counter()
        stops.before_step(rows, target.limit if target.hard_limit else None, together is not None)
        active = [row for row in rows if row.finish_reason is None]
        if not active:
            return
        if together is not None:
            active = list(rows)
        drafts = [NOTHING] * len(active)
        at_once = target.drafts_first and (
            drafter is None or drafter.drafts_first or (mixed and not drafter.reads_target)
        )
        if drafter is not None and (at_once or not first):
            rooms = [room(row, target) for row in active]
            if together is None:
                drafts = drafter.propose(active, rooms)
            else:
                ended = [filler is not None and row.finish_reason is not None for row in rows]
                drafts = drafter.propose(active, [0 if done else n for done, n in zip(ended, rooms, strict=True)])
                drafts = level(drafts, rooms, ended, pad)
        drafted = time.perf_counter()
        logits = target.logits(active, [d.tokens for d in drafts], [len(d.tokens) + 1 for d in drafts])
        laws = [Law(row, draft, out, ensemble_weight) for row, draft, out in zip(active, drafts, logits, strict=True)]
        if not logits[0].is_cpu:
            read_choices(laws)  # also waits: the clock is to show the pass, not its launch
        verified = time.perf_counter()
        turns = [Turn(row, draft, law) for row, draft, law in zip(active, drafts, laws, strict=True)]
        steps: list[Step] = []
        try:
            if together is not None:
                judge(turns, rule, stops, record, together, filler)
            else:
                for turn in turns:
                    judge([turn], rule, stops, record)
        finally:  # also when one of the user's functions fails: tokens that stand are kept
            steps = commit([turn for turn in turns if turn.emitted], record, (began, drafted, verified))
        yield from steps
        first = False


def judge(
    turns: Sequence[Turn],
    rule: Rule,
    stops: Stops,
    record: Record,
    together: Processors | None = None,
    filler: int | None = None,
) -> None:
    """Let `rule` go through the blocks of rows that grow in step, one row in most cases: position by position, until one of
    them does not accept or ends."""
    rows = [turn.row for turn in turns]
    verdicts = [rule(turn.law, turn.draft, turn.row.generator) for turn in turns]
    foreign = together is not None and bool(together.foreign)
    i, more = 0, True
    while more:
        if together is not None and foreign:
            scores = together(seen(rows), torch.stack([turn.law.logits[i] for turn in turns]))
            for turn, own in zip(turns, scores, strict=True):
                turn.law.give(i, own)
        if record.keeps:
            record.column(turns, i)
        for turn, verdict in zip(turns, verdicts, strict=True):
            row = turn.row
            if row.finish_reason is None:
                token, stands = next(verdict)
                turn.emitted.append(token)
                turn.accepted += stands
            elif filler is None:
                token, stands = next(verdict)
            else:
                token, stands = filler, i < len(turn.draft.tokens)
            row.ids.append(token)
            row.room -= 1
            more &= stands
        if stops.end(rows, record.scores if record.shown else None):
            more &= filler is None and any(row.finish_reason is None for row in rows)
        i += 1


def commit(turns: Sequence[Turn], record: Record, times: tuple[float, float, float]) -> list[Step]:
    """Make the steps of rows that got tokens, and tell their schedules."""
    if not turns:
        return []
    fields = record.of(turns)
    began, drafted, verified = times
    done, n = time.perf_counter(), len(turns)
    seconds = (drafted - began) / n, (verified - drafted) / n, (done - verified) / n
    for turn, kept in zip(turns, fields, strict=True):
        row, draft = turn.row, turn.draft
        step = Step(
            turn.position,
            tuple(draft.tokens),
            turn.accepted,
            tuple(turn.emitted),
            *seconds,
            row.index,
            signal=draft.signal,
            distances=tuple(turn.law.distances) or None,
            draft_probabilities=tuple(draft.probabilities or ()) or None,
            withheld=draft.withheld,
            **kept,
        )
        row.steps.append(step)
        row.schedule.update(step)
    return [turn.row.steps[-1] for turn in turns]


def level(drafts: Sequence[Draft], rooms: Sequence[int], ended: Sequence[bool], pad: int) -> list[Draft]:
    """Drafts of one length, for rows that grow in step: behind the shortest none could be used. Ended rows draft their padding."""
    k = min(n if done else len(draft.tokens) for draft, n, done in zip(drafts, rooms, ended, strict=True))
    return [Draft([pad] * k) if done else draft.cut(k) for draft, done in zip(drafts, ended, strict=True)]


def room(row: Row, target: LM) -> int:
    """Most tokens worth drafting: the step adds one of its own, and positions end where the model's do."""
    free, most = row.room - 1, target.room(len(row.ids))
    return max(0, free if most is None else min(free, most))
