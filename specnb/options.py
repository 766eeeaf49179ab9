"""Every option, declared once: validation, the magics' arguments, the panel's widgets and the documentation read this table.

Names are those of transformers' `generate()` wherever it has the option. An option whose default is `None` is left to
the model's own generation config. This module imports nothing else of specnb and no torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Option:
    """One option: its name, type, default, bounds and a line of help.

    `low` and `high` are inclusive bounds of validity (`low_open`, `high_open`: themselves excluded); `slider` is the range a
    widget offers. `methods` lists the methods it belongs to; empty means every method. `instead` says what to do where
    a value is out of bounds.
    """

    name: str
    type: type
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False
    choices: tuple[str, ...] = ()
    slider: tuple[float, float] | None = None
    methods: tuple[str, ...] = ()
    group: str = "drafting"
    many: bool = False
    instead: str = ""

    @property
    def allowed(self) -> str:
        """What may be given, in words: "an int >= 1", "one of constant, heuristic", ..."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        kind = {int: "an int", float: "a number", bool: "True or False", str: "a string"}[self.type]
        if self.many:
            kind += " or a list of them"
        bounds = []
        if self.low is not None:
            bounds.append(f"{'>' if self.low_open else '>='} {_number(self.low)}")
        if self.high is not None:
            bounds.append(f"{'<' if self.high_open else '<='} {_number(self.high)}")
        return " ".join([kind, " and ".join(bounds)]).strip()

    def check(self, value: Any) -> Any:
        """The value, converted where that loses nothing (2 for 2.0); ValueError naming option, value and what is allowed."""
        if value is None and self.default is None:
            return None
        if self.many and isinstance(value, (list, tuple)):
            return [self._check_one(v) for v in value]
        return self._check_one(value)

    def _check_one(self, value: Any) -> Any:
        ok: Any = value
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            ok = float(value)
        elif self.type is int and isinstance(value, float) and value.is_integer():
            ok = int(value)
        good = isinstance(ok, self.type) and (self.type is bool or not isinstance(ok, bool))
        good = good and (not self.choices or ok in self.choices)
        if good and self.low is not None:
            good = ok > self.low if self.low_open else ok >= self.low
        if good and self.high is not None:
            good = ok < self.high if self.high_open else ok <= self.high
        if not good:
            raise ValueError(f"{self.name}={value!r} is not valid: {self.name} must be {self.allowed}{self.remedy}.")
        return ok

    @property
    def remedy(self) -> str:
        """What to do instead, as the end of a message; empty where there is nothing to add."""
        return f" ({self.instead})" if self.instead else ""


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


_MODEL_DRAFTERS = ("draft_model", "early_exit", "mtp_layers", "gemma4_assistant", "universal")
_DRAFTERS = (*_MODEL_DRAFTERS, "prompt_lookup")
OPTIONS: tuple[Option, ...] = (
    Option(
        "num_assistant_tokens",
        int,
        5,
        "tokens drafted per step (the first step's, where a schedule changes it)",
        low=1,
        slider=(1, 16),
        methods=_DRAFTERS,
        instead="method='plain' drafts nothing",
    ),
    Option(
        "num_assistant_tokens_schedule",
        str,
        None,
        "how the draft length follows the acceptance: constant, heuristic (+2 when all were accepted, else -1; "
        "heuristic_transient is the same: every call starts afresh), or adaptive (what promises most tokens per "
        "second, from measured costs and acceptance). Left out: constant where num_assistant_tokens is given anywhere or a "
        "drafter is sampled from, else heuristic in half precision (where block sizes may break ties differently, "
        "so that adaptive would let the text depend on times), else adaptive",
        choices=("constant", "heuristic", "heuristic_transient", "adaptive"),
        methods=_DRAFTERS,
    ),
    Option(
        "assistant_confidence_threshold",
        float,
        0.4,
        "a draft ends after a token the drafter itself gave less than this probability (0: never)",
        low=0,
        high=1,
        slider=(0, 1),
        methods=_MODEL_DRAFTERS,
    ),
    Option(
        "assistant_ensemble_weight",
        float,
        None,
        "static ensemble, LOSSY: drafted positions follow w * target + (1 - w) * draft; a fully accepted draft's bonus, and with drafters that "
        "read the target's states the first token, are the target's own",
        low=0,
        low_open=True,
        high=1,
        high_open=True,
        slider=(0.05, 0.95),
        methods=_MODEL_DRAFTERS,
    ),
    Option(
        "assistant_early_exit",
        int,
        None,
        "number of the target's first layers that draft (1 to its layers - 1)",
        slider=(1, 48),
        methods=("early_exit",),
    ),
    Option(
        "max_matching_ngram_size",
        int,
        3,
        "longest suffix that prompt lookup looks for in prompt and output",
        low=1,
        slider=(1, 8),
        methods=("prompt_lookup",),
    ),
    Option(
        "verification",
        str,
        "token",
        "acceptance rule when sampling: token by token, or the whole block at once (never accepts fewer)",
        choices=("token", "block"),
        methods=_DRAFTERS,
    ),
    Option(
        "max_new_tokens",
        int,
        None,
        "most tokens to generate",
        low=1,
        slider=(1, 512),
        group="length",
        instead="left out, the model's own setting holds; for no new tokens, make no call",
    ),
    Option(
        "min_new_tokens", int, None, "no end of sequence before so many tokens", low=0, slider=(0, 256), group="length"
    ),
    Option(
        "max_time",
        float,
        None,
        "seconds after which generation stops",
        low=0,
        low_open=True,
        group="length",
        instead="left out, there is no limit",
    ),
    Option(
        "stop_strings",
        str,
        None,
        "text that ends the generation; may be given several times",
        many=True,
        group="length",
    ),
    Option("do_sample", bool, None, "sample instead of taking the most probable token (greedy)", group="sampling"),
    Option(
        "temperature",
        float,
        None,
        "divides the logits: below 1 sharper, above 1 flatter; 0 is greedy",
        low=0,
        slider=(0, 2),
        group="sampling",
    ),
    Option(
        "top_k",
        int,
        None,
        "sample among the k most probable tokens (0: all)",
        low=0,
        slider=(0, 200),
        group="sampling",
        instead="0 takes all",
    ),
    Option(
        "top_p",
        float,
        None,
        "sample among the fewest tokens that hold this probability",
        low=0,
        high=1,
        slider=(0.05, 1),
        group="sampling",
        instead="1 takes all",
    ),
    Option(
        "min_p",
        float,
        None,
        "sample among tokens with at least this share of the best token's probability",
        low=0,
        high=1,
        slider=(0, 1),
        group="sampling",
    ),
    Option(
        "repetition_penalty",
        float,
        None,
        "above 1: tokens already in the text become less probable",
        low=0,
        low_open=True,
        slider=(0.8, 2),
        group="sampling",
    ),
    Option(
        "no_repeat_ngram_size",
        int,
        None,
        "no n-gram of this size occurs twice (0: off)",
        low=0,
        slider=(0, 8),
        group="sampling",
    ),
    Option(
        "seed",
        int,
        None,
        "seed of this call's random numbers; None draws one and reports it",
        low=0,
        high=2**63 - 1,
        group="sampling",
    ),
    Option(
        "logprobs",
        bool,
        True,
        "record each generated token's log-probability under the target (Step.logprobs)",
        group="trace",
    ),
    Option(
        "top_logprobs",
        int,
        0,
        "record so many of the most probable tokens of target and drafter at each place (0: none)",
        low=0,
        high=20,
        slider=(0, 20),
        group="trace",
    ),
)
BY_NAME: dict[str, Option] = {option.name: option for option in OPTIONS}


