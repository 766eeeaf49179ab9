"""The panel: choose a method, set its options, run, stop, compare, train a drafter."""

from __future__ import annotations

import threading
from typing import Any

import ipywidgets as widgets
from IPython.core.getipython import get_ipython

from specnb.notebook import saved
from specnb.notebook.panel import controls, pages
from specnb.notebook.panel.code import magic_code, python_code
from specnb.notebook.panel.compare import CompareForm
from specnb.notebook.panel.form import Form
from specnb.notebook.panel.load import LoadForm, load, loaded_message
from specnb.notebook.panel.train import TrainForm
from specnb.notebook.panel.view import LiveText, RunView, plots_html
from specnb.notebook.session import LAST, Session
from specnb.notebook.stream import RECORDED
from specnb.notebook.worker import Worker
from specnb.options import method_info
from specnb.text import prompt_inputs
from specnb.trace import GenerationResult
from specnb.views.html import result_view
from specnb.views.text import marked_text

_STYLE = f"<style>{saved.STYLE}{controls.STYLE}{pages.STYLE}</style>"
_CLOSED = "specnb panel: run this cell again in a running kernel to use it."


class Panel:
    """A panel of widgets for the loaded models. It shares its session with the magics.

    The Run button, or `run()`, starts one generation. While it runs, the button does nothing. `stop()` ends it within
    one step and keeps what was generated.

    Args:
        pair: the `Pair` to begin with; None takes the current one of the session. The panel can choose any loaded pair.
        session: the state of the notebook; None takes that of the running shell.
        method: the method to begin with; None takes the first of `METHOD_PREFERENCE` that the pair can run.
        thread: False runs in the calling thread: `run()` returns at the end, and Stop has no effect.

    Attributes:
        results: all results, the last one at the end.
        comparison: the last `Comparison`; None without any.
        error: what the last action raised; the panel shows it too.

    Raises:
        ValueError: the method does not exist.
    """

    def __init__(
        self, pair: Any = None, *, session: Session | None = None, method: str | None = None, thread: bool = True
    ) -> None:
        self._shell = shell = get_ipython()
        self.session = session if session is not None else Session() if shell is None else Session.for_shell(shell)
        if pair is not None:
            self.session.add(pair)
        self.results: list[GenerationResult] = []
        self.comparison: Any = None
        self.error: BaseException | None = None
        self._drawn: GenerationResult | None = None
        self._saved = saved.SavedCopy()
        self._worker = Worker(self._busy, self._failed, thread)
        self._plot_worker = Worker(lambda _: None, self._failed, thread)
        if method is not None:
            method_info(method)
        self._form = Form(self.session, self._edited, method)
        self._view = RunView(self.session.plain_run)
        self._compare = CompareForm(self._form)
        self._build()
        self.session.listeners.append(self._refresh)
        self._refresh()
        self._edited()

    def _build(self) -> None:
        button = widgets.Button
        self._run = button(description="Run", icon="play", button_style="primary", tooltip="Generate from the prompt")
        self._stop = button(
            description="Stop", icon="stop", disabled=True, tooltip="End within one step; the text stays"
        )
        self._python, self._magic = (
            widgets.Textarea(
                rows=9, description=label, layout=widgets.Layout(width="auto"), style={"description_width": "5rem"}
            )
            for label in ("Python", "Magic")
        )
        self._load = LoadForm()
        self._train = TrainForm(self._form, self._view, getattr(self._shell, "user_ns", {}))
        view, code = self._view, widgets.VBox([controls.note("Select all and copy."), self._python, self._magic])
        shown = {"Text": view.text_box, "Steps": view.steps_box, "Plots": view.plots, "Compare": self._compare.box}
        self._pages = pages.Pages(shown | {"Train": self._train.box, "Code": code, "Load": self._load.box})
        if not self.session.pairs:
            self._pages.open = "Load"
        row = widgets.Layout(flex_flow="row wrap", align_items="center")
        self.widget = widgets.VBox(
            [
                widgets.HTML(_STYLE + f'<span class="{saved.LIVE}"></span>'),
                self._form.box,
                widgets.HBox([self._run, self._stop, view.bar, view.status], layout=row),
                view.error,
                self._pages.box,
            ]
        )
        self.widget.add_class("specnb-panel")
        self._run.on_click(lambda _: self.run())
        self._stop.on_click(lambda _: self.stop())
        self._load.button.on_click(lambda _: self.load(self._load.name.value, self._load.draft.value))
        self._compare.button.on_click(lambda _: self.compare())
        self._train.button.on_click(lambda _: self.train())
        self._pages.observe(self._update_plots)

    # ---- in Python
    @property
    def result(self) -> GenerationResult | None:
        """The last result."""
        return self.results[-1] if self.results else None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `generate` that a run would use: the method, and the options that were set."""
        return {"method": self._form.method.value, **self._form.values()}

    @property
    def busy(self) -> bool:
        """Whether a generation, a comparison or a load is running."""
        return self._worker.busy

    def set(self, method: str | None = None, prompt: str | None = None, **options: Any) -> None:
        """Set the widgets: the method, the prompt, and options by name.

        Raises:
            ValueError: the pair cannot run the method, or an option is not valid.
        """
        if method is not None:
            if method not in self._form.available:
                other = (
                    "the panel offers hybrids of suffix decoding only" if "+" in method else "there is no such method"
                )
                raise ValueError(f"{method!r} cannot run here: {self._form.reasons.get(method, other)}.")
            self._form.method.value = method
        if prompt is not None:
            self._form.prompt.value = prompt
        self._form.set(**options)

    def run(self, wait: bool = False) -> bool:
        """Generate, as the Run button does.

        Args:
            wait: return at the end, and raise the error if there was one.

        Returns:
            False, without doing anything, if something is running.
        """
        return self._start(self._generate, "generating ...", wait)

    def compare(self, wait: bool = False) -> bool:
        """Compare, as the Compare button does. Argument and result as in `run`."""
        return self._start(self._measure, "comparing ...", wait)

    def train(self, wait: bool = False) -> bool:
        """Train a drafter, as the Train button does; `training` is its result. Argument and result as in `run`."""
        return self._start(self._train.train, "training ...", wait)

    @property
    def training(self) -> Any:
        """The last `TrainingResult`; None without any."""
        return self._train.result

    def load(self, name: str, assistant: str = "", wait: bool = False) -> bool:
        """Load a model, as the Load button does. `wait` and the result as in `run`."""

        def job(cancel: threading.Event) -> None:
            pair = load(self.session, name, assistant, self._view.progress)
            self._view.progress(1, loaded_message(pair, self._form.reasons))
            self._pages.open = "Text"

        return self._start(job, f"loading {name} ...", wait)

    def stop(self) -> None:
        """End what is running within one step."""
        self._worker.stop()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of what is running, at most `timeout` seconds. Raises its error, or TimeoutError."""
        if not self._worker.wait(timeout):
            raise TimeoutError(f"the panel still runs after {timeout} s")
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Stop, and remove the panel's widgets."""
        self.stop()
        if self._refresh in self.session.listeners:
            self.session.listeners.remove(self._refresh)
        self.widget.close()

    # ---- jobs, in the worker's thread
    def _start(self, job: Any, text: str, wait: bool) -> bool:
        if self._worker.busy:
            return False
        self.error = None
        self._view.begin(text)
        started = self._worker.start(job, wait)
        if wait:
            self.wait()
        return started

    def _generate(self, cancel: threading.Event) -> None:
        import specnb

        request = self._form.request()
        pair = self._form.pair
        inputs = prompt_inputs(
            pair.tokenizer, request.prompt, chat=request.chat, system=request.system, device=pair.target.device
        )
        live = LiveText(pair.tokenizer, self._view, request.options["max_new_tokens"])
        if self._pages.open not in ("Text", "Steps", "Plots"):
            self._pages.open = "Text"
        given = inputs | RECORDED | request.arguments | self.session.drafts_from(pair, request.method)
        try:
            result = specnb.generate(pair, **given, on_step=live.step, cancel=cancel)
        except BaseException as error:
            partial = getattr(error, "partial_result", None)
            if partial is not None and partial.num_emitted_tokens:
                self._keep(partial, pair)
            else:
                live.fail()
            raise
        self._keep(result, pair)

    def _measure(self, cancel: threading.Event) -> None:
        found = self._compare.measure(self._view, cancel)
        if found.rows:
            self.comparison = found
            self._saved.update(self._compare.output.value, str(found))

    def _keep(self, result: GenerationResult, pair: Any) -> None:
        self.session.remember(pair, result)
        self.session.set_result(result)  # the session tells all panels to show it
        if self._shell is not None:
            self._shell.user_ns[LAST] = result
        self._saved.update(result_view(result), marked_text(result))
        self._code()

    # ---- showing
    def _busy(self, busy: bool) -> None:
        for button in (self._run, self._load.button, self._compare.button, self._train.button):
            button.disabled = busy
        self._stop.disabled = not busy
        if not busy:
            self._update_plots(finished=True)

    def _failed(self, error: BaseException) -> None:
        self.error = error
        self._view.fail(error)

    def _refresh(self) -> None:
        """Show the models and the last result of the session, which may come from a magic or another panel."""
        self._form.refresh()
        self._compare.refresh()
        last = self.session.last
        if last is not None and last is not self.result:
            self.results.append(last)
            self._view.show(last)
            if not self.busy:
                self._update_plots()

    def _edited(self) -> None:
        if hasattr(self, "_compare"):
            self._compare.refresh()
            self._code()

    def _code(self) -> None:
        try:
            request = self._form.request()
        except ValueError as error:
            self._python.value = self._magic.value = f"# {error}"
            return
        self._python.value = python_code(request, self.session.load_options(request.model))
        self._magic.value = magic_code(request)

    def _update_plots(self, finished: bool = False) -> None:
        """Draw the plots in a thread of their own, and only if their page is open."""
        if self._pages.open == "Plots" and self.result is not self._drawn and (finished or not self.busy):
            self._plot_worker.start(self._draw)

    def _draw(self, cancel: threading.Event) -> None:
        while (result := self.result) is not None and result is not self._drawn:
            self._view.plots.value = plots_html(result)
            self._drawn = result

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        text = f"{_CLOSED}\n{marked_text(self.result)}" if self.result is not None else _CLOSED
        if getattr(self._shell, "kernel", None) is not None:
            self._saved.display(result_view(self.result) if self.result is not None else "", text)
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return {
            "application/vnd.jupyter.widget-view+json": view,
            "text/html": f"<small>{_CLOSED}</small>",
            "text/plain": text,
        }

    def __repr__(self) -> str:
        return f"Panel({', '.join(self.session.pairs) or 'no model loaded'})"
