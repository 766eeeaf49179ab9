"""Draft model: a smaller model with the same tokenizer, with a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specnb.decoding.cached import CachedLM
from specnb.decoding.contracts import Draft, Row
from specnb.decoding.verify import draw


class DraftModel:
    """Drafts autoregressively with `lm`, greedily or by sampling from its own processed law.

    Args:
        lm: the draft model's cache, following the same rows.
        vocab_size: the target's; ids the target lacks are never proposed.
        sample: draw each token (and report the law it was drawn from) instead of taking the most probable one.
        threshold: a draft ends after a token that had less probability than this.
        device: where the target's logits are; the random numbers and laws live there.
    """

    drafts_first = False

    def __init__(self, lm: CachedLM, vocab_size: int, *, sample: bool, threshold: float, device: torch.device) -> None:
        self.lm, self.sample, self.threshold, self.device = lm, sample, threshold, device
        self.missing = max(0, vocab_size - lm.vocab_size)  # ids the draft lacks (embeddings are padded to various sizes)
        self.vocab_size = vocab_size

    def propose(self, rows: Sequence[Row], k: Sequence[int]) -> list[Draft]:
        limit = self.lm.limit
        most = [n if limit is None else max(0, min(n, limit - len(row.ids) + 1)) for row, n in zip(rows, k, strict=True)]
        tokens: list[list[int]] = [[] for _ in rows]
        laws: list[list[torch.Tensor]] = [[] for _ in rows]
        growing = [n > 0 for n in most]
        while any(growing):
            out = self.lm.logits(rows, tokens, [1] * len(rows))
            for r, row in enumerate(rows):
                if not growing[r]:
                    continue
                logits = out[r][:, : self.vocab_size].to(self.device)
                if self.missing:  # before the processors: some know the target's size
                    logits = torch.nn.functional.pad(logits, (0, self.missing), value=-torch.inf)
                processors = row.processors.for_draft
                scores = processors(None if processors.pointwise else row.prefix(tokens[r]), logits)[0]
                if self.sample:
                    law = scores.softmax(-1)
                    laws[r].append(law)
                    x = draw(law, row.generator)
                else:
                    x = int(scores.argmax())
                tokens[r].append(x)
                growing[r] = len(tokens[r]) < most[r] and not self._doubts(scores, x)
        return [Draft(t, torch.stack(q) if q else None) for t, q in zip(tokens, laws, strict=True)]

    def _doubts(self, scores: torch.Tensor, x: int) -> bool:
        if not self.threshold:
            return False
        return bool((scores[x] - scores.logsumexp(-1)).exp() < self.threshold)
