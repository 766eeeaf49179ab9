"""Whether sampled texts follow the target's distribution: their first two tokens against transformers' scores."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

if TYPE_CHECKING:
    from .draws import Draw
    from .judge import Outcome

ROWS = 384  # samples
SIMULATIONS = 2000  # true samples: a finding is farther from the distribution than all of them


class Forced(LogitsProcessor):
    """Makes row i's first token i; later ones are drawn. It runs last: the scores it gets are the distribution."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.probs: list[Tensor] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.probs.append(scores.double().softmax(-1))
        if ids.shape[1] > self.width:
            return scores
        return torch.full_like(scores, -torch.inf).fill_diagonal_(0.0)


def check(draw: Draw) -> Outcome:
    """The outcome for a sampled draw that is right in everything else."""
    from .judge import Outcome, call, load

    drafted = draw.method in ("draft_model", "early_exit") and draw.drafting.get("assistant_ensemble_weight") is None
    simple = not draw.own and draw.cache == "none" and not draw.image and draw.dtype == "float32" and draw.pad == 0
    fixed = {
        name for name in draw.options if "eos" in name or name.startswith(("num_", "output", "forced", "cache_imp"))
    }
    if not (drafted and simple and draw.wrapper == "none" and draw.entry != "pipeline") or fixed:
        return Outcome("distribution", detail="not compared")
    alone = replace(draw, rows=draw.rows[:1], new=2, entry="generate")
    try:
        exact = _exact(load(alone))
    except Exception:  # transformers' own sampling cannot do these rows
        return Outcome("distribution", detail="not compared")
    side = call(load(replace(alone, rows=draw.rows[:1] * ROWS)), "ours")
    if side.error is not None:
        return Outcome("distribution", detail="several rows are refused")
    assert side.tokens is not None
    for place in (0, 1):
        counts = torch.zeros(len(exact[place]), dtype=torch.float64)
        for row in side.tokens:
            counts[row[place]] += 1
        far = _distance(counts / len(side.tokens), exact[place])
        if far > _noise(exact[place], len(side.tokens)):
            return Outcome(
                "another distribution",
                f"token {place}",
                f"total variation {far:.3f} from the target's distribution of token {place}",
            )
    return Outcome("distribution", detail="compared")


def _exact(space: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The distributions `[vocab]` of the first and the second token."""
    model = space["model"]()
    given = space["inputs"](model)
    width = given["input_ids"].shape[1]
    vocab = int(model.config.get_text_config(decoder=True).vocab_size)
    given = {name: value.repeat(vocab, *[1] * (value.dim() - 1)) for name, value in given.items()}
    forced = Forced(width)
    last = model._get_logits_processor

    def get(*args: Any, **more: Any) -> Any:
        made = last(*args, **more)
        made.append(forced)
        return made

    model._get_logits_processor = get
    with torch.random.fork_rng():
        model.generate(**given, **space["options"]())
    first, second = forced.probs[0][0], forced.probs[1]
    return first, (first[:, None] * second).sum(0)


def _distance(share: Tensor, exact: Tensor) -> float:
    return float((share - exact).abs().sum(-1).max() / 2)


def _noise(exact: Tensor, samples: int) -> float:
    """The distance of the farthest of many true samples, and a tenth more."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(exact.clamp_min(0), samples * SIMULATIONS, replacement=True, generator=generator)
    counts = torch.zeros(SIMULATIONS, len(exact), dtype=torch.float64)
    counts.scatter_add_(1, drawn.view(SIMULATIONS, samples), torch.ones(SIMULATIONS, samples, dtype=torch.float64))
    return _distance(counts / samples, exact) * 1.1 + 1e-6
