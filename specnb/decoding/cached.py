"""CachedLM: a model with a cache that follows the rows. Only this module knows positions, masks and rollback."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from specnb.decoding import grouped, lean, packed
from specnb.decoding.borrow import Capture, borrow, is_torchs_own, untouched
from specnb.decoding.contracts import Row
from specnb.decoding.graphs import Graphs, Pass, recorder
from specnb.decoding.store import RowStore, layer_plan

M = TypeVar("M", bound=PreTrainedModel)

_OWN_MASKS = ("bloom", "mpt", "falcon", "gpt_neo")  # make a bias or mask of their own from slots or a 2-D mask


class CachedLM:
    """A causal language model whose cache follows `rows`.

    `logits()` brings the cache to a row's tokens plus some proposed ones and computes only what is new: tokens that an
    earlier call proposed and that did not make it into the row are forgotten, rows that left are dropped. Sequences that
    agree with what is cached cost nothing.

    Args:
        model: any transformers causal LM whose cache can be rolled back; never changed.
        rows: the rows it will follow.
        capacity: token slots to allocate at first; the store grows geometrically.
        prefill_chunk_size: process longer inputs in chunks of this many tokens.
        first_inputs: further arguments of the first forward (image inputs, token types).
        past: a filled transformers cache holding the beginning of the only row.
        store: a store to share with another CachedLM that runs other layers of the same model.
        foreign_ids: ids beyond its vocabulary (of a target with a larger one) are read as its last token.
        hidden_states: have in `hidden` the last hidden states of all tokens that a `logits()` call computed ("all"), or of
            those whose logits were asked for ("kept").

    Raises ValueError for a model that cannot be decoded this way, naming what is in the way.
    """

    def __init__(self, model: PreTrainedModel, rows: Sequence[Row], *, capacity: int = 0, prefill_chunk_size: int | None = None,
                 first_inputs: Mapping[str, Any] | None = None, past: DynamicCache | None = None, store: RowStore | None = None,
                 foreign_ids: bool = False, hidden_states: Literal["all", "kept"] | None = None) -> None:  # fmt: skip
        self.store = store or RowStore(model.config, [row.index for row in rows], capacity)
        check_stateful(model)
        given, model = model, fastest(model)
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.device = model.get_input_embeddings().weight.device
        if self.device.type == "meta":  # offloaded by accelerate: its hooks bring the weights
            self.device = torch.device(getattr(getattr(model, "_hf_hook", None), "execution_device", None) or "cpu")
        self.vocab_size = int(self.config.vocab_size)
        self._last_id = int(model.get_input_embeddings().weight.shape[0]) - 1 if foreign_ids else None
        self.passes = 0  # calls of logits()
        self.hidden: dict[
            int, tuple[int, Tensor]
        ] = {}  # by row index: first position, states [n, size] after the final norm
        self._tap: Capture | None = None
        self._remembers_all = hidden_states == "all"
        if hidden_states:
            self._tap = Capture(getattr(model, model.base_model_prefix))
            self.model = borrow(model, {model.base_model_prefix: self._tap})
        self._agreed = {row.index: 0 for row in rows}  # tokens of row.ids that the cache holds for sure
        self._tail: dict[int, list[int]] = {
            row.index: [] for row in rows
        }  # cached after those: the last call's proposals
        self._chunk = prefill_chunk_size
        self._first_inputs = dict(first_inputs or {})
        types = self._first_inputs.get("token_type_ids") if self.config is model.config else None
        self._token_type = None if types is None else types[:, -1:]
        parameters = forward_parameters(type(model))
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5.24
        if self._cache_name not in parameters:
            raise ValueError(
                f"{type(model).__name__} keeps no key/value cache, so a rejected draft cannot be taken back."
            )
        self._keeps = "logits_to_keep" in parameters
        self._positions = "position_ids" in parameters and not hasattr(model, "get_rope_index")
        self._attention = getattr(self.config, "_attn_implementation", "eager")
        record = recorder(given)
        if len(rows) > 1:
            self._check_masks("several rows at once cannot be decoded", "Generate the prompts one by one.")
        if record:
            self._check_masks("CUDA graphs cannot be used", "Call specnb.cuda_graphs(model, on=False).")
        self._graphs = Graphs(self.store, record, self.device) if record else None
        if past is not None and past.get_seq_length():
            self.store.load(past, past.get_seq_length())
            self._agreed[rows[0].index] = past.get_seq_length()

    @property
    def limit(self) -> int | None:
        """Most tokens the model was made for; None where positions have no end."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def hard_limit(self) -> bool:
        """Whether positions beyond the limit do not exist (a table of learned positions)."""
        return not hasattr(self.config, "rope_parameters") and not hasattr(self.config, "rope_theta")

    def logits(self, rows: Sequence[Row], extra: Sequence[Sequence[int]], keep: Sequence[int]) -> list[Tensor]:
        """Logits `[keep[i], vocab]` of the last `keep[i]` tokens of `rows[i].ids + extra[i]`: what may follow each of them."""
        self.passes += 1
        self.hidden.clear()
        self.store.follow([row.index for row in rows])
        starts = [self._common(row, extra[r], keep[r]) for r, row in enumerate(rows)]
        ends = [len(row.ids) + len(extra[r]) for r, row in enumerate(rows)]
        while self._chunk and not self._first_inputs:
            stops = [max(s, min(e - k, s + self._chunk)) for e, s, k in zip(ends, starts, keep, strict=True)]
            if max(e - s - k for e, s, k in zip(ends, starts, keep, strict=True)) < self._chunk:
                break
            self._forward(
                rows, [_slice(row.ids, extra[r], starts[r], stops[r]) for r, row in enumerate(rows)], starts, 0
            )
            starts = stops
        fed = [_slice(row.ids, extra[r], starts[r], ends[r]) for r, row in enumerate(rows)]
        width = max(map(len, fed))
        first = min(
            len(f) - k for f, k in zip(fed, keep, strict=True)
        )  # rows of different lengths end at different columns
        out = self._forward(rows, fed, starts, width - first)
        self.note(rows, extra)
        return [out[r, len(f) - keep[r] - first : len(f) - first] for r, f in enumerate(fed)]

    def advance(self, rows: Sequence[Row], extra: Sequence[Sequence[int]]) -> None:
        """Bring the cache to the same tokens, without any logits."""
        self.store.follow([row.index for row in rows])
        starts = [self._common(row, extra[r], 0) for r, row in enumerate(rows)]
        fed = [_slice(row.ids, extra[r], starts[r], len(row.ids) + len(extra[r])) for r, row in enumerate(rows)]
        if any(fed):
            self._forward(rows, fed, starts, 0)
        self.note(rows, extra)

    # ---- what is cached
    def rewind(self, row: int, length: int) -> None:
        """Only the first `length` tokens of this row are still what they were."""
        if length < self._agreed[row]:
            self._agreed[row], self._tail[row] = length, []

    def note(self, rows: Sequence[Row], extra: Sequence[Sequence[int]]) -> None:
        """The cache holds exactly these tokens."""
        for row, proposed in zip(rows, extra, strict=True):
            self._agreed[row.index], self._tail[row.index] = len(row.ids), list(proposed)

    def _common(self, row: Row, extra: Sequence[int], keep: int) -> int:
        """How many tokens of row.ids + extra need no forward; the last `keep` always do, since their logits are wanted."""
        n, length = self._agreed[row.index], len(row.ids)
        for token in self._tail[row.index]:
            behind = n - length
            if (row.ids[n] if behind < 0 else extra[behind] if behind < len(extra) else None) != token:
                break
            n += 1
        return min(n, length + len(extra) - keep)

    # ---- one forward
    def _forward(self, rows: Sequence[Row], fed: Sequence[Sequence[int]], starts: list[int], keep: int) -> Tensor:
        """Run `fed[i]` at positions from `starts[i]` on; logits of the last `keep` columns (0: the head is not run)."""
        self.store.span.set(list(starts))
        ordinary = partial(self._ordinary, fed, starts, keep)
        out = self._graphs.run(fed, starts, ordinary, self._block) if self._graphs and keep else ordinary()
        if out.states is not None:
            self._remember(rows, fed, starts, keep, out.states)
        return out.logits[:, -keep:] if keep else out.logits

    def _ordinary(self, fed: Sequence[Sequence[int]], starts: list[int], keep: int) -> Pass:
        width = max(map(len, fed))
        tokens = torch.tensor(
            [[*f, *[0] * (width - len(f))] for f in fed], device=self.device
        )  # padding: overwritten later
        if self.store.span.uniform:
            positions = torch.arange(starts[0], starts[0] + width, device=self.device).expand(len(starts), -1)
        else:
            positions = torch.tensor(starts, device=self.device)[:, None] + torch.arange(width, device=self.device)
        return self._pass(tokens, positions, keep, masked=not self.store.span.uniform)

    def _block(self, block: Tensor) -> Pass:
        """The same as a `graphs.Block`."""
        starts, tokens = block[:, :1], block[:, 1:]
        positions = starts + torch.arange(tokens.shape[1], device=self.device)
        self.store.span.set_whole(positions)
        return self._pass(tokens, positions, tokens.shape[1], masked=True)

    def _pass(self, tokens: Tensor, positions: Tensor, keep: int, masked: bool) -> Pass:
        """The model over `tokens` `[rows, width]`, all columns' states and at least the last `keep` columns' logits."""
        if self._last_id is not None:
            tokens = tokens.clamp(max=self._last_id)
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            self._cache_name: self.store,
            "use_cache": True,
            **self._first_inputs,
        }
        self._first_inputs = {}
        if self._token_type is not None:  # new tokens are of the last one's type, as in generate()
            inputs.setdefault("token_type_ids", self._token_type.expand(-1, tokens.shape[1]))
        if self._positions:  # padding, and rows past a draft model's end, must not leave a table of positions
            inputs["position_ids"] = (
                positions.clamp(max=self.limit - 1) if self.limit and self.hard_limit else positions
            )
        if masked:
            inputs["attention_mask"] = self.store.mask(
                positions, None if self._attention == "sdpa" else self.model.dtype
            )
        body = None if keep else getattr(self.model, self.model.base_model_prefix, None)
        if self._keeps and body is None:
            inputs["logits_to_keep"] = max(keep, 1)
        with torch.no_grad():
            out = (self.model if body is None else body)(**inputs, return_dict=True)
        states = None
        if self._tap is not None:
            states, self._tap.value = self._tap.value.last_hidden_state, None
        return Pass(out.logits if keep else tokens.new_empty(0), states)

    def _remember(
        self, rows: Sequence[Row], fed: Sequence[Sequence[int]], starts: Sequence[int], keep: int, states: Tensor
    ) -> None:
        missing = max(map(len, fed)) - states.shape[1]  # some models drop the columns whose logits nobody wants
        for r, row in enumerate(rows):
            first = max(missing, 0 if self._remembers_all else len(fed[r]) - max(keep, 1))
            new = states[r, first - missing : len(fed[r]) - missing]
            if not self._remembers_all:  # a copy, so that the states of a long prompt can go
                self.hidden[row.index] = starts[r] + first, new.clone()
            elif row.index in self.hidden:  # a later chunk of the same call
                start, old = self.hidden[row.index]
                self.hidden[row.index] = start, torch.cat([old[: starts[r] - start], new])
            else:
                self.hidden[row.index] = starts[r], new

    def _check_masks(self, what: str, remedy: str) -> None:
        """Raise ValueError unless the model takes masks and positions as they are given."""
        kind, chunked = self.config.model_type, getattr(self.config, "attention_chunk_size", None)
        windows = {layer.window for layer in self.store.row_layers} - {None}
        reason = None
        if self._attention not in ("sdpa", "eager"):
            reason = f"its attention implementation {self._attention!r} takes no 4-D mask; load it with attn_implementation='sdpa'"
        elif kind in _OWN_MASKS or chunked or len(windows) > 1 or not self._positions or self._token_type is not None:
            reason = "its layers build their own masks or positions from a 2-D mask"
        if reason:
            raise ValueError(f"{what} with {kind!r}: {reason}. {remedy}")


