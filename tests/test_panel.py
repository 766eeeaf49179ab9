"""The panel without a browser: the same code on ipywidgets 7.7.1 and 8. The browser's part is in test_browser.py."""

from __future__ import annotations

import os
import threading
import time
from html import unescape
from pathlib import Path
from typing import Any

import ipywidgets
import pytest
import tiny
from checks import shell, watched
from IPython.core.error import UsageError

import specnb
from specnb.notebook.arguments import specgen_parser
from specnb.notebook.availability import available_methods
from specnb.notebook.panel import Panel
from specnb.notebook.panel.code import Request, magic_code, python_code
from specnb.notebook.panel.controls import Control
from specnb.notebook.panel.view import step_html
from specnb.notebook.session import Session
from specnb.notebook.values import parse_values
from specnb.options import BY_NAME, METHODS, OPTIONS, default, options_of

SHORT = 24


def make_pair(name: str = "tiny", assistant: bool = True) -> specnb.Pair:
    target, tokenizer = tiny.llama(vocab=330), tiny.byte_tokenizer()
    return specnb.Pair(target, tokenizer, tiny.noisy(target, 0.02) if assistant else None, tokenizer, name=name)


@pytest.fixture
def panel() -> Any:
    panel = Panel(make_pair(), session=Session())
    panel.set(prompt="the quick brown fox", max_new_tokens=SHORT)
    yield panel
    panel.stop()
    panel._worker.wait(30)
    panel._plot_worker.wait(30)


def shown(panel: Panel) -> str:
    return unescape(" ".join(w.value for w in (panel._view.text, panel._view.status, panel._view.error)))


def slow(panel: Panel, seconds: float = 0.02) -> Any:
    """A context that makes every target pass slow and counts them."""
    return watched(panel._form.pair.target, lambda _: time.sleep(seconds))


# ---- what can run
def test_available_methods() -> None:
    reasons = available_methods(make_pair())
    assert list(reasons) == [*METHODS, "suffix+draft_model"]
    assert [name for name, reason in reasons.items() if reason is None] == [
        "plain",
        "draft_model",
        "prompt_lookup",
        "suffix",
        "early_exit",
        "suffix+draft_model",
    ]
    assert "draft_model" in str(METHODS) and "Draft model" in str(reasons["universal"])
    alone = available_methods(make_pair(assistant=False))
    assert "%specload" in str(alone["draft_model"]) and "layers" in str(alone["mtp_layers"])
    other = make_pair()
    other.assistant_tokenizer = tiny.sp_tokenizer()
    reasons = available_methods(other)
    assert reasons["universal"] is None and reasons["draft_model"] is not None
    assert available_methods(specnb.Pair(tiny.llama(layers=1), None))["early_exit"] is not None


def test_unfit_methods_are_shown_with_the_reason(panel: Panel) -> None:
    about = unescape(panel._form.about.value)
    assert f"{len(METHODS) - 5} methods cannot run" in about and "MTP layers" in about and "prediction layers" in about
    offered = [value for _, value in panel._form.method.options]
    assert offered == ["plain", "draft_model", "prompt_lookup", "suffix", "early_exit", "suffix+draft_model"]
    with pytest.raises(ValueError, match="mtp_layers' cannot run"):
        panel.set(method="mtp_layers")


# ---- controls come from the options
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_has_a_control(option: Any) -> None:
    control = Control(option, None if option.name == "assistant_early_exit" else option.default)
    assert control.value() is None  # unpatched: nothing is given
    texts = [w for w in walk(control.box) if isinstance(w, ipywidgets.HTML)]
    assert any(option.help in unescape(w.value) for w in texts)
    assert all(
        getattr(w, "description", "x")
        for w in walk(control.box)
        if not isinstance(w, (ipywidgets.HTML, ipywidgets.Box))
    )
    value: Any = (
        option.choices[-1]
        if option.choices
        else {int: 2, float: 0.5, bool: not option.default, str: ["a\nb", "c\\"]}[option.type]
    )
    control.set(value)
    assert control.value() == value
    control.reset()
    assert control.value() is None
    with pytest.raises(ValueError, match=option.name):
        control.set(object())


def table_of(html: str) -> str:
    return html[html.index("<table") :]


def walk(widget: Any) -> list[Any]:
    return [widget, *(w for child in getattr(widget, "children", ()) for w in walk(child))]


