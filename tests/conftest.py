"""One thread, no network, no chatter: the same on every machine. `--all` also runs the tests that take long."""

from __future__ import annotations

import os
from collections import Counter

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from transformers.utils import logging

from specnb.decoding.lm import block_check

torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()

# A test's shell would empty itself at exit, which takes a minute with all of torch loaded.
InteractiveShell.atexit_operations = lambda self: None  # type: ignore[method-assign]

LONG = ("slow", "notebook", "browser", "smollm2")
LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help=f"also run the tests marked {', '.join(LONG)}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--all`, leave out the tests that take long, unless they are asked for by `-m` or by their names."""
    if config.getoption("all") or config.getoption("markexpr") or any("::" in arg for arg in config.args):
        return
    marks = [next((mark for mark in LONG if item.get_closest_marker(mark)), None) for item in items]
    config.stash[LEFT_OUT] = Counter(mark for mark in marks if mark)
    config.hook.pytest_deselected(items=[item for item, mark in zip(items, marks, strict=True) if mark])
    items[:] = [item for item, mark in zip(items, marks, strict=True) if not mark]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out, and how to run it."""
    left_out = config.stash.get(LEFT_OUT, None)
    if left_out:
        counts = ", ".join(f"{count} {mark}" for mark, count in left_out.items())
        terminalreporter.write_line(f"Left out: {counts}. `python -m pytest --all` runs them, too.")


@pytest.fixture(autouse=True)
def known_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the families of this suite as tested, also with a transformers that has no list of tested families."""
    if not block_check.tested_families():
        types = ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "glm4_moe"]
        known = {"text": [*types, "deepseek_v3", "gpt2", "inkling_text"], "image": ["gemma4", "qwen2_5_vl"]}
        monkeypatch.setattr(block_check, "tested_families", lambda: known)
