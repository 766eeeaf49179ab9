"""The command line: `python -m specnb demo`, `bench` and `train`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specnb.demo import DEFAULT_MODEL, REAL_MODEL, demo
from specnb.options import DEMO_MAX_NEW_TOKENS, TRAINING_OPTIONS, Option, unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the words of the command line; None takes those of the process.

    Returns:
        The exit code: 0 for success, 1 for an error, 130 after an interrupt. argparse exits with 2 for wrong arguments.
    """
    parser = argparse.ArgumentParser(prog="python -m specnb", description="Speculative decoding for notebooks.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_bench(commands)
    _add_train(commands)
    args = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # the marks may not exist in the console's encoding
            stream.reconfigure(errors="replace")
    try:
        args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError) as error:
        print(f"specnb: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "demo", help="compare plain decoding, prompt lookup and a draft model on one prompt", allow_abbrev=False
    )
    command.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="NAME",
        help=(
            f"hub id, folder, .gguf file or known name; default: {DEFAULT_MODEL}, a tiny one that comes with specnb; "
            f"a real one: {REAL_MODEL}"
        ),
    )
    command.add_argument("--prompt", metavar="TEXT", help="default: a short text to copy or to change")
    command.add_argument(
        "--max-new-tokens",
        type=_positive_int,
        default=DEMO_MAX_NEW_TOKENS,
        metavar="N",
        help=f"default: {DEMO_MAX_NEW_TOKENS}",
    )
    command.set_defaults(run=lambda args: demo(args.model, args.prompt, args.max_new_tokens))


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "bench", help="measure speed on the built-in suite, against transformers' own methods", allow_abbrev=False
    )
    command.add_argument(
        "--suite",
        choices=["small", "full"],
        default="small",
        help="some minutes, or about half an hour; default: small",
    )
    command.add_argument(
        "--section",
        action="append",
        default=[],
        metavar="NAME",
        help="measure only this section; may be given several times",
    )
    command.add_argument(
        "--threads", type=_positive_int, metavar="N", help="threads for torch; default: torch's own choice"
    )
    command.add_argument(
        "--output", type=Path, metavar="STEM", help="also write the measurements to STEM.json and STEM.md"
    )
    command.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> None:
    import torch
    import transformers

    from specnb.bench import report, suite

    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in args.section:
        if name not in suite.SECTIONS:
            raise ValueError(unknown("section", name, suite.SECTIONS))
    found = suite.run(args.suite, lambda text: print(f"... {text}", file=sys.stderr, flush=True), args.section)
    more = f" --threads {args.threads}" if args.threads else ""
    more += "".join(f" --section '{name}'" for name in args.section)
    page = report.markdown(found, f"python -m specnb bench --suite {args.suite}{more}")
    print(page)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        args.output.with_suffix(".md").write_text(page, encoding="utf-8")


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "train", help="train an EAGLE-3 drafter from the target's own answers", allow_abbrev=False
    )
    command.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME", help=f"the target; default: {DEFAULT_MODEL}")
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of the drafter")
    command.add_argument("--prompts", type=Path, metavar="FILE", help="prompts that the target answers, one a line")
    command.add_argument("--held-out", type=Path, metavar="FILE", help="prompts to measure with, one a line")
    command.add_argument("--texts", type=Path, nargs="+", metavar="FILE", help="texts to learn from, one a file")
    command.add_argument("--resume", action="store_true", help="go on with the training in the folder")
    command.add_argument("--chat", action=argparse.BooleanOptionalAction, help="send prompts as chat messages")
    for option in TRAINING_OPTIONS:
        default = "" if option.default is None else f"; default: {option.default}"
        command.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=_value(option),
            metavar="N",
            help=f"{option.help}{default}".replace("%", "%%"),
        )
    command.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> None:
    import transformers

    import specnb

    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {option.name: getattr(args, option.name) for option in TRAINING_OPTIONS}
    specnb.train_drafter(
        specnb.load(args.model),
        _lines(args.prompts),
        None if args.texts is None else [path.read_text(encoding="utf-8") for path in args.texts],
        out=args.out,
        held_out=_lines(args.held_out),
        resume=args.resume,
        chat=args.chat,
        **options,
    )


def _lines(path: Path | None) -> list[str] | None:
    """The lines of a file that are not empty."""
    return None if path is None else [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _value(option: Option) -> Callable[[str], Any]:
    """A function for argparse that converts and checks a value."""

    def read(text: str) -> Any:
        try:
            return option.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 1")
    return int(text)