def test_controls_have_the_methods_defaults_and_bounds(panel: Panel) -> None:
    for name in ("draft_model", "prompt_lookup", "early_exit"):
        panel.set(method=name)
        own = panel._form.drafting_controls(name).by_name
        assert list(own) == [o.name for o in options_of(name) if o.group == "drafting"]
        assert own["num_assistant_tokens"]._widget.value == default("num_assistant_tokens", name)
        assert own["num_assistant_tokens"]._widget.min == BY_NAME["num_assistant_tokens"].slider[0]
    exit = panel._form.drafting_controls("early_exit").by_name["assistant_early_exit"]
    assert (exit._widget.min, exit._widget.max) == (1, 3) and panel.options["assistant_early_exit"] == 1


def test_options_and_reset(panel: Panel) -> None:
    assert panel.options == {"method": "draft_model", "max_new_tokens": SHORT}
    panel.set(num_assistant_tokens=9, do_sample=True, temperature=0.7, seed=3, stop_strings=["\n", "x"])
    assert panel.options == {
        "method": "draft_model",
        "num_assistant_tokens": 9,
        "max_new_tokens": SHORT,
        "do_sample": True,
        "temperature": 0.7,
        "seed": 3,
        "stop_strings": ["\n", "x"],
    }
    panel.set(do_sample=False)
    assert "temperature" not in panel.options  # without effect, so not given
    panel._form.reset.click()
    assert panel.options == {"method": "draft_model", "max_new_tokens": 128}
    with pytest.raises(ValueError, match="has no option 'nope'"):
        panel.set(nope=1)


def test_the_models_own_settings_are_where_sliders_start() -> None:
    pair = make_pair()
    pair.target.generation_config.temperature = 0.6
    pair.target.generation_config.do_sample = True
    panel = Panel(pair, session=Session())
    main, _ = panel._form.common
    assert main.by_name["temperature"]._widget.value == 0.6 and main.by_name["do_sample"]._widget.value is True
    assert panel.options == {"method": "draft_model", "max_new_tokens": 128}


# ---- running
def test_a_run_equals_generate(panel: Panel) -> None:
    panel.run(wait=True)
    expected = specnb.generate(panel._form.pair, "the quick brown fox", method="draft_model", max_new_tokens=SHORT)
    assert panel.result.ids == expected.ids and panel.results == [panel.result]
    assert panel._view.text.value == panel.result._repr_html_()
    assert "tokens/s" in shown(panel) and not panel.busy and panel._stop.disabled and not panel._run.disabled


def test_a_finished_run_is_shown_as_the_token_view(panel: Panel) -> None:
    view, tokens = panel._view, panel._view.tokens
    assert tokens.layout.display == "none" and not tokens.runs
    panel.set(method="plain")
    panel.run(wait=True)
    plain = panel.result
    panel.set(method="draft_model")
    panel.run(wait=True)
    assert tokens.result is panel.result and view.text.layout.display == "none" and not tokens.layout.display
    lane = tokens.runs[0]["model"]["rows"][0]["plain"]
    assert lane["measured"] and len(lane["times"]) == len(plain.ids)  # of the same prompt
    assert all(step.top_logprobs for step in panel.result.steps)
    view.rejected.value = True
    assert tokens.show_rejected
    tokens.show_rejected = False
    assert not view.rejected.value
    tokens.branch(3, 11, wait=True)
    assert len(tokens.runs) == 2
    panel.run(wait=True)
    assert len(tokens.runs) == 1 and tokens.result is panel.result


def test_without_threads() -> None:
    panel = Panel(make_pair(), session=Session(), thread=False)
    panel.set(max_new_tokens=8)
    assert panel.run() and panel.result.num_emitted_tokens == 8


def test_WID_01_errors_are_shown_kept_and_raised(panel: Panel) -> None:
    assistant = panel._form.pair.assistant
    with watched(assistant, lambda _: (_ for _ in ()).throw(ValueError("boom <b>"))):
        panel._run.click()
        with pytest.raises(ValueError, match="boom"):
            panel.wait(30)
    assert isinstance(panel.error, ValueError) and panel.error.__traceback__ is not None
    assert (
        "⚠ ValueError:</strong> <span>boom &lt;b&gt;" in panel._view.error.value
        and "<details>" in panel._view.error.value
    )
    assert "Traceback" in panel._view.error.value and not panel.busy and not panel._run.disabled
    assert panel.result.finish_reason == "interrupted"  # the tokens that had come are kept
    panel._run.click()
    panel.wait(30)
    assert panel.error is None and panel._view.error.value == "" and panel.result.finish_reason == "length"


