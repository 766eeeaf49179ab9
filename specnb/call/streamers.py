"""Streamers that are always ended, and ended once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class SingleEndStreamer:
    """Wraps a transformers streamer so that only the first call of `end()` reaches it."""

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer
        self.ended = False

    def put(self, value: Any) -> None:
        """Pass token ids on."""
        self.streamer.put(value)

    def end(self) -> None:
        """End the streamer, unless that has happened."""
        if not self.ended:
            self.ended = True
            self.streamer.end()


@contextmanager
def ensure_end(streamer: Any) -> Iterator[SingleEndStreamer | None]:
    """End `streamer` when the block is left, also by an exception before the first token.

    Without this, a thread that reads from the streamer would wait for ever.

    Args:
        streamer: a transformers streamer, a `SingleEndStreamer` or None.

    Yields:
        The wrapped streamer; None without one.
    """
    wrapped = streamer if streamer is None or isinstance(streamer, SingleEndStreamer) else SingleEndStreamer(streamer)
    try:
        yield wrapped
    finally:
        if wrapped is not None and callable(getattr(wrapped.streamer, "end", None)):
            wrapped.end()
