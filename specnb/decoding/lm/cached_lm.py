"""CachedLM: the fast LM, for models with transformers' standard inputs. It makes positions, masks and the kv cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from specnb import compat
from specnb.decoding.contracts import Row, Unsupported
from specnb.decoding.lm.base import LM, LMOptions
from specnb.decoding.lm.kv_cache import KVCache, standard_cache_layers
from specnb.decoding.lm.model_inputs import (
    PER_TOKEN,
    CacheSize,
    ModelInputs,
    PreparedInputs,
    forward_parameters,
)
from specnb.decoding.lm.snapshots import Snapshots
from specnb.runtime.cuda_graphs import Graphs, Pass, recorder


class CachedLM(LM):
    """A causal language model with a preallocated kv cache in which every row has its own length.

    Args:
        model, rows, options: as for `LM`. `create.fits_cached_lm()` must hold for `model`.
        size: of the cache; it grows geometrically.
        prepared: what `generate()` prepared in addition to the token ids. Its `past` is a transformers cache that may
            hold the beginning of the only row.

    Raises:
        Unsupported: CUDA graphs are on, but the model makes its own masks (see `custom_masks_reason`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[Row],
        size: CacheSize = CacheSize(),
        prepared: PreparedInputs | None = None,
        options: LMOptions = LMOptions(),
    ) -> None:
        super().__init__(model, rows, options)
        prepared = prepared or PreparedInputs()
        self.kv_cache = KVCache(model.config, [row.index for row in rows], size.capacity)
        self._inputs = prepared.inputs
        self.is_first_pass = True
        # other inputs (images, for example) belong to the whole prompt: it cannot be split then
        self._prefill_chunk_size = None if self._inputs.extras else size.prefill_chunk_size
        parameters = forward_parameters(type(model))
        self._cache_name = compat.cache_keyword(parameters)
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        attention = compat.attention_implementation(self.config)
        self._boolean_mask = attention == "sdpa"
        self._needs_mask = not compat.makes_masks_for(attention)  # transformers makes none for this attention
        check_graphs(model, self._inputs)
        record = None if self.kv_cache.state_layers else recorder(model)  # padding would get into the states
        self._graphs = Graphs(self.kv_cache, record, self.device) if record else None
        if self.kv_cache.state_layers:
            self._snapshots = Snapshots(self.kv_cache.state_layers)
            self.drafts_first = not self._inputs.extras  # extras need the whole prompt in one pass
        past = prepared.past
        if past is not None and (held := past.get_seq_length()):
            self.kv_cache.load_from(past, held)
            self._cached[rows[0].index] = held
            if self._snapshots is not None:
                self._snapshots.length = held

    def keep_rows(self, rows: Sequence[Row]) -> None:
        """Drop all other rows from the cache."""
        self.kv_cache.keep_rows([row.index for row in rows])

    def export_cache(self, cache: Any, rows: Sequence[Row]) -> Any:
        """Fill a transformers cache with all tokens but the last; None if rows differ in length or some have left."""
        pads = [row.padding for row in rows]
        if self.kv_cache.rows != [row.index for row in rows] or len({len(row.ids) + row.padding for row in rows}) > 1:
            return None
        self._replay_to_end(rows[0])
        self.kv_cache.export_to(cache, [len(row.ids) - 1 for row in rows], pads)
        return cache

    # ---- one pass
    def _forward(
        self, rows: Sequence[Row], new_tokens: Sequence[Sequence[int]], starts: list[int], num_logits: int
    ) -> Tensor:
        self.kv_cache.write_positions.set(list(starts))
        self.is_first_pass |= bool(self.kv_cache.state_layers) and not any(starts)  # images are fed again, too
        self._rows = [row.index for row in rows]
        eager = partial(self._run_eager, new_tokens, starts, num_logits)
        out = self._graphs.run(new_tokens, starts, eager, self._run_block) if self._graphs and num_logits else eager()
        if out.states is not None:
            self._store_hidden_states(rows, new_tokens, starts, num_logits, out.states)
        return out.logits[:, -num_logits:] if num_logits else out.logits

    def _run_eager(self, new_tokens: Sequence[Sequence[int]], starts: list[int], num_logits: int) -> Pass:
        """One pass without CUDA graphs."""
        width = max(map(len, new_tokens))
        # rows are padded; these slots are overwritten later
        tokens = torch.tensor([[*f, *[0] * (width - len(f))] for f in new_tokens], device=self.device)
        if self.kv_cache.write_positions.uniform:
            slots = torch.arange(starts[0], starts[0] + width, device=self.device).expand(len(starts), -1)
        else:
            slots = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        return self._run(
            tokens,
            slots,
            num_logits,
            not self.kv_cache.write_positions.uniform or (self._needs_mask and width > 1 and max(starts) > 0),
        )

    def _run_block(self, block: Tensor) -> Pass:
        """One pass in a CUDA graph. `block` is a `cuda_graphs.Block`: starts and tokens in one tensor."""
        starts, tokens = block[:, :1], block[:, 1:]
        slots = starts + torch.arange(tokens.shape[1], device=self.device)
        self.kv_cache.write_positions.set_static(slots)
        return self._run(tokens, slots, tokens.shape[1], masked=True)

    def _run(self, tokens: Tensor, slots: Tensor, num_logits: int, masked: bool) -> Pass:
        """Run the model over `tokens` `[rows, width]` in `slots` `[rows, width]`.

        Returns:
            The logits of at least the last `num_logits` columns, and the states of all columns if they are captured.
        """
        if self._max_token_id is not None:
            tokens = tokens.clamp(max=self._max_token_id)
        inputs: dict[str, Any] = {"input_ids": tokens, self._cache_name: self.kv_cache, "use_cache": True}
        inputs |= self._inputs.extra_arguments(slots, self._rows, self.is_first_pass)
        self.is_first_pass = False
        if self._takes_positions:
            positions = self._inputs.positions(slots, self._rows)
            # padding, and rows past a draft model's end, must stay within learned positions
            inputs["position_ids"] = (
                positions.clamp(max=self.limit - 1) if self.limit and self.hard_limit else positions
            )
        if masked:
            inputs["attention_mask"] = self.kv_cache.mask(slots, None if self._boolean_mask else self.model.dtype)
        body = None if num_logits else getattr(self.model, self.model.base_model_prefix, None)
        if self._takes_logits_to_keep and body is None:
            inputs["logits_to_keep"] = max(num_logits, 1)
        with torch.no_grad():
            out = (self.model if body is None else body)(**inputs, return_dict=True)
        states = self._capture.take() if self._capture is not None else None
        return Pass(out.logits if num_logits else tokens.new_empty(0), states)


