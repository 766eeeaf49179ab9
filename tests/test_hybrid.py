"""Hybrids: a lookup with a model drafter. Exact, named in the trace, and by the rule that promises more."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny
import torch
from checkpoints import mtp_model
from checks import EAGER, consistent, padded, plain, spec

import specnb
from specnb.decoding.schedules import Adaptive, Constant
from specnb.drafters.hybrid import HybridSchedule
from specnb.options import MODEL_DRAFTERS, drafting_options, hybrid_names, method_info
from specnb.trace import GenerationResult, RowResult, Step
from specnb.views.html import result_view
from specnb.views.text import marked_text

T = tiny.llama()
DRAFT = tiny.noisy(T, 0.02)
X = torch.cat([tiny.ids(0, 7)] * 3, 1)
HOWS: dict[str, dict[str, Any]] = {
    "draft_model": {"assistant_model": DRAFT},
    "early_exit": {"assistant_early_exit": 2},
}


def step(drafted: int, accepted: int, source: str = "", draft: float = 0.0, verify: float = 1.0) -> Step:
    return Step(9, (5,) * drafted, accepted, (5,) * (accepted + 1), draft, verify, 0.0, match_length=3, source=source)


def sources(result: GenerationResult) -> set[str]:
    return {one.source for one in result.steps if one.drafted}


# ---------------------------------------------------------------- exact
@pytest.mark.parametrize("lookup", ["prompt_lookup", "suffix"])
@pytest.mark.parametrize("model", HOWS)
@pytest.mark.parametrize("schedule", ["constant", "heuristic", "adaptive"])
def test_greedy_text_is_the_targets(lookup: str, model: str, schedule: str) -> None:
    method, wanted = f"{lookup}+{model}", plain(T, X, max_new_tokens=60)
    result = spec(
        T, X, method=method, max_new_tokens=60, num_assistant_tokens_schedule=schedule, **HOWS[model], **EAGER
    )
    consistent(result)
    assert list(result.ids) == wanted and result.method == method
    assert sources(result) <= {lookup, model} and result.steps[0].source in ("", lookup)
    assert all(one.source for one in result.steps if one.drafted)
    assert not any(one.source for one in result.steps if not one.drafted)


def test_both_parts_draft() -> None:
    result = spec(T, X, method="suffix+draft_model", max_new_tokens=60, assistant_model=DRAFT, num_assistant_tokens=3)
    assert sources(result) == {"suffix", "draft_model"}
    assert all(len(one.drafted) <= 3 for one in result.steps if one.source == "draft_model")
    again = GenerationResult.from_json(result.to_json())
    assert [one.source for one in again.steps] == [one.source for one in result.steps]
    assert "source" in result.to_pandas()
    old = json.loads(result.to_json())
    for row in old["rows"]:
        for one in row["steps"]:
            del one["source"]
    assert not sources(GenerationResult.from_json(json.dumps(old))) - {""}


def test_rows_choose_for_themselves() -> None:
    prompts = [X, tiny.ids(3, 5), tiny.ids(4, 9)]
    ids, mask = padded(prompts)
    result = spec(T, ids, attention_mask=mask, method="suffix+draft_model", max_new_tokens=40, assistant_model=DRAFT)
    for row, prompt in zip(result.rows, prompts, strict=True):
        assert list(row.ids) == plain(T, prompt, max_new_tokens=40)
    consistent(result)


def test_mtp_layers_and_running_states() -> None:
    mtp = mtp_model("glm4_moe", 2, 1)
    result = spec(mtp, X % 32, method="suffix+mtp_layers", use_mtp=True, max_new_tokens=30)
    assert list(result.ids) == plain(mtp, X % 32, max_new_tokens=30) and "mtp_layers" in sources(result)
    hybrid = tiny.hybrid()
    draft = tiny.noisy(hybrid, 0.05)
    found = spec(hybrid, X, method="suffix+draft_model", assistant_model=draft, max_new_tokens=30)
    assert list(found.ids) == plain(hybrid, X, max_new_tokens=30) and "draft_model" in sources(found)


def test_sampled_text_does_not_depend_on_the_memory_or_the_clock() -> None:
    memory, given = specnb.Memory(), {"method": "suffix+draft_model", "assistant_model": DRAFT, "max_new_tokens": 40}
    first = specnb.generate(T, X, do_sample=True, seed=3, **given)
    for _ in range(2):
        again = specnb.generate(T, X, do_sample=True, seed=3, memory=memory, prediction=list(first.ids), **given)
        assert again.ids == first.ids
    assert first.options["num_assistant_tokens_schedule"] == "constant" and len(memory)


def test_views_show_what_the_lookup_drafted() -> None:
    steps = (
        Step(2, (5, 6), 2, (5, 6, 7), source="suffix"),
        Step(5, (8,), 1, (8, 9), source="draft_model"),
        Step(7, (3,), 0, (4,), source="suffix"),
    )
    row = RowResult((1, 2), (5, 6, 7, 8, 9, 4), steps, "length", tuple("abcdef"), ((), (), ("x",)))
    result = GenerationResult("suffix+draft_model", [row], {}, None, 1.0, False, 3)
    html = result_view(result)
    assert "<ins class=c>a<i></i>b</ins>" in html and "<ins>d</ins>" in html and "<ins class=c>lookup</ins>" in html
    text = marked_text(result)
    assert text.startswith("⟪ab⟫«c»⟦d⟧«e»‹f›") and "⟪lookup⟫" in text
    assert "accepted 3 of 4 drafted (75.0%; draft_model 1 of 1; suffix 2 of 3)" in text
    alone = GenerationResult(
        "suffix", [RowResult((1,), (5, 6), (Step(1, (5,), 1, (5, 6)),), "length", ("a", "b"))], {}, None, 1.0, False, 1
    )
    assert "lookup" not in result_view(alone) and "class=c>" not in result_view(alone)


# ---------------------------------------------------------------- the rule
def test_the_lookup_drafts_where_it_promises_more_tokens() -> None:
    schedule = HybridSchedule(Constant(4), Constant(2), "suffix")
    for _ in range(30):
        schedule.update(step(2, 1, "draft_model"))  # one accepted token in the mean
    assert schedule.length(5, [0.9, 0.9, 0.9, 0.9]) == 4 and schedule.prefers_lookup(4)
    assert schedule.length(5, [0.4, 0.4, 0.4, 0.4]) == 4 and not schedule.prefers_lookup(4)
    assert not schedule.prefers_lookup(0) and schedule.length() == 2


def test_times_decide_where_they_may() -> None:
    """A slow model drafter with two accepted tokens loses against a copy with one; a quick one wins."""

    def prefers(seconds: float) -> bool:
        schedule = HybridSchedule(Adaptive(4), Adaptive(3), "suffix")
        for _ in range(40):
            schedule.update(step(3, 2, "draft_model", draft=seconds))
        schedule.length(5, [0.99])
        return schedule.prefers_lookup(1)

    assert prefers(2.0) and not prefers(0.01)


def test_a_lookup_that_was_right_in_vain_is_tried_again() -> None:
    schedule = HybridSchedule(Constant(4), Constant(2), "prompt_lookup")

    def asks() -> bool:
        return schedule.length(3) == 4 and schedule.prefers_lookup(4)

    for _ in range(40):
        schedule.update(step(2, 1, "draft_model"))
    for _ in range(20):
        schedule.update(step(4, 0, "prompt_lookup"))
    assert not asks()
    for _ in range(40):
        schedule.learn_unused(3, 4, 4)
    assert asks()


# ---------------------------------------------------------------- options and names
def test_a_hybrid_has_the_options_of_both_parts() -> None:
    info = method_info("suffix+draft_model")
    assert info.parts == ("suffix", "draft_model") and "assistant_model" in info.needs
    both = drafting_options("suffix").keys() | drafting_options("draft_model").keys()
    assert drafting_options("suffix+draft_model").keys() == both - {"assistant_ensemble_weight"}
    assert specnb.Method("suffix+draft_model").options["num_assistant_tokens"] == 5
    assert len(hybrid_names()) == 2 * len(MODEL_DRAFTERS) and all(method_info(name).parts for name in hybrid_names())


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"method": "suffix+plain"}, "a hybrid is LOOKUP\\+MODEL, with LOOKUP one of prompt_lookup, suffix"),
        ({"method": "draft_model+suffix", "assistant_model": DRAFT}, "a hybrid is LOOKUP"),
        ({"method": "suffix+draft_model"}, "needs assistant_model="),
        ({"method": "suffix+early_exit"}, "needs assistant_early_exit="),
        ({"method": "suffix+mtp_layers", "assistant_model": DRAFT}, "is for method 'draft_model'"),
        ({"method": "suffix+draft_model", "assistant_model": DRAFT, "use_mtp": True}, "asks for method 'mtp_layers'"),
        (
            {"method": "prompt_lookup+draft_model", "assistant_model": DRAFT, "prompt_lookup_num_tokens": 4},
            "asks for method 'prompt_lookup'",
        ),
        (
            {"method": "suffix+draft_model", "assistant_model": DRAFT, "assistant_ensemble_weight": 0.5},
            "assistant_ensemble_weight",
        ),
        ({"method": "prompt_lookup+early_exit", "assistant_early_exit": 1, "memory": specnb.Memory()}, "memory= given"),
    ],
)
def test_wrong_hybrids_are_named(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        specnb.generate(T, X, max_new_tokens=4, **given)
