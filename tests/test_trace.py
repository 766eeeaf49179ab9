"""Steps, metrics and the forms that a result can be written in."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from checks import EAGER, consistent, padded, spec
from transformers import LogitsProcessor, LogitsProcessorList

import specnb
from specnb.trace import ORIGINS, GenerationResult, RowResult, Step

STEPS = (
    Step(7, (), 0, (5,)),
    Step(8, (1, 2, 3), 3, (1, 2, 3, 4)),
    Step(12, (1, 2, 3), 1, (1, 9)),
    Step(14, (4, 4), 0, (8,)),
    Step(15, (1, 2, 3), 2, (1, 2)),  # the second is an eos: nothing follows
)
IDS = tuple(token for step in STEPS for token in step.emitted)


def made() -> GenerationResult:
    return GenerationResult(
        "draft_model", [RowResult((3,) * 7, IDS, STEPS, "eos")], {"num_assistant_tokens": 3}, 4, 1.5, target_passes=5
    )


def runs() -> dict[str, GenerationResult]:
    """Real results of all kinds."""
    model, prompt = tiny.llama(), tiny.ids(0, 7)
    drafts: dict[str, dict[str, Any]] = {
        f"draft {eps}": {"assistant_model": tiny.noisy(model, eps), **EAGER} for eps in (0, 0.03, 0.5)
    }
    ways = drafts | {"lookup": {"method": "prompt_lookup"}, "plain": {}}
    out = {name: spec(model, prompt, max_new_tokens=30, **how) for name, how in ways.items()}
    eos = out["plain"].ids[12]
    out |= {
        f"{name} eos": spec(model, prompt, max_new_tokens=30, eos_token_id=eos, **how) for name, how in ways.items()
    }
    ids, mask = padded([prompt, tiny.ids(1, 3)])
    out["rows"] = spec(model, ids, attention_mask=mask, max_new_tokens=20, **drafts["draft 0.03"])
    out["text"] = specnb.generate(
        tiny.llama(vocab=330),
        "the quick",
        tokenizer=tiny.byte_tokenizer(),
        max_new_tokens=12,
        do_sample=True,
        seed=2,
        method="prompt_lookup",
    )
    out["half"] = spec(tiny.llama().to(torch.bfloat16), prompt, max_new_tokens=10, method="prompt_lookup")
    return out


RESULTS = runs()


def test_metrics_by_hand() -> None:
    result = made()
    assert result.num_emitted_tokens == 10
    assert result.num_spec_steps == 4
    assert result.num_draft_tokens == 11
    assert result.num_accepted_draft_tokens == 6
    assert result.draft_acceptance_rate == pytest.approx(6 / 11)
    assert result.mean_acceptance_length == pytest.approx(1 + 6 / 4)
    assert result.acceptance_rate_by_position == [3 / 4, 2 / 4, 1 / 4]
    assert result.tokens_per_pass == 2
    assert result.tokens_per_second == pytest.approx(10 / 1.5)


def test_metrics_of_nothing() -> None:
    result = GenerationResult("plain", [RowResult((1,), (), (), "cancelled")])
    assert (result.draft_acceptance_rate, result.mean_acceptance_length, result.acceptance_rate_by_position) == (
        0,
        1,
        [],
    )
    assert result.tokens_per_second == result.tokens_per_pass == 0
    assert GenerationResult.from_json(result.to_json()) == result
    assert "0 tokens" in repr(result)


def test_origins_by_hand() -> None:
    origins = [token.origin for token in made().tokens]
    assert origins == [
        "plain",
        *["accepted"] * 3,
        "bonus",
        "accepted",
        "corrected",
        "corrected",
        "accepted",
        "accepted",
    ]
    assert [step.rejected for step in STEPS] == [(), (), (2, 3), (4, 4), (3,)]


@pytest.mark.parametrize("name", RESULTS)
def test_identities_and_origins_of_real_runs(name: str) -> None:
    result = RESULTS[name]
    consistent(result)
    for row in result.rows:
        cut = sum(len(step.emitted) == step.accepted for step in row.steps)
        assert sum(step.accepted for step in row.steps) + len(row.steps) - cut == len(row.ids)
        assert [token.id for token in row.tokens] == list(row.ids)
        assert all(token.origin in ORIGINS for token in row.tokens)
        assert sum(token.origin == "accepted" for token in row.tokens) == sum(step.accepted for step in row.steps)
    assert result.seconds > 0
    assert result.draft_seconds + result.verify_seconds <= result.seconds
    assert result.target_passes == max(len(row.steps) for row in result.rows)


def test_plain_decoding_has_plain_tokens_only() -> None:
    result = RESULTS["plain"]
    assert {token.origin for token in result.tokens} == {"plain"}
    assert result.num_draft_tokens == 0
    assert result.target_passes == 30


def test_a_useless_draft_shows() -> None:
    assert RESULTS["draft 0"].draft_acceptance_rate == 1
    assert RESULTS["draft 0.5"].draft_acceptance_rate < 0.2


@pytest.mark.parametrize("name", RESULTS)
def test_json_round_trip(name: str) -> None:
    result = RESULTS[name]
    back = GenerationResult.from_json(result.to_json(indent=1))
    assert back == result
    assert [row.steps for row in back.rows] == [row.steps for row in result.rows]
    assert back.metrics() == result.metrics()
    assert back.to_json() == result.to_json()
    assert back.sequences is None
    assert repr(back) == repr(result)
    assert str(back) == str(result)
    if result.rows[0].pieces is not None:
        assert back.rows[0].text == result.rows[0].text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"format": "other"}',
        '{"format": "specnb.GenerationResult/1"}',
        '{"format": "specnb.GenerationResult/1", "method": "x", "rows": [{"steps": 3}]}',
    ],
)
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a specnb\.GenerationResult"):
        GenerationResult.from_json(text)


def test_json_is_readable_without_torch() -> None:
    code = (
        "import sys; from specnb.trace import GenerationResult\n"
        "result = GenerationResult.from_json(sys.stdin.read())\n"
        "print(result, repr(result), len(result._repr_html_()), result.mean_acceptance_length)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    result = RESULTS["text"]
    done = subprocess.run(
        [sys.executable, "-c", code], input=result.to_json(), capture_output=True, text=True, check=True
    )
    assert repr(result) in done.stdout


def test_pandas_has_a_line_per_step() -> None:
    pytest.importorskip("pandas")
    for name in ("draft 0.03", "rows", "plain"):
        result = RESULTS[name]
        table = result.to_pandas()
        assert len(table) == len(result.steps)
        assert table.num_emitted.sum() == result.num_emitted_tokens
        assert table.num_drafted.sum() == result.num_draft_tokens
        assert table.accepted.sum() == result.num_accepted_draft_tokens
        assert set(table.row) == set(range(len(result.rows)))


@pytest.mark.parametrize("name", RESULTS)
def test_text_forms_have_no_times_addresses_or_paths(name: str) -> None:
    result = RESULTS[name]
    other = GenerationResult.from_json(result.to_json())
    other.seconds = 123.456789
    for row in other.rows:
        row.steps = tuple(
            replace(step, draft_seconds=7.25, verify_seconds=9.125, other_seconds=3.5) for step in row.steps
        )
    for form in (repr, str, lambda r: r._repr_html_()):
        text = form(result)
        assert text == form(other)
        assert not re.search(r"0x[0-9a-f]{6,}|site-packages|/home/|/tmp/| at 0x|\bsecond", text)
    assert json.dumps(result.metrics()) == json.dumps(other.metrics())


def test_one_row_short_cuts() -> None:
    with pytest.raises(ValueError, match=r"2 rows: use \.rows\[i\]"):
        _ = RESULTS["rows"].ids
    with pytest.raises(ValueError, match="tokenizer="):
        _ = RESULTS["plain"].text
    assert RESULTS["text"].text == "".join(token.text or "" for token in RESULTS["text"].tokens)
    assert RESULTS["text"].text == tiny.byte_tokenizer().decode(RESULTS["text"].ids, skip_special_tokens=True)


def test_margins_in_half_precision_only() -> None:
    assert all(step.margins is None for step in RESULTS["lookup"].steps)
    for step in RESULTS["half"].steps:
        assert step.margins is not None
        assert len(step.margins) == len(step.emitted)
        assert min(step.margins) >= 0


METHODS = {
    "draft_model": {"assistant_model": None},
    "early_exit": {"assistant_early_exit": 2},
    "prompt_lookup": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["greedy", "sampled", "block", "with a processor of the text"])
@pytest.mark.parametrize("method", METHODS)
def test_probabilities_of_drafted_tokens(method: str, how: str) -> None:
    """They are those of the models' own distributions, computed again from the whole text before each token."""
    model = tiny.llama()
    draft = tiny.noisy(model, 0.03)
    options: dict[str, Any] = {
        "greedy": {},
        "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20, "seed": 3},
        "block": {"do_sample": True, "seed": 3, "verification": "block"},
        "with a processor of the text": {"repetition_penalty": 1.3},
    }[how]
    given = {**METHODS[method], **({"assistant_model": draft} if method == "draft_model" else {}), **options}
    call = {"method": method, "max_new_tokens": 24, "num_assistant_tokens": 3, **given}
    prompt = torch.cat([tiny.ids(0, 7)] * 3, 1)
    call = {"attention_mask": torch.ones_like(prompt), "do_sample": False} | call
    result = specnb.generate(model, prompt, **call, probabilities=True)
    unasked = specnb.generate(model, prompt, **call)
    assert unasked.ids == result.ids
    assert all(step.draft_probabilities is step.target_probabilities is None for step in unasked.steps)
    assert GenerationResult.from_json(result.to_json()).steps == result.steps

    def probs(of: Any, before: list[int]) -> torch.Tensor:
        ids = torch.tensor([before])
        with torch.no_grad():
            scores = of(ids).logits[:, -1].float()
        for processor in _processors(options):
            scores = processor(ids, scores)
        return scores.softmax(-1)[0]

    drafter = {"draft_model": draft, "early_exit": specnb.truncate(model, 2), "prompt_lookup": None}[method]
    text = [*prompt[0].tolist(), *result.ids]
    for step in result.steps:
        judged = min(len(step.emitted), len(step.drafted))
        assert len(step.target_probabilities or ()) == judged
        before = [[*text[: step.position], *step.drafted[:i]] for i in range(len(step.drafted))]
        expected = [float(probs(model, ids)[token]) for ids, token in zip(before, step.drafted, strict=True)]
        assert step.target_probabilities is None or step.target_probabilities == pytest.approx(
            expected[:judged], abs=1e-5
        )
        if drafter is None or not step.drafted:
            assert step.draft_probabilities is None
        else:
            expected = [float(probs(drafter, ids)[token]) for ids, token in zip(before, step.drafted, strict=True)]
            assert step.draft_probabilities == pytest.approx(expected, abs=1e-5)
    assert any(step.target_probabilities for step in result.steps)


