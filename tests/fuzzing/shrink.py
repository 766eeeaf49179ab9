"""Makes a finding small: one thing after the other is left out as long as the same finding remains."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from families.build import CAUSAL

from .draws import Draw
from .judge import Outcome, judge

_SIMPLEST = Draw()


def shrink(draw: Draw, outcome: Outcome, seconds: float = 90) -> tuple[Draw, Outcome]:
    """The smallest draw found in so many seconds that has the same finding, and its outcome."""
    end = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in _simpler(draw):
            if time.monotonic() > end:
                return draw, outcome
            found = judge(candidate, 20)
            if _same(found, outcome):
                draw, outcome, smaller = candidate, found, True
                break
    return draw, outcome


def _same(found: Outcome, outcome: Outcome) -> bool:
    return (found.kind, found.where) == (outcome.kind, outcome.where)


def _simpler(draw: Draw) -> Iterator[Draw]:
    """Draws with one thing less, the greatest steps first."""
    if draw.seed is not None:
        yield _greedy(draw)
    for name in ("wrapper", "cache", "entry", "right", "pad", "dtype", "image", "stop", "as_config"):
        if getattr(draw, name) != getattr(_SIMPLEST, name):
            yield replace(draw, **{name: getattr(_SIMPLEST, name)})
    if draw.family != "llama" or draw.kind != CAUSAL:
        yield replace(draw, family="llama", kind=CAUSAL, image=False)
    for name in ("options", "drafting", "sampling"):
        held: dict[str, Any] = getattr(draw, name)
        needed = {"assistant_early_exit"} if len(held) > 1 or draw.drafter == "early_exit" else set()
        for key in held.keys() - needed:
            yield replace(draw, **{name: {k: v for k, v in held.items() if k != key}})
    for part in draw.own:
        yield replace(draw, own=tuple(name for name in draw.own if name != part))
    if "+" in draw.method:
        lookups = ("suffix_decoding_", "max_matching_")
        own = {name: value for name, value in draw.drafting.items() if not name.startswith(lookups)}
        yield replace(draw, method=draw.drafter, drafting=own)
    if draw.method not in ("plain", "prompt_lookup"):
        yield replace(draw, method="prompt_lookup", drafting={})
    if draw.method != "plain":
        yield replace(draw, method="plain", drafting={})
    if draw.drafter == "draft_model" and draw.draft != "copy":
        yield replace(draw, draft="copy")
    for i in range(len(draw.rows) if len(draw.rows) > 1 else 0):
        yield replace(draw, rows=draw.rows[:i] + draw.rows[i + 1 :])
    for new in dict.fromkeys((1, draw.new // 2, draw.new - 1)):
        if 0 < new < draw.new:
            yield replace(draw, new=new)
    for i, row in enumerate(draw.rows):
        for shorter in dict.fromkeys((row[len(row) // 2 :], row[1:], row[:-1])):
            if 0 < len(shorter) < len(row):
                yield replace(draw, rows=(*draw.rows[:i], shorter, *draw.rows[i + 1 :]))


def _greedy(draw: Draw) -> Draw:
    drafting = {name: value for name, value in draw.drafting.items() if name != "verification"}
    return replace(draw, seed=None, sampling={}, drafting=drafting)


def traits(draw: Draw) -> list[str]:
    """The settings of a draw that are not at their defaults."""
    said = []
    for field in fields(draw):
        value = getattr(draw, field.name)
        if field.name in ("rows", "new", "seed", "draft") or value == getattr(_SIMPLEST, field.name):
            continue
        if isinstance(value, dict):
            said += [
                f"{name}={value[name]}" if isinstance(value[name], (str, bool)) else name for name in sorted(value)
            ]
        elif isinstance(value, tuple):
            said += [f"{field.name}={name}" for name in value] if field.name == "own" else [field.name]
        else:
            said.append(f"{field.name}={value}" if isinstance(value, str) else field.name)
    return said + ["rows"] * (len(draw.rows) > 1) + ["sampled"] * (draw.seed is not None)


def label(draw: Draw) -> str:
    """The traits of a (small) draw in a line: findings with the same label are told once."""
    return ", ".join(traits(draw))


def explained(draw: Draw, outcome: Outcome, known: Iterable[tuple[Draw, Outcome]]) -> tuple[Draw, Outcome] | None:
    """An earlier small finding of the same kind whose traits this draw has, too: most likely the same."""
    for small, found in known:
        if _same(found, outcome) and set(traits(small)) <= set(traits(draw)):
            return small, found
    return None
