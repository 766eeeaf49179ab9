"""The kv cache: preallocated, one slot per position; rollback is setting a length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from specnb.decoding.lm.snapshots import has_states


class WritePositions:
    """The slots of the next tokens, shared by all layers: row r writes slots `starts[r]` to `starts[r] + q - 1`.

    Attributes:
        static: attention gets all slots, written or not, so that shapes do not depend on the starts (for CUDA graphs).
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.capacity = capacity
        self.set([0] * rows)

    def set(self, starts: list[int]) -> None:
        """Set the first slot to write of each row."""
        self.starts, self.min_start, self.max_start, self.static = starts, min(starts), max(starts), False
        self._slots: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def set_static(self, at: Tensor) -> None:
        """Write slots `at` `[rows, q]`, which the cache already has; shapes stay the same."""
        self.static = True
        self._slots = {at.device: (torch.arange(at.shape[0], device=at.device)[:, None], at)}

    @property
    def uniform(self) -> bool:
        """Whether all rows write the same slots."""
        return self.min_start == self.max_start

    def slots(self, q: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Index tensors `[rows, 1]` and `[rows, q]` of the slots to write; built once per pass and device."""
        if device not in self._slots:
            rows = torch.arange(len(self.starts), device=device)[:, None]
            at = torch.tensor(self.starts, device=device)[:, None] + torch.arange(q, device=device)
            self._slots[device] = rows, at
        return self._slots[device]


class KVCacheLayer(DynamicLayer):
    """One layer's keys and values, `[rows, heads, capacity, dim]`. Attention only gets the visible slots."""

    def __init__(self, write_positions: WritePositions, window: int | None) -> None:
        super().__init__()
        self.is_initialized: bool = False
        self.write_positions, self.window = write_positions, window
        self.is_sliding = window is not None

    def visible(self, q: int) -> tuple[int, int]:
        """First and end slot that any of the next q tokens of any row can see."""
        if self.write_positions.static:
            return 0, self.keys.shape[2]
        first = 0 if self.window is None else max(0, self.write_positions.min_start - self.window + 1)
        return first, self.write_positions.max_start + q

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values `[rows, heads, q, dim]`.

        Returns:
            Views of the visible keys and values, `[rows, heads, visible, dim]`.
        """
        q = key_states.shape[2]
        first, end = self.visible(q)
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values = self._allocate(key_states), self._allocate(value_states)
        if end > self.keys.shape[2]:
            self.write_positions.capacity = max(end, 2 * self.keys.shape[2], self.write_positions.capacity)
            self.keys, self.values = self._enlarged(self.keys), self._enlarged(self.values)
        if self.write_positions.uniform and not self.write_positions.static:
            self.keys[:, :, end - q : end] = key_states
            self.values[:, :, end - q : end] = value_states
        else:
            rows, at = self.write_positions.slots(q, key_states.device)
            self.keys[rows, :, at] = key_states.transpose(1, 2)
            self.values[rows, :, at] = value_states.transpose(1, 2)
        return self.keys[:, :, first:end], self.values[:, :, first:end]

    def _allocate(self, like: Tensor) -> Tensor:
        # zeros, not empty: masked slots are multiplied by 0, and 0 x NaN is NaN
        capacity = self.write_positions.capacity = max(self.write_positions.capacity, self.visible(like.shape[2])[1])
        return like.new_zeros(like.shape[0], like.shape[1], capacity, like.shape[3])

    def _enlarged(self, old: Tensor) -> Tensor:
        new = old.new_zeros(*old.shape[:2], self.write_positions.capacity, old.shape[3])
        new[:, :, : old.shape[2]] = old
        return new

    def get_seq_length(self) -> int:
        """Length of the longest row."""
        return self.write_positions.max_start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of visible slots and the first of them, for transformers' masks."""
        first, end = self.visible(query_length)
        return end - first, first


class StateAndKVCacheLayer(LinearAttentionLayer, KVCacheLayer):
    """A layer that has running states beside keys and values, as in Falcon-H1 and Zamba2."""

    def __init__(self, write_positions: WritePositions, window: int | None, number_of_states: int) -> None:
        KVCacheLayer.__init__(self, write_positions, window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate the running states; keys and values are allocated by `update`."""
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)


class ConvAndKVCacheLayer(StateAndKVCacheLayer):
    """A layer whose states are the last inputs of short convolutions, as in Inkling, of one row.

    The inputs are kept until `crop_states`, so that a pass may start at an earlier slot again.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.activate_past_recording()
        self._end = 0  # the slot after the last input

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values, see `KVCacheLayer.update`."""
        self._end = self.visible(key_states.shape[2])[1]
        return super().update(key_states, value_states, *args, **kwargs)

    def crop_states(self, slot: int) -> None:
        """Keep the inputs that the convolutions need at `slot`, the next one to be written."""
        if self._end:
            LinearAttentionLayer.crop(self, slot - self._end)
            self._end = slot


def is_convolutional(layer: Any, config: PreTrainedConfig) -> bool:
    """Whether the states of transformers' layer, beside keys and values, are those of convolutions alone."""
    counted = getattr(config, "number_of_conv_states", None) == getattr(layer, "number_of_states", 0)
    return counted and isinstance(layer, DynamicLayer)


def standard_cache_layers(config: PreTrainedConfig) -> list[Any]:
    """The cache layers that transformers would make for `config`."""
    text = config.get_text_config(decoder=True)
    return DynamicCache(config=text).layers or [DynamicLayer() for _ in range(text.num_hidden_layers)]


def unsupported_cache_layers(config: PreTrainedConfig) -> dict[int, str]:
    """The layers that need another cache than `KVCache`: by number, the class of cache layer."""
    return {
        i: type(layer).__name__ for i, layer in enumerate(standard_cache_layers(config)) if not _is_supported(layer)
    }


class KVCache(Cache):
    """A transformers cache in which every row has its own length.

    The layers are of the kinds that transformers itself makes for `config` (full, sliding, shared).

    Args:
        config: the model's.
        rows: the rows' indices.
        capacity: number of slots to allocate at first.
    """

    def __init__(self, config: PreTrainedConfig, rows: Sequence[int], capacity: int) -> None:
        plan = standard_cache_layers(config)
        self.rows = list(rows)
        self.write_positions = WritePositions(len(rows), capacity)
        windows = [layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in plan]
        super().__init__(layers=[self._layer(layer, window) for layer, window in zip(plan, windows, strict=True)])

    @classmethod
    def with_windows(cls, windows: Sequence[int | None], rows: Sequence[int], capacity: int) -> KVCache:
        """A cache of keys and values, with one layer per window (None: all tokens are visible)."""
        made = cls.__new__(cls)
        made.rows, made.write_positions = list(rows), WritePositions(len(rows), capacity)
        Cache.__init__(made, layers=[KVCacheLayer(made.write_positions, window) for window in windows])
        return made

    def _layer(self, layer: Any, window: int | None) -> Any:
        """Our layer for one of transformers'; one without keys and values stays as it is."""
        if not isinstance(layer, DynamicLayer):
            return layer
        if has_states(layer):
            return StateAndKVCacheLayer(self.write_positions, window, layer.number_of_states)
        return KVCacheLayer(self.write_positions, window)

    @property
    def state_layers(self) -> list[Any]:
        """The layers that hold running states."""
        return [layer for layer in self.layers if has_states(layer)]

    @property
    def row_layers(self) -> list[KVCacheLayer]:
        """The layers that hold keys and values."""
        return [layer for layer in self.layers if isinstance(layer, KVCacheLayer)]

    def tensors(self) -> list[Tensor]:
        """All keys and values. They are replaced when the cache grows or a row leaves."""
        return [kept for layer in self.row_layers if layer.is_initialized for kept in (layer.keys, layer.values)]

    def holds(self, length: int) -> bool:
        """Whether every layer has slots for this many tokens."""
        return all(layer.is_initialized and length <= layer.keys.shape[2] for layer in self.row_layers)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only these of the rows, given by index."""
        if len(rows) == len(self.rows):
            return
        kept = [self.rows.index(row) for row in rows]
        self.rows = list(rows)
        for layer in self.row_layers:
            if layer.is_initialized:
                index = torch.tensor(kept, device=layer.keys.device)
                layer.keys, layer.values = layer.keys.index_select(0, index), layer.values.index_select(0, index)

    def mask(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor | dict[str, Tensor]:
        """The attention mask of tokens at `positions` `[rows, q]`.

        Args:
            dtype: None for a boolean mask; else 0 and the lowest number of this type, for an attention that adds the
                mask.

        Returns:
            `[rows, 1, q, slots]`; a dict of masks by layer type if there are several types.
        """
        masks: dict[int | None, Tensor] = {}
        for window, (first, end) in {
            layer.window: layer.visible(positions.shape[1]) for layer in self.row_layers
        }.items():
            slots = torch.arange(first, end, device=positions.device)
            allowed = slots <= positions[:, None, :, None]
            if window is not None:
                allowed = allowed & (slots > positions[:, None, :, None] - window)
            masks[window] = allowed if dtype is None else additive_mask(allowed, dtype)
        if len(masks) == 1:
            return next(iter(masks.values()))
        return {"full_attention" if window is None else "sliding_attention": mask for window, mask in masks.items()}

    def load_from(self, cache: DynamicCache, length: int) -> None:
        """Copy the first `length` tokens that a filled transformers cache holds."""
        self.write_positions.capacity = max(self.write_positions.capacity, length + 1)
        for layer, old in zip(self.layers, cache.layers, strict=False):
            if has_states(layer):
                _copy_states(old, layer)
            if not isinstance(layer, KVCacheLayer):
                continue
            held = old.keys.shape[2]
            layer.dtype, layer.device, layer.is_initialized = old.keys.dtype, old.keys.device, True
            layer.keys, layer.values = layer._allocate(old.keys), layer._allocate(old.values)
            layer.keys[:, :, length - held : length] = old.keys
            layer.values[:, :, length - held : length] = old.values

    def export_to(self, cache: DynamicCache, lengths: Sequence[int], pads: Sequence[int]) -> None:
        """Fill a transformers cache as plain decoding would. All rows must end at the same slot.

        Args:
            cache: the cache to fill.
            lengths: number of tokens to copy of each row.
            pads: number of empty slots in front of each row.
        """
        end = lengths[0] + pads[0]
        while len(cache.layers) < len(self.layers):  # made without a config, it adds layers when they are used
            cache.layers.append(DynamicLayer())
        for layer, out in zip(self.layers, cache.layers, strict=True):
            if has_states(layer):
                _copy_states(layer, out)
            if not isinstance(layer, KVCacheLayer) or not layer.is_initialized:
                continue
            first = 0
            if isinstance(out, DynamicSlidingWindowLayer):
                first = max(0, end - out.sliding_window + 1)
                out.cumulative_length = end
            if not out.is_initialized:
                out.lazy_initialization(layer.keys, layer.values)
            out.keys, out.values = (_left_padded(kept, first, lengths, pads) for kept in (layer.keys, layer.values))


def _copy_states(source: Any, target: Any) -> None:
    """Copy the running states of a cache layer to another one."""
    for i in range(source.number_of_states):
        for name in ("conv_states", "recurrent_states"):
            state = getattr(source, name)[i]
            getattr(target, name)[i] = None if state is None else state.clone()
            getattr(target, f"is_{name}_initialized")[i] = state is not None
        target.has_previous_state[i] = source.has_previous_state[i]
        target.conv_kernel_size[i] = source.conv_kernel_size[i]
    if source.conv_states[0] is not None and target.device is None:
        target.dtype, target.device = source.conv_states[0].dtype, source.conv_states[0].device


def _left_padded(kept: Tensor, first: int, lengths: Sequence[int], pads: Sequence[int]) -> Tensor:
    """One tensor with the slots from `first` on, each row after `pads[r]` empty slots."""
    if not any(pads):
        return kept[:, :, first : lengths[0]]
    out = kept.new_zeros(*kept.shape[:2], lengths[0] + pads[0] - first, kept.shape[3])
    for r, (length, pad) in enumerate(zip(lengths, pads, strict=True)):
        start = max(0, first - pad)
        out[r, :, pad + start - first :] = kept[r, :, start:length]
    return out


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to add to attention scores, from a boolean one: 0 if allowed, else the lowest number of `dtype`."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


def _is_supported(layer: Any) -> bool:
    plain = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) or has_states(layer)
    return plain or type(layer).__name__ == "DummyLayer"  # stores nothing: it shares another layer's keys and values
