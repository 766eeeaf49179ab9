"""`%%spectrain`: a training with its progress on the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.display import display

from specnb.notebook.stream import ProgressLine, is_notebook

LAST_TRAINING = "_spectrain"
"""The variable that holds the last result."""
_VARIABLES = ("prompts", "texts", "held_out")


class TrainingPage:
    """Shows where a training is: a line that changes in a notebook, lines below each other in a terminal.

    Args:
        shell: the IPython shell.
        quiet: show nothing.
        live: in a notebook, change the line while it runs.
    """

    def __init__(self, shell: Any, quiet: bool, live: bool) -> None:
        self._quiet, self._notebook = quiet, is_notebook(shell)
        self._handle: Any = None
        if self._notebook and live and not quiet:
            self._handle = display(ProgressLine("starting ..."), display_id=True)

    def progress(self, progress: Any) -> None:
        """Show a `Progress`."""
        left = None if progress.done else progress.remaining_seconds
        text = progress.message + ("" if left is None else f" \u00b7 {time_left(left)}")
        if self._handle is not None:
            self._handle.update(ProgressLine(text))
        elif not self._quiet and not self._notebook:
            print(text, flush=True)

    def finish(self, result: Any) -> None:
        """Show the result: its verdict and, in a notebook, its plot."""
        if self._quiet:
            return
        if self._handle is not None:
            self._handle.update(ProgressLine(result.verdict))
        elif self._notebook:  # in a terminal, the last message said it
            print(result.verdict)
        if self._notebook:
            display(result.plot())

    def fail(self, text: str) -> None:
        """Say how it ended."""
        if self._handle is not None:
            self._handle.update(ProgressLine(text))


def training_data(body: str, names: Mapping[str, str | None], variables: Mapping[str, Any]) -> dict[str, Any]:
    """The prompts and texts of a cell.

    Args:
        body: the cell's body: prompts, one a line.
        names: the variables that the options name.
        variables: the user's variables.

    Raises:
        ValueError: a variable does not exist, or there is nothing to learn from.
    """
    data: dict[str, Any] = {}
    for option in _VARIABLES:
        name = names.get(option)
        if name is None:
            continue
        if name not in variables:
            raise ValueError(f"--{option.replace('_', '-')} {name}: there is no variable {name!r}.")
        data[option] = variables[name]
    lines = [line for line in body.split("\n") if line.strip()]
    if lines:
        given: Sequence[str] = data.get("prompts", ())
        data["prompts"] = [*lines, *given] if not isinstance(given, str) else given
    if not data.keys() & {"prompts", "texts"}:
        raise ValueError(
            "there is nothing to learn from: write prompts below the line, one a line, or name a variable with "
            "--prompts or --texts."
        )
    return data


def train(pair: Any, page: TrainingPage, data: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Run `train_drafter` and show its progress; an interrupt has `.partial_result`, if there is one."""
    from specnb.training import train_drafter

    report: Callable[[Any], object] = page.progress
    try:
        result = train_drafter(pair, **data, on_progress=report, **options)
    except KeyboardInterrupt as interrupt:
        partial = getattr(interrupt, "partial_result", None)
        page.fail("interrupted" + ("." if partial is None else f": {partial.verdict}"))
        raise
    except BaseException:
        page.fail("ended with an error.")
        raise
    page.finish(result)
    return result


def time_left(seconds: float) -> str:
    """The time that is left, in words."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min left"
