"""%%specbench, and what the magics choose by themselves, on the embedded pairs in a real shell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checks import run_cell, shell
from IPython.core.error import UsageError

import specnb
from specnb.bench import Comparison, compare
from specnb.notebook.benchmark import split_prompts

STORY = "Tell me a story about a fox who finds a lantern."


@pytest.fixture
def ip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with shell(tmp_path, monkeypatch) as made:
        made.run_line_magic("specload", "")
        yield made


@pytest.fixture
def cell(ip: Any) -> Callable[[str], str]:
    """Runs a cell and returns the one line of its error, or an empty string."""
    return partial(run_cell, ip)


def test_the_methods_that_the_pair_can_run(ip: Any, cell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cell(f"%%specbench --max-new-tokens 12 --repeats 1 -o mine\n{STORY}\n---\nHow do I plant a tree?") == ""
    shown = capsys.readouterr().out
    found: Comparison = ip.user_ns["mine"]
    assert ip.user_ns["_specbench"] is found and str(found.verdict) in shown and "draft/verify/rest %" in shown
    assert [row.label for row in found.rows] == [
        "plain",
        "draft_model",
        "prompt_lookup",
        "suffix",
        "suffix+draft_model",
    ]
    assert found.prompts == 2 and found.repeats == 1 and found.options["max_new_tokens"] == 12
    assert all(row.same_text for row in found.rows)
    assert len(found.results["plain"]) == 2


def test_one_option_varied_and_transformers_own(ip: Any, cell: Any) -> None:
    line = "draft_model --vary num-assistant-tokens=1,3-4 --assistant-confidence-threshold 0 --transformers"
    line += " --repeats 1 --max-new-tokens 10 -q"
    assert cell(f"%%specbench {line}\n{STORY}") == ""
    found: Comparison = ip.user_ns["_specbench"]
    assert found.varied_option == "num_assistant_tokens"
    assert [row.options.get("num_assistant_tokens") for row in found.rows] == [None, 1, 3, 4]
    assert all(row.options["assistant_confidence_threshold"] == 0 for row in found.rows[1:])
    assert all(row.own_ratio for row in found.rows)
    assert cell(f"%%specbench --vary assistant_early_exit=1-2 --repeats 1 --max-new-tokens 6 -q\n{STORY}") == ""
    methods = [row.options["method"] for row in ip.user_ns["_specbench"].rows]
    assert methods == [
        *("plain", "draft_model", "prompt_lookup", "suffix", "early_exit", "early_exit", "suffix+draft_model")
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("draft_mode", ["draft_mode", "Did you mean 'draft_model'"]),
        ("mtp_layers", ["tiny-llama cannot run mtp_layers", "prediction layers"]),
        ("--vary k=3", ["unknown option 'k'", "num_assistant_tokens"]),
        ("--vary num_assistant_tokens", ["names no values", "num_assistant_tokens=1,2,4-8"]),
        ("--vary num_assistant_tokens=0", ["num_assistant_tokens=0", "an int >= 1"]),
        ("--vary num_assistant_tokens=1-99", ["1 to 24 values"]),
        ("prompt_lookup --vary assistant_early_exit=1", ["prompt_lookup", "assistant_early_exit"]),
        ("prompt_lookup --assistant-early-exit 2", ["prompt_lookup", "assistant_early_exit"]),
        ("early_exit --assistant-early-exit 9", ["assistant_early_exit=9", "1 to 4"]),
        ("--repeats 0", ["'0'", ">= 1"]),
        ("--max-new-token 10", ["unknown option '--max-new-token'", "Did you mean '--max-new-tokens'"]),
        ("--bogus 3", ["unknown option '--bogus'"]),
        ("--method draft_model", ["no --method", "draft_model, "]),
        ("--vary num_assistant_tokens=8-4,2", ["'8-4' runs backwards", "4-8"]),
        ("--vary num_assistant_tokens=1 --vary verification=token", ["--vary was given twice"]),
        ("--model other", ["other", "tiny-llama"]),
    ],
)
def test_errors_are_one_line_and_come_before_the_work(ip: Any, cell: Any, line: str, words: list[str]) -> None:
    error = cell(f"%%specbench --max-new-tokens 6 {line}\n{STORY}")
    assert error.startswith("UsageError: ") and all(word in error for word in words), error
    assert "_specbench" not in ip.user_ns


def test_help_and_no_cell_as_a_line(ip: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ip.run_line_magic("specbench", "-h")
    assert "--vary OPTION=VALUES" in capsys.readouterr().out
    with pytest.raises(UsageError, match="the cell has no prompt"):
        ip.run_line_magic("specbench", "draft_model")


def test_a_lossy_run_is_marked_and_a_comparison_comes_back_from_json(ip: Any, cell: Any) -> None:
    line = "draft_model --assistant-ensemble-weight 0.5 --repeats 1 --max-new-tokens 8 -q"
    assert cell(f"%%specbench {line}\n{STORY}") == ""
    found: Comparison = ip.user_ns["_specbench"]
    assert "weight=0.5 (lossy)" in found.text() and "weight=0.5 (lossy)" in str(found)
    again = Comparison.from_json(found.to_json())
    assert again.rows == found.rows and again.verdict == found.verdict and again.text() == found.text()
    with pytest.raises(ValueError, match="not a comparison"):
        Comparison.from_json("[]")


def test_no_prompt(cell: Any) -> None:
    assert "has no prompt" in cell("%%specbench\n  \n---\n\n")
    assert split_prompts("a\n\nb\n---\n\n --- \nc") == ["a\n\nb", "c"]


def test_an_interrupt_keeps_complete_rounds(ip: Any, cell: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, calls = specnb.generate, [0]

    def stopping(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 6:
            raise KeyboardInterrupt
        return generate(*args, **options)

    monkeypatch.setattr(specnb, "generate", stopping)
    error = cell(f"%%specbench prompt_lookup --repeats 3 --max-new-tokens 6 -o kept\n{STORY}")
    assert error == "Interrupted: 1 complete rounds, kept in kept."
    assert ip.user_ns["kept"].repeats == 1 and len(ip.user_ns["kept"].rows) == 2
    calls[0] = 4
    assert "no round was complete" in cell(f"%%specbench prompt_lookup --max-new-tokens 6 -o none\n{STORY}")
    assert "none" not in ip.user_ns
    calls[0] = 0
    with pytest.raises(KeyboardInterrupt) as caught:
        compare(specnb.load("tiny-llama"), STORY, ["prompt_lookup"], max_new_tokens=6, repeats=2)
    assert len(caught.value.partial_result.rows) == 2  # type: ignore[attr-defined]


def test_specload_assigns_the_pair(ip: Any) -> None:
    ip.run_line_magic("specload", "tiny-llama -o mine")
    assert isinstance(ip.user_ns["mine"], specnb.Pair) and ip.user_ns["mine"].name == "tiny-llama"


def test_help_and_completion(ip: Any, cell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cell("%%specbench -h\nx") == ""
    out = capsys.readouterr().out
    assert "--vary OPTION=VALUES" in out and "--num-assistant-tokens" in out
    _, found = ip.complete("--va", "%%specbench --va", len("%%specbench --va"))
    assert "--vary" in found


@pytest.mark.parametrize(
    ("names", "method"),
    [
        ("tiny-gemma4 --assistant tiny-gemma4-assistant", "gemma4_assistant"),
        ("tiny-llama --assistant tiny-llama-other", "universal"),
        ("tiny-llama --assistant tiny-llama-draft", "draft_model"),
        ("tiny-llama", "prompt_lookup"),
    ],
)
def test_specgen_takes_the_method_that_the_draft_model_is_for(ip: Any, cell: Any, names: str, method: str) -> None:
    ip.run_line_magic("specload", names)
    assert cell(f"%%specgen --max-new-tokens 6 -q -o run\n{STORY}") == ""
    assert ip.user_ns["run"].method == method
