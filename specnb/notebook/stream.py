"""Shows text while it is generated: as one display that is updated in notebooks, as printed text in terminals."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any, Protocol

from IPython.display import display

from specnb.notebook.saved import SavedCopy
from specnb.text import Detokenizer
from specnb.trace import GenerationResult, Step
from specnb.views.html import StaticView, TokenHtml, live_view, result_view
from specnb.views.text import count_noun, mark, marked_text, speed_text, step_marks

RECORDED: dict[str, Any] = {"top_logprobs": 5, "probabilities": True}
"""What the interactive view shows beside the tokens, as arguments of `generate`."""
_UPDATE_SECONDS = 0.1  # shortest time between two updates
_MAX_UPDATE_SHARE = 0.01  # share of the time that updates may take


class View(Protocol):
    """Shows a generation."""

    def step(self, step: Step) -> None:
        """Called after every step."""

    def finish(self, result: GenerationResult) -> None:
        """Called at the end, with the result."""

    def fail(self) -> None:
        """Called at the end if there is no result."""


class FinalView:
    """Shows only the result."""

    def __init__(self, shell: Any) -> None:
        self._notebook = is_notebook(shell)

    def step(self, step: Step) -> None:
        """Show nothing."""

    def finish(self, result: GenerationResult) -> None:
        """Show the result."""
        if self._notebook:
            display(_mime_bundle(result), raw=True)
        else:
            print(marked_text(result, ansi=_use_ansi()))
        print(speed_text(result))

    def fail(self) -> None:
        """Show nothing."""


class NotebookView:
    """One display, updated up to ten times a second. At the end it holds the static HTML of the result.

    Updates become rarer if they take long. The speed is printed separately, so that the saved HTML has no times.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._tokens = TokenHtml()
        self._handle: Any = None
        self._count = self._steps = 0
        self._next = time.perf_counter() + _UPDATE_SECONDS

    def step(self, step: Step) -> None:
        """Add the step, and update the display if it is time."""
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
        """Replace the text by the result."""
        self._send(_mime_bundle(result))
        print(speed_text(result))

    def fail(self) -> None:
        """Note the error below the text, if there is any text."""
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


class InteractiveView(NotebookView):
    """As `NotebookView`, with the interactive view at the end. The static HTML is for readers without a kernel.

    Args:
        tokenizer: the tokenizer; None, as `live=False`, shows nothing until the end.
        live: show the text while it is generated.
        plain_run: finds the run of plain decoding that belongs to a result.
    """

    def __init__(self, tokenizer: Any, live: bool = True, plain_run: Callable[[Any], Any] = lambda _: None) -> None:
        if tokenizer is not None:
            super().__init__(tokenizer)
        self._live, self._plain_run = live and tokenizer is not None, plain_run

    def step(self, step: Step) -> None:
        """Add the step, if the text is shown while it is generated."""
        if self._live:
            super().step(step)

    def finish(self, result: GenerationResult) -> None:
        """Replace the text by the interactive view."""
        view = result.view(self._plain_run(result))
        if isinstance(view, StaticView):
            print(view.note)
            super().finish(result)
            return
        if self._live:
            self._send({"text/html": "", "text/plain": ""})
            view.adopt(SavedCopy(self._handle))
        display(view)
        print(speed_text(result))

    def fail(self) -> None:
        """Note the error below the text, if there is any text."""
        if self._live:
            super().fail()


class TerminalView:
    """Prints marked text step by step."""

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
        """Print the rest of the text, the legend and the statistics."""
        self.fail()
        print(marked_text(result, ansi=self._ansi, text=False))
        print(speed_text(result))

    def fail(self) -> None:
        """Print the rest of the text."""
        print(mark(self._detokenizer.flush(), self._origin, self._ansi))


def view_for(
    shell: Any, tokenizer: Any, live: bool = True, interactive: bool = False, plain_run: Any = lambda _: None
) -> View:
    """The view for the shell's front end.

    Args:
        shell: the shell.
        tokenizer: gives the text; None shows only the result.
        live: show the text while it is generated.
        interactive: show the result as the interactive view. A terminal has none.
        plain_run: finds the run of plain decoding that belongs to a result, for the interactive view.
    """
    if interactive and is_notebook(shell):
        return InteractiveView(tokenizer, live, plain_run)
    if not live or tokenizer is None:
        return FinalView(shell)
    return NotebookView(tokenizer) if is_notebook(shell) else TerminalView(tokenizer)


def is_notebook(shell: Any) -> bool:
    """Whether the shell runs in a kernel, so that the front end shows HTML."""
    return getattr(shell, "kernel", None) is not None


def _mime_bundle(result: GenerationResult) -> dict[str, str]:
    return {"text/html": result_view(result), "text/plain": marked_text(result)}


def _use_ansi() -> bool:
    import os

    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


class ProgressLine:
    """A line of progress."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<small>{escape(self.text)}</small>"
