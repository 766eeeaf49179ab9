"""The panel's page for loading a model by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ipywidgets as widgets

from specnb.call.method_selection import takes_assistant
from specnb.models.registry import REGISTERED
from specnb.notebook.panel.controls import labelled_widget, note
from specnb.notebook.session import Session
from specnb.notebook.worker import no_progress_bars


class LoadForm:
    """The form: names of the target and the draft model, and the button."""

    def __init__(self) -> None:
        names = list(REGISTERED)
        self.name = labelled_widget(widgets.Combobox, "Name, folder or hub id", options=names, placeholder=names[0])
        hint = "a name, a number of layers, or none"
        self.draft = labelled_widget(widgets.Combobox, "Draft model (may stay empty)", options=names, placeholder=hint)
        self.button = widgets.Button(description="Load", icon="download", tooltip="Load and make it the current model")
        first = note("A model that is not on this machine is downloaded first, which can take minutes.")
        self.box = widgets.VBox([self.name, self.draft, first, self.button])


def loaded_message(pair: Any, reasons: Mapping[str, str | None]) -> str:
    """The message about a loaded pair. `reasons` are those of `available_methods`."""
    of_drafts = [reason for name, reason in reasons.items() if takes_assistant(name)]
    unfit = (
        f", but its draft model cannot be used: {of_drafts[0]}" if pair.assistant is not None and all(of_drafts) else ""
    )
    return f"loaded: {pair.name}{unfit}"


def load(session: Session, name: str, assistant: str, progress: Callable[[float, str], object]) -> Any:
    """Load a pair into the session.

    Args:
        session: the session of the notebook.
        name: name, folder or hub id of the target.
        assistant: the same for the draft model, a number of layers, or "none"; empty for what comes with the target.
        progress: called every second with a share (always 0) and a line of text.

    Returns:
        The pair.
    """
    if not name:
        raise ValueError("give the name of a model, a folder or a hub id.")
    options: dict[str, Any] = {}
    if assistant:
        options["assistant"] = int(assistant) if assistant.isdecimal() else assistant
    began, done = time.monotonic(), threading.Event()

    def tick() -> None:
        while not done.wait(1):
            progress(0, f"loading {name} ... {time.monotonic() - began:.0f} s")

    with suppress(RuntimeError):  # no threads here
        threading.Thread(target=tick, daemon=True).start()
    try:
        with no_progress_bars():
            return session.load(name, **options)
    finally:
        done.set()
