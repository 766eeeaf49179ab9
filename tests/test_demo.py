"""The command line, on a tiny model in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny

from specnb import cli, demo
from specnb.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.llama(vocab=330).save_pretrained(path)
    tiny.byte_tokenizer().save_pretrained(path)
    return str(path)


def test_demo_compares_the_methods(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", folder, "--max-new-tokens", "12", "--prompt", "fox fox fox"]) == 0
    shown = capsys.readouterr().out
    table = shown.split("method  ")[1].splitlines()
    assert [line.split()[0] for line in table[2:5]] == ["plain", "prompt_lookup", "draft_model"]
    assert all(line.endswith("yes") for line in table[2:5])
    assert "fox fox fox" in shown and "first 1 of 4 layers" in shown and shown.count("tokens/s (") == 3


def test_demo_without_arguments_takes_the_embedded_pair(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    table = shown.split("method  ")[1].splitlines()
    assert [line.split()[0] for line in table[2:5]] == ["plain", "prompt_lookup", "draft_model"]
    assert all(line.endswith("yes") for line in table[2:5])
    assert "tiny-llama: LlamaForCausalLM" in shown and "draft: the assistant of the pair" in shown
    assert "prompt: Tell this story with a sheep" in shown and "Paula lived at the beach" in shown.split("--- plain")[1]
    assert "demo --model smollm2-135m-q4" in shown


def test_the_prompt_suits_the_model() -> None:
    from tools.embedded_models.data import held_out

    assert demo.TINY_PROMPT in [asked for asked, _ in held_out(3)]
    assert demo.PROMPT.startswith("Copy this text:")


def test_demo_uses_the_assistant_of_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    pair: Any = type("Pair", (), {"assistant": "draft"})
    assert demo.select_draft(pair)[0] == "draft"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["demo", "--max-new-tokens", "0"], "'0' is not a number >= 1"),
        (["demo", "--max", "5"], "--max"),
        (["other"], "other"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_model_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", str(tmp_path / "nothing")]) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("specnb: ") and "\n" not in error and "nothing" in error


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "demo", interrupt)
    assert main(["demo"]) == 130 and capsys.readouterr().err == "interrupted\n"


def test_help_as_a_module() -> None:
    root = Path(__file__).parent.parent
    run = subprocess.run(
        [sys.executable, "-m", "specnb", "demo", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert "--max-new-tokens" in run.stdout and not run.stderr
