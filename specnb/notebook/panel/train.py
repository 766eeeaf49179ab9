"""The panel's page for training a drafter."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from html import escape
from typing import Any

import ipywidgets as widgets

from specnb.notebook.panel.compare import comparison_html
from specnb.notebook.panel.controls import Controls, labelled_widget, note
from specnb.notebook.panel.form import Form
from specnb.notebook.panel.pages import Collapsible
from specnb.notebook.panel.view import RunView
from specnb.notebook.training import time_left, training_data
from specnb.options import TRAINING_OPTIONS

_PARTS = {"answers": (0.0, 0.4), "states": (0.4, 0.55), "training": (0.55, 0.9), "measuring": (0.9, 1.0)}
"""Where each part begins and ends on the progress bar."""
_HOW = (
    "The target answers the prompts, and a small layer (EAGLE-3) learns to predict its next tokens. Give hundreds of "
    "prompts that are like those to come. Stop keeps the best drafter so far."
)


class TrainForm:
    """The form: prompts, minutes and further options; a button, the result, and a button that uses the drafter.

    Args:
        form: the panel's inputs; its pair is the target.
        view: shows the progress.
        variables: the user's variables, in which prompts may be.

    Attributes:
        result: the last result; None without any.
    """

    def __init__(self, form: Form, view: RunView, variables: Mapping[str, Any]) -> None:
        self._form, self._view, self._variables = form, view, variables
        self.result: Any = None
        self.prompts = labelled_widget(widgets.Textarea, "Prompts, one a line", rows=6, continuous_update=False)
        self.variable = labelled_widget(widgets.Text, "Or a variable that has them", placeholder="name of a list")
        self.folder = labelled_widget(widgets.Text, "Folder of the drafter", value="my-drafter")
        self.resume = widgets.Checkbox(value=False, description="go on with the training in that folder", indent=False)
        main, more = ([o for o in TRAINING_OPTIONS if (o.name == "minutes") == first] for first in (True, False))
        self.main, self.more = Controls(main, {}), Controls(more, {})
        self.button = widgets.Button(description="Train", icon="graduation-cap", tooltip="Train a drafter")
        self.use_button = widgets.Button(
            description="Use this drafter", disabled=True, tooltip="Choose the target with its new drafter as the model"
        )
        self.output = widgets.HTML()
        self.box = widgets.VBox(
            [
                note(_HOW),
                self.prompts,
                self.variable,
                self.folder,
                self.resume,
                self.main.box,
                Collapsible("More training options", self.more.box).box,
                self.button,
                self.output,
                self.use_button,
            ]
        )
        self.use_button.on_click(lambda _: self.use())

    def train(self, cancel: threading.Event) -> None:
        """Train, and show the progress and the result.

        Args:
            cancel: set to stop.

        Raises:
            ValueError: something is missing or not valid.
        """
        from specnb.training import train_drafter

        pair = self._form.session.pair(self._form.model.value)
        folder = self.folder.value.strip()
        if not folder:
            raise ValueError("name the folder of the drafter.")
        data = training_data(self.prompts.value, {"prompts": self.variable.value.strip() or None}, self._variables)
        options = self.main.values() | self.more.values()
        try:
            result = train_drafter(
                pair,
                **data,
                out=folder,
                resume=self.resume.value,
                cancel=cancel,
                on_progress=self._progress,
                **options,
            )
        except KeyboardInterrupt:
            if not cancel.is_set():
                raise
            self._view.progress(0, f"stopped before there was a drafter; the answers are kept in {folder}")
            return
        self.result = result
        self.output.value = training_html(result)
        self.use_button.disabled = False
        self._view.progress(1, "trained" if result.finished else "stopped: the best drafter so far was kept")

    def use(self) -> None:
        """Make the target with the new drafter the current model."""
        if self.result is not None:
            name = self._form.session.add(self.result.pair)
            self._view.progress(1, f"in use: {name} with the drafter in {self.result.out}")

    def _progress(self, progress: Any) -> None:
        begin, end = _PARTS[progress.part]
        left = progress.remaining_seconds
        more = "" if left is None else f" \u00b7 {time_left(left)}"
        self._view.progress(begin + (end - begin) * progress.share, progress.message + more)


def training_html(result: Any) -> str:
    """The verdict, the plot and the comparison of a training, as static HTML."""
    said = f'<div class="specnb"><p>{escape(result.verdict)}</p></div>'
    measured = comparison_html(result.comparison) if result.comparison is not None else ""
    return f"{said}{result.plot().html()}{measured}"