def test_errors_before_the_run(panel: Panel) -> None:
    panel.set(prompt="  ")
    with pytest.raises(ValueError, match="the prompt is empty"):
        panel.run(wait=True)
    assert "the prompt is empty" in shown(panel)
    empty = Panel(session=Session())
    with pytest.raises(ValueError, match="no model is loaded"):
        empty.run(wait=True)
    assert "No model is loaded" in empty._form.about.value


def test_WID_03_one_generation_per_press(panel: Panel) -> None:
    panel.set(method="prompt_lookup")
    with slow(panel) as calls:
        panel._run.click()
        panel._run.click()
        for _ in range(5):
            assert panel.run() is False
        slider = panel._form.drafting_controls("prompt_lookup").by_name["num_assistant_tokens"]._widget
        for value in range(1, 11):
            slider.value = value  # a drag queues nothing
        panel.wait(60)
        passes = len(calls)
    assert len(panel.results) == 1 and passes == panel.result.target_passes
    assert slider.continuous_update is False


def test_WID_03_stop_within_a_step_and_a_fresh_next_run(panel: Panel) -> None:
    fresh = specnb.generate(panel._form.pair, "the quick brown fox", method="draft_model", max_new_tokens=SHORT)
    first = threading.Event()
    with watched(panel._form.pair.target, lambda i: (first.set() if i else None, time.sleep(0.05))[1]) as calls:
        panel._run.click()
        assert first.wait(30)
        panel._stop.click()
        at = len(calls)
        panel.wait(30)
        assert len(calls) - at <= 1
    assert panel.result.finish_reason == "cancelled" and 0 < panel.result.num_emitted_tokens < SHORT
    assert panel.result.text in fresh.text and panel.result.text
    assert "ended: cancelled" in shown(panel)
    panel.run(wait=True)
    assert panel.result.ids == fresh.ids


def test_live_text_and_progress(panel: Panel) -> None:
    panel.set(max_new_tokens=60)
    seen: list[tuple[str, str]] = []
    panel._view.text.observe(lambda change: seen.append((change["new"], panel._view.status.value)), "value")
    panel._view.rejected.value = True
    with slow(panel):
        panel.run(wait=True)
    live = [html for html, _ in seen if "generating:" in html]
    assert live and all("<script" not in html for html in live) and len(live) < len(panel.result.steps)
    assert any("of at most 60 tokens" in status and "tokens/s" in status for _, status in seen[1:])
    assert "<details open>" in panel._view.text.value
    panel._view.rejected.value = False
    assert panel._view.text.value == panel.result._repr_html_()


def test_actions_are_quick(panel: Panel) -> None:
    def cost(action: Any) -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    panel.run(wait=True)
    with slow(panel):
        started = cost(lambda: panel._run.click())
        stopped = cost(lambda: panel._stop.click())
        panel.wait(30)
    changes = [cost(lambda k=k: panel.set(num_assistant_tokens=k)) for k in (3, 4, 5, 6, 7)]
    picks = [cost(lambda i=i: setattr(panel._view.step, "value", i)) for i in (2, 3, 2)]
    methods = ["prompt_lookup", "draft_model", "prompt_lookup", "draft_model"]
    chosen = [cost(lambda name=name: panel.set(method=name)) for name in methods]
    pages = [cost(lambda page=page: setattr(panel._pages, "open", page)) for page in ("Plots", "Compare", "Text")]
    panel._plot_worker.wait(30)
    for seconds in (started, stopped, min(changes), min(picks), min(chosen), max(pages)):
        assert seconds < 0.05


# ---- the session
def test_panel_and_session_follow_each_other() -> None:
    session = Session()
    panel = Panel(make_pair("one"), session=session)
    session.add(make_pair("two", assistant=False))
    assert panel._form.model.value == "two" and "draft_model" not in panel._form.available
    panel._form.model.value = "one"
    assert session.current == "one" and "draft_model" in panel._form.available
    second = Panel(session=session)
    second.set(max_new_tokens=8)
    second.run(wait=True)
    assert panel.result is second.result is session.last and panel._view.text.value == second._view.text.value
    session.drop("one")
    assert panel._form.model.value == "two"
    session.drop("two")
    assert panel._form.model.value is None and panel.options["method"] is not None
    panel.close()
    assert panel._refresh not in session.listeners


