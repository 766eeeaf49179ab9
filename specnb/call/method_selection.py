"""Selects the method of a call and its options, and records where each value comes from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple

from transformers import GenerationConfig

from specnb import compat
from specnb.options import (
    ASKED_BY,
    BY_NAME,
    LOOKUPS,
    Method,
    Option,
    all_options,
    drafting_options,
    method_info,
    parts_of,
    selectable_methods,
)

TRANSFORMERS_DEFAULTS: dict[str, Any] = compat.default_generation_params()
"""The values that transformers uses where neither the call nor a config sets one."""
SPECULATION_TYPE = "dflash"
"""The only value of transformers' `speculation_type`."""
ASSISTANT_CONFIG_OPTIONS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
"""Options that are read from the draft model's generation config, as in transformers."""


def all_drafting_options() -> set[str]:
    """The names of all drafting options, those of registered drafters included."""
    return {option.name for option in all_options() if option.group == "drafting"}


def specnb_options() -> set[str]:
    """The names of the options that specnb handles itself; they are not passed on to `generate()`."""
    return all_drafting_options() | ASKED_BY.keys()


def takes_assistant(method: str | None) -> bool:
    """Whether a method is one for an assistant model; False for a name that no method has."""
    return method in selectable_methods() and "assistant_model" in method_info(str(method)).needs


def methods_for(assistant: str, asked: str) -> list[str]:
    """The methods nearest to the one asked for that use an assistant model.

    Args:
        assistant: the method that the assistant model is for.
        asked: a method that does not use it.
    """
    lookup, *model = parts_of(asked)
    if lookup not in LOOKUPS:
        return [assistant]
    return [f"{lookup}+{assistant}"] if model else [f"{lookup}+{assistant}", assistant]


class SelectedMethod(NamedTuple):
    """A call's method with its options.

    Args:
        sources: where each given option comes from: "call", "target" or "assistant".
    """

    method: Method
    sources: Mapping[str, str]


class ConfigOptions(NamedTuple):
    """The drafting options that a generation config sets.

    Args:
        source: "call", "target" or "assistant".
        where: the config's name in messages.
        values: by option name.
    """

    source: str
    where: str
    values: Mapping[str, Any]


def method_name(method: Method | str | SelectedMethod | None) -> str | None:
    """The name of a method; None without one."""
    method = method.method if isinstance(method, SelectedMethod) else method
    return method.name if isinstance(method, Method) else method


def configs_in_order(called: Mapping[str, Any] | None, target: Any, assistant: Any = None) -> list[ConfigOptions]:
    """The drafting options of a call's generation configs, in order of precedence.

    Args:
        called: what the call's own config sets; it comes first.
        target: the target's generation config.
        assistant: the draft model's generation config.
    """
    return [
        ConfigOptions("call", "the call's generation config", called or {}),
        ConfigOptions("target", "the target's generation config", options_in_config(target)),
        ConfigOptions(
            "assistant", "the draft model's generation config", options_in_config(assistant, ASSISTANT_CONFIG_OPTIONS)
        ),
    ]


def options_in_config(config: Any, names: Collection[str] | None = None) -> dict[str, Any]:
    """The options among `names` (all that specnb handles) that a generation config sets; None counts as not set."""
    values = {name: getattr(config, name, None) for name in (specnb_options() if names is None else names)}
    return {name: value for name, value in values.items() if value is not None}


