"""Rowwise: several rows of a drafter that can only follow one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specnb.decoding.contracts import Draft, Drafter, Row


class Rowwise:
    """One drafter per row; each row's passes run alone.

    Args:
        drafters: by row index. All are of the same kind.
    """

    def __init__(self, drafters: Mapping[int, Drafter]) -> None:
        self.drafters = dict(drafters)
        one = next(iter(self.drafters.values()))
        self.drafts_first, self.reads_target = one.drafts_first, one.reads_target

    def propose(self, rows: Sequence[Row], max_draft_tokens: Sequence[int]) -> list[Draft]:
        """A draft for each row, see `Drafter.propose`."""
        return [self.drafters[row.index].propose([row], [n])[0] for row, n in zip(rows, max_draft_tokens, strict=True)]
