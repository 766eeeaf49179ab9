"""Checks before the first token: what cannot be decoded exactly is rejected by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel

from specnb import compat
from specnb.call import peft_adapters
from specnb.call.generate_options import NEW_FIELDS, NEW_PARAMETERS, UNSUPPORTED_CACHES
from specnb.call.method_selection import SPECULATION_TYPE, TRANSFORMERS_DEFAULTS
from specnb.decoding.lm.base import LM, has_learned_positions, max_positions
from specnb.decoding.lm.cached_lm import CachedLM
from specnb.decoding.lm.kv_cache import standard_cache_layers
from specnb.decoding.lm.minimax import is_minimax
from specnb.decoding.lm.model_inputs import forward_parameters
from specnb.decoding.lm.prepared_lm import cached_length
from specnb.decoding.lm.snapshots import has_states
from specnb.models.dflash import is_dflash
from specnb.options import BY_NAME, Method

if TYPE_CHECKING:
    from specnb.decoding.contracts import Row
    from specnb.decoding.distributions import Processors

_USE_TRANSFORMERS = "Use transformers' own generate() for this, without specnb."
# option of generate(): (values that are allowed, why all others are not)
_UNSUPPORTED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), "beam search keeps several hypotheses; speculative decoding follows one per row"),
    "penalty_alpha": ((None, 0, 0.0), "contrastive search chooses by hidden states of all candidates"),
    "guidance_scale": ((None, 1, 1.0), "its processor runs the model on another text at every position"),
    "dola_layers": ((None,), "DoLa compares layers, which is another target than the model"),
    "constraints": ((None,), "constrained search needs beams"),
    "force_words_ids": ((None,), "constrained search needs beams"),
    "token_healing": ((None, False), "it rewrites the prompt"),
    "output_attentions": ((None, False), "rejected positions have no place in that output"),
    "output_hidden_states": ((None, False), "rejected positions have no place in that output"),
    "synced_gpus": ((None, False), "each process decodes for itself and waits for no other"),
}
UNSUPPORTED_OPTIONS = frozenset({*_UNSUPPORTED_VALUES, "cache_implementation", "use_cache"})


def check_options(options: Mapping[str, Any] | GenerationConfig) -> None:
    """Raise ValueError for an option, or a value of a generation config, that is not supported."""

    def value_of(name: str) -> Any:
        return options.get(name) if isinstance(options, Mapping) else getattr(options, name, None)

    if value_of("is_assistant") and value_of("output_scores") and value_of("assistant_confidence_threshold") != 0:
        raise ValueError(
            "is_assistant=True together with output_scores ends a text at the first token that is less probable than "
            "assistant_confidence_threshold, which is for drafts only: give is_assistant=False."
        )
    for name, (allowed, why) in _UNSUPPORTED_VALUES.items():
        value = value_of(name)
        if value not in allowed:
            raise ValueError(
                f"{name}={value!r} cannot be combined with speculative decoding: {why}. {_USE_TRANSFORMERS}"
            )
    if value_of("cache_implementation") in UNSUPPORTED_CACHES:
        raise ValueError(
            f"cache_implementation={value_of('cache_implementation')!r} cannot be followed: specnb uses its own kv "
            "cache, which is neither offloaded, quantized nor paged. cache_implementation='dynamic' in the call takes "
            f"precedence over a generation config. {_USE_TRANSFORMERS}"
        )
    for name in NEW_FIELDS if isinstance(options, GenerationConfig) else NEW_FIELDS & options.keys():
        value = value_of(name)
        if value is not None and value != TRANSFORMERS_DEFAULTS.get(name):
            raise ValueError(
                f"{name}={value!r} is an option of a transformers newer than this specnb, which cannot tell what it "
                f"does to the text: leave it out. {_USE_TRANSFORMERS}"
            )


def check_cache_use(model: PreTrainedModel, use_cache: bool | None) -> None:
    """Raise ValueError if the call sets use_cache=False.

    It is allowed in the model's own configs: the text is the same, and specnb uses its own kv cache anyway.
    """
    own = (model.config.get_text_config(decoder=True), model.config, model.generation_config)
    if use_cache is False and not any(getattr(config, "use_cache", None) is False for config in own):
        raise ValueError(
            "use_cache=False cannot be combined with speculative decoding: every step relies on the cache. "
            f"{_USE_TRANSFORMERS}"
        )


def check_assistant(assistant: PreTrainedModel | None) -> None:
    """Raise ValueError for a draft model that is not of its `speculation_type`, or with unsupported adapters."""
    if assistant is None:
        return
    peft_adapters.check_adapters(assistant)
    kind = getattr(getattr(assistant, "generation_config", None), "speculation_type", None)
    if kind not in (None, SPECULATION_TYPE):
        raise ValueError(
            f"the draft model's generation config has speculation_type={kind!r}: drafters of that type are not built "
            f"here. {_USE_TRANSFORMERS}"
        )
    if kind is not None and not is_dflash(assistant):
        raise ValueError(
            f"the draft model's generation config has speculation_type={kind!r}, but {type(assistant).__name__} is not "
            "a DFlash drafter: set it to None there, or give another draft model."
        )


def check_cache(past: Any, made_by_generate: bool = False) -> None:
    """Check the cache that a call gives.

    Args:
        past: the cache, or None.
        made_by_generate: `generate()` made it, because of `cache_implementation`. It is empty and not used.

    Raises:
        ValueError: it is not a plain DynamicCache.
    """
    if past is None or made_by_generate or (type(past) is DynamicCache and not _changes_storage(past)):
        return
    if not isinstance(past, Cache):
        kind = type(past).__name__
        raise ValueError(
            f"past_key_values (cache) must be a DynamicCache, not a {kind}; without it, specnb uses its own."
        )
    what = "DynamicCache(offloading=True)" if type(past) is DynamicCache else type(past).__name__
    raise ValueError(
        f"the cache given is a {what}, which specnb cannot read or fill: give a DynamicCache, or no cache. "
        f"{_USE_TRANSFORMERS}"
    )


def _changes_storage(past: Cache) -> bool:
    """Whether a cache offloads or quantizes what it stores, or has layers of a fixed size."""
    return bool(getattr(past, "offloading", False)) or any(
        name in type(layer).__name__ for layer in past.layers for name in ("Quantized", "Static")
    )


def check_option_names(model: PreTrainedModel, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown argument whose name is close to a known one, and for unsupported arguments.

    transformers itself rejects the other unknown arguments.
    """
    known = {
        *vars(model.generation_config),
        *signature(type(model).generate).parameters,
        *forward_parameters(type(model)),
    }
    if options.get("custom_generate") is not None:
        raise ValueError(
            "custom_generate= is what specnb.generate itself gives to generate(): leave it out, or call "
            "model.generate(..., custom_generate=specnb.decoder(...)) yourself."
        )
    for name in NEW_PARAMETERS & options.keys():
        if options[name] is not None:
            raise ValueError(
                f"{name}= is an argument of a transformers newer than this specnb: leave it out. {_USE_TRANSFORMERS}"
            )
    for name in peft_adapters.PER_ROW_ARGUMENTS & options.keys():
        peft_adapters.reject_per_row_argument(name)
    for name in options:
        near = [] if name in known else get_close_matches(name, [*known, *BY_NAME], 1, 0.85)
        if near:
            raise ValueError(f"unknown option {name!r}. Did you mean {near[0]!r}?")


