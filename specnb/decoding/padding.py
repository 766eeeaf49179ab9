"""Between padded tensors, as generate() has them, and rows without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def unpad(input_ids: Tensor, attention_mask: Tensor | None) -> tuple[list[list[int]], list[int]]:
    """Remove the padding of the prompts.

    Args:
        input_ids: `[rows, length]`.
        attention_mask: `[rows, >= length]`; None: no padding.

    Returns:
        The ids of each row, and the number of padding tokens in front of each.

    Raises:
        ValueError: a row has no tokens, or padding between tokens.
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
                "was given, transformers makes one that leaves out the pad id: give "
                "attention_mask=torch.ones_like(input_ids) if the prompt is meant to hold it.)"
            )
        rows.append(row[start : start + n])
        pads.append(start)
    return rows, pads


def align_position_ids(
    position_ids: Tensor | None, rows: Sequence[Sequence[int]], pads: Sequence[int]
) -> Tensor | None:
    """The position ids of the padded batch, aligned with the rows.

    A row that is shorter than the longest is continued by 1, 2, ...; models with M-RoPE have several position ids per
    token.

    Args:
        position_ids: `[..., rows, length]`, or None.
        rows: the ids without padding.
        pads: padding tokens in front of each row.

    Returns:
        `[..., rows, longest row]`; None if the positions are 0, 1, 2, ...
    """
    if position_ids is None:
        return None
    by_row = [
        position_ids[..., min(r, position_ids.shape[-2] - 1), None, start : start + len(row)]
        for r, (row, start) in enumerate(zip(rows, pads, strict=True))
    ]
    if position_ids.dim() == 2 and all(
        positions[0].tolist() == list(range(len(row) - positions.shape[-1], len(row)))
        for positions, row in zip(by_row, rows, strict=True)
    ):
        return None
    width = max(map(len, rows))
    full = []
    for positions in by_row:
        ahead = torch.arange(1, width - positions.shape[-1] + 1, device=positions.device, dtype=positions.dtype)
        full.append(torch.cat([positions, positions[..., -1:] + ahead], -1))
    return torch.cat(full, -2)


def align_per_token(value: Any, pads: Sequence[int], shape: torch.Size) -> Any:
    """Align an input with one value per token (token types, for example) with the rows.

    Args:
        value: an input of the padded batch. Anything but a tensor `[rows, length, ...]` is returned unchanged.
        pads: padding tokens in front of each row.
        shape: the shape of the padded prompts, `[rows, length]`.
    """
    if not isinstance(value, Tensor) or value.shape[:2] != shape or not any(pads):
        return value
    rolled = torch.stack([row.roll(-n, 0) for row, n in zip(value, pads, strict=True)])
    return rolled[:, : shape[1] - min(pads)]


def append_generated(input_ids: Tensor, generated: Sequence[Sequence[int]], pad: int) -> Tensor:
    """The padded prompts followed by the generated ids, `[rows, longest]`.

    Args:
        input_ids: the prompts `[rows, length]`.
        generated: the new ids of each row.
        pad: the id after rows that are shorter than the longest.
    """
    width = max(map(len, generated))
    new = torch.tensor([[*g, *[pad] * (width - len(g))] for g in generated], dtype=torch.long, device=input_ids.device)
    return torch.cat([input_ids, new.view(len(generated), width)], 1)