@dataclass(frozen=True)
class MethodInfo:
    """A method's description: `needs` names what must be given beside the target."""

    name: str
    title: str
    help: str
    source: str
    needs: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)


METHODS: dict[str, MethodInfo] = {
    info.name: info
    for info in (
        MethodInfo(
            "plain",
            "Plain decoding",
            "the target alone, one token per pass",
            "transformers' greedy search and sampling",
        ),
        MethodInfo(
            "draft_model",
            "Draft model",
            "a smaller model with the same tokenizer drafts",
            "Leviathan et al. 2211.17192; Chen et al. 2302.01318",
            needs=("assistant_model",),
        ),
        MethodInfo(
            "prompt_lookup",
            "Prompt lookup",
            "copies what followed the same words earlier in prompt and output",
            "Saxena 2023, prompt lookup decoding",
            defaults={"num_assistant_tokens": 10},
        ),
        MethodInfo(
            "early_exit",
            "Early exit",
            "the target's own first layers draft, and what they computed is reused",
            "LayerSkip, Elhoushi et al. 2404.16710",
            needs=("assistant_early_exit",),
        ),
        MethodInfo(
            "mtp_layers",
            "MTP layers",
            "prediction layers inside the target's checkpoint draft, one token each",
            "DeepSeek-V3 2412.19437; GLM-4.5",
            needs=("use_mtp",),
            defaults={"num_assistant_tokens": None},
        ),
        MethodInfo(
            "gemma4_assistant",
            "MTP drafter (Gemma 4)",
            "a small drafter that reads the target's keys, values and last state",
            "Gemma 4 multi-token prediction guide, Google 2026",
            needs=("assistant_model",),
        ),
        MethodInfo(
            "universal",
            "Universal",
            "any small model drafts, whatever its tokenizer",
            "Timor et al. 2502.05202",
            needs=("assistant_model", "assistant_tokenizer"),
        ),
    )
}


ASKED_BY = {"prompt_lookup_num_tokens": "prompt_lookup", "assistant_early_exit": "early_exit", "use_mtp": "mtp_layers"}
"""Options of transformers' `generate()` that ask for a method."""


def options_of(method: str) -> list[Option]:
    """The options that apply to `method`, in declaration order."""
    return [option for option in OPTIONS if not option.methods or method in option.methods]


def default(option: str, method: str) -> Any:
    """The default of an option for a method."""
    return METHODS[method].defaults.get(option, BY_NAME[option].default)


_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")


def greedy_at_zero(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `generate()` with `temperature=0`, as users write it for greedy decoding, as `do_sample=False`."""
    temperature = options.get("temperature")
    if temperature is None or temperature != 0:
        return dict(options)
    return {name: value for name, value in options.items() if name not in _OF_SAMPLING} | {"do_sample": False}


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that does not exist: what was given, the nearest one, all that are allowed."""
    known = list(known)
    near = [one for one in known if name and one.startswith(name)] or difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}.{hint} Allowed: {', '.join(known)}."


class Method:
    """A method with its options, checked when it is made: `Method("prompt_lookup", num_assistant_tokens=8)`.

    Raises ValueError for an unknown method, an option that the method does not have, or a value out of bounds.
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
