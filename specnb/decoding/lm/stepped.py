"""Layers with running states whose code in transformers is wrong, or slow, for a pass of a few tokens from a state.

Mamba-1 layers start a pass of several tokens from a zero state, so they are run token by token. The projections, which
hold nearly all weights, still run for all tokens of the pass at once.

Gated delta rules and Mamba-2 pad each pass to a whole chunk of 64 to 256 tokens. A shorter pass is run in a chunk of
its own length.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from specnb import compat
from specnb.compat.chunked_states import unpadded_forward
from specnb.runtime.module_view import Inject, M, Replacement, Skip, module_view, unpatched

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


class UnpaddedMixer(Replacement):
    """A mixer that computes its passes in chunks. A pass from a state that is shorter than a chunk is not padded."""

    def __init__(self, mixer: Any, forward: Callable[..., Any]) -> None:
        super().__init__(mixer)
        short = module_view(mixer, {})
        short.__dict__["forward"] = MethodType(forward, short)
        # under its other names, which a decorator translates, the cache would not reach this forward
        names = signature(forward).parameters
        name = next((name for name in ("cache_params", *compat.CACHE_NAMES) if name in names), None)
        self.__dict__.update(short=short, cache_name=name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The mixer's output `[rows, width, size]`."""
        mixer, cache = self.layer, kwargs.get(self.cache_name)
        continues = cache is not None and hidden_states.shape[1] > 1 and cache.has_previous_state(mixer.layer_idx)
        # a prompt is run as in plain decoding
        return (self.short if continues and not args else mixer)(hidden_states, *args, **kwargs)


def view_mixers(model: M) -> M:
    """A view of `model` with these mixers replaced; the model itself if it has none."""
    mixers: dict[str, Replacement] = {}
    for name, module in model.named_modules():
        if any(kind.__name__ in _MIXERS for kind in type(module).__mro__):
            mixers[name] = SteppedMixer(module)
        elif unpatched(module.modules()) and (forward := unpadded_forward(module)) is not None:
            mixers[name] = UnpaddedMixer(module, forward)
    return module_view(model, mixers) if mixers else model
