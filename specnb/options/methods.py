"""The methods, which options each of them has, and `Method`: a method with checked options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from specnb.options.option import Option, unknown
from specnb.options.registered import REGISTRY
from specnb.options.table import BY_NAME, LOOKUPS, MODEL_DRAFTERS, NOT_OF_HYBRIDS, OPTIONS, OPTIONS_OF_REGISTERED


@dataclass(frozen=True)
class MethodInfo:
    """The description of a method.

    Attributes:
        name: the name that `method=` takes.
        title: the name for people.
        help: what drafts, in one line.
        source: the paper or implementation that the method follows.
        needs: arguments that must be given beside the target.
        defaults: options whose default differs from `Option.default` in this method.
        options: of a registered drafter, the options that only it has.
        factory: of a registered drafter, the function that makes it.
        parts: of a hybrid, the lookup and the model drafter.
    """

    name: str
    title: str
    help: str
    source: str
    needs: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[Option, ...] = ()
    factory: Callable[[Any], Any] | None = None
    parts: tuple[str, str] | None = None


_METHODS = (
    MethodInfo(
        name="plain",
        title="Plain decoding",
        help="the target alone, one token per pass",
        source="transformers' greedy search and sampling",
    ),
    MethodInfo(
        name="draft_model",
        title="Draft model",
        help="a smaller model with the same tokenizer drafts",
        source="Leviathan et al. 2211.17192; Chen et al. 2302.01318",
        needs=("assistant_model",),
    ),
    MethodInfo(
        name="prompt_lookup",
        title="Prompt lookup",
        help="drafts what followed the same words earlier in prompt and output",
        source="Saxena 2023, prompt lookup decoding",
        defaults={"num_assistant_tokens": 10},
    ),
    MethodInfo(
        name="suffix",
        title="Suffix decoding",
        help="drafts what followed the same words in prompt, output and past outputs, as far as it is likely",
        source="Oliaro et al. 2411.04975",
        defaults={"num_assistant_tokens": 10},
    ),
    MethodInfo(
        name="early_exit",
        title="Early exit",
        help="the target's own first layers draft, and what they computed is reused",
        source="LayerSkip, Elhoushi et al. 2404.16710",
        needs=("assistant_early_exit",),
    ),
    MethodInfo(
        name="mtp_layers",
        title="MTP layers",
        help="prediction layers inside the target's checkpoint draft, one token each",
        source="DeepSeek-V3 2412.19437; GLM-4.5",
        needs=("use_mtp",),
        defaults={"num_assistant_tokens": None},
    ),
    MethodInfo(
        name="eagle3",
        title="EAGLE-3",
        help="a small layer trained for the target drafts from the states of three of its layers",
        source="EAGLE-3, Li et al. 2503.01840; EAGLE 3.1, 2605.09992",
        needs=("assistant_model",),
    ),
    MethodInfo(
        name="dflash",
        title="DFlash",
        help="a block-diffusion drafter made for the target drafts a whole block in one pass",
        source="DFlash, Chen et al. 2602.06036; DFlash 2, Inco AI 2026",
        needs=("assistant_model",),
        defaults={"num_assistant_tokens": None},
    ),
    MethodInfo(
        name="gemma4_assistant",
        title="MTP drafter (Gemma 4)",
        help="a small drafter that reads the target's keys, values and last state",
        source="Gemma 4 multi-token prediction guide, Google 2026",
        needs=("assistant_model",),
    ),
    MethodInfo(
        name="universal",
        title="Universal",
        help="any small model drafts, whatever its tokenizer",
        source="Timor et al. 2502.05202",
        needs=("assistant_model", "assistant_tokenizer"),
    ),
)
METHODS: dict[str, MethodInfo] = {info.name: info for info in _METHODS}
"""specnb's own methods by name, in the order in which they are listed."""

ASKED_BY = {
    "prompt_lookup_num_tokens": "prompt_lookup",
    "assistant_early_exit": "early_exit",
    "use_mtp": "mtp_layers",
    "speculation_type": "dflash",
}
"""Options of transformers' `generate()` that ask for a method."""

_SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def method_names() -> list[str]:
    """The names of all methods: specnb's own, then the registered drafters."""
    return [*METHODS, *REGISTRY.infos]


def hybrid_names() -> list[str]:
    """The names of all hybrids: a lookup with a model drafter."""
    return [f"{lookup}+{model}" for lookup in LOOKUPS for model in MODEL_DRAFTERS]


def selectable_methods() -> list[str]:
    """Every name that `method=` takes: all methods, then all hybrids."""
    return [*method_names(), *hybrid_names()]


def parts_of(name: str) -> tuple[str, ...]:
    """The methods that draft in a method: itself, or the two parts of a hybrid."""
    return method_info(name).parts or (name,)


def method_info(name: str) -> MethodInfo:
    """The description of a method, specnb's own or a registered drafter.

    Raises:
        ValueError: there is no such method.
    """
    if isinstance(name, str) and "+" in name:
        return _hybrid_info(name)
    info = METHODS.get(name) or REGISTRY.infos.get(name)
    if info is None:
        failed = "".join(f" Drafter {key!r} could not be loaded from {why}." for key, why in REGISTRY.failed.items())
        raise ValueError(unknown("method", str(name), method_names()) + failed)
    return info


