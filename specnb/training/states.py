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
from specnb.training.kept_states import KeptStates, Place, read, write

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SORTED = 64
"""Examples that are sorted by length together, so that passes have little padding."""
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
        kept: states that stay in the folder for the next training; all go there, none into memory.
    """

    def __init__(self, budget: int, folder: Path, kept: KeptStates | None = None) -> None:
        self._budget, self._folder, self._kept = budget, folder, kept
        self._memory: dict[int, Tensor] = {}
        self._file: Any = None
        self._places: dict[int, Place] = {}  # of examples on disk
        self._dtype: torch.dtype | None = None

    def __len__(self) -> int:
        return len(self._memory) + len(self._places)

    def __contains__(self, number: int) -> bool:
        return number in self._memory or number in self._places

    def find(self, number: int, example: Example) -> bool:
        """Whether the states of an example are there, also from an earlier training."""
        if number not in self and self._kept is not None and (place := self._kept.find(example.ids)) is not None:
            self._places[number] = place
        return number in self

    def add(self, number: int, example: Example, states: Tensor) -> None:
        """Keep the states `[tokens, width]` of an example.

        Raises:
            OSError: the disk is full.
        """
        if self._dtype is None:
            large = states.dtype == torch.bfloat16 or float(states.abs().max()) > _LARGEST_FLOAT16
            self._dtype = torch.bfloat16 if large else torch.float16
        kept = states.to("cpu", self._dtype, copy=True)
        if self._kept is None and not self._places and kept.nbytes <= self._budget:
            self._budget -= kept.nbytes
            self._memory[number] = kept
            return
        try:
            if self._kept is not None:
                self._places[number] = self._kept.add(example.ids, kept)
                return
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (it lives as long as the store)
            self._places[number] = write(self._file, kept)
        except OSError as error:
            raise OSError(
                f"the target's states do not fit: {error}. They take {self.nbytes / 1e9:.1f} GB so far, in memory and "
                f"in {self._folder}: free some space there, give fewer prompts, or another out=."
            ) from error

    def __getitem__(self, number: int) -> Tensor:
        """The states of an example, `[tokens, width]`, in half precision."""
        if number in self._memory:
            return self._memory[number]
        return read(self._file if self._kept is None else self._kept.file, self._places[number])

    @property
    def nbytes(self) -> int:
        """Bytes of all states, in memory and on disk."""
        return sum(one.nbytes for one in self._memory.values()) + sum(one.nbytes for one in self._places.values())


def collect(
    target: TargetStates,
    examples: Sequence[Example],
    store: StateStore,
    *,
    batch_tokens: int,
    on_examples: Callable[[int], bool],
) -> None:
    """Add the states of the examples that the store lacks, in their order but for `SORTED` at a time.

    Args:
        batch_tokens: most tokens of one pass, padding included.
        on_examples: called after each pass with the number of examples in the store; False ends the collection.
    """
    for first in range(0, len(examples), SORTED):
        lacking = [i for i in range(first, min(first + SORTED, len(examples))) if not store.find(i, examples[i])]
        lacking.sort(key=lambda i: len(examples[i].ids))  # little padding
        while lacking:
            batch, lacking = _batch(lacking, examples, batch_tokens)
            for i, states in zip(batch, target([examples[i] for i in batch]), strict=True):
                store.add(i, examples[i], states)
            if not on_examples(len(store)):
                return


def _batch(numbers: list[int], examples: Sequence[Example], batch_tokens: int) -> tuple[list[int], list[int]]:
    """The first of the numbers, which are sorted by length, that fit into a pass, at least one; and the others."""
    count = 1
    while count < len(numbers) and len(examples[numbers[count]].ids) * (count + 1) <= batch_tokens:
        count += 1
    return numbers[:count], numbers[count:]
