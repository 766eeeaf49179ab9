"""The magics in a real shell, with a fake `specnb.generate` that records what it gets (the real one at the end)."""

from __future__ import annotations

import html
import os
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from checks import run_cell, shell
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError

import specnb
from specnb.notebook import load_ipython_extension
from specnb.notebook.arguments import specgen_parser
from specnb.notebook.magic_parser import flag, split_line, unescape
from specnb.notebook.magics import SpecMagics
from specnb.notebook.session import Session
from specnb.notebook.stream import NotebookView
from specnb.options import OPTIONS
from specnb.text import step_pieces
from specnb.trace import GenerationResult, RowResult, Step
from specnb.views.html import StaticView


class FakeGenerate:
    """A fake `specnb.generate`: keeps its arguments, emits a fixed text, can be interrupted after some steps."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: BaseException | None = None
        self.steps_before_error = 0
        self.pause = 0.0

    def __call__(self, pair: Any, inputs: Any = None, *, on_step: Any = None, **options: Any) -> GenerationResult:
        self.calls.append({"pair": pair, "inputs": inputs, **options})
        ids = pair.tokenizer("lake 😀 <b>fox</b>").input_ids
        steps = []
        for i in range(0, len(ids) - 2, 3):
            if self.error is not None and len(steps) == self.steps_before_error:
                if steps:
                    self.error.partial_result = self.result(pair, steps, "interrupted")  # type: ignore[attr-defined]
                raise self.error
            steps.append(Step(5 + i, tuple(ids[i : i + 2]), 2, tuple(ids[i : i + 3])))
            time.sleep(self.pause)
            if on_step is not None:
                on_step(steps[-1])
        return self.result(pair, steps, "length")

    @staticmethod
    def result(pair: Any, steps: list[Step], reason: str) -> GenerationResult:
        texts, rejected = step_pieces(pair.tokenizer, steps)
        row = RowResult((1, 2), tuple(i for s in steps for i in s.emitted), tuple(steps), reason, texts, rejected)
        return GenerationResult("prompt_lookup", [row], seconds=2.0, target_passes=len(steps))

    @property
    def last(self) -> dict[str, Any]:
        return self.calls[-1]

    @property
    def prompt(self) -> Any:
        return self.last["inputs"]


def fake_pair(name: str = "tiny", assistant: Any = None, **_: Any) -> Any:
    pair = SimpleNamespace(
        target=SimpleNamespace(device="cpu"), tokenizer=tiny.byte_tokenizer(), assistant=assistant, name=name
    )
    pair.describe = lambda: f"{name}: a tiny model"
    return pair


@pytest.fixture
def ip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with shell(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeGenerate:
    fake = FakeGenerate()
    monkeypatch.setattr(specnb, "generate", fake)
    monkeypatch.setattr(specnb, "load", lambda name, **options: fake_pair(name, **options))
    return fake


@pytest.fixture
def cell(ip: Any, fake: FakeGenerate) -> Any:
    """Runs a cell and returns the one line of its error, or an empty string."""
    ip.run_line_magic("specload", "tiny")

    return partial(run_cell, ip)


# ---- MAG-01: the body
BODIES = [
    "{v: k for k, v in d.items()}",
    '{"a": {"b": [1]}}',
    "{{x}} {0} {",
    "$HOME %s \\\\n",
    "naïve 漢字 😀",
    "a;",
    "  leading",
    "'quotes' \"double\"",
    "'''triple''' \"\"\"",
    "trailing  \n\n",
    ">>> x = 1\n... y",
    "In [1]: x",
    "a\\\nb",
    "\ttab",
    "a\n\n b\n",
    "!ls",
    "?x",
    "x?",
    "%time x",
    "\n\nblank lines first",
    "line\u2028separator",
]


@pytest.mark.parametrize("body", BODIES)
def test_MAG_01_body_byte_for_byte(cell: Any, fake: FakeGenerate, body: str) -> None:
    assert cell(f"%%specgen\n{body}") == ""
    assert fake.prompt == body


@pytest.mark.parametrize(
    "body", [body for body in BODIES if not body.startswith((">>>", "In [1]")) and body[-1] != "\n"]
)
def test_MAG_01_body_without_the_raw_cell(ip: Any, cell: Any, fake: FakeGenerate, body: str) -> None:
    ip.run_cell_magic("specgen", "", body + "\n")
    assert fake.prompt == body


def test_MAG_01_ids_reach_the_model(ip: Any, cell: Any, fake: FakeGenerate) -> None:
    tokenizer = ip._specnb_session.pair().tokenizer
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    body = '{"a": "naïve 😀 {{x}}"};'
    assert cell(f"%%specgen --system 'be\\nbrief'\n{body}") == ""
    assert tokenizer.decode(fake.last["input_ids"][0]) == f"<system>be\nbrief<user>{body}"
    assert cell(f"%%specgen --no-chat\n{body}") == "" and fake.prompt == body


def test_MAG_01_expansion_on_request(ip: Any, cell: Any, fake: FakeGenerate) -> None:
    ip.user_ns.update(name="World", n=3)
    assert cell('%%specgen --expand\n{name} {n} {{name}} {"a": 1} {0} {} {') == ""
    assert fake.prompt == 'World 3 {name} {"a": 1} {0} {} {'
    assert "not defined: missing" in cell("%%specgen --expand\n{name} {missing}")
    assert len(fake.calls) == 1


# ---- MAG-02: the line
@pytest.mark.parametrize(
    ("given", "value"),
    [
        ('--stop-strings "a b"', "a b"),
        ("--stop-strings='a b'", "a b"),
        ('--stop-strings "it\'s"', "it's"),
        ("--stop-strings '\\n'", "\n"),
        ("--stop-strings \\n", "\n"),
        ('--stop-strings "\\n\\t"', "\n\t"),
        ("--stop-strings ''", ""),
        ("--stop-strings '{\"a\": [1, 2]}'", '{"a": [1, 2]}'),
        ('--stop-strings "{\\"a\\": 1}"', '{"a": 1}'),
        ("--stop-strings 漢字", "漢字"),
        ("--stop-strings=--", "--"),
        ("--stop-strings 'C:\\\\temp'", "C:\\temp"),
        ("--stop-strings C:\\Users", "C:\\Users"),
        ("--stop-strings {name}", "{name}"),
        ("--stop-strings $HOME", "$HOME"),
        ("--stop-strings '#'", "#"),
        ("--stop-strings a'b c'd", "ab cd"),
    ],
)
def test_MAG_02_values(ip: Any, cell: Any, fake: FakeGenerate, given: str, value: str) -> None:
    ip.user_ns["name"] = "expanded"
    assert cell(f"%%specgen {given}\nx") == ""
    assert fake.last["stop_strings"] == [value]


def test_MAG_02_repeated_values(cell: Any, fake: FakeGenerate) -> None:
    assert cell("%%specgen --stop-strings a --stop-strings 'b c'\nx") == ""
    assert fake.last["stop_strings"] == ["a", "b c"]


@pytest.mark.parametrize("line", ["--stop-strings 'a", '--stop-strings "a b', "--stop-strings it's"])
def test_MAG_02_unbalanced_quote(cell: Any, fake: FakeGenerate, line: str) -> None:
    error = cell(f"%%specgen {line}\nx")
    column = max(line.rfind("'"), line.rfind('"')) + 1
    assert "has no partner" in error and f"column {column}" in error and not fake.calls


def test_MAG_02_windows_paths(ip: Any, fake: FakeGenerate) -> None:
    path = r"C:\new models\target"
    ip.run_line_magic("specload", rf"'{path}' --assistant C:\tiny\n")
    assert ip._specnb_session.current == path
    assert ip._specnb_session.pair().assistant == r"C:\tiny\n"
    assert split_line(r"\\server\share C:\x") == [r"\\server\share", r"C:\x"]


def test_unescape() -> None:
    assert unescape(r"\n\t\r\\n\x") == "\n\t\r\\n\\x"


# ---- MAG-03: body and line kept apart, errors
@pytest.mark.parametrize(
    "body", ["--draft x", "-- comment", "# comment", "%%other", "--max-new-tokens 5", "-q", "%%specgen\nx"]
)
def test_MAG_03_nothing_in_the_body_is_an_option(cell: Any, fake: FakeGenerate, body: str) -> None:
    assert cell(f"%%specgen --seed 1\n{body}") == ""
    assert fake.prompt == body and fake.last["max_new_tokens"] == 256


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--max 7", ["unknown option '--max'", "--max-new-tokens", "--seed"]),
        ("--nope 1", ["unknown option '--nope'", "--num-assistant-tokens"]),
        ("--max-new-token=7", ["Did you mean '--max-new-tokens'"]),
        ("--max-new-tokens abc", ["--max-new-tokens", "'abc'", "an int >= 1"]),
        ("--max-new-tokens 0", ["--max-new-tokens", "'0'", "an int >= 1"]),
        ("--temperature -1", ["--temperature", ">= 0"]),
        ("--verification best", ["--verification", "token, block"]),
        ("--method promt_lookup", ["--method", "Did you mean 'prompt_lookup'"]),
        ("--max-new-tokens", ["--max-new-tokens", "expected one argument"]),
        ("target # note", ["unexpected 'target'", "lines below"]),
        ("# note", ["unexpected '#'", "Comments"]),
        ("-o 1x", ["-o", "'1x' is not a name"]),
        ("-o class", ["'class' is not a name"]),
        ("--method draft_model", ["needs a draft model", "--assistant"]),
        ("--system s", ["chat template"]),
        ("--model other", ["unknown loaded model 'other'"]),
    ],
)
def test_MAG_03_errors_are_one_line(cell: Any, fake: FakeGenerate, line: str, words: list[str]) -> None:
    error = cell(f"%%specgen {line}\nx")
    assert error.startswith("UsageError: ") and all(word in error for word in words), error
    assert not fake.calls


@pytest.mark.parametrize("source", ["%%specgen\n", "%%specgen\n  \n\n", "%specgen", "%specgen --seed 1"])
def test_MAG_03_empty_body_gives_usage(cell: Any, fake: FakeGenerate, source: str) -> None:
    error = cell(source)
    assert error.startswith("UsageError") and "specgen" in error and not fake.calls


def test_MAG_03_magic_must_come_first(cell: Any, fake: FakeGenerate) -> None:
    assert cell("\n\n%%specgen\nafter blank lines") == "" and fake.prompt == "after blank lines"
    assert "must be the first line" in (SpecMagics.specgen.__doc__ or "")
    assert cell("# comment\n%%specgen\nx") != "" and len(fake.calls) == 1


def test_errors_of_generate_are_one_line(cell: Any, fake: FakeGenerate, capsys: pytest.CaptureFixture[str]) -> None:
    fake.error = ValueError("num_assistant_tokens=3 cannot\napply.")
    assert cell("%%specgen\nx") == "UsageError: num_assistant_tokens=3 cannot apply."
    fake.error = RuntimeError("a fault of ours")
    assert cell("%%specgen\nx") == "RuntimeError: a fault of ours"


# ---- options
def test_every_option_is_on_the_line(cell: Any, fake: FakeGenerate) -> None:
    flags = specgen_parser().flags
    assert all(flag(option.name) in flags for option in OPTIONS) and "--no-do-sample" in flags
    line = "--method prompt_lookup --num-assistant-tokens 8 --do-sample --temperature 1 --top-p=.9 --seed 3"
    line += " --max-new-tokens 5"
    assert cell(f"%%specgen {line}\nx") == ""
    given = {k: v for k, v in fake.last.items() if k not in ("pair", "inputs")}
    assert given == {
        "method": "prompt_lookup",
        "num_assistant_tokens": 8,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.9,
        "seed": 3,
        "max_new_tokens": 5,
    }
    assert cell("%%specgen --no-do-sample\nx") == "" and fake.last["do_sample"] is False


def test_only_what_was_typed_is_given(cell: Any, fake: FakeGenerate) -> None:
    assert cell("%%specgen\nx") == ""
    assert set(fake.last) == {"pair", "inputs", "method", "max_new_tokens"}


def test_default_method_and_config(ip: Any, cell: Any, fake: FakeGenerate) -> None:
    cell("%%specgen\nx")
    assert fake.last["method"] == "prompt_lookup"
    ip.run_line_magic("specload", "big --assistant small")
    cell("%%specgen\nx")
    assert fake.last["method"] is None and fake.last["pair"].name == "big"  # the one that the draft model is for
    cell("%%specgen --model tiny\nx")
    assert fake.last["pair"].name == "tiny"
    assert cell("%config SpecMagics.method = 'plain'\n%config SpecMagics.max_new_tokens = None") == ""
    cell("%%specgen\nx")
    assert fake.last["method"] == "plain" and "max_new_tokens" not in fake.last


def test_help(cell: Any, ip: Any, fake: FakeGenerate, capsys: pytest.CaptureFixture[str]) -> None:
    for source in ("%%specgen -h\nx", "%specgen --help", "%specload -h"):
        capsys.readouterr()
        assert cell(source) == ""
        shown = capsys.readouterr().out
        assert "usage:" in shown and ("--num-assistant-tokens" in shown or "--assistant" in shown)
    assert not fake.calls and "--num-assistant-tokens" in ip.find_cell_magic("specgen").__doc__


# ---- results
def test_result_is_shown_and_assigned(
    ip: Any, cell: Any, fake: FakeGenerate, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cell("%%specgen -o run\nx") == ""
    shown = capsys.readouterr().out
    assert ip.user_ns["run"].text == "lake 😀 <b>fox</b>"[: len(ip.user_ns["run"].text)]
    assert ip.user_ns["run"] is ip._specnb_session.last
    assert "⟦" in shown and "«" in shown and "accepted" in shown and "tokens/s" in shown
    assert str(ip.user_ns["run"]).splitlines()[0] in shown


def test_quiet(ip: Any, cell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cell("%%specgen -q -o run\nx") == ""
    assert capsys.readouterr().out == "" and ip.user_ns["run"].num_emitted_tokens


def test_without_live_text(ip: Any, cell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cell("%config SpecMagics.live = False")
    capsys.readouterr()
    cell("%%specgen -o run\nx")
    assert capsys.readouterr().out.startswith(str(ip.user_ns["run"]))


def test_interrupt_keeps_text_and_trace(
    ip: Any, cell: Any, fake: FakeGenerate, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.error, fake.steps_before_error = KeyboardInterrupt(), 2
    capsys.readouterr()
    error = cell("%%specgen -o run\nx")
    shown = capsys.readouterr()
    assert error.startswith("Interrupted: 6 tokens so far, kept in run")
    assert ip.user_ns["_specgen"] is ip.user_ns["run"]
    assert ip.user_ns["run"].finish_reason == "interrupted" and ip.user_ns["run"].num_emitted_tokens == 6
    assert "⟦" in shown.out and "Traceback" not in shown.out + shown.err and "magics.py" not in shown.out + shown.err
    fake.error = None
    assert cell("%%specgen -o run\nx") == ""  # nothing is left behind


def test_interrupt_before_the_first_token(ip: Any, cell: Any, fake: FakeGenerate) -> None:
    fake.error = KeyboardInterrupt()
    assert cell("%%specgen -o run\nx").startswith("Interrupted: nothing")
    assert "run" not in ip.user_ns


class _Displays:
    """Records what a notebook's front end would get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: list[dict[str, str]] = []
        monkeypatch.setattr("specnb.notebook.stream.display", self.display)

    def display(self, bundle: dict[str, str], raw: bool, display_id: bool = False) -> Any:
        self.shown.append(bundle)
        return SimpleNamespace(update=lambda bundle, raw: self.shown.append(bundle))


