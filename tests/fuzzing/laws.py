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
SIMULATIONS = (
    2000  # true samples, of which none may be as far from the distribution as ours is; one in so many findings is noise
)


class Forced(LogitsProcessor):
    """Row i's first token is i, then whatever is drawn. Comes last: the scores that reach it are the distribution."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.distributions: list[Tensor] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.distributions.append(scores.double().softmax(-1))
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
        distribution = _distribution(load(alone))
    except Exception:  # transformers' own sampling cannot do these rows
        return Outcome("distribution", detail="not compared")
    side = call(load(replace(alone, rows=draw.rows[:1] * ROWS)), "ours")
    if side.error is not None:
        return Outcome("distribution", detail="several rows are refused")
    assert side.tokens is not None
    for place in (0, 1):
        counts = torch.zeros(len(distribution[place]), dtype=torch.float64)
        for row in side.tokens:
            counts[row[place]] += 1
        far = _distance(counts / len(side.tokens), distribution[place])
        if far > _noise(distribution[place], len(side.tokens)):
            return Outcome(
                "another distribution",
                f"token {place}",
                f"total variation {far:.3f} from the target's distribution of token {place}",
            )
    return Outcome("distribution", detail="compared")


def _distribution(space: dict[str, Any]) -> tuple[Tensor, Tensor]:
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
    first, second = forced.distributions[0][0], forced.distributions[1]
    return first, (first[:, None] * second).sum(0)


def _distance(share: Tensor, distribution: Tensor) -> float:
    return float((share - distribution).abs().sum(-1).max() / 2)


def _noise(distribution: Tensor, samples: int) -> float:
    """How far the farthest of many true samples is, and a little."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(distribution.clamp_min(0), samples * SIMULATIONS, replacement=True, generator=generator)
    counts = torch.zeros(SIMULATIONS, len(distribution), dtype=torch.float64)
    counts.scatter_add_(1, drawn.view(SIMULATIONS, samples), torch.ones(SIMULATIONS, samples, dtype=torch.float64))
    return _distance(counts / samples, distribution) * 1.1 + 1e-6
