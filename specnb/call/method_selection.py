"""Which method a call means, with which options, and where each of their values comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from transformers import GenerationConfig

from specnb.options import ASKED_BY, BY_NAME, METHODS, Method, options_of, unknown

STANDARD: dict[str, Any] = GenerationConfig._get_default_generation_params()
"""What transformers fills in where neither call nor config says anything."""
DRAFTING = {name for name, option in BY_NAME.items() if option.group == "drafting"}
OF_SPECNB = DRAFTING | ASKED_BY.keys()
"""Options that are specnb's to handle, and not handed on to `generate()`."""
OF_ASSISTANTS = {name for name, info in METHODS.items() if "assistant_model" in info.needs}
OF_DRAFTS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
"""Settings that transformers reads from the draft model's generation config."""


class SelectedMethod(NamedTuple):
    """A call's method with its options; `sources`: where each given value stood ("call", "target", "assistant")."""

    method: Method
    sources: Mapping[str, str]


class Settings(NamedTuple):
    """Drafting options of one place: a generation config's, by name. `where` is its name in messages."""

    source: str
    where: str
    values: Mapping[str, Any]


def method_name(method: Method | str | SelectedMethod | None) -> str | None:
    """The name of a method given in any way."""
    method = method.method if isinstance(method, SelectedMethod) else method
    return method.name if isinstance(method, Method) else method


def settings(called: Mapping[str, Any] | None, target: Any, assistant: Any = None) -> list[Settings]:
    """The generation configs of a call in the order in which they decide: the call's own, the target's, the
    assistant's.

    Only what a config really sets counts: a None is none, and transformers' defaults are filled in per call.
    """
    return [
        Settings("call", "the call's generation config", called or {}),
        Settings("target", "the target's generation config", of_config(target)),
        Settings("assistant", "the draft model's generation config", of_config(assistant, OF_DRAFTS)),
    ]


def of_config(config: Any, names: Any = OF_SPECNB) -> dict[str, Any]:
    """What a generation config sets of these options; a None is no setting."""
    values = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def select_method(
    method: Method | str | None, given: Mapping[str, Any], configs: list[Settings], assistant: str | None
) -> SelectedMethod:
    """The method of a call with all its options.

    Args:
        method: as asked for by name, or ready made.
        given: the call's drafting options, and those that ask for a method (`options.ASKED_BY`).
        configs: the generation configs that fill in what was not given, as of `settings`.
        assistant: the method that the call's assistant model is for; None without one.

    Raises:
        ValueError: the call asks for two methods, lacks what its method needs, or has an option that it does not use.
    """
    asked = {option: name for option, name in ASKED_BY.items() if asks(given.get(option))}
    wanted = [*asked.values(), *([assistant] if assistant else [])]
    name = method_name(method) or next(iter(wanted), None) or _configured(configs)
    if name not in METHODS:
        raise ValueError(unknown("method", str(name), METHODS))
    for key, other in asked.items():
        if other != name:
            raise ValueError(
                f"{key}={given[key]!r} asks for method {other!r}, but the method is {name!r}; give one of them."
            )
    if assistant == "universal" and name == "draft_model":
        raise ValueError(
            "method 'draft_model' needs a draft model with the target's tokenizer, but the two tokenizers differ in what they do; leave "
            "method= out, and universal decoding is used."
        )
    if assistant and name not in (assistant, "universal" if assistant == "draft_model" else assistant):
        raise ValueError(
            f"the draft model (assistant_model=) is for method {assistant!r}, but the method asked for is {name!r}: choose {assistant!r}, or leave the draft model out."
        )
    if name in OF_ASSISTANTS and not assistant:
        raise ValueError(f"method {name!r} needs assistant_model=: {METHODS[name].help}.")
    options = {key: value for key, value in given.items() if key in DRAFTING and value is not None}
    if isinstance(method, Method):
        if options or asked:
            raise ValueError(
                f"{', '.join({**options, **asked})} given twice: put options into the Method or into the call, not both."
            )
        options = dict(method.given)
    if name == "plain" and options:
        if method is not None:
            raise ValueError(
                f"method 'plain' drafts nothing, so {', '.join(options)} cannot apply: leave it out, or choose another method."
            )
        raise ValueError(
            f"{', '.join(options)} given, but nothing drafts: give method=, assistant_model= or one of {', '.join(ASKED_BY)}."
        )
    if name == "prompt_lookup":
        options = _lookup_length(options, given)
    sources = dict.fromkeys(options, "call")
    own = [option.name for option in options_of(name) if option.group == "drafting"]
    for source, where, values in configs:
        for option in own:
            value = values.get(option)
            if name == "prompt_lookup" and option == "num_assistant_tokens":
                value = values.get("prompt_lookup_num_tokens", value)
            follows = option == "num_assistant_tokens_schedule" and source == "assistant"
            if follows and sources.get("num_assistant_tokens") == "call":
                continue  # it goes with a config's length, and does not change one that the call gives
            if option not in options and value is not None:
                options[option], sources[option] = _checked(option, value, where), source
    return SelectedMethod(Method(name, **options), sources)


