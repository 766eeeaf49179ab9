"""Weights laid out for the processor's kernels: verifying a few tokens then costs little more than decoding one.

The maths library multiplies a weight by 2 to 16 rows as if each row cost a pass over the weight. With the layout that
oneDNN packs once, the weight is read once for all rows. The user's model keeps its weights as they are: `view` gives a
second module tree with the packed ones in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb import compat
from specnb.runtime.module_view import LinearReplacement, check_model, forward_replaced, module_view

M = TypeVar("M", bound=PreTrainedModel)
_Stamp = tuple[tuple[str, int, int, int], ...]  # of each layer: name, identity, address and version of its weight

ROWS = (1, 2, 4, 8, 16, 64)
"""Numbers of rows at which prepacked and plain layers are compared."""
_MOST_ROWS = 16  # a layer for which the packed layout pays only beyond that, for prompts, stays as it is
_MAX_COPIES = 160
_PROBED = 64  # numbers of a weight that are compared with those that were packed
_MEASURED_BYTES = 64 * 2**20  # more than a processor's cache: in a model of that size each weight comes from memory
_LOCK = threading.Lock()


class PrepackedWeight:
    """The packed copy of a weight `[out, in]`. Layers of several models that share the weight share this too."""

    def __init__(self, weight: Tensor) -> None:
        self.data: Tensor = compat.prepack(weight.detach())
        self.probe = _probe(weight)
        self.probed = self.probe.clone()

    @classmethod
    def of(cls, weight: Tensor) -> PrepackedWeight:
        """The packed copy of `weight`, an existing one where there is one."""
        key = (weight.data_ptr(), compat.version_of(weight), *weight.shape)
        packed = _SHARED.get(key)
        if packed is None or not torch.equal(packed.probe, packed.probed):
            packed = _SHARED[key] = cls(weight)
        return packed


class PrepackedLinear(LinearReplacement):
    """A linear layer that multiplies with its packed weight where that is faster: from `rows` rows on."""

    packed: PrepackedWeight
    rows: int

    def __init__(self, layer: nn.Linear, rows: int) -> None:
        super().__init__(layer)
        self.__dict__.update(packed=PrepackedWeight.of(layer.weight), rows=rows)

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + b `[..., out]` for x `[..., in]`."""
        layer = self.__dict__["layer"]
        if x.shape[:-1].numel() < self.rows:
            return nn.functional.linear(x, layer.weight, layer.bias)
        return compat.prepacked_linear(x, self.packed.data, layer.bias)


class _Packed(NamedTuple):
    """What was packed of a model, and what to compare to see whether its weights are still those."""

    stamp: _Stamp
    layers: dict[str, PrepackedLinear]
    probes: list[Tensor]
    probed: Tensor | None

    def is_of(self, stamp: _Stamp) -> bool:
        same = self.probed is None or torch.equal(torch.cat(self.probes), self.probed)
        return same and self.stamp == stamp


_PACKED: WeakKeyDictionary[PreTrainedModel, _Packed] = WeakKeyDictionary()
_SHARED: WeakValueDictionary[tuple[int, ...], PrepackedWeight] = WeakValueDictionary()
_PAYS_FROM: dict[tuple[int, ...], int | None] = {}  # by shape, copies measured and threads


