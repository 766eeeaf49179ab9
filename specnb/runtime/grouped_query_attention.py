"""Grouped-query attention that reads keys and values in place.

Where a mask is given, as for every block that is verified, transformers copies keys and values once per query head: the
whole kv cache, in every layer, in every step. torch's CPU kernel reads them in place and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from specnb import compat
from specnb.runtime.module_view import module_view

NAME = "specnb_grouped_query_sdpa"


def grouped_query_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa attention, without copies of keys and values.

    Args:
        module: the attention module.
        query: `[rows, heads, q, dim]`.
        key, value: `[rows, groups, slots, dim]`.
        attention_mask: `[rows, 1, q, slots]`.
        dropout, scaling, more: as transformers gives them.

    Returns:
        The output `[rows, q, heads, dim]`, and None for attention weights.
    """
    if attention_mask is None or dropout or not query.is_cpu or any(more.get(name) is not None for name in _UNUSUAL):
        result: tuple[Tensor, None] = compat.sdpa_attention(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
        return result
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


_UNUSUAL = ("position_bias", "softcap")
_REGISTERED = compat.register_attention(NAME, grouped_query_sdpa)


def replacements(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Replacements for the attentions among `modules`, by path: those that use transformers' own sdpa on a CPU."""
    if not (_REGISTERED and compat.sdpa_is_transformers()):
        return {}
    configs: dict[int, Any] = {}
    replaced: dict[str, nn.Module] = {}
    for name, module in modules.items():
        if not _shares_heads(module):
            continue
        if id(module.config) not in configs:
            configs[id(module.config)] = compat.with_attention(module.config, NAME)
        replaced[name] = module_view(module, {})
        replaced[name].__dict__["config"] = configs[id(module.config)]
    return replaced


def _shares_heads(module: nn.Module) -> bool:
    config = module.__dict__.get("config")
    groups = module.__dict__.get("num_key_value_groups", 1)
    if groups <= 1 or config is None or compat.attention_implementation(config) != "sdpa":
        return False
    return all(parameter.device.type == "cpu" for parameter in module.parameters())
