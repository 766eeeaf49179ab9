"""Drafts by vote: all earlier occurrences of the end of a text say what followed them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

# Chosen on the texts of `bench.prompts`, by counting target passes
VOTE_BASE = 4.0
"""An occurrence of n matching tokens counts this to the power of n."""
RESUME_GAIN = 8.0
"""How much more an occurrence counts near the place where the last copy stands or broke off."""
FIRST_GAIN = 8.0
"""How much more the first occurrence counts, which is mostly in the prompt."""
_RESUME_FROM, _RESUME_TO = -2, 64  # near: tokens from that place


Occurrence: TypeAlias = tuple[float, int, int, bool]
"""An earlier occurrence of the end of a text.

The weight of its vote; the position of the token that followed; the number of tokens that match, backwards from there;
whether it is near the place where the last copy stands or broke off. A plain tuple, since many are made at each step.
"""
_WEIGHTS = tuple(VOTE_BASE**n for n in range(257))


class Elected(NamedTuple):
    """The tokens that were voted for.

    Args:
        tokens: their ids.
        shares: per token, its share of the votes.
        best: per token, the occurrence with most weight among those that agree with all tokens up to it; of equals the
            last one.
    """

    tokens: list[int]
    shares: list[float]
    best: list[Occurrence]


def is_near(position: int, copy: int | None) -> bool:
    """Whether a copy that stands at `copy` may go on at `position`; None if there is no copy."""
    return copy is not None and _RESUME_FROM <= position - copy <= _RESUME_TO


def weight(length: int, resumed: bool, first: bool) -> float:
    """The weight of an occurrence.

    Args:
        length: number of matching tokens.
        resumed: it is near the place where the last copy stands or broke off.
        first: it is the first one in the text.
    """
    votes = _WEIGHTS[min(length, 256)]
    if resumed:
        votes *= RESUME_GAIN
    return votes * FIRST_GAIN if first else votes


class Ballot:
    """The occurrences by what followed them, so that many that agree cost no more than one."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], tuple[float, Occurrence]] = {}  # weight of all, and the best

    def add(self, occurrence: Occurrence, continuation: tuple[int, ...]) -> None:
        """Add an occurrence and the tokens that followed it."""
        known = self._groups.get(continuation)
        if known is None:
            self._groups[continuation] = occurrence[0], occurrence
        else:
            self._groups[continuation] = known[0] + occurrence[0], max(known[1], occurrence)

    def elect(self, count: int, min_share: float = 0.0) -> Elected:
        """The token with most votes, then that of the occurrences that agree, and so on.

        Args:
            count: most tokens.
            min_share: ends after the token with which the product of the shares falls under this.
        """
        reached = 1.0
        elected = Elected([], [], [])
        live = list(self._groups.items())
        for i in range(count):
            votes: dict[int, float] = {}
            for tokens, (total, _) in live:
                if i < len(tokens):
                    votes[tokens[i]] = votes.get(tokens[i], 0.0) + total
            if not votes:
                break
            if len(votes) == 1 and len(live) == 1:
                ((token, _),), best = votes.items(), live[0][1][1]
            else:
                token = max(votes, key=votes.__getitem__)
                live = [group for group in live if i < len(group[0]) and group[0][i] == token]
                best = max([occurrence for _, (_, occurrence) in live])
            more = live[0][0][i:count] if len(live) == 1 else (token,)
            elected.tokens.extend(more)
            share = votes[token] / sum(votes.values())
            elected.shares.append(share)
            elected.shares.extend([1.0] * (len(more) - 1))
            elected.best.extend([best] * len(more))
            reached *= share
            if len(live) == 1 or reached < min_share:
                break
        return elected


def own_continuation(ids: Sequence[int], position: int, count: int) -> tuple[int, ...]:
    """What follows a position of a text, at most `count` tokens. At the end it goes on in its own copy.

    So a repeated pattern can be followed to any length.
    """
    tokens = tuple(ids[position : position + count])
    return (tokens * (count // len(tokens) + 1))[:count] if 0 < len(tokens) < count else tokens
