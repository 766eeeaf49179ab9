"""The static copy of a panel's last result, for notebooks that are opened without a kernel."""

from __future__ import annotations

from IPython.display import DisplayHandle

LIVE = "specnb-live"
"""CSS class of an element inside a panel."""
STYLE = f":is(.jp-OutputArea,.output,.cell_container,#output-body):has(.{LIVE}) .specnb-saved{{display:none}}"
"""Hides the copy while the panel itself is in the output of the cell."""


class SavedCopy:
    """A display of static HTML below the panel. Nothing is shown before `display`."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None

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
