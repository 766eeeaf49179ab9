"""The arguments of the magics. Those for `generate` are built from `specnb.options`."""

from __future__ import annotations

import argparse
import keyword
from collections.abc import Callable, Iterable
from typing import Any

from specnb.models.embedded import DEFAULT
from specnb.notebook.magic_parser import Parser, flag, unescape
from specnb.notebook.values import parse_values
from specnb.options import (
    BENCH_REPEATS,
    MAGIC_MAX_NEW_TOKENS,
    METHOD_WITHOUT_DRAFT_MODEL,
    TRAINING_OPTIONS,
    Option,
    all_options,
    default,
    method_info,
    method_names,
    methods_with,
    unknown,
)

_SPECGEN = f"""Generate from the text below this line, which goes to the model byte for byte.

%%specgen must be the first line of the cell. Nothing in the cell's body is read as an option or a comment, and the line
itself cannot have comments. Put values with blanks in single or double quotes, and write a value that begins with a
dash as --option=VALUE. Backslashes outside double quotes stay as they are; inside, \\" and \\\\ are a quote and a
backslash. In --stop-strings and --system, \\n, \\t, \\r and \\\\ then mean line break, tab, carriage return and
backslash. {{name}} and $name on the line stay as written. In the body, --expand replaces {{name}} by the variable.

Without --max-new-tokens, up to {MAGIC_MAX_NEW_TOKENS} tokens are generated; %config SpecMagics shows and sets such
defaults. The variable _specgen always has the last result. A running cell can be interrupted: what was generated until
then is shown and kept, and the cell ends with an error of one line, so that queued cells do not run."""
_SPECBENCH = """Compare methods on the prompts below this line; separate several prompts by lines of three dashes.

Plain decoding is always among the runs. The runs take turns and are repeated, so that a machine that slows down slows
all of them. The table says which run is best, and whether the measurements are clear enough to tell. Options given here
go to every method that has them; --vary makes one run for each value of an option. early_exit is compared when
--assistant-early-exit is given.

The variable _specbench always has the last comparison. A running cell can be interrupted: complete rounds are kept."""
_SPECTRAIN = """Train an EAGLE-3 drafter for the loaded model from its own answers to the prompts below, one a line.

More prompts than a cell holds come from a variable (--prompts), texts to learn from as they are from another (--texts).
The drafter is written to the folder --out; %specload NAME --assistant FOLDER loads it later. Afterwards the model with
its new drafter is the current one. A running cell can be interrupted: the best drafter so far is in the folder, and
--resume goes on. The variable _spectrain always has the last result."""
_SPECLOAD = """Load a model, and a draft model if one is named, and make it the one that %%specgen uses.

NAME is a hub id, a local folder, a .gguf file or a name that specnb knows (--list shows them). Loading the same again
only switches to it. Without NAME it is {} with the draft model {}, two tiny models that come with specnb.
Models stay loaded when the extension is reloaded or unloaded; --drop NAME removes one.""".format(*DEFAULT)

_SPECMEMORY = """Show, save, load or clear what the runs of this notebook have written.

Every %%specgen run, of any method, is kept in the session's memory (one for each tokenizer, up to 100,000 tokens; the
oldest runs go first). Method suffix drafts from it, so that a prompt that is run again, or edited, is answered sooner.
The text of a run never depends on it. The memory ends with the kernel, unless it is saved to a file; the file holds the
token ids of outputs and of the ends of prompts. %%specgen --no-memory neither uses nor feeds it.

Without an ACTION the memories are shown."""
_SPECPANEL = """Open the panel: choose a method, set its options, run, stop, compare.

It uses the models that %specload loaded, and can load others. NAME is the loaded model to begin with. In Python:
panel = specnb.Panel(pair), then panel.result, panel.results, panel.options."""


def specgen_parser() -> Parser:
    """The parser of `%%specgen`: its own arguments, and one for every option, as they are now."""
    parser = Parser("%%specgen", _SPECGEN)
    own = _cell(parser, "GenerationResult")
    own.add_argument(
        "--method",
        type=_method,
        metavar="NAME",
        help=(
            f"{', '.join(method_names())}, or a lookup with a model drafter, such as suffix+draft_model or "
            f"suffix+eagle3; default: the one that fits the draft model, or {METHOD_WITHOUT_DRAFT_MODEL} without one"
        ),
    )
    own.add_argument(
        "--no-memory", action="store_true", help="neither draft from the session's memory nor add this run to it"
    )
    own.add_argument(
        "--probabilities",
        action="store_true",
        help="record the probability of each drafted token, for the panel's Steps",
    )
    own.add_argument(
        "--expand",
        action="store_true",
        help="replace {name} in the body by the variable; {{name}} gives {name}; other braces stay",
    )
    _options(parser)
    return parser


def specbench_parser() -> Parser:
    """The parser of `%%specbench`: its own arguments, and one for every option, as they are now."""
    parser = Parser("%%specbench", _SPECBENCH)
    own = _cell(parser, "Comparison")
    own.add_argument(
        "methods",
        nargs="*",
        type=_method,
        metavar="METHOD",
        help=f"one of {', '.join(method_names())}; default: all that the pair can run",
    )
    own.add_argument(
        "--vary",
        type=_vary,
        action=_Once,
        metavar="OPTION=VALUES",
        help="a run for each value: num_assistant_tokens=1,2,4-8",
    )
    own.add_argument(
        "--repeats", type=_repeats, metavar="N", help=f"how often each run is timed; default {BENCH_REPEATS}"
    )
    own.add_argument(
        "--transformers", action="store_true", help="also time transformers' own implementation of each method"
    )
    _options(parser)
    return parser


