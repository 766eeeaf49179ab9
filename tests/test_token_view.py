"""The interactive token view without a browser: its JSON, the replay's clock, branches, and what the widget does."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from checkpoints import gemma4_drafter, gemma4_target, mtp_model
from checks import EAGER

import specnb
from specnb.notebook.stream import RECORDED
from specnb.trace import GenerationResult, RowResult, Step
from specnb.views.html import StaticView, result_view
from specnb.views.replay import plain_lane, step_times
from specnb.views.token_model import branch_model, token_model

MODEL, TOKENIZER = tiny.llama(vocab=330), tiny.byte_tokenizer()
DRAFT = tiny.noisy(MODEL, 0.03)


def run(prompt: str | list[str] = "the quick brown fox", **how: Any) -> GenerationResult:
    given = {"tokenizer": TOKENIZER, "max_new_tokens": 16, "do_sample": False, **RECORDED, **how}
    return specnb.generate(MODEL, prompt, **given)


DRAFTED = {"assistant_model": DRAFT, **EAGER}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "draft": DRAFTED,
    "rows": {"prompt": ["the quick brown fox", "a"], **DRAFTED},
    "lookup": {"prompt": "the quick the quick the quick", "method": "prompt_lookup"},
    "hybrid": {"prompt": "the quick the quick the quick", "method": "suffix+draft_model", **DRAFTED},
    "early exit": {"assistant_early_exit": 2, **EAGER},
    "sampled": {**DRAFTED, "do_sample": True, "temperature": 1.3, "seed": 1},
    "not recorded": {**DRAFTED, "top_logprobs": 0, "probabilities": False, "logprobs": False},
    "no tokenizer": {"prompt": tiny.ids(0, 7), "tokenizer": None, **DRAFTED},
}
RESULTS = {name: run(**how) for name, how in WAYS.items()}


@pytest.mark.parametrize("name", WAYS)
def test_the_json_says_what_the_trace_says(name: str) -> None:
    result = RESULTS[name]
    model = token_model(result)
    assert model == json.loads(json.dumps(model))
    assert (model["model"], model["method"]) == ("LlamaForCausalLM", result.method)
    assert len(model["rows"]) == len(result.rows)
    for row, shown in zip(result.rows, model["rows"], strict=True):
        assert [token["id"] for token in shown["tokens"]] == list(row.ids)
        assert (shown["prompt"] is None) == (name == "no tokenizer")
        for number, (step, told) in enumerate(zip(row.steps, shown["steps"], strict=True)):
            own = shown["tokens"][told["first"] : told["first"] + told["count"]]
            assert [token["id"] for token in own] == list(step.emitted)
            assert {token["step"] for token in own} == {number}
            assert [token["place"] for token in own[: step.accepted]] == list(range(step.accepted))
            assert all(token["source"] == "target" for token in own[step.accepted :])
            drafted = told["positions"][: len(step.drafted)]
            assert [position["id"] for position in drafted] == list(step.drafted)
            assert sum(position["fate"] in ("accepted", "lookup") for position in drafted) == step.accepted
            for position, tops in zip(drafted, step.draft_top_logprobs or (), strict=False):
                assert [(one[1], one[2]) for one in position["draft_top"]] == [
                    (token, pytest.approx(math.exp(logprob), rel=1e-5)) for token, logprob in tops
                ]
            recorded = name != "not recorded"
            assert all((position["target_top"] is not None) == recorded for position in told["positions"][-1:])


def test_ranks_and_probabilities_are_those_of_a_forward_over_the_text() -> None:
    """Of the emitted tokens, and of the drafted ones up to the first rejected one."""
    rejected = 0
    for name in ("draft", "sampled", "lookup"):
        result = RESULTS[name]
        text = [*result.rows[0].prompt_ids, *result.ids]
        with torch.no_grad():
            logits = MODEL(torch.tensor([text]), use_cache=False).logits[0].float()
        for step in result.steps:
            assert step.ranks is not None
            for i, (token, rank) in enumerate(zip(step.emitted, step.ranks, strict=True)):
                at = logits[step.position + i - 1]
                assert rank == 1 + int((at > at[token]).sum())
            for i, rank in enumerate(step.target_ranks or ()):
                at = logits[step.position + i - 1]
                assert rank == 1 + int((at > at[step.drafted[i]]).sum())
                rejected += i == step.accepted
    assert rejected  # the first rejected tokens were among them
    assert all(step.ranks is step.target_ranks is None for step in RESULTS["not recorded"].steps)


def timed() -> GenerationResult:
    """A prompt pass of 1 s, then passes of 1, 5 and 3 tokens in 0.1, 0.14 and 0.12 s, and 0.02 s for each draft."""
    steps = (
        Step(3, (), 0, (1,), 0.0, 1.0),
        Step(4, (), 0, (2,), 0.0, 0.1),
        Step(5, (3, 4, 5, 9), 3, (3, 4, 5, 6), 0.02, 0.14),
        Step(9, (9, 9), 0, (7,), 0.02, 0.12),
    )
    return GenerationResult("draft_model", [RowResult((7, 7, 7), (1, 2, 3, 4, 5, 6, 7), steps, "length")])


def test_the_clock_and_the_lane_of_plain_decoding_by_hand() -> None:
    result = timed()
    assert [one.end for one in step_times(result)] == pytest.approx([1, 1.1, 1.26, 1.4])
    lane = plain_lane(result)
    assert lane is not None and not lane.measured and "passes of 1 to 5 tokens" in lane.basis
    assert lane.times == pytest.approx([1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6])
    steps = result.rows[0].steps
    result.rows[0].steps = (steps[0], *(replace(s, position=4) for s in steps[2:]))
    result.rows[0].ids = (1, 3, 4, 5, 6, 7)
    lane = plain_lane(result)  # from passes of 5 and 3 tokens: a straight line through both
    assert lane is not None and lane.times[1] - lane.times[0] == pytest.approx(0.1) and not lane.bound
    result.rows[0].steps, result.rows[0].ids = steps[::2], (1, 3, 4, 5, 6)
    lane = plain_lane(result)
    assert lane is not None and lane.bound and lane.times[1] - lane.times[0] == pytest.approx(0.14)
    result.rows[0].steps, result.rows[0].ids = steps[:1], (1,)
    assert plain_lane(result) is None  # nothing to estimate from


def test_saved_time_adds_up_and_measured_times_win() -> None:
    tokens = token_model(timed())["rows"][0]["tokens"]
    assert sum(token["saved"] for token in tokens) == pytest.approx(1.6 - 1.4)
    plain = GenerationResult(
        "plain", [RowResult((7, 7, 7), (1, 2, 3), tuple(Step(3 + i, (), 0, (i,), 0, 0.5) for i in (1, 2, 3)), "length")]
    )
    lane = plain_lane(timed(), plain=plain)
    assert lane is not None and lane.measured and lane.times == pytest.approx([0.5 * i for i in range(1, 8)])
    plain.rows[0].prompt_ids = (1,)
    lane = plain_lane(timed(), plain=plain)
    assert lane is not None and not lane.measured  # of another prompt
    assert plain_lane(RESULTS["plain"]) is None


@pytest.mark.parametrize("name", ["draft", "lookup", "early exit", "plain"])
def test_a_branch_with_the_same_token_goes_on_as_the_run_did(name: str) -> None:
    result = RESULTS[name]
    assert result.branch(5, result.ids[5], max_new_tokens=10).ids == result.ids[6:]
    assert result.branch(0, method="plain").ids == result.ids[:16]


def others() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Methods whose drafters read the target's states, or another tokenizer's text."""
    from test_eagle3 import drafter, target

    gemma = gemma4_target()
    return {
        "Gemma 4": (gemma, {"assistant_model": gemma4_drafter(gemma), **EAGER}),
        "MTP": (mtp_model("glm4_moe", 2, 2), {"use_mtp": True, **EAGER}),
        "EAGLE-3": (target(), {"assistant_model": drafter(), **EAGER}),
        "universal": (
            MODEL,
            {
                "assistant_model": tiny.llama(vocab=300),
                "tokenizer": TOKENIZER,
                "assistant_tokenizer": tiny.byte_tokenizer(300),
                **EAGER,
            },
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma 4", "MTP", "EAGLE-3", "universal"])
def test_other_methods_show_and_branch_too(name: str) -> None:
    model, how = others()[name]
    given = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones(1, 7, dtype=torch.long), **how}
    result = specnb.generate(model, tiny.ids(0, 7), **given, **RECORDED)
    row = token_model(result)["rows"][0]
    assert [token["id"] for token in row["tokens"]] == list(result.ids) and json.dumps(row)
    assert any(step["drafted"] for step in row["steps"])
    assert result.branch(4, result.ids[4], max_new_tokens=7).ids == result.ids[5:]
    shown = specnb.TokenView(result, thread=False)
    send(shown, type="branch", run=0, row=0, index=2, token=11)
    assert shown.state == {} and shown.result.method == result.method


def test_a_partial_result_shows_and_branches() -> None:
    def fail(step: Step) -> None:
        if step.position > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run(**DRAFTED, on_step=fail)
    partial = caught.value.partial_result  # type: ignore[attr-defined]
    row = token_model(partial)["rows"][0]
    assert row["finish"] == "interrupted" and [token["id"] for token in row["tokens"]] == list(partial.ids)
    whole = RESULTS["draft"].ids
    assert partial.branch(1, partial.ids[1]).ids[: len(whole) - 2] == whole[2:]


def test_a_branch_with_another_token_is_the_targets_own_continuation() -> None:
    result = RESULTS["draft"]
    other = next(token for token, _ in result.steps[2].top_logprobs[0] if token != result.steps[2].emitted[0])
    at = result.steps[2].position - len(result.rows[0].prompt_ids)
    branch = result.branch(at, other)
    ids = torch.tensor([[*result.rows[0].prompt_ids, *result.ids[:at], other]])
    expected = MODEL.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert list(branch.ids) == expected[0, ids.shape[1] :].tolist()[: len(branch.ids)]
    assert branch.method == "draft_model"
    assert {**branch.options, "max_new_tokens": 16} == {**result.options, "max_new_tokens": 16}


def test_a_result_can_be_copied_and_pickled() -> None:
    """The call keeps no model in memory, and does not travel to another process."""
    import copy
    import pickle

    result = RESULTS["plain"]
    assert copy.deepcopy(result).call is result.call is not None
    back = pickle.loads(pickle.dumps(result))
    assert back == result and back.call is None


def test_names_of_models_are_not_paths_of_this_machine() -> None:
    from specnb.call.continuation import model_name

    assert [model_name(MODEL, name) for name in ("org/name", "/home/me/name", "./name", "")] == [
        "org/name", "name", "name", "LlamaForCausalLM",
    ]  # fmt: skip


def test_branches_that_cannot_be_say_why() -> None:
    result = RESULTS["draft"]
    with pytest.raises(ValueError, match="index=17 is not valid"):
        result.branch(17, 3)
    with pytest.raises(ValueError, match="cannot branch"):
        GenerationResult.from_json(result.to_json()).branch(2, 3)
    gone = specnb.generate(tiny.llama(), tiny.ids(0, 7), max_new_tokens=4, do_sample=False)
    with pytest.raises(ValueError, match="no longer in memory"):
        gone.branch(2, 3)
    ends = run(eos_token_id=7)
    with pytest.raises(ValueError, match="ends the text"):
        ends.branch(1, 7)


def test_the_json_of_a_branch_keeps_what_came_before() -> None:
    result = RESULTS["draft"]
    parent = token_model(result)
    branch = result.branch(5, 9, **RECORDED)
    row = branch_model(parent, 0, 5, 9, "x", token_model(branch))["rows"][0]
    assert [token["id"] for token in row["tokens"]] == [*result.ids[:5], 9, *branch.ids]
    assert row["kept"] == 6 and row["tokens"][5]["origin"] == "chosen" and row["tokens"][5]["step"] is None
    for i, token in enumerate(row["tokens"][6:], 6):
        step = row["steps"][token["step"]]
        assert not step["kept"] and step["first"] <= i < step["first"] + step["count"]
    assert all(step["end"] == 0 for step in row["steps"] if step["kept"])
    assert len(row["plain"]["times"]) == len(row["tokens"])
    assert parent == token_model(result)  # not changed


# ---- the widget
def view(name: str = "draft", **how: Any) -> Any:
    return specnb.TokenView(RESULTS[name], thread=False, **how)


def send(shown: Any, **message: Any) -> None:
    shown._receive(shown, message, [])


def test_branches_make_a_tree() -> None:
    shown = view()
    send(shown, type="branch", run=0, row=0, index=4, token=11)
    send(shown, type="branch", run=1, row=0, index=8, token=12)  # of the branch's own tokens
    send(shown, type="branch", run=2, row=0, index=2, token=13)  # what the first run wrote
    assert [(run["id"], run["parent"], run["index"]) for run in shown.runs] == [
        (0, None, 0), (1, 0, 4), (2, 1, 8), (3, 0, 2),
    ]  # fmt: skip
    ids = [[token["id"] for token in run["model"]["rows"][0]["tokens"]] for run in shown.runs]
    assert ids[1][:5] == [*ids[0][:4], 11] and ids[2][:9] == [*ids[1][:8], 12] and ids[3][:3] == [*ids[0][:2], 13]
    assert shown.current == 3 and shown.result is shown.results[3] and shown.state == {}
    assert tuple(ids[2][9:]) == shown.results[2].ids
    send(shown, type="branch", run=99, row=0, index=2, token=13)
    send(shown, type="nonsense", run=0)
    assert len(shown.runs) == 4


def test_a_row_of_several_branches() -> None:
    shown = view("rows")
    send(shown, type="branch", run=0, row=1, index=3, token=11)
    row = shown.runs[1]["model"]["rows"]
    assert len(row) == 1 and [t["id"] for t in row[0]["tokens"][:3]] == list(RESULTS["rows"].rows[1].ids[:3])


def test_errors_of_a_branch_are_shown() -> None:
    shown = specnb.TokenView(run(eos_token_id=7), thread=False)
    send(shown, type="branch", run=0, row=0, index=1, token=7)
    assert shown.state["kind"] == "error" and "ends the text" in shown.state["text"] and len(shown.runs) == 1


def test_plain_decoding_is_measured_and_the_target_asked() -> None:
    shown = view("not recorded")
    assert not shown.runs[0]["model"]["rows"][0]["plain"]["measured"]
    send(shown, type="plain", run=0, row=0)
    assert shown.runs[0]["model"]["rows"][0]["plain"]["measured"]
    send(shown, type="ask", run=0, row=0, index=3)
    token = shown.results[0].ids[3]
    assert shown.asked["0:0:3"][0][1] == token and len(shown.asked["0:0:3"]) == 5
    send(shown, type="branch", run=0, row=0, index=5, token=11)
    send(shown, type="plain", run=1, row=0)
    assert shown.runs[1]["model"]["rows"][0]["plain"]["measured"] and shown.runs[1]["model"]["rows"][0]["kept"] == 6


def test_the_mime_bundle_is_readable_without_script() -> None:
    shown = view()
    data, _ = shown._repr_mimebundle_()
    assert data["text/html"] == result_view(RESULTS["draft"], details=True) and "<script" not in data["text/html"]
    assert data["text/plain"] == str(RESULTS["draft"])
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == shown.model_id
    html = data["text/html"]
    assert "title=" in html and "the quick brown fox" in html and "num_assistant_tokens=" in html
    assert "LlamaForCausalLM" in html and "draft_model" in html


def test_without_anywidget_the_view_is_static_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "anywidget"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "specnb.notebook.token_view", raising=False)
    shown = RESULTS["draft"].view()
    assert isinstance(shown, StaticView)
    assert "%pip install anywidget" in repr(shown) and "%pip install anywidget" in shown._repr_html_()
    assert result_view(RESULTS["draft"], details=True) in shown._repr_html_()


def test_the_script_and_the_style_ship_beside_the_module() -> None:
    shown = view("plain")
    assert "export default" in shown._esm and ".specnb-tokens" in shown._css
    assert "http://" not in shown._esm.replace("http://www.w3.org/2000/svg", "") and "https://" not in shown._esm
    assert "innerHTML" not in shown._esm
