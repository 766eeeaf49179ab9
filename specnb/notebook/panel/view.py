"""The panel's outputs: progress, text, steps and plots."""

from __future__ import annotations

import time
import traceback
from html import escape
from typing import Any

import ipywidgets as widgets

from specnb.notebook.panel.controls import note, scrollable
from specnb.notebook.stream import NotebookView
from specnb.trace import GenerationResult, RowResult, Step
from specnb.views.html import live_view, result_view
from specnb.views.table import Table
from specnb.views.text import count_noun, row_steps, speed_text


class LiveText(NotebookView):
    """The view of `%%specgen` in an HTML widget, with progress. `budget` is `max_new_tokens`."""

    def __init__(self, tokenizer: Any, output: RunView, budget: int) -> None:
        super().__init__(tokenizer)
        self._output, self._budget = output, budget
        self._began = time.perf_counter()
        self._drafted = self._accepted = 0

    def _add(self, step: Step) -> None:
        detokenizer = self._detokenizer
        head = detokenizer.push(step.emitted[: step.accepted])
        dropped = detokenizer.peek(step.rejected) if step.rejected else []
        self._tokens.add(step, [*head, *detokenizer.push(step.emitted[step.accepted :])], dropped)
        self._drafted += len(step.drafted)
        self._accepted += step.accepted

    def _show(self, state: str) -> None:
        note = f"{state}: {count_noun(self._count, 'token')} in {count_noun(self._steps, 'step')}"
        self._output.text.value = live_view(self._tokens, note, rejected=self._output.rejected.value)
        seconds = time.perf_counter() - self._began
        parts = [f"{self._count} of at most {self._budget} tokens", f"{self._count / seconds:.1f} tokens/s"]
        if self._drafted:
            parts.append(f"{self._accepted / self._drafted:.0%} of the drafted tokens accepted")
        self._output.progress(self._count / self._budget, " · ".join(parts))

    def finish(self, result: GenerationResult) -> None:
        """Show the result."""
        self._output.show(result)

    def fail(self) -> None:
        """Note the error below the text, if there is any text."""
        if self._steps:
            self._show("stopped by an error")


class RunView:
    """The widgets of a run's outputs. `result` is the result that they show."""

    def __init__(self) -> None:
        self.result: GenerationResult | None = None
        self.bar = widgets.FloatProgress(value=0, min=0, max=1, layout=widgets.Layout(width="10rem"))
        self.status = widgets.HTML()
        self.rejected = widgets.Checkbox(value=False, description="show rejected drafts (struck through)", indent=False)
        self.text = widgets.HTML(_hint("The text appears here: choose a method and press Run."))
        self.step = widgets.BoundedIntText(value=1, min=1, max=1, description="Step", disabled=True)
        self.details = widgets.HTML()
        self.plots = widgets.HTML(_hint("The plots of a run appear here."))
        self.error = widgets.HTML()
        self.rejected.observe(lambda _: self.result is not None and self.show(self.result, False), "value")
        self.step.observe(lambda _: self.show_step(), "value")

    def progress(self, share: float, text: str) -> None:
        """Set the progress bar (0 to 1) and the text beside it."""
        self.bar.value = min(1.0, share)
        self.status.value = f'<div class="specnb"><small>{escape(text)}</small></div>'

    def begin(self, text: str) -> None:
        """Prepare for a new run. The last result stays visible."""
        self.error.value = ""
        self.progress(0, text)

    def show(self, result: GenerationResult, fresh: bool = True) -> None:
        """Show a result. `fresh` also shows its speed and its first step."""
        self.result = result
        self.text.value = result_view(result, self.rejected.value)
        if not fresh:
            return
        self.progress(
            1, f"{speed_text(result)} · ended: {', '.join(sorted({row.finish_reason for row in result.rows}))}"
        )
        count = len(result.rows[0].steps)
        self.step.max = max(1, count)
        self.step.disabled = not count
        self.step.value = 1
        self.show_step()

    def fail(self, error: BaseException) -> None:
        """Show an error."""
        self.status.value = ""
        self.error.value = error_html(error)

    def show_step(self) -> None:
        """The details of the chosen step."""
        if self.result is None or not self.result.rows[0].steps:
            self.details.value = _hint("Steps appear here after a run.")
        else:
            self.details.value = step_html(self.result.rows[0], self.step.value - 1)

    @property
    def steps_box(self) -> Any:
        """The widgets of the page with the steps."""
        return widgets.VBox([self.step, self.details, note(_PROBABILITY_NOTE)])


_PROBABILITY_NOTE = (
    "Draft probability: the probability of the token under the drafter (tokens from a lookup have none). Target "
    "probability: its probability under the target, after temperature and filters. Drafted tokens after the first "
    "rejected one are dropped. A dash means that there is no probability, or that the run did not record it "
    "(%%specgen does with --probabilities)."
)


def step_html(row: RowResult, number: int) -> str:
    """A step as an HTML table with every drafted token, its fate and its probabilities. `number` counts from 0."""
    step, texts, rejected = list(row_steps(row))[number]
    own = step.origins[-1] if len(step.emitted) > step.accepted else None
    names = [*texts[: step.accepted], *rejected]
    lines: list[list[object]] = []
    for i, token in enumerate(step.drafted):
        fate = "accepted" if i < step.accepted else "rejected" if i == step.accepted else "dropped"
        shown = repr(names[i]) if i < len(names) else str(token)
        lines.append(
            [i + 1, shown, fate, *(_probability(of, i) for of in (step.draft_probabilities, step.target_probabilities))]
        )
    if own is not None:
        lines.append([None, repr(texts[step.accepted]), own, None, None])
    seconds = f"{1000 * step.draft_seconds:.1f} ms drafting, {1000 * step.verify_seconds:.1f} ms verifying"
    count = f"{step.accepted} of {len(step.drafted)} drafted tokens accepted"
    head = f"Step {number + 1} of {len(row.steps)}: {count}; {seconds}."
    headers = ("position", "token", "became", "draft probability", "target probability")
    return f'<div class="specnb"><small>{head}</small></div>{scrollable(Table(lines, headers).to_html())}'


def plots_html(result: GenerationResult) -> str:
    """All plots of a result, as static HTML."""
    from specnb.views.plots import KINDS

    return "".join(draw(result).html() for draw in KINDS.values())


def error_html(error: BaseException) -> str:
    """An error in one line, with its traceback in a collapsed section, as static HTML."""
    said = " ".join(str(error).split()) or "no message"
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return (
        f'<div class="specnb"><strong>⚠ {type(error).__name__}:</strong> <span>{escape(said)}</span>'
        f"<details><summary>traceback</summary><pre>{escape(trace)}</pre></details></div>"
    )


def _probability(of: tuple[float, ...] | None, i: int) -> str | None:
    return f"{of[i]:.4f}" if of is not None and i < len(of) else None


def _hint(text: str) -> str:
    return f'<div class="specnb"><small>{escape(text)}</small></div>'
