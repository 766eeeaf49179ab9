"""The inputs of a model in addition to token ids and cache.

For models with transformers' standard `prepare_inputs_for_generation` they are the same as that one gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb import compat
from specnb.decoding.contracts import Row

PER_TOKEN = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Inputs with a value per token. New tokens get the value of the last one, or that of text."""
# Their preparation only differs from the standard one in that later passes get no token types.
_GEMMA = ("gemma3", "gemma3n", "gemma4", "gemma4_unified")
_FIRST_PASS_TOKEN_TYPES = (*_GEMMA, *(f"{name}_text" for name in _GEMMA))
# Their preparation only differs in that it drops the cache when a text outgrows `original_max_position_embeddings`.
_DROPS_CACHE = ("phi3", "phimoe", "phi4_multimodal")
# Their preparation only says which logits to keep.
_STANDARD_PREPARATION = ("bamba", "falcon_h1", "nemotron_h", "zamba", "zamba2")
# Their cache holds more than a slot per token (image states, slots of a prompt, a slot per loop), or states elsewhere.
_CUSTOM_CACHE = ("cpmant", "dory", "git", "minimax", "recurrent_gemma")


@dataclass
class ModelInputs:
    """What `generate()` prepared for the rows in addition to ids, mask and cache.

    Args:
        extras: further arguments of the model: images, token types.
        position_ids: `[..., rows, length]`, if they are not 0, 1, 2, ... A row is continued by 1, 2, ...
        types_first_pass_only: token types are given in the first pass only.
        prompt_lengths: number of tokens of each row.
    """

    extras: Mapping[str, Any] = field(default_factory=dict)
    position_ids: Tensor | None = None
    types_first_pass_only: bool = False
    prompt_lengths: Sequence[int] = ()

    def positions(self, slots: Tensor, rows: Sequence[int]) -> Tensor:
        """The position ids of tokens.

        Args:
            slots: the tokens' places in the text, `[rows, width]`.
            rows: the rows' indices.

        Returns:
            `[..., rows, width]`.
        """
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
        """The further arguments of a pass over `slots`; `first`: whether it is the first pass."""
        if not self.extras:
            return {}
        given: dict[str, Any] = {}
        for name, value in self.extras.items():
            if name in PER_TOKEN and isinstance(value, Tensor):
                if first or not self.types_first_pass_only:
                    given[name] = _token_types(name, value, slots, rows, self.prompt_lengths)
            elif first or (
                not self.types_first_pass_only
                and compat.FIRST_PASS_INPUTS is not None
                and name not in compat.FIRST_PASS_INPUTS
            ):
                given[name] = value
        return given


@dataclass(frozen=True)
class PreparedInputs:
    """What `generate()` prepared for the target.

    Args:
        prompts: `[rows, length]`, with padding.
        arguments: all arguments, with padding.
        inputs: those that are aligned with the rows, without padding.
        past: the cache to use, empty or holding the beginning of the only row.
    """

    prompts: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))
    arguments: Mapping[str, Any] = field(default_factory=dict)
    inputs: ModelInputs = field(default_factory=ModelInputs)
    past: Any = None

    def arguments_for(self, row: Row) -> Mapping[str, Any] | None:
        """The arguments if `row` is the only one, has no padding and uses a cache; else None."""
        if self.arguments.get("use_cache") is False:
            return None
        return self.arguments if self.prompts.tolist() == [row.ids[: row.prompt_length]] else None


@dataclass(frozen=True)
class CacheSize:
    """The size of a kv cache.

    Args:
        capacity: number of slots to allocate at first.
        prefill_chunk_size: number of tokens per pass over a long prompt; None: one pass.
    """

    capacity: int = 0
    prefill_chunk_size: int | None = None


def _token_types(name: str, types: Tensor, slots: Tensor, rows: Sequence[int], prompt_lengths: Sequence[int]) -> Tensor:
    """The types `[rows, width]` of the tokens in `slots`.

    Tokens after the prompt get the last type in it, or 0 (text) if the types are multimodal ones.
    """
    rows = rows if len(prompt_lengths) > 1 else [0]
    types = types.to(slots.device).expand(len(prompt_lengths), -1)[list(rows)]
    ends = torch.tensor([[prompt_lengths[row]] for row in rows], device=slots.device)
    new = types.gather(1, ends - 1) if name == "token_type_ids" else torch.zeros_like(types[:, -1:])
    known = types.gather(1, slots.clamp(max=types.shape[1] - 1))
    return torch.where(slots < ends, known, new)


def custom_preparation(model: PreTrainedModel, max_length: int | None = None) -> str | None:
    """The name of the method with which `model` prepares its inputs differently from the standard; None if it does not.

    Args:
        max_length: the most tokens of a row; None if unknown.
    """
    config = model.config.get_text_config(decoder=True)
    switch = getattr(config, "original_max_position_embeddings", None)
    short = drops_cache(model) and (switch is None or (max_length is not None and max_length <= switch))
    for name in (compat.PREPARE, compat.UPDATE):
        method = compat.own_method(model, name)
        in_transformers = method is not None and method.__module__.startswith("transformers.models.")
        standard = config.model_type in _STANDARD_PREPARATION or has_first_pass_token_types(model) or short
        known = method is None or (in_transformers and standard)
        if name in vars(model) or not known:
            return name
    return None


def drops_cache(model: PreTrainedModel) -> bool:
    """Whether the model drops its cache when a text outgrows `original_max_position_embeddings`."""
    return model.config.get_text_config(decoder=True).model_type in _DROPS_CACHE


def has_first_pass_token_types(model: PreTrainedModel) -> bool:
    """Whether the model gets token types in the first pass only."""
    return model.config.get_text_config(decoder=True).model_type in _FIRST_PASS_TOKEN_TYPES


def has_custom_cache(model: PreTrainedModel) -> bool:
    """Whether the model's cache holds more than a slot per token."""
    return model.config.model_type in _CUSTOM_CACHE


def has_custom_positions(model: PreTrainedModel) -> bool:
    """Whether the model makes its own position ids for `generate()`, as with M-RoPE."""
    return compat.prepares_positions(model)


def forward_parameters(kind: type) -> Collection[str]:
    """The parameter names of a model's forward, from the nearest class that names `input_ids`."""
    for one in kind.__mro__:
        names = _parameters(one.__dict__["forward"]) if "forward" in one.__dict__ else ()
        if "input_ids" in names:
            return names
    return ()


@lru_cache(256)
def _parameters(function: Callable[..., Any]) -> Collection[str]:
    return inspect.signature(function).parameters.keys()
