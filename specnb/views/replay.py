"""The clock of a run: when each step ended, and when plain decoding would have had each token."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from specnb.trace import GenerationResult, Step

_ENOUGH = 3  # passes of one token whose median is trusted alone


class StepTimes(NamedTuple):
    """When a step ran, in seconds since the first one began. All rows of a run share the clock.

    Args:
        begin, end: of the step.
        draft, verify, other: its parts, which add up to `end - begin`.
    """

    begin: float
    end: float
    draft: float
    verify: float
    other: float


class PlainLane(NamedTuple):
    """Plain decoding on the clock of a run.

    Args:
        times: seconds at which it has the 1st, 2nd, ... token of a row, as many as the row has.
        measured: from a run of plain decoding; else estimated.
        basis: in words, what the times come from.
        bound: the times are an upper bound, since the run had no passes of few tokens.
    """

    times: list[float]
    measured: bool
    basis: str
    bound: bool = False


def step_times(result: GenerationResult) -> list[StepTimes]:
    """The times of the 1st, 2nd, ... step of the rows, which take them together."""
    out: list[StepTimes] = []
    clock = 0.0
    for number in range(max((len(row.steps) for row in result.rows), default=0)):
        steps = _round(result, number)  # each has its share of the time
        draft = sum(step.draft_seconds for step in steps)
        verify = sum(step.verify_seconds for step in steps)
        other = sum(step.other_seconds for step in steps)
        out.append(StepTimes(clock, clock + draft + verify + other, draft, verify, other))
        clock = out[-1].end
    return out


def plain_lane(result: GenerationResult, row: int = 0, plain: GenerationResult | None = None) -> PlainLane | None:
    """When plain decoding has each token of a row.

    Args:
        result: the run.
        row: index of the row.
        plain: a run of plain decoding from the same prompt. None estimates from the run's own passes: the first pass
            reads the prompt, as here, and each token after it takes a pass of one token.

    Returns:
        None if the run is plain decoding itself, or has too few passes to estimate from.
    """
    count = len(result.rows[row].ids)
    measured = None if plain is None else _measured(result, row, plain, count)
    if measured is not None:
        return measured
    times = step_times(result)
    if result.method == "plain" or not count or len(times) < 2:
        return None
    seconds, basis, bound = _pass_of_one_token(result, times)
    first = times[0].verify + times[0].other
    return PlainLane([first + i * seconds for i in range(count)], False, basis, bound)


def _measured(result: GenerationResult, row: int, plain: GenerationResult, count: int) -> PlainLane | None:
    """The times of a run of plain decoding; its mean pace goes on where it is shorter."""
    prompt = result.rows[row].prompt_ids
    lane = next((i for i, other in enumerate(plain.rows) if other.prompt_ids == prompt), None)
    if lane is None or plain.method != "plain" or len(plain.rows[lane].steps) < 2:
        return None
    ends = [one.end for one in step_times(plain)][: len(plain.rows[lane].steps)]
    pace = (ends[-1] - ends[0]) / (len(ends) - 1)
    more = [ends[-1] + pace * i for i in range(1, count - len(ends) + 1)]
    return PlainLane([*ends, *more][:count], True, "measured")


def _pass_of_one_token(result: GenerationResult, times: Sequence[StepTimes]) -> tuple[float, str, bool]:
    """Seconds of a pass of one token without a draft, where they come from, and whether they are an upper bound."""
    by_size: dict[int, list[float]] = {}
    for number, one in enumerate(times[1:], 1):
        size = max(len(step.drafted) + 1 + step.replayed_tokens for step in _round(result, number))
        by_size.setdefault(size, []).append(one.verify + one.other)
    medians = {size: statistics.median(found) for size, found in by_size.items()}
    if len(by_size.get(1, ())) >= _ENOUGH or set(medians) == {1}:
        passes = len(by_size[1])
        return medians[1], f"estimated from this run's {passes} pass{'es' * (passes > 1)} of one token", False
    shortest = min(medians)
    if len(medians) == 1:
        return medians[shortest], f"estimated: no longer than this run's passes of {shortest} tokens", True
    sizes, seconds = zip(*sorted((size, one) for size, found in by_size.items() for one in found), strict=True)
    slope, intercept = statistics.linear_regression(sizes, seconds)
    least = min(medians.values())
    seconds_of_one = min(max(intercept + slope, 0.5 * least), least)
    return seconds_of_one, f"estimated from this run's passes of {shortest} to {max(medians)} tokens", False


def _round(result: GenerationResult, number: int) -> list[Step]:
    return [row.steps[number] for row in result.rows if number < len(row.steps)]
