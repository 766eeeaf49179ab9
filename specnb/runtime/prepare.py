"""The module tree that is run in place of a model's own: same weights, same numbers, less time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from specnb import compat
from specnb.runtime import grouped_query_attention, low_overhead, prepacked_linear
from specnb.runtime.cuda_graphs import recorder
from specnb.runtime.module_view import module_view, unpatched

M = TypeVar("M", bound=PreTrainedModel)


@dataclass(frozen=True)
class Runtime:
    """What makes the passes of a model cheaper: how many of its modules are replaced by each kind.

    Args:
        prepacked_linear: linear layers with weights laid out for the processor (`specnb.pack`).
        low_overhead: linear layers and norms with less Python around the same kernels.
        grouped_query_attention: attentions that read shared keys and values in place.
        cuda_graphs: whether small blocks run as CUDA graphs (`specnb.cuda_graphs`).
    """

    prepacked_linear: int = 0
    low_overhead: int = 0
    grouped_query_attention: int = 0
    cuda_graphs: bool = False


def prepare(model: M) -> tuple[M, Runtime]:
    """The module tree to run for `model`, which is not changed, and a report of what was replaced in it.

    Under autocast, which casts the inputs of each module, it is the model itself.
    """
    graphs = recorder(model) is not None
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return model, Runtime(cuda_graphs=graphs)
    modules = dict(model.named_modules())
    prepacked = prepacked_linear.replacements(model, modules) if compat.linear_is_torchs() else {}
    attentions: dict[str, nn.Module] = {}
    small: dict[str, nn.Module] = {}
    if unpatched(modules.values()):
        others = {name: module for name, module in modules.items() if name not in prepacked}
        attentions, small = grouped_query_attention.replacements(others), low_overhead.replacements(others)
    replaced = {**attentions, **small, **prepacked}  # attentions before the layers inside them
    report = Runtime(len(prepacked), len(small), len(attentions), graphs)
    return (module_view(model, replaced) if replaced else model), report
