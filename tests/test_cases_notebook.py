"""Cases of kinds panel and magic: what was set stays set, and a cell's prompt is the same wherever the cell runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checks import run_cell, shell
from traitlets import TraitError

import specnb
from specnb.notebook.magic_parser import flag
from specnb.notebook.magics import exact_body
from specnb.options import default

PAIR = specnb.load("tiny-llama", "tiny-llama-draft")


# ---------------------------------------------------------------- PN-01
@pytest.fixture
def panel() -> Any:
    made = specnb.Panel(PAIR, thread=False)
    made.set(prompt="Tell me a story about a fox.", max_new_tokens=6, do_sample=False)
    return made


SET: dict[str, tuple[str, Any]] = {
    "num_assistant_tokens": ("draft_model", 5),
    "num_assistant_tokens of lookup": ("prompt_lookup", 10),
    "assistant_confidence_threshold": ("draft_model", 0.4),
    "max_matching_ngram_size": ("prompt_lookup", 3),
    "verification": ("draft_model", "token"),
    "do_sample": ("draft_model", False),
    "num_assistant_tokens_schedule": ("draft_model", "adaptive"),
}


@pytest.mark.parametrize("case", SET)
def test_PN_01_a_value_set_to_its_default_is_kept(panel: Any, case: str) -> None:
    name, (method, value) = case.split()[0], SET[case]
    panel.set(method)
    panel._form.reset_options()
    assert default(name, method) in (value, None)
    assert name not in panel.options and flag(name) not in panel._magic.value and name not in panel._python.value
    control = {
        **panel._form.drafting_controls(method).by_name,
        **panel._form.common[0].by_name,
        **panel._form.common[1].by_name,
    }[name]
    assert "(set; " not in control._note.value
    panel.set(**{name: value})
    assert panel.options[name] == value
    word = flag(name).replace("--", "--no-") if value is False else flag(name)
    assert word in panel._magic.value and f"{name}={value!r}" in panel._python.value
    assert (
        control.initial is None or "(set; default: " in control._note.value
    )  # without a start, the choice itself shows it
    panel.set(max_new_tokens=6)
    panel.run(wait=True)
    assert panel.result.options[name] == value and panel.result.option_sources[name] == "call"
    panel._form.reset.click()
    assert name not in panel.options and flag(name) not in panel._magic.value and "(set; " not in control._note.value


def test_PN_01_a_control_that_was_moved_there_and_back(panel: Any) -> None:
    control = panel._form.drafting_controls("draft_model").by_name["num_assistant_tokens"]
    control._widget.value = 6  # as a drag does
    control._widget.value = 5
    assert panel.options["num_assistant_tokens"] == 5 and "--num-assistant-tokens=5" in panel._magic.value
    schedules = {}
    for k in (5, 6):
        panel.set(num_assistant_tokens=k)
        panel.run(wait=True)
        schedules[k] = panel.result.options["num_assistant_tokens_schedule"]
    assert schedules == {5: "constant", 6: "constant"}
    panel.set(num_assistant_tokens=None)
    assert "num_assistant_tokens" not in panel.options
    panel.run(wait=True)
    assert panel.result.options["num_assistant_tokens_schedule"] == "adaptive"


def test_PN_01_the_code_repeats_the_run(panel: Any) -> None:
    panel.set(num_assistant_tokens=5)
    panel.run(wait=True)
    names: dict[str, Any] = {}
    code = panel._python.value.replace("pair = ...", "pair = pair_of_the_panel #")
    exec(code.removesuffix("\nresult"), {"pair_of_the_panel": PAIR}, names)
    assert names["result"].options == panel.result.options and names["result"].ids == panel.result.ids


def test_the_panel_starts_with_the_draft_models_settings() -> None:
    before = PAIR.assistant.generation_config.num_assistant_tokens
    PAIR.assistant.generation_config.num_assistant_tokens = 3
    try:
        panel = specnb.Panel(PAIR, thread=False)
        assert panel._form.drafting_controls("draft_model").by_name["num_assistant_tokens"].initial == 3
        assert "num_assistant_tokens" not in panel.options
    finally:
        PAIR.assistant.generation_config.num_assistant_tokens = before


# ---------------------------------------------------------------- MG-01
@pytest.fixture
def ip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with shell(tmp_path, monkeypatch) as made:
        made.run_line_magic("specload", "tiny-llama")
        yield made


OPTIONS = "-q --no-chat --no-do-sample --max-new-tokens 4 -o r"
TOPS = (
    "%%capture c\n",
    "%%time\n",
    "%%timeit -n1 -r2\n",
    "%%capture c\n%%time\n",
    "%%time\n%%capture c\n",
    "\n%%capture\n\n",
    "%%prun -q\n",
)
BODIES = (
    "Once upon a time",
    "Once upon a time\n",
    "Once\n\n upon\n\n\n",
    "  Once {x} $y %%time\n%%capture\n",
    ">>> Once",
    "In [1]: Once\n",
    "Once\\",
)


@pytest.mark.slow
@pytest.mark.parametrize("top", TOPS)
def test_MG_01_the_same_prompt_below_other_magics(ip: Any, top: str) -> None:
    for body in BODIES:
        ids = tuple(PAIR.tokenizer(body)["input_ids"])
        for head in ("", top):
            ip.user_ns.pop("r", None)
            run_cell(ip, f"{head}%%specgen {OPTIONS}\n{body}")
            assert ip.user_ns["r"].rows[0].prompt_ids == ids, (head, body)


def test_MG_01_cells_run_from_code(ip: Any) -> None:
    """What code passes on is taken as a cell of its own."""
    for body in ("Once upon a time", "Once upon a time\n"):
        ids = tuple(PAIR.tokenizer(body)["input_ids"])
        for code in (
            f"get_ipython().run_cell({f'%%specgen {OPTIONS}{chr(10)}{body}'!r})",
            f"get_ipython().run_cell({f'%%capture c{chr(10)}%%specgen {OPTIONS}{chr(10)}{body}'!r})",
        ):
            ip.user_ns.pop("r", None)
            run_cell(ip, code)
            assert ip.user_ns["r"].rows[0].prompt_ids == ids, code
    run_cell(ip, f"get_ipython().run_cell_magic('specgen', {OPTIONS!r}, 'Once upon a time\\n')")
    assert ip.user_ns["r"].rows[0].prompt_ids == tuple(PAIR.tokenizer("Once upon a time")["input_ids"])


def test_MG_01_no_cell_is_remembered_after_it_ran(ip: Any) -> None:
    magics = ip.magics_manager.registry["SpecMagics"]
    run_cell(ip, f"%%capture c\n%%specgen {OPTIONS}\nOnce")
    run_cell(ip, "1/0")
    run_cell(ip, "a syntax error")
    assert magics._cells == []


def test_MG_01_a_comparison_below_another_magic(ip: Any) -> None:
    body = "Once upon a time\n---\n a fox\n"
    for top in ("", "%%capture c\n", "%%time\n"):
        run_cell(ip, f"{top}%%specbench -q --no-chat --repeats 1 --max-new-tokens 2 prompt_lookup -o b\n{body}")
        found = ip.user_ns.pop("b")
        wanted = [tuple(PAIR.tokenizer(text)["input_ids"]) for text in ("Once upon a time", " a fox\n")]
        assert [result.rows[0].prompt_ids for result in found.results["plain"]] == wanted


def test_exact_body_takes_only_what_is_the_calls_own() -> None:
    assert exact_body("-q", "a\n", ["%%specgen -q\na"]) == "a"
    assert exact_body("-q", "a\n", ["%%specgen -q\na\n"]) == "a\n"
    assert exact_body("-q", "a\n", ["%%specgen -q\nb"]) == "a"
    assert exact_body("-q", "a\n", ["x = 1\n%%specgen -q\na\n"]) == "a"
    assert exact_body("-q", "a\n", []) == "a"


@pytest.mark.notebook
def test_MG_01_nbconvert() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    tops, bodies = ("", "%%capture c\n", "%%time\n"), ("Once upon a time", "Once upon a time\n")
    cells = ["%load_ext specnb\n%specload tiny-llama"]
    for top in tops:
        for body in bodies:
            cells += [f"{top}%%specgen {OPTIONS}\n{body}", "print(list(r.rows[0].prompt_ids))"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    # a busy kernel may send the end of a line by itself
    printed = ["".join(output["text"] for output in cell.outputs).strip() for cell in notebook.cells[2::2]]
    assert printed == [str(PAIR.tokenizer(body)["input_ids"]) for _ in tops for body in bodies]


# ---------------------------------------------------------------- %config
@pytest.mark.parametrize("setting", ["max_new_tokens = -4", "method = 'bogus'", "live = 'x'"])
def test_a_refused_setting_does_not_stop_the_next_loading(
    ip: Any, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_cell(ip, f"%config SpecMagics.{setting}")
    capsys.readouterr()
    ip.run_line_magic("reload_ext", "specnb")
    assert f"SpecMagics.{setting} was refused, so it is left out." in capsys.readouterr().out
    magics = ip.magics_manager.registry["SpecMagics"]
    assert (magics.max_new_tokens, magics.method) == (256, None)
    ip.run_line_magic("reload_ext", "specnb")
    assert "refused" not in capsys.readouterr().out
    run_cell(ip, "%config SpecMagics.max_new_tokens = 7")
    ip.run_line_magic("reload_ext", "specnb")
    assert ip.magics_manager.registry["SpecMagics"].max_new_tokens == 7  # what was taken is kept
    with pytest.raises(TraitError):
        magics.max_new_tokens = -4