def _checked(option: str, value: Any, where: str) -> Any:
    """A config's value, checked; ValueError saying where it stands."""
    try:
        return BY_NAME[option].check(value)
    except ValueError as error:
        raise ValueError(f"in {where}: {error}") from None


def _configured(configs: list[Settings]) -> str:
    """The method that a generation config asks for."""
    for _, _, values in configs:
        for option, name in ASKED_BY.items():
            if asks(values.get(option)):
                return name
    return "plain"


def asks(value: Any) -> bool:
    """Whether an option that asks for a method was set; 0 was, and is for the method to refuse."""
    return value is not None and value is not False


def _lookup_length(options: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """transformers has a name of its own for prompt lookup's draft length."""
    length = given.get("prompt_lookup_num_tokens")
    if length is None:
        return options
    length = replace(BY_NAME["num_assistant_tokens"], name="prompt_lookup_num_tokens").check(length)
    if options.get("num_assistant_tokens", length) != length:
        raise ValueError("prompt_lookup_num_tokens and num_assistant_tokens differ; they are one option, give one.")
    return {"num_assistant_tokens": length, **options}


def override(bound: Mapping[str, Any], called: Mapping[str, Any]) -> dict[str, Any]:
    """Bound options with those of a call, which decide; the two names of a draft length are one option."""
    called = {name: value for name, value in called.items() if value is not None}
    one, other = "num_assistant_tokens", "prompt_lookup_num_tokens"
    if other in bound and one in called and other not in called:
        called[other] = called.pop(one)  # the bound name asks for the method, too
    left_out = {one, other} if {one, other} & called.keys() else set()
    return {name: value for name, value in bound.items() if name not in left_out} | called


def sources_in_effect(
    effective: Mapping[str, Any], drafting: Mapping[str, str], called: Mapping[str, Any] | None, target: Any
) -> dict[str, str]:
    """Where each option in effect comes from: "call", "target", "assistant" or "default".

    `called` is what the call sets beside drafting options; None where `generate()` has merged it with the target's
    config: there, what is neither that one's nor transformers' default is the call's.
    """

    def source(name: str) -> str:
        if name in DRAFTING:
            return drafting.get(name, "default")
        names = ("max_new_tokens", "max_length") if name == "max_new_tokens" else (name,)
        own = [value for value in (getattr(target, one, None) for one in names) if value is not None]
        if called is not None:
            return "call" if any(called.get(one) is not None for one in names) else "target" if own else "default"
        if effective[name] in own:
            return "target"
        standard = STANDARD["max_length"] if name == "max_new_tokens" else STANDARD.get(name)
        return "default" if effective[name] == standard and not own else "call"

    return {name: source(name) for name in effective}
