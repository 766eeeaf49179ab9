"""PreparedLM: for models that prepare their own inputs or have another kind of cache. Each has one row.

The model runs with its own `prepare_inputs_for_generation` and transformers' own cache, as in transformers' assisted
decoding. This is slower than `CachedLM`, but works for every model that assisted decoding works for.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import ModelOutput

from specnb import compat
from specnb.decoding.contracts import Row, Unsupported
from specnb.decoding.lm.base import LM, LMOptions, model_device
from specnb.decoding.lm.minimax import is_minimax, masks
from specnb.decoding.lm.model_inputs import forward_parameters
from specnb.decoding.lm.snapshots import Snapshots, StateList, has_states, is_replaced, is_restored

_MAX_STORED_ARGUMENTS = 64  # one entry per text length; more than a draft and a step need


class PreparedLM(LM):
    """A causal language model that prepares its own inputs, for one row.

    Args:
        model, rows, options: as for `LM`.
        arguments: what `generate()` prepared for the row's prompt; None: they are prepared here.
        extras: what the call gave in addition to token ids (images, token types), for the prompt; used without
            `arguments`.
        past: the transformers cache to fill; it may hold the beginning of the row. None makes one.
        rolls_back: whether drafts may be rejected. If not (plain decoding), any model works, recurrent ones too.
    """

    drafts_first = False

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[Row],
        *,
        arguments: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        past: Any = None,
        rolls_back: bool = True,
        options: LMOptions = LMOptions(),
    ) -> None:
        super().__init__(model, rows, options)
        self._original_model = model
        self._extras, self._rolls_back = dict(extras or {}), rolls_back
        self._started = False
        self._cacheless = False  # every pass reads the whole text, as with GPT-1
        self._min_length = 0  # the shortest length to which the cache can be cropped
        self._records_past = False
        self._fixed_layers: set[int] = set()  # cache layers that hold an image and do not grow with the text
        self._cached_ids: list[int] = []  # the tokens in the cache
        # what generate() prepares, by text length
        self._arguments: dict[int, dict[str, Any]] = (
            {len(rows[0].ids): dict(arguments)} if arguments is not None else {}
        )
        self._last_outputs: Any = ModelOutput()
        self._past = past
        self._cache: Any = None
        held = cached_length(past)
        if held:
            self._cached[rows[0].index], self._cached_ids = held, list(rows[0].ids[:held])

    def _forward(
        self, rows: Sequence[Row], new_tokens: Sequence[Sequence[int]], starts: list[int], num_logits: int
    ) -> Tensor:
        start, new = starts[0], list(new_tokens[0])
        if self._max_token_id is not None:
            new = [min(token, self._max_token_id) for token in new]
        if self._started and (self._cacheless or not self._crop(start, len(rows[0].ids))):
            start, new = 0, [*self._cached_ids[:start], *new]
        self._cached_ids = [*self._cached_ids[:start], *new]
        ids = torch.tensor([self._cached_ids], device=self.device)
        arguments = self._arguments_for(len(self._cached_ids))
        name = next((name for name in compat.CACHE_NAMES if name in arguments), compat.CACHE_NAMES[0])
        if self._cache is None:
            self._cache = arguments.get(name)
            self._start_recording(self._cache, start)
        elif not isinstance(self._cache, StateList):
            arguments = arguments | {name: self._cache}
        before = _layer_lengths(self._cache)
        with torch.no_grad():
            inputs = self.model.prepare_inputs_for_generation(
                ids, next_sequence_length=len(new) if start else None, is_first_iteration=not self._started, **arguments
            )
            if "logits_to_keep" in inputs:
                inputs["logits_to_keep"] = max(num_logits, 1)
            if start and len(new) > 1 and is_minimax(self._original_model):
                inputs["attention_mask"] = masks(self._original_model, start, len(new))
            out = self.model(**inputs, return_dict=True)
        self._store_outputs(out)
        after = _layer_lengths(self._cache)
        self._fixed_layers |= {i for i, n in enumerate(before) if n and i < len(after) and after[i] == n}
        if self._capture is not None:
            self._store_hidden_states(rows, [new], [start], num_logits, self._capture.take())
        logits: Tensor = out.logits
        if not num_logits:
            return logits
        if logits.shape[1] < num_logits:
            raise Unsupported(
                f"{type(self.model).__name__} gives logits for {logits.shape[1]} of {num_logits} tokens of a pass, so "
                "drafts cannot be verified; use method='plain'."
            )
        return logits[:, -num_logits:]

    def _store_outputs(self, out: Any) -> None:
        """Keep what the next pass needs from a pass's output."""
        cache = compat.cache_among(out)
        if isinstance(states := getattr(out, "state", None), list):
            cache = (self._cache if isinstance(self._cache, StateList) else StateList()).hold(states)
        self._last_outputs = (
            type(out)({k: v for k, v in out.items() if k not in ("logits", *compat.CACHE_NAMES)}) if out else out
        )
        self._cacheless = cache is None and not compat.is_stateful(self._original_model)
        if cache is not None and cache is not self._cache:
            self._start_recording(cache, len(self._cached_ids))
        self._cache = cache
        layers = [layer for layer in getattr(cache, "layers", ()) if not is_restored(layer)]
        fixed = [layer for layer in layers if not getattr(layer, "is_croppable", True)]
        kinds = sorted({type(layer).__name__ for layer in fixed if _is_filled(layer)})
        if self._rolls_back and kinds:
            raise Unsupported(
                f"{type(self.model).__name__} cannot draft or be drafted for: its cache has layers "
                f"({', '.join(kinds)}) that cannot be rolled back after a rejection; use method='plain'."
            )
        self._started = True

    def _start_recording(self, cache: Any, length: int) -> None:
        """Make the cache's layers keep what a rollback needs. The cache holds `length` tokens."""
        sliding = any(getattr(layer, "is_sliding", False) for layer in getattr(cache, "layers", ()))
        if self._rolls_back and sliding and not _sliding_window_rolls_back():
            raise Unsupported(
                f"{type(self.model).__name__} has sliding windows and prepares its own inputs. To roll this back "
                f"takes a newer transformers than {transformers.__version__}: update it, or use method='plain'."
            )
        if self._rolls_back and self._snapshots is None:
            self._snapshots = Snapshots.of_cache(cache, length)
        if self._rolls_back and hasattr(cache, "activate_past_recording"):
            for layer in cache.layers:
                slides = getattr(layer, "is_sliding", False) and not is_replaced(layer)
                if hasattr(layer, "activate_past_recording") and (slides or not is_restored(layer)):
                    layer.activate_past_recording()
                    self._records_past = True

    def _crop(self, n: int, num_committed: int) -> bool:
        """Crop the cache to the first `n` tokens.

        Args:
            num_committed: number of committed tokens; these will not be rolled back later.

        Returns:
            False if that was not possible and the cache was emptied.
        """
        held = len(self._cached_ids)
        if n == 0 or n < self._min_length:
            self._cache, self._past, self._arguments, self._started, self._min_length = None, None, {}, False, 0
            self._snapshots = None
            return False
        if self._rolls_back and (n < held or n <= num_committed):
            for i, layer in enumerate(self._cache.layers):
                if _is_filled(layer) and i not in self._fixed_layers:
                    _crop_keys(layer, n - held)  # also by 0, which drops what was recorded
            self._min_length = n if self._records_past else 0
        return True

    def _arguments_for(self, n: int) -> dict[str, Any]:
        """The arguments that `generate()` would give for a text of `n` tokens."""
        known = [length for length in self._arguments if length <= n]
        if not known:
            extras = {} if self._started else self._extras
            self._arguments = {n: prepare_arguments(self._original_model, self._cached_ids[:n], self._past, **extras)}
            return self._arguments[n]
        at = max(known)
        arguments = self._arguments[at]
        while at < n:
            arguments = compat.update_model_kwargs(self.model, self._last_outputs, arguments)
            at += 1
            self._arguments[at] = arguments
        for length in [length for length in self._arguments if length < n - _MAX_STORED_ARGUMENTS]:
            del self._arguments[length]
        return arguments

    def export_cache(self, cache: Any, rows: Sequence[Row]) -> Any:
        """The cache with all tokens but the last; None if the row had padding."""
        row = rows[0]
        if row.padding:
            return None
        is_ahead = self._rolls_back and self._cache is not None and len(self._cached_ids) >= len(row.ids)
        if is_ahead and not self._replay_to_end(row):
            self._crop(len(row.ids) - 1, len(row.ids))
        return None if isinstance(self._cache, StateList) else self._cache