def check_graphs(model: PreTrainedModel, inputs: ModelInputs) -> None:
    """Raise Unsupported for a model that is to run in CUDA graphs but makes its own masks."""
    reason = custom_masks_reason(model, inputs) if recorder(model) else None
    if reason:
        raise Unsupported(
            f"CUDA graphs cannot be used with {model.config.model_type!r}: {reason}. Call specnb.cuda_graphs(model, "
            "on=False)."
        )


_CUSTOM_MASKS = ("bloom", "mpt", "falcon", "gpt_neo", "roformer")
"""Model types that make their own bias or mask from positions or a 2-D mask."""


def custom_masks_reason(model: PreTrainedModel, inputs: ModelInputs) -> str | None:
    """Why `model` cannot take a 4-D mask and position ids, in words; None if it can."""
    config = model.config.get_text_config(decoder=True)
    attention = compat.attention_implementation(config)
    if attention not in ("sdpa", "eager"):
        return f"its attention implementation {attention!r} takes no 4-D mask; load it with attn_implementation='sdpa'"
    windows = {
        layer.sliding_window
        for layer in standard_cache_layers(model.config)
        if isinstance(layer, DynamicSlidingWindowLayer)
    }
    custom = config.model_type in _CUSTOM_MASKS or getattr(config, "attention_chunk_size", None) or len(windows) > 1
    takes_positions = "position_ids" in forward_parameters(type(model))
    typed = "token_type_ids" in inputs.extras or (
        inputs.types_first_pass_only and any(name in inputs.extras for name in PER_TOKEN)
    )
    if custom or not takes_positions or typed:
        return "its layers build their own masks or positions from a 2-D mask"
    return None
