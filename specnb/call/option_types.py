"""Types of the options of `generate`. Written by `python -m tools.option_types`: do not edit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict

from torch import Tensor
from transformers import GenerationConfig


class DraftingOptions(TypedDict, total=False):
    """The drafting options, as in `specnb.options`."""

    num_assistant_tokens: int | None
    num_assistant_tokens_schedule: Literal["constant", "heuristic", "heuristic_transient", "adaptive"] | None
    assistant_confidence_threshold: float | None
    assistant_ensemble_weight: float | None
    assistant_early_exit: int | None
    max_matching_ngram_size: int | None
    suffix_decoding_max_tree_depth: int | None
    suffix_decoding_max_spec_factor: float | None
    suffix_decoding_min_token_prob: float | None
    verification: Literal["token", "block"] | None
    prompt_lookup_num_tokens: int | None
    use_mtp: bool | None
    speculation_type: Literal["dflash"] | None


class GenerateOptions(DraftingOptions, total=False):
    """The options of `specnb.generate`, and what is handed on to transformers' `generate()`."""

    max_new_tokens: int | None
    min_new_tokens: int | None
    max_time: float | None
    stop_strings: str | list[str] | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    input_ids: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    token_type_ids: Tensor | None
    pixel_values: Any
    cache: Any
    past_key_values: Any
    generation_config: GenerationConfig | None
    logits_processor: list[Any] | None
    stopping_criteria: list[Any] | None
    prefix_allowed_tokens_fn: Callable[..., Any] | None
