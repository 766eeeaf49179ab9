"""Hybrids: a lookup (prompt lookup, suffix decoding) drafts where that promises more, else a model drafter.

The rule compares what each would give: expected tokens per second where times may decide, else expected tokens. As in
SuffixDecoding 2411.04975 (section 3.3) and SAM-Decoding 2411.10666, which fall back on a model drafter by a threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

from specnb.decoding.contracts import Draft, Drafter, Row, Schedule
from specnb.decoding.schedules import Adaptive

if TYPE_CHECKING:
    from specnb.trace import Step

_DECAY = 0.85
_PRIOR = 1.0  # accepted tokens of a model draft, before there is one


class HybridSchedule:
    """The draft lengths of a lookup and of a model drafter, and which of the two drafts next.

    Args:
        lookup: the schedule of the lookup.
        model: the schedule of the model drafter.
        lookup_name: the lookup's `Step.source`.
    """

    def __init__(self, lookup: Schedule, model: Schedule, lookup_name: str) -> None:
        self._lookup, self._model, self._name = lookup, model, lookup_name
        self._timed = isinstance(lookup, Adaptive)
        self._estimate = lookup if isinstance(lookup, Adaptive) else Adaptive(1)
        self._rates: Sequence[float] = ()
        self._steps = self._model_drafts = 0
        # of steps in which the model drafter had its turn, in the mean: accepted tokens, drafted tokens, seconds
        self._accepted, self._drafted, self._draft_seconds = _PRIOR, _PRIOR, 0.0

    def length(self, match_length: int = 0, acceptance: Sequence[float] | None = None) -> int:
        """Number of tokens to draft next, for the lookup if there is a match, else for the model drafter."""
        if match_length == 0 and acceptance is None:
            return self._model.length()
        k = self._lookup.length(match_length, acceptance)
        known = self._estimate.acceptance(match_length) if acceptance is None else iter(acceptance)
        self._rates = [rate for rate, _ in zip(known, range(k), strict=False)]
        return k

    def prefers_lookup(self, k: int) -> bool:
        """Whether the k tokens of the lookup promise at least as much as a draft of the model drafter."""
        if not k:
            return False
        promised = 1 + sum(accumulate(self._rates[:k], mul))
        if not self._timed or not self._estimate.verify_seconds:
            return bool(promised >= 1 + self._accepted)
        other = self._estimate.pass_seconds(round(self._drafted) + 1) + self._draft_seconds
        return bool(promised / self._estimate.pass_seconds(k + 1) >= (1 + self._accepted) / max(other, 1e-9))

    def update(self, step: Step) -> None:
        """Learn from the row's last step."""
        self._steps += 1
        if step.source == self._name:
            self._lookup.update(step)
            if not self._timed:
                self._estimate.update(step)
            if isinstance(self._model, Adaptive):
                self._model.learn_pass(step)
            return
        self._model.update(step)
        self._estimate.learn_pass(step)
        if self._steps == 1:  # the first pass has the prompt, and no model draft
            return
        self._accepted = _DECAY * self._accepted + (1 - _DECAY) * step.accepted
        self._drafted = _DECAY * self._drafted + (1 - _DECAY) * len(step.drafted)
        if self._model_drafts:  # the first draft includes the prompt
            self._draft_seconds = _DECAY * self._draft_seconds + (1 - _DECAY) * step.draft_seconds
        self._model_drafts += bool(step.drafted)

    def learn_unused(self, match_length: int, right: int, proposed: int) -> None:
        """Learn from a proposal of the lookup that was not drafted: its first `right` tokens would have been right."""
        for i in range(min(right + 1, proposed)):
            self._estimate.count(match_length, i, i < right)


class Hybrid:
    """Drafts with a lookup or with a model drafter, row by row and step by step.

    Args:
        lookup, model: the drafters; the rows' schedules are `HybridSchedule`s.
        names: their names, for `Step.source`.
        learns: whether the lookup does not count by itself how good its proposals were.
    """

    reads_target = False

    def __init__(self, lookup: Drafter, model: Drafter, names: tuple[str, str], learns: bool) -> None:
        self._lookup, self._model, self._names, self._learns = lookup, model, names, learns
        self.drafts_first = lookup.drafts_first
        self.lm = getattr(model, "lm", None)
        self._unused: dict[int, tuple[int, Draft]] = {}  # by row: the length of its text, and what was not drafted

    def propose(self, rows: Sequence[Row], max_draft_tokens: Sequence[int]) -> list[Draft]:
        """A draft for each row, see `Drafter.propose`."""
        if self._learns:
            for row in rows:
                self._learn(row)
        found = self._lookup.propose(rows, max_draft_tokens)
        if not any(row.steps for row in rows) and not self._model.drafts_first:
            return [self._named(draft, 0) for draft in found]  # the target has read nothing yet
        chosen = [_schedule(row).prefers_lookup(len(draft.tokens)) for row, draft in zip(rows, found, strict=True)]
        left = [0 if one else n for one, n in zip(chosen, max_draft_tokens, strict=True)]
        drafted = self._model.propose(rows, left)  # also for none: it takes over the target's states
        drafts = []
        for row, one, lookup, model in zip(rows, chosen, found, drafted, strict=True):
            if not one and lookup.tokens:
                self._unused[row.index] = len(row.ids), lookup
            drafts.append(self._named(lookup, 0) if one else self._named(model, 1))
        return drafts

    def _named(self, draft: Draft, part: int) -> Draft:
        return draft._replace(source=self._names[part])

    def _learn(self, row: Row) -> None:
        """Compare what the lookup proposed in vain with what was written."""
        at, draft = self._unused.pop(row.index, (0, None))
        if draft is None:
            return
        written = row.ids[at:]
        right = next((i for i, pair in enumerate(zip(draft.tokens, written, strict=False)) if pair[0] != pair[1]), None)
        shown = min(len(written), len(draft.tokens))
        _schedule(row).learn_unused(draft.match_length, shown if right is None else right, shown)


def _schedule(row: Row) -> HybridSchedule:
    assert isinstance(row.schedule, HybridSchedule)
    return row.schedule
