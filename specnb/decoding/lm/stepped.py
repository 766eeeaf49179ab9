"""Mamba-1 layers, run token by token, as their code in transformers starts a pass of several tokens from a zero state.

The projections, which hold nearly all weights, still run for all tokens of the pass at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specnb import compat
from specnb.runtime.module_view import Inject, M, Replacement, Skip, module_view

_MIXERS = {"MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer"}


class SteppedMixer(Replacement):
    """A Mamba-1 mixer that continues from the states in its cache, also in a pass of several tokens."""

    def __init__(self, mixer: Any) -> None:
        super().__init__(mixer)
        inputs = Inject(mixer.in_proj)
        step = module_view(mixer, {"in_proj": inputs, "out_proj": Skip(mixer.out_proj)})
        self.__dict__.update(inputs=inputs, step=step)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The mixer's output `[rows, width, size]`."""
        mixer, inputs, step = self.layer, self.inputs, self.step
        cache = compat.cache_among(kwargs, "cache_params")  # this name before transformers 5.24
        width = hidden_states.shape[1]
        if width == 1 or cache is None or args or not cache.has_previous_state(mixer.layer_idx):
            whole: Tensor = mixer(hidden_states, *args, **kwargs)
            return whole
        kwargs = {**kwargs, "attention_mask": None}  # a pass that continues a cache has no padding
        projected, steps = mixer.in_proj(hidden_states), []
        for i in range(width):
            inputs.value = projected[:, i : i + 1]
            steps.append(step(hidden_states[:, i : i + 1], **kwargs))
        inputs.value = None
        out: Tensor = mixer.out_proj(torch.cat(steps, 1))
        return out


def step_mixers(model: M) -> M:
    """A view of `model` in which Mamba-1 mixers run token by token; the model itself if it has none."""
    mixers = {
        name: SteppedMixer(module)
        for name, module in model.named_modules()
        if any(kind.__name__ in _MIXERS for kind in type(module).__mro__)
    }
    return module_view(model, mixers) if mixers else model
