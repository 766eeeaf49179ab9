"""Running states (linear attention, Mamba, convolutions): rolled back to a copy, since they cannot be cropped.

The states are copied before a pass with drafted tokens. If a draft is rejected, they are rolled back to the copy, and
the next pass feeds the accepted tokens together with the new draft. Only many of them get a pass of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

_REPLACED = ("DeepseekV4CSACache", "DeepseekV4HCACache", "MiniMaxCache")
"""Classes of cache layers whose tensors are replaced by each pass and never written into: the old ones need no copy.

MiniMax's is that of a whole cache, which keeps states beside its layers.
"""

MAX_REPLAY = 16
"""The most accepted tokens that a pass feeds again together with a new draft; more are fed in a pass of their own."""


def has_states(layer: Any) -> bool:
    """Whether a cache layer holds running states."""
    return isinstance(layer, LinearAttentionLayer)


def is_replaced(layer: Any) -> bool:
    """Whether passes replace all tensors of a cache layer, so that references to them are enough to roll back."""
    return type(layer).__name__ in _REPLACED


def is_restored(layer: Any) -> bool:
    """Whether `Snapshots` roll a cache layer back."""
    return has_states(layer) or is_replaced(layer)


class StateList:
    """The running states that RWKV returns with its logits, instead of a cache. RWKV's passes write into them."""

    layers = ()

    def __init__(self) -> None:
        self.conv_states: dict[int, Tensor] = {}
        self.recurrent_states: dict[int, Tensor] = {}

    def hold(self, states: Sequence[Tensor]) -> StateList:
        """Hold the states of the last pass."""
        self.recurrent_states = dict(enumerate(states))
        return self


class Snapshots:
    """The running states in the cache of one row, and a copy of them to roll back to.

    Args:
        layers: the cache layers that hold states.
        length: number of tokens that the states have seen.
        replaced: cache layers whose tensors are replaced by each pass: references to the old ones are kept.
    """

    def __init__(self, layers: Sequence[Any], length: int = 0, replaced: Sequence[Any] = ()) -> None:
        self.layers, self.length, self._replaced = layers, length, replaced
        self._saved_length = 0  # 0: there is no copy
        self._saved: dict[tuple[int, str, int], Tensor] = {}
        self._kept: list[dict[str, Any]] = []

    @classmethod
    def of_cache(cls, cache: Any, length: int) -> Snapshots | None:
        """The snapshots of a transformers cache that has seen `length` tokens; None if it has no running states."""
        layers = getattr(cache, "layers", ())
        replaced = [layer for layer in (*layers, cache) if is_replaced(layer)]
        states = [cache] if isinstance(cache, StateList) else [layer for layer in layers if has_states(layer)]
        return cls(states, length, replaced) if states or replaced else None

    @property
    def nbytes(self) -> int:
        """Memory of the copy, in bytes."""
        return sum(tensor.nbytes for tensor in self._saved.values())

    def save(self) -> None:
        """Copy the states as they are. The buffers are allocated once."""
        if self._saved_length == self.length:
            return
        for key, state in self._states():
            kept = self._saved.get(key)
            if kept is None or kept.shape != state.shape:
                self._saved[key] = state.clone()
            else:
                kept.copy_(state)
        self._kept = [{name: copy.copy(value) for name, value in vars(layer).items()} for layer in self._replaced]
        self._saved_length = self.length

    def roll_back(self, length: int) -> int:
        """Roll the states back to at most `length` tokens.

        Returns:
            The number of tokens that the states have seen after that: as many as before, those of the copy, or 0.
        """
        if length < self._saved_length:
            self._saved_length = 0  # the copy has seen tokens that are no longer part of the text
        if length >= self.length:
            return self.length
        if self._saved_length:
            for (n, name, i), state in self._states():
                kept = self._saved[n, name, i]
                if state.shape == kept.shape:
                    state.copy_(kept)
                else:  # a layer that records its past
                    getattr(self.layers[n], name)[i] = kept.clone()
            for layer, attributes in zip(self._replaced, self._kept, strict=True):
                vars(layer).update({name: copy.copy(value) for name, value in attributes.items()})
        else:
            for layer in filter(has_states, self.layers):
                LinearAttentionLayer.reset(layer)
        self.length = self._saved_length
        return self.length

    def _states(self) -> Iterator[tuple[tuple[int, str, int], Tensor]]:
        for n, layer in enumerate(self.layers):
            for name in ("conv_states", "recurrent_states"):
                for i, state in getattr(layer, name).items():
                    if state is not None:
                        yield (n, name, i), state
