"""Weights in int8 with one scale a row, as compressed-tensors names and describes them ("int-quantized", by channel).

A matrix `X.weight` is stored as int8, with the scales of its rows in `X.weight_scale`; all else is stored as it is. The
weights are computed once, when they are read, so what runs are floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_SCALE = "_scale"
_LARGEST = 127
QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [],
}
"""What a config.json says of such weights."""


def is_int8_rows(config: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` describes weights in int8 with one scale a row, and nothing else."""
    groups = config.get("config_groups")
    if config.get("quant_method") != "compressed-tensors" or not isinstance(groups, Mapping) or len(groups) != 1:
        return False
    (group,) = groups.values()
    weights = group.get("weights") or {}
    wanted = QUANTIZATION_CONFIG["config_groups"]["group_0"]["weights"]
    same = all(weights.get(key) == wanted[key] for key in ("num_bits", "type", "symmetric", "strategy"))
    return same and config.get("format") == "int-quantized" and not group.get("input_activations")


def quantize(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with each matrix `[rows, columns]` in int8, and its scales `[rows, 1]` in float32."""
    stored: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.dim() != 2 or not value.is_floating_point():
            stored[name] = value
            continue
        weight = value.float()
        scale = (weight.abs().amax(1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        stored[name] = (weight / scale).round().clamp(-_LARGEST, _LARGEST).to(torch.int8)
        stored[name + _SCALE] = scale
    return stored


def dequantize(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with int8 weights and their scales as float32 weights.

    Raises:
        ValueError: an int8 weight has no scales, or not one a row.
    """
    found = {name: value for name, value in tensors.items() if not name.endswith(f".weight{_SCALE}")}
    for name, value in found.items():
        if value.dtype != torch.int8:
            continue
        scale = tensors.get(name + _SCALE)
        if scale is None or scale.shape not in ((len(value), 1), (len(value),)):
            there = "there is none" if scale is None else f"it has the shape {list(scale.shape)}"
            raise ValueError(f"{name} is in int8 and needs {name}{_SCALE} with one scale a row: {there}.")
        found[name] = value.float() * scale.float().view(-1, 1)
    return found
