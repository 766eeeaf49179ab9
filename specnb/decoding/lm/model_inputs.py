"""What a model is given beside token ids and cache.

It is what the model's own `prepare_inputs_for_generation` would give, for models that keep to transformers' standard one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import utils as generation

from specnb.decoding.contracts import Row

PREPARE, UPDATE = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"
_POSITIONS = "_prepare_position_ids_for_generation"
PER_TOKEN = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Inputs with a value for each token; new tokens are of the last one's type, or text."""
# Their own preparation leaves the types of image tokens out after the first pass, and nothing else.
_FIRST_PASS_TOKEN_TYPES = ("gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified",
                   "gemma4_unified_text")  # fmt: skip
# Their own preparation drops the cache where the text outgrows `original_max_position_embeddings`, and does nothing else.
_DROPS_CACHE = ("phi3", "phimoe", "phi4_multimodal")
# Their cache holds more than a slot per token: image states before the text, slots of a prompt of its own, one for each loop.
_CUSTOM_CACHE = ("cpmant", "dory", "git")
# Inputs that belong to the first pass; where transformers has no such list, all do.
_FIRST_PASS_INPUTS: Collection[str] | None = getattr(generation, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", None)


@dataclass
class ModelInputs:
    """What `generate()` prepared for rows, beside ids, mask and cache.

    Args:
        extras: the model's further arguments: images, token types.
        planes: position ids `[..., rows, length]` where they are not 0, 1, 2, ...; a row continues each plane one by one.
        once: token types are for the first pass only.
        lengths: of the prompts.
    """

    extras: Mapping[str, Any] = field(default_factory=dict)
    position_ids: Tensor | None = None
    types_first_pass_only: bool = False
    prompt_lengths: Sequence[int] = ()

    def positions(self, slots: Tensor, rows: Sequence[int]) -> Tensor:
        """The position ids of the tokens in `slots` `[rows, width]`."""
        if self.position_ids is None:
            return slots
        position_ids = self.position_ids.to(slots.device)
        if position_ids.shape[-2] > 1:
            position_ids = position_ids[..., list(rows), :]
        last = position_ids.shape[-1] - 1
        known = slots.clamp(max=last).expand(*position_ids.shape[:-2], *slots.shape)
        table = position_ids.expand(*position_ids.shape[:-2], slots.shape[0], -1)
        return table.gather(-1, known) + (slots - last).clamp(min=0)

    def with_positions(self) -> dict[str, Any]:
        """The same as arguments for `generate()`."""
        return {**self.extras, **({} if self.position_ids is None else {"position_ids": self.position_ids})}

    def extra_arguments(self, slots: Tensor, rows: Sequence[int], first: bool) -> dict[str, Any]:
        """The further arguments of a pass over `slots`."""
        if not self.extras:
            return {}
        given: dict[str, Any] = {}
        for name, value in self.extras.items():
            if name in PER_TOKEN and isinstance(value, Tensor):
                if first or not self.types_first_pass_only:
                    given[name] = _token_types(name, value, slots, rows, self.prompt_lengths)
            elif first or (
                not self.types_first_pass_only and _FIRST_PASS_INPUTS is not None and name not in _FIRST_PASS_INPUTS
            ):
                given[name] = value
        return given


@dataclass(frozen=True)
class PreparedInputs:
    """What `generate()` prepared for the target.

    Args:
        prompts: `[rows, length]`, as it came.
        arguments: all arguments, as they came.
        inputs: those that are aligned with the rows, without padding.
        past: the cache to use, empty or holding the beginning of the only row.
    """

    prompts: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))
    arguments: Mapping[str, Any] = field(default_factory=dict)
    inputs: ModelInputs = field(default_factory=ModelInputs)
    past: Any = None

    def arguments_for(self, row: Row) -> Mapping[str, Any] | None:
        """The arguments, where `row` is the only one and came without padding, for decoding with a cache."""
        if self.arguments.get("use_cache") is False:
            return None
        return self.arguments if self.prompts.tolist() == [row.ids[: row.prompt_length]] else None


@dataclass(frozen=True)
class CacheSize:
    """Of a kv cache: the token slots to allocate at first, and the chunk in which long prompts are processed."""

    capacity: int = 0
    prefill_chunk_size: int | None = None


def _token_types(name: str, types: Tensor, slots: Tensor, rows: Sequence[int], prompt_lengths: Sequence[int]) -> Tensor:
    """The types of the tokens in `slots`: as given, then the last one's, or 0 (text) for multimodal ones."""
    rows = rows if len(prompt_lengths) > 1 else [0]
    types = types.to(slots.device).expand(len(prompt_lengths), -1)[list(rows)]
    ends = torch.tensor([[prompt_lengths[row]] for row in rows], device=slots.device)
    new = types.gather(1, ends - 1) if name == "token_type_ids" else torch.zeros_like(types[:, -1:])
    known = types.gather(1, slots.clamp(max=types.shape[1] - 1))
    return torch.where(slots < ends, known, new)


def custom_preparation(model: PreTrainedModel, max_length: int | None = None) -> str | None:
    """The method with which `model` prepares its inputs in a way of its own; None where it keeps to the standard.

    Args:
        longest: tokens that no row will outgrow, if that is known.
    """
    config = model.config.get_text_config(decoder=True)
    switch = getattr(config, "original_max_position_embeddings", None)
    short = drops_cache(model) and (switch is None or (max_length is not None and max_length <= switch))
    for name in (PREPARE, UPDATE):
        standard = getattr(GenerationMixin, name)
        method = getattr(type(model), name, standard)
        theirs = method.__module__.startswith("transformers.models.")
        known = method is standard or (theirs and (has_first_pass_token_types(model) or short))
        if name in vars(model) or not known:
            return name
    return None


def drops_cache(model: PreTrainedModel) -> bool:
    """Whether the model drops its cache where a text outgrows `original_max_position_embeddings`."""
    return model.config.get_text_config(decoder=True).model_type in _DROPS_CACHE


def has_first_pass_token_types(model: PreTrainedModel) -> bool:
    """Whether token types are for the first pass only."""
    return model.config.get_text_config(decoder=True).model_type in _FIRST_PASS_TOKEN_TYPES


def has_custom_cache(model: PreTrainedModel) -> bool:
    """Whether the model's cache holds more than a slot per token."""
    return model.config.model_type in _CUSTOM_CACHE


def has_custom_positions(model: PreTrainedModel) -> bool:
    """Whether `generate()` asks the model itself for position ids (several planes, as with M-RoPE)."""
    standard = getattr(GenerationMixin, _POSITIONS, None)
    return standard is not None and getattr(type(model), _POSITIONS) is not standard


def forward_parameters(kind: type) -> Collection[str]:
    """The names that a model's forward takes; of the nearest class whose forward names its inputs."""
    for one in kind.__mro__:
        names = _parameters(one.__dict__["forward"]) if "forward" in one.__dict__ else ()
        if "input_ids" in names:
            return names
    return ()


@lru_cache(256)
def _parameters(function: Callable[..., Any]) -> Collection[str]:
    return inspect.signature(function).parameters.keys()


def cache_keyword(parameters: Collection[str]) -> str:
    """The name under which a forward takes its cache: "cache", or "past_key_values" before transformers 5.24."""
    return "cache" if "cache" in parameters else "past_key_values"
