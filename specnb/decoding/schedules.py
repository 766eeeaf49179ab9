"""Draft-length schedules. Each row has its own; its draft lengths depend on that row's steps alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul

from specnb.decoding.contracts import Schedule
from specnb.decoding.draft_cost import DraftCost
from specnb.trace import Step


class Constant:
    """Always the same length, k."""

    def __init__(self, k: int) -> None:
        self.k = k

    def length(self, match_length: int = 0, acceptance: Sequence[float] | None = None) -> int:
        """Number of tokens to draft next."""
        return self.k

    def update(self, step: Step) -> None:
        """Ignore the step."""


class Heuristic(Constant):
    """Two more if the whole draft was accepted, one fewer otherwise; unchanged if nothing was drafted.

    The "heuristic" schedule of transformers' assisted generation, but every call starts at k.
    """

    def update(self, step: Step) -> None:
        """Adjust the length to the number of accepted tokens."""
        if step.drafted:
            self.k = self.k + 2 if step.accepted == len(step.drafted) else max(1, self.k - 1)


class Adaptive:
    """The length, 0 included, with the most expected tokens per second, from measured times and acceptance rates.

    A step with k drafted tokens yields 1 + a1 + a1 a2 + ... + a1...ak expected tokens (Leviathan et al. 2211.17192,
    section 3.1, with an acceptance rate a_i per position) in the time of k draft tokens and of a target pass over k + 1
    tokens. Acceptance rates are kept by position and by match_length, and older steps count less. The time of block
    sizes that have not been measured is estimated from the others. Where the target has running states, a rejected
    draft also costs a longer next pass. While plain decoding looks best, a draft is tried from time to time, less often
    if it did not help. No such trial is needed in prompt lookup, which reports its `lookahead_token`, and in suffix
    decoding, which knows how often its drafts would have been accepted.

    Args:
        k: the length of the first draft, or more as far as all of it is more likely to be accepted than not.
    """

    MAX_LENGTH, DECAY, PRIOR_WEIGHT, PRIOR_ACCEPTANCE = 32, 0.95, 2.0, 0.6
    FIRST_PROBE, LAST_PROBE = 6, 96

    def __init__(self, k: int) -> None:
        self.k = k
        self.max_length = max(k, self.MAX_LENGTH)
        self.verify_seconds: dict[int, float] = {}  # by block size
        self.draft_cost = DraftCost()
        self.drafted: dict[tuple[int, int], float] = defaultdict(float)  # by match_length and position
        self.accepted: dict[tuple[int, int], float] = defaultdict(float)
        self.steps = self.drafting_steps = 0
        self.plain_steps, self.probe_after = 0, self.FIRST_PROBE
        self.replays = False  # the target has running states, so that a rejected draft makes the next pass longer
        self.pending = 0  # tokens that the next pass feeds again
        self.knows_lookahead = False  # the drafter reports it, so no trial drafts are needed

    def length(self, match_length: int = 0, acceptance: Sequence[float] | None = None) -> int:
        """Number of tokens to draft next."""
        if not self.verify_seconds:
            probable = sum(1 for reached in accumulate(acceptance or (), mul) if reached >= 0.5)
            return max(self.k, min(probable, self.max_length))
        best = self._best(self.acceptance(match_length) if acceptance is None else iter(acceptance))
        if best == 0 and acceptance is None and self.plain_steps >= self.probe_after and not self.knows_lookahead:
            return 1 if self.replays else max(1, self.k // 2)
        return best

    def update(self, step: Step) -> None:
        """Learn times and acceptance from the row's last step."""
        self.learn_pass(step)
        k = len(step.drafted)
        if step.lookahead_token is not None:
            self.knows_lookahead = True
            # the token after a full draft shows whether one more would have been accepted
            if step.accepted == k < len(step.emitted):
                self.count(step.match_length, k, step.emitted[k] == step.lookahead_token)
        if not k:
            self.plain_steps += 1
            return
        self.drafting_steps += 1
        if self.drafting_steps > 1:  # so does the first draft
            self.draft_cost.add(k, step.draft_seconds)
        if step.accepted:
            self.probe_after = self.FIRST_PROBE
        elif self.plain_steps >= self.probe_after:
            self.probe_after = min(4 * self.probe_after, self.LAST_PROBE)
        self.plain_steps = 0
        for i in range(min(step.accepted + 1, k)):
            self.count(step.match_length, i, i < step.accepted)

    def learn_pass(self, step: Step) -> None:
        """Learn only what the target's pass cost."""
        self.steps += 1
        if self.steps > 1:  # the first pass includes the prompt
            size = len(step.drafted) + 1 + step.replayed_tokens
            known = self.verify_seconds
            known[size] = _moving_average(known.get(size), step.verify_seconds)
            # a smaller pass is not slower: what held one up does not count once a larger one was faster
            known.update({smaller: min(known[smaller], known[size]) for smaller in known if smaller < size})
        self.replays |= step.replayed_tokens > 0
        self.pending = step.replayed_tokens + len(step.emitted) if self.replays and step.rejected else 0

    def count(self, match_length: int, position: int, was_accepted: bool) -> None:
        """Count a drafted token at a position of the draft."""
        key = match_length, position
        self.drafted[key] = self.DECAY * self.drafted[key] + 1
        self.accepted[key] = self.DECAY * self.accepted[key] + was_accepted

    def _best(self, acceptance: Iterator[float]) -> int:
        """The length with most expected tokens per second; the shorter of equals."""
        best, highest, tokens, reached = 0, 0.0, 1.0, 1.0
        for k in range(self.max_length + 1):
            if k:
                rate = next(acceptance, None)
                if rate is None:
                    break
                reached *= rate
                tokens += reached
            size = k + 1 + self.pending
            seconds = max(self.pass_seconds(size) + self.draft_cost.seconds(k), 1e-9)  # a coarse clock may measure 0
            if self.replays and k:
                seconds += (1 - reached) * max(0.0, self.pass_seconds(size + round(tokens)) - self.pass_seconds(size))
            if tokens / seconds > highest:
                best, highest = k, tokens / seconds
        return best

    def acceptance(self, match_length: int) -> Iterator[float]:
        """The acceptance rate by position.

        It is smoothed towards the rate of all positions of the same match_length, and that towards `PRIOR_ACCEPTANCE`.
        """
        drafted = sum(value for key, value in self.drafted.items() if key[0] == match_length)
        accepted = sum(value for key, value in self.accepted.items() if key[0] == match_length)
        pooled = (accepted + self.PRIOR_WEIGHT * self.PRIOR_ACCEPTANCE) / (drafted + self.PRIOR_WEIGHT)
        for position in range(self.max_length):
            key = match_length, position
            accepted, drafted = self.accepted.get(key, 0.0), self.drafted.get(key, 0.0)
            yield (accepted + self.PRIOR_WEIGHT * pooled) / (drafted + self.PRIOR_WEIGHT)

    def pass_seconds(self, size: int) -> float:
        """Seconds of a pass over `size` tokens: measured, or on the line through the nearest measured sizes.

        Beyond these, a token costs what it does between the smallest and the largest of them, drawn towards 2 %.
        """
        known = self.verify_seconds
        if size in known:
            return known[size]
        low, high = min(known), max(known)
        near = low if size < low else high
        if low < size < high:
            near = low = max(s for s in known if s < size)
            high = min(s for s in known if s > size)
            slope = (known[high] - known[low]) / (high - low)
        else:
            slope = (max(0.0, known[high] - known[low]) + 0.02 * known[near]) / (high - low + 1)
        return max(known[near] + slope * (size - near), known[near] * min(1.0, size / near))


def _moving_average(old: float | None, new: float) -> float:
    """A running cost. One outlier at most doubles it before averaging, so that no length is ruled out for good."""
    return new if old is None else 0.7 * old + 0.3 * min(new, 2 * old)


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "heuristic": Heuristic,
    "heuristic_transient": Heuristic,  # transformers' name for starting each call at k, which all schedules here do
    "adaptive": Adaptive,
}
