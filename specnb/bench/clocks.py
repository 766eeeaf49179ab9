"""Timing of model calls and attention inside a generation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@contextmanager
def time_model_calls() -> Iterator[list[float]]:
    """Measure the seconds spent in calls of transformers models.

    It replaces `PreTrainedModel.__call__` for the whole process. Calls within calls are not counted twice.

    Yields:
        A list with one number, the seconds so far.
    """
    spent, depth, call = [0.0], 0, PreTrainedModel.__call__

    def timed_call(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        began, depth = time.perf_counter(), depth + 1
        try:
            return call(self, *args, **kwargs)
        finally:
            depth -= 1
            if not depth:
                spent[0] += time.perf_counter() - began

    PreTrainedModel.__call__ = timed_call  # takes precedence over nn.Module.__call__
    try:
        yield spent
    finally:
        del PreTrainedModel.__call__


@contextmanager
def time_attention(reading: bool = True) -> Iterator[list[float]]:
    """Measure the seconds spent in torch's `scaled_dot_product_attention`, which is replaced for the whole process.

    Args:
        reading: False returns zeros instead of attending, so that no keys and values displace weights in the
            processor's cache.

    Yields:
        A list with one number, the seconds so far.
    """
    spent, kernel = [0.0], torch.nn.functional.scaled_dot_product_attention

    def timed_call(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        out = kernel(query, *args, **kwargs) if reading else torch.zeros_like(query)
        spent[0] += time.perf_counter() - began
        return out

    torch.nn.functional.scaled_dot_product_attention = timed_call
    try:
        yield spent
    finally:
        torch.nn.functional.scaled_dot_product_attention = kernel
