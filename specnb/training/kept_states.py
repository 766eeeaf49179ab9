"""States on disk, and a file of them that stays in the drafter's folder, for the next training there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE, INDEX = "states.bin", "states.jsonl"
"""The file with the states, and the list of what is in it, in the drafter's folder."""


class Place(NamedTuple):
    """Where the states of an example are in a file: offset in bytes, shape, dtype."""

    offset: int
    tokens: int
    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        return self.tokens * self.width * self.dtype.itemsize


def write(file: Any, states: Tensor) -> Place:
    """Add states `[tokens, width]` to a file."""
    offset = file.seek(0, 2)
    file.write(states.contiguous().view(torch.uint8).numpy().data)
    file.flush()
    tokens, width = states.shape
    return Place(offset, tokens, width, states.dtype)


def read(file: Any, place: Place) -> Tensor:
    """The states `[tokens, width]` at a place."""
    file.seek(place.offset)
    return torch.frombuffer(bytearray(file.read(place.nbytes)), dtype=place.dtype).view(place.tokens, place.width)


class KeptStates:
    """States in a folder, found by the example's ids. Those of another target, or of other layers, are replaced.

    Args:
        folder: the folder.
        model: the target.
        layers: the layers whose states they are.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self._index = folder / INDEX
        of = {"layers": list(layers), "target": fingerprint(model)}
        lines = self._lines()
        same = bool(lines) and lines[0] == of and (folder / FILE).exists()
        self.file = (folder / FILE).open("r+b" if same else "w+b")
        size = self.file.seek(0, 2)
        self._places: dict[str, Place] = {}
        for line in lines[1:] if same else ():
            offset, tokens, width = line["at"]
            place = Place(offset, tokens, width, getattr(torch, line["dtype"]))
            if place.offset + place.nbytes <= size:
                self._places[line["ids"]] = place
        whole = [of, *(lines[1:] if same else ())]  # without a line that was cut off
        self._index.write_text("".join(json.dumps(line) + "\n" for line in whole), encoding="utf-8")

    def _lines(self) -> list[Any]:
        """The lines of the list, up to one that was cut off."""
        found = []
        for line in self._index.read_text(encoding="utf-8").splitlines() if self._index.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found

    def find(self, ids: Sequence[int]) -> Place | None:
        """Where the states of a text are; None if they are not there."""
        return self._places.get(_digest(ids))

    def add(self, ids: Sequence[int], states: Tensor) -> Place:
        """Add the states of a text."""
        place = write(self.file, states)
        name = str(place.dtype).removeprefix("torch.")
        with self._index.open("a", encoding="utf-8") as index:
            index.write(json.dumps({"ids": _digest(ids), "at": list(place[:3]), "dtype": name}) + "\n")
        self._places[_digest(ids)] = place
        return place


def fingerprint(model: PreTrainedModel) -> str:
    """Tells targets apart: class, and a few numbers of each weight."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, weight in model.named_parameters():
        some = [] if weight.is_meta else weight.detach().flatten()[:: max(1, weight.numel() // 8)][:8].float().tolist()
        digest.update(f"{name} {list(weight.shape)} {some}".encode())
    return digest.hexdigest()[:16]


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:24]
