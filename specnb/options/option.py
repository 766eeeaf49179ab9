"""One option: its type, its default, its bounds, and the check of a value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """One option of `generate`, as the tables of the magics, the panel and the documentation show it.

    Attributes:
        name: the name of the keyword argument.
        type: int, float, bool or str.
        default: the default for every method; `MethodInfo.defaults` overrides it. None leaves it to the model's
            generation config.
        help: one line for the user.
        low: smallest valid value.
        high: largest valid value.
        low_open: whether `low` itself is invalid.
        high_open: whether `high` itself is invalid.
        choices: the valid values of a string option; empty if any string is valid.
        slider: smallest and largest value that a slider offers. Valid values may lie outside.
        suggested: where the slider stands when the user switches on an option without a default; None is `slider[0]`.
        methods: names of the methods that have the option; empty means every method.
        group: "drafting", "length", "sampling", "trace" or "training".
        multiple: whether a list of values is valid too.
        hint: what to do instead of giving a value that is out of bounds.
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
    suggested: float | None = None
    methods: tuple[str, ...] = ()
    group: str = "drafting"
    multiple: bool = False
    hint: str = ""

    @property
    def allowed(self) -> str:
        """The valid values in words: "an int >= 1", "one of constant, heuristic", ..."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        kind = {int: "an int", float: "a number", bool: "True or False", str: "a string"}[self.type]
        if self.multiple:
            kind += " or a list of them"
        bounds = []
        if self.low is not None:
            bounds.append(f"{'>' if self.low_open else '>='} {_number(self.low)}")
        if self.high is not None:
            bounds.append(f"{'<' if self.high_open else '<='} {_number(self.high)}")
        return " ".join([kind, " and ".join(bounds)]).strip()

    @property
    def hint_in_brackets(self) -> str:
        """The hint as the end of a message, with a leading blank; empty if there is no hint."""
        return f" ({self.hint})" if self.hint else ""

    def check(self, value: Any) -> Any:
        """Check a value and convert it where nothing is lost, such as 2.0 to 2.

        Args:
            value: the value that the user gave, or a list of values if `multiple` is set.

        Returns:
            The value in the option's type.

        Raises:
            ValueError: the value has the wrong type or is out of bounds. The message names option, value and what is
                allowed.
        """
        if value is None and self.default is None:
            return None
        if self.multiple and isinstance(value, (list, tuple)):
            return [self._check_one(v) for v in value]
        return self._check_one(value)

    def read(self, text: str) -> Any:
        """Convert and check one value that was typed.

        Raises:
            ValueError: it is not valid. The message names the text and what is allowed, but not the option.
        """
        try:
            return self.check(self.type(text))
        except ValueError:
            raise ValueError(f"{text!r} is not valid: it must be {self.allowed}{self.hint_in_brackets}.") from None

    def _check_one(self, value: Any) -> Any:
        converted: Any = value
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            converted = float(value)
        elif self.type is int and isinstance(value, float) and value.is_integer():
            converted = int(value)
        valid = isinstance(converted, self.type) and (self.type is bool or not isinstance(converted, bool))
        valid = valid and (not self.choices or converted in self.choices)
        if valid and self.low is not None:
            valid = converted > self.low if self.low_open else converted >= self.low
        if valid and self.high is not None:
            valid = converted < self.high if self.high_open else converted <= self.high
        if not valid:
            raise ValueError(
                f"{self.name}={value!r} is not valid: {self.name} must be {self.allowed}{self.hint_in_brackets}."
            )
        return converted


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The error message for a name that does not exist.

    Args:
        kind: what the name stands for, such as "method".
        name: the name that was given.
        known: all names that exist.

    Returns:
        A message with the name, the most similar known name if there is one, and all known names.
    """
    known = list(known)
    near = [one for one in known if name and one.startswith(name)] or difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}.{hint} Allowed: {', '.join(known)}."


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
