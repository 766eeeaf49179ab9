"""One thread, no network, no chatter: the same on every machine."""

from __future__ import annotations

import os

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


@pytest.fixture(autouse=True)
def known_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the families of this suite as tested, also with a transformers that has no list of tested families."""
    if not block_check.families():
        types = ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "glm4_moe"]
        known = {"text": [*types, "deepseek_v3", "gpt2", "inkling_text"], "image": ["gemma4", "qwen2_5_vl"]}
        monkeypatch.setattr(block_check, "families", lambda: known)