def test_notebook_view_ends_as_the_result(
    cell: Any, ip: Any, fake: FakeGenerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    displays = _Displays(monkeypatch)
    monkeypatch.setattr("specnb.notebook.stream.is_notebook", lambda _: True)
    fake.pause = 0.08
    cell("%%specgen -o run\nx")
    assert 2 <= len(displays.shown) <= len(ip.user_ns["run"].steps) + 1
    assert "generating" in displays.shown[0]["text/html"] and "&lt;" in displays.shown[-1]["text/html"]
    assert displays.shown[-1]["text/html"] == ip.user_ns["run"]._repr_html_()
    assert displays.shown[-1]["text/plain"] == str(ip.user_ns["run"])
    fake.error, fake.steps_before_error = ValueError("no"), 3
    cell("%%specgen\nx")
    assert "stopped by an error" in displays.shown[-1]["text/html"]


def test_interactive_ends_as_the_token_view_with_its_text_beside_it(
    cell: Any, ip: Any, fake: FakeGenerate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    displays = _Displays(monkeypatch)
    views: list[Any] = []

    def display(shown: Any, **how: Any) -> Any:
        return displays.display(shown, **how) if isinstance(shown, dict) else views.append(shown)

    monkeypatch.setattr("specnb.notebook.stream.display", display)
    monkeypatch.setattr("specnb.notebook.stream.is_notebook", lambda _: True)
    assert cell("%%specgen --interactive -o run\nx") == ""
    assert fake.last["top_logprobs"] == 5 and fake.last["probabilities"] is True
    run = ip.user_ns["run"]
    assert views[0].result is run and "tokens/s" in capsys.readouterr().out
    assert displays.shown[-1]["text/html"].startswith('<div class="specnb-saved">')
    words = re.sub("<[^>]*>", "", displays.shown[-1]["text/html"])
    assert run.text in html.unescape(words) and displays.shown[-1]["text/plain"] == str(run)
    assert cell("%%specgen --interactive --top-logprobs 2\nx") == "" and fake.last["top_logprobs"] == 2
    assert cell("%%specgen\nx") == "" and "top_logprobs" not in fake.last
    monkeypatch.setattr(GenerationResult, "view", lambda self, plain=None: StaticView(self, "needs anywidget"))
    assert cell("%%specgen --interactive\nx") == ""
    assert (
        "needs anywidget" in capsys.readouterr().out
        and displays.shown[-1]["text/html"] == ip._specnb_session.last._repr_html_()
    )


def test_live_view_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    _Displays(monkeypatch)
    tokenizer = tiny.byte_tokenizer()
    ids = tokenizer("the quick brown fox jumps over 😀. " * 10).input_ids
    view, count = NotebookView(tokenizer), 600
    start = time.perf_counter()
    for i in range(count):
        emitted = tuple(ids[(4 * i + j) % len(ids)] for j in range(4))
        view.step(Step(i, emitted[:3], 3, emitted))
    assert (time.perf_counter() - start) / count < 0.03 * 0.025 * 3  # 3 % of a 25 ms step, on a busy machine


# ---- MAG-05: loading
def _state(ip: Any) -> tuple[int, int, int, int, int]:
    hooks = [
        f for f in ip.events.callbacks["pre_run_cell"] if type(getattr(f, "__self__", None)).__name__ == "SpecMagics"
    ]
    after = ip.events.callbacks["post_run_cell"]
    own = [f for f in after if type(getattr(f, "__self__", None)).__name__ == "SpecMagics"]
    assert len(own) == len(hooks)
    chain = ip.strdispatchers["complete_command"].strs.get("%%specgen", ())
    configurables = [c for c in ip.configurables if type(c).__name__ == "SpecMagics"]
    magics = ip.magics_manager.magics
    names = [name for kind in ("line", "cell") for name in magics[kind] if name.startswith("spec")]
    return len(names), len(hooks), len(list(chain)), len(configurables), len(after) - len(own)


def test_MAG_05_loading_again_and_unloading(
    ip: Any, cell: Any, fake: FakeGenerate, capsys: pytest.CaptureFixture[str]
) -> None:
    others = _state(ip)[4]
    capsys.readouterr()
    for step, on in (("load_ext", 1), ("load_ext", 1), ("reload_ext", 1), ("unload_ext", 0), ("load_ext", 1)):
        ip.run_line_magic(step, "specnb")
        assert _state(ip) == (9 * on, on, on, on, others), step
    load_ipython_extension(ip)
    assert _state(ip) == (9, 1, 1, 1, others)
    assert "already loaded" in capsys.readouterr().out  # IPython's own note on the second load, nothing of ours
    assert cell("%%specgen\nx") == "" and len(fake.calls) == 1  # and the model is still there
    ip.run_line_magic("unload_ext", "specnb")
    assert "not found" in cell("%%specgen\nx")


# ---- completion
def completions(ip: Any, source: str) -> list[str]:
    with provisionalcompleter():
        return [found.text for found in ip.Completer.completions(source, len(source))]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("%%specgen --num-as", ["--num-assistant-tokens", "--num-assistant-tokens-schedule"]),
        ("%%specgen --method ", ["plain", "draft_model", "prompt_lookup"]),
        ("%%specgen --method=pro", ["prompt_lookup"]),
        ("%%specgen -q --num-assistant-tokens-schedule heu", ["heuristic"]),
        ("%%specgen --model ti", ["tiny"]),
        ("%specload x --as", ["--assistant"]),
        ("%%specgen --no-mem", ["--no-memory"]),
        ("%specmemory ", ["save", "load", "clear", "--model"]),
        ("%specmemory sa", ["save"]),
        ("%specmemory --mo", ["--model"]),
    ],
)
def test_completion(ip: Any, cell: Any, line: str, wanted: list[str]) -> None:
    found = completions(ip, line)
    assert set(wanted) <= set(found)  # jedi may add names of its own
    assert not {"--no-do-sample", "plain", "constant"} & (set(found) - set(wanted))


