"""Tiny EAGLE-3 checkpoints with weights that follow from their names, and what speculators 0.9.0 drafts with them.

`tests/peers/eagle3.py` writes `results/eagle3.json` with that library, in an environment of its own; the tests build
the same checkpoints for ours. Nothing here imports either.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

EXPECTED = Path(__file__).parent / "results" / "eagle3.json"
VOCAB, DRAFT_VOCAB, HIDDEN, STEPS = 64, 32, 32, 3
LAYERS = [2, 4, 5]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
IDS = torch.randint(0, VOCAB, (24,), generator=torch.Generator().manual_seed(2)).tolist()
T2D = torch.arange(VOCAB) % 2 == 0
D2T = T2D.nonzero().flatten() - torch.arange(DRAFT_VOCAB)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "all": {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
    "qwen3": {"kind": "qwen3"},
    "two layers": {"layers": 2},
    "qwen3, two layers, all": {
        "kind": "qwen3",
        "layers": 2,
        "norm_before_residual": True,
        "norm_output": True,
        "norm_before_fc": True,
    },
    "five target layers": {"target_layers": [0, 1, 4, 7, 8]},
}
"""By name, what differs from the plain drafter: a llama layer, states of `LAYERS`, no flag set."""


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """A tensor for each name: norms near 1, all else near 0."""
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode()))) * 0.2
        made[name] = noise + 1 if len(shape) == 1 else noise
    return made


def fill(model: Any) -> Any:
    """Give a model the weights of its parameters' names."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, value in weights(shapes).items():
            model.get_parameter(name).copy_(value)
    return model.eval()


def expected() -> dict[str, Any]:
    """What speculators drafted, by variant."""
    found: dict[str, Any] = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return found
