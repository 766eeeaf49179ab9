"""Running states (linear attention, Mamba, convolutions): rolled back to a copy, since they cannot be cropped.

The states are copied before a pass with drafted tokens. If a draft is rejected, they go back to the copy, and the next
pass feeds the accepted tokens together with the new draft: no extra pass is needed, the next one is only longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

MAX_REPLAY = 16
"""The most accepted tokens that a pass feeds again beside a new draft; more are fed in a pass of their own."""


def has_states(layer: Any) -> bool:
    """Whether a cache layer holds running states."""
    return isinstance(layer, LinearAttentionLayer)


class Snapshots:
    """The running states in the cache of one row, and a copy of them to roll back to.

    Args:
        layers: the cache layers that hold states.
        length: number of tokens that the states have seen.
    """

    def __init__(self, layers: Sequence[Any], length: int = 0) -> None:
        self.layers, self.length = layers, length
        self._saved_length = 0  # 0: there is no copy
        self._saved: dict[tuple[int, str, int], Tensor] = {}

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
        self._saved_length = self.length

    def roll_back(self, length: int) -> int:
        """Take the states back to at most `length` tokens.

        Returns:
            The number of tokens that they have seen then: the present one, that of the copy, or 0.
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
        else:
            for layer in self.layers:
                LinearAttentionLayer.reset(layer)
        self.length = self._saved_length
        return self.length

    def _states(self) -> Iterator[tuple[tuple[int, str, int], Tensor]]:
        for n, layer in enumerate(self.layers):
            for name in ("conv_states", "recurrent_states"):
                for i, state in getattr(layer, name).items():
                    if state is not None:
                        yield (n, name, i), state
