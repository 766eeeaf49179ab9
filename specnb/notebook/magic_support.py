"""What the magics share: reading their lines, errors of one line, interrupts, and quiet loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from IPython.core.error import UsageError

from specnb.notebook.magic_parser import Parser


class Interrupted(KeyboardInterrupt):
    """An interrupted generation, shown in one line. It is still an error, so that queued cells do not run."""

    def _render_traceback_(self) -> list[str]:
        return [f"Interrupted: {self}"]


def read(make: Callable[[], Parser], line: str) -> dict[str, Any] | None:
    """The arguments of a magic's line; None if help was asked for, which is printed."""
    parser = make()
    options = parser.read(line)
    if options.pop("help", False):
        print(parser.format_help())
        return None
    return options


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn errors about the user's input into UsageErrors of one line. `%tb` still shows the traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError, NotImplementedError) as error:
        raise UsageError(" ".join(str(error).split()) or type(error).__name__) from error


@contextmanager
def no_weight_bars() -> Iterator[None]:
    """Hide transformers' progress bars for reading weights. The hub's bars for downloads stay."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    if shown:
        logging.disable_progress_bar()  # this also disables the hub's bars
        enable_progress_bars()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
