"""Draft-length schedules: what they answer depends on the steps alone, so a saved trace replays them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch
from checks import EAGER, configs, consistent, padded, plain, spec, watched

import specnb
from specnb.decoding.draft_cost import DraftCost
from specnb.decoding.schedules import SCHEDULES, Adaptive, Constant, Heuristic
from specnb.trace import GenerationResult, Step

T = tiny.llama()
PERFECT, NOISY, USELESS = tiny.noisy(T, 0), tiny.noisy(T, 0.03), tiny.llama(seed=7)
X = tiny.ids(0, 7)


def step(drafted: int, accepted: int, draft: float = 0.0, verify: float = 1.0, match_length: int = 0) -> Step:
    """A step with `draft` seconds per drafted token."""
    emitted = (5,) * (accepted + 1)
    return Step(0, (5,) * drafted, accepted, emitted, draft * drafted, verify, 0.0, match_length=match_length)


def replayed(schedule: Any, steps: Sequence[Step]) -> list[int]:
    """What the schedule answered before each of the steps."""
    asked = []
    for one in steps:
        asked.append(schedule.length(one.match_length))
        schedule.update(one)
    return asked


# ---------------------------------------------------------------- constant and heuristic
def test_constant() -> None:
    assert replayed(Constant(3), [step(3, 3), step(0, 0), step(3, 0)]) == [3, 3, 3]


def test_heuristic() -> None:
    steps = [step(0, 0), step(3, 3), step(5, 2), step(4, 4), step(6, 0), step(5, 0), step(0, 0), step(4, 1)]
    assert replayed(Heuristic(3), steps) == [3, 3, 5, 4, 6, 5, 4, 4]
    assert replayed(Heuristic(2), [step(2, 0)] * 5) == [2, 1, 1, 1, 1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_STA_04_every_call_starts_afresh(name: str) -> None:
    before = configs(T, PERFECT)
    how = {"assistant_model": PERFECT, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": name, **EAGER}
    decoder, firsts = specnb.decoder(**how), []
    for _ in range(3):
        T.generate(X, attention_mask=torch.ones_like(X), do_sample=False, max_new_tokens=20, custom_generate=decoder)
        assert decoder.result is not None
        firsts.append([len(s.drafted) for s in decoder.result.steps][:3])
        result = spec(T, X, max_new_tokens=20, **how)
        firsts.append([len(s.drafted) for s in result.steps][:3])
        assert all(len(s.drafted) < 20 - (s.position - 7) for s in result.steps)  # growth is capped by the budget
        assert result.options["num_assistant_tokens_schedule"] == name
    expected = {"constant": [0, 3, 3], "heuristic": [0, 3, 5]}.get(name)
    assert all(first[:2] == [0, 3] for first in firsts)
    assert expected is None or firsts == [expected] * 6
    assert configs(T, PERFECT) == before


def test_rows_have_schedules_of_their_own() -> None:
    prompts = [X, tiny.ids(1, 4), tiny.ids(2, 12)]
    ids, mask = padded(prompts)
    how = {"assistant_model": NOISY, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic", **EAGER}
    many = spec(T, ids, attention_mask=mask, max_new_tokens=40, **how)
    for row, prompt in zip(many.rows, prompts, strict=True):
        alone = spec(T, prompt, max_new_tokens=40, **how)
        assert [len(s.drafted) for s in row.steps] == [len(s.drafted) for s in alone.steps]
        assert row.ids == alone.ids


# ---------------------------------------------------------------- adaptive
def adaptive_run(draft: Any, new: int = 120, **options: Any) -> GenerationResult:
    how = {"assistant_model": draft, "num_assistant_tokens_schedule": "adaptive", **EAGER} | options
    result = spec(T, X, max_new_tokens=new, **how)
    assert list(result.ids) == plain(T, X, max_new_tokens=new)
    consistent(result)
    return result


@pytest.mark.parametrize("draft", ["perfect", "noisy", "useless"])
def test_adaptive_replays_from_a_saved_trace(draft: str) -> None:
    """With the steps of a saved trace it gives the same lengths again, up to the tokens that remained."""
    model = {"perfect": PERFECT, "noisy": NOISY, "useless": USELESS}[draft]
    result = adaptive_run(model)
    saved = GenerationResult.from_json(json.dumps(json.loads(result.to_json())))
    schedule, twice = Adaptive(5), Adaptive(5)
    answers = replayed(schedule, saved.steps)
    assert answers == replayed(twice, saved.steps)
    for one, answer in zip(saved.steps[1:], answers[1:], strict=True):
        remaining = 120 - (one.position - 7) - 1
        assert len(one.drafted) == min(answer, remaining)


def test_adaptive_with_prompt_lookup_replays_its_match_lengths() -> None:
    prompt = tiny.ids(5, 5).repeat(1, 6)
    result = spec(T, prompt, max_new_tokens=80, method="prompt_lookup", num_assistant_tokens_schedule="adaptive")
    assert list(result.ids) == plain(T, prompt, max_new_tokens=80)
    schedule = Adaptive(10)
    for one, answer in zip(result.steps, replayed(schedule, result.steps), strict=True):
        if one.match_length:
            assert len(one.drafted) == min(answer, 80 - (one.position - 30) - 1)


def play(
    acceptance: float, draft: float, steps: int = 400, verify: float = 1.0, per_token: float = 0.0, seed: int = 0
) -> list[Step]:
    """Steps of a schedule; drafted tokens are accepted with probability `acceptance` and cost `draft` seconds."""
    generator, schedule, done = torch.Generator().manual_seed(seed), Adaptive(5), []
    for _ in range(steps):
        k = schedule.length()
        accepted = 0
        while accepted < k and float(torch.rand((), generator=generator)) < acceptance:
            accepted += 1
        done.append(step(k, accepted, draft, verify + per_token * k))
        schedule.update(done[-1])
    return done


def seconds(steps: Sequence[Step]) -> float:
    return sum(one.draft_seconds + one.verify_seconds for one in steps)


def emitted(steps: Sequence[Step]) -> int:
    return sum(len(one.emitted) for one in steps)


@pytest.mark.parametrize(("fixed", "per_token"), [(0.0, 0.5), (3.0, 0.0), (1.0, 0.2)])
def test_what_a_draft_costs_is_learned(fixed: float, per_token: float) -> None:
    """In proportion to its length, the same for every length (a block in one pass), or in between."""
    cost = DraftCost()
    assert cost.seconds(5) == 0
    for _ in range(4):
        cost.add(8, fixed + 8 * per_token)
    assert cost.seconds(4) == pytest.approx((fixed + 8 * per_token) / 2)  # one length tells nothing of others
    for k in (4, 8, 6, 7) * 5:
        cost.add(k, fixed + k * per_token)
    for k in (1, 4, 8, 16):
        assert cost.seconds(k) == pytest.approx(fixed + k * per_token, rel=0.25)
    assert cost.seconds(0) == 0


def test_adaptive_drafts_whole_blocks_where_length_costs_nothing() -> None:
    schedules = [Adaptive(8), Adaptive(8)]
    for k in (8, 4, 8, 6, 8, 8):
        for schedule, draft in zip(schedules, (1 / k, 0.2), strict=True):  # 1 second a block; 0.2 a token
            schedule.update(step(k, min(k, 3), draft, match_length=1))
    assert schedules[0].length(1) > schedules[1].length(1)


@pytest.mark.parametrize("draft", [0.05, 0.3, 1.0])
def test_adaptive_with_a_useless_drafter(draft: float) -> None:
    """The share of steps with a draft soon falls below 2 %, the time lost to a few per cent, without any extra pass."""
    steps = play(0.0, draft, 1000)
    assert all(len(one.emitted) == 1 for one in steps)
    shares = [
        sum(len(one.drafted) > 0 for one in part) / len(part) for part in (steps[:50], steps[50:200], steps[500:])
    ]
    assert shares[0] > max(shares[1:])
    assert max(shares[1:]) < 0.02
    assert seconds(steps[200:]) < 1.05 * len(steps[200:])  # plain: a second per token
    assert any(one.drafted for one in steps[500:])  # it goes on probing


def test_adaptive_with_a_useless_drafter_and_running_states() -> None:
    """A token more costs a third of a pass, and rejected drafts make the next pass longer: few are tried."""
    schedule, done, pending = Adaptive(5), [], 0
    schedule.update(step(0, 0, verify=10.0))  # the prompt
    for _ in range(128):
        k = min(1, schedule.length())  # the drafter is not sure of a second token
        fed = replace(step(k, 0, 0.12 * k, 1 + 0.35 * (k + pending)), replayed_tokens=pending)
        pending = pending + 1 if k else 0
        done.append(fed)
        schedule.update(fed)
    assert len(done) < seconds(done) < 1.035 * len(done)


def test_adaptive_probes_later_and_later() -> None:
    probes = [i for i, one in enumerate(play(0.0, 0.3, 1000)) if one.drafted]
    gaps = [b - a for a, b in pairwise(probes) if b - a > 1]
    assert gaps[0] >= Adaptive.FIRST_PROBE
    assert all(a <= b for a, b in pairwise(gaps))
    assert max(gaps) <= Adaptive.LAST_PROBE + 1


def test_adaptive_comes_back_when_drafts_become_good() -> None:
    schedule = Adaptive(5)
    for _ in range(300):
        k = schedule.length()
        schedule.update(step(k, 0, 0.05))
    lengths = []
    for _ in range(300):
        k = schedule.length()
        lengths.append(k)
        schedule.update(step(k, k, 0.05))
    assert min(lengths[150:]) > 4


@pytest.mark.parametrize("acceptance", [0.95, 1.0])
def test_adaptive_grows_with_a_cheap_and_good_drafter(acceptance: float) -> None:
    steps = play(acceptance, 0.01, 200)
    lengths = [len(one.drafted) for one in steps]
    assert lengths[0] == 5
    assert sum(lengths[100:]) / 100 > 10
    assert emitted(steps) > 5 * seconds(steps)


@pytest.mark.parametrize(("acceptance", "draft"), [(0.3, 0.1), (0.6, 0.1), (0.8, 0.05), (0.8, 0.4), (0.5, 0.6)])
def test_adaptive_is_near_the_best_constant_length(acceptance: float, draft: float) -> None:
    """Tokens per second within a tenth of what the best fixed k would have given in that world."""

    def rate(k: int) -> float:
        tokens = sum(acceptance**i for i in range(k + 1))
        return tokens / (1 + 0.01 * k + draft * k)

    best = max(rate(k) for k in range(17))
    steps = play(acceptance, draft, 600, per_token=0.01)[50:]
    assert emitted(steps) / seconds(steps) > 0.9 * best


def test_adaptive_gets_over_a_hiccup() -> None:
    """A step that something else on the machine held up 500-fold: drafts go on, and soon as if nothing had been."""

    def lengths(slow: float) -> list[int]:
        schedule, found = Adaptive(5), []
        for i in range(60):
            found.append(k := schedule.length())
            times = slow if i in (20, 30) else 1.0
            schedule.update(step(k, min(k, 4), 0.02 * times, (1 + 0.01 * k) * times))
        return found

    calm, held_up = lengths(1.0), lengths(500.0)
    assert min(held_up) >= min(calm)
    assert held_up[35:] == calm[35:]


def test_adaptive_end_to_end_with_a_useless_drafter() -> None:
    """Target passes never exceed plain decoding's; the draft model is asked less and less."""
    result = adaptive_run(USELESS, 200)
    assert result.target_passes == len(result.steps) <= 200
    drafted = [len(one.drafted) for one in result.steps]
    assert sum(k > 0 for k in drafted[100:]) <= 25  # measured costs vary with the machine; the exact bounds are above


