"""The loop: draft, verify, commit; until every row has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from specnb.decoding.contracts import Draft, Drafter, Row, Rule
from specnb.decoding.lm import LM
from specnb.decoding.probabilities import Law, read_choices
from specnb.decoding.stops import Stops
from specnb.trace import Step

NOTHING = Draft([])


def decode(target: LM, drafter: Drafter | None, rows: Sequence[Row], *, rule: Rule, stops: Stops,
           ensemble_weight: float | None = None, margins: bool = False, probabilities: bool = False) -> Iterator[Step]:  # fmt: skip
    """Generate until every row has a `finish_reason`; yields each step as soon as it is committed.

    Each round is one target pass over all active rows: `drafter` proposes, `rule` says what stands, each row's schedule is told.
    With `ensemble_weight` drafted positions follow the mixed law. With `margins` steps record the gap between the two best
    logits of each token, with `probabilities` what drafter and target gave each drafted token.
    """
    mixed = ensemble_weight is not None
    first = True  # the first token waits for no draft model, unless it is to follow the mix
    while True:
        began = time.perf_counter()
        stops.before_step(
            [row for row in rows if row.finish_reason is None], target.limit if target.hard_limit else None
        )
        active = [row for row in rows if row.finish_reason is None]
        if not active:
            return
        drafts = [NOTHING] * len(active)
        at_once = target.drafts_first and (
            drafter is None or drafter.drafts_first or (mixed and not drafter.reads_target)
        )
        if drafter is not None and (at_once or not first):
            drafts = drafter.propose(active, [room(row, target) for row in active])
        drafted = time.perf_counter()
        logits = target.logits(active, [d.tokens for d in drafts], [len(d.tokens) + 1 for d in drafts])
        laws = [Law(row, draft, out, ensemble_weight) for row, draft, out in zip(active, drafts, logits, strict=True)]
        if not logits[0].is_cpu:
            read_choices(laws)  # also waits: the clock is to show the pass, not its launch
        verified = time.perf_counter()
        outcomes = []
        for row, draft, law in zip(active, drafts, laws, strict=True):
            position, emitted, accepted = len(row.ids), [], 0
            for token, stands in rule(law, draft, row.generator):
                row.ids.append(token)
                row.room -= 1
                emitted.append(token)
                accepted += stands
                row.finish_reason = stops.reason(row)
                if row.finish_reason is not None:
                    break
            gaps = law.margins(len(emitted)) if margins else None
            judged = range(min(len(emitted), len(draft.tokens)) if probabilities else 0)
            chances = tuple(law.probability(i) for i in judged) or None
            outcomes.append((position, accepted, tuple(emitted), gaps, chances))
        done, n = time.perf_counter(), len(active)
        seconds = (drafted - began) / n, (verified - drafted) / n, (done - verified) / n
        for row, draft, law, (position, accepted, tokens, gaps, chances) in zip(
            active, drafts, laws, outcomes, strict=True
        ):
            distances, own = tuple(law.distances) or None, tuple(draft.probabilities or ()) or None
            step = Step(position, tuple(draft.tokens), accepted, tokens, *seconds, row.index, gaps, draft.signal,
                        distances, own, chances, draft.withheld)  # fmt: skip
            row.steps.append(step)
            row.schedule.update(step)
        yield from [row.steps[-1] for row in active]
        first = False


def room(row: Row, target: LM) -> int:
    """Most tokens worth drafting: the step adds one of its own, and positions end where the model's do."""
    free, most = row.room - 1, target.room(len(row.ids))
    return max(0, free if most is None else min(free, most))
