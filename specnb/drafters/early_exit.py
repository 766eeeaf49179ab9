"""Self-speculative early exit: the first layers of the target draft, the others verify what those computed.

LayerSkip, Elhoushi et al. 2404.16710. The lower layers' keys, values and hidden states are reused: each token passes every
layer once, and the prompt is processed once.
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
from specnb.decoding.lm.cached import CachedLM
from specnb.decoding.lm.create import create_lm
from specnb.decoding.lm.model_inputs import CacheSize, PreparedInputs
from specnb.decoding.lm.rowwise import RowwiseLM
from specnb.runtime.module_view import Capture, Inject, Skip, layers_path, module_view

_CHECKED: WeakKeyDictionary[PreTrainedModel, set[int]] = WeakKeyDictionary()  # exits that `check_halves` let pass


class LowerLayers(CachedLM):
    """The target up to layer `exit`, then its final norm and head. Keeps what its last layer gave until it is taken."""

    def __init__(
        self, model: PreTrainedModel, rows: Sequence[Row], size: CacheSize, prepared: PreparedInputs, exit: int
    ) -> None:
        path = layers_path(model)
        layers = model.get_submodule(path)
        self.last = Capture(layers[exit - 1])
        above = {f"{path}.{i}": Skip(layers[i]) for i in range(exit, len(layers))}
        super().__init__(module_view(model, {f"{path}.{exit - 1}": self.last, **above}), rows, size, prepared)
        self._states: dict[int, tuple[int, Tensor]] = {}

    def _forward(self, rows: Sequence[Row], fed: Sequence[Sequence[int]], starts: list[int], keep: int) -> Tensor:
        out = super()._forward(rows, fed, starts, keep)
        for r, row in enumerate(rows):
            new = self.last.value[r, : len(fed[r])]
            start, old = self._states.get(row.index, (starts[r], new[:0]))
            self._states[row.index] = start, torch.cat([old[: starts[r] - start], new])
        return out

    def forget(self) -> None:
        """Let go of states that nobody took: of drafts that were cut to nothing."""
        self._states.clear()

    def take(self, rows: Sequence[Row], starts: Sequence[int], width: int) -> Tensor:
        """The states `[rows, width, size]` from position `starts[i]` on (padded behind)."""
        parts = [
            self._states[row.index][1][s - self._states[row.index][0] :] for row, s in zip(rows, starts, strict=True)
        ]
        self._states.clear()
        return torch.stack([torch.nn.functional.pad(p, (0, 0, 0, width - len(p))) for p in parts])


class EarlyExitTarget(CachedLM):
    """The target; where `lower` has drafted, only the layers above it run.

    Args:
        exit: number of layers that draft, 1 to layers - 1.

    Raises NotReproduced for a model that its two halves do not reproduce.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[Row],
        size: CacheSize,
        prepared: PreparedInputs,
        options: LMOptions = LMOptions(),
        *,
        exit: int,
    ) -> None:
        super().__init__(model, rows, size, prepared, options)
        self._graphs = None  # the halves hand each other tensors that a recording would not see
        given, model = model, self.model
        path = layers_path(model)
        layers = model.get_submodule(path)
        self._inject = Inject(layers[exit - 1])
        self._upper = module_view(
            model, {f"{path}.{exit - 1}": self._inject, **{f"{path}.{i}": Skip(layers[i]) for i in range(exit - 1)}}
        )
        self._whole = model
        self.lower = LowerLayers(model, rows, size, replace(prepared, past=None), exit)
        self.lower.kv_cache = self.kv_cache
        if exit not in _CHECKED.setdefault(given, set()):
            check_halves(model, self.lower.model, self.lower.last, self._upper, self._inject, self.device)
            _CHECKED[given].add(exit)

    def logits(self, rows: Sequence[Row], extra: Sequence[Sequence[int]], keep: Sequence[int]) -> list[Tensor]:
        if any(extra):
            self.lower.advance(rows, extra)
            self.model = self._upper
        else:
            self.model = self._whole
            self.lower.first = False  # the prompt, and what belongs to it, is processed
            self.lower.forget()
        out = super().logits(rows, extra, keep)
        self.lower.note(rows, extra)
        return out

    def _forward(self, rows: Sequence[Row], fed: Sequence[Sequence[int]], starts: list[int], keep: int) -> Tensor:
        if self.model is self._upper:
            self._inject.value = self.lower.take(rows, starts, max(map(len, fed)))
        return super()._forward(rows, fed, starts, keep)


class NotReproduced(ValueError):
    """The layers of a model, run in two halves, do not give what the whole gives."""


def early_exit(
    model: PreTrainedModel, rows: Sequence[Row], exit: int, size: CacheSize, prepared: PreparedInputs
) -> tuple[LM, LM]:
    """The target, and the LM of its first `exit` layers that drafts for it.

    Where the model can be run in two halves, what the lower one computed is reused; else the lower layers draft with a cache of
    their own.

    Raises ValueError for an `exit` that the model does not have, and where its first layers do not run alone.
    """
    path = layers_path(model)
    layers: Any = model.get_submodule(path)
    depth = len(layers)
    if not 1 <= exit < depth:
        raise ValueError(
            f"assistant_early_exit={exit} is not valid: {type(model).__name__} has {depth} layers, so give 1 to {depth - 1}."
        )
    try:
        target = create_lm(model, rows, size, prepared=prepared, cached=partial(EarlyExitTarget, exit=exit))
    except NotReproduced:
        target = create_lm(model, rows, size, prepared=prepared)
    if isinstance(target, EarlyExitTarget):
        return target, target.lower
    if isinstance(target, RowwiseLM):
        halves = {i: lm.lower for i, lm in target.lms.items() if isinstance(lm, EarlyExitTarget)}
        if len(halves) == len(rows):
            return target, RowwiseLM(halves)
    lower = module_view(model, {path: nn.ModuleList(list(layers)[:exit])})
    lm = create_lm(lower, rows, size, role="draft model")
    if prepared.inputs.extras:
        check_draft(lower, lm, rows)
    return target, lm


@torch.no_grad()
def check_halves(
    model: PreTrainedModel,
    lower: PreTrainedModel,
    last: Capture,
    upper: PreTrainedModel,
    inject: Inject,
    device: torch.device,
) -> None:
    """Raise NotReproduced unless the two halves, one after the other, give what the whole gives on two tokens."""
    tokens = torch.tensor([[0, 1]], device=device)
    whole = model(tokens, use_cache=False).logits
    reason: object = "they give other logits"
    try:
        lower(tokens, use_cache=False)
        if not isinstance(last.value, Tensor) or last.value.dim() != 3:
            raise TypeError("its layers do not return one state per token")
        inject.value = last.value
        halves = upper(tokens, use_cache=False).logits
        if halves.shape == whole.shape and torch.allclose(
            whole, halves, rtol=1e-3, atol=1e-3 * float(whole.abs().max())
        ):
            return
    except Exception as error:  # of any kind: the user's layers run
        reason = error
    raise NotReproduced(str(reason))
