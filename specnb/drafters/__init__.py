"""The drafters, one module each; `build` makes the one that a method names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specnb.decoding.cached import CachedLM
from specnb.decoding.contracts import Drafter, Row
from specnb.drafters.draft_model import DraftModel
from specnb.drafters.prompt_lookup import PromptLookup
from specnb.options import Method

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Run:
    """What a drafter may want to know of the run it drafts for."""

    target: CachedLM
    rows: Sequence[Row]
    sample: bool
    eos: Collection[int]
    size: Mapping[str, Any]  # capacity and prefill_chunk_size of a cache
    assistant_model: PreTrainedModel | None = None


def build(method: Method, run: Run) -> Drafter | None:
    """The drafter of `method` for one run; None for plain decoding."""
    options: dict[str, Any] = method.options
    if method.name == "prompt_lookup":
        return PromptLookup(options["max_matching_ngram_size"], run.eos)
    if method.name == "draft_model":
        if run.assistant_model is None:
            raise ValueError("method 'draft_model' needs assistant_model=, a smaller model with the same tokenizer.")
        lm = CachedLM(run.assistant_model, run.rows, **run.size)
        return DraftModel(lm, run.target.vocab_size, sample=run.sample, threshold=options["assistant_confidence_threshold"],
                          device=run.target.device)  # fmt: skip
    return None
