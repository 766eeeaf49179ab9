"""The command line: `python -m specnb demo` and `python -m specnb bench`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from specnb.demo import DEFAULT_MODEL, REAL_MODEL, demo
from specnb.options import unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, 1 for what cannot be done, 130 when interrupted (argparse exits with 2)."""
    parser = argparse.ArgumentParser(prog="python -m specnb", description="Speculative decoding for notebooks.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_bench(commands)
    given = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # marks must not fail where the console has another encoding
            stream.reconfigure(errors="replace")
    try:
        given.run(given)
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
        help=f"hub id, folder, .gguf file or known name; default: {DEFAULT_MODEL}, a tiny one that comes with specnb; a real one: {REAL_MODEL}",
    )
    command.add_argument("--prompt", metavar="TEXT", help="default: a short text to copy or to change")
    command.add_argument("--max-new-tokens", type=_positive_int, default=100, metavar="N", help="default: 100")
    command.set_defaults(run=lambda given: demo(given.model, given.prompt, given.max_new_tokens))


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
        "--section", action="append", default=[], metavar="NAME", help="only this one; may be given several times"
    )
    command.add_argument("--threads", type=_positive_int, metavar="N", help="of torch; default: as torch chooses")
    command.add_argument("--output", type=Path, metavar="STEM", help="write the figures to STEM.json and STEM.md, too")
    command.set_defaults(run=_bench)


def _bench(given: argparse.Namespace) -> None:
    import torch
    import transformers

    from specnb.bench import report, suite

    if given.threads:
        torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in given.section:
        if name not in suite.SECTIONS:
            raise ValueError(unknown("section", name, suite.SECTIONS))
    found = suite.run(given.suite, lambda text: print(f"... {text}", file=sys.stderr, flush=True), given.section)
    more = f" --threads {given.threads}" if given.threads else ""
    more += "".join(f" --section '{name}'" for name in given.section)
    page = report.markdown(found, f"python -m specnb bench --suite {given.suite}{more}")
    print(page)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        given.output.with_suffix(".md").write_text(page, encoding="utf-8")


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 1")
    return int(text)
