"""Models and prompts as the caller gives them: unwrapping, checks before anything runs, tokenization."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specnb import compat
from specnb.call import peft_adapters
from specnb.call.generate_options import STATIC_LIKE
from specnb.decoding import padding
from specnb.decoding.lm.model_inputs import ModelInputs, PreparedInputs, has_first_pass_token_types
from specnb.models import Pair
from specnb.options import greedy_at_zero
from specnb.text import text_tokenizer


def unwrap_model(name: str, model: Any, tokenizer: Any = None) -> tuple[Any, Any]:
    """The model inside a `Pair` or a peft wrapper.

    Args:
        name: the argument's name, for messages.
        model: a transformers model, a `Pair`, a peft wrapper or None.
        tokenizer: the tokenizer that was given; None takes the pair's.

    Returns:
        The model and the tokenizer.

    Raises:
        ValueError: `model` is something else, a name for example, or has an adapter that does more than change weights.
    """
    if isinstance(model, Pair):
        model, tokenizer = model.target, model.tokenizer if tokenizer is None else tokenizer
    if peft_adapters.is_peft(model):
        model = peft_adapters.unwrap_peft(name, model)
    if model is not None and not isinstance(model, PreTrainedModel):
        inner = compat.compiled_model(model)
        if isinstance(inner, PreTrainedModel):
            raise ValueError(
                f"{name} is what torch.compile() made of a {type(inner).__name__}; give the model itself. "
                "(model.compile() compiles in place.)"
            )
        what = f"the name {model!r}" if isinstance(model, str) else f"a {type(model).__name__}"
        load = f"specnb.load({model!r})" if isinstance(model, str) else "specnb.load(NAME)"
        raise ValueError(f"{name} must be a model or a Pair, not {what}: load it first with {load}.")
    return model, tokenizer


def check_arguments(model: Any, options: Mapping[str, Any]) -> None:
    """Check the types of a call's arguments.

    Args:
        options: all arguments that were given, by name.

    Raises:
        ValueError: an argument has a type that `generate()` cannot use.
    """
    if model is None:
        raise ValueError("model is None: load one with specnb.load(NAME).")
    streamer, config = options.get("streamer"), options.get("generation_config")
    if streamer is not None and not (
        callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))
    ):
        raise ValueError(
            f"streamer must have put() and end(), as transformers' TextStreamer has; a {type(streamer).__name__} has "
            "not."
        )
    if config is not None and not isinstance(config, GenerationConfig):
        raise ValueError(
            f"generation_config must be a GenerationConfig, not a {type(config).__name__}; "
            "options can be given by name."
        )
    for name in ("tokenizer", "assistant_tokenizer"):
        if isinstance(options.get(name), str):
            raise ValueError(
                f"{name} must be a tokenizer, not the name {options[name]!r}: AutoTokenizer.from_pretrained()."
            )
    for name in ("on_step", "prefix_allowed_tokens_fn"):
        if options.get(name) is not None and not callable(options[name]):
            raise ValueError(f"{name} must be a function, not a {type(options[name]).__name__}.")
    if options.get("cancel") is not None and not callable(getattr(options["cancel"], "is_set", None)):
        raise ValueError(f"cancel must be a threading.Event, not a {type(options['cancel']).__name__}.")
    for name in ("logits_processor", "stopping_criteria"):
        _check_functions(name, options.get(name))
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        _check_ids(name, options.get(name))
    for name, kind in _NUMBERS.items():
        value = options.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            what = "a whole number" if kind is int else "a number"
            raise ValueError(f"{name}={value!r} is not valid: it must be {what}.")
    watermarking = options.get("watermarking_config")
    if (
        watermarking is not None
        and not isinstance(watermarking, dict)
        and not callable(getattr(watermarking, "validate", None))
    ):
        raise ValueError(f"watermarking_config must be a WatermarkingConfig, not a {type(watermarking).__name__}.")


# Options that transformers does not check itself. The options in `options.OPTIONS` are checked there.
_NUMBERS: dict[str, Any] = {
    **dict.fromkeys(("max_length", "min_length", "num_return_sequences", "encoder_no_repeat_ngram_size"), int),
    "prefill_chunk_size": int,
    **dict.fromkeys(("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "encoder_repetition_penalty"), (int, float)),
}


def _check_functions(name: str, given: Any) -> None:
    """Raise ValueError for anything but a list of functions of ids and scores."""
    if given is None or (isinstance(given, (list, tuple)) and all(callable(one) for one in given)):
        return
    if callable(given):
        raise ValueError(f"{name} must be a list: write {name}=[...] around the {type(given).__name__}.")
    wrong = next((one for one in given if not callable(one)), given) if isinstance(given, (list, tuple)) else given
    kind = "LogitsProcessor" if name == "logits_processor" else "StoppingCriteria"
    raise ValueError(f"{name} must be a list of {kind}, with a __call__(input_ids, scores); {wrong!r} is none.")


def _check_ids(name: str, given: Any) -> None:
    """Raise ValueError for a token id that is not an int; eos_token_id may be a list of them."""
    if given is None or (isinstance(given, Tensor) and not given.is_floating_point()):
        return
    several = list(given) if name == "eos_token_id" and isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in several):
        kind = "a token id, or a list of them" if name == "eos_token_id" else "a token id"
        raise ValueError(
            f"{name}={given!r} is not valid: it must be {kind}; tokenizer.convert_tokens_to_ids() finds a token's."
        )


def with_cache_name(passed: dict[str, Any]) -> dict[str, Any]:
    """The call's options with a cache under its name in this transformers, which warns about the older one."""
    new, old = compat.cache_field(), "past_key_values"
    if new == old or old not in passed or new in passed:
        return passed
    return {new if name == old else name: value for name, value in passed.items()}