def fastest(model: M) -> M:
    """The module tree to run: with packed weights if there are some, attention that copies no keys, and less Python."""
    modules = dict(model.named_modules())
    quick = packed.stands(model, modules) if is_torchs_own() else {}
    replaced: dict[str, nn.Module] = {**quick}
    if untouched(modules.values()):
        others = {name: module for name, module in modules.items() if name not in quick}
        replaced = {**grouped.stands(others), **lean.stands(others), **quick}  # attentions before what lies in them
    return borrow(model, replaced) if replaced else model


def check_rollback(model: PreTrainedModel) -> None:
    """Raise ValueError, naming the layers where they are known, for a model whose cache cannot be rolled back."""
    layer_plan(model.config)
    check_stateful(model)


def check_stateful(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that keeps a state beside its cache."""
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{type(model).__name__} keeps a running state outside its cache that cannot be rolled back after a rejection. "
            "Use a model whose layers are all attention layers."
        )


def check_blocks(model: PreTrainedModel) -> None:
    """Raise ValueError for layers that compute a token differently with others beside it."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            raise ValueError(
                f"{name} ({type(module).__name__}, dynamic quantisation) scales all tokens of a pass together, so a token computed in a block is "
                "another one than computed alone. Use the model as it was before quantize_dynamic(), or method='plain' with one prompt at a time."
            )


def forward_parameters(kind: type) -> Collection[str]:
    """The names that a model's forward takes; of the nearest class whose forward names its inputs."""
    for one in kind.__mro__:
        names = inspect.signature(one.__dict__["forward"]).parameters if "forward" in one.__dict__ else {}
        if "input_ids" in names:
            return names
    return ()


def _slice(ids: Sequence[int], extra: Sequence[int], start: int, stop: int) -> list[int]:
    """(ids + extra)[start:stop] without building the sum."""
    n = len(ids)
    return [*ids[start:stop], *extra[max(0, start - n) : max(0, stop - n)]]
