"""Draft-length schedules. Each row has its own, told every step; what it answers depends on those steps alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from specnb.decoding.contracts import Schedule
from specnb.trace import Step


class Constant:
    """Always the same length."""

    def __init__(self, k: int) -> None:
        self.k = k

    def length(self, match_length: int = 0) -> int:
        return self.k

    def update(self, step: Step) -> None:
        pass


class Heuristic(Constant):
    """Two more when the whole draft was accepted, one fewer otherwise; unchanged when nothing was drafted.

    transformers' rule of that name, but every call starts afresh.
    """

    def update(self, step: Step) -> None:
        if step.drafted:
            self.k = self.k + 2 if step.accepted == len(step.drafted) else max(1, self.k - 1)


class Adaptive:
    """The length, 0 included, that promises most tokens per second, from the costs and the acceptance seen so far.

    A step with k drafted tokens is expected to yield 1 + a1 + a1 a2 + ... + a1...ak tokens in the seconds of k draft tokens
    and of a target pass over k + 1. Acceptance a_i is counted by position and by the drafter's match_length (how long a match
    was), older steps weighing less; the cost of block sizes not yet seen is interpolated. Where plain decoding looks best, a
    draft is tried after a while, each time later if it did not help; prompt lookup tells what it would have drafted instead.
    """

    MAX_LENGTH, DECAY, PRIOR_WEIGHT, PRIOR_ACCEPTANCE = 32, 0.95, 2.0, 0.6
    FIRST_PROBE, LAST_PROBE = 6, 96

    def __init__(self, k: int) -> None:
        self.k = k
        self.max_length = max(k, self.MAX_LENGTH)
        self.verify: dict[int, float] = {}  # seconds by block size
        self.draft: float | None = None  # seconds per drafted token
        self.drafted: dict[tuple[int, int], float] = defaultdict(float)  # by match_length and position
        self.accepted: dict[tuple[int, int], float] = defaultdict(float)
        self.steps = self.drafting_steps = 0
        self.plain_steps, self.probe_after = 0, self.FIRST_PROBE
        self.knows_lookahead = False  # whether the drafter says what it lookahead_token, so that nothing need be tried to learn

    def length(self, match_length: int = 0) -> int:
        if not self.verify:
            return self.k
        best = self._best(match_length)
        if best == 0 and self.plain_steps >= self.probe_after and not self.knows_lookahead:
            return max(1, self.k // 2)
        return best

    def update(self, step: Step) -> None:
        self.steps += 1
        k = len(step.drafted)
        if self.steps > 1:  # the first pass has the prompt in it
            self.verify[k + 1] = _moving_average(self.verify.get(k + 1), step.verify_seconds)
        if step.lookahead_token is not None:
            self.knows_lookahead = True
            if step.accepted == k < len(step.emitted):  # the token after a full draft tells about one more
                self._count(step.match_length, k, step.emitted[k] == step.lookahead_token)
        if not k:
            self.plain_steps += 1
            return
        self.drafting_steps += 1
        if self.drafting_steps > 1:  # so has the first draft
            self.draft = _moving_average(self.draft, step.draft_seconds / k)
        if self.plain_steps:
            self.probe_after = self.FIRST_PROBE if step.accepted else min(2 * self.probe_after, self.LAST_PROBE)
            self.plain_steps = 0
        for i in range(min(step.accepted + 1, k)):
            self._count(step.match_length, i, i < step.accepted)

    def _count(self, match_length: int, position: int, was_accepted: bool) -> None:
        at = match_length, position
        self.drafted[at] = self.DECAY * self.drafted[at] + 1
        self.accepted[at] = self.DECAY * self.accepted[at] + was_accepted

    def _best(self, match_length: int) -> int:
        """The length with most expected tokens per second; the shorter of equals."""
        best, highest, tokens, alive = 0, 0.0, 1.0, 1.0
        acceptance = self._acceptance(match_length)
        for k in range(self.max_length + 1):
            if k:
                alive *= next(acceptance)
                tokens += alive
            seconds = max(self._cost(k + 1) + k * (self.draft or 0.0), 1e-9)  # a coarse clock may have seen nothing
            if tokens / seconds > highest:
                best, highest = k, tokens / seconds
        return best

    def _acceptance(self, match_length: int) -> Iterator[float]:
        """By position, leaning on the whole match_length's rate, which leans on a belief."""
        drafted = sum(value for at, value in self.drafted.items() if at[0] == match_length)
        accepted = sum(value for at, value in self.accepted.items() if at[0] == match_length)
        pooled = (accepted + self.PRIOR_WEIGHT * self.PRIOR_ACCEPTANCE) / (drafted + self.PRIOR_WEIGHT)
        for position in range(self.max_length):
            at = match_length, position
            yield (self.accepted.get(at, 0.0) + self.PRIOR_WEIGHT * pooled) / (self.drafted.get(at, 0.0) + self.PRIOR_WEIGHT)

    def _cost(self, size: int) -> float:
        """Seconds of a pass over `size` tokens: measured, or on the line through the nearest measured sizes."""
        if size in self.verify:
            return self.verify[size]
        below = max((s for s in self.verify if s < size), default=None)
        above = min((s for s in self.verify if s > size), default=None)
        if below is None or above is None:
            near = self.verify[below if below is not None else above]  # type: ignore[index]
            return near * (1 + 0.02 * (size - (below or 0))) if above is None else near
        share = (size - below) / (above - below)
        return self.verify[below] + share * (self.verify[above] - self.verify[below])


def _moving_average(old: float | None, new: float) -> float:
    """A running cost. It at most doubles its view at once: a hiccup must not put a length out of sight for good."""
    return new if old is None else 0.7 * old + 0.3 * min(new, 2 * old)


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "heuristic": Heuristic,
    "heuristic_transient": Heuristic,  # transformers' name for one that starts afresh in each call, as ours always does
    "adaptive": Adaptive,
}
