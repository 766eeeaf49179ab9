"""`%specmemory`: show, save, load or clear the session's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specnb.memory import Memory
from specnb.notebook.arguments import MEMORY_ACTIONS
from specnb.notebook.session import Session
from specnb.options import unknown


def manage_memory(session: Session, options: Mapping[str, Any]) -> None:
    """Do what the line asks for, and print the memory, or all memories.

    Args:
        options: `action`, `file` and `model`, as far as they were typed.

    Raises:
        ValueError: there is no such action, or a file is missing or superfluous.
        OSError: the file cannot be read or written.
    """
    action, file = options.get("action"), options.get("file", "")
    if action is not None and action not in MEMORY_ACTIONS:
        raise ValueError("%specmemory: " + unknown("action", action, MEMORY_ACTIONS))
    if action is not None and MEMORY_ACTIONS[action] != bool(file):
        raise ValueError(f"write %specmemory {action}{' FILE' if MEMORY_ACTIONS[action] else ', without a file'}.")
    if action is None and "model" not in options:
        for memory in session.memories.values():
            print(memory)
        if not session.memories:
            print("the session's memory is empty")
        return
    pair = session.pair(options.get("model"))
    if action == "load":
        session.set_memory(pair, Memory.load(file))
    memory = session.memory(pair)
    if action == "save":
        memory.save(file)
    if action == "clear":
        memory.clear()
    print(memory)
