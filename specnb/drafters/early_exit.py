"""Self-speculative early exit: the first layers of the target draft, the others verify.

LayerSkip, Elhoushi et al. 2404.16710. The keys, values and hidden states of the lower layers are reused: each token
passes every layer once, and the prompt is processed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb.decoding.contracts import Row
from specnb.decoding.lm.base import LM, LMOptions
from specnb.decoding.lm.block_check import check_draft
from specnb.decoding.lm.cached_lm import CachedLM
from specnb.decoding.lm.create import create_lm
from specnb.decoding.lm.model_inputs import CacheSize, PreparedInputs
from specnb.decoding.lm.rowwise_lm import RowwiseLM
from specnb.decoding.lm.snapshots import Snapshots, has_states
from specnb.runtime.module_view import Capture, Inject, Skip, layers_path, module_view

_CHECKED: WeakKeyDictionary[PreTrainedModel, set[int]] = WeakKeyDictionary()  # exit layers that passed `check_split`


class LowerLayers(CachedLM):
    """The target up to layer `exit_layer`, then its final norm and head.

    It keeps the hidden states of its last layer from the position where the layers above last began: with running
    states, these layers may have to be rolled back to it.
    """

    def __init__(
        self, model: PreTrainedModel, rows: Sequence[Row], size: CacheSize, prepared: PreparedInputs, exit_layer: int
    ) -> None:
        path = layers_path(model)
        layers = model.get_submodule(path)
        self.last = Capture(layers[exit_layer - 1])
        above = {f"{path}.{i}": Skip(layers[i]) for i in range(exit_layer, len(layers))}
        super().__init__(module_view(model, {f"{path}.{exit_layer - 1}": self.last, **above}), rows, size, prepared)
        self._states: dict[int, tuple[int, Tensor]] = {}

    def _forward(
        self, rows: Sequence[Row], new_tokens: Sequence[Sequence[int]], starts: list[int], num_logits: int
    ) -> Tensor:
        out = super()._forward(rows, new_tokens, starts, num_logits)
        for r, row in enumerate(rows):
            new = self.last.value[r, : len(new_tokens[r])]
            first, old = self._states.get(row.index, (starts[r], new[:0]))
            first = min(first, starts[r])
            self._states[row.index] = first, torch.cat([old[: starts[r] - first], new])
        return out

    def clear_states(self) -> None:
        """Drop the hidden states of drafts that were cut to nothing; they are not needed."""
        self._states.clear()

    def take_states(self, rows: Sequence[Row], starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Take the kept hidden states.

        Args:
            starts: the first position of each row.
            lengths: number of positions of each row; shorter rows are padded at the end.

        Returns:
            `[rows, max(lengths), size]`.
        """
        parts, width = [], max(lengths)
        for row, start, n in zip(rows, starts, lengths, strict=True):
            first, states = self._states[row.index]
            kept = states[start - first :]
            self._states[row.index] = start, kept
            parts.append(torch.nn.functional.pad(kept[:n], (0, 0, 0, width - n)))
        return torch.stack(parts)