def test_adaptive_end_to_end_with_a_perfect_and_cheap_drafter() -> None:
    """Prompt lookup costs nothing and a periodic text makes it right: drafts grow."""
    bits = torch.tensor([[3, 4, 5]]).repeat(1, 8)
    suppressed = [i for i in range(64) if i not in (3, 4, 5)]
    options = {"max_new_tokens": 150, "suppress_tokens": suppressed, "max_matching_ngram_size": 3}
    result = spec(
        T, bits, method="prompt_lookup", num_assistant_tokens_schedule="adaptive", num_assistant_tokens=2, **options
    )
    assert list(result.ids) == plain(T, bits, max_new_tokens=150, suppress_tokens=suppressed)
    if result.draft_acceptance_rate > 0.9:
        assert max(len(one.drafted) for one in result.steps) > 4


def test_adaptive_with_a_clock_that_stands_still() -> None:
    """Steps that took no measurable time: no division by zero, and an answer within bounds."""
    schedule = Adaptive(5)
    for _ in range(20):
        k = schedule.length()
        assert 0 <= k <= max(5, Adaptive.MAX_LENGTH)
        schedule.update(step(k, k // 2, 0.0, 0.0))


def test_adaptive_may_go_beyond_its_longest_when_asked_to() -> None:
    lengths = [len(one.drafted) for one in _play_from(40)]
    assert lengths[0] == 40
    assert max(lengths) <= 40


def _play_from(k: int) -> list[Step]:
    schedule, done = Adaptive(k), []
    for _ in range(60):
        n = schedule.length()
        done.append(step(n, n, 0.01))
        schedule.update(done[-1])
    return done


def test_SPD_01_adaptive_counters_agree_with_the_models() -> None:
    for draft in (PERFECT, NOISY, tiny.noisy(T, 0.5), USELESS):
        for k in (1, 5, 20):
            with watched(T) as calls, watched(draft) as of_draft:
                result = spec(
                    T,
                    X,
                    max_new_tokens=60,
                    assistant_model=draft,
                    num_assistant_tokens=k,
                    num_assistant_tokens_schedule="adaptive",
                    **EAGER,
                )
            assert result.target_passes == len(result.steps) == len(calls) <= 60
            assert result.num_draft_tokens == len(of_draft)
            assert result.num_accepted_draft_tokens + len(result.steps) == result.num_emitted_tokens == 60


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_confidence_stop_works_with_every_schedule(name: str) -> None:
    result = spec(
        T,
        X,
        max_new_tokens=60,
        assistant_model=NOISY,
        num_assistant_tokens=6,
        num_assistant_tokens_schedule=name,
        assistant_confidence_threshold=0.5,
    )
    assert list(result.ids) == plain(T, X, max_new_tokens=60)
    free = spec(
        T,
        X,
        max_new_tokens=60,
        assistant_model=NOISY,
        num_assistant_tokens=6,
        num_assistant_tokens_schedule="constant",
        **EAGER,
    )
    assert result.num_draft_tokens < free.num_draft_tokens