def prepare_arguments(model: PreTrainedModel, ids: Sequence[int], past: Any = None, **extras: Any) -> dict[str, Any]:
    """What `model.generate()` prepares for a prompt: positions, a cache and so on.

    Args:
        ids: the prompt's token ids.
        past: a cache that may hold the beginning of the prompt.
        extras: further arguments of `generate()`.
    """
    prepared: dict[str, Any] = {}

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **arguments: Any,
    ) -> Tensor:
        prepared.update(arguments)
        return input_ids

    bare = copy.copy(model)  # shares all modules, with another generation config
    bare.generation_config = GenerationConfig(max_new_tokens=1, do_sample=False, pad_token_id=0, use_cache=True)
    prompt = torch.tensor([list(ids)], device=model_device(model))
    given = dict(extras)
    parameters = forward_parameters(type(model))
    if "attention_mask" in parameters:
        given.setdefault("attention_mask", torch.ones_like(prompt))
    if cached_length(past):
        given[compat.cache_keyword(parameters)] = past
    GenerationMixin.generate(bare, prompt, custom_generate=decode, **given)
    return prepared


def cached_length(cache: Any) -> int:
    """The number of tokens in a transformers cache.

    It is 0 for None, and for a cache that does not count tokens (recurrent layers only).
    """
    try:
        return 0 if cache is None else int(cache.get_seq_length())
    except ValueError:
        return 0