def test_no_options_are_offered_in_the_body(ip: Any, cell: Any) -> None:
    for source in ("the prompt --num-as", "%%specgen -q\nthe prompt --num-as", "%%specgen\n--num-as"):
        assert "--num-assistant-tokens" not in completions(ip, source)


# ---- the memory
def test_every_run_feeds_the_memory_and_suffix_drafts_from_it(
    ip: Any, cell: Any, fake: FakeGenerate, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session.for_shell(ip)
    capsys.readouterr()
    ip.run_line_magic("specmemory", "")
    assert capsys.readouterr().out == "the session's memory is empty\n"
    assert cell("%%specgen --method prompt_lookup -q\nthe quick") == ""
    memory = session.memory(session.pair())
    assert "memory" not in fake.last and memory.num_requests == 1
    assert memory.requests()[0] == [1, 2, *session.last.ids]
    assert cell("%%specgen --method suffix -q\nthe quick") == ""
    assert fake.last["memory"] is memory
    for method in ("prompt_lookup", "suffix"):
        assert cell(f"%%specgen --method {method} --no-memory -q\nthe quick") == ""
        assert not {"memory", "no_memory"} & fake.last.keys()
    before = memory.num_requests
    fake.error, fake.steps_before_error = KeyboardInterrupt(), 1
    assert "kept in _specgen" in cell("%%specgen --method prompt_lookup -q\nthe quick")
    assert memory.num_requests == before + 1
    ip.run_line_magic("specmemory", "")
    assert "requests, tokenizer" in capsys.readouterr().out


def test_specmemory_saves_loads_and_clears(
    ip: Any, cell: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    session = Session.for_shell(ip)
    assert cell("%%specgen -q\nthe quick") == ""
    held = session.memory(session.pair()).requests()
    ip.run_line_magic("specmemory", f"save {tmp_path / 'kept'}")
    ip.run_line_magic("specmemory", "clear")
    assert held and session.memory(session.pair()).requests() == []
    capsys.readouterr()
    ip.run_line_magic("specmemory", f"load {tmp_path / 'kept'}")
    assert session.memory(session.pair()).requests() == held
    assert capsys.readouterr().out.startswith("Memory(")
    ip.run_line_magic("specmemory", "-h")
    assert "never depends on it" in capsys.readouterr().out
    (tmp_path / "bad").write_text("no memory")
    for line, words in (
        ("sav x", ["unknown action 'sav'", "Did you mean 'save'"]),
        ("save", ["%specmemory save FILE"]),
        ("clear x", ["without a file"]),
        (f"load {tmp_path / 'no'}", ["No such file"]),
        (f"load {tmp_path / 'bad'}", ["not a specnb.Memory"]),
        ("clear --model other", ["unknown loaded model 'other'"]),
    ):
        with pytest.raises(UsageError) as caught:
            ip.run_line_magic("specmemory", line)
        assert all(word in str(caught.value) for word in words), str(caught.value)
    assert session.memory(session.pair()).requests() == held


# ---- loading models
def test_specload(
    ip: Any, fake: FakeGenerate, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(specnb, "load", lambda name, **o: (loads.append((name, o)), fake_pair(name))[1])
    ip.run_line_magic("specload", "a --assistant b --dtype float32 --device-map cpu")
    assert loads == [("a", {"assistant": "b", "dtype": "float32", "device_map": "cpu"})]
    assert capsys.readouterr().out == "a: a tiny model\n"
    ip.run_line_magic("specload", "a --assistant b --dtype float32 --device-map cpu")
    assert len(loads) == 1  # the same again: only switched to
    ip.run_line_magic("specload", "c")
    capsys.readouterr()
    ip.run_line_magic("specload", "--list")
    listed = capsys.readouterr().out
    assert "* c:" in listed and "  a:" in listed and "Known names: smollm2-135m-q4, smollm2-135m, tiny-llama," in listed
    ip.run_line_magic("specload", "--drop c")
    assert ip._specnb_session.current == "a" and "* a:" in capsys.readouterr().out and len(loads) == 2
    with pytest.raises(UsageError, match="unknown loaded model 'zz'"):
        ip.run_line_magic("specload", "--drop zz")
    with pytest.raises(UsageError, match="NAME before"):
        ip.run_line_magic("specload", "--dtype float32")

    def missing(name: str, **_: Any) -> Any:
        raise OSError(f"{name} was\nnot found")

    monkeypatch.setattr(specnb, "load", missing)
    with pytest.raises(UsageError, match="nope was not found"):
        ip.run_line_magic("specload", "nope")


def test_specload_without_a_name_takes_the_embedded_pair(ip: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ip.run_line_magic("specload", "")
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "No name was given, so this is: %specload tiny-llama --assistant tiny-llama-draft"
    assert shown[1].startswith("tiny-llama: LlamaForCausalLM") and shown[2].startswith("draft: LlamaForCausalLM")
    assert shown[-1].startswith("Known names: smollm2-135m-q4")
    pair = ip._specnb_session.pair()
    ip.run_line_magic("specload", "tiny-llama --assistant tiny-llama-draft")
    assert ip._specnb_session.pair() is pair  # the same again: only switched to


def test_a_failed_load_leaves_what_was_there(ip: Any) -> None:
    ip.run_line_magic("specload", "tiny-llama --assistant tiny-llama-draft")
    ip.run_line_magic("specload", "tiny-gemma4")
    with pytest.raises(UsageError, match="no-such-model"):
        ip.run_line_magic("specload", "tiny-llama --assistant no-such-model")
    session = ip._specnb_session
    assert session.current == "tiny-gemma4" and session.pairs["tiny-llama"].assistant is not None
    ip.run_line_magic("specload", "tiny-llama --assistant tiny-llama-draft")
    assert session.current == "tiny-llama"
    with pytest.raises(UsageError, match="no-such-model"):
        ip.run_line_magic("specload", "tiny-llama --assistant no-such-model")
    assert session.current == "tiny-llama" and session.pair().assistant is not None


def test_no_model_loaded(ip: Any, fake: FakeGenerate) -> None:
    with pytest.raises(UsageError, match="no model is loaded"):
        ip.run_cell_magic("specgen", "", "x\n")
    with pytest.raises(UsageError, match="no model is loaded"):
        ip.run_cell_magic("specgen", "--model x", "x\n")


# ---- a kernel
_CELLS = [
    "import tiny, specnb\n"
    "%load_ext specnb\n"
    "specnb.load = lambda name, **_: specnb.Pair(tiny.llama(vocab=330), tiny.byte_tokenizer(), name=name)\n"
    "%specload tiny",
    "%%specgen --method prompt_lookup --max-new-tokens 40 -o run\nthe quick brown fox; {the} quick brown",
    "print(run.num_emitted_tokens, run.finish_reason)",
    "%%specgen --seed 1 --do-sample -q -o again\nthe quick\n",
    "print(again.seed)",
]


@pytest.mark.notebook
def test_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{here.parent}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in _CELLS])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    assert [output.output_type for output in outputs[1]] == ["display_data", "stream"]
    assert outputs[1][0].data["text/html"].startswith("<style>") and "<script" not in outputs[1][0].data["text/html"]
    assert outputs[1][0].data["text/plain"].startswith("⟦") or "prompt_lookup ·" in outputs[1][0].data["text/plain"]
    assert "tokens/s" in outputs[1][1].text and "tokens/s" not in outputs[1][0].data["text/html"]
    assert outputs[2][0].text == "40 length\n"
    assert outputs[3] == [] and outputs[4][0].text == "1\n"
    assert not any(output.get("name") == "stderr" for cell in outputs for output in cell)
