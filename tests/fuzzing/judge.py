"""Runs a draw's script and says whether specnb was right."""

from __future__ import annotations

import hashlib
import inspect
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from families.cells import is_specnbs, raised_by_specnb, refusal
from torch import Tensor

from specnb.decoding.lm.kv_cache import unsupported_cache_layers
from specnb.decoding.lm.model_inputs import custom_preparation

from .draws import Draw
from .script import source

RIGHT = ("equal", "refused", "tie", "distribution", "skipped")
TOLERANCE = {"float64": 1e-9, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}  # of a logit's size
SECONDS = 30


@dataclass(frozen=True)
class Outcome:
    """`kind` is one of RIGHT or names the finding; `where` is what tells findings of a kind apart."""

    kind: str
    where: str = ""
    detail: str = ""

    @property
    def right(self) -> bool:
        return self.kind in RIGHT


class TooLong(BaseException):
    """Not an Exception, so that no `except Exception` on the way catches it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooLong after so many seconds of CPU time, or after ten times as many by the clock."""

    def ring(*_: Any) -> None:
        raise TooLong

    clocks = ((signal.ITIMER_PROF, signal.SIGPROF, seconds), (signal.ITIMER_REAL, signal.SIGALRM, 10 * seconds))
    before = [signal.signal(number, ring) for _, number, _ in clocks]
    try:
        for timer, _, most in clocks:
            signal.setitimer(timer, most)
        yield
    finally:
        for (timer, number, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def judge(draw: Draw, seconds: float = SECONDS) -> Outcome:
    """Run both sides of a draw."""
    try:
        with limited(seconds):
            return _judge(draw)
    except TooLong:
        return Outcome("time", detail=f"more than {seconds:g} s")


def load(draw: Draw) -> dict[str, Any]:
    """The functions of the draw's script."""
    space: dict[str, Any] = {"__name__": "drawn"}
    exec(compile(source(draw), "drawn.py", "exec"), space)
    return space


@dataclass
class Side:
    """One side's call: what came out, or what was raised."""

    out: Any = None
    tokens: list[list[int]] | None = None
    given: dict[str, Any] | None = None
    error: Exception | None = None
    steps: int = 0


def _judge(draw: Draw) -> Outcome:
    try:
        space = load(draw)
        want, as_theirs = watched(space, "theirs")
    except Exception as error:
        return Outcome("skipped", "making", _one(error))
    if want.error is not None:
        return Outcome("skipped", "theirs", _one(want.error))
    got, changed = watched(space, "ours")
    for name, what in changed.items():
        # a pipeline's data loader draws a number; generate() keeps a static cache on the model
        if what != as_theirs.get(name) and (name, draw.entry) != ("random state", "pipeline"):
            return Outcome("changed", name, what)
    if got.error is not None:
        return _raised(got)
    if draw.wrapper == "autocast":
        return Outcome("equal", "no error")
    if draw.seed is not None and draw.sampling != {"top_k": 1}:
        return _sampled(draw, space, got)
    if got.tokens != want.tokens:
        return _differs(draw, got, want)
    return _rest(draw, got, want)


def call(space: dict[str, Any], side: str) -> Side:
    """One side on a model of its own."""
    model = space["model"]()
    return _call(space, side, model, space["inputs"](model), space["helpers"]() if side == "ours" else {})


def _call(space: dict[str, Any], side: str, model: Any, given: dict[str, Any], helpers: dict[str, Any]) -> Side:
    made, steps = Side(given=given), []
    try:
        made.out = space[side](model, given, helpers, on_step=steps.append)
        made.tokens = space["tokens"](made.out, given)
    except Exception as error:
        made.error = error
    made.steps = len(steps)
    return made


def watched(space: dict[str, Any], side: str) -> tuple[Side, dict[str, str]]:
    """Run one side; also returns what it changed of the user's objects, as words by name."""
    model = space["model"]()
    given, helpers = space["inputs"](model), space["helpers"]() if side == "ours" else {}
    tensors = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
    before, state = _snapshot(model), torch.get_rng_state()
    made = _call(space, side, model, given, helpers)
    changed = {}
    if not torch.equal(state, torch.get_rng_state()):
        changed["random state"] = "the global generator was used"
    for name, value in _snapshot(model).items():
        if value != before[name]:
            changed[name] = _difference(before[name], value)
    for name, value in tensors.items():
        if not torch.equal(value, given[name]):
            changed[f"the argument {name}"] = "another tensor"
    return made, changed


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, dict):
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return ", ".join(f"{name}: {before.get(name)!r} became {after.get(name)!r}" for name in sorted(names))
    if isinstance(before, list):
        return f"{[x for x in after if x not in before]} added, {[x for x in before if x not in after]} gone"
    return f"{before!r} became {after!r}"


