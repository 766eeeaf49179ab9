"""The fuzzer finds what it is there to find, and makes it small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fuzzing import runner
from fuzzing.draws import Draw, draw
from fuzzing.judge import judge
from fuzzing.script import source
from fuzzing.shrink import label, shrink

import specnb

LOOKUP = Draw(method="prompt_lookup", drafting={"num_assistant_tokens": 3}, options={"repetition_penalty": 1.3})
OURS = specnb.generate


def test_a_draw_comes_from_seed_and_index() -> None:
    assert [draw(1, i) for i in range(50)] == [draw(1, i) for i in range(50)]
    assert draw(1, 0) != draw(1, 1) != draw(2, 1)


def test_draws_reach_everything() -> None:
    """Every method, entry, wrapper, cache and dtype, rows, padding on both sides, images and sampling."""
    many = [draw(0, i) for i in range(3000)]
    for name, least in {
        "method": 16,
        "entry": 3,
        "cache": 3,
        "dtype": 4,
        "wrapper": 18,
        "family": 100,
        "draft": 5,
    }.items():
        assert len({getattr(one, name) for one in many}) >= least, name
    assert {len(one.rows) for one in many} == {1, 2, 3}
    assert any(one.right for one in many) and any(one.pad for one in many) and any(one.image for one in many)
    assert len({name for one in many for name in one.own}) >= 19
    assert len({name for one in many for name in one.options}) >= 28
    assert any(one.seed is not None for one in many) and any(one.drafting.get("verification") for one in many)


def test_a_right_call_is_equal() -> None:
    assert judge(LOOKUP).kind == "equal"


def test_a_refusal_is_right() -> None:
    assert judge(Draw(options={"num_beams": 2})).kind == "refused"


def broken(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    """specnb.generate with a fault when it drafts by lookup."""

    def generate(model: Any, *args: Any, **options: Any) -> Any:
        result = OURS(model, *args, **options)
        return fault(model, result) if options["method"] == "prompt_lookup" else result

    monkeypatch.setattr(specnb, "generate", generate)


def another_text(model: Any, result: Any) -> Any:
    result.sequences[:, -1] += 1
    return result


def raises(model: Any, result: Any) -> Any:
    raise RuntimeError("raw")


def late(model: Any, result: Any) -> Any:
    raise ValueError("a refusal when there is text already")


def a_setting(model: Any, result: Any) -> Any:
    model.generation_config.top_k = 7
    return result


def a_weight(model: Any, result: Any) -> Any:
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    return result


def a_random_number(model: Any, result: Any) -> Any:
    torch.rand(1)
    return result


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (another_text, "wrong text"),
        (raises, "raw error"),
        (late, "raw error"),
        (a_setting, "changed"),
        (a_weight, "changed"),
        (a_random_number, "changed"),
    ],
)
def test_a_fault_is_found(fault: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, fault)
    assert judge(LOOKUP).kind == kind


def test_a_sampled_text_that_the_seed_does_not_decide_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))

    def some_other(model: Any, result: Any) -> Any:
        result.sequences[:, -1] += next(calls)
        return result

    broken(monkeypatch, some_other)
    assert judge(Draw(method="prompt_lookup", seed=1)).kind == "seed"


def test_another_distribution_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling that forgets the temperature."""
    sampled = Draw(method="draft_model", seed=1, sampling={"temperature": 0.5}, drafting={"num_assistant_tokens": 2})
    right = judge(sampled)
    assert (right.kind, right.detail) == ("distribution", "compared")

    def generate(model: Any, *args: Any, **options: Any) -> Any:
        return OURS(model, *args, **options | {"temperature": 1.0})

    monkeypatch.setattr(specnb, "generate", generate)
    assert judge(sampled).kind == "another distribution"


def test_a_finding_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, another_text)
    large = Draw(
        family="qwen3",
        rows=((5, 17, 23, 42, 5, 17), (9, 8, 9, 8)),
        pad=2,
        options={"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        own=("parity",),
        cache="empty",
        method="prompt_lookup",
        drafting={"num_assistant_tokens": 3},
    )
    small, outcome = shrink(large, judge(large))
    assert outcome.kind == "wrong text"
    assert label(small) == "method=prompt_lookup"
    assert len(small.rows) == small.new == len(small.rows[0]) == 1


def test_a_finding_is_a_script_that_stands_alone() -> None:
    text = source(LOOKUP)
    assert "fuzzing" not in text and "families" not in text
    space: dict[str, Any] = {"__name__": "alone"}
    exec(compile(text, "alone.py", "exec"), space)
    model = space["model"]()
    given = space["inputs"](model)
    texts = [space["tokens"](space[side](model, given, space["helpers"]()), given) for side in ("theirs", "ours")]
    assert texts[0] == texts[1] and len(texts[0][0]) == LOOKUP.new


def test_a_worker_that_dies_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "judge", lambda made: __import__("os")._exit(3))
    report = runner.run(0, count=2)
    assert report.counts == {"died": 2} and not report.right
