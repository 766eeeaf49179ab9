"""What a new drafter is worth: its speed beside plain decoding and prompt lookup, on held-out prompts."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specnb.bench import Comparison
    from specnb.models import Pair

DRAFT_LENGTHS = (2, 4, 6)
MAX_PROMPTS, MAX_NEW_TOKENS = 12, 96
_SAFETY = 1.5  # the first call of each run is warmed up


def measure(
    pair: Pair, prompts: Sequence[str], chat: bool | None, end: float | None, cancel: threading.Event | None = None
) -> Comparison | None:
    """Compare the drafter, with several draft lengths, with plain decoding and prompt lookup.

    Args:
        pair: the target with its drafter.
        prompts: as many of them are used as fit into the time, at most 12.
        chat: whether they are sent as chat messages.
        end: the time (`time.monotonic`) at which to stop; None for no limit.
        cancel: set to stop; it is also set at the end of the time.

    Returns:
        The comparison; None if the time was too short.
    """
    from specnb.bench import compare

    runs: list[Any] = ["prompt_lookup", *({"method": "eagle3", "num_assistant_tokens": k} for k in DRAFT_LENGTHS)]
    one = (len(runs) + 1) * MAX_NEW_TOKENS * _seconds_per_token(pair)
    left = None if end is None else end - time.monotonic()
    fits = MAX_PROMPTS if left is None else int(left / (_SAFETY * one))
    cancel = threading.Event() if cancel is None else cancel
    timer = None if left is None else threading.Timer(max(0.0, left), cancel.set)
    if timer is not None:
        timer.start()
    try:
        found = compare(
            pair,
            prompts[: max(1, min(fits, MAX_PROMPTS))],
            runs,
            repeats=1,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            chat=chat,
            cancel=cancel,
        )
        return found if found.repeats else None
    except ValueError:
        if not cancel.is_set():
            raise
        return None
    finally:
        if timer is not None:
            timer.cancel()


def _seconds_per_token(pair: Pair) -> float:
    """Of plain decoding, on a few tokens."""
    import specnb

    began, tokens = time.monotonic(), 8
    specnb.generate(pair, "a", method="plain", max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return (time.monotonic() - began) / tokens
