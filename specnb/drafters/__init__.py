"""The drafters, one module each; `assemble` makes what a method names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specnb.decoding.cached import CachedLM
from specnb.decoding.contracts import Drafter, Row
from specnb.drafters.draft_model import DraftModel
from specnb.drafters.early_exit import EarlyExitTarget
from specnb.drafters.prompt_lookup import PromptLookup

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Run:
    """What a method gets to work with: the models, the rows and its options in effect.

    `size` has `capacity` and `prefill_chunk_size` of a cache; `given` what else the target's CachedLM takes.
    """

    model: PreTrainedModel
    rows: Sequence[Row]
    options: Mapping[str, Any]
    sample: bool
    eos: Collection[int]
    size: Mapping[str, Any]
    given: Mapping[str, Any]
    assistant_model: PreTrainedModel | None = None

    def target(self, **more: Any) -> CachedLM:
        return CachedLM(self.model, self.rows, **self.size, **self.given, **more)

    def drafting(self, device: torch.device) -> dict[str, Any]:
        """How a drafter with a law of its own draws: the arguments of that name."""
        return {"sample": self.sample, "threshold": self.options["assistant_confidence_threshold"], "device": device}


def _plain(run: Run) -> tuple[CachedLM, Drafter | None]:
    return run.target(), None


def _prompt_lookup(run: Run) -> tuple[CachedLM, Drafter]:
    return run.target(), PromptLookup(run.options["max_matching_ngram_size"], run.eos)


def _draft_model(run: Run) -> tuple[CachedLM, Drafter]:
    if run.assistant_model is None:
        raise ValueError("method 'draft_model' needs assistant_model=: a smaller model with the same tokenizer.")
    target = run.target()
    lm = CachedLM(run.assistant_model, run.rows, **run.size)
    return target, DraftModel(lm, target.vocab_size, **run.drafting(target.device))


def _early_exit(run: Run) -> tuple[CachedLM, Drafter]:
    target = EarlyExitTarget(run.model, run.rows, run.options["assistant_early_exit"], **run.size, **run.given)
    return target, DraftModel(target.lower, target.vocab_size, **run.drafting(target.device))


_METHODS: dict[str, Callable[[Run], tuple[CachedLM, Drafter | None]]] = {
    "plain": _plain,
    "prompt_lookup": _prompt_lookup,
    "draft_model": _draft_model,
    "early_exit": _early_exit,
}


def assemble(method: str, run: Run) -> tuple[CachedLM, Drafter | None]:
    """The target and the drafter of a method, for one run. Raises ValueError where the models cannot do it."""
    return _METHODS[method](run)