def test_the_same_pair_is_taken_in_once_and_names_stay_apart() -> None:
    session, pair = Session(), make_pair()
    assert session.add(pair) == session.add(pair) == "tiny"
    assert session.add(make_pair()) == "tiny (2)"


def test_loading_shows_progress_and_errors(panel: Panel, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **options: Any) -> Any:
        if name == "nope":
            raise OSError("there is no model 'nope'")
        return make_pair(name)

    monkeypatch.setattr(specnb, "load", load)
    panel._load.name.value, panel._load.draft.value = "other", "2"
    panel._load.button.click()
    panel.wait(30)
    assert panel.session.current == "other" == panel._form.model.value and "loaded:" in shown(panel)
    assert panel.session.load_options("other") == {"assistant": 2}
    with pytest.raises(OSError, match="no model 'nope'"):
        panel.load("nope", wait=True)
    assert "no model 'nope'" in shown(panel) and panel._form.model.value == "other"


# ---- steps
def test_step_details(panel: Panel) -> None:
    panel.run(wait=True)
    result = panel.result
    number = next(i for i, step in enumerate(result.steps) if step.drafted and step.accepted < len(step.drafted))
    step = result.steps[number]
    panel._view.step.value = number + 1
    html = panel._view.details.value
    assert html == step_html(result.rows[0], number) and "rejected" in html and "corrected" in html
    assert f"{step.accepted} of {len(step.drafted)} drafted tokens accepted" in html and " ms verifying" in html
    for chance in (*step.draft_probabilities, *step.target_probabilities):
        assert f"{chance:.4f}" in html
    panel.session.set_result(
        specnb.generate(panel._form.pair, "the quick", max_new_tokens=SHORT)
    )  # nothing was recorded
    panel._view.step.value = 2
    assert "0." not in table_of(panel._view.details.value)


# ---- comparing
def test_compare_methods(panel: Panel) -> None:
    panel._compare.repeats.value = 2
    panel._compare.button.click()
    panel.wait(120)
    found = panel.comparison
    assert [row.label for row in found.rows] == [
        "plain",
        "draft_model",
        "prompt_lookup",
        "suffix",
        "early_exit, assistant_early_exit=1",
        "suffix+draft_model",
    ]
    assert all(row.same_text and len(row.tokens_per_second) == 2 for row in found.rows)
    html = panel._compare.output.value
    assert "speed-up" in html and "★" in html and found.verdict in unescape(html) and '<img alt="' in html
    assert panel.results == []


def test_compare_values_and_stop(panel: Panel) -> None:
    panel._compare.what.value = "values of one option"
    panel._compare.given.value = "1, 3-4"
    panel.compare(wait=True)
    assert panel.comparison.varied_option == "num_assistant_tokens" and len(panel.comparison.rows) == 4
    with slow(panel, 0.05):
        panel.compare()
        panel.stop()
        panel.wait(30)
    assert "Stopped before" in panel._compare.output.value and len(panel.comparison.rows) == 4
    panel._compare.given.value = "0"
    with pytest.raises(ValueError, match="num_assistant_tokens=0 is not valid"):
        panel.compare(wait=True)


def test_values() -> None:
    k, schedule = BY_NAME["num_assistant_tokens"], BY_NAME["num_assistant_tokens_schedule"]
    assert parse_values(k, "1, 2;4-6,2") == [1, 2, 4, 5, 6]
    assert parse_values(BY_NAME["assistant_confidence_threshold"], "0, .5") == [0, 0.5]
    assert parse_values(schedule, "constant, adaptive") == ["constant", "adaptive"]
    for text in ("", "x", "1-1000000000", "0", "-3"):
        with pytest.raises(ValueError, match="num_assistant_tokens"):
            parse_values(k, text)


