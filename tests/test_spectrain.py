"""`%%spectrain` and `python -m specnb train`: the same training as `train_drafter`, from a cell and from a shell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checks import shell as extension_shell
from IPython.core.error import UsageError
from test_training import PROMPTS

from specnb import cli
from specnb.models.eagle3 import Eagle3Drafter
from specnb.notebook.training import training_data
from specnb.training import TrainingResult, measure

LINE = "--steps 4 --max-new-tokens 8 --batch-size 4"


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(measure, "MAX_NEW_TOKENS", 4)
    with extension_shell(tmp_path / "ipython", monkeypatch) as made:
        made.run_line_magic("specload", "tiny-llama")
        yield made


def test_a_cell_trains_a_drafter(shell: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "\n".join([*PROMPTS[:8], ""])
    shell.user_ns["more"] = PROMPTS[8:]
    shell.run_cell_magic("spectrain", f"{LINE} --out {tmp_path / 'mine'} --prompts more -o trained", body)
    result = shell.user_ns["trained"]
    assert isinstance(result, TrainingResult) and shell.user_ns["_spectrain"] is result
    assert result.counts["examples"] + result.counts["held-out examples"] == len(PROMPTS)
    said = capsys.readouterr().out
    assert "answers: 16 of 16 prompts" in said and "training: step 4" in said and said.count(result.verdict) == 1
    shell.run_cell_magic("specgen", "--max-new-tokens 8 --num-assistant-tokens 2 -o run", PROMPTS[0])
    assert shell.user_ns["run"].method == "eagle3" and shell.user_ns["run"].num_draft_tokens
    assert isinstance(result.pair.assistant, Eagle3Drafter)


def test_help_needs_no_body(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("%%spectrain --help", "%%specgen -h\n", "%%specbench --model tiny-llama -h"):
        assert shell.run_cell(line).success and "usage: %%spec" in capsys.readouterr().out


def test_an_interrupt_keeps_the_best(shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specnb.training.fitting import Fitting

    run = Fitting.run

    def stopped(self: Fitting, budget: Any, marks: Any, on_evaluation: Any) -> None:
        def stop(found: Any, share: float) -> None:
            on_evaluation(found, share)
            if found.step == 2:
                raise KeyboardInterrupt

        run(self, budget, marks, stop)

    monkeypatch.setattr(Fitting, "run", stopped)
    body = "\n".join(PROMPTS)
    with pytest.raises(KeyboardInterrupt, match="the best drafter so far is in"):
        shell.run_cell_magic("spectrain", f"{LINE} -q --out {tmp_path / 'mine'} -o trained", body)
    assert not shell.user_ns["trained"].finished
    monkeypatch.setattr(Fitting, "run", run)
    shell.run_cell_magic("spectrain", f"{LINE} -q --resume --out {tmp_path / 'mine'} -o trained", body)
    assert shell.user_ns["trained"].finished and shell.user_ns["trained"].history[-1].step == 4


@pytest.mark.parametrize(
    ("line", "body", "match"),
    [
        ("", "a prompt", "name the folder of the drafter: --out DIR"),
        ("--out OUT", "\n", "nothing to learn from"),
        ("--out OUT --prompts nowhere", "\n", "no variable 'nowhere'"),
        ("--out OUT --minutes 0", "a", "minutes"),
        ("--out OUT --epochs 3", "a", "unknown option '--epochs'"),
        ("--out OUT --ttt-steps 99", "a", "it must be an int >= 1 and <= 16"),
        ("--out OUT", "one\ntwo", "2 different prompts and 0 different texts are too few"),
    ],
)
def test_wrong_cells_are_named(shell: Any, tmp_path: Path, line: str, body: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        shell.run_cell_magic("spectrain", line.replace("OUT", str(tmp_path / "out")), body)


def test_help_and_completion(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_line_magic("spectrain", "-h")
    said = capsys.readouterr().out
    assert "--draft-vocab-size" in said and "default 4096" in said and "--held-out" in said
    found = shell.complete("--dra", "%%spectrain --dra")[1]
    assert found == ["--draft-vocab-size"]


def test_data_of_a_cell() -> None:
    assert training_data("a\n\nb\n", {"texts": "t"}, {"t": ["x"]}) == {"texts": ["x"], "prompts": ["a", "b"]}
    assert training_data("", {"prompts": "p", "held_out": "h"}, {"p": ["x"], "h": ["y"]}) == {
        "prompts": ["x"],
        "held_out": ["y"],
    }


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure, "MAX_NEW_TOKENS", 4)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    line = ["train", "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "mine"), *LINE.split()]
    assert cli.main(line) == 0
    assert (tmp_path / "mine" / "model.safetensors").exists() and "a pass" in capsys.readouterr().out
    assert cli.main(line) == 1
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*line, "--ttt-steps", "0"])
    assert "it must be an int >= 1 and <= 16" in capsys.readouterr().err
