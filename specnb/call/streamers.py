"""A streamer that is always told the end, and told it once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Once:
    """A streamer whose `end()` counts once."""

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer
        self.over = False

    def put(self, value: Any) -> None:
        self.streamer.put(value)

    def end(self) -> None:
        if not self.over:
            self.over = True
            self.streamer.end()


@contextmanager
def ended(streamer: Any) -> Iterator[Once | None]:
    """End `streamer` whatever happens inside, a refusal before the first token included: who reads from it must not wait for ever."""
    once = streamer if streamer is None or isinstance(streamer, Once) else Once(streamer)
    try:
        yield once
    finally:
        if once is not None and callable(getattr(once.streamer, "end", None)):
            once.end()
