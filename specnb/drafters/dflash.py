"""DFlash: a block-diffusion drafter, which drafts all tokens of a block in one pass (arXiv 2602.06036).

Queries are the block: the last token (the anchor) and masks. Keys and values are those of the block and of the context,
and the context's are projections of the target's states. The cache holds the context alone: the block's slots are
written again in the next step. A position does not see what was drafted before it, so every position has a
distribution of its own, and tokens are drawn from it one by one. DFlash 2 scores the best tokens of a position together
with the token drafted before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention
from transformers import PreTrainedModel

from specnb.decoding.contracts import Draft, Row
from specnb.decoding.lm.base import LM
from specnb.decoding.lm.kv_cache import KVCache
from specnb.drafters.draft_builder import DraftBuilder, DraftSampling
from specnb.models.dflash import settings_of, target_ids
from specnb.runtime.prepare import prepare


class DFlash:
    """Drafts at most one block: `DFlashSettings.max_tokens` tokens; schedules that ask for more get those.

    Args:
        drafter: a `DFlashDrafter`, or transformers' own drafter of the same kind.
        target: must keep all states of the layers that the drafter reads (`LMOptions.layers`).
        capacity: number of slots of the kv cache to allocate at first.
    """

    drafts_first = False
    reads_target = True

    def __init__(
        self, drafter: PreTrainedModel, target: LM, rows: Sequence[Row], capacity: int, sampling: DraftSampling
    ) -> None:
        self.settings, self.target, self.sampling = settings_of(drafter), target, sampling
        self.drafter: Any = prepare(drafter)[0]
        encoder = getattr(self.drafter, "encoder", None)  # transformers' name of the context's projection
        self._fc = self.drafter.fc if encoder is None else encoder.fc
        self._context_norm = self.drafter.hidden_norm if encoder is None else encoder.output_norm_enc
        self._selector = getattr(self.drafter, "candidate_selector", None)
        self._head = getattr(self.drafter, "lm_head", None)
        self.device, self.dtype = self._fc.weight.device, self._fc.weight.dtype
        ids = target_ids(drafter)
        self._ids = None if ids is None else ids.to(sampling.device)
        embeddings = target.model.get_input_embeddings()
        self._embedding, scale = embeddings.weight, self.settings.embedding_scale
        self._scale = float(getattr(embeddings, "embed_scale", 1.0)) if scale is None else scale
        self._target_head = target.model.get_output_embeddings()
        self.kv_cache = KVCache.with_windows(
            self.settings.windows, [row.index for row in rows], capacity + self.settings.block_size
        )
        self._first: dict[int, int] = {}  # by row index: the position of the context's first token
        self._end: dict[int, int] = {}  # and the position after its last one

    @torch.no_grad()
    def propose(self, rows: Sequence[Row], max_draft_tokens: Sequence[int]) -> list[Draft]:
        """A draft for each row, see `Drafter.propose`."""
        self.kv_cache.keep_rows([row.index for row in rows])
        self._read_context(rows)
        most = [min(n, self.settings.max_tokens) for n in max_draft_tokens]
        drafts = [DraftBuilder(row, n, self.sampling) for row, n in zip(rows, most, strict=True)]
        width = max(draft.length if draft.open else 0 for draft in drafts)
        if not width:
            return [draft.draft() for draft in drafts]
        states = self._run_block(rows)[:, self.settings.first :][:, :width]
        logits = self._logits(states)
        selector = self._selector
        projected = states if selector is None else selector.hidden_projection(states)
        for r, draft in enumerate(drafts):
            while draft.open:
                i, last = len(draft.tokens), (draft.tokens or draft.row.ids)[-1]
                scores = logits[r, i] if selector is None else selector(logits[r, i], projected[r, i], last)
                draft.add(scores.to(self.sampling.device), self._ids)
        return [draft.draft() for draft in drafts]

    def _read_context(self, rows: Sequence[Row]) -> None:
        """Write keys and values of the committed tokens that the target has processed since the last draft."""
        found = [self._new_states(row) for row in rows]
        width = max(map(len, found))
        if not width:
            return
        states = torch.stack([torch.nn.functional.pad(one, (0, 0, 0, width - len(one))) for one in found])
        context = self._context_norm(self._fc(states))
        ends = [self._end[row.index] for row in rows]
        self._set_slots(rows, ends)
        angles = self._angles(ends, width)
        for i, layer in enumerate(self.drafter.layers):
            self.kv_cache.layers[i].update(*_keys_values(layer.self_attn, context, angles))
        for row, new in zip(rows, found, strict=True):
            self._end[row.index] += len(new)

    def _new_states(self, row: Row) -> Tensor:
        """The target's states `[n, layers * size]` of committed tokens that are not in the context yet."""
        start, states = self.target.hidden_states[row.index]
        self._first.setdefault(row.index, start)
        end = self._end.setdefault(row.index, start)
        # running states of the target may have been replayed, so the states may start earlier
        return states[end - start : len(row.ids) - 1 - start].to(self.device, self.dtype)

    def _run_block(self, rows: Sequence[Row]) -> Tensor:
        """The states `[rows, block, size]` of the block after the final norm."""
        anchors = [len(row.ids) - 1 for row in rows]
        masks = [self.settings.mask_token_id] * (self.settings.block_size - 1)
        tokens = torch.tensor([[row.ids[-1], *masks] for row in rows], device=self._embedding.device)
        states = (embedding(tokens, self._embedding) * self._scale).to(self.device, self.dtype)
        seen = self._masks(self._set_slots(rows, anchors))
        angles = self._angles(anchors, self.settings.block_size)
        for i, layer in enumerate(self.drafter.layers):
            attend = partial(self._attend, i, layer.self_attn, angles, seen[i])
            states = _sublayer(states, layer.input_layernorm, attend, getattr(layer, "attention_conv", None))
            states = _sublayer(states, layer.post_attention_layernorm, layer.mlp, getattr(layer, "mlp_conv", None))
        return self.drafter.norm(states)  # type: ignore[no-any-return]

    def _attend(self, i: int, attention: Any, angles: tuple[Tensor, Tensor], seen: Tensor | None, x: Tensor) -> Tensor:
        """The output `[rows, block, size]` of the attention of layer i."""
        queries = _rotated(attention.q_norm(_heads(attention.q_proj(x), attention)).transpose(1, 2), angles)
        keys, values = self.kv_cache.layers[i].update(*_keys_values(attention, x, angles))
        out = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)
        return attention.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _set_slots(self, rows: Sequence[Row], positions: Sequence[int]) -> list[int]:
        """Write at these positions next. Returns the slots: the context starts in slot 0."""
        slots = [at - self._first[row.index] for row, at in zip(rows, positions, strict=True)]
        self.kv_cache.write_positions.set(slots)
        return slots

    def _angles(self, starts: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[rows, 1, width, dim]` of the positions from `starts[r]` on."""
        at = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        cos, sin = self.drafter.rotary_emb(self._fc.weight, at)
        return cos[:, None], sin[:, None]

    def _masks(self, anchors: Sequence[int]) -> list[Tensor | None]:
        """For each layer, which slots the block sees; None for all that the cache shows."""
        kinds = list(zip(self.settings.windows, self.settings.causal, strict=True))
        made = {kind: self._mask(*kind, anchors) for kind in set(kinds)}
        return [made[kind] for kind in kinds]

    def _mask(self, window: int | None, causal: bool, anchors: Sequence[int]) -> Tensor | None:
        """`[rows, 1, block, slots]`, true where a position of the block sees a slot.

        Args:
            anchors: the slot of each row's anchor.
        """
        size, from_anchor = self.settings.block_size, self.settings.window_from_anchor
        start = 0 if window is None else max(0, min(anchors) - window + 1)
        reaches = window is None or from_anchor or anchors[0] + size - start <= window
        if not causal and reaches and min(anchors) == max(anchors):
            return None
        slots = torch.arange(start, max(anchors) + size, device=self.device)
        first = torch.tensor(anchors, device=self.device)[:, None, None]
        at = first + torch.arange(size, device=self.device)[:, None]
        seen = slots < first + size if not causal else slots <= at
        if window is not None:
            seen = seen & (slots > (first if from_anchor else at) - window)
            if not causal and not from_anchor:
                seen = seen & (slots < at + window)
        return seen.expand(-1, size, -1)[:, None]

    def _logits(self, states: Tensor) -> Tensor:
        """Logits `[rows, n, vocab]` of the states, over the drafter's vocabulary if it has one."""
        settings = self.settings
        head = self._target_head if self._head is None else self._head
        weight = self._embedding if self._head is None else self._head.weight
        logits = head(states.to(weight.device, weight.dtype)) * settings.output_multiplier
        if settings.final_logit_softcapping:
            logits = torch.tanh(logits / settings.final_logit_softcapping) * settings.final_logit_softcapping
        return logits  # type: ignore[no-any-return]


def _sublayer(states: Tensor, norm: Any, run: Callable[[Tensor], Tensor], convolution: Any) -> Tensor:
    """The states after one sublayer, with DFlash 2's convolutions before and after it if there are any."""
    x, kernels = norm(states), None
    if convolution is not None:
        x, kernels = convolution(x)
    out = run(x)
    return states + (out if kernels is None else convolution.after(out, kernels))


def _keys_values(attention: Any, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values `[rows, groups, n, dim]` of the inputs `[rows, n, size]`."""
    keys = attention.k_norm(_heads(attention.k_proj(x), attention)).transpose(1, 2)
    return _rotated(keys, angles), _heads(attention.v_proj(x), attention).transpose(1, 2)


def _heads(x: Tensor, attention: Any) -> Tensor:
    return x.view(*x.shape[:-1], -1, attention.head_dim)


def _rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of `[rows, heads, n, dim]`; the halves of a head are its real and imaginary parts."""
    cos, sin = angles
    real, imaginary = x.chunk(2, -1)
    return x * cos + torch.cat([-imaginary, real], -1) * sin
