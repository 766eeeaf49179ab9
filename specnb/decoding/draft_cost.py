"""What a draft costs by its length, learned from measured drafts."""

from __future__ import annotations


class DraftCost:
    """The line `a + b k` seconds for k drafted tokens, by least squares over past drafts; older ones count less.

    A drafter that runs once per token has a cost of b per token, one that fills a block in one pass (DFlash) a cost of
    a whatever the length. As long as all drafts have the same length, the two cannot be told apart: an observation of
    little weight, that no tokens cost nothing, then makes the cost proportional.
    """

    DECAY, ORIGIN_WEIGHT = 0.85, 0.05

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # decayed: of 1, k, k^2, seconds and k times seconds
        self._fixed = self._per_token = 0.0

    def add(self, k: int, seconds: float) -> None:
        """Learn from a draft of k tokens. One outlier counts at most double, so that no length is ruled out for good.

        Args:
            k: number of drafted tokens, at least 1.
            seconds: what they took together.
        """
        known = self.seconds(k)
        seconds = min(seconds, 2 * known) if known else seconds
        new = (1.0, k, k * k, seconds, k * seconds)
        self._sums = [self.DECAY * before + now for before, now in zip(self._sums, new, strict=True)]
        weight, ks, squares, total, products = self._sums
        weight += self.ORIGIN_WEIGHT
        per_token = max(0.0, (products - ks * total / weight) / (squares - ks * ks / weight))
        fixed = (total - per_token * ks) / weight
        if fixed < 0:  # neither part of a cost is negative
            fixed, per_token = 0.0, products / squares
        self._fixed, self._per_token = fixed, per_token

    def seconds(self, k: int) -> float:
        """Expected seconds of a draft of k tokens; 0 as long as nothing is known."""
        return self._fixed + self._per_token * k if k else 0.0