# ---- as code
REQUESTS = [
    Request("tiny", "prompt_lookup", "a prompt\n\n  as typed '\"\\", {"num_assistant_tokens": 8, "max_new_tokens": 5}),
    Request(
        "a b", "plain", "x", {"do_sample": True, "temperature": 0.7, "stop_strings": ["\n", "it's \\n", "--", '"', ""]}
    ),
    Request("C:\\models\\it's", "draft_model", "x", {"do_sample": False, "seed": 1}, chat=True, system="be\n'brief'\\"),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_magic_code_reads_back(request_: Request) -> None:
    line, _, body = magic_code(request_).partition("\n")
    read = specgen_parser().read(line.removeprefix("%%specgen"))
    assert body == request_.prompt
    assert (read.pop("model"), read.pop("chat"), read.pop("output")) == (request_.model, request_.chat, "result")
    assert read.pop("system", None) == request_.system
    assert read == request_.arguments


def test_python_code_runs(panel: Panel) -> None:
    panel.set(do_sample=True, seed=5, stop_strings=["\n\n"], prompt='it\'s "quoted"\n\\n')
    panel.run(wait=True)
    code = panel._python.value
    assert "the pair that the panel calls 'tiny'" in code
    names: dict[str, Any] = {"pair": panel._form.pair}
    exec(code.replace("pair = ...", "pair = pair"), names)
    assert names["result"].ids == panel.result.ids
    assert "specnb.load('tiny', assistant=2)" in python_code(REQUESTS[0], {"assistant": 2})
    chat = python_code(REQUESTS[2], {})
    compile(chat, "code", "exec")
    assert "prompt_inputs(pair.tokenizer, 'x', chat=True, system=" in chat


# ---- display
def test_mimebundle(panel: Panel) -> None:
    bundle = panel._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == panel.widget.model_id
    for form in ("text/html", "text/plain"):
        assert "<script" not in bundle[form] and panel.widget.model_id not in bundle[form]
    panel.run(wait=True)
    plain = panel._repr_mimebundle_()["text/plain"]
    assert str(panel.result) in plain and "tokens/s" not in plain


def test_core_widgets_only(panel: Panel) -> None:
    kinds = {w._model_module for w in walk(panel.widget)}
    assert kinds == {"@jupyter-widgets/controls", "anywidget"}


_CELLS = [
    "import tiny, specnb\n"
    "target, tok = tiny.llama(vocab=330), tiny.byte_tokenizer()\n"
    "panel = specnb.Panel(specnb.Pair(target, tok, tiny.noisy(target, 0.02), tok, name='tiny'))\n"
    "panel.set(prompt='the quick', max_new_tokens=40)\n"
    "import time\n"
    "hook = target.register_forward_pre_hook(lambda *_: time.sleep(0.05))",
    "panel",
    "print(panel.run())",
    *["print('cell'); time.sleep(0.4)"] * 3,
    "panel.wait(60)\nprint(panel._view.text.value == panel.result._repr_html_(), panel.result.num_emitted_tokens)",
]


@pytest.mark.notebook
def test_WID_02_a_background_run_prints_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{here.parent}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in _CELLS])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    assert outputs[0] == [] and outputs[2][0].text == "True\n"
    for number in (3, 4, 5):
        assert [output.get("text") for output in outputs[number]] == ["cell\n"]
    assert len(outputs[6]) == 1 and outputs[6][0].text == "True 40\n"
    saved, view = outputs[1]  # the static copy, then the widgets
    assert "specnb-saved" in saved.data["text/html"] and "draft_model · 40 tokens" in saved.data["text/plain"]
    assert "tokens/s" not in saved.data["text/html"] and "<script" not in saved.data["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in view.data and "text/plain" in view.data


def test_specpanel_magic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with shell(tmp_path, monkeypatch) as ip:
        session = Session.for_shell(ip)
        session.add(make_pair("one"))
        session.add(make_pair("two"))
        panel = ip.run_line_magic("specpanel", "one")
        assert isinstance(panel, specnb.Panel) and panel.session is session and session.current == "one"
        panel.set(max_new_tokens=8)
        panel.run(wait=True)
        assert ip.user_ns["_specgen"] is panel.result is session.last
        ip.run_cell("%%specgen -q --max-new-tokens 6 --method plain\nthe quick")
        assert panel.result is session.last and panel.result.method == "plain" and len(panel.results) == 2
        ip.run_line_magic("specpanel", "-h")
        assert "%specpanel" in capsys.readouterr().out
        with pytest.raises(UsageError, match="unknown loaded model 'three'"):
            ip.run_line_magic("specpanel", "three")
        assert specnb.Panel().session is session
