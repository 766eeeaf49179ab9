"""The methods, which options each of them has, and `Method`: a method with checked options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specnb.options.option import Option, unknown
from specnb.options.table import BY_NAME, OPTIONS


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
    """

    name: str
    title: str
    help: str
    source: str
    needs: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


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
        help="copies what followed the same words earlier in prompt and output",
        source="Saxena 2023, prompt lookup decoding",
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
"""The methods by name, in the order in which they are listed."""

ASKED_BY = {
    "prompt_lookup_num_tokens": "prompt_lookup",
    "assistant_early_exit": "early_exit",
    "use_mtp": "mtp_layers",
    "speculation_type": "dflash",
}
"""Options of transformers' `generate()` that ask for a method."""

_SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def options_of(method: str) -> list[Option]:
    """The options that apply to a method, in the order of `OPTIONS`."""
    return [option for option in OPTIONS if not option.methods or method in option.methods]


def default(option: str, method: str) -> Any:
    """The default of an option for a method.

    Args:
        option: the name of the option.
        method: the name of the method.

    Returns:
        The method's own default if it has one, else `Option.default`.
    """
    return METHODS[method].defaults.get(option, BY_NAME[option].default)


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
        name: the method's name, one of `METHODS`.
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
        if name not in METHODS:
            raise ValueError(unknown("method", name, METHODS))
        own = {option.name: option for option in options_of(name) if option.group == "drafting"}
        for key in options:
            if key not in own:
                raise ValueError(f"method {name!r}: " + unknown("option", key, own))
        for need in METHODS[name].needs:
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
