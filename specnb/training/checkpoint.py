"""The state of a training on disk, so that it can go on: weights, optimizer, history. Tensors only, no code."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specnb.training.fitting import Fitting
from specnb.training.result import Evaluation

FILE = "checkpoint.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # of AdamW, per parameter


def write(folder: Path, fitting: Fitting) -> None:
    """Write the state of a training. The file is replaced as a whole, so an interrupt leaves a complete one.

    Raises:
        OSError: the disk is full; the last complete one is kept.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in fitting.objective.drafter.state_dict().items():
        tensors[f"now.{name}"] = value.detach()
    for name, value in fitting.best_weights.items():
        tensors[f"best.{name}"] = value
    for name, state in _states(fitting).items():
        for moment in _MOMENTS:
            if moment in state:
                tensors[f"optimizer.{name}.{moment}"] = state[moment]
    facts = {
        "step": fitting.step,
        "trained_seconds": fitting.trained_seconds,
        "history": [asdict(one) for one in fitting.history],
        "best": None if fitting.best is None else asdict(fitting.best),
    }
    part = folder / f"{FILE}.part"
    whole = {name: value.cpu().contiguous().clone() for name, value in tensors.items()}
    try:
        save_file(whole, part, metadata={"specnb": json.dumps(facts)})
        part.replace(folder / FILE)
    except Exception as error:  # OSError, or safetensors' own kind
        part.unlink(missing_ok=True)
        raise OSError(
            f"the state of the training cannot be written to {folder}: {error}. Free some space there; resume=True "
            "goes on from the last one that was complete."
        ) from error


def read(folder: Path, fitting: Fitting) -> None:
    """Go on with the state in a folder, if there is one.

    Raises:
        ValueError: it is that of another drafter.
    """
    if not (folder / FILE).exists():
        return
    with _opened(folder / FILE) as file:
        facts = json.loads((file.metadata() or {}).get("specnb", "{}"))
        tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
    mine, theirs = fitting.objective.drafter.state_dict(), _part(tensors, "now.")
    same = mine.keys() == theirs.keys() and all(mine[name].shape == theirs[name].shape for name in mine)
    if not same or not torch.equal(mine["d2t"].cpu(), theirs["d2t"]):
        raise ValueError(
            f"{folder / FILE} is of another training: the draft vocabulary or the drafter's shape differs, since "
            "prompts or options are not those that it was begun with. Give the same ones, or remove that file to train "
            "anew with the answers that are kept."
        )
    try:
        fitting.objective.drafter.load_state_dict(theirs)
        fitting.step, fitting.trained_seconds = facts["step"], facts["trained_seconds"]
        fitting.history = [Evaluation.from_json(one) for one in facts["history"]]
        fitting.best = Evaluation.from_json(facts["best"])
    except (RuntimeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / FILE} belongs to another training ({' '.join(str(error).split())[:200]}): resume with the "
            "options and prompts that it was begun with, or give another out=."
        ) from error
    fitting.best_weights = _part(tensors, "best.")
    for name, parameter in fitting.objective.drafter.named_parameters():
        state = {moment: tensors.get(f"optimizer.{name}.{moment}") for moment in _MOMENTS}
        if all(value is not None for value in state.values()):
            device = parameter.device
            fitting.optimizer.state[parameter] = {
                moment: value if moment == "step" else value.to(device)  # type: ignore[union-attr]
                for moment, value in state.items()
            }


def _opened(path: Path) -> Any:
    """A safetensors file. Raises ValueError if it is damaged."""
    try:
        return safe_open(path, "pt")
    except Exception as error:  # of safetensors' own kind
        raise ValueError(
            f"{path} is damaged ({error}): remove it to train anew with the answers that are kept."
        ) from None


def _states(fitting: Fitting) -> dict[str, dict[str, Any]]:
    """The optimizer's state by the parameter's name."""
    state = fitting.optimizer.state
    return {name: state[one] for name, one in fitting.objective.drafter.named_parameters() if one in state}


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
