"""`python -m specnb bench`: every section of the built-in suite, on a tiny model in place of the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from checks import cache_name
from transformers import PreTrainedModel

from specnb import cli
from specnb.bench import clocks, suite

OLD = cache_name(tiny.llama()) == "past_key_values"  # transformers before 5.24


@pytest.fixture(scope="module")
def stem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stem, threads = tmp_path_factory.mktemp("bench") / "results" / "bench", torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "MODEL", "tiny-llama")
        patch.setitem(suite.SIZES, "small", suite.Size(1, (2, 8), 1, 10, (1, 2), (64, 128)))
        patch.setattr(suite, "TINY_MODEL_PROMPTS", suite.TINY_MODEL_PROMPTS[:1])
        assert cli.main(["bench", "--threads", "1", "--output", str(stem)]) == 0
    torch.set_num_threads(threads)
    return stem


@pytest.mark.slow
def test_every_section_has_its_figures(stem: Path) -> None:
    found = json.loads(stem.with_suffix(".json").read_text())
    assert found["format"] == "specnb.bench/1" and found["environment"]["threads"] == 1
    assert [one["kind"] for one in found["prompts"]] == ["edit code", "summarise", "question", "open story", "chat"]
    for one in found["prompts"]:
        assert one["adaptive"] > 0 and one["best fixed"] > 0 and one["best k"] in (2, 8)
        runs = {run["run"]: run for run in one["runs"]}
        assert all(run["same text"] for run in runs.values())
        assert runs["prompt_lookup"]["x transformers' own"] > 0 and runs["plain"]["x transformers' own"] > 0
        assert runs["prompt_lookup, num_assistant_tokens=2"]["x transformers' own"] is None
    assert ["left out" in pair for pair in found["embedded"]] == [False] * 5 + [OLD]
    methods = {run["run"].split(",")[0] for pair in found["embedded"] for run in pair["runs"]}
    assert methods == {
        "plain",
        "draft_model",
        "prompt_lookup",
        "suffix",
        "suffix+draft_model",
        "early_exit",
        "universal",
        "gemma4_assistant",
        "mtp_layers",
    }
    for pair in [*found["embedded"], *found["methods"]]:
        for run in pair["runs"]:
            assert run["same text"]
            own = run["transformers"]
            if pair.get("target") == "tiny-qwen3-5" and run["run"] != "plain":
                assert "stateful" in own and run["x transformers' own"] is None
            elif run["run"].startswith("suffix"):
                assert "does not have" in own or "has no suffix" in own
            elif run["run"].startswith("mtp_layers") and own:  # transformers before 5.24 cannot load these
                assert "missing" in own and run["x transformers' own"] is None
            else:
                assert not own and run["x transformers' own"] > 0
    assert [(row["method"], row["rows"]) for row in found["rows"]] == [
        ("plain", 1),
        ("plain", 2),
        ("prompt_lookup", 1),
        ("prompt_lookup", 2),
    ]
    assert all(row["same texts"] for row in found["rows"])
    for step in found["contexts"]:
        assert step["step ms"] > step["outside attention ms"] > step["outside the model ms"] > 0
    assert found["first token"]["plain"] > 0
    assert all(0 < one["own %"] < 100 for one in found["own share"])


def test_the_page_has_every_section_and_the_command(stem: Path) -> None:
    page = stem.with_suffix(".md").read_text()
    for words in (
        "bench --suite small --threads 1",
        "## Prompt lookup on a real model",
        "## Every method",
        "## Draft model and early exit",
        "## Rows",
        "## Long contexts",
        "## First token",
        "## Own share",
        "tiny-gemma4 + tiny-gemma4-assistant",
    ):
        assert words in page
    assert " NO " not in page


def test_one_section_or_a_wrong_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "MODEL", "tiny-llama")
    monkeypatch.setitem(suite.SIZES, "small", suite.Size(1, (2,), 1, 6, (1,), (64,)))
    assert cli.main(["bench", "--section", "first token"]) == 0
    out = capsys.readouterr().out
    assert "--section 'first token'" in out and "## First token" in out and "## Rows" not in out
    assert cli.main(["bench", "--section", "row"]) == 1
    assert "Did you mean 'rows'?" in capsys.readouterr().err


def test_the_clocks_leave_nothing_behind() -> None:
    kernel = torch.nn.functional.scaled_dot_product_attention
    with clocks.time_model_calls(), clocks.time_attention():
        assert torch.nn.functional.scaled_dot_product_attention is not kernel and "__call__" in vars(PreTrainedModel)
    assert torch.nn.functional.scaled_dot_product_attention is kernel and "__call__" not in vars(PreTrainedModel)
