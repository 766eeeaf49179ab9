"""Between padded tensors, as generate() has them, and rows without padding, as the engine has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def split(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[list[list[int]], list[int]]:
    """Rows of `[rows, length]` without their padding, and how many pads stood before each.

    Raises ValueError for a mask with holes, or a row without tokens.
    """
    ids: list[list[int]] = input_ids.tolist()
    if attention_mask is None:
        return ids, [0] * len(ids)
    rows, pads = [], []
    for r, (row, keep) in enumerate(zip(ids, attention_mask[:, -input_ids.shape[1] :].bool().tolist(), strict=True)):
        n = sum(keep)
        start = keep.index(True) if n else 0
        if not n or not all(keep[start : start + n]):
            what = "masks everything" if not n else "has holes"
            raise ValueError(
                f"attention_mask row {r} {what}; only padding before or after the tokens can be masked. (Where no mask "
                "was given, transformers makes one that leaves out the pad id: give attention_mask=torch.ones_like(input_ids) if the prompt "
                "is meant to hold it.)"
            )
        rows.append(row[start : start + n])
        pads.append(start)
    return rows, pads


def planes(position_ids: Tensor | None, rows: Sequence[Sequence[int]], pads: Sequence[int]) -> Tensor | None:
    """Position ids of the padded batch, `[..., rows, length]`, aligned with the rows; None where they are 0, 1, 2, ...

    A row that is shorter than the longest continues each plane one by one.
    """
    if position_ids is None:
        return None
    own = [position_ids[..., min(r, position_ids.shape[-2] - 1), None, start : start + len(row)]
           for r, (row, start) in enumerate(zip(rows, pads, strict=True))]  # fmt: skip
    if position_ids.dim() == 2 and all(
        plane[0].tolist() == list(range(len(row) - plane.shape[-1], len(row)))
        for plane, row in zip(own, rows, strict=True)
    ):
        return None
    width = max(map(len, rows))
    full = []
    for plane in own:
        ahead = torch.arange(1, width - plane.shape[-1] + 1, device=plane.device, dtype=plane.dtype)
        full.append(torch.cat([plane, plane[..., -1:] + ahead], -1))
    return torch.cat(full, -2)


def shift(value: Any, pads: Sequence[int], shape: torch.Size) -> Any:
    """A per-token input (token types, ...) of the padded batch, aligned with the rows; anything else as it is."""
    if not isinstance(value, Tensor) or value.shape[:2] != shape or not any(pads):
        return value
    rolled = torch.stack([row.roll(-n, 0) for row, n in zip(value, pads, strict=True)])
    return rolled[:, : shape[1] - min(pads)]


def join(input_ids: Tensor, generated: Sequence[Sequence[int]], pad: int) -> Tensor:
    """The prompts as they came and the generated ids behind them, `[rows, longest]`, padded at the end."""
    width = max(map(len, generated))
    new = torch.tensor([[*g, *[pad] * (width - len(g))] for g in generated], dtype=torch.long, device=input_ids.device)
    return torch.cat([input_ids, new.view(len(generated), width)], 1)
