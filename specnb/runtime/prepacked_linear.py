"""Weights laid out for the processor's kernels: a verification of a few tokens then costs little more than one token.

The maths library multiplies a weight by 2 to 16 rows as if each cost a pass over it; with the layout that oneDNN packs
once, the weight is read once. The user's model keeps its weights as they are: `view` gives a second module tree with the packed
ones in it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb.runtime.module_view import LinearReplacement, check_model, forward_replaced, module_view

_Stamp = tuple[tuple[str, int, int, int], ...]
M = TypeVar("M", bound=PreTrainedModel)

ROWS = (1, 2, 4, 8, 16, 64)  # numbers of rows at which packed and plain are compared
_BLOCK = 16  # a layer for which packed pays only beyond that, for prompts, stays as it is
_COPIES = 160
_LOCK = threading.Lock()
_PACKED: WeakKeyDictionary[PreTrainedModel, tuple[_Stamp, dict[str, PrepackedLinear]]] = WeakKeyDictionary()
_SHARED: WeakValueDictionary[tuple[int, ...], PrepackedWeight] = WeakValueDictionary()
_FROM: dict[tuple[int, ...], int | None] = {}  # by shape, copies measured and threads: rows from which packed is faster
_CACHE = 64 * 2**20  # bytes, more than a processor's cache: in a model of that size each weight comes from memory


class PrepackedWeight:
    """The packed copy of a weight. Layers of several models that share the weight share this too."""

    def __init__(self, weight: Tensor) -> None:
        self.data: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._sample = _sample(weight).clone()

    @classmethod
    def of(cls, weight: Tensor) -> PrepackedWeight:
        key = (weight.data_ptr(), weight._version, *weight.shape)
        packed = _SHARED.get(key)
        if packed is None or not packed.still(weight):
            packed = _SHARED[key] = cls(weight)
        return packed

    def still(self, weight: Tensor) -> bool:
        """Whether the weight has the numbers that were packed, as far as a number of each row tells."""
        return torch.equal(self._sample, _sample(weight))


class PrepackedLinear(LinearReplacement):
    """A linear layer that multiplies with its packed weight where that is faster, from `rows` rows on."""

    packed: PrepackedWeight
    rows: int

    def __init__(self, layer: nn.Linear, rows: int) -> None:
        super().__init__(layer)
        self.__dict__.update(packed=PrepackedWeight.of(layer.weight), rows=rows)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.__dict__["layer"]
        if x.shape[:-1].numel() < self.rows:
            return nn.functional.linear(x, layer.weight, layer.bias)
        return multiply(x, self.packed.data, layer.bias)


def _sample(weight: Tensor) -> Tensor:
    """A number of every row, spread over the columns. What is written through `.data` changes no version."""
    columns = weight.shape[1]
    step = max(1, round(0.93 * columns))  # less than a row, so that none is left out
    while math.gcd(step, columns) > 1:
        step -= 1
    return weight.detach().reshape(-1)[::step]


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x W' + b with a packed weight."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def pack(model: M) -> M:
    """Pack the weights of `model`'s linear layers, once; `specnb.generate` then uses them. The model itself is not changed.

    Packing costs as much memory again as those weights (`packed_bytes` tells before). It is tried only where it can
    help: float32 on a CPU with oneDNN; elsewhere nothing happens. Weights that change later are packed again; only a write past
    torch's own book-keeping (through `.data` or numpy) to a small part of it can go unseen: `unpack` after such a one.

    Returns:
        A module tree with the packed weights, or the model itself where nothing was packed.
    """
    check_model(model, "specnb.pack")
    replaced = _packed(model, dict(model.named_modules()))
    return module_view(model, replaced) if replaced else model


def _packed(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> dict[str, PrepackedLinear]:
    with _LOCK:
        layers = _linear_layers(modules)
        stamp = _stamp(layers)
        known = _PACKED.get(model)
        if (
            known is None
            or known[0] != stamp
            or not all(one.packed.still(layers[name].weight) for name, one in known[1].items())
        ):
            _PACKED.pop(model, None)
            if not layers:
                return {}
            size = min(_CACHE, sum(layer.weight.nbytes for layer in layers.values()))
            starts = {name: _pays_from(layer, size) for name, layer in layers.items()}
            packed = {name: PrepackedLinear(layers[name], rows) for name, rows in starts.items() if rows is not None}
            known = _PACKED[model] = stamp, packed
        return {} if any(map(forward_replaced, modules.values())) else known[1]


def unpack(model: PreTrainedModel) -> None:
    """Let the packed weights of `model` go."""
    check_model(model, "specnb.unpack")
    with _LOCK:
        _PACKED.pop(model, None)


def view(model: M) -> M:
    """A module tree with packed weights if `pack` made some, else the model itself."""
    return pack(model) if model in _PACKED else model


def replacements(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> dict[str, PrepackedLinear]:
    """What stands in for layers among the model's `modules` in that tree, by path; nothing if `pack` made none."""
    return _packed(model, modules) if model in _PACKED else {}


def packed_bytes(model: PreTrainedModel) -> int:
    """Memory that packing takes; 0 where there is nothing to pack."""
    layers = _linear_layers(dict(model.named_modules()))
    return sum({layer.weight.data_ptr(): layer.weight.nbytes for layer in layers.values()}.values())


def fits(model: PreTrainedModel) -> bool:
    """Whether packing takes no more than a quarter of the memory that is free."""
    try:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return False  # a system that does not say
    return 0 < packed_bytes(model) <= free / 4


def _linear_layers(modules: Mapping[str, nn.Module]) -> dict[str, nn.Linear]:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return {}
    return {
        name: module
        for name, module in modules.items()
        if type(module) is nn.Linear
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
    }


def _stamp(layers: dict[str, nn.Linear]) -> _Stamp:
    """Changes when a layer or a weight is replaced, or a weight written to."""
    return tuple((name, id(layer), layer.weight.data_ptr(), layer.weight._version) for name, layer in layers.items())


def _pays_from(layer: nn.Linear, size: int) -> int | None:
    """From how many rows on the packed layout is faster for a weight of this shape, by measuring; None: never.

    Measured on as many copies as take `size` bytes, in turns, so that each is read from where the model's own would be.
    """
    copies = min(_COPIES, max(1, size // layer.weight.nbytes))
    key = (*layer.weight.shape, copies, torch.get_num_threads())
    if key not in _FROM:
        with torch.no_grad():
            weights = [layer.weight, *[layer.weight.clone() for _ in range(copies - 1)]]
            packed = [PrepackedWeight(weight).data for weight in weights]
            faster = []
            for rows in ROWS:
                x = torch.ones(rows, layer.in_features)
                plain = _seconds([partial(nn.functional.linear, x, weight, layer.bias) for weight in weights])
                faster.append(_seconds([partial(multiply, x, weight, layer.bias) for weight in packed]) < 0.95 * plain)
        last_slower = max((i for i, better in enumerate(faster) if not better), default=-1)
        start = ROWS[last_slower + 1] if last_slower + 1 < len(ROWS) else None
        _FROM[key] = None if start is None or start > _BLOCK else start
    return _FROM[key]


def _seconds(runs: Sequence[Callable[[], Any]], times: int = 3) -> float:
    """The best time of a round of these."""
    best = float("inf")
    for _ in range(times + 1):  # the first may still pay for what happens once; it is seldom the best
        began = time.perf_counter()
        for run in runs:
            run()
        best = min(best, time.perf_counter() - began)
    return best
