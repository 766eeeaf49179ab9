"""CachedLM: a model with a cache that follows the rows. Only this module knows positions, masks and rollback."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specnb.decoding.contracts import Row
from specnb.decoding.store import RowStore

_NO_ROWS = ("bloom", "mpt", "falcon", "gpt_neo")  # make a bias or mask of their own from slots or a 2-D mask


class CachedLM:
    """A causal language model whose cache follows `rows`.

    `logits()` brings the cache to a row's tokens plus some proposed ones and computes only what is new: tokens that an
    earlier call proposed and that did not make it into the row are forgotten, rows that left are dropped. Sequences that
    agree with what is cached cost nothing.

    Args:
        model: any transformers causal LM whose cache can be rolled back; never changed.
        rows: the rows it will follow.
        capacity: token slots to allocate at first; the store grows geometrically.
        prefill_chunk_size: process longer inputs in chunks of this many tokens.
        first_inputs: further arguments of the first forward (image inputs, token types).
        past: a filled transformers cache holding the beginning of the only row.

    Raises ValueError for a model that cannot be decoded this way, naming what is in the way.
    """

    def __init__(self, model: PreTrainedModel, rows: Sequence[Row], *, capacity: int = 0, prefill_chunk_size: int | None = None,
                 first_inputs: Mapping[str, Any] | None = None, past: DynamicCache | None = None) -> None:  # fmt: skip
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.device = model.get_input_embeddings().weight.device
        if self.device.type == "meta":  # offloaded by accelerate: its hooks bring the weights
            self.device = torch.device(getattr(getattr(model, "_hf_hook", None), "execution_device", None) or "cpu")
        self.vocab_size = int(self.config.vocab_size)
        self.store = RowStore(model.config, len(rows), capacity)
        self.rows = list(rows)
        self._agreed = [0] * len(rows)  # tokens of row.ids that the cache holds for sure
        self._tail: list[list[int]] = [[] for _ in rows]  # cached tokens after those: proposals of the last call
        self.passes = 0  # calls of logits()
        self.chunk = prefill_chunk_size
        self.first_inputs = dict(first_inputs or {})
        types = self.first_inputs.get("token_type_ids") if self.config is model.config else None
        self._token_type = None if types is None else types[:, -1:]
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5.24
        if self._cache_name not in parameters:
            raise ValueError(f"{type(model).__name__} keeps no key/value cache, so a rejected draft cannot be taken back.")
        self._keeps = "logits_to_keep" in parameters
        self._positions = "position_ids" in parameters and not hasattr(model, "get_rope_index")
        self._attention = getattr(self.config, "_attn_implementation", "eager")
        if len(rows) > 1:
            self._check_rows()
        if past is not None and past.get_seq_length():
            length = past.get_seq_length()
            self.store.load(past, length)
            self._agreed[0] = length

    @property
    def limit(self) -> int | None:
        """Most tokens the model was made for; None where positions have no end."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def hard_limit(self) -> bool:
        """Whether positions beyond the limit do not exist (a table of learned positions)."""
        return not hasattr(self.config, "rope_parameters") and not hasattr(self.config, "rope_theta")

    def logits(self, rows: Sequence[Row], extra: Sequence[Sequence[int]], keep: Sequence[int]) -> list[Tensor]:
        """Logits `[keep[i], vocab]` of the last `keep[i]` tokens of `rows[i].ids + extra[i]`: what may follow each of them."""
        self._follow(rows)
        self.passes += 1
        starts = [self._common(r, row.ids, extra[r], keep[r]) for r, row in enumerate(rows)]
        ends = [len(row.ids) + len(extra[r]) for r, row in enumerate(rows)]
        if self.chunk:
            while max(e - s - k for e, s, k in zip(ends, starts, keep, strict=True)) >= self.chunk and not self.first_inputs:
                stops = [max(s, min(e - k, s + self.chunk)) for e, s, k in zip(ends, starts, keep, strict=True)]
                self._forward([_slice(row.ids, x, s, stop) for row, x, s, stop in zip(rows, extra, starts, stops, strict=True)], starts, 1)
                starts = stops
        fed = [_slice(row.ids, extra[r], starts[r], ends[r]) for r, row in enumerate(rows)]
        out = self._forward(fed, starts, max(keep) if len(set(map(len, fed))) == 1 else self._columns(fed, keep))
        for r, row in enumerate(rows):
            self._agreed[r], self._tail[r] = len(row.ids), list(extra[r])
        if len(rows) == 1:
            return [out[0, -keep[0] :]]
        width = max(map(len, fed))
        offset = width - out.shape[1]  # `out` holds the last columns
        return [out[r, len(f) - keep[r] - offset : len(f) - offset] for r, f in enumerate(fed)]

    # ---- what is cached
    def _follow(self, rows: Sequence[Row]) -> None:
        if len(rows) != len(self.rows):
            kept = [self.rows.index(row) for row in rows]
            self.store.select(kept)
            self.rows = list(rows)
            self._agreed, self._tail = [self._agreed[i] for i in kept], [self._tail[i] for i in kept]

    def _common(self, r: int, ids: Sequence[int], extra: Sequence[int], keep: int) -> int:
        """How many tokens of ids + extra need no forward; the last `keep` always do, since their logits are wanted."""
        n = self._agreed[r]
        for token in self._tail[r]:
            behind = n - len(ids)
            if (ids[n] if behind < 0 else extra[behind] if behind < len(extra) else None) != token:
                break
            n += 1
        return min(n, len(ids) + len(extra) - keep)

    # ---- one forward
    @staticmethod
    def _columns(fed: Sequence[Sequence[int]], keep: Sequence[int]) -> int:
        """Rows of different lengths end at different columns: keep from the first wanted column on."""
        return max(map(len, fed)) - min(len(f) - k for f, k in zip(fed, keep, strict=True))

    def _forward(self, fed: Sequence[Sequence[int]], starts: list[int], keep: int) -> Tensor:
        width = max(map(len, fed))
        tokens = torch.tensor([[*f, *[0] * (width - len(f))] for f in fed], device=self.device)  # padded behind: overwritten later
        self.store.span.set(list(starts))
        inputs: dict[str, Any] = {"input_ids": tokens, self._cache_name: self.store, "use_cache": True, **self.first_inputs}
        self.first_inputs = {}
        if self._token_type is not None:  # new tokens are of the last one's type, as in generate()
            inputs.setdefault("token_type_ids", self._token_type.expand(-1, width))
        if self._keeps:
            inputs["logits_to_keep"] = keep
        positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        if self._positions:  # padding, and rows past a draft model's end, must not leave a table of positions
            inputs["position_ids"] = positions.clamp(max=self.limit - 1) if self.limit and self.hard_limit else positions
        if not self.store.span.uniform:
            inputs["attention_mask"] = self._mask(positions)
        with torch.no_grad():
            logits: Tensor = self.model(**inputs, return_dict=True).logits
        return logits[:, -keep:]

    def _mask(self, positions: Tensor) -> Tensor | dict[str, Tensor]:
        """4-D mask(s) for rows of different lengths, one per layer type where the model has several."""
        windows = {layer.window: layer.visible(positions.shape[1]) for layer in self.store.row_layers}
        masks: dict[int | None, Tensor] = {}
        for window, (first, end) in windows.items():
            slots = torch.arange(first, end, device=self.device)
            see = slots <= positions[:, None, :, None]
            if window is not None:
                see = see & (slots > positions[:, None, :, None] - window)
            if self._attention != "sdpa":  # eager adds the mask to the scores
                low = torch.finfo(self.model.dtype).min
                see = torch.where(see, 0.0, low).to(self.model.dtype)
            masks[window] = see
        if len(masks) == 1:
            return next(iter(masks.values()))
        return {"full_attention" if window is None else "sliding_attention": mask for window, mask in masks.items()}

    def _check_rows(self) -> None:
        kind, chunked = self.config.model_type, getattr(self.config, "attention_chunk_size", None)
        windows = {layer.window for layer in self.store.row_layers} - {None}
        reason = None
        if self._attention not in ("sdpa", "eager"):
            reason = f"its attention implementation {self._attention!r} takes no 4-D mask; load it with attn_implementation='sdpa'"
        elif kind in _NO_ROWS or chunked or len(windows) > 1 or not self._positions or self._token_type is not None:
            reason = "its layers build their own masks or positions from a 2-D mask"
        if reason:
            raise ValueError(f"several rows at once cannot be decoded with {kind!r}: {reason}. Generate the prompts one by one.")


def _slice(ids: Sequence[int], extra: Sequence[int], start: int, stop: int) -> list[int]:
    """(ids + extra)[start:stop] without building the sum."""
    n = len(ids)
    return [*ids[start:stop], *extra[max(0, start - n) : max(0, stop - n)]]
