"""EAGLE-3: a small layer drafts from the target's states of several layers. Li et al. 2503.01840.

Entry i of its cache pairs the token at position i + 1 with the target's states at position i, and predicts the token at
i + 2. A drafted entry has the drafter's own state in place of the target's. After each pass of the target the drafted
entries are dropped, and the accepted tokens run again with the target's states. So the cache always holds what a pass
over the text alone would give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specnb.decoding.contracts import Draft, Row, Unsupported
from specnb.decoding.lm.base import LM
from specnb.decoding.lm.kv_cache import KVCache
from specnb.drafters.draft_builder import DraftBuilder, DraftSampling
from specnb.models.eagle3 import Eagle3Drafter
from specnb.runtime.prepare import prepare

_MAX_PENDING = 64  # entries that wait for the next draft when nothing is drafted; more are run at once
_CHUNK = 1024  # entries of a prompt per pass, which bounds the size of the mask


class Eagle3:
    """Drafts with an EAGLE-3 model.

    Args:
        drafter: the model.
        target: must keep the states of the drafter's layers for all tokens (`LMOptions.layers`).
        capacity: number of slots of the kv cache to allocate at first.

    Raises:
        Unsupported: the drafter shares the target's embedding, which is offloaded.
    """

    drafts_first = False
    reads_target = True

    def __init__(
        self, drafter: Eagle3Drafter, target: LM, rows: Sequence[Row], capacity: int, sampling: DraftSampling
    ) -> None:
        self.model, self.runtime = prepare(drafter)
        self.target, self.sampling = target, sampling
        self.device, self.dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
        embedding = drafter.embed_tokens or target.model.get_input_embeddings()
        self._embedding: Tensor = embedding.weight.detach()
        if self._embedding.is_meta:
            raise Unsupported(
                f"the EAGLE-3 drafter shares the embedding of {type(target.model).__name__}, which is offloaded: load "
                "the target without offloading, or use another method."
            )
        ids = drafter.target_ids().to(sampling.device)
        self._ids = None if len(ids) == sampling.vocab_size and not drafter.d2t.any() else ids
        self.kv_cache = KVCache(drafter.layer_config, [row.index for row in rows], capacity)
        # by row index; tokens in a cache that was given have no entries, so slot 0 belongs to the first entry that has
        self._first: dict[int, int] = {}
        self._held: dict[int, int] = {}  # number of entries with the target's states in the cache
        self._pending: dict[int, list[Tensor]] = {}  # the target's states of the entries after those

    def propose(self, rows: Sequence[Row], max_draft_tokens: Sequence[int]) -> list[Draft]:
        """A draft for each row, see `Drafter.propose`."""
        self.kv_cache.keep_rows([row.index for row in rows])
        pending = max([self._collect(row) for row in rows])
        drafts = [DraftBuilder(row, n, self.sampling) for row, n in zip(rows, max_draft_tokens, strict=True)]
        steps = max(draft.length for draft in drafts)
        if not any(draft.open for draft in drafts):
            if pending > _MAX_PENDING:
                self._catch_up(rows, 0)
            return [draft.draft() for draft in drafts]
        states, angles = self._catch_up(rows, steps)
        starts = [self._held[row.index] for row in rows]
        for i in range(steps):
            with torch.no_grad():
                logits, states = self.model.compute_logits(states)
            for draft, scores in zip(drafts, logits[:, 0], strict=True):
                if draft.open:
                    draft.add(scores.to(self.sampling.device), self._ids)
            if not any(draft.open for draft in drafts):
                break
            # a draft that has ended is fed any token
            tokens = [[draft.tokens[-1] if draft.tokens else draft.row.ids[-1]] for draft in drafts]
            at = [start + i for start in starts]
            states = self._run(tokens, states, at, (angles[0][:, i : i + 1], angles[1][:, i : i + 1]))
        return [draft.draft() for draft in drafts]

    def _collect(self, row: Row) -> int:
        """Take over the target's states of committed tokens. Returns the number of entries that can be run."""
        start, states = self.target.hidden_states[row.index]
        first = self._first.setdefault(row.index, start)
        pending = self._pending.setdefault(row.index, [])
        known = first + self._held.setdefault(row.index, 0) + sum(map(len, pending))
        if (new := states[max(0, known - start) : max(0, len(row.ids) - 1 - start)]).shape[0]:
            pending.append(new)  # what the target computed again, for its running states, is known already
        return sum(map(len, pending))

    def _catch_up(self, rows: Sequence[Row], steps: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run all entries that have the target's states.

        Args:
            steps: number of tokens to draft.

        Returns:
            The state of each row's last entry `[rows, 1, size]`, and cosine and sine of the drafted entries.
        """
        starts = [self._held[row.index] for row in rows]
        pending = [torch.cat(self._pending[row.index]) for row in rows]
        counts, last = [len(states) for states in pending], None
        width = max(counts)
        firsts = [self._first[row.index] for row in rows]
        for begin in range(0, width, _CHUNK):
            n = min(_CHUNK, width - begin)
            parts = [states[begin : begin + n] for states in pending]
            padded = torch.stack([torch.nn.functional.pad(part, (0, 0, 0, n - len(part))) for part in parts])
            tokens = []
            for row, first, start, part in zip(rows, firsts, starts, parts, strict=True):
                at = first + start + begin + 1
                tokens.append([*row.ids[at : at + len(part)], *[0] * (n - len(part))])
            with torch.no_grad():
                states = self.model.combine_hidden_states(padded.to(self.device, self.dtype))
            at_slots = [start + begin for start in starts]
            out = self._run(tokens, states, at_slots, self._angles(firsts, at_slots, n))
            ends = torch.tensor([min(max(count - 1 - begin, 0), n - 1) for count in counts], device=self.device)
            found = out[torch.arange(len(rows), device=self.device), ends][:, None]
            # a row that ended in an earlier chunk keeps its state
            live = torch.tensor([count > begin for count in counts], device=self.device)[:, None, None]
            last = found if last is None else torch.where(live, found, last)
        assert last is not None
        for row, start, count in zip(rows, starts, counts, strict=True):
            self._held[row.index], self._pending[row.index] = start + count, []
        ends_at = [start + count for start, count in zip(starts, counts, strict=True)]
        return last, self._angles(firsts, ends_at, max(steps, 1))

    def _angles(self, firsts: Sequence[int], slots: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine `[rows, width, dim]` of the positions from `firsts[r] + slots[r]` on."""
        begin = torch.tensor([first + slot for first, slot in zip(firsts, slots, strict=True)], device=self.device)
        positions = begin[:, None] + torch.arange(width, device=self.device)
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        angles: tuple[Tensor, Tensor] = self.model.rotary_emb(like, positions)
        return angles

    def _run(
        self, tokens: Sequence[Sequence[int]], states: Tensor, slots: list[int], angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Run the layers over entries.

        Args:
            tokens: `[rows, width]`, in the slots from `slots[r]` on.
            states: `[rows, width, size]`, those at the positions before.
            angles: cosine and sine of the positions.

        Returns:
            The states after the layers `[rows, width, size]`.
        """
        width = states.shape[1]
        self.kv_cache.write_positions.set(list(slots))
        mask = None
        if not self.kv_cache.write_positions.uniform or (width > 1 and slots[0] > 0) or self._windows_cut(width):
            at = torch.tensor(slots, device=self.device)[:, None] + torch.arange(width, device=self.device)
            mask = self.kv_cache.mask(at)
        with torch.no_grad():
            ids = torch.tensor(tokens, device=self._embedding.device)
            embedded = torch.nn.functional.embedding(ids, self._embedding).to(self.device, self.dtype)
            out: Tensor = self.model(embedded, states, angles, mask, self.kv_cache)
        return out

    def _windows_cut(self, width: int) -> bool:
        """Whether a sliding window is shorter than a first pass of this width."""
        return any(layer.window is not None and layer.window < width for layer in self.kv_cache.row_layers)
