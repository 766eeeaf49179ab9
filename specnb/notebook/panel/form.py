"""The panel's inputs: model, method, prompt and options."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets

from specnb.call.method_selection import ASSISTANT_CONFIG_OPTIONS, options_in_config
from specnb.notebook.availability import available_methods
from specnb.notebook.panel.code import Request
from specnb.notebook.panel.controls import Controls, labelled_widget, note
from specnb.notebook.panel.pages import Collapsible
from specnb.notebook.session import Session
from specnb.options import (
    METHOD_PREFERENCE,
    METHODS,
    OPTIONS,
    PANEL_MAX_NEW_TOKENS,
    REGISTRY,
    default,
    drafting_options,
    method_info,
    method_names,
)
from specnb.text import has_chat_template

_PROMPT = "Write the numbers from one to ten, one per line, twice."
_ONLY_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")  # options without effect when greedy


class Form:
    """All inputs of the panel.

    Args:
        session: the session of the notebook.
        changed: called after every change of an input.
        method: the method to begin with.

    Attributes:
        reasons: for every method, why the chosen pair cannot run it; None if it can.
    """

    def __init__(self, session: Session, changed: Callable[[], object], method: str | None = None) -> None:
        self.session = session
        self._changed, self._silent = changed, False
        self._controls: dict[tuple[int, str], Controls] = {}
        self.reasons: dict[str, str | None] = {}
        self._pair: Any = None
        self.model = labelled_widget(widgets.Dropdown, "Model", "4rem", options=[])
        self.method = labelled_widget(widgets.Dropdown, "Method", "4rem", options=[])
        self.about = widgets.HTML()
        self.prompt = widgets.Textarea(
            _PROMPT,
            description="Prompt",
            rows=5,
            style={"description_width": "4rem"},
            layout=widgets.Layout(width="auto"),
            continuous_update=False,
        )
        self.chat = widgets.Checkbox(value=False, description="send as a chat message (chat template)", indent=False)
        self.system = widgets.Text(
            placeholder="system message (may stay empty)",
            description="System",
            style={"description_width": "4rem"},
            layout=widgets.Layout(width="auto"),
            continuous_update=False,
        )
        self.reset = widgets.Button(
            description="Reset options", icon="undo", tooltip="All options back to their defaults"
        )
        self.drafting, self.main, self.more = widgets.VBox(), widgets.VBox(), widgets.VBox()
        titles = {"Drafting": self.drafting, "Length and sampling": self.main, "More options": self.more}
        folds = [Collapsible(title, options).box for title, options in titles.items()]
        self.box = widgets.VBox([self.model, self.method, self.about, self.prompt, self.chat, self.system, *folds])
        self.model.observe(self._model_chosen, "value")
        self.method.observe(self._method_chosen, "value")
        for widget in (self.prompt, self.chat, self.system):
            widget.observe(self._edited, "value")
        self.chat.observe(lambda change: self._show_system(), "value")
        self.reset.on_click(lambda _: self.reset_options())
        self.refresh()
        if method in self.available:
            self.method.value = method
        REGISTRY.listen(self.refresh_methods)

    # ---- current values
    @property
    def pair(self) -> Any:
        """The chosen pair; None while nothing is loaded."""
        return self.session.pairs.get(self.model.value)

    @property
    def available(self) -> list[str]:
        """The methods that the pair can run."""
        return [name for name, reason in self.reasons.items() if reason is None]

    def drafting_controls(self, method: str) -> Controls:
        """The controls of a method's drafting options. They keep their values while the pair is chosen."""
        key = id(self.pair), method
        if key not in self._controls:
            own = drafting_options(method).values()
            initial = {o.name: default(o.name, method) for o in own}
            initial |= (
                options_in_config(getattr(self.pair.assistant, "generation_config", None), ASSISTANT_CONFIG_OPTIONS)
                | self._configured()
            )
            layers = getattr(self.pair.target.config.get_text_config(decoder=True), "num_hidden_layers", 2)
            initial["assistant_early_exit"] = max(1, layers // 3)
            exits = {"always": True, "high": max(1, layers - 1)}
            self._controls[key] = self._observed(Controls(own, initial, assistant_early_exit=exits))
        return self._controls[key]

    @property
    def common(self) -> tuple[Controls, Controls]:
        """The controls of length and sampling: the main ones, and the others."""
        main, more = ((id(self.pair), part) for part in _PARTS)
        for key in (main, more):
            if key not in self._controls:
                own = [o for o in OPTIONS if o.group in ("length", "sampling") and (o.name in _MAIN) == (key == main)]
                initial = {"do_sample": False} | self._configured() | {"max_new_tokens": PANEL_MAX_NEW_TOKENS}
                self._controls[key] = self._observed(Controls(own, initial, max_new_tokens={"always": True}))
        return self._controls[main], self._controls[more]

    def values(self) -> dict[str, Any]:
        """The options to pass to `generate`, by name.

        Raises:
            ValueError: a value is not valid.
        """
        if self.pair is None:
            return {}
        main, more = self.common
        values = {**self.drafting_controls(self.method.value).values(), **main.values(), **more.values()}
        sampling = values.get("do_sample", main.by_name["do_sample"].initial)
        return {name: value for name, value in values.items() if sampling or name not in _ONLY_SAMPLING}

    def request(self) -> Request:
        """The run that the inputs describe.

        Raises:
            ValueError: something is missing or not valid.
        """
        self.session.pair(self.model.value)
        if not self.prompt.value.strip():
            raise ValueError("the prompt is empty: write one into the box.")
        reason = self.reasons.get(self.method.value)
        if reason is not None:
            raise ValueError(f"{self.method.value} cannot run with {self.model.value}: {reason}.")
        system = self.system.value if self.chat.value and self.system.value else None
        return Request(self.model.value, self.method.value, self.prompt.value, self.values(), self.chat.value, system)

    def set(self, **options: Any) -> None:
        """Set options by name.

        Raises:
            ValueError: the method does not have an option, or a value is not valid.
        """
        main, more = self.common
        controls = {**self.drafting_controls(self.method.value).by_name, **main.by_name, **more.by_name}
        for name, value in options.items():
            if name not in controls:
                raise ValueError(f"method {self.method.value!r} has no option {name!r}; it has {', '.join(controls)}.")
            controls[name].set(value)
        self._edited()  # widgets do not report a value that stays the same

    def reset_options(self) -> None:
        """Reset the options of the chosen method, and those of length and sampling."""
        if self.pair is not None:
            for controls in (self.drafting_controls(self.method.value), *self.common):
                controls.reset()
            self._edited()

    # ---- updates
    def refresh(self) -> None:
        """Show the pairs of the session."""
        names = list(self.session.pairs)
        if list(self.model.options) != names:
            self._silent = True
            self.model.options = names
            self.model.value = self.session.current if names else None
            self._silent = False
        if self.session.current is not None and self.model.value != self.session.current:
            self.model.value = self.session.current if names else None
        self._refresh_pair()

    def _refresh_pair(self) -> None:
        """Show the methods, the options and the chat template of the chosen pair."""
        pair = self.pair
        if pair is self._pair and (pair is not None or self.reasons):
            return
        self._pair = pair
        for key in [key for key in self._controls if pair is None or key[0] != id(pair)]:
            del self._controls[key]
        if pair is None:
            self.reasons = dict.fromkeys(method_names(), "no model is loaded")
            self.about.value = (
                "<div class='specnb'><small>No model is loaded: choose one on the page “Load” below.</small></div>"
            )
            return
        self._offer_methods()
        names = self.available
        template = has_chat_template(pair.tokenizer)
        self.chat.disabled, self.chat.value = not template, template
        if names:
            main, more = self.common
            self.main.children, self.more.children = [main.box, note(_SAMPLING), self.reset], [more.box]
        self._method_chosen()
        self._show_system()

    def _offer_methods(self) -> None:
        """Offer the methods that the chosen pair can run; the chosen one stays if it is among them."""
        self.reasons = available_methods(self.pair)
        wanted, names = self.method.value, self.available
        self._silent = True
        self.method.options = [(method_info(name).title, name) for name in names]
        preferred = next((name for name in METHOD_PREFERENCE if name in names), None)
        self.method.value = wanted if wanted in names else preferred or next(iter(names), None)
        self._silent = False

    def refresh_methods(self) -> None:
        """Show the methods anew: a drafter was registered, perhaps in place of another, or removed."""
        for key in [key for key in self._controls if key[1] not in (*METHODS, *_PARTS)]:
            del self._controls[key]
        if self.pair is not None:
            self._offer_methods()
            self._method_chosen()

    def _model_chosen(self, change: Any) -> None:
        if self._silent or change["new"] is None:
            return
        if self.session.current != change["new"]:
            self.session.set_current(change["new"])  # which calls refresh()
        self._refresh_pair()

    def _method_chosen(self, change: Any = None) -> None:
        if self._silent:
            return
        name = self.method.value
        missing = {method_info(n).title: reason for n, reason in self.reasons.items() if reason is not None}
        listed = "".join(f"<li><s>{escape(t)}</s> (cannot run): {escape(r)}</li>" for t, r in missing.items())
        fold = (
            f"<details><summary>{len(missing)} methods cannot run with this pair</summary><ul>{listed}</ul></details>"
        )
        about = "No method can run."
        if name:
            info = method_info(name)
            about = f"{info.title}: {info.help}." + (f" {info.source}." if info.source else "")
        self.about.value = f"<div class='specnb'><small>{escape(about)}</small>{fold if missing else ''}</div>"
        if name:
            controls = self.drafting_controls(name)
            self.drafting.children = [
                controls.box if controls.by_name else note("Plain decoding drafts nothing."),
                self.reset,
            ]
        self._edited()

    def _show_system(self) -> None:
        self.system.layout.display = "" if self.chat.value else "none"

    def _edited(self, change: Any = None) -> None:
        if not self._silent:
            self._changed()

    def _observed(self, controls: Controls) -> Controls:
        for control in controls.by_name.values():
            control.observe(self._edited)
        return controls

    def _configured(self) -> dict[str, Any]:
        """The options that the target's generation config sets."""
        config = self.pair.target.generation_config
        values = {option.name: getattr(config, option.name, None) for option in OPTIONS}
        return {name: value for name, value in values.items() if value is not None and name != "assistant_early_exit"}


_PARTS = ("(main)", "(more)")  # keys of the controls of length and sampling, beside the names of methods
_MAIN = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "seed")
_SAMPLING = "temperature, top_k, top_p, min_p and seed only have an effect when sampling (do_sample)."
