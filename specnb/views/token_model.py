"""What the interactive token view shows of a result, as JSON: tokens, steps, and the clock of the replay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specnb.options import LOOKUPS
from specnb.trace import GenerationResult, RowResult, Step
from specnb.views.replay import PlainLane, StepTimes, plain_lane, step_times
from specnb.views.text import row_pieces, settings, shown_origins, stats_text, visible

CHOSEN, TARGET = "chosen", "target"
"""The origin of the token that a branch begins with, and the source of tokens that no drafter wrote."""
Model = dict[str, Any]


def token_model(result: GenerationResult, plain: GenerationResult | None = None) -> Model:
    """A result as JSON.

    Args:
        result: the run, which may have ended early.
        plain: a run of plain decoding from the same prompt, for the second lane of the replay.

    Returns:
        "method", "model", "assistant", "settings" (names and values), "stats", "lossy", "sampled" and "rows". A row has

        - "prompt" (None without a tokenizer), "finish", "kept" (tokens before the run began; 0 but for branches),
        - "tokens", each with "text", "id", "origin", "source", "step" (number from 0, None for a chosen token), "place"
          (position in the draft, None for the target's own), "probability" and "rank" under the target before any
          logits processor, "draft_probability", and "saved" (seconds that it came earlier than plain decoding would
          have taken for it, its share of the step's),
        - "steps", each with "begin", "end", "draft", "verify", "other" (seconds), "first" and "count" (its tokens),
          "accepted", "source", "match_length", "kept", and "positions": every drafted token and the target's own, with
          "fate", "probability", "draft_probability", "rank", "target_top" and "draft_top" (pairs of text, id and
          probability; None where nothing was recorded),
        - "plain": "times", "measured", "basis", "bound" (see `PlainLane`); None if there is nothing to compare with.
    """
    times = step_times(result)
    rows = [
        _row(result, row, times[: len(row.steps)], plain_lane(result, index, plain))
        for index, row in enumerate(result.rows)
    ]
    return {
        "method": result.method,
        "model": result.model,
        "assistant": result.assistant,
        "settings": [[name, str(value)] for name, value in settings(result).items()],
        "stats": stats_text(result),
        "lossy": result.lossy,
        "sampled": result.seed is not None,
        "rows": rows,
    }


def branch_model(parent: Mapping[str, Any], row: int, index: int, token: int, text: str, model: Model) -> Model:
    """The JSON of a branch, with what it kept of the run that it left.

    Args:
        parent: the JSON of that run.
        row: the row that it left.
        index: how many of the row's tokens are kept.
        token, text: the token that was chosen instead of the next one.
        model: the JSON of the new run, whose prompt has the kept tokens and the chosen one.
    """
    old, new = parent["rows"][row], model["rows"][0]
    kept = [dict(one, saved=None) for one in old["tokens"][:index]]
    used = 1 + max((one["step"] for one in kept if one["step"] is not None), default=-1)
    # the clock begins with the new run
    steps = [dict(step, kept=True, begin=0.0, end=0.0) for step in old["steps"][:used]]
    head = [*kept, _token(visible(text), token, CHOSEN, CHOSEN, None)]
    shift = len(head)
    tokens = [one if one["step"] is None else dict(one, step=one["step"] + used) for one in new["tokens"]]
    steps += [dict(step, first=step["first"] + shift) for step in new["steps"]]
    plain = new["plain"] and dict(new["plain"], times=[0.0] * shift + new["plain"]["times"])
    joined = dict(new, prompt=old["prompt"], tokens=head + tokens, steps=steps, plain=plain, kept=shift)
    return dict(model, rows=[joined])


def _row(result: GenerationResult, row: RowResult, times: Sequence[StepTimes], plain: PlainLane | None) -> Model:
    pieces = row_pieces(row)
    tokens: list[Model] = []
    steps: list[Model] = []
    for number, (step, clock) in enumerate(zip(row.steps, times, strict=True)):
        first = len(tokens)
        source = step.source or result.method
        positions = _positions(result, row, step, pieces[first : first + len(step.emitted)], number)
        saved = _saved(plain, clock, first, len(step.emitted))
        for place, (token, origin) in enumerate(zip(step.emitted, shown_origins(step), strict=True)):
            drafted = place < step.accepted
            position = positions[place] if drafted else positions[-1]
            tokens.append(
                _token(
                    visible(pieces[first + place]) or _named(row, token),
                    token,
                    origin,
                    source if drafted else TARGET,
                    number,
                    place=place if drafted else None,
                    probability=_exp(step.logprobs[place]) if step.logprobs else None,
                    draft_probability=position["draft_probability"],
                    rank=step.ranks[place] if step.ranks else None,
                    saved=saved,
                )
            )
        steps.append(
            {
                **clock._asdict(),
                "first": first,
                "count": len(step.emitted),
                "accepted": step.accepted,
                "drafted": len(step.drafted),
                "source": source if step.drafted else TARGET,
                "match_length": step.match_length if any(part in LOOKUPS for part in source.split("+")) else None,
                "kept": False,
                "positions": positions,
            }
        )
    lane = plain and {**plain._asdict(), "times": [_rounded(t) for t in plain.times]}
    prompt = None if row.prompt_text is None else visible(row.prompt_text)
    shown = {"tokens": tokens, "steps": steps, "plain": lane}
    return {"prompt": prompt, "finish": row.finish_reason, "kept": 0, **shown}


def _token(text: str, token: int, origin: str, source: str, step: int | None, **more: Any) -> Model:
    empty = dict.fromkeys(("place", "probability", "draft_probability", "rank", "saved"))
    return {"text": text, "id": token, "origin": origin, "source": source, "step": step, **empty, **more}


def _positions(result: GenerationResult, row: RowResult, step: Step, texts: Sequence[str], number: int) -> list[Model]:
    """Every drafted token of a step, and at last the token that the target wrote itself."""
    rejected = row.rejected_pieces[number] if row.rejected_pieces is not None else ()
    dropped = {step.accepted + i: text for i, text in enumerate(rejected)}
    origins = step.origins
    own = len(step.emitted) > step.accepted
    found = []
    for place in range(len(step.drafted) + own):
        is_own = place == len(step.drafted)
        at = step.accepted if is_own else place  # index among the emitted tokens
        token = step.emitted[at] if is_own else step.drafted[place]
        judged = place <= step.accepted if not is_own else True
        if is_own:
            fate, text = origins[-1], texts[at]
        elif place < step.accepted:
            fate, text = shown_origins(step)[place], texts[place]
        else:
            fate, text = "rejected" if place == step.accepted and own else "dropped", dropped.get(place, "")
        # what the verifier compared, where it was recorded; else the model's own
        probability = _at(None if is_own else step.target_probabilities, place)
        if probability is None and (is_own or place < step.accepted) and step.logprobs:
            probability = _exp(step.logprobs[at])
        draft_probability = None if is_own else _at(step.draft_probabilities, place)
        # where a draft was rejected, the drafter had the same text before it as the target
        draft_top = _at(step.draft_top_logprobs, at if is_own else place)
        if draft_probability is None and draft_top is not None:
            draft_probability = next((_exp(logprob) for one, logprob in draft_top if one == token), None)
        ranks = step.ranks if is_own else step.target_ranks
        found.append(
            {
                "text": visible(text) or _named(row, token),
                "id": token,
                "fate": fate,
                "probability": probability,
                "draft_probability": draft_probability,
                "rank": _at(ranks, at),
                "target_top": _top(row, _at(step.top_logprobs, at) if judged else None),
                "draft_top": _top(row, draft_top),
            }
        )
    return found


def _top(row: RowResult, pairs: Any) -> list[Any] | None:
    return None if pairs is None else [[_named(row, token), token, _exp(logprob)] for token, logprob in pairs]


def _named(row: RowResult, token: int) -> str:
    return visible((row.token_texts or {}).get(token, f"<{token}>"))


def _saved(plain: PlainLane | None, clock: StepTimes, first: int, count: int) -> float | None:
    """Seconds that each of a step's tokens saved. The first step reads the prompt, as plain decoding does too."""
    if plain is None or not count:
        return None
    before = plain.times[first - 1] if first else 0.0
    return _rounded((plain.times[first + count - 1] - before - (clock.end - clock.begin)) / count)


def _at(values: Sequence[Any] | None, i: int) -> Any:
    return values[i] if values is not None and i < len(values) else None


def _exp(logprob: float) -> float:
    return float(f"{math.exp(logprob):.6g}")


def _rounded(seconds: float) -> float:
    return round(seconds, 7)