def check_handed_on() -> None:
    """Raise ValueError for an argument that transformers' `generate()` keeps from its `custom_generate` callable."""
    given = compat.not_handed_on()
    if not given:
        return
    if callable(end := getattr(given.get("streamer"), "end", None)):
        end()  # a thread that reads from it would wait for ever
    raise ValueError(
        f"{'= and '.join(given)}= given to generate(), which does not hand it on to custom_generate: give it to "
        "specnb.decoder() instead, as well as tokenizer=, assistant_tokenizer= and stop_strings=."
    )


def check_model(model: PreTrainedModel, inputs: Mapping[str, Any]) -> None:
    """Raise ValueError for a model or an input that specnb cannot decode.

    Args:
        inputs: the arguments of `generate()`.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model; specnb decodes decoder-only models (its drafters "
            f"continue the prompt itself). {_USE_TRANSFORMERS}"
        )
    check_eval_mode(model)
    if inputs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds cannot be used: drafters and logits processors need token ids. Give input_ids.")


def check_eval_mode(model: PreTrainedModel) -> None:
    """Raise ValueError for a model in training mode if dropout or gradient checkpointing would be active."""
    if not model.training:
        return
    name = type(model).__name__
    if getattr(model, "is_gradient_checkpointing", False):
        raise ValueError(
            f"{name} is in training mode with gradient checkpointing, where its layers keep no cache: call "
            "model.eval() first."
        )
    random = next((key for key, module in model.named_modules() if module.training and _has_dropout(module)), None)
    if random is not None:
        raise ValueError(
            f"{name} is in training mode, and {random} drops values at random, so no text is the model's own: call "
            "model.eval() first."
        )


def _has_dropout(module: Any) -> bool:
    """Whether a module applies dropout, itself or in its attention."""
    rates = [vars(module).get("p")] if isinstance(module, nn.modules.dropout._DropoutNd) else []
    rates.append(vars(module).get("attention_dropout"))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def check_length(model: PreTrainedModel, rows: Sequence[Row]) -> None:
    """Raise ValueError for a prompt that is longer than the model's learned positions."""
    config, longest = model.config.get_text_config(decoder=True), max(len(row.ids) for row in rows)
    limit = max_positions(config)
    if limit is not None and has_learned_positions(config) and longest > limit:
        raise ValueError(
            f"the prompt has {longest} tokens, but {type(model).__name__} has positions for {limit}: shorten the "
            "prompt."
        )


