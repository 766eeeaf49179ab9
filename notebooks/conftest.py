"""The notebooks under nbval: no live display, no network, one thread; and two faults that nbval lets pass.

By itself nbval passes a cell whose magic raises a `UsageError`, and compares stderr only where outputs are compared.
Here both fail the cell, and so does a script in an output.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest
from refresh import SETTINGS, faults

os.environ.update(SETTINGS)  # before a kernel starts, which inherits them


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a cell for its `faults`."""
    outcome = yield
    found = faults(getattr(item, "test_outputs", ()))
    if found:
        pytest.fail("; ".join(found), pytrace=False)
    return outcome