def _snapshot(model: Any) -> dict[str, Any]:
    weights = hashlib.sha1()
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and value.device.type != "meta":
            weights.update(name.encode() + value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    settings = model.generation_config
    return {
        "config": model.config.to_dict(),
        "generation config": settings.to_dict(),
        "training": model.training,
        "attributes": sorted(vars(model)),
        "classes": [type(module).__name__ for module in model.modules()],
        "weights": weights.hexdigest(),
    }


def _one(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _raised(got: Side) -> Outcome:
    error = got.error
    assert error is not None
    if refusal(error, got.steps):
        return Outcome("refused", detail=_one(error))
    frames = traceback.extract_tb(error.__traceback__)
    at = f"{'/'.join(frames[-1].filename.split('/')[-2:])}:{frames[-1].lineno}"
    ours = [frame for frame in frames if is_specnbs(frame.filename)]
    via = f" through {'/'.join(ours[-1].filename.split('/')[-2:])}:{ours[-1].lineno}" if ours else ""
    if raised_by_specnb(error) and isinstance(error, (ValueError, TypeError)):
        kind = "refused after tokens" if got.steps else "message of several lines"
    else:
        kind = "raw error"
    return Outcome(kind, f"{type(error).__name__} @ {at}", f"{_one(error)} @ {at}{via}, after {got.steps} steps")


def _differs(draw: Draw, got: Side, want: Side) -> Outcome:
    """The outcome for another text: a tie if transformers' two best scores there differ by rounding only."""
    again = call(load(draw), "theirs")
    if again.tokens != want.tokens:
        return Outcome("skipped", "unsteady")
    assert got.tokens is not None and want.tokens is not None
    if _misplaced(draw):
        if draw.own:  # the user's processors see the padded rows, so a row alone does not say what is right
            return Outcome("skipped", "positions")
        if _alone(draw, got.tokens):
            return Outcome("equal", "each row alone")
    if "cache_implementation" in draw.options:  # some families write another text with a static cache
        options = {name: value for name, value in draw.options.items() if name != "cache_implementation"}
        if got.tokens == call(load(replace(draw, options=options)), "theirs").tokens:
            return Outcome("equal", "with a dynamic cache")
    for row, (ours, right) in enumerate(zip(got.tokens, want.tokens, strict=False)):
        if ours != right:
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, right, strict=False)) if a != b), min(len(ours), len(right))
            )
            if _tie(draw, row, at - _returned(draw)):
                return Outcome("tie")
            return Outcome("wrong text", detail=f"row {row}, token {at}: {ours} instead of {right}")
    return Outcome("wrong text", detail=f"{len(got.tokens)} rows instead of {len(want.tokens)}")


def _misplaced(draw: Draw) -> bool:
    """Whether transformers itself gives the rows other positions in a batch than alone.

    That is so with padding behind the prompts, of which it warns, and with padding before them if the model counts
    positions by slots or by pad ids.
    """
    padded = draw.pad or len({len(row) for row in draw.rows}) > 1
    model = load(draw)["model"]()
    placed = "position_ids" in inspect.signature(type(model).forward).parameters and not custom_preparation(model)
    placed = placed and not unsupported_cache_layers(
        model.config
    )  # a window behind the prompt, say, that counts its padding
    return bool(padded and (draw.right or not placed))


