"""The Gemma 4 MTP drafter: a small model without its own cache that attends to the target's keys and values.

Its input is the target's embedding of the last token and the target's last hidden state; for later tokens, its own
projected state. Its position stays that of the last token. Gemma 4 multi-token prediction guide, Google 2026.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb import compat
from specnb.decoding.contracts import Draft, Row
from specnb.decoding.lm.cached_lm import CachedLM
from specnb.decoding.lm.kv_cache import additive_mask
from specnb.drafters.draft_builder import DraftBuilder, DraftSampling
from specnb.runtime.module_view import Replacement, with_replacements
from specnb.runtime.prepare import prepare


class _CachedRotaryEmbedding(Replacement):
    """A rotary embedding that is computed once per tensor of positions: all tokens of a draft share them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.__dict__["cached"] = None, {}

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """The embedding at `position_ids`."""
        cached_for, found = self.__dict__["cached"]
        if cached_for is not position_ids:
            self.__dict__["cached"] = position_ids, (found := {})
        if layer_type not in found:
            found[layer_type] = self.__dict__["layer"](x, position_ids, layer_type)
        return found[layer_type]


def _rotary_replacement(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {"model.rotary_emb": _CachedRotaryEmbedding(modules["model.rotary_emb"])}


class Gemma4Assistant:
    """Drafts from the target's hidden state after each pass.

    Args:
        assistant: the drafter's model.
        target: must keep its hidden states (`LMOptions.hidden_states`).
    """

    drafts_first = False
    reads_target = True

    def __init__(self, assistant: PreTrainedModel, target: CachedLM, sampling: DraftSampling) -> None:
        self.assistant = with_replacements(prepare(assistant)[0], _rotary_replacement)
        self.target, self.sampling = target, sampling
        self.embed = target.model.get_input_embeddings()
        self.device, self.dtype = assistant.pre_projection.weight.device, assistant.pre_projection.weight.dtype
        types = target.config.layer_types
        self.kv_layers = {
            types[i]: i for i, layer in enumerate(target.kv_cache.layers) if layer in target.kv_cache.row_layers
        }
        sdpa = compat.attention_implementation(assistant.config.get_text_config()) == "sdpa"
        self._mask_dtype = None if sdpa else assistant.dtype  # attentions other than sdpa add the mask to the scores

    def propose(self, rows: Sequence[Row], max_draft_tokens: Sequence[int]) -> list[Draft]:
        """A draft for each row, see `Drafter.propose`."""
        self.target.kv_cache.keep_rows([row.index for row in rows])
        drafts = [DraftBuilder(row, n, self.sampling) for row, n in zip(rows, max_draft_tokens, strict=True)]
        if not any(draft.open for draft in drafts):
            return [draft.draft() for draft in drafts]
        # the target has not processed the last tokens yet
        lasts = [len(row.ids) - 1 for row in rows]
        kept = [self.target.hidden_states[row.index] for row in rows]
        states = torch.stack(
            [state[last - 1 - start : last - start] for last, (start, state) in zip(lasts, kept, strict=True)]
        )
        shared = {kind: self._shared_kv(layer, lasts) for kind, layer in self.kv_layers.items()}
        given = {
            "shared_kv_states": {kind: (keys, values) for kind, (keys, values, _) in shared.items()},
            "attention_mask": {kind: mask for kind, (_, _, mask) in shared.items()},
            "position_ids": torch.tensor(lasts, device=self.device)[:, None],
        }
        tokens = [row.ids[-1] for row in rows]
        while any(draft.open for draft in drafts):
            embedded = self.embed(torch.tensor(tokens, device=self.target.device)[:, None])
            logits, states = self._run(torch.cat([embedded, states.to(embedded)], -1), given)
            for draft, scores in zip(drafts, logits, strict=True):
                if draft.open:
                    draft.add(scores)
            tokens = [(draft.tokens or row.ids)[-1] for draft, row in zip(drafts, rows, strict=True)]
        return [draft.draft() for draft in drafts]

    @torch.no_grad()
    def _run(self, inputs: Tensor, given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """One step of the drafter, without its own forward, which would make its masks again for every token.

        Returns:
            Logits `[rows, vocab]` and states `[rows, 1, size]`.
        """
        model = self.assistant
        out = model.model(
            inputs_embeds=model.pre_projection(inputs.to(self.device, self.dtype)), use_cache=False, **given
        )
        hidden_states = out.last_hidden_state
        masked_embedding = model.masked_embedding
        if masked_embedding is None:
            logits = model.lm_head(hidden_states)
        else:  # row by row, since it fills masked logits with the lowest logit of all rows
            logits = torch.cat([masked_embedding(row[None], model.lm_head.weight) for row in hidden_states])
        return logits[:, -1], model.post_projection(hidden_states)

    def _shared_kv(self, layer: int, lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and the attention mask of one of the target's layers.

        Rows may see the tokens that the target has processed, within the layer's window. The mask is None if all rows
        see all of them.
        """
        cached: Any = self.target.kv_cache.layers[layer]
        reach = max(lengths) if cached.window is None else cached.window + 1
        first, end = max(0, min(lengths) - reach), max(lengths)
        mask = None
        if min(lengths) != end:
            slots = torch.arange(first, end, device=self.device)
            ends = torch.tensor(lengths, device=self.device)[:, None]
            allowed = ((slots < ends) & (slots >= ends - reach))[:, None, None]
            mask = allowed if self._mask_dtype is None else additive_mask(allowed, self._mask_dtype)
        keys, values = (kept[:, :, first:end].to(self.device, self.dtype) for kept in (cached.keys, cached.values))
        return keys, values, mask
