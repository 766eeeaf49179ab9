"""Finds earlier occurrences of the end of a text, in the text itself or in others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

SEPARATOR = -1  # stands between two texts; no token has this id


Match: TypeAlias = tuple[int, int]
"""An earlier occurrence of the end of a text: the position of the token that followed, and how many tokens match."""


class SuffixIndex:
    """The occurrences of n-grams in texts that grow at the end and can be dropped at the front.

    Stands for the suffix tree of suffix decoding (2411.04975) at a cost that Python can pay. For n = 1, 2, 4, 8, 16,
    `_last` has the last occurrence of each n-gram by its hash, and `_before` has for each occurrence the one before it.
    Every length in between is found by comparing tokens. Adding a token costs five dictionary operations. A look-up
    costs O(`most`) for each n, whatever the length of the texts; the continuations of all occurrences, and so their
    counts, follow from the positions.

    Positions count from the first text ever added, so that they stay valid when texts are dropped.
    """

    NGRAMS = (1, 2, 4, 8, 16)

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.base = 0  # position of tokens[0]
        self._start = 0  # position at which the last text starts
        self._last: list[dict[int, int]] = [{} for _ in self.NGRAMS]
        self._before: list[list[int]] = [[] for _ in self.NGRAMS]  # for each position of an occurrence's end

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.base + len(self.tokens)

    @property
    def length(self) -> int:
        """Number of tokens of the last text."""
        return self.end - self._start

    def begin(self) -> None:
        """Begin another text: nothing matches across the boundary."""
        self.tokens.append(SEPARATOR)
        self._start = self.end
        self._index()

    def extend(self, ids: Sequence[int]) -> None:
        """Add tokens to the last text."""
        self.tokens.extend(ids)
        self._index()

    def _index(self) -> None:
        """Index the n-grams that end where `_before` ends and that a token of their own text follows."""
        tokens, base = self.tokens, self.base
        start, stop = self._start - base, len(tokens)
        for n, last, before in zip(self.NGRAMS, self._last, self._before, strict=True):
            add, get = before.append, last.get
            for at in range(len(before), stop):
                if at - n < start:
                    add(-1)
                    continue
                key = hash(tuple(tokens[at - n : at]))
                add(get(key, -1))
                last[key] = base + at

    def drop(self, count: int) -> None:
        """Drop the first `count` tokens, which must be whole texts."""
        tokens, base = self.tokens, self.base
        for n, last, before in zip(self.NGRAMS, self._last, self._before, strict=True):
            for at in range(n, count):
                key = hash(tuple(tokens[at - n : at]))
                if last.get(key) == base + at:
                    del last[key]
            del before[:count]
        del tokens[:count]
        self.base += count

    def matches(self, ids: Sequence[int], shortest: int, longest: int, most: int) -> list[Match]:
        """Earlier occurrences of the suffixes of `ids`, the longest ones included.

        Args:
            ids: a text; it may be the last text of the index itself.
            shortest: shorter matches are left out, as far as `NGRAMS` tell.
            longest: longer matches are cut to this length, in tokens.
            most: for each n of `NGRAMS`, the most recent occurrences are looked at, at most this many.
        """
        tokens, base, size = self.tokens, self.base, len(ids)
        limit = min(longest, size)
        found: dict[int, int] = {}
        for n, last, before in zip(reversed(self.NGRAMS), reversed(self._last), reversed(self._before), strict=True):
            if not shortest <= n <= limit:
                continue
            position, left = last.get(hash(tuple(ids[size - n :])), -1), most
            while position > base and left:
                if position not in found:
                    at, length = position - base, n
                    end = min(limit, at)
                    while length < end and tokens[at - 1 - length] == ids[size - 1 - length]:
                        length += 1
                    found[position] = length
                left -= 1
                position = before[position - base]
            if not left:
                break
        return list(found.items())

    def continuation(self, position: int, count: int) -> tuple[int, ...]:
        """What follows a position in its text, at most `count` tokens; empty if the text was dropped.

        At the end of the last text it goes on in its own copy, so that a repeated pattern is followed to any length.
        """
        at = position - self.base
        if at < 0:
            return ()
        tokens = tuple(self.tokens[at : at + count])
        if SEPARATOR in tokens:
            return tokens[: tokens.index(SEPARATOR)]
        if 0 < len(tokens) < count and position >= self._start:
            tokens = (tokens * (count // len(tokens) + 1))[:count]
        return tokens
