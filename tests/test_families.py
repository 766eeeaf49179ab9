"""The list of tested families that the package carries, against a run of 25 families that changes from day to day."""

from __future__ import annotations

import datetime
import json
import os
import random

import pytest
import transformers
from families import report
from families.build import CAUSAL, IMAGE_TEXT, build, families
from families.cells import CRASH, EQUAL, REFUSED, UNSTEADY, WRONG, judge
from families.run import IMAGES, KINDS, isolated

import specnb

RESULTS = report.RESULTS
TODAY = os.environ.get("SPECNB_FAMILIES_SEED", datetime.date.today().isoformat())
SOME = 25
LISTED = json.loads(report.LIST.read_text())


def drawn() -> list[tuple[str, str]]:
    """Today's kinds and families, the same for everybody."""
    every = [(kind, family) for kind in KINDS for family in families(CAUSAL if kind == CAUSAL else IMAGE_TEXT)]
    return sorted(random.Random(TODAY).sample(every, SOME))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "family"), drawn())
def test_a_family_is_right_or_refused(kind: str, family: str) -> None:
    """No cell is another text or an error that is not ours, and a listed family has cells that are equal."""
    found = isolated(family, kind)
    if "not_run" in found:
        pytest.skip(found["not_run"])
    listed = found["model_type"] in LISTED["image" if kind == IMAGES else "text"]
    known = report.read(RESULTS / f"families-{kind}.jsonl").get(family, {})
    if report.is_bad(found) and report.is_bad(known) and not listed:
        pytest.xfail(f"not mended yet, as tests/results says: {report.verdict(found)}")
    assert not report.is_bad(found), report.verdict(found)
    assert report.is_right(found) or not listed, report.verdict(found)


@pytest.mark.skipif(transformers.__version__ != LISTED["transformers"], reason="made with another version")
def test_the_list_is_what_the_run_found() -> None:
    assert report.tested(RESULTS) == LISTED


def test_the_list_names_what_users_run() -> None:
    assert {"llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gpt2", "glm4_moe", "deepseek_v3"} <= set(
        LISTED["text"]
    )


# ---------------------------------------------------------------- the run itself can tell right from wrong
def test_verdicts() -> None:
    def ours(steps: list[object]) -> list[list[int]]:
        specnb.generate(build("llama"), method="no such method", max_new_tokens=1)
        raise AssertionError

    def foreign(steps: list[object]) -> list[list[int]]:
        raise ValueError("not from specnb")

    assert judge(lambda steps: [[1, 2]], [[1, 3]], [[1, 2]]).verdict == EQUAL
    assert judge(lambda steps: [[1, 2]], [[1, 3]]).verdict == WRONG
    for one_pass, verdict in (([1, 2, 5], UNSTEADY), ([1, 3, 5], WRONG), ([1, 2, 4], WRONG)):
        whole = lambda row, text, one_pass=one_pass: one_pass  # noqa: E731
        assert judge(lambda steps: [[1, 2, 5]], [[1, 3, 6]], whole=whole).verdict == verdict
    assert judge(foreign, [[1]]).verdict == CRASH
    assert judge(ours, [[1]]).verdict == REFUSED


def test_a_wrong_text_is_found_and_unlists_its_family() -> None:
    """One wrong cell, of whichever class, takes the model type off the list."""
    cells = {"plain": {"verdict": EQUAL}, "image rows plain": {"verdict": REFUSED}}
    right = {"family": "a", "model_type": "a", "cells": cells}
    partly = {"family": "d", "model_type": "d", "cells": cells | {"draft": {"verdict": REFUSED}}}
    wrong = {"family": "b", "model_type": "a", "cells": cells | {"lookup": {"verdict": WRONG}}}
    refused = {"family": "c", "model_type": "c", "cells": {"plain": {"verdict": REFUSED}}}
    assert report.is_right(right) and not report.is_right(wrong) and not report.is_right(refused)
    assert report.is_right(partly)  # nothing is wrong with it, but the block check may refuse it
    assert report.right_types([right, refused, partly]) == ["a"]
    assert report.right_types([right, wrong]) == []


def test_weights_come_from_the_seed_alone() -> None:
    one, same, other = build("llama", seed=1), build("llama", seed=1), build("llama", seed=2)
    weights = [dict(model.named_parameters())["lm_head.weight"] for model in (one, same, other)]
    assert weights[0].equal(weights[1]) and not weights[0].equal(weights[2])
