"""The target's states for all examples: collected once, in half precision, in memory and beyond a budget on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specnb.runtime.prepare import prepare
from specnb.runtime.state_capture import StateCapture
from specnb.training.examples import Example

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LARGEST_FLOAT16 = torch.finfo(torch.float16).max / 4
"""States beyond this are kept in bfloat16, which has a larger range."""


class TargetStates:
    """Runs the target over examples and hands out its states.

    Args:
        model: the target; it is not changed.
        layers: numbers of the layers that the drafter reads, as in transformers' `hidden_states`.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        depth = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        self._model = model
        self._capture = StateCapture(prepare(model)[0], (*layers, depth))
        self._body = getattr(self._capture.view, model.base_model_prefix)

    def __call__(self, examples: Sequence[Example]) -> list[Tensor]:
        """The states `[tokens, (layers + 1) * size]` of each example: those of the layers, then the last ones."""
        rows = [example.ids for example in examples]
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])  # later tokens change nothing before
        with torch.no_grad():
            self._body(input_ids=ids.to(self._model.get_input_embeddings().weight.device), use_cache=False)
        states = self._capture.take()
        return [states[i, : len(row)] for i, row in enumerate(rows)]


class StateStore:
    """States of examples by number.

    Args:
        budget: bytes to keep in memory; what comes after goes to a file.
        folder: where that file is made; it is removed with the store.
    """

    def __init__(self, budget: int, folder: Path) -> None:
        self._budget, self._folder = budget, folder
        self._memory: list[Tensor] = []
        self._file: Any = None
        self._places: list[tuple[int, int, int]] = []  # of examples on disk: offset in bytes, tokens, width
        self._dtype: torch.dtype | None = None

    def __len__(self) -> int:
        return len(self._memory) + len(self._places)

    def add(self, states: Tensor) -> None:
        """Keep the states `[tokens, width]` of the next example."""
        if self._dtype is None:
            large = states.dtype == torch.bfloat16 or float(states.abs().max()) > _LARGEST_FLOAT16
            self._dtype = torch.bfloat16 if large else torch.float16
        kept = states.to("cpu", self._dtype, copy=True)
        if not self._places and kept.nbytes <= self._budget:
            self._budget -= kept.nbytes
            self._memory.append(kept)
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (it lives as long as the store)
        offset = self._file.seek(0, 2)
        try:
            self._file.write(kept.contiguous().view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            raise OSError(
                f"the target's states do not fit: {error}. They take {self.nbytes / 1e9:.1f} GB so far, in memory and "
                f"in {self._folder}: free some space there, give fewer prompts, or another out=."
            ) from error
        self._places.append((offset, *kept.shape))

    def __getitem__(self, number: int) -> Tensor:
        """The states of an example, `[tokens, width]`, in half precision."""
        if number < len(self._memory):
            return self._memory[number]
        assert self._dtype is not None
        offset, tokens, width = self._places[number - len(self._memory)]
        self._file.seek(offset)
        raw = bytearray(self._file.read(tokens * width * self._dtype.itemsize))
        return torch.frombuffer(raw, dtype=self._dtype).view(tokens, width)

    @property
    def nbytes(self) -> int:
        """Bytes of all states, in memory and on disk."""
        size = self._dtype.itemsize if self._dtype else 0
        return sum(one.nbytes for one in self._memory) + sum(n * width * size for _, n, width in self._places)


def collect(
    target: TargetStates,
    examples: Sequence[Example],
    store: StateStore,
    *,
    batch_tokens: int,
    on_examples: Callable[[int], bool],
) -> None:
    """Add the states of the examples that the store lacks.

    Args:
        batch_tokens: most tokens of one pass, padding included.
        on_examples: called after each pass with the number of examples in the store; False ends the collection.
    """
    while len(store) < len(examples):
        batch: list[Example] = []
        for example in examples[len(store) :]:
            widest = max(len(one.ids) for one in [*batch, example])
            if batch and widest * (len(batch) + 1) > batch_tokens:
                break
            batch.append(example)
        for states in target(batch):
            store.add(states)
        if not on_examples(len(store)):
            return
