"""MTP layers of the checkpoint: layer i drafts token i from the target's hidden states and the tokens after them.

DeepSeek-V3 2412.19437, section 2.2; GLM-4.5. Slot s of a layer's cache belongs to the target's hidden state at position
s. For it, layer m reads the token at position s + 1 + m, so its last m slots read drafted tokens. After each pass of
the target the slots with drafted tokens are computed again. So every layer always holds what a pass over the text alone
would give.

The layers of Inkling have short convolutions, whose states are their last inputs. Those of drafted tokens are dropped
before the slots are computed again.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specnb import compat
from specnb.decoding.contracts import Draft, Drafter, Row
from specnb.decoding.lm.base import LM
from specnb.decoding.lm.kv_cache import ConvAndKVCacheLayer, KVCache, standard_cache_layers
from specnb.decoding.lm.snapshots import has_states
from specnb.drafters.draft_builder import DraftBuilder, DraftSampling
from specnb.drafters.rowwise import Rowwise
from specnb.runtime import low_overhead
from specnb.runtime.module_view import with_replacements


class MtpCache(KVCache):
    """The cache of MTP layers, in which a token's position is its slot plus `ahead`."""

    ahead = 0

    def _layer(self, layer: Any, window: int | None) -> Any:
        if has_states(layer):
            return ConvAndKVCacheLayer(self.write_positions, window, layer.number_of_states)
        return super()._layer(layer, window)

    def crop_states(self, slot: int) -> None:
        """Keep only those inputs of convolutions that are needed at `slot`."""
        for layer in self.state_layers:
            layer.crop_states(slot)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the next token, for attention that counts distances itself."""
        return int(super().get_query_offset(layer_idx)) + self.ahead

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of visible slots and the position of the first of them."""
        visible, first = super().get_mask_sizes(query_length, layer_idx)
        return visible, first + self.ahead


