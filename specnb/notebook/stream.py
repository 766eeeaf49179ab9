"""Marked text while it is generated: one display that is updated in a notebook, printed text in a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from IPython.display import display

from specnb.text import Detokenizer
from specnb.trace import GenerationResult, Step
from specnb.views.html import TokenHtml, live_view, result_view
from specnb.views.text import count_noun, mark, marked_text, speed_text, step_marks

_UPDATE_SECONDS = 0.1  # seconds between two updates
_MAX_UPDATE_SHARE = 0.01  # of the time, at most, goes into updates


class View(Protocol):
    """Shows a generation: `step` after every step, then `finish` with the result, or `fail` when there is none."""

    def step(self, step: Step) -> None: ...

    def finish(self, result: GenerationResult) -> None: ...

    def fail(self) -> None: ...


class FinalView:
    """Nothing while it runs, then the result."""

    def __init__(self, shell: Any) -> None:
        self._notebook = is_notebook(shell)

    def step(self, step: Step) -> None:
        """Nothing to show yet."""

    def finish(self, result: GenerationResult) -> None:
        """Show the result."""
        if self._notebook:
            display(_mime_bundle(result), raw=True)
        else:
            print(marked_text(result, ansi=_use_ansi()))
        print(speed_text(result))

    def fail(self) -> None:
        """Nothing to take back."""


class NotebookView:
    """One display, updated about ten times a second; its last state is the result's own static HTML.

    The tokens' HTML grows step by step, and the longer an update takes, the rarer they become. The speed is printed as a
    line of its own, so that the saved HTML holds no times.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._tokens = TokenHtml()
        self._handle: Any = None
        self._count = self._steps = 0
        self._next = time.perf_counter() + _UPDATE_SECONDS

    def step(self, step: Step) -> None:
        """Add the step; show it when it is time."""
        self._add(step)
        self._count += len(step.emitted)
        self._steps += 1
        now = time.perf_counter()
        if now >= self._next:
            self._show("generating")
            done = time.perf_counter()
            self._next = done + max(_UPDATE_SECONDS, (done - now) / _MAX_UPDATE_SHARE)

    def _add(self, step: Step) -> None:
        self._tokens.add(step, self._detokenizer.push(step.emitted))

    def finish(self, result: GenerationResult) -> None:
        """Put the result in the display's place."""
        self._send(_mime_bundle(result))
        print(speed_text(result))

    def fail(self) -> None:
        """Say that no more text comes, if some was shown."""
        if self._handle is not None:
            self._show("stopped by an error")

    def _show(self, state: str) -> None:
        note = f"{state}: {count_noun(self._count, 'token')} in {count_noun(self._steps, 'step')}"
        self._send({"text/html": live_view(self._tokens, note), "text/plain": note})

    def _send(self, bundle: dict[str, str]) -> None:
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


class TerminalView:
    """Marked text, printed as it comes."""

    def __init__(self, tokenizer: Any) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._ansi = _use_ansi()
        self._origin = "plain"

    def step(self, step: Step) -> None:
        """Print the step's tokens."""
        if step.emitted:
            self._origin = step.origins[-1]
        print(step_marks(step, self._detokenizer.push(step.emitted), self._ansi), end="", flush=True)

    def finish(self, result: GenerationResult) -> None:
        """Print what was held back, the legend and the statistics."""
        self.fail()
        print(marked_text(result, ansi=self._ansi, text=False))
        print(speed_text(result))

    def fail(self) -> None:
        """End the line."""
        print(mark(self._detokenizer.flush(), self._origin, self._ansi))


def view_for(shell: Any, tokenizer: Any, live: bool = True) -> View:
    """The view that suits the front end."""
    if not live or tokenizer is None:
        return FinalView(shell)
    return NotebookView(tokenizer) if is_notebook(shell) else TerminalView(tokenizer)


def is_notebook(shell: Any) -> bool:
    """Whether the shell belongs to a kernel, whose front ends show HTML."""
    return getattr(shell, "kernel", None) is not None


def _mime_bundle(result: GenerationResult) -> dict[str, str]:
    return {"text/html": result_view(result), "text/plain": marked_text(result)}


def _use_ansi() -> bool:
    import os

    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
