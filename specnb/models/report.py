"""transformers' report on a checkpoint's tensors, without those of MTP layers: they are read when they are needed."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_LOGGER = "transformers.modeling_utils"


class Report(logging.Filter):
    """Holds the report back until `judge` has seen what it is about."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[logging.LogRecord] = []
        self._judged = False

    def filter(self, record: logging.LogRecord) -> bool:
        held = "LOAD REPORT" in record.getMessage() and not self._judged
        if held:
            self._held.append(record)
        return not held

    def judge(self, config: Any, info: Mapping[str, Any]) -> None:
        """Drop the report if it only lists the MTP layers that `config` declares; `info` is the loading info."""
        text = config.get_text_config(decoder=True)
        first, count = getattr(text, "num_hidden_layers", 0), getattr(text, "num_mtp_layers", None) or 0
        mtp = re.compile(rf"(^|\.)layers\.({'|'.join(str(first + i) for i in range(count)) or '-'})\.")
        rest = [key for key in info["unexpected_keys"] if not mtp.search(key)]
        if not (rest or info["missing_keys"] or info["mismatched_keys"] or info["error_msgs"]):
            self._held.clear()

    def release(self) -> None:
        """Log what is still held."""
        self._judged = True
        for record in self._held:
            logging.getLogger(_LOGGER).handle(record)


@contextmanager
def report() -> Iterator[Report]:
    """Holds transformers' report back while a model is loaded."""
    held = Report()
    logger = logging.getLogger(_LOGGER)
    logger.addFilter(held)
    try:
        yield held
    finally:
        held.release()
        logger.removeFilter(held)