class _Once(argparse.Action):
    """Stores a value, and refuses a second one instead of replacing the first."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            parser.error(f"{option_string} was given twice; it varies one option.")
        setattr(namespace, self.dest, values)


def _cell(parser: Parser, result: str) -> Any:
    """Add the arguments that %%specgen and %%specbench share. `result` names the type of their result."""
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
    for option in all_options():
        group = groups.get(option.group) or groups.setdefault(option.group, parser.add_argument_group(option.group))
        _add_options(group, [option])


def _add_options(group: Any, options: Iterable[Option]) -> None:
    for option in options:
        if option.type is bool:
            group.add_argument(flag(option.name), action=argparse.BooleanOptionalAction, help=_help(option))
        else:
            action = "append" if option.multiple else "store"
            group.add_argument(
                flag(option.name), action=action, type=_value(option), metavar=_metavar(option), help=_help(option)
            )


def spectrain_parser() -> Parser:
    """The parser of `%%spectrain`: its own arguments, and one for every option of `train_drafter`."""
    parser = Parser("%%spectrain", _SPECTRAIN)
    own = parser.add_argument_group("the cell")
    own.add_argument("--model", metavar="NAME", help="a loaded model other than the current one")
    own.add_argument(
        "-o", "--output", type=_identifier, metavar="NAME", help="assign the TrainingResult to this variable"
    )
    own.add_argument("-q", "--quiet", action="store_true", help="show nothing")
    own.add_argument("--out", metavar="DIR", help="folder of the drafter (needed)")
    own.add_argument("--resume", action="store_true", help="go on with the training in that folder")
    for name in ("prompts", "texts", "held-out"):
        own.add_argument(f"--{name}", type=_identifier, metavar="VAR", help=f"a variable with the list of {name} texts")
    own.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="send prompts as chat messages (default: if the model has a chat template)",
    )
    _add_options(parser.add_argument_group("training"), TRAINING_OPTIONS)
    return parser


def specload_parser() -> Parser:
    """The parser of `%specload`: the arguments of `specnb.load`."""
    parser = Parser("%specload", _SPECLOAD)
    parser.add_argument("name", nargs="?", metavar="NAME")
    parser.add_argument(
        "--assistant",
        metavar="NAME",
        help=(
            "the draft model, or an EAGLE-3 or DFlash drafter; a number N: the model's own first N layers; none: no "
            "draft model (default: the one that comes with the model, if any)"
        ),
    )
    parser.add_argument("--dtype", metavar="TYPE", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device-map", metavar="MAP", help="cpu, cuda, auto (accelerate decides), ...; default cpu")
    parser.add_argument(
        "--cuda-graphs", action="store_true", help="run small blocks as CUDA graphs (needs --device-map cuda)"
    )
    parser.add_argument("--source", metavar="SOURCE", help="hub, package or local: where the name is looked up")
    parser.add_argument("-o", "--output", type=_identifier, metavar="NAME", help="assign the Pair to this variable")
    parser.add_argument("--drop", metavar="NAME", help="remove a loaded model")
    parser.add_argument(
        "--list", action="store_true", help="show the loaded models (* is the current one) and the known names"
    )
    return parser


def specpanel_parser() -> Parser:
    """The parser of `%specpanel`."""
    parser = Parser("%specpanel", _SPECPANEL)
    parser.add_argument("name", nargs="?", metavar="NAME")
    return parser


def specmemory_parser() -> Parser:
    """The parser of `%specmemory`."""
    parser = Parser("%specmemory", _SPECMEMORY)
    parser.words = tuple(MEMORY_ACTIONS)
    parser.add_argument("action", nargs="?", metavar="ACTION", help="save, load or clear")
    parser.add_argument("file", nargs="?", metavar="FILE", help="for save and load")
    parser.add_argument("--model", metavar="NAME", help="a loaded model other than the current one")
    return parser


MEMORY_ACTIONS = {"save": True, "load": True, "clear": False}
"""What `%specmemory` can do, and whether it needs a file."""


def _value(option: Option) -> Callable[[str], Any]:
    """A function for argparse that converts and checks one value of an option."""

    def read(text: str) -> Any:
        try:
            return option.read(unescape(text) if option.multiple and option.type is str else text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _method(text: str) -> str:
    try:
        return method_info(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _repeats(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: it must be a whole number >= 1.")
    return int(text)


def _vary(text: str) -> tuple[Option, list[Any]]:
    name, equals, given = text.partition("=")
    name = name.lstrip("-").replace("-", "_")
    drafting = {option.name: option for option in all_options() if option.group == "drafting"}
    if name not in drafting:
        raise argparse.ArgumentTypeError(unknown("option", name, drafting))
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} names no values: write --vary {name}=1,2,4-8.")
    try:
        return drafting[name], parse_values(drafting[name], given)
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
    trained = option.group == "training"
    values = {} if trained else {method: default(option.name, method) for method in methods_with(option)}
    text = option.help
    if option.default is not None:
        odd = [f"{method}: {value}" for method, value in values.items() if value != option.default]
        text += f"; default {option.default}" + (f" ({', '.join(odd)})" if odd else "")
    if option.methods:
        text += f" [{', '.join(values)}]"
    return text.replace("%", "%%")
