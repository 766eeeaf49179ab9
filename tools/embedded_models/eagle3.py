"""tiny-llama-eagle3: an EAGLE-3 drafter for tiny-llama, trained with `specnb.train_drafter` itself."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

import specnb
from specnb.models.eagle3_files import load_eagle3
from specnb.training import Progress
from tools.embedded_models.data import Writer
from tools.embedded_models.fitting import save_half, set_config

TARGET = "tiny-llama"
PROMPTS, HELD_OUT = 1600, 24


def prompts() -> list[str]:
    """What the target is asked: the first messages of training chats, all different."""
    writer, found = Writer(31), dict.fromkeys(())
    while len(found) < PROMPTS:
        found[writer.chat()[0].content] = None
    return list(found)


def drafter(folder: Path, steps: Sequence[int]) -> dict[str, Any]:
    """One layer that reads three layers' states; it learns from the target's answers to the prompts of its world."""
    asked = prompts()

    def on_progress(progress: Progress) -> None:
        print(progress.message, flush=True)

    with tempfile.TemporaryDirectory() as place:
        result = specnb.train_drafter(
            specnb.load(str(folder.parent / TARGET)),
            asked[HELD_OUT:],
            out=Path(place) / "out",
            held_out=asked[:HELD_OUT],
            steps=sum(steps),
            learning_rate=3e-3,
            rows=64,
            max_new_tokens=128,
            draft_vocab_size=1024,
            ttt_steps=5,
            on_progress=on_progress,
        )
        for name in ("config.json", "model.safetensors"):
            shutil.copy(Path(place) / "out" / name, folder / name)
    save_half(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    stored = load_eagle3(TARGET, str(folder)).config.speculators_config
    stored["verifier"]["name_or_path"] = TARGET
    set_config(folder / "config.json", dtype="float32", speculators_config=stored)
    log = [{"step": one.step, "loss": one.loss, "acceptance": list(one.acceptance)} for one in result.history]
    return {
        "steps": result.history[-1].step,
        "tokens": int(result.counts["training tokens"]),
        "seconds": round(sum(result.seconds.values())),
        "log": log,
    }
