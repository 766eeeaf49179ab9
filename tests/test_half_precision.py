"""bfloat16 and float16: the same call gives the same text, and `Step.margins` is the margin of each decision."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from checkpoints import gemma4_drafter, gemma4_target, load, mtp_folder
from checks import EAGER, consistent, padded
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process

import specnb
from specnb.decoding import recorder
from specnb.trace import GenerationResult, Step

HALF = [torch.bfloat16, torch.float16]
NEW = 32
BYTE, SP = tiny.byte_tokenizer(), tiny.sp_tokenizer()
PROMPTS = [tiny.ids(0, 7), tiny.ids(1, 4).repeat(1, 3), tiny.ids(2, 9)]


@cache
def method(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model and the options of the method; the draft lengths are the default ones."""
    if name == "MTP":
        return load(mtp_folder("glm4_moe", 2, 2)).to(dtype), {"use_mtp": True}
    if name == "Gemma 4":
        model = gemma4_target()
        assistant = gemma4_drafter(model)
        return model.to(dtype), {"assistant_model": assistant.to(dtype)}
    if name == "universal":
        model, draft = tiny.llama(vocab=len(BYTE), layers=2), tiny.llama(vocab=len(SP), layers=2, seed=3)
        tokenizers = {"tokenizer": BYTE, "assistant_tokenizer": SP}
        return model.to(dtype), {"assistant_model": draft.to(dtype), **tokenizers}
    model = tiny.llama()
    draft = tiny.noisy(model, 0.03)
    options: dict[str, dict[str, Any]] = {
        "plain": {"method": "plain"},
        "prompt lookup": {"method": "prompt_lookup"},
        "draft model": {"assistant_model": draft.to(dtype), **EAGER},
        "early exit": {"assistant_early_exit": 2, **EAGER},
    }
    return model.to(dtype), options[name]


METHODS = ["plain", "prompt lookup", "draft model", "early exit", "MTP", "Gemma 4", "universal"]
ROWS = {
    "one": PROMPTS[1:2],
    "rows": [PROMPTS[1], tiny.ids(3, 12), tiny.ids(4, 12)],
    "padded rows": PROMPTS,
}


def run(name: str, dtype: torch.dtype, rows: str, **options: Any) -> GenerationResult:
    model, how = method(name, dtype)
    ids, mask = padded(ROWS[rows])
    return specnb.generate(model, ids, attention_mask=mask, **{"max_new_tokens": NEW, **how, **options})


# ---------------------------------------------------------------- repeatable
def a_clock(seed: int) -> Callable[[], float]:
    """A clock on which every part of a step takes a random time, another for each seed."""
    rng, now = random.Random(seed), [0.0]

    def read() -> float:
        now[0] += 10 ** rng.uniform(-4, -1)
        return now[0]

    return read


