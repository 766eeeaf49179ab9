"""Train the embedded checkpoints: `python -m tools.embedded_models.train [--only NAME] [--to FOLDER]`.

Each model's folder is complete and loadable when its training ends. `log.json` beside this file has the logs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from specnb.models.embedded import FOLDER
from tools.embedded_models import gemma4, glm4_moe, llama, qwen3_5

HERE = Path(__file__).parent

RECIPES: dict[str, tuple[Callable[[Path, Sequence[int]], dict[str, Any]], tuple[int, ...]]] = {
    "tiny-llama": (llama.target, (2600, 2500)),
    "tiny-llama-draft": (llama.draft, (800,)),
    "tiny-llama-other": (llama.other, (1000,)),
    "tiny-gemma4": (gemma4.target, (2000, 1200)),
    "tiny-gemma4-assistant": (gemma4.assistant, (800,)),
    "tiny-glm4-moe": (glm4_moe.target, (1400, 2000)),
    "tiny-glm4-moe-mtp2": (partial(glm4_moe.target, layers=2), (1400, 2000)),
    "tiny-qwen3-5": (qwen3_5.target, (1200, 1000)),
}
"""For each model: the function that makes it and the steps of each part. A drafter comes after its target."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded checkpoints (one thread, seeded).")
    parser.add_argument("--only", choices=list(RECIPES), help="train one model; its target must be there already")
    parser.add_argument("--to", type=Path, default=FOLDER, help="folder that gets the models' folders")
    parser.add_argument("--steps", type=int, nargs="+", help="number of steps (of each part), instead of the recipe's")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for name in [arguments.only] if arguments.only else RECIPES:
        make, steps = RECIPES[name]
        folder = arguments.to / name
        folder.mkdir(parents=True, exist_ok=True)
        keep(name, make(folder, arguments.steps or steps), arguments.to)


def keep(name: str, log: dict[str, Any], to: Path) -> None:
    """Put a model's log into the file of logs."""
    file = (HERE if to == FOLDER else to) / "log.json"
    logs = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    logs[name] = log
    lines = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in logs.items())
    file.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
