"""The arguments of the magics. The options come from `specnb.options`."""

from __future__ import annotations

import argparse
import keyword
from collections.abc import Callable
from typing import Any

from specnb.models.embedded import DEFAULT
from specnb.notebook.magic_parser import Parser, flag, unescape
from specnb.notebook.values import parse_values
from specnb.options import BY_NAME, METHODS, OPTIONS, Option, default, unknown

_SPECGEN = """Generate from the text below this line, which goes to the model byte for byte.

%%specgen must be the first line of the cell. Nothing in the cell's body is read as an option or a comment, and there are
no comments on the line itself. Values with blanks take quotes, single or double; a value that begins with a dash is
written --option=VALUE. Backslashes outside of double quotes stay as they are; inside of them, \\" and \\\\ are a quote and
a backslash. In --stop-strings and --system, \\n, \\t, \\r and \\\\ then mean line break, tab, carriage return and
backslash. The line is not expanded: {name} and $name stay as written. In the body, --expand replaces {name}.

Without --max-new-tokens up to 256 tokens come; %config SpecMagics shows and sets such defaults. The last result is always
in the variable _specgen. A running cell can be interrupted: what was generated until then is
shown and kept, and the cell ends with an error of one line, so that queued cells do not run."""
_SPECBENCH = """Compare methods on the prompts below this line; separate several prompts by lines of three dashes.

Plain decoding is always among the runs. They take turns and are repeated, so that a machine that slows down slows all of
them; the table says which is best and whether the measurement can tell. Options given here go to every method that has them;
--vary makes one run for each value of an option. early_exit takes part when --assistant-early-exit is given.

The last comparison is always in the variable _specbench. A running cell can be interrupted: rounds that are complete are kept."""
_SPECLOAD = """Load a model, and a draft model if one is named, and make it the one that %%specgen uses.

NAME is a hub id, a local folder, a .gguf file or a name that specnb knows (--list shows them). Loading the same again only
switches to it. Without NAME it is {} with the draft model {}, two tiny models that come with specnb. Models stay
loaded when the extension is reloaded or unloaded; --drop NAME lets one go.""".format(*DEFAULT)

_SPECPANEL = """Open the panel: choose a method, turn its options, run, stop, compare.

It works on the models that %specload loaded, and can load others. NAME is the loaded model to begin with. In Python:
panel = specnb.Panel(pair), then panel.result, panel.results, panel.options."""


def specgen_parser() -> Parser:
    """The arguments of %%specgen: its own, and one for every option of `specnb.options`."""
    parser = Parser("%%specgen", _SPECGEN)
    own = _cell(parser, "GenerationResult")
    own.add_argument(
        "--method",
        type=_method,
        metavar="NAME",
        help=f"{', '.join(METHODS)}; default: the one that the draft model is for, prompt_lookup without one",
    )
    own.add_argument(
        "--probabilities", action="store_true", help="record how probable each drafted token was, for the panel's Steps"
    )
    own.add_argument(
        "--expand",
        action="store_true",
        help="replace {name} in the body by the variable; {{name}} gives {name}; other braces stay",
    )
    _options(parser)
    return parser


def specbench_parser() -> Parser:
    """The arguments of %%specbench: its own, and one for every option of `specnb.options`."""
    parser = Parser("%%specbench", _SPECBENCH)
    own = _cell(parser, "Comparison")
    own.add_argument(
        "methods",
        nargs="*",
        type=_method,
        metavar="METHOD",
        help=f"of {', '.join(METHODS)}; default: all that the pair can run",
    )
    own.add_argument(
        "--vary",
        type=_vary,
        action=_Once,
        metavar="OPTION=VALUES",
        help="a run for each value: num_assistant_tokens=1,2,4-8",
    )
    own.add_argument("--repeats", type=_repeats, metavar="N", help="how often each run is timed; default 3")
    own.add_argument(
        "--transformers", action="store_true", help="time transformers' own implementation of each method, too"
    )
    _options(parser)
    return parser


class _Once(argparse.Action):
    """Takes one value; a second one would silently replace it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            parser.error(f"{option_string} was given twice; it varies one option.")
        setattr(namespace, self.dest, values)


def _cell(parser: Parser, result: str) -> Any:
    """The group of what is about the cell itself."""
    own = parser.add_argument_group("the cell")
    own.add_argument("--model", metavar="NAME", help="a loaded model other than the current one")
    own.add_argument("-o", "--output", type=_identifier, metavar="NAME", help=f"assign the {result} to this variable")
    own.add_argument("-q", "--quiet", action="store_true", help="show nothing")
    own.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="send the body as a chat message (default: if the model has a chat template)",
    )
    own.add_argument("--system", type=unescape, metavar="TEXT", help="the chat's system message")
    return own


def _options(parser: Parser) -> None:
    groups: dict[str, Any] = {}
    for option in OPTIONS:
        group = groups.get(option.group) or groups.setdefault(option.group, parser.add_argument_group(option.group))
        if option.type is bool:
            group.add_argument(flag(option.name), action=argparse.BooleanOptionalAction, help=_help(option))
        else:
            action = "append" if option.multiple else "store"
            group.add_argument(
                flag(option.name), action=action, type=_value(option), metavar=_metavar(option), help=_help(option)
            )


def specload_parser() -> Parser:
    """The arguments of %specload: those of `specnb.load`."""
    parser = Parser("%specload", _SPECLOAD)
    parser.add_argument("name", nargs="?", metavar="NAME")
    parser.add_argument(
        "--assistant", metavar="NAME", help="the draft model; a number N: the model's own first N layers"
    )
    parser.add_argument("--dtype", metavar="TYPE", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device-map", metavar="MAP", help="cpu, cuda, auto (accelerate decides), ...; default cpu")
    parser.add_argument(
        "--cuda-graphs", action="store_true", help="run small blocks as CUDA graphs (needs --device-map cuda)"
    )
    parser.add_argument("--source", metavar="SOURCE", help="hub, package or local: where the name is looked up")
    parser.add_argument("-o", "--output", type=_identifier, metavar="NAME", help="assign the Pair to this variable")
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


def _value(option: Option) -> Callable[[str], Any]:
    """Reads one value of an option; its errors name the option and what is allowed."""

    def read(text: str) -> Any:
        value: Any = unescape(text) if option.multiple and option.type is str else text
        if option.type is not str:
            try:
                value = option.type(text)
            except ValueError:
                raise argparse.ArgumentTypeError(
                    f"{text!r} is not valid: it must be {option.allowed}{option.hint_in_brackets}."
                ) from None
        try:
            return option.check(value)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not valid: it must be {option.allowed}{option.hint_in_brackets}."
            ) from None

    return read


def _method(text: str) -> str:
    if text not in METHODS:
        raise argparse.ArgumentTypeError(unknown("method", text, METHODS))
    return text


def _repeats(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: it must be a whole number >= 1.")
    return int(text)


def _vary(text: str) -> tuple[Option, list[Any]]:
    name, equals, given = text.partition("=")
    name = name.lstrip("-").replace("-", "_")
    drafting = [option.name for option in OPTIONS if option.group == "drafting"]
    if name not in drafting:
        raise argparse.ArgumentTypeError(unknown("option", name, drafting))
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} names no values: write --vary {name}=1,2,4-8.")
    try:
        return BY_NAME[name], parse_values(BY_NAME[name], given)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


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
