"""The static copy of what a widget shows, for notebooks that are opened without a kernel."""

from __future__ import annotations

from IPython.display import DisplayHandle

LIVE = "specnb-live"
"""CSS class of an element inside a panel, or of a token view."""
STYLE = f":is(.jp-OutputArea,.output,.cell_container,#output-body):has(.{LIVE}) .specnb-saved{{display:none}}"
"""Hides the copy while the widget itself is in the output of the cell."""


class SavedCopy:
    """A display of static HTML beside a widget. Nothing is shown before `display`.

    Args:
        handle: a display that shows something already and becomes the copy at the next update.
    """

    def __init__(self, handle: DisplayHandle | None = None) -> None:
        self._handle = handle

    def display(self, html: str, text: str) -> None:
        """Show HTML in the output of the running cell. `text` is its plain form."""
        if self._handle is None:
            self._handle = DisplayHandle()
        self._handle.display(_bundle(html, text), raw=True)

    def update(self, html: str, text: str) -> None:
        """Replace what `display` showed."""
        if self._handle is not None:
            self._handle.update(_bundle(html, text), raw=True)


def _bundle(html: str, text: str) -> dict[str, str]:
    return {"text/html": f'<div class="specnb-saved">{html}</div>', "text/plain": text}
