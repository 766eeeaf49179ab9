"""The measurements of one run, from the results of its repeats."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specnb.bench.comparison import Run
from specnb.trace import GenerationResult, Step


@dataclass
class Round:
    """One run over all prompts, in one repeat.

    Attributes:
        results: one result per prompt.
        seconds: of all calls together.
        reference: the ids that transformers' own implementation generated, and its seconds; None if it did not run.
    """

    results: list[GenerationResult]
    seconds: float
    reference: tuple[list[list[int]], float] | None

    @property
    def speed(self) -> float:
        """Generated tokens per second."""
        return sum(result.num_emitted_tokens for result in self.results) / self.seconds

    @property
    def reference_speed(self) -> float | None:
        """Generated tokens per second of transformers' own implementation."""
        return None if self.reference is None else sum(map(len, self.reference[0])) / self.reference[1]

    @property
    def parts(self) -> tuple[float, float, float]:
        """Seconds of drafting, of verifying, and of the rest."""
        draft, verify = sum(r.draft_seconds for r in self.results), sum(r.verify_seconds for r in self.results)
        return draft, verify, max(0.0, self.seconds - draft - verify)

    @property
    def draft_cost(self) -> float:
        """Seconds per drafted token."""
        return sum(r.draft_seconds for r in self.results) / max(1, sum(r.num_draft_tokens for r in self.results))

    @property
    def pass_cost(self) -> float:
        """Seconds per target pass, without prefill."""
        steps = [step for result in self.results for step in result.steps if step is not result.rows[step.row].steps[0]]
        return sum(step.verify_seconds + step.other_seconds for step in steps) / max(1, len(steps))


def measured_run(
    label: str, arguments: Mapping[str, Any], rounds: Sequence[Mapping[str, Round]], failed: Mapping[str, str]
) -> Run:
    """The measurements of one run.

    Args:
        label: the run's label.
        arguments: the run's arguments of `generate`.
        rounds: per repeat, the rounds of all runs by label; "plain" is among them.
        failed: by label, why transformers' own implementation did not run.
    """
    speeds = {name: tuple(found[name].speed for found in rounds) for name in (label, "plain")}
    last, plain = rounds[-1][label], rounds[-1]["plain"]
    steps = [step for result in last.results for step in result.steps]
    drafted, accepted = sum(len(s.drafted) for s in steps), sum(s.accepted for s in steps)
    drafting = sum(bool(s.drafted) for s in steps)
    greedy = all(result.seed is None for result in plain.results)
    draft_cost, pass_cost, plain_cost = (
        statistics.median(getattr(found[name], cost) for found in rounds)
        for name, cost in ((label, "draft_cost"), (label, "pass_cost"), ("plain", "pass_cost"))
    )
    own = [found[label].reference_speed for found in rounds]
    return Run(
        label=label,
        options=dict(arguments),
        tokens_per_second=speeds[label],
        speed_ups=tuple(
            mine / other if other else 0.0 for mine, other in zip(speeds[label], speeds["plain"], strict=True)
        ),
        draft_acceptance_rate=accepted / drafted if drafted else None,
        mean_acceptance_length=1 + accepted / drafting if drafting else None,
        tokens_per_pass=sum(result.num_emitted_tokens for result in last.results) / max(1, len(steps)),
        target_passes=sum(result.target_passes or len(result.steps) for result in last.results),
        same_text=all(a.ids == b.ids for a, b in zip(_rows(last), _rows(plain), strict=True)) if greedy else None,
        lossy=any(result.lossy for result in last.results),
        draft_cost=draft_cost,
        pass_cost=pass_cost,
        parts=tuple(
            statistics.median(values) for values in zip(*(found[label].parts for found in rounds), strict=True)
        ),
        predicted=predicted(steps, draft_cost, pass_cost, plain_cost) if drafted else None,
        own_ratios=tuple(mine / other for mine, other in zip(speeds[label], own, strict=True) if other),
        own=failed.get(label, ""),
    )


def _rows(one: Round) -> list[Any]:
    return [row for result in one.results for row in result.rows]


def predicted(steps: Sequence[Step], draft_cost: float, pass_cost: float, plain_cost: float) -> float:
    """The speed-up over plain decoding that the cost model predicts.

    Source: Leviathan et al. 2211.17192, section 3.3. Steps without a draft yield one token per pass.

    Args:
        steps: the steps of a run; at least one of them drafted.
        draft_cost: seconds per drafted token.
        pass_cost: seconds per target pass of the run.
        plain_cost: seconds per target pass of plain decoding.
    """
    drafting = [step for step in steps if step.drafted]
    k = sum(len(step.drafted) for step in drafting) / len(drafting)
    judged = sum(min(step.accepted + 1, len(step.drafted)) for step in drafting)
    a = min(1.0, sum(step.accepted for step in drafting) / max(1, judged))
    share = len(drafting) / len(steps)
    tokens = 1 + k if a == 1 else (1 - a ** (k + 1)) / (1 - a)
    cost = pass_cost + share * k * draft_cost
    return (1 - share + share * tokens) * plain_cost / cost if cost else 0.0
