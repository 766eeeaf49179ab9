"""How much the built-in suite measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """How much the suite measures.

    Attributes:
        prompts: number of prompts of each kind.
        lengths: fixed draft lengths, in tokens.
        repeats: how often a comparison times each run.
        new: tokens generated per prompt.
        rows: batch sizes.
        contexts: lengths of context, in tokens.
    """

    prompts: int
    lengths: tuple[int, ...]
    repeats: int
    new: int
    rows: tuple[int, ...]
    contexts: tuple[int, ...]


SIZES = {
    "small": Size(prompts=1, lengths=(4, 8), repeats=2, new=64, rows=(1, 4), contexts=(256, 1024)),
    "full": Size(prompts=4, lengths=(2, 4, 8, 16), repeats=2, new=96, rows=(1, 4, 8), contexts=(256, 1024, 4096)),
}
"""The sizes of the suite: "small" takes some minutes, "full" about half an hour."""