def _returned(draw: Draw) -> int:
    """How much of the prompt is returned, padding included: all of it by a pipeline."""
    return max(map(len, draw.rows)) + draw.pad if draw.entry == "pipeline" else 0


def _alone(draw: Draw, tokens: list[list[int]]) -> bool:
    """Whether each row has the text that transformers gives for it alone, without padding."""
    before = _returned(draw)
    for row, returned in zip(draw.rows, tokens, strict=True):
        ours = returned[before:]
        alone = call(load(replace(draw, rows=(row,), pad=0, right=False, entry="generate")), "theirs").tokens
        if alone is None or ours[: len(alone[0])] != alone[0] or any(ours[len(alone[0]) :]):
            return False
    return True


def _scores(draw: Draw) -> Any:
    """Their scores, greedily: one `[rows, vocab]` per token; None where there are none."""
    options = draw.options | {"return_dict_in_generate": True, "output_scores": True}
    entry = "generate" if draw.entry == "pipeline" else draw.entry
    greedy = replace(draw, entry=entry, options=options, seed=None, sampling={})
    return getattr(call(load(greedy), "theirs").out, "scores", None)


def _tie(draw: Draw, row: int, at: int) -> bool:
    """Whether the two best scores of transformers differ by rounding only, or some are NaN.

    With a single token left to draw from, the scores of the greedy run count.
    """
    scores = _scores(draw)
    if scores is None or at >= len(scores) or row >= len(scores[at]):
        return False
    if any(bool(step[row].isnan().any()) for step in scores[: at + 1]):
        return True  # padding in float64 overflows in some families
    best = scores[at][row].double().topk(2).values
    size = max(1.0, float(best[0].abs()))
    return bool(best[0] - best[1] <= TOLERANCE[draw.dtype] * size)


def _rest(draw: Draw, got: Side, want: Side) -> Outcome:
    """What else generate() returns: scores, logits, and the cache that was given."""
    for name in ("scores", "logits"):
        right = getattr(want.out, name, None)
        if draw.options.get(f"output_{name}") and right is not None and draw.entry != "pipeline":
            ours = getattr(got.out, name, None)
            if ours is None or len(ours) != len(right):
                return Outcome(name, "none" if ours is None else "number")
            near = 2e-4 if draw.dtype in ("float32", "float64") else 0.2
            if not all(
                torch.allclose(a.float(), b.float(), atol=near, rtol=near) for a, b in zip(ours, right, strict=True)
            ):
                return Outcome(name, "values")
    if draw.cache != "none":
        lengths = [_held(side.given) for side in (got, want)]
        if lengths[0] != lengths[1]:
            return Outcome("cache", "length", f"the given cache holds {lengths[0]} tokens instead of {lengths[1]}")
    return Outcome("equal")


def _held(given: dict[str, Any] | None) -> int:
    cache = (given or {}).get("cache", (given or {}).get("past_key_values"))
    return int(cache.get_seq_length()) if cache is not None else 0


def _sampled(draw: Draw, space: dict[str, Any], got: Side) -> Outcome:
    """The same seed gives the same text, prompt lookup gives plain decoding's, the distribution is the target's."""
    by_clock = draw.drafting.get("num_assistant_tokens_schedule") == "adaptive"  # the text may depend on timings
    copies = draw.method in ("plain", "prompt_lookup", "suffix") and draw.drafting.get("verification") != "block"
    if (not by_clock or copies) and call(space, "ours").tokens != got.tokens:
        return Outcome("seed", "not repeatable")
    if draw.method in ("prompt_lookup", "suffix") and draw.drafting.get("verification") != "block":
        plain = call(load(replace(draw, method="plain", drafting={})), "ours")
        if plain.error is None and plain.tokens != got.tokens:
            if draw.dtype in ("float32", "float64"):
                return Outcome("seed", "lookup is not plain", f"{got.tokens} instead of {plain.tokens}")
            return Outcome("tie")
    from . import distributions

    return distributions.check(draw)