class EarlyExitTarget(CachedLM):
    """The target. If `lower` has drafted, only the layers above it run.

    Args:
        exit_layer: number of layers that draft, 1 to layers - 1.

    Raises:
        SplitMismatch: the model split in two gives other logits than the whole model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[Row],
        size: CacheSize,
        prepared: PreparedInputs,
        options: LMOptions = LMOptions(),
        *,
        exit_layer: int,
    ) -> None:
        super().__init__(model, rows, size, prepared, options)
        self._graphs = None  # CUDA graphs would not capture the states passed between the two parts
        original, model = model, self.model
        path = layers_path(model)
        layers = model.get_submodule(path)
        self._inject = Inject(layers[exit_layer - 1])
        self._upper = module_view(
            model,
            {
                f"{path}.{exit_layer - 1}": self._inject,
                **{f"{path}.{i}": Skip(layers[i]) for i in range(exit_layer - 1)},
            },
        )
        self._full = model
        self.lower = LowerLayers(model, rows, size, replace(prepared, past=None), exit_layer)
        self.lower.kv_cache = self.kv_cache
        self.lower._cached = dict(self._cached)
        self._split_snapshots(exit_layer)
        if exit_layer not in _CHECKED.setdefault(original, set()):
            check_split(model, self.lower.model, self.lower.last, self._upper, self._inject, self.device)
            _CHECKED[original].add(exit_layer)

    def _split_snapshots(self, exit_layer: int) -> None:
        """Give each part snapshots of its own layers: a draft runs the lower layers further than the upper ones."""
        if self._snapshots is None:
            return
        layers, held = self.kv_cache.layers, self._snapshots.length
        lower, upper = (list(filter(has_states, part)) for part in (layers[:exit_layer], layers[exit_layer:]))
        self.lower._snapshots = Snapshots(lower, held) if lower else None
        self._snapshots = Snapshots(upper, held) if upper else None

    @property
    def state_snapshot_bytes(self) -> int:
        """Memory of the copies of running states in both parts."""
        return super().state_snapshot_bytes + self.lower.state_snapshot_bytes

    def logits(
        self, rows: Sequence[Row], draft_tokens: Sequence[Sequence[int]], num_logits: Sequence[int]
    ) -> list[Tensor]:
        """The rows' logits, see `LM.logits`; lower layers that have run are not run again."""
        if any(draft_tokens) or (self.kv_cache.state_layers and not self.is_first_pass):
            self.lower.advance(rows, draft_tokens)
            self.model = self._upper
        else:
            self.model = self._full
            self.lower.is_first_pass = False  # the target processes the prompt and its other inputs
            self.lower.clear_states()
        out = super().logits(rows, draft_tokens, num_logits)
        self.lower.mark_cached(rows, draft_tokens)
        return out

    def _forward(
        self, rows: Sequence[Row], new_tokens: Sequence[Sequence[int]], starts: list[int], num_logits: int
    ) -> Tensor:
        if self.model is self._upper:
            self._inject.value = self.lower.take_states(rows, starts, list(map(len, new_tokens)))
        return super()._forward(rows, new_tokens, starts, num_logits)

    def _replay_to_end(self, row: Row) -> bool:
        """Bring the running states of both parts to all tokens of the row but the last."""
        lower = self.lower._replay_to_end(row)
        self.model = self._upper
        return super()._replay_to_end(row) or lower


class SplitMismatch(ValueError):
    """A model that is run in two parts does not give the same logits as the whole model."""


def early_exit(
    model: PreTrainedModel, rows: Sequence[Row], exit_layer: int, size: CacheSize, prepared: PreparedInputs
) -> tuple[LM, LM]:
    """The target, and the LM of its first `exit_layer` layers that drafts for it.

    If the model can be split in two, the target reuses what the lower layers computed. Otherwise the lower layers draft
    with their own kv cache.

    Raises:
        ValueError: the model has no such layer, or its first layers cannot run alone.
    """
    path = layers_path(model)
    layers: Any = model.get_submodule(path)
    depth = len(layers)
    if not 1 <= exit_layer < depth:
        raise ValueError(
            f"assistant_early_exit={exit_layer} is not valid: {type(model).__name__} has {depth} layers, so give 1 to "
            f"{depth - 1}."
        )
    try:
        target = create_lm(model, rows, size, prepared=prepared, cached=partial(EarlyExitTarget, exit_layer=exit_layer))
    except SplitMismatch:
        target = create_lm(model, rows, size, prepared=prepared)
    if isinstance(target, EarlyExitTarget):
        return target, target.lower
    if isinstance(target, RowwiseLM):
        lower_lms = {i: lm.lower for i, lm in target.lms.items() if isinstance(lm, EarlyExitTarget)}
        if len(lower_lms) == len(rows):
            return target, RowwiseLM(lower_lms)
    lower = module_view(model, {path: nn.ModuleList(list(layers)[:exit_layer])})
    lm = create_lm(lower, rows, size, role="draft model")
    if prepared.inputs.extras:
        check_draft(lower, lm, rows)
    return target, lm


@torch.no_grad()
def check_split(
    model: PreTrainedModel,
    lower: PreTrainedModel,
    last: Capture,
    upper: PreTrainedModel,
    inject: Inject,
    device: torch.device,
) -> None:
    """Compare the model split in two with the whole model on two tokens.

    Raises:
        SplitMismatch: the logits differ, or one part does not run.
    """
    tokens = torch.tensor([[0, 1]], device=device)
    whole = model(tokens, use_cache=False).logits
    reason: object = "they give other logits"
    try:
        lower(tokens, use_cache=False)
        if not isinstance(last.value, Tensor) or last.value.dim() != 3:
            raise TypeError("its layers do not return one state per token")
        inject.value = last.value
        split_logits = upper(tokens, use_cache=False).logits
        if split_logits.shape == whole.shape and torch.allclose(
            whole, split_logits, rtol=1e-3, atol=1e-3 * float(whole.abs().max())
        ):
            return
    except Exception as error:  # of any kind: the model is unknown code
        reason = error
    raise SplitMismatch(str(reason))
