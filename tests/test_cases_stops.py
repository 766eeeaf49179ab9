"""Cases of kind length-stop: the run ends exactly where plain decoding ends, and nothing beyond is ever shown."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tiny
import torch
from checks import EAGER, Recorder, consistent, no_forward, padded, plain, spec, watched
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

import specnb
from specnb.trace import GenerationResult

T = tiny.llama()
PERFECT = {"assistant_model": tiny.noisy(T, 0), "num_assistant_tokens": 5, **EAGER}
LOOKUP = {"prompt_lookup_num_tokens": 7}
X = tiny.ids(0, 7)
WAYS: dict[str, dict[str, Any]] = {"draft": PERFECT, "lookup": LOOKUP}


def streamed(model: PreTrainedModel, prompt: Tensor, **options: Any) -> GenerationResult:
    """A run that is streamed: exactly the prompt and then the result, whatever the blocks."""
    recorder = Recorder()
    result = spec(model, prompt, streamer=recorder, **options)
    assert recorder.puts[0] == prompt[0].tolist()
    assert [token for put in recorder.puts[1:] for token in put] == list(result.ids)
    assert [tuple(put) for put in recorder.puts[1:]] == [step.emitted for step in result.steps]
    assert recorder.ended == 1
    consistent(result)
    return result


# ---------------------------------------------------------------- STP-01
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_STP_01_eos_at_every_place_of_a_block(way: str) -> None:
    free = plain(T, X, max_new_tokens=20)
    for k in range(20):
        for eos in ([free[k], 5], [5, free[k]], free[k]):
            expected = plain(T, X, max_new_tokens=20, eos_token_id=eos)
            result = streamed(T, X, max_new_tokens=20, eos_token_id=eos, **WAYS[way])
            assert list(result.ids) == expected
            assert result.finish_reason == ("eos" if expected[-1] == free[k] else "length")


def test_STP_01_lookup_over_a_repeated_span_with_eos() -> None:
    span = tiny.ids(4, 5)
    for eos in span[0].tolist():
        prompt = torch.cat([span, span, span[:, :2]], 1)
        expected = plain(T, prompt, max_new_tokens=20, eos_token_id=eos)
        result = streamed(T, prompt, max_new_tokens=20, eos_token_id=eos, **LOOKUP)
        assert list(result.ids) == expected
        assert all(eos not in step.drafted[:-1] for step in result.steps)


def test_STP_01_length_and_eos_together() -> None:
    """An eos as the very last token allowed is an eos; a missing one is a length."""
    free = plain(T, X, max_new_tokens=20)
    for n in (1, 4, 6, 11):
        first = free.index(free[n - 1]) + 1
        result = streamed(T, X, max_new_tokens=n, eos_token_id=free[n - 1], **PERFECT)
        assert len(result.ids) == first
        assert result.finish_reason == "eos"
        assert streamed(T, X, max_new_tokens=n, **PERFECT).finish_reason == "length"


# ---------------------------------------------------------------- STP-02
TOKENIZER = tiny.byte_tokenizer()
TEXTUAL = tiny.llama(vocab=330)
FOX = TOKENIZER("the quick brown fox jumps over the lazy dog", return_tensors="pt")["input_ids"]
TEXT_WAYS: dict[str, dict[str, Any]] = {
    "draft": {"assistant_model": tiny.noisy(TEXTUAL, 0), "num_assistant_tokens": 5, **EAGER},
    "noisy draft": {"assistant_model": tiny.noisy(TEXTUAL, 0.02), "num_assistant_tokens": 5, **EAGER},
    "lookup": {"prompt_lookup_num_tokens": 5},
}


def printable(ids: list[int]) -> bool:
    text = TOKENIZER.decode(ids)
    return "\ufffd" not in text and text.isprintable() and bool(text.strip())


def stop_strings() -> list[tuple[Tensor, str]]:
    """Prompts with stop strings: a token's text, two tokens' text, the end of one and the beginning of the next."""
    found: list[tuple[Tensor, str]] = []
    for prompt in (FOX, TOKENIZER("numbers 1 2 3", return_tensors="pt")["input_ids"], tiny.ids(5, 6, 330)):
        free = plain(TEXTUAL, prompt, max_new_tokens=24)
        for i in range(12):
            if printable(free[i : i + 1]):
                found.append((prompt, TOKENIZER.decode(free[i : i + 1])))
            if printable(free[i : i + 1]) and printable(free[i + 1 : i + 2]):
                one, two = TOKENIZER.decode(free[i : i + 1]), TOKENIZER.decode(free[i + 1 : i + 2])
                found += [(prompt, one + two), (prompt, one[-1] + two[0])]
    return found


def test_STP_02_there_are_stop_strings_over_two_tokens() -> None:
    assert len(stop_strings()) > 20
    assert sum(len(TOKENIZER(stop)["input_ids"]) > 1 for _, stop in stop_strings()) > 5


@pytest.mark.slow
@pytest.mark.parametrize("way", TEXT_WAYS)
def test_STP_02_stop_strings(way: str) -> None:
    places = set()
    for prompt, stop in stop_strings():
        expected = plain(TEXTUAL, prompt, max_new_tokens=24, stop_strings=[stop], tokenizer=TOKENIZER)
        result = streamed(
            TEXTUAL, prompt, max_new_tokens=24, stop_strings=[stop], tokenizer=TOKENIZER, **TEXT_WAYS[way]
        )
        assert list(result.ids) == expected
        if len(expected) < 24:
            assert result.finish_reason == "stop_string"
            assert stop in result.text or stop in TOKENIZER.decode(result.ids)
        places.add((len(result.steps), len(result.steps[-1].emitted)))
    assert len(places) > 3  # at different places of different blocks


def test_STP_02_several_stop_strings_in_every_way_of_giving_them() -> None:
    stops = [*[stop for prompt, stop in stop_strings() if prompt is FOX][-1:], "never in there"]
    expected = plain(TEXTUAL, FOX, max_new_tokens=24, stop_strings=stops, tokenizer=TOKENIZER)
    assert len(expected) < 24
    assert (
        list(spec(TEXTUAL, FOX, max_new_tokens=24, stop_strings=stops, tokenizer=TOKENIZER, **TEXT_WAYS["draft"]).ids)
        == expected
    )
    decoder = specnb.decoder(stop_strings=stops, tokenizer=TOKENIZER, **TEXT_WAYS["draft"])
    out = TEXTUAL.generate(
        FOX, attention_mask=torch.ones_like(FOX), do_sample=False, max_new_tokens=24, custom_generate=decoder
    )
    assert out[0, FOX.shape[1] :].tolist() == expected
    configured = tiny.llama(vocab=330)
    configured.generation_config.stop_strings = stops
    assert list(spec(configured, FOX, max_new_tokens=24, tokenizer=TOKENIZER, **TEXT_WAYS["lookup"]).ids) == expected
    with no_forward(TEXTUAL), pytest.raises(ValueError, match="tokenizer="):
        spec(TEXTUAL, FOX, max_new_tokens=24, stop_strings=stops, **TEXT_WAYS["lookup"])


class LastId(StoppingCriteria):
    """True when the last id is `token`; remembers how long the texts were that it was asked about."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -1] == self.token


