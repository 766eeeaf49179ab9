"""The same kernels with less Python around them: in small models, calling a module takes longer than its arithmetic.

Linear layers are called without the preparations of nn.Module, and RMS norms in float32 run as torch's own function,
which gives the same bits.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specnb import compat
from specnb.runtime.module_view import LinearReplacement, Replacement

_Scale = Callable[[Tensor], Tensor]

_SCALES: tuple[_Scale, ...] = (lambda weight: weight, lambda weight: 1.0 + weight)  # Gemma 2 and 3 store weight - 1
_WIDTH = 48  # tried for a norm without weights, which takes any width
_KNOWN: dict[tuple[Any, ...], _Scale | None] = {}  # by class, its forward, width, eps, dtype and device


class LowOverheadLinear(LinearReplacement):
    """`nn.Linear` without hooks."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        self.__dict__["both"] = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b `[..., out]` for x `[..., in]`."""
        return nn.functional.linear(x, *self.__dict__["both"])

    __call__ = forward


class FusedRMSNorm(Replacement):
    """An RMS norm that multiplies by `scale` `[width]`, or by nothing.

    In half precision it calls the layer itself, which rounds in between.
    """

    def __init__(self, layer: nn.Module, scale: Tensor | None, eps: float | None) -> None:
        super().__init__(layer)
        self.__dict__["both"] = scale, eps

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x `[..., width]`."""
        own = self.__dict__
        scale = own["both"][0]
        if x.dtype is not torch.float32 or (scale is not None and scale.shape[0] != x.shape[-1]):
            return own["layer"](x)  # type: ignore[no-any-return]
        return torch.rms_norm(x, x.shape[-1:], *own["both"])

    __call__ = forward


def replacements(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The low-overhead modules for a model's `modules`, by path."""
    if not compat.linear_is_torchs():
        return {}
    return {name: found for name, module in modules.items() if name and (found := _replacement(module)) is not None}


def _replacement(module: nn.Module) -> nn.Module | None:
    if compat.has_hooks(module):
        return None
    if type(module) is nn.Linear:
        return LowOverheadLinear(module)
    return _norm(module) if type(module).__name__.endswith("RMSNorm") else None


def _norm(module: nn.Module) -> FusedRMSNorm | None:
    """A norm that gives the same bits; None where no known way of scaling does."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None:
        return None if _scale(module, torch.ones(_WIDTH), eps) is None else FusedRMSNorm(module, None, eps)
    scale = _scale(module, weight, eps)
    return None if scale is None else FusedRMSNorm(module, scale(weight.detach()), eps)


def _scale(module: nn.Module, weight: Tensor, eps: float | None) -> _Scale | None:
    """How a norm of this class scales, found by trying it with another weight; None if in no known way."""
    key = type(module), type(module).forward, tuple(weight.shape), eps, weight.dtype, weight.device.type
    if key not in _KNOWN:
        _KNOWN[key] = next((scale for scale in _SCALES if _same(module, weight, eps, scale)), None)
    return _KNOWN[key]


def _same(module: nn.Module, weight: Tensor, eps: float | None, scale: _Scale) -> bool:
    try:
        return _gives_the_same(module, weight, eps, scale)
    except Exception:  # of any kind: the module is not known, so it is not replaced
        return False


def _gives_the_same(module: nn.Module, weight: Tensor, eps: float | None, scale: _Scale) -> bool:
    inputs = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
    if len(inputs) != 1 or weight.dim() != 1 or weight.dtype is not torch.float32 or weight.device.type == "meta":
        return False
    generator = torch.Generator().manual_seed(0)
    probe, bare = copy.copy(module), "weight" not in module._parameters
    other = torch.rand(weight.shape, generator=generator).to(weight) + 0.5
    probe.__dict__["_parameters"] = {} if bare else {"weight": other}
    with torch.no_grad():
        for size in ((1, 1), (2, 5), (1, 3, 17)):
            for spread in (1e-3, 1.0, 30.0):  # the first is so small that eps counts
                x = (spread * torch.randn(*size, *weight.shape, generator=generator)).to(weight)
                if not torch.equal(probe(x), FusedRMSNorm(module, None if bare else scale(other), eps)(x)):
                    return False
    return True
