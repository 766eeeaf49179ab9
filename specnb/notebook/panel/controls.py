"""A widget for every option, built from `specnb.options`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

import ipywidgets as widgets

from specnb.notebook.magic_parser import unescape
from specnb.options import Option

_UNSET = "not set"
_INDENT = "16rem"
_LABEL = "15.5rem"  # as wide as the longest option name
STYLE = (
    ".specnb-panel label{white-space:nowrap}"
    "@media(max-width:640px){.specnb-panel .widget-inline-hbox{flex-wrap:wrap;height:auto}"
    ".specnb-panel .widget-inline-hbox>.widget-label{width:100%!important;text-align:left}"
    ".specnb-panel .widget-inline-hbox>:not(.widget-label):not(textarea){min-height:28px}"
    ".specnb-panel .specnb-note{padding-left:0!important}}"
)
_WIDE = {"width": "36rem", "max_width": "calc(100% - 4px)"}


def labelled_widget(kind: Any, label: str, width: str = _LABEL, **traits: Any) -> Any:
    """Create a widget with a label in a column of its own; on narrow screens the label is above it (`STYLE`).

    Args:
        kind: the class of the widget.
        label: the text of the label.
        width: CSS width of the label.
        traits: further arguments of the class.
    """
    return kind(description=label, style={"description_width": width}, layout=widgets.Layout(**_WIDE), **traits)


def note(text: str, indent: str = "0") -> Any:
    """A line of small text, indented except on narrow screens."""
    return widgets.HTML(_small(text, indent))


def _small(text: str, indent: str) -> str:
    return f'<div class="specnb specnb-note" style="padding-left:{indent}"><small>{escape(text)}</small></div>'


def scrollable(html: str) -> str:
    """HTML that scrolls if it is wider than the panel, such as a table."""
    return f'<div style="overflow-x:auto;contain:inline-size">{html}</div>'


class Control:
    """The widget of one option, with its help.

    Args:
        option: the option.
        initial: the value that holds if the user sets nothing: the model's own setting, or the option's default. None
            means that the model decides; such an option gets a checkbox that switches it on.
        always: always pass the value to `generate`, even if the user did not set it.
        high: largest value of the slider, instead of the option's own.
    """

    def __init__(self, option: Option, initial: Any, always: bool = False, high: float | None = None) -> None:
        self.option, self.initial, self.always = option, initial, always
        self._switch: Any = None
        self._widget = self._build(high)
        row = self._widget
        if self._switch is not None:
            self._widget.disabled = not self._switch.value
            self._switch.observe(lambda change: setattr(self._widget, "disabled", not change["new"]), "value")
            row = widgets.HBox([self._widget, self._switch], layout=widgets.Layout(flex_flow="row wrap"))
        self._initial_state = self._state()
        self._given = self._resetting = False
        self._note = note(self._help(), _INDENT)
        self.box = widgets.VBox([row, self._note])
        self._widget.observe(self._mark_set, "value")

    def _build(self, high: float | None) -> Any:
        option, initial = self.option, self.initial
        if option.choices or (option.type is bool and initial is None):
            entries: list[tuple[str, Any]] = [(name, name) for name in option.choices] or [("on", True), ("off", False)]
            unset = [(_UNSET, "")] if initial is None else []  # None as a value would show as an empty field
            return labelled_widget(
                widgets.Dropdown, option.name, options=[*unset, *entries], value="" if initial is None else initial
            )
        if option.type is bool:
            return labelled_widget(widgets.Checkbox, option.name, value=initial)
        if option.type is str:
            hint = "one per line; \\n stands for a line break" if option.multiple else initial or ""
            return labelled_widget(widgets.Textarea if option.multiple else widgets.Text, option.name, placeholder=hint)
        if initial is None:
            self._switch = widgets.Checkbox(value=False, description=f"set {option.name}", indent=False)
        whole = option.type is int
        if option.slider is None:
            kind = widgets.IntText if whole else widgets.FloatText
            return labelled_widget(kind, option.name, value=initial or (0 if whole else 1.0))
        low, top = option.slider
        top = max(low, high) if high is not None else max(top, initial or top)
        suggested = low if option.suggested is None else option.suggested
        value = initial if initial is not None else min(max(suggested, low), top)
        kind = widgets.IntSlider if whole else widgets.FloatSlider
        # While the user drags, no values are sent
        more: dict[str, Any] = {
            "continuous_update": False,
            "step": 1 if whole else 0.05,
            "readout_format": "d" if whole else ".2f",
        }
        return labelled_widget(kind, option.name, value=value, min=min(low, value), max=top, **more)

    def _help(self) -> str:
        if self.always or (self.option.type is str and not self.option.choices):
            return self.option.help
        given = "set; " if self.initial is not None and self._given else ""
        return f"{self.option.help} ({given}default: {_UNSET if self.initial is None else self.initial})"

    def _mark_set(self, change: Any = None) -> None:
        """The value counts as set by the user, even if it equals the initial value, until `reset`."""
        self._given = not self._resetting
        self._note.value = _small(self._help(), _INDENT)

    def _state(self) -> tuple[Any, Any]:
        return (self._switch.value if self._switch is not None else None), self._widget.value

    def value(self) -> Any:
        """The value to pass to `generate`; None if the option should not be passed.

        Raises:
            ValueError: the value is not valid.
        """
        if self._switch is not None and not self._switch.value:
            return None
        value = None if self._widget.value == "" else self._widget.value
        if value is None:
            return None
        if self.option.type is str and not self.option.choices:
            lines = [unescape(line) for line in value.split("\n") if line] if self.option.multiple else value
            return self.option.check(lines) if lines else None
        if self._switch is None and not self.always and not self._given:
            return None
        if self.option.type is float and isinstance(value, float):
            value = round(value, 6)
        return self.option.check(value)

    def set(self, value: Any) -> None:
        """Set the widget's value; None resets it.

        Raises:
            ValueError: the value is not valid.
        """
        if value is None:
            self.reset()
            return
        value = self.option.check(value)
        if self._switch is not None:
            self._switch.value = True
        if isinstance(value, list):
            value = "\n".join(text.replace("\\", "\\\\").replace("\n", "\\n") for text in value)
        if hasattr(self._widget, "max"):  # valid values may lie outside the slider's range
            self._widget.max = max(self._widget.max, value)
            self._widget.min = min(self._widget.min, value)
        self._widget.value = value
        self._mark_set()

    def reset(self) -> None:
        """Go back to the initial value."""
        on, value = self._initial_state
        self._resetting = True
        self._mark_set()
        self._widget.value = value
        if self._switch is not None:
            self._switch.value = on
        self._resetting = False

    def observe(self, handler: Callable[[Any], object]) -> None:
        """Call `handler` after every change of the value."""
        for widget in (self._widget, self._switch):
            if widget is not None:
                widget.observe(handler, "value")


class Controls:
    """The controls of several options, one below the other.

    Args:
        options: the options.
        initial: initial values by name; for other options their default.
        special: further arguments of `Control`, by name of the option.
    """

    def __init__(self, options: Iterable[Option], initial: Mapping[str, Any], **special: Mapping[str, Any]) -> None:
        self.by_name = {o.name: Control(o, initial.get(o.name, o.default), **special.get(o.name, {})) for o in options}
        self.box = widgets.VBox([control.box for control in self.by_name.values()])

    def values(self) -> dict[str, Any]:
        """The values to pass to `generate`, by name."""
        values = {name: control.value() for name, control in self.by_name.items()}
        return {name: value for name, value in values.items() if value is not None}

    def reset(self) -> None:
        """Reset all controls."""
        for control in self.by_name.values():
            control.reset()