def steps(result: GenerationResult) -> list[list[tuple[Any, ...]]]:
    """Everything of the steps but their times."""
    return [[(s.position, s.drafted, s.accepted, s.emitted, s.margins) for s in row.steps] for row in result.rows]


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["one", "padded rows"])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_the_same_call_gives_the_same_text(
    name: str, dtype: torch.dtype, sample: bool, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With default settings, whatever ran before and however long the parts of a step take."""
    options = {"do_sample": True, "temperature": 0.8, "seed": 11} if sample else {"do_sample": False}
    results = []
    for seed in range(3):
        torch.manual_seed(seed)
        run(name, dtype, "one", do_sample=True, seed=seed, max_new_tokens=3)
        monkeypatch.setattr(recorder, "time", SimpleNamespace(perf_counter=a_clock(seed)))
        results.append(run(name, dtype, rows, **options))
        monkeypatch.undo()
    first, *others = results
    assert all(len(row.ids) == NEW for row in first.rows)
    assert name == "plain" or first.num_draft_tokens
    for other in others:
        assert torch.equal(other.sequences, first.sequences)
        assert steps(other) == steps(first)
    if sample:
        assert not torch.equal(run(name, dtype, rows, **options | {"seed": 12}).sequences, first.sequences)


def test_these_clocks_decide_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the default schedule follows the clock, so the comparison above would see it."""
    results = []
    for seed in range(3):
        monkeypatch.setattr(recorder, "time", SimpleNamespace(perf_counter=a_clock(seed)))
        results.append(run("draft model", torch.float32, "one", do_sample=False))
    assert len({result.ids for result in results}) == 1
    assert len({tuple(len(step.drafted) for step in result.steps) for result in results}) == 3


# ---------------------------------------------------------------- margins
class Favour(LogitsProcessor):
    """A user's own processor: raises the token that the last one chooses."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raised = scores.clone()
        at = (input_ids[:, -1:] * 7 + input_ids.shape[1]) % scores.shape[1]
        return raised.scatter_add(1, at, torch.full_like(raised, 1.5)[:, :1])


REPETITION = logits_process.RepetitionPenaltyLogitsProcessor(1.7)
NGRAM = logits_process.NoRepeatNGramLogitsProcessor(2)
PROCESSORS: dict[str, tuple[dict[str, Any], list[LogitsProcessor]]] = {
    "none": ({}, []),
    "repetition penalty": ({"repetition_penalty": 1.7}, [REPETITION]),
    "no repeated bigram": ({"no_repeat_ngram_size": 2}, [NGRAM]),
    "the user's own": ({"logits_processor": LogitsProcessorList([Favour()])}, [Favour()]),
    "all": (
        {
            "repetition_penalty": 1.7,
            "no_repeat_ngram_size": 2,
            "logits_processor": LogitsProcessorList([Favour()]),
        },
        [REPETITION, NGRAM, Favour()],
    ),
}


def gap(scores: Tensor) -> Tensor:
    """The gaps `[n]` between the two best of the scores `[n, vocab]`."""
    best = scores.topk(2).values
    return best[:, 0] - best[:, 1]


def processed(prefixes: Tensor, logits: Tensor, processors: list[LogitsProcessor]) -> Tensor:
    scores = logits.float()
    for processor in processors:
        scores = processor(prefixes, scores)
    return scores


def margins(steps: tuple[Step, ...]) -> list[float]:
    found = [margin for step in steps for margin in step.margins or ()]
    assert len(found) == sum(len(step.emitted) for step in steps)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("name", ["plain", "prompt lookup", "draft model", "early exit"])
def test_margins_are_those_of_the_decision(name: str, processors: str, dtype: torch.dtype) -> None:
    """Against the target's logits, processed again by transformers' processors with the text before each token.

    The logits are those of the run itself (`output_logits`), where margins must be equal, and those of a pass over the
    whole text without a cache, where they are equal up to rounding.
    """
    options, made = PROCESSORS[processors]
    model = method(name, dtype)[0]
    changed = 0
    for rows in ("one", "rows"):  # without padding, which some processors count in some versions of transformers
        result = run(name, dtype, rows, do_sample=False, **options)
        asked = run(name, dtype, rows, do_sample=False, output_logits=True, **options)
        for index, row in enumerate(asked.rows):
            found = margins(row.steps)
            for i, token in enumerate(row.ids):
                text = torch.tensor([[*row.prompt_ids, *row.ids[:i]]])
                logits = asked.logits[i][index : index + 1]
                scores = processed(text, logits, made)
                assert int(scores.argmax()) == token
                assert found[i] == pytest.approx(float(gap(scores)), abs=1e-6)
                changed += abs(found[i] - float(gap(logits.float()))) > 0.05
        for row in result.rows:
            found = margins(row.steps)
            with torch.no_grad():
                whole = model(torch.tensor([[*row.prompt_ids, *row.ids]]), use_cache=False).logits[0].float()
            near = 8 * float(torch.finfo(dtype).eps * whole.abs().max())
            for i, token in enumerate(row.ids):
                text = torch.tensor([[*row.prompt_ids, *row.ids[:i]]])
                scores = processed(text, whole[None, text.shape[1] - 1], made)
                assert found[i] == pytest.approx(float(gap(scores)), abs=near)
                assert int(scores.argmax()) == token or float(gap(scores)) <= near
        if rows == "one":
            consistent(result)
    assert (changed > 3) == bool(made)  # so margins of the unprocessed logits would not pass


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_margins_are_recorded_for_greedy_half_precision_only(dtype: torch.dtype) -> None:
    assert all(step.margins for step in run("draft model", dtype, "one", do_sample=False).steps)
    sampled = run("draft model", dtype, "one", do_sample=True, seed=1)
    assert all(step.margins is None for step in sampled.steps)
    single = run("draft model", torch.float32, "one", do_sample=False)
    assert all(step.margins is None for step in single.steps)
