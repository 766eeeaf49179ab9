"""Prompt lookup: copies what followed the same tokens earlier in the text. It needs no model; q is a point mass."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specnb.decoding.contracts import Draft, Row


class NgramIndex:
    """The last place of each n-gram of 1 to `size` tokens in a growing list of ids.

    Adding a token and looking up cost O(size) dictionary operations, whatever the length of the text.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._last: list[dict[tuple[int, ...], int]] = [{} for _ in range(size)]
        self._indexed = 0  # n-grams that end before this position are indexed

    def extend(self, ids: Sequence[int]) -> None:
        """Index every n-gram of `ids` that is followed by a token."""
        for end in range(max(1, self._indexed + 1), len(ids)):
            for n in range(1, min(self.size, end) + 1):
                self._last[n - 1][tuple(ids[end - n : end])] = end
            self._indexed = end

    def find(self, ids: Sequence[int]) -> tuple[int, int]:
        """Find the longest suffix of `ids` that occurs earlier.

        Returns:
            The position after its most recent earlier occurrence, and its length; (0, 0) if there is none.
        """
        for n in range(min(self.size, len(ids) - 1), 0, -1):
            at = self._last[n - 1].get(tuple(ids[len(ids) - n :]))
            if at is not None:
                return at, n
        return 0, 0


class PromptLookup:
    """Proposes the continuation of the most recent earlier occurrence of the longest matching suffix (Saxena 2023).

    A continuation that reaches the end of the text goes on in its own copy, so that a repeated pattern can be drafted
    to any length. A draft ends at an end-of-sequence token.

    Args:
        max_matching_ngram_size: the longest suffix to look up, in tokens.
        eos: the ids of end-of-sequence tokens.
    """

    drafts_first = True
    reads_target = False

    def __init__(self, max_matching_ngram_size: int, eos: Collection[int] = ()) -> None:
        self.size, self.eos = max_matching_ngram_size, eos
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, rows: Sequence[Row], max_draft_tokens: Sequence[int]) -> list[Draft]:
        """A draft for each row, see `Drafter.propose`."""
        return [self._propose(row, n) for row, n in zip(rows, max_draft_tokens, strict=True)]

    def _propose(self, row: Row, max_draft_tokens: int) -> Draft:
        index = self._indexes.setdefault(row.index, NgramIndex(self.size))
        index.extend(row.ids)
        at, matched = index.find(row.ids)
        draft: list[int] = []
        most = min(max_draft_tokens, row.schedule.length(matched)) if matched else 0
        for i in range(at, at + most + 1 if matched else at):
            token = row.ids[i] if i < len(row.ids) else draft[i - len(row.ids)]
            if len(draft) == most:
                return Draft(draft, match_length=matched, lookahead_token=token)
            draft.append(token)
            if token in self.eos:
                break
        return Draft(draft, match_length=matched)