def select_method(
    method: Method | str | None, given: Mapping[str, Any], configs: list[ConfigOptions], assistant: str | None
) -> SelectedMethod:
    """Select the method of a call with all its options.

    Args:
        method: a name or a `Method`; None selects by the options and the assistant model.
        given: the call's drafting options, and options that select a method (`options.ASKED_BY`).
        configs: the generation configs for options that are not given, from `configs_in_order`.
        assistant: the method that the call's assistant model is for; None without an assistant.

    Raises:
        ValueError: the call selects two methods, lacks what its method needs, or has an option that it does not use.
    """
    for where, values in (("", given), *((f"in {where}: ", values) for _, where, values in configs)):
        if not isinstance(use_mtp := values.get("use_mtp"), bool | None):
            raise ValueError(f"{where}use_mtp={use_mtp!r} is not valid: it must be True, False or None.")
    requested = {option: name for option, name in ASKED_BY.items() if is_requested(given.get(option))}
    wanted = [*requested.values(), *([assistant] if assistant else [])]
    name = method_name(method) or next(iter(wanted), None) or _method_from_configs(configs)
    info, own = method_info(name), drafting_options(name)
    _check_speculation_type([ConfigOptions("call", "the call", given), *configs], assistant)
    model = parts_of(name)[-1]  # of a hybrid, its model drafter
    for key, other in requested.items():
        if other != model:
            raise ValueError(
                f"{key}={given[key]!r} asks for method {other!r}, but the method is {name!r}; give one of them."
            )
    if assistant == "universal" and model == "draft_model":
        raise ValueError(
            "method 'draft_model' needs a draft model with the target's tokenizer, but the two tokenizers differ in "
            "what they do; leave method= out, and universal decoding is used."
        )
    if assistant and model not in (assistant, "universal" if assistant == "draft_model" else assistant):
        raise ValueError(
            f"the draft model (assistant_model=) is for method {assistant!r}, but the method asked for is {name!r}: "
            f"choose {' or '.join(map(repr, methods_for(assistant, name)))}, or leave the draft model out."
        )
    if "assistant_model" in info.needs and not assistant:
        raise ValueError(f"method {name!r} needs assistant_model=: {info.help}.")
    drafting = all_drafting_options()
    options = {key: value for key, value in given.items() if key in drafting and value is not None}
    if isinstance(method, Method):
        if options or requested:
            raise ValueError(
                f"{', '.join({**options, **requested})} given twice: put options into the Method or into the call, not "
                "both."
            )
        options = dict(method.given)
    if name == "plain" and options:
        if method is not None:
            raise ValueError(
                f"method 'plain' drafts nothing, so {', '.join(options)} cannot apply: leave it out, or choose another "
                "method."
            )
        raise ValueError(
            f"{', '.join(options)} given, but nothing drafts: give method=, assistant_model= or one of "
            f"{', '.join(ASKED_BY)}."
        )
    if name == "prompt_lookup":
        options = _with_lookup_length(options, given)
    sources = dict.fromkeys(options, "call")
    for source, where, values in configs:
        for option in own:
            value = values.get(option)
            if name == "prompt_lookup" and option == "num_assistant_tokens":
                value = values.get("prompt_lookup_num_tokens", value)
            assistant_schedule = option == "num_assistant_tokens_schedule" and source == "assistant"
            if assistant_schedule and sources.get("num_assistant_tokens") == "call":
                continue  # the draft model's schedule belongs to a config's length, not to the call's
            if option not in options and value is not None:
                options[option], sources[option] = _check_config_value(own[option], value, where), source
    return SelectedMethod(Method(name, **options), sources)


def check_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, specnb's own checked. Raises ValueError for a wrong value.

    What only a registered drafter has is checked when the method is known.
    """
    kind = options.get("speculation_type")
    if kind not in (None, SPECULATION_TYPE):
        raise ValueError(f"speculation_type={kind!r} is not known: give {SPECULATION_TYPE!r}, or leave it out.")
    return {name: BY_NAME[name].check(value) if name in BY_NAME else value for name, value in options.items()}


def _check_config_value(option: Option, value: Any, where: str) -> Any:
    """A config's value, checked; the message of a ValueError names the config."""
    try:
        return option.check(value)
    except ValueError as error:
        raise ValueError(f"in {where}: {error}") from None


def _method_from_configs(configs: list[ConfigOptions]) -> str:
    """The method that a generation config selects.

    Where the target's config names a method that needs a draft model, it says what draft models are for it, as in
    transformers: without one, it selects nothing.
    """
    for source, _, values in configs:
        for option, name in ASKED_BY.items():
            if is_requested(values.get(option)) and (source == "call" or not takes_assistant(name)):
                return name
    return "plain"


