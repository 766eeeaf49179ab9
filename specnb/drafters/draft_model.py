"""Draft model: a smaller model with the same tokenizer and its own kv cache.

Leviathan et al. 2211.17192; Chen et al. 2302.01318.
"""

from __future__ import annotations

from collections.abc import Sequence

from specnb.decoding.contracts import Draft, Row
from specnb.decoding.lm.base import LM
from specnb.drafters.draft_builder import DraftBuilder, DraftSampling


class DraftModel:
    """Drafts autoregressively with `lm`, whose cache follows the same rows."""

    drafts_first = False
    reads_target = False

    def __init__(self, lm: LM, sampling: DraftSampling) -> None:
        self.lm, self.sampling = lm, sampling

    def propose(self, rows: Sequence[Row], max_draft_tokens: Sequence[int]) -> list[Draft]:
        """A draft for each row, see `Drafter.propose`."""
        limit = self.lm.limit
        most = [
            n if limit is None else min(n, limit - len(row.ids) + 1)
            for row, n in zip(rows, max_draft_tokens, strict=True)
        ]
        drafts = [DraftBuilder(row, n, self.sampling) for row, n in zip(rows, most, strict=True)]
        while any(draft.open for draft in drafts):
            out = self.lm.logits(rows, [draft.tokens for draft in drafts], [1] * len(rows))
            for draft, logits in zip(drafts, out, strict=True):
                if draft.open:
                    draft.add(logits[0])
        return [draft.draft() for draft in drafts]
