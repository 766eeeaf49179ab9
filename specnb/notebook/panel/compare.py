"""The panel's page for comparisons."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from specnb.notebook.panel.controls import labelled_widget, note, scrollable
from specnb.notebook.panel.form import Form
from specnb.notebook.panel.view import RunView
from specnb.notebook.values import parse_values
from specnb.options import BENCH_REPEATS, drafting_options, method_info


class CompareForm:
    """The form: compare several methods, or several values of one option of the chosen method.

    Args:
        form: the panel's inputs.
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        self.what = labelled_widget(widgets.Dropdown, "Compare", options=["methods", "values of one option"])
        self.methods = labelled_widget(widgets.SelectMultiple, "Methods (Ctrl or Shift: several)", options=[], rows=5)
        self.option = labelled_widget(widgets.Dropdown, "Option of the chosen method", options=[])
        self.given = labelled_widget(widgets.Text, "Values", value=_VALUES, placeholder="1, 2, 4-8")
        self.repeats = labelled_widget(
            widgets.IntSlider, "Repeats", value=BENCH_REPEATS, min=1, max=10, continuous_update=False
        )
        self.button = widgets.Button(description="Compare", icon="bar-chart", tooltip="Run all of them, taking turns")
        self.output = widgets.HTML()
        self.box = widgets.VBox(
            [
                self.what,
                self.methods,
                self.option,
                self.given,
                self.repeats,
                note(_HOW_MEASURED),
                self.button,
                self.output,
            ]
        )
        self.what.observe(lambda _: self._show(), "value")
        self.option.observe(lambda _: self._suggest(), "value")
        self.refresh()

    def refresh(self) -> None:
        """Offer the methods and options of the chosen pair and method."""
        names = [name for name in self.form.available if name != "plain"]
        entries = [(method_info(name).title, name) for name in names]
        if list(self.methods.options) != entries:
            self.methods.options = entries
            self.methods.value = names
        method = self.form.method.value
        own = list(drafting_options(method)) if method else []
        if list(self.option.options) != own:
            before = self.option.value
            self.option.options = own
            # ipywidgets 8 does not choose a value by itself
            self.option.value = before if before in own else next(iter(own), None)
        self._show()

    def runs(self) -> list[dict[str, Any]]:
        """The runs, as arguments of `generate`.

        Raises:
            ValueError: there is nothing to compare.
        """
        if self.what.value == "methods":
            chosen = list(self.methods.value)
            if not chosen:
                raise ValueError("choose at least one method to compare with plain decoding.")
            return [{"method": name, **self.form.drafting_controls(name).values()} for name in chosen]
        method = self.form.method.value
        option = drafting_options(method).get(self.option.value)
        if option is None or method == "plain":
            raise ValueError("plain decoding has no options to vary: choose another method above.")
        base = self.form.drafting_controls(method).values()
        return [{"method": method, **base, option.name: value} for value in parse_values(option, self.given.value)]

    def common(self) -> dict[str, Any]:
        """The options that all runs share, such as those of sampling."""
        own = self.form.drafting_controls(self.form.method.value).by_name
        return {name: value for name, value in self.form.values().items() if name not in own}

    def measure(self, view: RunView, cancel: threading.Event) -> Any:
        """Run the comparison and show it.

        Args:
            view: shows the progress.
            cancel: set to stop.

        Returns:
            The `Comparison`; it has no rows if it was stopped early.

        Raises:
            ValueError: there is nothing to compare, or an input is not valid.
        """
        from specnb.bench import compare

        request, runs, common = self.form.request(), self.runs(), self.common()

        def show_progress(done: int, total: int, label: str) -> None:
            view.progress(done / total, f"comparing: run {done + 1} of {total}, {label}")

        found = compare(
            self.form.pair,
            request.prompt,
            runs,
            repeats=self.repeats.value,
            chat=request.chat,
            system=request.system,
            cancel=cancel,
            on_run=show_progress,
            **common,
        )
        self.output.value = comparison_html(found)
        view.progress(1, found.verdict if found.rows else "stopped")
        return found

    def _show(self) -> None:
        sweep = self.what.value != "methods"
        for widget, shown in ((self.methods, not sweep), (self.option, sweep), (self.given, sweep)):
            widget.layout.display = "" if shown else "none"

    def _suggest(self) -> None:
        method = self.form.method.value
        option = drafting_options(method).get(self.option.value) if method else None
        if option is not None and option.choices:
            self.given.value = ", ".join(option.choices)
        elif option is not None and option.type is float:
            self.given.value = "0, 0.2, 0.4, 0.6, 0.8" if not option.low_open else "0.2, 0.4, 0.6, 0.8"
        else:
            self.given.value = _VALUES


_HOW_MEASURED = "The runs take turns and are repeated; each is warmed up first. A table and a plot show which is best."
_VALUES = "1-8"  # suggested values of an int option


def comparison_html(comparison: Any) -> str:
    """The table and the plot of a comparison, as static HTML."""
    if not comparison.rows:
        return (
            '<div class="specnb"><small>Stopped before the first round was complete: nothing to compare.</small></div>'
        )
    on = comparison.environment
    facts: Sequence[str] = (
        f"repeats: {comparison.repeats}",
        f"{on['model']}, {on['dtype']}",
        str(on["device"]),
        f"threads: {on['threads']}",
    )
    small = f'<div class="specnb"><small>{escape(" · ".join(facts))}</small></div>'
    return f"{scrollable(comparison._repr_html_())}{small}{comparison.plot().html()}"
