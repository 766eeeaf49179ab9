"""Splits, parses and completes the line of a magic."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from IPython.core.error import UsageError

from specnb.options import all_options, method_names, selectable_methods, unknown

_WORD = re.compile(
    r"""'(?P<single>[^']*)'|"(?P<double>(?:\\["\\]|\\(?!["\\])|[^"\\])*)"|(?P<bare>[^\s'"]+)"""
    r"""|(?P<blank>\s+)|(?P<open>['"])"""
)
_ESCAPE = re.compile(r"\\([ntr\\])")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
_DASHES = re.compile(r"(--[\w-]+=)--$")  # argparse of Python 3.11 loses the value in --option=--
_GUARD = "\0"


def split_line(line: str) -> list[str]:
    """Split a line into words as a POSIX shell does. Backslashes outside quotes stay, for Windows paths.

    Raises:
        UsageError: a quote is not closed. The message says where it is.
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
    r"""Replace `\n`, `\t`, `\r` and `\\` by the characters that they stand for; other backslashes stay."""
    return _ESCAPE.sub(lambda match: _ESCAPES[match[1]], text)


def flag(option: str) -> str:
    """The flag of an option: `--num-assistant-tokens` for `num_assistant_tokens`."""
    return "--" + option.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors of one line. Flags cannot be abbreviated.

    Args:
        magic: the name of the magic with its percent signs.
        description: the text above the options in the help.
    """

    def __init__(self, magic: str, description: str) -> None:
        super().__init__(
            prog=magic,
            description=description,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.words: tuple[str, ...] = ()  # that completion offers where a positional argument may stand
        self.add_argument("-h", "--help", action="store_true", help="show this help")

    @property
    def flags(self) -> list[str]:
        """All flags, sorted."""
        return sorted(self._option_string_actions)

    def choices_of(self, name: str) -> list[str]:
        """The values to offer after a flag, if they are known."""
        if name == "--method":
            return selectable_methods()
        return [value for option in all_options() if flag(option.name) == name for value in option.choices]

    def read(self, line: str) -> dict[str, Any]:
        """Parse a line.

        Returns:
            The arguments that were typed, by name. Defaults are not filled in.

        Raises:
            UsageError: the line is not valid.
        """
        words = split_line(line)
        if {"-h", "--help"} & set(words):
            return {"help": True}
        if self._get_positional_actions():  # argparse would take the value of a misspelled option for a positional
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
                names = ", ".join(method_names())
                raise UsageError(f"{self.prog} has no --method: write the methods' names alone ({names}).")
            if name not in self.flags:
                raise UsageError(unknown("option", name, (f for f in self.flags if f.startswith("--"))))

    def error(self, message: str) -> NoReturn:
        """Raise UsageError; argparse would end the process."""
        message = message.removeprefix("argument ")
        hint = (
            " (a value that begins with a dash is written --option=VALUE)" if "expected one argument" in message else ""
        )
        raise UsageError(f"{self.prog}: {message}{hint}")


def complete(parser: Parser, text_until_cursor: str, symbol: str, models: Iterable[str]) -> list[str]:
    """Complete the line of a magic: flags, or values of the flag before the cursor.

    Args:
        parser: the parser of the magic.
        text_until_cursor: the line up to the cursor.
        symbol: the word to complete, the end of `text_until_cursor`.
        models: names of the loaded models.

    Returns:
        The possible words.
    """
    if "\n" in text_until_cursor:
        return []
    before = text_until_cursor[: len(text_until_cursor) - len(symbol)] if symbol else text_until_cursor
    last = before.split()[-1] if before.split() else ""
    name = last.removesuffix("=")
    if last != name or (before.endswith(" ") and name.startswith("-")):
        values = list(models) if name in ("--model", "--drop") else parser.choices_of(name)
        if values or last != name:
            return [value for value in values if value.startswith(symbol)]
    words = [] if any(word in before.split() for word in parser.words) else parser.words
    if symbol and not symbol.startswith("-"):
        return [word for word in words if word.startswith(symbol)]
    return [*(words if not symbol else ()), *_flags(parser, symbol)]


def _flags(parser: Parser, symbol: str) -> list[str]:
    return [word for word in parser.flags if word.startswith(symbol or "--")]


def _unguarded(value: Any) -> Any:
    if isinstance(value, list):
        return [_unguarded(one) for one in value]
    return value.removeprefix(_GUARD) if isinstance(value, str) else value
