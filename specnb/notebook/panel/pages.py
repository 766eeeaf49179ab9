"""Collapsible sections, and pages of which one is shown.

Both are made of buttons, for the keyboard: ipywidgets' Accordion, and in version 7 its Tab, cannot be used with keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets

STYLE = (
    ".specnb-fold{text-align:left;font-weight:600}"
    ".specnb-pages button{text-decoration:none}"
    ".specnb-pages button.mod-active{font-weight:600;text-decoration:underline 2px;text-underline-offset:4px}"
    ".specnb-inside{border:1px solid var(--jp-border-color1,#bdbdbd);padding:8px 12px;margin:0 2px;overflow:hidden}"
)


class Collapsible:
    """A section that its title opens and closes. It is closed at first."""

    def __init__(self, title: str, content: Any) -> None:
        self.button = widgets.ToggleButton(value=False, description=title, layout=widgets.Layout(width="auto"))
        self.button.add_class("specnb-fold")
        self._content = widgets.VBox([content])
        self._content.add_class("specnb-inside")
        self.box = widgets.VBox([self.button, self._content])
        self.button.observe(lambda _: self._show(), "value")
        self._show()

    def _show(self) -> None:
        opened = self.button.value
        self.button.icon = "caret-down" if opened else "caret-right"
        self._content.layout.display = "" if opened else "none"


class Pages:
    """Pages, and a row of buttons that choose the page to show."""

    def __init__(self, pages: Mapping[str, Any]) -> None:
        self._pages = dict(pages)
        self._buttons = widgets.ToggleButtons(options=list(pages), style={"button_width": "auto"})
        self._buttons.add_class("specnb-pages")
        for title, page in pages.items():
            page.add_class(f"specnb-{title.lower()}")
        inside = widgets.VBox(list(pages.values()))
        inside.add_class("specnb-inside")
        self.box = widgets.VBox([self._buttons, inside])
        self._buttons.observe(lambda _: self._show(), "value")
        self._show()

    @property
    def open(self) -> str:
        """The title of the page that is shown."""
        return str(self._buttons.value)

    @open.setter
    def open(self, title: str) -> None:
        self._buttons.value = title

    def observe(self, handler: Callable[[], object]) -> None:
        """Call `handler` after another page was opened."""
        self._buttons.observe(lambda _: handler(), "value")

    def _show(self) -> None:
        for title, page in self._pages.items():
            page.layout.display = "" if title == self.open else "none"
