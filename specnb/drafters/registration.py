"""Registers drafters of users and of installed packages as methods."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from transformers import GenerationConfig

from specnb.drafters.registered import DrafterContext
from specnb.options import (
    ASKED_BY,
    BY_NAME,
    METHODS,
    OPTIONS_OF_REGISTERED,
    REGISTRY,
    MethodInfo,
    Option,
    unknown,
)

_TAKEN = {
    "arguments of generate(), decoder() and compare()": (
        "model inputs method assistant_model tokenizer assistant_tokenizer streamer on_step cancel probabilities "
        "pair_or_model prompts runs repeats warmup chat system transformers on_run memory prediction"
    ),
    "arguments of transformers' generate(), and inputs of models": (
        "input_ids attention_mask position_ids token_type_ids pixel_values inputs_embeds cache past_key_values "
        "generation_config logits_processor stopping_criteria prefix_allowed_tokens_fn synced_gpus custom_generate "
        "negative_prompt_ids negative_prompt_attention_mask"
    ),
    "arguments of the magics": "output quiet expand help methods vary no_memory interactive",
}
RESERVED = frozenset(name for names in _TAKEN.values() for name in names.split())
"""Names that an option of a drafter cannot have."""
_TYPES = (int, float, bool, str)


def register_drafter(
    name: str,
    factory: Callable[[DrafterContext], Any],
    *,
    title: str | None = None,
    help: str | None = None,
    options: Iterable[Option] = (),
    defaults: Mapping[str, Any] | None = None,
    source: str = "",
) -> None:
    """Register a drafter of your own. It is then a method like specnb's own, wherever a method can be named.

    `generate(method=name, ...)`, `Method(name, ...)`, `%%specgen --method name`, the panel and comparisons take it,
    with every schedule, every verification, several rows, and a trace. Registering a name again replaces it, so a
    notebook's cell can run twice. An installed package registers its drafters in a function that its entry point of the
    group `specnb.drafters` names.

    The text stays the target's own: what a drafter gives is checked, and a fault ends the run with a `DrafterError`
    that names the drafter.

    Args:
        name: the name of the method, a Python identifier.
        factory: called once per call of `generate`, before the first token, with a `DrafterContext`. It returns an
            object with `propose(rows, max_draft_tokens)`, which is called in every step with the rows that want a draft
            (`DraftRow`) and the most tokens that each may get, and returns a list with a `Draft` for each row, as long
            as wanted or shorter. A draft has `tokens`; in addition `probs` if each token was drawn from a distribution
            when sampling, and nothing held back. Without `probs` the text is right however the tokens were found.
        title: the name for people.
        help: what drafts, in one line.
        options: options that only this drafter has. Their values are in `DrafterContext.options`.
        defaults: defaults of `num_assistant_tokens` and the other options of all drafters, if others suit this one.
        source: the paper or implementation that it follows.

    Raises:
        ValueError: the name is one of specnb's methods, or an option is not valid or has a name that is taken.
    """
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} cannot be the name of a drafter: it must be a Python identifier, such as 'bigram'.")
    if name in METHODS:
        raise ValueError(f"{name!r} is one of specnb's own methods, which stay as they are: take another name.")
    if not callable(factory):
        raise ValueError(
            f"drafter {name!r}: the factory is a {type(factory).__name__}; it must be a function or a class that takes "
            "the context and makes the drafter."
        )
    common = dict(defaults or {})
    for key in common:
        if key not in OPTIONS_OF_REGISTERED:
            raise ValueError(f"drafter {name!r}, defaults: " + unknown("option", key, OPTIONS_OF_REGISTERED))
    own = [_checked_option(name, option) for option in options]
    names = [option.name for option in own]
    if len(set(names)) < len(names):
        raise ValueError(f"drafter {name!r}: two of its options have the same name ({', '.join(sorted(names))}).")
    REGISTRY.add(
        MethodInfo(
            name=name,
            title=title or name.replace("_", " ").capitalize(),
            help=" ".join((help or _first_line(factory)).split()).rstrip("."),
            source=source,
            defaults={key: BY_NAME[key].check(value) for key, value in common.items()},
            options=tuple(own),
            factory=factory,
        )
    )


def unregister_drafter(name: str) -> None:
    """Remove a registered drafter. Runs that use it go on.

    Args:
        name: the name under which it was registered.

    Raises:
        ValueError: there is no registered drafter of that name.
    """
    if name not in REGISTRY.infos:
        own = " It is one of specnb's own methods, which stay." if name in METHODS else ""
        raise ValueError(unknown("registered drafter", str(name), REGISTRY.infos).replace("Allowed: .", "") + own)
    REGISTRY.remove(name)


def _checked_option(drafter: str, option: Any) -> Option:
    """An option of a drafter, checked.

    Raises:
        ValueError: it is not an `Option`, its name is taken, or its type or default is not valid.
    """
    if not isinstance(option, Option):
        raise ValueError(f"drafter {drafter!r}: an option is {option!r}; it must be a specnb.Option.")
    name, where = option.name, f"drafter {drafter!r}, option {option.name!r}"
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise ValueError(f"{where}: its name must be a Python identifier, since it is an argument of generate().")
    if name in BY_NAME or name in ASKED_BY or name in RESERVED or hasattr(GenerationConfig(), name):
        raise ValueError(f"{where}: this name is an argument or an option already: take another name.")
    if option.type not in _TYPES or (option.multiple and option.type is not str):
        raise ValueError(f"{where}: its type must be int, float, bool or str, and only str can have several values.")
    for info in REGISTRY.infos.values():
        for other in info.options if info.name != drafter else ():
            if other.name == name and (other.type, other.multiple) != (option.type, option.multiple):
                raise ValueError(
                    f"{where}: drafter {info.name!r} has an option of this name and of another type "
                    f"({other.type.__name__}), and one flag cannot be both: take another name."
                )
    try:
        value = option.check(option.default)
    except ValueError as error:
        raise ValueError(f"{where}: its default is not valid: {error}") from None
    return replace(option, default=value, methods=(drafter,), group="drafting")


def _first_line(factory: Any) -> str:
    return (inspect.getdoc(factory) or "").partition("\n")[0] or "a registered drafter"
