"""CachedLM: the fast way to follow rows, for models that are fed as most are. Knows positions, masks and the kv cache's layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from specnb.decoding.borrow import Capture, borrow
from specnb.decoding.contracts import Row, Unsupported
from specnb.decoding.fast import fastest
from specnb.decoding.feed import PER_TOKEN, Feed, cache_keyword, forward_parameters
from specnb.decoding.graphs import Graphs, Pass, recorder
from specnb.decoding.lm import LM
from specnb.decoding.store import RowStore, layer_plan


class CachedLM(LM):
    """A causal language model with a preallocated cache in which every row has its own length.

    Args:
        model, rows, hidden_states: as for `LM`. `model` must be one that `follow.keeps_to_standard()` lets pass.
        capacity: token slots to allocate at first; the store grows geometrically.
        prefill_chunk_size: process longer inputs in chunks of this many tokens.
        feed: what `generate()` prepared beside the token ids.
        past: a filled transformers cache holding the beginning of the only row.
        store: a store to share with another CachedLM that runs other layers of the same model.
        foreign_ids: ids beyond its vocabulary (of a target with a larger one) are read as its last token.

    Raises Unsupported for CUDA graphs where the model makes masks of its own (`own_masks`).
    """

    def __init__(self, model: PreTrainedModel, rows: Sequence[Row], *, capacity: int = 0, prefill_chunk_size: int | None = None,
                 feed: Feed | None = None, past: DynamicCache | None = None, store: RowStore | None = None,
                 foreign_ids: bool = False, hidden_states: Literal["all", "kept"] | None = None) -> None:  # fmt: skip
        self.store = store or RowStore(model.config, [row.index for row in rows], capacity)
        given, model = model, fastest(model)
        super().__init__(model, rows, hidden_states)
        self._last_id = int(model.get_input_embeddings().weight.shape[0]) - 1 if foreign_ids else None
        self._tap: Capture | None = None
        if hidden_states:
            self._tap = Capture(getattr(model, model.base_model_prefix))
            self.model = borrow(model, {model.base_model_prefix: self._tap})
        self._feed = feed or Feed()
        self.first = True  # no pass yet
        # what is given beside the ids of a prompt belongs to all of it
        self._chunk = None if self._feed.extras else prefill_chunk_size
        parameters = forward_parameters(type(model))
        self._cache_name = cache_keyword(parameters)
        self._keeps = "logits_to_keep" in parameters
        self._positions = "position_ids" in parameters
        attention = getattr(self.config, "_attn_implementation", "eager")
        self._sdpa = attention == "sdpa"
        self._maskless = attention not in ALL_MASK_ATTENTION_FUNCTIONS  # transformers makes no mask for it
        record = recorder(given)
        check_graphs(given, self._feed)
        self._graphs = Graphs(self.store, record, self.device) if record else None
        held = 0 if past is None else past.get_seq_length()
        if past is not None and held:
            self.store.load(past, held)
            self._agreed[rows[0].index] = held

    def follow(self, rows: Sequence[Row]) -> None:
        self.store.follow([row.index for row in rows])

    def hand_back(self, cache: Any, rows: Sequence[Row]) -> Any:
        pads = [row.padding for row in rows]
        if self.store.rows != [row.index for row in rows] or len({len(row.ids) + row.padding for row in rows}) > 1:
            return None
        self.store.unload(cache, [len(row.ids) - 1 for row in rows], pads)
        return cache

    # ---- one pass
    def _forward(self, rows: Sequence[Row], fed: Sequence[Sequence[int]], starts: list[int], keep: int) -> Tensor:
        self.store.span.set(list(starts))
        self._rows = [row.index for row in rows]
        ordinary = partial(self._ordinary, fed, starts, keep)
        out = self._graphs.run(fed, starts, ordinary, self._block) if self._graphs and keep else ordinary()
        if out.states is not None:
            self._remember(rows, fed, starts, keep, out.states)
        return out.logits[:, -keep:] if keep else out.logits

    def _ordinary(self, fed: Sequence[Sequence[int]], starts: list[int], keep: int) -> Pass:
        width = max(map(len, fed))
        # padding: overwritten later
        tokens = torch.tensor([[*f, *[0] * (width - len(f))] for f in fed], device=self.device)
        if self.store.span.uniform:
            slots = torch.arange(starts[0], starts[0] + width, device=self.device).expand(len(starts), -1)
        else:
            slots = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        return self._pass(
            tokens, slots, keep, not self.store.span.uniform or (self._maskless and width > 1 and max(starts) > 0)
        )

    def _block(self, block: Tensor) -> Pass:
        """The same as a `graphs.Block`."""
        starts, tokens = block[:, :1], block[:, 1:]
        slots = starts + torch.arange(tokens.shape[1], device=self.device)
        self.store.span.set_whole(slots)
        return self._pass(tokens, slots, tokens.shape[1], masked=True)

    def _pass(self, tokens: Tensor, slots: Tensor, keep: int, masked: bool) -> Pass:
        """The model over `tokens` `[rows, width]`, all columns' states and at least the last `keep` columns' logits."""
        if self._last_id is not None:
            tokens = tokens.clamp(max=self._last_id)
        inputs: dict[str, Any] = {"input_ids": tokens, self._cache_name: self.store, "use_cache": True}
        inputs |= self._feed.beside(slots, self._rows, self.first)
        self.first = False
        if self._positions:
            positions = self._feed.positions(slots, self._rows)
            # padding, and rows past a draft model's end, must not leave a table of positions
            inputs["position_ids"] = (
                positions.clamp(max=self.limit - 1) if self.limit and self.hard_limit else positions
            )
        if masked:
            inputs["attention_mask"] = self.store.mask(slots, None if self._sdpa else self.model.dtype)
        body = None if keep else getattr(self.model, self.model.base_model_prefix, None)
        if self._keeps and body is None:
            inputs["logits_to_keep"] = max(keep, 1)
        with torch.no_grad():
            out = (self.model if body is None else body)(**inputs, return_dict=True)
        states = None
        if self._tap is not None:
            states, self._tap.value = self._tap.value.last_hidden_state, None
        return Pass(out.logits if keep else tokens.new_empty(0), states)


def check_graphs(model: PreTrainedModel, feed: Feed) -> None:
    """Raise Unsupported for a model whose blocks are to be recorded, but that makes masks of its own."""
    reason = own_masks(model, feed) if recorder(model) else None
    if reason:
        raise Unsupported(
            f"CUDA graphs cannot be used with {model.config.model_type!r}: {reason}. Call specnb.cuda_graphs(model, on=False)."
        )


_OWN_MASKS = (
    "bloom",
    "mpt",
    "falcon",
    "gpt_neo",
    "roformer",
)  # make a bias or mask of their own from slots or a 2-D mask


def own_masks(model: PreTrainedModel, feed: Feed) -> str | None:
    """Why `model` cannot take masks and positions as they are given, in words; None where it can."""
    config = model.config.get_text_config(decoder=True)
    attention = getattr(config, "_attn_implementation", "eager")
    if attention not in ("sdpa", "eager"):
        return f"its attention implementation {attention!r} takes no 4-D mask; load it with attn_implementation='sdpa'"
    windows = {
        layer.sliding_window for layer in layer_plan(model.config) if isinstance(layer, DynamicSlidingWindowLayer)
    }
    own = config.model_type in _OWN_MASKS or getattr(config, "attention_chunk_size", None) or len(windows) > 1
    placed = "position_ids" in forward_parameters(type(model))
    typed = "token_type_ids" in feed.extras or (feed.once and any(name in feed.extras for name in PER_TOKEN))
    if own or not placed or typed:
        return "its layers build their own masks or positions from a 2-D mask"
    return None
