"""Draft-length schedules: pure functions from the current length and the step just made to the next length."""

from __future__ import annotations

from specnb.decoding.contracts import Schedule
from specnb.trace import Step


def constant(k: int, step: Step) -> int:
    """Always the same length."""
    return k


def heuristic(k: int, step: Step) -> int:
    """Two more when the whole draft was accepted, one fewer otherwise; unchanged when nothing was drafted.

    transformers' rule of that name, but every call starts afresh.
    """
    if not step.drafted:
        return k
    return k + 2 if step.accepted == len(step.drafted) else max(1, k - 1)


SCHEDULES: dict[str, Schedule] = {"constant": constant, "heuristic": heuristic}
