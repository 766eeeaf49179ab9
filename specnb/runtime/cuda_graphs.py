"""CUDA graphs: the kernels of a pass over a small block, recorded once and replayed.

A small block keeps a GPU busy for less time than Python takes to launch its kernels. A recording needs fixed shapes and
addresses: blocks are padded to one of `WIDTHS`, starts and tokens are copied into one tensor, and the layers read the
whole kv cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.runtime.module_view import check_model

M = TypeVar("M", bound=PreTrainedModel)

WIDTHS = (1, 2, 4, 8, 16, 32)


class Pass(NamedTuple):
    """The output of a pass: logits `[rows, columns, vocab]`, and states `[rows, columns, size]` where they are kept."""

    logits: Tensor
    states: Tensor | None = None


Block = Callable[[Tensor], Pass]
"""A pass over `[rows, 1 + width]`: each row's first position, then its tokens."""
Recorder = Callable[[Block, Tensor], Callable[[], Pass]]
"""Records a pass over a tensor; what it returns repeats the pass with what the tensor then holds."""

_RECORDERS: WeakKeyDictionary[PreTrainedModel, Recorder] = WeakKeyDictionary()


def cuda_graphs(model: M, on: bool = True) -> M:
    """Have `specnb.generate` run small blocks of `model` as CUDA graphs. The model is not changed.

    Each generation records anew: the second block of a width is recorded, the third is compared with an ordinary pass,
    later ones are replayed. A model that cannot be recorded (it waits for the device within a pass, as one that routes
    tokens to experts) runs without graphs, and so does early exit. Not yet tried on a device: the recordings were
    tested with a stand-in on a CPU.

    Args:
        model: a model of transformers on a CUDA device.
        on: False ends it.

    Returns:
        The model.

    Raises:
        ValueError: the model is not on one CUDA device.
    """
    check_model(model, "specnb.cuda_graphs")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if on and (len(devices) != 1 or not next(iter(devices)).startswith("cuda")):
        raise ValueError(
            f"CUDA graphs need all of {type(model).__name__} on one CUDA device, but it is on "
            f"{', '.join(sorted(devices))}: load it with device_map='cuda'."
        )
    if on:
        _RECORDERS[model] = record
    else:
        _RECORDERS.pop(model, None)
    return model


def recorder(model: PreTrainedModel) -> Recorder | None:
    """What records blocks of this model; None where `cuda_graphs` was not called for it."""
    return _RECORDERS.get(model)


def record(step: Block, block: Tensor) -> Callable[[], Pass]:
    """A CUDA graph of `step(block)`."""
    with torch.cuda.device(block.device):
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step(block)  # a first pass, in which libraries choose kernels and allocate memory
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = step(block)

    def replay() -> Pass:
        graph.replay()
        return out

    return replay


class KeepsTensors(Protocol):
    """What is asked of the kv cache that the recordings write to."""

    def holds(self, length: int) -> bool:
        """Whether it has slots for so many tokens."""
        ...

    def tensors(self) -> list[Tensor]:
        """All keys and values."""
        ...


class _Shape:
    """Blocks of one shape: seen, then recorded, then compared, from then on replayed; or not recordable."""

    def __init__(self) -> None:
        self.met = self.compared = self.refused = False
        self._input: Tensor | None = None
        self._replay: Callable[[], Pass] | None = None

    def record(self, step: Block, block: Tensor, recorder: Recorder) -> None:
        self._input = block
        try:
            self._replay = recorder(step, block)
        except RuntimeError:  # the model does what cannot be recorded, or there is no memory for it
            self.refused = True

    def replay(self, block: Tensor) -> Pass | None:
        """The recorded pass over `block`, in new tensors; None where none was recorded yet."""
        if self._input is None or self._replay is None:
            return None
        self._input.copy_(block)
        logits, states = self._replay()
        return Pass(logits.clone(), None if states is None else states.clone())


class Graphs:
    """The recordings of passes over the rows of a kv cache."""

    def __init__(self, cache: KeepsTensors, recorder: Recorder, device: torch.device) -> None:
        self._cache, self._recorder, self._device = cache, recorder, device
        self._shapes: defaultdict[tuple[int, int], _Shape] = defaultdict(_Shape)  # by rows and width
        self._tensors: list[Tensor] = []  # that the recordings read and write

    def run(
        self, fed: Sequence[Sequence[int]], starts: Sequence[int], ordinary: Callable[[], Pass], step: Block
    ) -> Pass:
        """The pass over `fed[r]` at positions from `starts[r]` on: the recording of `step`, or `ordinary()`."""
        width = max(map(len, fed))
        padded = next((w for w in WIDTHS if w >= width), None)
        if padded is None or not self._cache.holds(max(starts) + padded):
            return ordinary()
        if not self._same_tensors():
            self._shapes.clear()
        shape = self._shapes[len(fed), padded]
        if shape.refused or not shape.met:
            shape.met = True
            return ordinary()
        block = torch.tensor([[start, *f, *[0] * (padded - len(f))] for start, f in zip(starts, fed, strict=True)])
        recorded = shape.replay(block)
        if recorded is None:
            out = ordinary()
            shape.record(step, block.to(self._device), self._recorder)
            return out
        recorded = _cut(recorded, width)
        if shape.compared:
            return recorded
        out = ordinary()  # second, so that its keys and values stay if the recording is wrong
        shape.compared, shape.refused = True, not _agree(out, recorded)
        return out

    def _same_tensors(self) -> bool:
        """Whether the cache's tensors are the same as before."""
        before, self._tensors = self._tensors, self._cache.tensors()
        return len(before) == len(self._tensors) and all(a is b for a, b in zip(before, self._tensors, strict=True))


def _cut(out: Pass, width: int) -> Pass:
    return Pass(out.logits[:, :width], None if out.states is None else out.states[:, :width])


def _agree(ordinary: Pass, recorded: Pass) -> bool:
    """Whether two passes gave the same logits, up to what other kernels round differently."""
    theirs, ours = ordinary.logits.float(), recorded.logits[:, -ordinary.logits.shape[1] :].float()
    tolerance = 1e-3 if ordinary.logits.dtype is torch.float32 else 5e-2
    return bool((theirs - ours).abs().max() <= tolerance * theirs.abs().max())
