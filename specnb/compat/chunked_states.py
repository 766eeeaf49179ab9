"""Transformers' code for layers with running states (linear attention, Mamba-2), run without padding short passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

from torch import Tensor, nn

_CHUNKED = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
"""Functions of a whole pass `[rows, length, heads, size]`, which pad it to a multiple of `chunk_size`."""


def unpadded_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward of a layer with running states, as a function, with passes shorter than a chunk not padded to one.

    It is transformers' own code, in which the chunk has the length of the pass. None where it is not known, where it
    would make no difference, or where a kernel library takes the place of transformers' function.
    """
    forward = _undecorated(type(module).forward)
    names = getattr(forward, "__globals__", {})
    found = next((name for name in _CHUNKED if name in names and name in forward.__code__.co_names), "")
    chunked: Any = names.get(found)
    if chunked is None or not _is_own(chunked):
        return None
    parameters = inspect.signature(chunked).parameters
    place, default = list(parameters).index("chunk_size"), parameters["chunk_size"].default

    @wraps(chunked)
    def unpadded(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        width = first.shape[1]
        size = kwargs.get("chunk_size", default)
        if len(args) < place and isinstance(size, int) and width < size:
            kwargs["chunk_size"] = width
        return chunked(first, *args, **kwargs)

    return FunctionType(
        forward.__code__, {**names, found: unpadded}, forward.__name__, forward.__defaults__, forward.__closure__
    )


def _undecorated(function: Any) -> Any:
    """A forward without its decorators, one of which does not say what it wraps before transformers 5.24."""
    while (inner := getattr(function, "__wrapped__", None) or _cells(function).get("forward_func")) is not None:
        function = inner
    return function


def _is_own(function: Any) -> bool:
    """Whether a function with a `chunk_size` is transformers' own and runs as it is, without a kernel library."""
    own = _cells(function).get("implementation")
    if own is None or "chunk_size" not in inspect.signature(own).parameters:
        return False
    return own is getattr(function, "__wrapped__", None)


def _cells(function: Any) -> dict[str, Any]:
    """The variables that a function keeps from where it was made."""
    code = getattr(function, "__code__", None)
    if code is None or not function.__closure__:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, function.__closure__, strict=True)}