@cache
def _hybrid_info(name: str) -> MethodInfo:
    """The description of a hybrid, such as "suffix+eagle3"."""
    lookup, _, model = name.partition("+")
    if lookup not in LOOKUPS or model not in MODEL_DRAFTERS:
        raise ValueError(
            f"unknown method {name!r}: a hybrid is LOOKUP+MODEL, with LOOKUP one of {', '.join(LOOKUPS)} and MODEL one "
            f"of {', '.join(MODEL_DRAFTERS)}."
        )
    first, second = METHODS[lookup], METHODS[model]
    return MethodInfo(
        name=name,
        title=f"{first.title} + {second.title.lower()}",
        help=f"{first.help}; where fewer tokens are expected of that, {second.help}",
        source=f"{first.source}; {second.source}",
        needs=second.needs,
        defaults={**first.defaults, "num_assistant_tokens": default("num_assistant_tokens", model)},
        parts=(lookup, model),
    )


def options_of(method: str) -> list[Option]:
    """The options that apply to a method: those of drafting, with a registered drafter's own, then the others.

    A hybrid has those of both parts, except the lossy ensemble.

    Raises:
        ValueError: there is no such method.
    """
    info = method_info(method)
    if info.parts is not None:
        return [o for o in OPTIONS if o.name not in NOT_OF_HYBRIDS and (not o.methods or {*info.parts} & {*o.methods})]
    registered = OPTIONS_OF_REGISTERED if info.factory is not None else ()
    common = [o for o in OPTIONS if not o.methods or method in o.methods or o.name in registered]
    drafting = [option for option in common if option.group == "drafting"]
    return [*drafting, *info.options, *(option for option in common if option.group != "drafting")]


def drafting_options(method: str) -> dict[str, Option]:
    """The drafting options of a method by name, those that a `Method` takes."""
    return {option.name: option for option in options_of(method) if option.group == "drafting"}


def all_options() -> list[Option]:
    """Every option, those of registered drafters after specnb's own ones for drafting.

    Where several registered drafters have an option of one name, it is listed once, with the bounds that they share.
    """
    own: dict[str, Option] = {}
    for info in REGISTRY.infos.values():
        for option in info.options:
            own[option.name] = _joined(own[option.name], option) if option.name in own else option
    drafting = [option for option in OPTIONS if option.group == "drafting"]
    return [*drafting, *own.values(), *(option for option in OPTIONS if option.group != "drafting")]


def _joined(one: Option, other: Option) -> Option:
    """An option of several registered drafters. Bounds that differ are left out; `Method` checks those of its own."""
    names = ("low", "high", "low_open", "high_open", "choices")
    same = all(getattr(one, name) == getattr(other, name) for name in names)
    joined = replace(one, methods=(*one.methods, *other.methods))
    return joined if same else replace(joined, low=None, high=None, low_open=False, high_open=False, choices=())


def methods_with(option: Option) -> list[str]:
    """The names of the methods that have an option."""
    registered = REGISTRY.infos if option.name in OPTIONS_OF_REGISTERED else ()
    return [*option.methods, *registered] if option.methods else method_names()


def _not_an_option(option: str, method: str, known: Iterable[str]) -> str:
    """The error message for a drafting option that a method does not have."""
    found = next((one for one in all_options() if one.name == option), None)
    if found is None:
        return f"method {method!r}: {unknown('option', option, known)}"
    if found.group != "drafting":
        return f"{option} is not an option of a method: give it to generate()."
    return (
        f"method {method!r} has no option {option}; these have it: {', '.join(methods_with(found))}. Leave it out, or "
        "choose one of them."
    )


def default(option: str, method: str) -> Any:
    """The default of an option for a method.

    Args:
        option: the name of the option.
        method: the name of the method.

    Returns:
        The method's own default if it has one, else `Option.default`.
    """
    info = method_info(method)
    own = next((one for one in info.options if one.name == option), None)
    return info.defaults.get(option, (own or BY_NAME[option]).default)


def greedy_at_zero(options: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `temperature=0`, which many users write for greedy decoding, into `do_sample=False`.

    Args:
        options: options of `generate()`.

    Returns:
        The options, without those of sampling if the temperature is 0.
    """
    temperature = options.get("temperature")
    if temperature is None or temperature != 0:
        return dict(options)
    return {name: value for name, value in options.items() if name not in _SAMPLING_OPTIONS} | {"do_sample": False}


class Method:
    """A method with its drafting options: `Method("prompt_lookup", num_assistant_tokens=8)`.

    Args:
        name: the method's name: one of specnb's own, or that of a registered drafter.
        options: drafting options of the method.

    Attributes:
        name: the method's name.
        given: the options that were given, checked.
        options: all drafting options of the method, with defaults for those that were not given.

    Raises:
        ValueError: the method does not exist, an option does not belong to it, a value is out of bounds, or an option
            that the method needs is missing.
    """

    def __init__(self, name: str, **options: Any) -> None:
        info, own = method_info(name), drafting_options(name)
        for key in options:
            if key not in own:
                raise ValueError(_not_an_option(key, name, own))
        for need in info.needs:
            if need in own and options.get(need) is None:
                raise ValueError(f"method {name!r} needs {need}=: {own[need].help}.")
        self.name = name
        self.given = {key: own[key].check(value) for key, value in options.items()}
        self.options: dict[str, Any] = {key: self.given.get(key, default(key, name)) for key in own}

    def __repr__(self) -> str:
        return f"Method({', '.join([repr(self.name), *(f'{k}={v!r}' for k, v in self.given.items())])})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Method) and (self.name, self.options) == (other.name, other.options)

    __hash__ = None  # type: ignore[assignment]
