"""Finds out, over a run, that drafted tokens were not drawn from the distributions that were given with them."""

from __future__ import annotations

import math
from collections.abc import Sequence

_STAKES = (0.9, 0.5, -0.5, -0.9)
_ALARM = math.log(1e9)


class DrawCheck:
    """A bet against the claim that each token x was drawn from its q.

    If it was, q(x) is on average the sum of q squared, whatever came before. So the product of
    1 + stake (q(x) - sum q^2) over all drafted tokens is a martingale that starts at 1, and so is its mean over several
    stakes. By Ville's inequality the chance that an honest drafter ever brings it to 1e9 is at most 1e-9. A drafter
    that takes the most probable token, or holds back unlikely ones, gets there after some hundred tokens.

    Attributes:
        tokens: how many were seen.
        given, expected: sums of q(x) and of sum q^2 over them.
    """

    def __init__(self) -> None:
        self.tokens, self.given, self.expected = 0, 0.0, 0.0
        self._capital = [0.0] * len(_STAKES)  # logarithms

    def add(self, given: Sequence[float], expected: Sequence[float]) -> bool:
        """Note drafted tokens.

        Args:
            given: q(x) of each token.
            expected: the sum of q squared at each.

        Returns:
            Whether the claim can still be believed.
        """
        for p, mean in zip(given, expected, strict=True):
            self.tokens, self.given, self.expected = self.tokens + 1, self.given + p, self.expected + mean
            for i, stake in enumerate(_STAKES):
                self._capital[i] += math.log1p(stake * (p - mean))
        most = max(self._capital)
        mean_capital = most + math.log(sum(math.exp(one - most) for one in self._capital) / len(_STAKES))
        return mean_capital < _ALARM