def _crop_keys(layer: Any, change: int) -> None:
    """Crop a cache layer by `-change` tokens. `Snapshots` rolls back running states and layers that are replaced."""
    if is_replaced(layer):
        return
    if not has_states(layer):
        layer.crop(change)
    elif isinstance(layer, DynamicSlidingWindowLayer):
        DynamicSlidingWindowLayer.crop(layer, change)
    elif isinstance(layer, DynamicLayer):
        DynamicLayer.crop(layer, change)


@cache
def _sliding_window_rolls_back() -> bool:
    """Whether a sliding-window cache layer that records its past counts the recorded tokens in its mask sizes.

    It does since transformers 5.24.
    """
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    layer.activate_past_recording()
    states = torch.zeros(1, 1, 6, 1)
    layer.update(states, states)
    expected, _ = layer.get_mask_sizes(1)
    keys, _ = layer.update(states[:, :, :1], states[:, :, :1])
    return bool(keys.shape[2] == expected)


def _is_filled(layer: Any) -> bool:
    """Whether a pass has filled this cache layer."""
    states = (getattr(layer, name, {}) for name in ("is_conv_states_initialized", "is_recurrent_states_initialized"))
    return getattr(layer, "keys", None) is not None or any(any(one.values()) for one in states)


def _layer_lengths(cache: Any) -> list[int]:
    """Number of tokens that each cache layer has processed; 0 if it does not count."""
    lengths = []
    for layer in getattr(cache, "layers", ()):
        keys, taken = getattr(layer, "keys", None), getattr(layer, "cumulative_length", None)
        lengths.append(int(taken) if taken is not None else 0 if keys is None or keys.dim() < 2 else keys.shape[-2])
    return lengths
