"""Parses several values of one option, as they are typed for a comparison."""

from __future__ import annotations

from typing import Any

from specnb.options import Option

_MAX_VALUES = 24  # each value is a run of the comparison


def parse_values(option: Option, text: str) -> list[Any]:
    """Parse and check values of an option: "1, 2, 4-6" is 1, 2, 4, 5, 6.

    Raises:
        ValueError: a value is not valid, or there are none or too many.
    """
    found: list[Any] = []
    for part in text.replace(";", ",").split(","):
        word = part.strip()
        low, dash, high = word.partition("-")
        if option.type is int and dash and low.strip().isdecimal() and high.strip().isdecimal():
            if int(low) > int(high):
                raise ValueError(f"{word!r} runs backwards: write {high.strip()}-{low.strip()}.")
            found += range(int(low), min(int(high), int(low) + _MAX_VALUES) + 1)
        elif word:
            found.append(_read(option, word))
    checked = list(dict.fromkeys(option.check(value) for value in found))
    if not checked or len(checked) > _MAX_VALUES:
        raise ValueError(
            f"give 1 to {_MAX_VALUES} values of {option.name}, such as 1, 2, 4-8; these are "
            f"{'none' if not checked else 'more'}."
        )
    return checked


def _read(option: Option, word: str) -> Any:
    try:
        return option.type(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a value of {option.name}: it must be {option.allowed}.") from None
