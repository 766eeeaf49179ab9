"""One thread, no network, no chatter: the same on every machine."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from IPython.core.interactiveshell import InteractiveShell
from transformers.utils import logging

torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()

# A test's shell would empty itself at exit, which takes a minute with all of torch loaded.
InteractiveShell.atexit_operations = lambda self: None  # type: ignore[method-assign]
