"""Drafts by vote: all earlier occurrences of the end of a text say what followed them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Chosen on the texts of `bench.prompts`, by counting target passes
VOTE_BASE = 4.0
"""An occurrence of n matching tokens counts this to the power of n."""
RESUME_GAIN = 8.0
"""How much more an occurrence counts near the place where the last copy stands or broke off."""
FIRST_GAIN = 8.0
"""How much more the first occurrence counts, which is mostly in the prompt."""
_RESUME_FROM, _RESUME_TO = -2, 64  # near: tokens from that place


class Occurrence(NamedTuple):
    """An earlier occurrence of the end of a text.

    Args:
        weight: of its vote.
        position: of the token that followed.
        length: number of tokens that match, backwards from there.
        resumed: it is near the place where the last copy stands or broke off.
    """

    weight: float
    position: int
    length: int
    resumed: bool


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


class Ballot:
    """The occurrences by what followed them, so that many that agree cost no more than one."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], tuple[float, Occurrence]] = {}  # weight of all, and the best

    def add(self, occurrence: Occurrence, continuation: tuple[int, ...]) -> None:
        """Add an occurrence and the tokens that followed it."""
        weight, best = self._groups.get(continuation, (0.0, occurrence))
        self._groups[continuation] = weight + occurrence.weight, max(best, occurrence)

    def elect(self, count: int) -> Elected:
        """The token with most votes, then that of the occurrences that agree, and so on, at most `count` tokens."""
        elected = Elected([], [], [])
        live = list(self._groups.items())
        for i in range(count):
            votes: dict[int, float] = {}
            for tokens, (weight, _) in live:
                if i < len(tokens):
                    votes[tokens[i]] = votes.get(tokens[i], 0.0) + weight
            if not votes:
                break
            token = max(votes, key=votes.__getitem__)
            live = [group for group in live if i < len(group[0]) and group[0][i] == token]
            best = max(occurrence for _, (_, occurrence) in live)
            more = live[0][0][i:count] if len(live) == 1 else (token,)
            elected.tokens.extend(more)
            elected.shares.append(votes[token] / sum(votes.values()))
            elected.shares.extend([1.0] * (len(more) - 1))
            elected.best.extend([best] * len(more))
            if len(live) == 1:
                break
        return elected


def own_continuation(ids: Sequence[int], position: int, count: int) -> tuple[int, ...]:
    """What follows a position of a text, at most `count` tokens. At the end it goes on in its own copy.

    So a repeated pattern can be followed to any length.
    """
    tokens = tuple(ids[position : position + count])
    return (tokens * (count // len(tokens) + 1))[:count] if 0 < len(tokens) < count else tokens