def _probe(weight: Tensor) -> Tensor:
    """A view of a few numbers of a weight. A write through `.data`, as of a LoRA merge, changes no version."""
    numbers = weight.detach().reshape(-1)
    step = max(1, len(numbers) // _PROBED) | 1  # odd, so that not all of them are in one column
    return numbers[::step][:_PROBED]


def pack(model: M) -> M:
    """Pack the weights of `model`'s linear layers, once; `specnb.generate` then uses them.

    The model itself is not changed. Packing takes as much memory again as those weights. It is tried only where it can
    help: float32 on a CPU with oneDNN; elsewhere nothing happens. Weights that change later are packed again. Only a
    write through `.data` or numpy to a small part of a weight can go unnoticed, since torch does not count such writes:
    call `specnb.unpack` after one.

    Args:
        model: a model of transformers; of a pair, `pair.target`.

    Returns:
        A module tree with the packed weights, or the model itself where nothing was packed.

    Raises:
        ValueError: `model` is not a model of transformers.
    """
    check_model(model, "specnb.pack")
    replaced = _packed(model, dict(model.named_modules()))
    return module_view(model, replaced) if replaced else model


def _packed(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> dict[str, PrepackedLinear]:
    with _LOCK:
        layers = _linear_layers(modules)
        stamp = _stamp(layers)
        known = _PACKED.get(model)
        if known is None or not known.is_of(stamp):
            del known  # with the packed weights that nobody else uses
            _PACKED.pop(model, None)
            if not layers:
                return {}
            size = min(_MEASURED_BYTES, sum(layer.weight.nbytes for layer in layers.values()))
            starts = {name: _pays_from(layer, size) for name, layer in layers.items()}
            packed = {name: PrepackedLinear(layers[name], rows) for name, rows in starts.items() if rows is not None}
            weights = {id(one.packed): one.packed for one in packed.values()}.values()
            probes = [weight.probe for weight in weights]
            probed = torch.cat([weight.probed for weight in weights]) if probes else None
            known = _PACKED[model] = _Packed(stamp, packed, probes, probed)
        return {} if any(map(forward_replaced, modules.values())) else known.layers


def unpack(model: PreTrainedModel) -> None:
    """Drop the packed weights of `model`; they are packed again only by `specnb.pack`.

    Args:
        model: a model of transformers; of a pair, `pair.target`.

    Raises:
        ValueError: `model` is not a model of transformers.
    """
    check_model(model, "specnb.unpack")
    with _LOCK:
        _PACKED.pop(model, None)


def view(model: M) -> M:
    """A module tree with packed weights if `pack` made some, else the model itself."""
    return pack(model) if model in _PACKED else model


def replacements(model: PreTrainedModel, modules: Mapping[str, nn.Module]) -> dict[str, PrepackedLinear]:
    """The packed layers for the model's `modules`, by path; none if `pack` made none."""
    return _packed(model, modules) if model in _PACKED else {}


def packed_bytes(model: PreTrainedModel) -> int:
    """Memory that packing takes; 0 where there is nothing to pack."""
    layers = _linear_layers(dict(model.named_modules()))
    return sum({layer.weight.data_ptr(): layer.weight.nbytes for layer in layers.values()}.values())


def fits(model: PreTrainedModel) -> bool:
    """Whether packing takes no more than a quarter of the memory that is free."""
    available: int = psutil.virtual_memory().available
    return 0 < packed_bytes(model) <= available / 4


def _linear_layers(modules: Mapping[str, nn.Module]) -> dict[str, nn.Linear]:
    if not compat.can_prepack():
        return {}
    return {
        name: module
        for name, module in modules.items()
        if type(module) is nn.Linear
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
        and not (compat.has_hooks(module) or "forward" in vars(module))
    }


def _stamp(layers: dict[str, nn.Linear]) -> _Stamp:
    """Changes when a layer or a weight is replaced, or a weight written to."""
    return tuple(
        (name, id(layer), layer.weight.data_ptr(), compat.version_of(layer.weight)) for name, layer in layers.items()
    )


def _pays_from(layer: nn.Linear, size: int) -> int | None:
    """From how many rows on the packed layout is faster for a weight of this shape, by measuring; None: never.

    Measured on as many copies as take `size` bytes, in turns, so that each is read from memory as the model's own would
    be.
    """
    copies = min(_MAX_COPIES, max(1, size // layer.weight.nbytes))
    key = (*layer.weight.shape, copies, torch.get_num_threads())
    if key not in _PAYS_FROM:
        with torch.no_grad():
            weights = [layer.weight, *[layer.weight.clone() for _ in range(copies - 1)]]
            packed = [PrepackedWeight(weight).data for weight in weights]
            faster = []
            for rows in ROWS:
                x = torch.ones(rows, layer.in_features)
                plain = _seconds([partial(nn.functional.linear, x, weight, layer.bias) for weight in weights])
                faster.append(
                    _seconds([partial(compat.prepacked_linear, x, weight, layer.bias) for weight in packed])
                    < 0.95 * plain
                )
        last_slower = max((i for i, better in enumerate(faster) if not better), default=-1)
        start = ROWS[last_slower + 1] if last_slower + 1 < len(ROWS) else None
        _PAYS_FROM[key] = None if start is None or start > _MOST_ROWS else start
    return _PAYS_FROM[key]


def _seconds(runs: Sequence[Callable[[], Any]], times: int = 3) -> float:
    """The best time of a round of these."""
    best = float("inf")
    for _ in range(times + 1):  # the first may still pay for what happens once; it is seldom the best
        began = time.perf_counter()
        for run in runs:
            run()
        best = min(best, time.perf_counter() - began)
    return best