def value_in_effect(name: str, passed: Mapping[str, Any], model: PreTrainedModel) -> Any:
    """An option's value in a call: the call's own (also None), else its generation config's, else the model's."""
    if name in passed:
        return passed[name]
    places = (passed.get("generation_config"), model.generation_config)
    return next((value for value in (getattr(one, name, None) for one in places) if value is not None), None)


def override_configs(passed: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The arguments for `generate()` with options that take precedence over all configs; no config is changed."""
    config = passed.get("generation_config")
    if config is None:
        return passed | options
    config = copy.deepcopy(config)  # transformers warns about options that are given together with a config
    for name, value in options.items():
        setattr(config, name, value)
    return {name: value for name, value in passed.items() if name not in options} | {"generation_config": config}


def prepare_options(passed: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """The arguments for `generate()` as transformers can handle them.

    `temperature=0` becomes greedy decoding, and a `cache_implementation` that specnb does not use becomes "dynamic".
    """
    if value_in_effect("temperature", passed, model) == 0:
        passed = override_configs(greedy_at_zero({**passed, "temperature": 0}), do_sample=False, temperature=1.0)
    given = compat.cache_among(passed) is not None
    if value_in_effect("cache_implementation", passed, model) in STATIC_LIKE and not given:
        passed = override_configs(passed, cache_implementation="dynamic")
    return passed


def encode(model: PreTrainedModel, inputs: Any, passed: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Tokenize the prompts, as a left-padded batch.

    Args:
        inputs: token ids `[rows, length]`, a text, a list of texts, or None if the prompt is in `passed`.
        passed: the arguments for `generate()`.
        tokenizer: needed for texts.

    Returns:
        The arguments for `generate()` with the prompt.

    Raises:
        ValueError: the prompt is given twice, empty, of another type, or a text without a tokenizer.
    """
    if inputs is None:
        return passed
    if "input_ids" in passed:
        raise ValueError("the prompt was given twice: as `inputs` and as `input_ids`.")
    if isinstance(inputs, Tensor):
        return passed | {"inputs": inputs}
    texts = [inputs] if isinstance(inputs, str) else list(inputs) if isinstance(inputs, (list, tuple)) else []
    if not texts or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"inputs must be token ids, a text or a list of texts, {_what_was_given(inputs)}")
    if tokenizer is None:
        raise ValueError("a text needs tokenizer= (or a Pair from specnb.load); else give token ids.")
    tokenizer = text_tokenizer(tokenizer)
    rows = [tokenizer(t)["input_ids"] for t in texts]
    if not all(rows):
        raise ValueError("an empty text has no tokens to continue; give some text.")
    width = max(map(len, rows))
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return passed | {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


def _what_was_given(given: Any) -> str:
    """The end of a message about a wrong prompt: what was given and what to write instead."""
    if isinstance(given, Mapping) or (hasattr(given, "keys") and hasattr(given, "__getitem__")):
        if "role" in given:
            return _CHAT
        return f"not a {type(given).__name__}: give its parts by name, specnb.generate(model, **inputs)."
    if isinstance(given, (list, tuple)):
        if not given:
            return "not an empty list: give at least one text."
        first = given[0][0] if isinstance(given[0], (list, tuple)) and given[0] else given[0]
        if isinstance(first, Mapping):
            return (
                _CHAT if "role" in first else f"not a list of {type(first).__name__}: give **inputs of a whole batch."
            )
        if isinstance(first, int) and not isinstance(first, bool):
            ids = "a list of ids: give torch.tensor([ids])" if isinstance(given[0], int) else _ROWS
            return f"not {ids}."
        if isinstance(first, Tensor):
            return "not a list of tensors: give torch.stack(rows), or torch.cat() of rows [1, length]."
        return f"not a list with a {type(first).__name__} in it."
    if isinstance(given, Tensor):
        return (
            f"not a tensor {list(given.shape)} of {given.dtype}{'' if given.dim() != 1 else ': give ids.unsqueeze(0)'}."
        )
    if hasattr(given, "__array__"):
        return f"not a {type(given).__name__}: give torch.as_tensor(ids), of whole numbers [rows, length]."
    return f"not a {type(given).__name__}."


_CHAT = (
    "not chat messages: give specnb.generate(model, **tokenizer.apply_chat_template(messages, "
    "add_generation_prompt=True, "
    'return_dict=True, return_tensors="pt")).'
)
_ROWS = "lists of ids: give torch.tensor(rows), padded on the left, with an attention_mask, where they differ in length"
_EMPTY = "the prompt is empty: it must have at least one token."


def check_filled(input_ids: Tensor) -> None:
    """Raise ValueError for a prompt without tokens."""
    if not input_ids.numel():
        raise ValueError(_EMPTY)


def check_prompt(model: PreTrainedModel, passed: Mapping[str, Any]) -> None:
    """Raise ValueError for token ids or an attention mask that cannot be a prompt's."""
    ids = passed.get("input_ids", passed.get("inputs"))
    if ids is None:
        if passed.get("inputs_embeds") is None:
            raise ValueError("there is no prompt: give a text, a list of texts, or token ids [rows, length].")
        return
    if isinstance(ids, Tensor) and ids.dim() in (1, 2):
        check_filled(ids)
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"token ids must be a tensor of whole numbers [rows, length], {_what_was_given(ids)}")
    rows = int(model.get_input_embeddings().weight.shape[0])
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= rows:
        raise ValueError(
            f"the prompt holds the id {low if low < 0 else high}, but {type(model).__name__} has the ids 0 to "
            f"{rows - 1}."
        )
    mask = passed.get("attention_mask")
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(
            f"attention_mask must be a tensor [rows, length], not a {type(mask).__name__}: torch.tensor(...)."
        )
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask has the shape {list(mask.shape)}, the prompt {list(ids.shape)}; they must be the same."
        )


def prepare_inputs(
    model: PreTrainedModel,
    input_ids: Tensor,
    arguments: Mapping[str, Any],
    extras: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    pads: Sequence[int],
) -> PreparedInputs:
    """What `generate()` prepared in addition to token ids, aligned with the rows.

    Args:
        input_ids: the padded prompts `[rows, length]`.
        arguments: all arguments that `generate()` prepared.
        extras: those of them that are inputs of the model, images for example.
        prompts: the rows without padding.
        pads: padding tokens in front of each row.
    """
    aligned = {
        name: padding.align_per_token(value, pads, input_ids.shape)
        for name, value in extras.items()
        if value is not None and not (isinstance(value, Mapping) and not value)
    }
    position_ids = padding.align_position_ids(arguments.get("position_ids"), prompts, pads)
    inputs = ModelInputs(aligned, position_ids, has_first_pass_token_types(model), [*map(len, prompts)])
    return PreparedInputs(input_ids, arguments, inputs, compat.cache_among(arguments))
