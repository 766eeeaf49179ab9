"""The interactive view of a result's tokens: an anywidget, with branches that continue from other tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
from IPython.core.getipython import get_ipython
from traitlets import Bool, Dict, Enum, Int, List

from specnb.notebook.saved import SavedCopy
from specnb.notebook.stream import RECORDED
from specnb.notebook.worker import Worker
from specnb.trace import GenerationResult, Step
from specnb.views.html import escape_text, result_view
from specnb.views.text import count_noun, marked_text
from specnb.views.token_model import Model, branch_model, token_model

_HERE = Path(__file__).parent
_UPDATE_SECONDS = 0.25
_CLOSED = "specnb: run this cell again in a running kernel for the interactive view; the text is above."


class TokenView(anywidget.AnyWidget):
    """A result with every token's origin, what the models thought of it, a replay, and branches.

    A run with `top_logprobs=5, probabilities=True` has all there is to show. Branches, questions to the target and a
    measurement of plain decoding run in a thread, so that the kernel stays free; `stop` ends what is running.

    Args:
        result: the result; None is an empty view.
        plain: a run of plain decoding from the same prompt, for the replay's second lane.
        thread: False runs in the calling thread.

    Attributes:
        results: the result, and the results of the branches, in the order of `runs`.
        runs: the tree of runs, as the front end has it: "id", "parent" (None for the first), "row", "index", "text" of
            the chosen token, and "model" (see `token_model`).
        current: the id of the run that is shown.
        colour: "outcome", "source", "probability" or "saved".
        show_rejected: whether the text shows rejected drafts.
    """

    _esm = _HERE / "token_view.js"
    _css = _HERE / "token_view.css"
    _ipython_display_ = None  # ipywidgets 7 would show no text beside the widget

    runs: Any = List().tag(sync=True)
    current: Any = Int(0).tag(sync=True)
    state: Any = Dict().tag(sync=True)
    asked: Any = Dict().tag(sync=True)
    can_run: Any = Bool(False).tag(sync=True)
    colour: Any = Enum(["outcome", "source", "probability", "saved"], "outcome").tag(sync=True)
    show_rejected: Any = Bool(False).tag(sync=True)

    def __init__(
        self, result: GenerationResult | None = None, plain: GenerationResult | None = None, *, thread: bool = True
    ) -> None:
        super().__init__()
        self.results: list[GenerationResult] = []
        self.error: BaseException | None = None
        self._plain: list[GenerationResult | None] = []
        self._tree = object()  # a job of an earlier tree changes nothing
        self._worker = Worker(self._busy, self._failed, thread)
        self._saved, self._adopted = SavedCopy(), False
        self.on_msg(self._receive)
        if result is not None:
            self.show(result, plain)

    # ---- in Python
    def show(self, result: GenerationResult, plain: GenerationResult | None = None) -> None:
        """Show another result, without branches."""
        self.stop()
        with self.hold_sync():
            self._tree = object()
            self.results, self._plain = [result], [plain]
            self.asked, self.current, self.state = {}, 0, {}
            self.can_run = result.call is not None
            self.runs = [_entry(0, None, 0, 0, "", token_model(result, plain))]
        self._save()

    @property
    def result(self) -> GenerationResult:
        """The result that is shown."""
        return self.results[int(self.current)]

    @property
    def busy(self) -> bool:
        """Whether a branch or another run is being made."""
        return self._worker.busy

    def branch(self, index: int, token: int, *, run: int | None = None, row: int = 0, wait: bool = False) -> bool:
        """Continue from another token, and show the new run.

        Args:
            index: number of tokens to keep of the run that `run` names.
            token: id of the token that follows.
            run: id of a run; None takes the one that is shown.
            row: index of the row.
            wait: return at the end.

        Returns:
            False, without doing anything, if something is running.
        """
        run = self.current if run is None else run

        def job(cancel: threading.Event) -> None:
            tree, (parent, at) = self._tree, self._owner(run, index)
            result = self._run(parent, at, token, row, "branch", cancel, **RECORDED)
            if tree is not self._tree:
                return
            text = self._text_of(run, row, index, token)
            model = branch_model(self.runs[parent]["model"], row, index, token, text, token_model(result))
            self.results.append(result)
            self._plain.append(None)
            with self.hold_sync():
                self.runs = [*self.runs, _entry(len(self.runs), parent, row, index, text, model)]
                self.current = len(self.runs) - 1
            self._save()

        return self._worker.start(job, wait)

    def measure_plain(self, run: int | None = None, *, wait: bool = False) -> bool:
        """Run plain decoding from the prompt of a run, for the replay's second lane. As `branch` otherwise."""
        run = self.current if run is None else run

        def job(cancel: threading.Event) -> None:
            tree = self._tree
            plain = self._run(run, 0, None, 0, "plain decoding", cancel, method="plain")
            if tree is not self._tree:
                return
            self._plain[run] = plain
            self.runs = [dict(one, model=self._model(run)) if one["id"] == run else one for one in self.runs]

        return self._worker.start(job, wait)

    def ask(self, index: int, *, run: int | None = None, row: int = 0, wait: bool = False) -> bool:
        """Ask the target for its best tokens after `index` tokens, for a run that did not record them."""
        run = self.current if run is None else run

        def job(cancel: threading.Event) -> None:
            tree, (owner, at) = self._tree, self._owner(run, index)
            more = {"max_new_tokens": 1, "method": "plain", **RECORDED}
            answer = self._run(owner, at, None, row, "asking the target", cancel, **more)
            top = token_model(answer)["rows"][0]["steps"][0]["positions"][0]["target_top"]
            if tree is self._tree:
                self.asked = {**self.asked, f"{run}:{row}:{index}": top}

        return self._worker.start(job, wait)

    def stop(self) -> None:
        """End what is running within one step."""
        self._worker.stop()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of what is running, at most `timeout` seconds. Raises its error, or TimeoutError."""
        if not self._worker.wait(timeout):
            raise TimeoutError(f"the view still runs after {timeout} s")
        if self.error is not None:
            raise self.error

    # ---- messages of the front end
    def _receive(self, _widget: Any, content: Any, _buffers: Any) -> None:
        kind, run = content.get("type"), content.get("run")
        if kind == "stop":
            self.stop()
            return
        if not isinstance(run, int) or not 0 <= run < len(self.runs):
            return
        actions: dict[str, Callable[[], bool]] = {
            "branch": lambda: self.branch(content["index"], content["token"], run=run, row=content["row"]),
            "plain": lambda: self.measure_plain(run),
            "ask": lambda: self.ask(content["index"], run=run, row=content["row"]),
        }
        if kind in actions and not actions[kind]():
            self.state = {"kind": "running", "text": "one run at a time: wait, or stop the other one"}

    # ---- jobs, in the worker's thread
    def _owner(self, run: int, index: int) -> tuple[int, int]:
        """The run that wrote the token at `index` of a run, and the token's index in that run's result."""
        entry = self.runs[run]
        while entry["parent"] is not None and index <= entry["index"]:
            entry = self.runs[entry["parent"]]
        kept = 0 if entry["parent"] is None else entry["index"] + 1
        return entry["id"], index - kept

    def _run(
        self,
        run: int,
        index: int,
        token: int | None,
        row: int,
        what: str,
        cancel: threading.Event,
        **options: Any,
    ) -> GenerationResult:
        count, shown = 0, 0.0
        self.state = {"kind": "running", "text": f"{what} …"}

        def progress(step: Step) -> None:
            nonlocal count, shown
            count += len(step.emitted)
            if time.perf_counter() - shown > _UPDATE_SECONDS:
                shown = time.perf_counter()
                self.state = {"kind": "running", "text": f"{what}: {count_noun(count, 'token')} so far"}

        # a branch has one row, whichever row it left
        at = row if self.runs[run]["parent"] is None else 0
        return self.results[run].branch(index, token, row=at, on_step=progress, cancel=cancel, **options)

    def _text_of(self, run: int, row: int, index: int, token: int) -> str:
        """The text of a token that the view offers for a branch."""
        rows = self.runs[run]["model"]["rows"]
        lists = list(self.asked.get(f"{run}:{row}:{index}", ()))
        for step in rows[min(row, len(rows) - 1)]["steps"]:
            for position in step["positions"]:
                lists += [*(position["target_top"] or ()), *(position["draft_top"] or ())]
        return next((str(text) for text, one, _ in lists if one == token), f"<{token}>")

    def _model(self, run: int) -> Model:
        entry, model = self.runs[run], token_model(self.results[run], self._plain[run])
        if entry["parent"] is None:
            return model
        parent = self.runs[entry["parent"]]["model"]
        chosen = entry["model"]["rows"][0]["tokens"][entry["index"]]
        return branch_model(parent, entry["row"], entry["index"], chosen["id"], entry["text"], model)

    def _busy(self, busy: bool) -> None:
        if busy:
            self.error = None
        elif self.error is None:
            self.state = {}

    def _failed(self, error: BaseException) -> None:
        self.error = error
        self.state = {"kind": "error", "text": " ".join(str(error).split()) or type(error).__name__}

    # ---- showing
    def adopt(self, saved: SavedCopy) -> None:
        """Keep this static copy up to date, which is displayed already, where the view will be."""
        self._saved, self._adopted = saved, True
        self._save()

    def _save(self) -> None:
        if self.results:
            self._saved.update(*self._static())

    def _static(self) -> tuple[str, str]:
        """All runs as static HTML, and as text."""
        html = [result_view(self.results[0], details=True)] if self.results else []
        text = [marked_text(self.results[0])] if self.results else []
        for entry, result in zip(self.runs[1:], self.results[1:], strict=False):
            head = f"Branch at token {entry['index'] + 1}: {entry['text']!r}"
            html.append(
                f'<div class="specnb"><small>{escape_text(head)}</small></div>{result_view(result, details=True)}'
            )
            text.append(f"{head}\n{marked_text(result)}")
        return "".join(html), "\n".join(text)

    def _repr_mimebundle_(self, **_: Any) -> Any:
        html, text = self._static()
        if getattr(get_ipython(), "kernel", None) is not None:
            # Front ends without a kernel show nothing of the widget's own output, so the text gets one of its own.
            if not self._adopted:
                self._saved.display(html, text)
            self._adopted = False
            html = f"<small>{_CLOSED}</small>"
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        data = {"application/vnd.jupyter.widget-view+json": view, "text/html": html, "text/plain": text}
        made = super()._repr_mimebundle_()
        return data, made[1] if isinstance(made, tuple) else {}

    def __repr__(self) -> str:
        return f"TokenView({', '.join(map(repr, self.results))})"


def _entry(number: int, parent: int | None, row: int, index: int, text: str, model: Model) -> dict[str, Any]:
    return {"id": number, "parent": parent, "row": row, "index": index, "text": text, "model": model}
