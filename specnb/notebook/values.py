"""Several values of one option, as they are typed for a comparison."""

from __future__ import annotations

from typing import Any

from specnb.options import Option

_MOST = 24  # runs in one comparison


def parse_values(option: Option, text: str) -> list[Any]:
    """The values that a text names, checked: "1, 2, 4-6" is 1, 2, 4, 5, 6. Raises ValueError for what is not allowed."""
    found: list[Any] = []
    for part in text.replace(";", ",").split(","):
        word = part.strip()
        low, dash, high = word.partition("-")
        if option.type is int and dash and low.strip().isdecimal() and high.strip().isdecimal():
            if int(low) > int(high):
                raise ValueError(f"{word!r} runs backwards: write {high.strip()}-{low.strip()}.")
            found += range(int(low), min(int(high), int(low) + _MOST) + 1)
        elif word:
            found.append(_read(option, word))
    checked = list(dict.fromkeys(option.check(value) for value in found))
    if not checked or len(checked) > _MOST:
        raise ValueError(
            f"give 1 to {_MOST} values of {option.name}, such as 1, 2, 4-8; these are {'none' if not checked else 'more'}."
        )
    return checked


def _read(option: Option, word: str) -> Any:
    try:
        return option.type(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a value of {option.name}: it must be {option.allowed}.") from None