class MtpLayers:
    """Drafts with the MTP layers.

    Drafts longer than the number of layers go through the layers again, each token in its own slot after the text.

    Args:
        mtp: transformers' `MtpModel`.
        target: must keep all its hidden states (`LMOptions.hidden_states`).
        rows: one row, if the layers have convolutions.
        capacity: number of slots of the kv cache to allocate at first.
    """

    drafts_first = False
    reads_target = True

    def __init__(self, mtp: Any, target: LM, rows: Sequence[Row], capacity: int, sampling: DraftSampling) -> None:
        self.mtp, self.target, self.sampling = with_replacements(mtp, low_overhead.replacements), target, sampling
        self.depth = len(mtp.layers)
        self.device = next(mtp.layers.parameters()).device
        self.kv_cache = MtpCache(mtp.config, [row.index for row in rows], capacity)
        # by row index: the first slot that must be computed again, and the hidden states from there on
        self._states: dict[int, tuple[int, Tensor]] = {}
        self._cache_name = compat.cache_keyword(inspect.signature(mtp.layers[0].forward).parameters)

    def propose(self, rows: Sequence[Row], max_draft_tokens: Sequence[int]) -> list[Draft]:
        """A draft for each row, see `Drafter.propose`."""
        self.kv_cache.keep_rows([row.index for row in rows])
        for row in rows:
            self._collect(row)
        drafts = [DraftBuilder(row, n, self.sampling) for row, n in zip(rows, max_draft_tokens, strict=True)]
        if not any(draft.open for draft in drafts):
            return [draft.draft() for draft in drafts]
        ends = [len(row.ids) - 1 for row in rows]  # one slot per token that another one follows
        starts = [self._states[row.index][0] for row in rows]
        self.kv_cache.crop_states(starts[0])
        width = max(end - start for start, end in zip(starts, ends, strict=True))
        states = torch.stack([_padded(self._states[row.index][1], width) for row in rows])
        known = [list(row.ids[start:]) for row, start in zip(rows, starts, strict=True)]
        for m in range(self.depth):  # all layers, also for a short draft, since the next draft needs their slots
            new_tokens = [tokens[1 + m :] for tokens in known]
            states = self._run(m, new_tokens, states, starts, 1 + m)
            last = [states[r, end - start - 1] for r, (start, end) in enumerate(zip(starts, ends, strict=True))]
            self._add(drafts, known, last)
        self._settle(rows)
        i = self.depth
        while any(draft.open for draft in drafts):
            slots = [end - 1 + i // self.depth for end in ends]
            new_tokens = [tokens[-1:] for tokens in known]
            states = self._run(i % self.depth, new_tokens, torch.stack(last)[:, None], slots, ends[0] + i - slots[0])
            last = list(states[:, 0])
            self._add(drafts, known, last)
            i += 1
        return [draft.draft() for draft in drafts]

    def _collect(self, row: Row) -> None:
        """Take over the target's hidden states of committed tokens."""
        start, new = self.target.hidden_states[row.index]
        new = new[: len(row.ids) - 1 - start].to(self.device)
        first, old = self._states.get(row.index, (start, new[:0]))
        repeated = max(0, first - start)  # settled slots that the target computed again, for its running states
        self._states[row.index] = first, torch.cat([old[: max(0, start - first)], new[repeated:]])

    def _settle(self, rows: Sequence[Row]) -> None:
        """Drop the states of slots in which no layer has read a drafted token."""
        for row in rows:
            first, states = self._states[row.index]
            settled = max(first, len(row.ids) - self.depth)
            self._states[row.index] = settled, states[settled - first :]

    def _add(self, drafts: Sequence[DraftBuilder], known: Sequence[list[int]], last: Sequence[Tensor]) -> None:
        """Pick the next token of each draft from the layers' last states."""
        with torch.no_grad():
            logits = compat.project_to_logits(self.mtp, torch.stack(list(last)))
        for draft, tokens, scores in zip(drafts, known, logits, strict=True):
            if draft.open:
                draft.add(scores)
                tokens.append(draft.tokens[-1])
            else:  # the draft has ended; any token fills its slot
                tokens.append(tokens[-1])

    def _run(self, m: int, new_tokens: Sequence[Sequence[int]], states: Tensor, slots: list[int], ahead: int) -> Tensor:
        """Run one layer.

        Args:
            m: the layer's number.
            new_tokens: `new_tokens[r]` are read in the slots from `slots[r]` on.
            states: the hidden states of these slots, `[rows, width, size]`.
            ahead: the tokens' positions are their slots plus this.

        Returns:
            The layer's states, `[rows, width, size]`.
        """
        width = states.shape[1]
        tokens = torch.tensor([[*f, *[0] * (width - len(f))] for f in new_tokens], device=self.target.device)
        self.kv_cache.write_positions.set(list(slots))
        self.kv_cache.ahead = ahead
        at = torch.tensor(slots, device=self.device)[:, None] + torch.arange(width, device=self.device)
        sdpa = compat.attention_implementation(self.mtp.config) == "sdpa"
        mask = self.kv_cache.mask(at, None if sdpa else states.dtype)
        kinds: Sequence[str] = getattr(self.mtp.config, "layer_types", None) or ()
        if isinstance(mask, dict):
            mask = mask["full_attention" if self.kv_cache.layers[m].window is None else "sliding_attention"]
        rope = {"layer_type": kinds[m]} if getattr(self.mtp, "has_per_layer_rope", False) else {}
        with torch.no_grad():
            embedded = self.mtp.embed_tokens(tokens).to(states.device)
            angles = (
                None if self.mtp.rotary_emb is None else self.mtp.rotary_emb(embedded, position_ids=at + ahead, **rope)
            )
            out: Tensor = self.mtp.layers[m](
                embedded,
                states,
                position_embeddings=angles,
                position_ids=at + ahead,
                attention_mask=mask,
                **{self._cache_name: self.kv_cache},
            )
            if getattr(self.mtp, "use_shared_post_norm", False):
                out = self.mtp.shared_post_norm(out)
        return out


def mtp_drafter(mtp: Any, target: LM, rows: Sequence[Row], capacity: int, sampling: DraftSampling) -> Drafter:
    """The drafter of MTP layers for `rows`; the arguments are those of `MtpLayers`."""
    if len(rows) == 1 or not any(map(has_states, standard_cache_layers(mtp.config))):
        return MtpLayers(mtp, target, rows, capacity, sampling)
    return Rowwise({row.index: MtpLayers(mtp, target, [row], capacity, sampling) for row in rows})


def _padded(states: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(states, (0, 0, 0, width - len(states)))
