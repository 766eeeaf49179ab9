"""Attention whose key/value heads serve several query heads, read where they are.

transformers copies keys and values once per query head whenever a mask is given, as it is for every block that is verified: the
whole store, in every layer, in every step. torch's CPU kernel reads them in place and gives the same bits.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specnb.decoding.borrow import borrow, untouched

M = TypeVar("M", bound=PreTrainedModel)

NAME = "specnb_grouped_sdpa"


def grouped_sdpa(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
                 scaling: float | None = None, **more: Any) -> tuple[Tensor, None]:  # fmt: skip
    """`query` `[rows, heads, q, dim]`, `key` and `value` `[rows, groups, slots, dim]` -> `[rows, q, heads, dim]`, as transformers' sdpa."""
    if attention_mask is None or dropout or not query.is_cpu or any(more.get(name) is not None for name in _UNUSUAL):
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
        return result
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


_UNUSUAL = ("position_bias", "softcap")
AttentionInterface.register(NAME, grouped_sdpa)


def grouped(model: M) -> M:
    """The model with such attentions where it can have them: sdpa on a CPU; else the model itself. It is not changed."""
    found = {name: module for name, module in model.named_modules() if _shares_heads(module)}
    if not found or model.device.type != "cpu" or not untouched(model):
        return model
    configs: dict[int, Any] = {}
    replaced = {}
    for name, module in found.items():
        if id(module.config) not in configs:
            configs[id(module.config)] = copy.copy(module.config)
            configs[id(module.config)].__dict__["_attn_implementation_internal"] = NAME
        replaced[name] = borrow(module, {})
        replaced[name].__dict__["config"] = configs[id(module.config)]
    return borrow(model, replaced)


def _shares_heads(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    groups = module.__dict__.get("num_key_value_groups", 1)
    return bool(groups > 1 and getattr(config, "_attn_implementation", None) == "sdpa")