def _processors(options: dict[str, Any]) -> list[Any]:
    from transformers.generation import logits_process as of

    makers = {
        "repetition_penalty": of.RepetitionPenaltyLogitsProcessor,
        "temperature": of.TemperatureLogitsWarper,
        "top_k": of.TopKLogitsWarper,
    }
    own = {"top_k": 50} if options.get("do_sample") else {}  # generate()'s default
    return [makers[name](value) for name, value in (own | options).items() if name in makers]


def test_a_processor_that_counts_its_calls_is_called_no_more_often_for_probabilities() -> None:
    class Counting(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return scores

    counts = []
    for probabilities in (False, True):
        counting = Counting()
        result = spec(
            tiny.llama(),
            tiny.ids(0, 7),
            max_new_tokens=20,
            method="prompt_lookup",
            logits_processor=LogitsProcessorList([counting]),
            probabilities=probabilities,
        )
        assert result.num_draft_tokens
        counts.append(counting.calls)
    assert counts[0] == counts[1] == 20


def test_pandas_and_decoder_have_probabilities() -> None:
    model = tiny.llama()
    decoder = specnb.decoder(method="prompt_lookup", probabilities=True)
    model.generate(tiny.ids(0, 7), max_new_tokens=20, do_sample=False, custom_generate=decoder)
    table = decoder.result.to_pandas()
    assert table.target_probabilities.notna().any() and table.draft_probabilities.isna().all()


def test_timings_are_told_apart() -> None:
    """Prompt processing, drafting, verifying and the rest: the parts of the whole."""
    result = spec(
        tiny.llama(), tiny.ids(0, 150), max_new_tokens=8, assistant_model=tiny.noisy(tiny.llama(), 0.03), **EAGER
    )
    assert result.prefill_seconds > 0
    assert result.draft_seconds > 0
    assert result.verify_seconds > 0
    assert result.prefill_seconds <= result.seconds
