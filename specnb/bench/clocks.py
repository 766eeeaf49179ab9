"""Stopwatches for what runs inside a generation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def timed(*models: torch.nn.Module) -> Iterator[list[float]]:
    """Seconds spent in the forwards of these models."""
    spent, began, hooks = [0.0], [0.0], []

    def before(*_: Any) -> None:
        began[0] = time.perf_counter()

    def after(*_: Any) -> None:
        spent[0] += time.perf_counter() - began[0]

    for model in models:
        hooks += [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def timed_attention() -> Iterator[list[float]]:
    """Seconds spent in torch's attention kernel, while nothing else in the process runs it."""
    spent, kernel = [0.0], torch.nn.functional.scaled_dot_product_attention

    def clocked(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        out = kernel(*args, **kwargs)
        spent[0] += time.perf_counter() - began
        return out

    torch.nn.functional.scaled_dot_product_attention = clocked
    try:
        yield spent
    finally:
        torch.nn.functional.scaled_dot_product_attention = kernel
