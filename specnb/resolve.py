"""Which method a call means, and with which options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import GenerationConfig

from specnb.options import ASKED_BY, BY_NAME, METHODS, Method, default, options_of, unknown

STANDARD: dict[str, Any] = GenerationConfig._get_default_generation_params()
"""What transformers fills in where neither call nor config says anything."""
DRAFTING = {name for name, option in BY_NAME.items() if option.group == "drafting"}
OF_SPECNB = DRAFTING | ASKED_BY.keys()
"""Options that are specnb's to handle, and not handed on to `generate()`."""
OF_ASSISTANTS = {name for name, info in METHODS.items() if "assistant_model" in info.needs}


def method_name(method: Method | str | None) -> str | None:
    """The name of a method given either way."""
    return method.name if isinstance(method, Method) else method


def resolve(
    method: Method | str | None, given: Mapping[str, Any], config: GenerationConfig, assistant: str | None
) -> Method:
    """The method of a call with all its options.

    Args:
        method: as asked for by name, or ready made.
        given: the call's drafting options, and those that ask for a method (`options.ASKED_BY`).
        config: a generation config that fills in what was not given.
        assistant: the method that the call's assistant model is for; None without one.

    Raises:
        ValueError: the call asks for two methods, lacks what its method needs, or has an option that it does not use.
    """
    asked = {option: name for option, name in ASKED_BY.items() if asks(given.get(option))}
    wanted = [*asked.values(), *([assistant] if assistant else [])]
    name = method_name(method) or next(iter(wanted), None) or _configured(config)
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
        return method
    if name == "plain" and options:
        if method is not None:
            raise ValueError(
                f"method 'plain' drafts nothing, so {', '.join(options)} cannot apply: leave it out, or choose another method."
            )
        raise ValueError(
            f"{', '.join(options)} given, but nothing drafts: give method=, assistant_model= or one of {', '.join(ASKED_BY)}."
        )
    if name == "prompt_lookup":
        options = _lookup_length(options, given, config)
    for option in options_of(name):
        value = getattr(config, option.name, None)
        if default(option.name, name) is None and value == STANDARD.get(option.name):
            continue  # transformers' default, not a wish; ours depends on the model
        if option.group == "drafting" and option.name not in options and value is not None:
            options[option.name] = value
    return Method(name, **options)


def _configured(config: GenerationConfig) -> str:
    """The method that a generation config asks for."""
    return next((name for option, name in ASKED_BY.items() if asks(getattr(config, option, None))), "plain")


def asks(value: Any) -> bool:
    """Whether an option that asks for a method was set; 0 was, and is for the method to refuse."""
    return value is not None and value is not False


def _lookup_length(options: dict[str, Any], given: Mapping[str, Any], config: GenerationConfig) -> dict[str, Any]:
    """transformers has a name of its own for prompt lookup's draft length."""
    length = given.get("prompt_lookup_num_tokens")
    if length is None:
        length = config.prompt_lookup_num_tokens
    else:
        length = replace(BY_NAME["num_assistant_tokens"], name="prompt_lookup_num_tokens").check(length)
        if options.get("num_assistant_tokens", length) != length:
            raise ValueError("prompt_lookup_num_tokens and num_assistant_tokens differ; they are one option, give one.")
    return options if length is None else {"num_assistant_tokens": length, **options}
