"""A magic's line: splitting, parsing and completing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from IPython.core.error import UsageError

from specnb.options import METHODS, OPTIONS, unknown

_WORD = re.compile(
    r"""'(?P<single>[^']*)'|"(?P<double>(?:\\["\\]|\\(?!["\\])|[^"\\])*)"|(?P<bare>[^\s'"]+)|(?P<blank>\s+)|(?P<open>['"])"""
)
_ESCAPE = re.compile(r"\\([ntr\\])")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
_DASHES = re.compile(r"(--[\w-]+=)--$")  # argparse of Python 3.11 loses the value in --option=--
_GUARD = "\0"


def split_line(line: str) -> list[str]:
    """Split as a POSIX shell does, except that a backslash outside of quotes stays (Windows paths).

    Raises UsageError for a quote without its partner, saying where it is.
    """
    words: list[str] = []
    word: str | None = None
    position = 0
    while position < len(line):
        match = _WORD.match(line, position)
        if match is None or match["open"] is not None:
            raise UsageError(
                f"the quote {line[position]} at column {position + 1} has no partner: {line[position:].strip()}"
            )
        if match["blank"] is not None:
            if word is not None:
                words.append(word)
            word = None
        elif match["double"] is not None:
            word = (word or "") + re.sub(r'\\(["\\])', r"\1", match["double"])
        else:
            word = (word or "") + (match["single"] if match["single"] is not None else match["bare"])
        position = match.end()
    return words if word is None else [*words, word]


def unescape(text: str) -> str:
    r"""`\n`, `\t`, `\r` and `\\` as the characters they stand for; other backslashes stay."""
    return _ESCAPE.sub(lambda match: _ESCAPES[match[1]], text)


def flag(option: str) -> str:
    """An option's name on the line: `num_assistant_tokens` is `--num-assistant-tokens`."""
    return "--" + option.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """Arguments whose every error is one line of UsageError; nothing is abbreviated, only what was typed is in the result."""

    def __init__(self, magic: str, description: str) -> None:
        super().__init__(
            prog=magic,
            description=description,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("-h", "--help", action="store_true", help="show this help")

    @property
    def flags(self) -> list[str]:
        """All options, as written on the line."""
        return sorted(self._option_string_actions)

    def choices_of(self, name: str) -> list[str]:
        """The values to offer after an option, if they are known."""
        if name == "--method":
            return list(METHODS)
        return [value for option in OPTIONS if flag(option.name) == name for value in option.choices]

    def read(self, line: str) -> dict[str, Any]:
        """The options typed on the line, by name."""
        words = split_line(line)
        if {"-h", "--help"} & set(words):
            return {"help": True}
        if self._get_positional_actions():  # among these, the value of a mistyped option would be taken for one
            self._refuse_unknown(word for word in words if word.startswith("--") and " " not in word and word != "--")
        known, extra = self.parse_known_args([_DASHES.sub(rf"\1{_GUARD}--", word) for word in words])
        self._refuse_unknown(word for word in extra if word.startswith("-") and word != "-")
        if extra:
            where = ": the prompt goes into the lines below" if self.prog == "%%specgen" else ""
            comment = " Comments have no place on this line." if extra[0].startswith("#") or "#" in extra else ""
            raise UsageError(
                f"{self.prog}: unexpected {extra[0]!r}{where}.{comment} (%{self.prog.strip('%')} -h lists the options)"
            )
        return {name: _unguarded(value) for name, value in vars(known).items()}

    def _refuse_unknown(self, words: Iterable[str]) -> None:
        for name in (word.partition("=")[0] for word in words):
            if name == "--method" and name not in self.flags:
                raise UsageError(f"{self.prog} has no --method: write the methods' names alone ({', '.join(METHODS)}).")
            if name not in self.flags:
                raise UsageError(unknown("option", name, (f for f in self.flags if f.startswith("--"))))

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of leaving the process."""
        message = message.removeprefix("argument ")
        hint = (
            " (a value that begins with a dash is written --option=VALUE)" if "expected one argument" in message else ""
        )
        raise UsageError(f"{self.prog}: {message}{hint}")


def complete(parser: Parser, text_until_cursor: str, symbol: str, models: Iterable[str]) -> list[str]:
    """Completions of a magic's line: options, or the values of the option before the cursor."""
    if "\n" in text_until_cursor:
        return []
    before = text_until_cursor[: len(text_until_cursor) - len(symbol)] if symbol else text_until_cursor
    last = before.split()[-1] if before.split() else ""
    name = last.removesuffix("=")
    if last != name or (before.endswith(" ") and name.startswith("-")):
        values = list(models) if name in ("--model", "--drop") else parser.choices_of(name)
        if values or last != name:
            return [value for value in values if value.startswith(symbol)]
    if symbol and not symbol.startswith("-"):
        return []
    return [word for word in parser.flags if word.startswith(symbol or "--")]


def _unguarded(value: Any) -> Any:
    if isinstance(value, list):
        return [_unguarded(one) for one in value]
    return value.removeprefix(_GUARD) if isinstance(value, str) else value