def check_past(past: Any, rows: Sequence[Row], pads: Sequence[int]) -> None:
    """Check that the prompt continues the text in a filled cache.

    Args:
        past: the cache, or None.
        rows: the prompts.
        pads: padding tokens in front of each row.

    Raises:
        ValueError: the cache has other layers than attention, there are several rows or padding, or no new token.
    """
    if not isinstance(past, Cache):
        return
    held = cached_length(past)
    if not held and not (past.is_initialized and all(past.is_linear if hasattr(past, "is_linear") else ())):
        return
    if not isinstance(past, DynamicCache) or not held:
        raise ValueError(
            f"a filled {type(past).__name__} cannot be continued; give a DynamicCache of attention layers, or no cache "
            "at all."
        )
    if len(rows) > 1:
        raise ValueError("a filled cache can be continued for one prompt at a time only.")
    if pads[0]:
        raise ValueError("a filled cache can be continued for a prompt without padding only.")
    if held >= len(rows[0].ids):
        raise ValueError(
            f"the cache holds {held} tokens but the prompt has {len(rows[0].ids)}: input_ids must be the whole text, "
            "what is cached and at least one new token."
        )


def check_verification(method: Method, sample: bool, processors: Processors) -> None:
    """Raise ValueError for block verification with logits processors that keep state from call to call."""
    if sample and method.options.get("verification") == "block" and processors.stateful:
        raise ValueError(
            "verification='block' looks at all drafted positions before deciding, but "
            f"{', '.join(processors.stateful)} may look at all rows or keep state from call to call; use "
            "verification='token'."
        )


def check_streamer(streamer: Any, rows: Sequence[Row]) -> None:
    """Raise ValueError for a streamer with more than one row."""
    if len(rows) > 1 and streamer is not None:
        raise ValueError(
            f"a streamer shows one row, but there are {len(rows)}; generate the prompts one by one to stream them."
        )


def check_takes_cache(model: PreTrainedModel, past: Cache | None, given: bool) -> None:
    """Raise ValueError for a cache that the call gives to a model that cannot be given one."""
    if given and compat.cache_keyword(parameters := forward_parameters(type(model))) not in parameters:
        raise ValueError(f"the given cache cannot be filled: {type(model).__name__} takes none; leave it out.")
    if past is not None and is_minimax(model):  # generate() makes none for it
        raise ValueError(
            f"the given cache cannot be filled: {type(model).__name__} makes one of its own kind, which does not say "
            "how much it holds; leave it out."
        )


def check_user_cache(
    model: PreTrainedModel, config: GenerationConfig, past: Cache, target: LM, rows: Sequence[Row]
) -> None:
    """Raise ValueError if the cache that the call gives cannot be filled."""
    states = [has_states(layer) for layer in standard_cache_layers(model.config)]
    if any(states) and [has_states(layer) for layer in past.layers] != states:
        raise ValueError(
            f"the given cache has no place for the running states of {type(model).__name__}: make it with "
            "DynamicCache(config=model.config), or leave it out."
        )
    if config.use_cache is False:
        raise ValueError("a cache is given, but use_cache=False: leave the cache out, or give use_cache=True.")
    if not isinstance(target, CachedLM) and (len(rows) > 1 or rows[0].padding):
        raise ValueError(
            f"the given cache cannot be filled: {type(model).__name__} takes one row without padding at a time; leave "
            "the cache out."
        )
