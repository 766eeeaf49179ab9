"""Keeps the states of chosen layers while a model runs, through a module view: the model is not changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.runtime.module_view import Capture, Replacement, layers_path, module_view


class CaptureInput(Replacement):
    """Runs the layer and keeps its input in `value`."""

    value: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output."""
        self.value = args[0] if args else kwargs.get("hidden_states")
        return self.__dict__["layer"](*args, **kwargs)


class StateCapture:
    """The states of some layers, or the last ones, from each pass of a model.

    Layers are numbered as in transformers' `hidden_states`: 0 is the input of the first layer (the embeddings), i the
    output of the i-th layer, and the number of layers the states after the final norm.

    Args:
        model: a causal LM, or a view of one.
        layers: the numbers of the layers; empty for the states after the final norm.

    Attributes:
        view: the module tree to run in place of `model`.

    Raises:
        ValueError: the model has no such layer, or no plain stack of layers.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = ()) -> None:
        self._name, self.view = type(model).__name__, model
        self._captures: dict[int, Capture | CaptureInput] = {}
        last, body = -1, model.base_model_prefix
        if layers:
            path = layers_path(model)
            body = path.rpartition(".")[0]
            stack: Any = model.get_submodule(path)
            last = len(stack)
            check_layers(self._name, last, layers)
            for i in sorted(set(layers) - {last}, reverse=True):
                self._captures[i] = Capture(stack[i - 1]) if i else CaptureInput(self._captures.get(1, stack[0]))
            if self._captures:
                self.view = module_view(model, {f"{path}.{max(0, i - 1)}": one for i, one in self._captures.items()})
        self._layers = [*layers] or [last]
        if last in self._layers:
            self._captures[last] = Capture(self.view.get_submodule(body))
            self.view = module_view(self.view, {body: self._captures[last]})

    def take(self) -> Tensor:
        """The states of the last pass, `[rows, width, layers * size]`, on the device of the last layer asked for.

        Raises:
            ValueError: the layers do not give one state per token.
        """
        states: list[Tensor] = [_states(self._captures[i].value) for i in self._layers]
        for one in self._captures.values():
            one.value = None
        if len(states) == 1:
            return states[0]
        shapes = [state.shape[:-1] if isinstance(state, Tensor) else () for state in states]
        if len(shapes[0]) != 2 or any(shape != shapes[0] for shape in shapes):
            raise ValueError(
                f"the layers of {self._name} do not give one state per token, which a drafter could read: use another "
                "method."
            )
        return torch.cat([state.to(states[-1].device) for state in states], -1)


def check_layers(name: str, depth: int, layers: Sequence[int]) -> None:
    """Raise ValueError for layers that a model called `name` with `depth` layers does not have."""
    if any(not 0 <= i <= depth for i in layers):
        raise ValueError(
            f"the states of layers {', '.join(map(str, layers))} are asked for, but {name} has {depth} layers: give 0 "
            f"(the embeddings) to {depth}."
        )


def _states(output: Any) -> Any:
    """The states in what a layer or a model's body returned."""
    return output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
