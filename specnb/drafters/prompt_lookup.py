"""Prompt lookup: copies what followed the same tokens earlier in the text. It needs no model; q is a point mass."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

from specnb.decoding.contracts import Draft, Row
from specnb.drafters.votes import Ballot, is_near, own_continuation, weight

_MOST_PLACES = 16  # of an n-gram, that are looked at
_MOST_CONTEXT = 24  # tokens before two places that are compared


class NgramIndex:
    """The places of each n-gram of 1 to `size` tokens in a growing list of ids.

    Adding a token and looking up cost O(size) dictionary operations, whatever the length of the text.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._places: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(size)]
        self._indexed = 0  # n-grams that end before this position are indexed

    def extend(self, ids: Sequence[int]) -> None:
        """Index every n-gram of `ids` that is followed by a token."""
        for end in range(max(1, self._indexed + 1), len(ids)):
            for n in range(1, min(self.size, end) + 1):
                self._places[n - 1].setdefault(tuple(ids[end - n : end]), []).append(end)
            self._indexed = end

    def find(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """Find the longest suffix of `ids` that occurs earlier.

        Returns:
            The positions after its earlier occurrences, in order, and its length; ([], 0) if there is none.
        """
        for n in range(min(self.size, len(ids) - 1), 0, -1):
            places = self._places[n - 1].get(tuple(ids[len(ids) - n :]))
            if places is not None:
                return places, n
        return [], 0


class PromptLookup:
    """Proposes what followed earlier occurrences of the longest matching suffix (Saxena 2023).

    If there are several, they vote token by token. One counts more the longer the text before it matches, if it is the
    first one, and near the place where the last copy broke off, so that a copy that went astray finds its way back. A
    continuation that reaches the end of the text goes on in its own copy, so that a repeated pattern can be drafted to
    any length. A draft ends at an end-of-sequence token.

    Args:
        max_matching_ngram_size: the longest suffix to look up, in tokens.
        eos: the ids of end-of-sequence tokens.
    """

    drafts_first = True
    reads_target = False

    def __init__(self, max_matching_ngram_size: int, eos: Collection[int] = ()) -> None:
        self.size, self.eos = max_matching_ngram_size, eos
        self._indexes: dict[int, NgramIndex] = {}
        self._copies: dict[int, tuple[int, int, list[int]]] = {}  # by row: text's length then, place, copied tokens

    def propose(self, rows: Sequence[Row], max_draft_tokens: Sequence[int]) -> list[Draft]:
        """A draft for each row, see `Drafter.propose`."""
        return [self._propose(row, n) for row, n in zip(rows, max_draft_tokens, strict=True)]

    def _propose(self, row: Row, max_draft_tokens: int) -> Draft:
        index = self._indexes.setdefault(row.index, NgramIndex(self.size))
        index.extend(row.ids)
        places, matched = index.find(row.ids)
        if not matched:
            return Draft([])
        most = min(max_draft_tokens, row.schedule.length(matched))
        copy = self._copy_stands_at(row)
        ballot = Ballot()
        for place in [*reversed(places[1:][-_MOST_PLACES:]), places[0]]:  # of equal votes the most recent wins
            context, resumed = _matching_context(row.ids, place, matched), is_near(place, copy)
            votes = weight(context, resumed, place == places[0])
            ballot.add((votes, place, context, resumed), own_continuation(row.ids, place, most + 1))
        elected = ballot.elect(most + 1)
        tokens = elected.tokens
        self._copies[row.index] = len(row.ids), elected.best[-1][1], tokens
        for i, token in enumerate(tokens[:most]):
            if token in self.eos:
                return Draft(tokens[: i + 1], match_length=matched)
        return Draft(tokens[:most], match_length=matched, lookahead_token=tokens[most])

    def _copy_stands_at(self, row: Row) -> int | None:
        """Where the row's last copy stands or broke off; None if there was none."""
        if row.index not in self._copies:
            return None
        copied_from, place, tokens = self._copies[row.index]
        right = takewhile(lambda pair: pair[0] == pair[1], zip(row.ids[copied_from:], tokens, strict=False))
        return place + sum(1 for _ in right)


def _matching_context(ids: Sequence[int], place: int, matched: int) -> int:
    """Number of tokens before `place` that equal the end of the text, of which `matched` are known to do so."""
    length, limit, size = matched, min(place, _MOST_CONTEXT), len(ids)
    while length < limit and ids[place - 1 - length] == ids[size - 1 - length]:
        length += 1
    return length
