"""The notebooks under nbval: no live display, no network, one thread; and two faults that nbval lets pass.

A `UsageError` of a magic does not fail a cell, and what a cell writes to stderr is only compared where outputs are. Here both
fail the cell, and so does a script in an output.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from typing import Any

import pytest

SETTINGS = {"SPECNB_LIVE": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ.update(SETTINGS)  # before a kernel starts, which inherits them


def faults(outputs: Iterable[Mapping[str, Any]]) -> list[str]:
    """What must not be in a cell's outputs, in a line each."""
    found = []
    for output in outputs:
        text = str(output.get("text", ""))
        if "UsageError" in text or output.get("ename") == "UsageError":
            found.append(f"a magic refused its arguments: {text.strip() or output.get('evalue')}")
        elif output.get("name") == "stderr":
            found.append(f"written to stderr: {text.strip()}")
        html = "".join(output.get("data", {}).get("text/html", ""))
        if "<script" in html.lower() or any("javascript" in kind for kind in output.get("data", {})):
            found.append("an output with a script")
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a cell for its `faults`."""
    outcome = yield
    found = faults(getattr(item, "test_outputs", ()))
    if found:
        pytest.fail("; ".join(found), pytrace=False)
    return outcome
