"""The magics' lines: splitting, parsing and completing. The options come from `specnb.options`."""

from __future__ import annotations

import argparse
import keyword
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from IPython.core.error import UsageError

from specnb.models.embedded import DEFAULT
from specnb.options import METHODS, OPTIONS, Option, default, unknown

_WORD = re.compile(
    r"""'(?P<single>[^']*)'|"(?P<double>(?:\\["\\]|\\(?!["\\])|[^"\\])*)"|(?P<bare>[^\s'"]+)|(?P<blank>\s+)|(?P<open>['"])"""
)
_ESCAPE = re.compile(r"\\([ntr\\])")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
_DASHES = re.compile(r"(--[\w-]+=)--$")  # argparse of Python 3.11 loses the value in --option=--
_GUARD = "\0"
_SPECGEN = """Generate from the text below this line, which goes to the model byte for byte.

%%specgen must be the first line of the cell. Nothing in the cell's body is read as an option or a comment, and there are
no comments on the line itself. Values with blanks take quotes, single or double; a value that begins with a dash is
written --option=VALUE. Backslashes outside of double quotes stay as they are; inside of them, \\" and \\\\ are a quote and
a backslash. In --stop-strings and --system, \\n, \\t, \\r and \\\\ then mean line break, tab, carriage return and
backslash. The line is not expanded: {name} and $name stay as written. In the body, --expand replaces {name}.

Without --max-new-tokens up to 256 tokens come; %config SpecMagics shows and sets such defaults. The last result is always
in the variable _specgen. A running cell can be interrupted: what was generated until then is
shown and kept, and the cell ends with an error of one line, so that queued cells do not run."""
_SPECLOAD = """Load a model, and a draft model if one is named, and make it the one that %%specgen uses.

NAME is a hub id, a local folder, a .gguf file or a name that specnb knows (--list shows them). Loading the same again only
switches to it. Without NAME it is {} with the draft model {}, two tiny models that come with specnb. Models stay
loaded when the extension is reloaded or unloaded; --drop NAME lets one go.""".format(*DEFAULT)

_SPECPANEL = """Open the panel: choose a method, turn its options, run, stop, compare.

It works on the models that %specload loaded, and can load others. NAME is the loaded model to begin with. In Python:
panel = specnb.Panel(pair), then panel.result, panel.results, panel.options."""


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
        known, extra = self.parse_known_args([_DASHES.sub(rf"\1{_GUARD}--", word) for word in words])
        for word in extra:
            if word.startswith("-") and word != "-":
                raise UsageError(
                    unknown("option", word.partition("=")[0], (f for f in self.flags if f.startswith("--")))
                )
        if extra:
            where = ": the prompt goes into the lines below" if self.prog == "%%specgen" else ""
            comment = " Comments have no place on this line." if extra[0].startswith("#") or "#" in extra else ""
            raise UsageError(
                f"{self.prog}: unexpected {extra[0]!r}{where}.{comment} (%{self.prog.strip('%')} -h lists the options)"
            )
        return {name: _unguarded(value) for name, value in vars(known).items()}

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of leaving the process."""
        message = message.removeprefix("argument ")
        hint = (
            " (a value that begins with a dash is written --option=VALUE)" if "expected one argument" in message else ""
        )
        raise UsageError(f"{self.prog}: {message}{hint}")


def specgen_parser() -> Parser:
    """The arguments of %%specgen: its own, and one for every option of `specnb.options`."""
    parser = Parser("%%specgen", _SPECGEN)
    own = parser.add_argument_group("the cell")
    own.add_argument(
        "--method",
        type=_method,
        metavar="NAME",
        help=f"{', '.join(METHODS)}; default: draft_model with an assistant, else prompt_lookup",
    )
    own.add_argument("--model", metavar="NAME", help="a loaded model other than the current one")
    own.add_argument(
        "-o", "--output", type=_identifier, metavar="NAME", help="assign the GenerationResult to this variable"
    )
    own.add_argument("-q", "--quiet", action="store_true", help="show nothing")
    own.add_argument(
        "--probabilities", action="store_true", help="record how probable each drafted token was, for the panel's Steps"
    )
    own.add_argument(
        "--expand",
        action="store_true",
        help="replace {name} in the body by the variable; {{name}} gives {name}; other braces stay",
    )
    own.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="send the body as a chat message (default: if the model has a chat template)",
    )
    own.add_argument("--system", type=unescape, metavar="TEXT", help="the chat's system message")
    groups: dict[str, Any] = {}
    for option in OPTIONS:
        group = groups.get(option.group) or groups.setdefault(option.group, parser.add_argument_group(option.group))
        if option.type is bool:
            group.add_argument(flag(option.name), action=argparse.BooleanOptionalAction, help=_help(option))
        else:
            action = "append" if option.many else "store"
            group.add_argument(
                flag(option.name), action=action, type=_value(option), metavar=_metavar(option), help=_help(option)
            )
    return parser


def specload_parser() -> Parser:
    """The arguments of %specload: those of `specnb.load`."""
    parser = Parser("%specload", _SPECLOAD)
    parser.add_argument("name", nargs="?", metavar="NAME")
    parser.add_argument(
        "--assistant", metavar="NAME", help="the draft model; a number N: the model's own first N layers"
    )
    parser.add_argument("--dtype", metavar="TYPE", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device-map", metavar="MAP", help="cpu, cuda, auto (accelerate decides), ...; default cpu")
    parser.add_argument("--source", metavar="SOURCE", help="hub, package or local: where the name is looked up")
    parser.add_argument("--drop", metavar="NAME", help="let a loaded model go")
    parser.add_argument(
        "--list", action="store_true", help="show the loaded models (* is the current one) and the known names"
    )
    return parser


def specpanel_parser() -> Parser:
    """The arguments of %specpanel."""
    parser = Parser("%specpanel", _SPECPANEL)
    parser.add_argument("name", nargs="?", metavar="NAME")
    return parser


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


def _value(option: Option) -> Callable[[str], Any]:
    """Reads one value of an option; its errors name the option and what is allowed."""

    def read(text: str) -> Any:
        value: Any = unescape(text) if option.many and option.type is str else text
        if option.type is not str:
            try:
                value = option.type(text)
            except ValueError:
                raise argparse.ArgumentTypeError(f"{text!r} is not valid: it must be {option.allowed}.") from None
        try:
            return option.check(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not valid: it must be {option.allowed}.") from None

    return read


def _method(text: str) -> str:
    if text not in METHODS:
        raise argparse.ArgumentTypeError(unknown("method", text, METHODS))
    return text


def _identifier(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name for a variable.")
    return text


def _metavar(option: Option) -> str:
    if option.choices:
        return "|".join(option.choices)
    return {int: "N", float: "X", str: "TEXT"}[option.type]


def _help(option: Option) -> str:
    methods = option.methods or tuple(METHODS)
    values = {method: default(option.name, method) for method in methods}
    text = option.help
    if option.default is not None:
        odd = [f"{method}: {value}" for method, value in values.items() if value != option.default]
        text += f"; default {option.default}" + (f" ({', '.join(odd)})" if odd else "")
    if option.methods:
        text += f" [{', '.join(option.methods)}]"
    return text.replace("%", "%%")
