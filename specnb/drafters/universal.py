"""Universal assisted decoding: a draft model with another tokenizer.

Greedy: the draft model's text is encoded again with the target's tokenizer. Sampling: tokens are drawn among those that
both vocabularies have, so that the distribution of each drafted token is known exactly. Timor et al. 2502.05202.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specnb.decoding.contracts import Draft, Row
from specnb.decoding.lm.base import LM
from specnb.drafters.draft_builder import DraftBuilder, DraftSampling
from specnb.drafters.retokenize import Retokenized, continuation, shared_tokens
from specnb.text import Detokenizer


@dataclass
class RetokenizedRow:
    """A row in the draft model's tokens.

    Args:
        index: the row's index.
        detokenizer: reads the target's ids.
        text: the row's text in the draft model's ids.
        ids: the draft model's ids of the text.
        num_read: number of the target's ids that are in the text.
    """

    index: int
    detokenizer: Detokenizer
    text: Retokenized
    ids: list[int] = field(default_factory=list)
    num_read: int = 0


class Universal:
    """Drafts with a model that has another tokenizer than the target.

    Args:
        lm: the draft model; it follows `retokenized`.
        retokenized: the rows in the draft model's tokens, from `retokenize_rows`.
        tokenizers: the target's and the draft model's.
        shared: draft tokens that both vocabularies have, with a distribution (for sampling); else encode the draft
            model's text again.

    Raises:
        ValueError: `shared`, but the vocabularies have no token in common.
    """

    drafts_first = False
    reads_target = False

    def __init__(
        self,
        lm: LM,
        retokenized: Sequence[RetokenizedRow],
        tokenizers: tuple[Any, Any],
        sampling: DraftSampling,
        shared: bool,
    ) -> None:
        self.lm, self.sampling = lm, sampling
        self.tokenizer, self.assistant_tokenizer = tokenizers
        self.retokenized = {row_state.index: row_state for row_state in retokenized}
        self.shared: tuple[Tensor, Tensor] | None = None
        if shared:
            target_ids, assistant_ids = shared_tokens(*tokenizers, sampling.vocab_size, lm.vocab_size)
            if not len(target_ids):
                raise ValueError(
                    "the two tokenizers have no token in common, so sampling with this draft model is not possible; "
                    "use do_sample=False."
                )
            self.shared = target_ids.to(sampling.device), assistant_ids.to(sampling.device)
            self.assistant_id_of = dict(zip(target_ids.tolist(), assistant_ids.tolist(), strict=True))
        model_eos = lm.model.generation_config.eos_token_id
        self.eos = {
            self.assistant_tokenizer.eos_token_id,
            *(model_eos if isinstance(model_eos, list) else [model_eos]),
        } - {None}

    def propose(self, rows: Sequence[Row], max_draft_tokens: Sequence[int]) -> list[Draft]:
        """A draft for each row, see `Drafter.propose`."""
        retokenized = [self._update(row) for row in rows]
        limit = self.lm.limit
        most = [
            0 if r.detokenizer.held else n if limit is None else min(n, limit - len(r.ids) + 1)
            for r, n in zip(retokenized, max_draft_tokens, strict=True)
        ]
        builders = [DraftBuilder(row, n, self.sampling) for row, n in zip(rows, most, strict=True)]
        draft_ids: list[list[int]] = [[] for _ in rows]
        if self.shared is None:
            return self._draft_text(retokenized, builders, draft_ids)
        while any(draft.open for draft in builders):
            out = self.lm.logits(retokenized, draft_ids, [1] * len(rows))  # type: ignore[arg-type]
            for draft, ids, logits in zip(builders, draft_ids, out, strict=True):
                if draft.open:
                    scores = logits.new_full((self.sampling.vocab_size,), -torch.inf, device=self.sampling.device)
                    scores[self.shared[0]] = logits[0].to(self.sampling.device)[self.shared[1]]
                    draft.add(scores)
                    ids.append(self.assistant_id_of[draft.tokens[-1]])
                    draft.ended |= ids[-1] in self.eos  # the draft model's text ends there
        return [draft.draft() for draft in builders]

    def _draft_text(
        self, retokenized: Sequence[RetokenizedRow], builders: Sequence[DraftBuilder], draft_ids: list[list[int]]
    ) -> list[Draft]:
        """Let the draft model generate as many of its tokens as are wanted, then encode their text for the target."""
        writing = [draft.length > 0 for draft in builders]
        while any(writing):
            out = self.lm.logits(retokenized, draft_ids, [1] * len(retokenized))  # type: ignore[arg-type]
            for i, logits in enumerate(out):
                if writing[i]:
                    token = int(logits[0].argmax())
                    draft_ids[i].append(token)
                    confident = (
                        not self.sampling.threshold
                        or float((logits[0][token] - logits[0].logsumexp(-1)).exp()) >= self.sampling.threshold
                    )
                    writing[i] = len(draft_ids[i]) < builders[i].length and confident and token not in self.eos
        drafts = []
        for row_state, draft, ids in zip(retokenized, builders, draft_ids, strict=True):
            text = "".join(self._detokenizer(row_state).peek(ids)).split("\ufffd")[0] if ids else ""
            tokens = continuation(self.tokenizer, row_state.text.text, text) if text else []
            known = [token for token in tokens[: draft.length] if token < self.sampling.vocab_size]
            drafts.append(Draft(known if len(known) == len(tokens[: draft.length]) else []))
        return drafts

    def _detokenizer(self, row_state: RetokenizedRow) -> Detokenizer:
        """A detokenizer that has read the end of the draft model's ids, up to where its new tokens begin."""
        detokenizer = Detokenizer(self.assistant_tokenizer)
        detokenizer.push(row_state.ids[-16:])
        return detokenizer

    def _update(self, row: Row) -> RetokenizedRow:
        """Bring a row's text and its ids of the draft model up to date."""
        row_state = self.retokenized[row.index]
        new = "".join(row_state.detokenizer.push(row.ids[row_state.num_read :]))
        row_state.num_read = len(row.ids)
        self.lm.rewind(row_state.index, row_state.text.extend(new))
        row_state.ids = row_state.text.ids
        return row_state


def retokenize_rows(rows: Sequence[Row], tokenizer: Any, assistant_tokenizer: Any) -> list[RetokenizedRow]:
    """The rows' prompts in the draft model's tokens.

    The target's special tokens are left out; the draft model's tokenizer may add a BOS.
    """
    retokenized = []
    for row in rows:
        detokenizer = Detokenizer(tokenizer)
        text = Retokenized(assistant_tokenizer, "".join(detokenizer.push(row.ids)))
        retokenized.append(RetokenizedRow(row.index, detokenizer, text, text.ids, len(row.ids)))
    return retokenized