class Calls(StoppingCriteria):
    """True from the n-th call on: a criterion with a state."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.left -= 1
        return torch.full((input_ids.shape[0],), self.left <= 0)


@pytest.mark.parametrize("way", WAYS)
def test_STP_02_custom_criteria(way: str) -> None:
    free = plain(T, X, max_new_tokens=20)
    for i in range(12):
        ours, theirs = LastId(free[i]), LastId(free[i])
        expected = plain(T, X, max_new_tokens=20, stopping_criteria=StoppingCriteriaList([theirs]))
        result = streamed(T, X, max_new_tokens=20, stopping_criteria=StoppingCriteriaList([ours]), **WAYS[way])
        assert list(result.ids) == expected
        assert result.finish_reason == "stopping_criteria"
        assert ours.lengths == theirs.lengths  # asked once about every token, in order
        result = streamed(T, X, max_new_tokens=20, stopping_criteria=StoppingCriteriaList([Calls(i + 1)]), **WAYS[way])
        assert list(result.ids) == free[: i + 1]


def test_STP_02_a_criterion_that_returns_a_plain_bool() -> None:
    class Bool(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:  # type: ignore[override]
            return input_ids.shape[1] >= 11

    assert len(streamed(T, X, max_new_tokens=20, stopping_criteria=StoppingCriteriaList([Bool()]), **PERFECT).ids) == 4


# ---------------------------------------------------------------- STP-03
def test_STP_03_at_the_end_of_the_positions() -> None:
    model, prompt = tiny.gpt2(positions=32), tiny.ids(2, 4).repeat(1, 7)[:, :27]
    drafts = {"assistant_model": tiny.noisy(model, 0.03), "num_assistant_tokens": 12, **EAGER}
    for how in (drafts, {"prompt_lookup_num_tokens": 10}):
        for new in range(1, 7):
            expected = plain(model, prompt, max_new_tokens=new)
            with watched(model) as calls, watched(drafts["assistant_model"]) as of_draft:
                assert list(streamed(model, prompt, max_new_tokens=new, **how).ids) == expected
            assert calls.largest_position <= 31
            assert of_draft.largest_position <= 31


def test_STP_03_beyond_the_positions_the_run_ends_and_says_so() -> None:
    model, prompt = tiny.gpt2(positions=32), tiny.ids(2, 4).repeat(1, 7)[:, :27]
    for how in (
        {"assistant_model": tiny.noisy(model, 0), "num_assistant_tokens": 12, **EAGER},
        {"prompt_lookup_num_tokens": 10},
    ):
        result = streamed(model, prompt, max_new_tokens=20, **how)
        assert list(result.ids) == plain(model, prompt, max_new_tokens=6)
        assert result.finish_reason == "context"


@pytest.mark.slow
@pytest.mark.parametrize("positions", [4, 8, 9, 12, 16])
def test_STP_03_a_draft_with_fewer_positions_stops_drafting(positions: int) -> None:
    """The target goes on alone where the draft ends, with one row and with several."""
    model, draft = tiny.gpt2(), tiny.gpt2(positions=positions)
    how = {"assistant_model": draft, "num_assistant_tokens": 4, **EAGER}
    for n in (2, 8, 20):
        prompt = tiny.ids(n, n)
        with watched(draft) as calls:
            assert list(streamed(model, prompt, max_new_tokens=24, **how).ids) == plain(
                model, prompt, max_new_tokens=24
            )
        assert calls.largest_position < positions
    prompts = [tiny.ids(1, 20), tiny.ids(2, 3), tiny.ids(3, 9)]
    ids, mask = padded(prompts)
    with watched(draft) as calls:
        result = spec(model, ids, attention_mask=mask, max_new_tokens=24, **how)
    assert [list(row.ids) for row in result.rows] == [plain(model, prompt, max_new_tokens=24) for prompt in prompts]
    assert calls.largest_position < positions


def test_STP_03_rows_at_the_end_of_the_positions() -> None:
    model = tiny.gpt2(positions=32)
    prompts = [tiny.ids(2, 4).repeat(1, 7)[:, :27], tiny.ids(1, 5), tiny.ids(3, 16)]
    ids, mask = padded(prompts)
    for how in (
        {"assistant_model": tiny.noisy(model, 0.03), "num_assistant_tokens": 12, **EAGER},
        {"prompt_lookup_num_tokens": 10},
    ):
        result = spec(model, ids, attention_mask=mask, max_new_tokens=5, **how)
        assert [list(row.ids) for row in result.rows] == [plain(model, p, max_new_tokens=5) for p in prompts]
        longer = spec(model, ids, attention_mask=mask, max_new_tokens=12, **how)
        assert [row.finish_reason for row in longer.rows] == ["context", "length", "length"]
        assert list(longer.rows[0].ids) == plain(model, prompts[0], max_new_tokens=6)
        assert list(longer.rows[2].ids) == plain(model, prompts[2], max_new_tokens=12)


# ---------------------------------------------------------------- STP-05
@pytest.mark.parametrize("k", [1, 7, 100])
def test_STP_05_budgets(k: int) -> None:
    free = plain(T, X, max_new_tokens=12)
    for n in range(1, 11):
        for length in ({"max_new_tokens": n}, {"max_length": 7 + n}):
            for how in (PERFECT | {"num_assistant_tokens": k}, {"prompt_lookup_num_tokens": k}):
                result = streamed(T, X, **length, **how)
                assert list(result.ids) == free[:n]
                assert result.finish_reason == "length"
                assert result.options["max_new_tokens"] == n
                left = n
                for step in result.steps:
                    assert len(step.drafted) <= min(k, max(0, left - 1))
                    left -= len(step.emitted)


def test_STP_05_max_new_tokens_decides_over_max_length() -> None:
    """As in generate()."""
    for length in ({"max_new_tokens": 3, "max_length": 30}, {"max_new_tokens": 6, "max_length": 9}):
        assert list(spec(T, X, **length, **PERFECT).ids) == plain(T, X, **length)


def test_STP_05_max_length_in_rows_counts_padded_columns() -> None:
    prompts = [X, tiny.ids(1, 3)]
    ids, mask = padded(prompts)
    result = spec(T, ids, attention_mask=mask, max_length=12, **PERFECT)
    assert [list(row.ids) for row in result.rows] == [plain(T, p, max_new_tokens=5) for p in prompts]


def test_STP_05_no_room_is_an_error_before_any_pass() -> None:
    with no_forward(T, PERFECT["assistant_model"]):
        for options in ({"max_length": 7}, {"max_length": 3}, {"max_new_tokens": 0}):
            with pytest.raises(ValueError, match="max_"):
                spec(T, X, **options, **PERFECT)


# ---------------------------------------------------------------- STP-07
@pytest.mark.parametrize("way", WAYS)
def test_STP_07_two_padded_prompts(way: str) -> None:
    prompts = [tiny.ids(1, 5), tiny.ids(2, 9)]
    ids, mask = padded(prompts)
    result = spec(T, ids, attention_mask=mask, max_new_tokens=20, **WAYS[way])
    assert [list(row.ids) for row in result.rows] == [plain(T, prompt, max_new_tokens=20) for prompt in prompts]
    assert result.num_draft_tokens > 0
    consistent(result)


@pytest.mark.parametrize("way", WAYS)
def test_STP_07_return_sequences(way: str) -> None:
    options = {"do_sample": True, "max_new_tokens": 20, "top_k": 0, "seed": 3}
    result = specnb.generate(T, X, num_return_sequences=2, **options, **WAYS[way])
    assert result.sequences.shape == (2, 27)
    assert len({row.ids for row in result.rows}) == 2
    for i, row in enumerate(result.rows):
        assert row.ids == specnb.generate(T, X, **options | {"seed": 3 + i}, **WAYS[way]).ids
    consistent(result)


@pytest.mark.parametrize("way", WAYS)
def test_STP_07_beams_are_refused_before_any_pass(way: str) -> None:
    with no_forward(T, PERFECT["assistant_model"]):
        with pytest.raises(ValueError, match="num_beams=3"):
            spec(T, X, max_new_tokens=20, num_beams=3, **WAYS[way])
        decoder = specnb.decoder(**({"method": "prompt_lookup"} if way == "lookup" else PERFECT))
        with pytest.raises(ValueError, match="num_beams=3"):
            T.generate(X, attention_mask=torch.ones_like(X), max_new_tokens=20, num_beams=3, custom_generate=decoder)


def test_STP_07_a_streamer_shows_one_row() -> None:
    ids, mask = padded([X, tiny.ids(1, 3)])
    with no_forward(T, PERFECT["assistant_model"]), pytest.raises(ValueError, match="streamer"):
        spec(T, ids, attention_mask=mask, max_new_tokens=5, streamer=Recorder(), **PERFECT)


# ---------------------------------------------------------------- time and cancelling
@pytest.mark.parametrize("way", WAYS)
def test_STP_time_is_up_after_the_first_token(way: str) -> None:
    expected = plain(T, X, max_new_tokens=20, max_time=1e-9)
    result = streamed(T, X, max_new_tokens=20, max_time=1e-9, **WAYS[way])
    assert list(result.ids) == expected
    assert len(expected) == 1
    assert result.finish_reason == "max_time"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_STP_cancel_ends_before_the_next_step(way: str, after: int) -> None:
    cancel, seen = threading.Event(), []
    if not after:
        cancel.set()

    def on_step(step: specnb.Step) -> None:
        seen.append(step)
        if len(seen) == after:
            cancel.set()

    with watched(T) as calls:
        result = streamed(T, X, max_new_tokens=60, cancel=cancel, on_step=on_step, **WAYS[way])
    assert result.finish_reason == "cancelled"
    assert len(result.steps) == len(calls) == after
    assert list(result.ids) == plain(T, X, max_new_tokens=60)[: len(result.ids)]
    cancel.clear()
    assert list(spec(T, X, max_new_tokens=20, **WAYS[way]).ids) == plain(T, X, max_new_tokens=20)


def test_STP_cancel_ends_all_rows() -> None:
    cancel, seen = threading.Event(), []

    def on_step(step: specnb.Step) -> None:
        seen.append(step)
        cancel.set()

    prompts = [X, tiny.ids(1, 3)]
    ids, mask = padded(prompts)
    result = spec(T, ids, attention_mask=mask, max_new_tokens=20, cancel=cancel, on_step=on_step, **PERFECT)
    assert [row.finish_reason for row in result.rows] == ["cancelled"] * 2
    assert [row.ids for row in result.rows] == [(plain(T, p, max_new_tokens=1)[0],) for p in prompts]
    consistent(result)
