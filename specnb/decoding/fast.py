"""The module tree that is run in place of a model's own: same weights, same numbers, less time."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from specnb.decoding import grouped, lean, packed
from specnb.decoding.borrow import borrow, is_torchs_own, untouched

M = TypeVar("M", bound=PreTrainedModel)


def fastest(model: M) -> M:
    """The module tree to run: with packed weights if there are some, attention that copies no keys, and less Python.

    Under autocast, which casts what each module is given, the model itself.
    """
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return model
    modules = dict(model.named_modules())
    quick = packed.stands(model, modules) if is_torchs_own() else {}
    replaced: dict[str, nn.Module] = {**quick}
    if untouched(modules.values()):
        others = {name: module for name, module in modules.items() if name not in quick}
        replaced = {**grouped.stands(others), **lean.stands(others), **quick}  # attentions before what lies in them
    return borrow(model, replaced) if replaced else model
