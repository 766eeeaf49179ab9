"""The drafter that comes with specnb: int8 weights, the default assistant of its target, and the tool that makes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_training import PROMPTS, QUICK

import specnb
from specnb.models import LoadError, embedded, int8_rows, load_drafter, registry
from specnb.models.eagle3 import Eagle3Drafter, check_eagle3
from specnb.text import prompt_inputs
from specnb.training import run as training_run
from specnb.training.examples import AnswerFile, Example, encode_prompts, read_answers
from tools.smollm2_drafter import answers
from tools.smollm2_drafter.prompts import HELD_OUT, prompts
from tools.smollm2_drafter.ship import ship

NAME = "smollm2-135m-eagle3"
FOLDER = embedded.FOLDER / NAME


# ---- int8 with a scale a row
def test_a_row_is_off_by_half_a_step_at_most() -> None:
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(5, 40, generator=draw) * torch.tensor([[1.0], [100.0], [1e-3], [0.0], [3.0]])
    stored = int8_rows.quantize({"a.weight": weight, "norm.weight": torch.ones(3), "d2t": torch.arange(4)})
    assert {name: value.dtype for name, value in stored.items()} == {
        "a.weight": torch.int8,
        "a.weight_scale": torch.float32,
        "norm.weight": torch.float32,
        "d2t": torch.int64,
    }
    found = int8_rows.dequantize(stored)
    assert found.keys() == {"a.weight", "norm.weight", "d2t"}
    assert bool(((found["a.weight"] - weight).abs() <= stored["a.weight_scale"] * 0.501).all())
    assert torch.equal(int8_rows.dequantize(int8_rows.quantize(found))["a.weight"], found["a.weight"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"fc.weight_scale": None}, "fc.weight is in int8 and needs fc.weight_scale .* there is none"),
        ({"fc.weight_scale": torch.ones(3)}, r"with one scale a row: it has the shape \[3\]"),
    ],
)
def test_scales_that_are_missing_are_named(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    tensors: dict[str, Any] = load_file(FOLDER / "model.safetensors") | change
    save_file({k: v for k, v in tensors.items() if v is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text())
    with pytest.raises(LoadError, match=match):
        load_drafter(tmp_path)


def test_other_quantisations_are_refused(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "model.safetensors", tmp_path)
    raw = json.loads((FOLDER / "config.json").read_text())
    for change in ({"format": "pack-quantized"}, {"quant_method": "gptq"}, {"config_groups": {}}):
        raw["quantization_config"] = int8_rows.QUANTIZATION_CONFIG | change
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(LoadError, match="is quantised in a way that is not read here"):
            load_drafter(tmp_path)


# ---- what comes with specnb
def test_the_shipped_drafter_is_small_and_loads_as_floats() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8_000_000
    drafter = load_drafter(NAME)
    assert isinstance(drafter, Eagle3Drafter) and {one.dtype for one in drafter.parameters()} == {torch.float32}
    stored = load_file(FOLDER / "model.safetensors")
    assert all(value.dtype == torch.int8 for name, value in stored.items() if value.dim() == 2 and "scale" not in name)
    ids = drafter.target_ids()
    assert len(ids) == drafter.config.draft_vocab_size == int(drafter.t2d.sum()) and bool(drafter.t2d[ids].all())
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: apache-2.0\n") and "int8, as shipped" in card
    assert not any(part in card + (FOLDER / "config.json").read_text() for part in ("/root", "/tmp", "/home"))


@pytest.mark.parametrize(
    ("asked", "layers"),
    [({}, 2), ({"assistant": "auto"}, 2), ({"assistant": None}, 0), ({"assistant": "none"}, 0), ({"assistant": 1}, 1)],
)
def test_a_drafter_comes_along_unless_another_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], layers: int
) -> None:
    folder = str(embedded.FOLDER / "tiny-llama")
    entry = registry.Registered(card="With a drafter.", folder=folder, assistant="tiny-llama-draft")
    monkeypatch.setitem(registry.REGISTERED, "both", entry)
    pair = specnb.load("both", **asked)
    assert (pair.assistant.config.num_hidden_layers if pair.assistant is not None else 0) == layers
    assert ("Draft: " + embedded.CARDS["tiny-llama-draft"] in pair.describe()) == (layers == 2)
    assert specnb.load(folder).assistant is None  # the same weights from a folder of the user


def test_it_is_known_by_name_and_no_target_brings_it_along_untrained() -> None:
    trained = "**A placeholder**" not in (FOLDER / "README.md").read_text(encoding="utf-8")
    assert registry.REGISTERED["smollm2-135m-q4"].assistant == (NAME if trained else "")
    assert registry.REGISTERED[NAME].folder == str(FOLDER)
    with pytest.raises(LoadError, match="is a drafter, .* cannot generate alone"):
        specnb.load(NAME)


@pytest.mark.smollm2
def test_it_drafts_for_the_real_target() -> None:
    try:
        pair = specnb.load("smollm2-135m-q4", NAME)
    except LoadError as error:
        if "cannot be fetched" not in str(error):
            raise
        pytest.skip(f"NOT TESTED ON A REAL MODEL: {error}")
    check_eagle3(pair.target, pair.assistant)
    inputs = prompt_inputs(pair.tokenizer, "Why is the sky blue?", device="cpu")
    plain = specnb.generate(pair, **inputs, method="plain", max_new_tokens=24, do_sample=False)
    drafted = specnb.generate(pair, **inputs, max_new_tokens=24, do_sample=False)
    assert drafted.method == "eagle3" and drafted.ids == plain.ids and drafted.num_draft_tokens


# ---- the tool
def test_shipping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "measure", lambda *_: None)
    pair, held = specnb.load("tiny-llama"), PROMPTS[:3]
    result = specnb.train_drafter(pair, PROMPTS, out=tmp_path / "trained", held_out=held, **{**QUICK, "steps": 3})
    (tmp_path / "trained" / "run.json").write_text('{"command": "train them", "note": "Two hours."}')
    ship(pair, tmp_path / "trained", tmp_path / "out", encode_prompts(pair, held, None))
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{result.counts['training tokens']:,} tokens" in card and "`train them`" in card and "Two hours." in card
    shares = " | ".join(f"{share:.3f}" for share in result.best.acceptance)
    assert f"| as trained | {shares} | {result.best.mean_acceptance_length:.2f} |" in card
    again = specnb.load("tiny-llama", tmp_path / "out")
    assert result.pair is not None
    mine, theirs = again.assistant.state_dict(), result.pair.assistant.state_dict()
    assert all((mine[name].float() - theirs[name].float()).abs().max() < 0.02 for name in mine)
    (tmp_path / "trained" / "answers.jsonl").write_text("")
    with pytest.raises(ValueError, match="3 held-out prompts have no greedy answer"):
        ship(pair, tmp_path / "trained", tmp_path / "out", encode_prompts(pair, held, None))


def test_answers_of_several_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_PROMPTS", 30)
    pair, asked = specnb.load("tiny-llama"), prompts(30)
    ids = encode_prompts(pair, [*HELD_OUT[:3], *asked, "Nobody asked this."], None)
    made = [Example(one, [i, i + 1], sampled=i % 2 == 1) for i, one in enumerate(ids)]
    AnswerFile(tmp_path / "a").append([made[8], made[0], *made[20:], made[1]])
    AnswerFile(tmp_path / "b").append([made[2], *made[3:21]])
    with (tmp_path / "b").open("a") as file:
        file.write('{"prompt": [1, 2')  # is being written
    before = (tmp_path / "b").read_text()
    there, found = answers.together(pair, [tmp_path / "a", tmp_path / "b"])
    assert (tmp_path / "b").read_text() == before
    assert sorted(there) == sorted(asked) and there[0] == asked[5]
    assert found[:2] == [made[0], made[2]]  # the other one was sampled
    assert sorted(one.answer for one in found[2:]) == [one.answer for one in made[3:-1]]
    assert read_answers(tmp_path / "a")[0] == made[8]