def _check_speculation_type(configs: list[ConfigOptions], assistant: str | None) -> None:
    """Raise ValueError if the call or a config asks for an unknown drafter, or for one that the draft model is not."""
    for _, where, values in configs:
        kind = values.get("speculation_type")
        if kind not in (None, SPECULATION_TYPE):
            raise ValueError(
                f"{where} has speculation_type={kind!r}: drafters of that type are not built here. Give "
                f"{SPECULATION_TYPE!r}, or leave it out."
            )
        if kind is not None and assistant not in (None, ASKED_BY["speculation_type"]):
            raise ValueError(
                f"{where} has speculation_type={kind!r}, but the draft model is for method {assistant!r}: give a "
                "DFlash drafter, or leave speculation_type out there."
            )


def is_requested(value: Any) -> bool:
    """Whether an option that selects a method is set. 0 counts as set; the method rejects it."""
    return value is not None and value is not False


def _with_lookup_length(options: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options with transformers' own name for the draft length of prompt lookup, `prompt_lookup_num_tokens`."""
    length = given.get("prompt_lookup_num_tokens")
    if length is None:
        return options
    length = replace(BY_NAME["num_assistant_tokens"], name="prompt_lookup_num_tokens").check(length)
    if options.get("num_assistant_tokens", length) != length:
        raise ValueError("prompt_lookup_num_tokens and num_assistant_tokens differ; they are one option, give one.")
    return {"num_assistant_tokens": length, **options}


def merge_options(bound: Mapping[str, Any], called: Mapping[str, Any]) -> dict[str, Any]:
    """The bound options, overridden by those of a call.

    `num_assistant_tokens` and `prompt_lookup_num_tokens` are two names of one option.
    """
    called = {name: value for name, value in called.items() if value is not None}
    one, other = "num_assistant_tokens", "prompt_lookup_num_tokens"
    if other in bound and one in called and other not in called:
        called[other] = called.pop(one)  # the bound name also selects the method
    left_out = {one, other} if {one, other} & called.keys() else set()
    return {name: value for name, value in bound.items() if name not in left_out} | called


def option_sources_in_effect(
    effective: Mapping[str, Any], drafting: Mapping[str, str], called: Mapping[str, Any] | None, target: Any
) -> dict[str, str]:
    """Where each option in effect comes from: "call", "target", "assistant" or "default".

    Args:
        effective: the options in effect.
        drafting: the sources of the drafting options (`SelectedMethod.sources`).
        called: what the call sets in addition to drafting options. None if only the config that `generate()` merged is
            known: a value there that is neither the target's nor transformers' default comes from the call.
        target: the target's generation config.
    """
    drafting_names = all_drafting_options()

    def source(name: str) -> str:
        if name in drafting_names:
            return drafting.get(name, "default")
        names = ("max_new_tokens", "max_length") if name == "max_new_tokens" else (name,)
        own = [value for value in (getattr(target, one, None) for one in names) if value is not None]
        if called is not None:
            return "call" if any(called.get(one) is not None for one in names) else "target" if own else "default"
        if effective[name] in own:
            return "target"
        standard = TRANSFORMERS_DEFAULTS["max_length"] if name == "max_new_tokens" else TRANSFORMERS_DEFAULTS.get(name)
        return "default" if effective[name] == standard and not own else "call"

    return {name: source(name) for name in effective}


def effective_options(config: GenerationConfig, max_new_tokens: int) -> dict[str, Any]:
    """The length and sampling options that a generation ran with."""
    names = [name for name, option in BY_NAME.items() if option.group == "sampling" and name != "seed"]
    if not config.do_sample:
        names = ["do_sample", "repetition_penalty", "no_repeat_ngram_size"]
    values = {name: getattr(config, name, None) for name in names} | {"do_sample": bool(config.do_sample)}
    return {"max_new_tokens": max_new_tokens} | {name: value for name, value in values.items() if value is not None}


def call_signature(function: Callable[..., Any]) -> Signature:
    """The signature of a `custom_generate` method that names the options specnb handles.

    `generate()` passes the options that a callable's signature names on unchanged. So the call's drafting options
    arrive separately from those of the generation configs, which it merges.
    """
    return _signature_with(function, frozenset(specnb_options()))


@cache
def _signature_with(function: Callable[..., Any], names: frozenset[str]) -> Signature:
    *first, rest = list(signature(function).parameters.values())[1:]
    named = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in sorted(names)]
    return Signature([*first, *named, rest])
