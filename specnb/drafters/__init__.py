"""The drafters, one module each; `assemble` makes what a method names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specnb.decoding.cached import CachedLM
from specnb.decoding.contracts import Drafter, Row, Unsupported
from specnb.decoding.follow import Given, Size, follow
from specnb.decoding.lm import LM, model_device
from specnb.decoding.store import other_layers
from specnb.decoding.trial import check_draft
from specnb.drafters.draft_model import DraftModel
from specnb.drafters.early_exit import early_exit
from specnb.drafters.gemma4_assistant import Gemma4Assistant
from specnb.drafters.growing import Drawing
from specnb.drafters.mtp_layers import MtpLayers
from specnb.drafters.prompt_lookup import PromptLookup
from specnb.drafters.universal import Universal, readings_of
from specnb.models.gemma4 import is_gemma4_assistant
from specnb.models.mtp import load_mtp, num_mtp_layers
from specnb.models.pair import check_pair
from specnb.options import Method
from specnb.text import text_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Run:
    """What a method gets to work with: the models, the rows and its options in effect.

    `size` is that of a cache; `given` what `generate()` prepared for the target; `probabilities` has the drafts tell how
    probable their tokens were, `top_logprobs` so many of the best at each place.
    """

    model: PreTrainedModel
    rows: Sequence[Row]
    options: Mapping[str, Any]
    sample: bool
    eos: Collection[int]
    size: Size
    given: Given
    assistant_model: PreTrainedModel | None = None
    tokenizer: Any = None
    assistant_tokenizer: Any = None
    probabilities: bool = False
    top_logprobs: int = 0

    def target(self, **more: Any) -> LM:
        return follow(self.model, self.rows, self.size, given=self.given, **more)

    def assistant(self, rows: Sequence[Any] | None = None, **more: Any) -> LM:
        """The draft model's LM. Where an image could be missing, it reads the prompts at once: it may not be able to."""
        model, rows = self.assistant_model, rows or self.rows
        assert model is not None
        lm = follow(model, rows, self.size, role="draft model", **more)
        if self.given.feed.extras or model.config.get_text_config(decoder=True) is not model.config:
            check_draft(model, lm, rows)
        return lm

    def drawing(self, target: LM) -> Drawing:
        """How a drafter with a law of its own picks its tokens."""
        laws = self.sample or self.options["assistant_ensemble_weight"] is not None
        threshold = self.options["assistant_confidence_threshold"]
        return Drawing(
            self.sample, laws, threshold, self.probabilities, target.device, target.vocab_size, self.top_logprobs
        )


def _plain(run: Run) -> tuple[LM, Drafter | None]:
    return run.target(rolls_back=False), None


def _prompt_lookup(run: Run) -> tuple[LM, Drafter]:
    return run.target(), PromptLookup(run.options["max_matching_ngram_size"], run.eos)


def _draft_model(run: Run) -> tuple[LM, Drafter]:
    target, lm = run.target(), run.assistant(foreign_ids=True)
    return target, DraftModel(lm, run.drawing(target))


def _early_exit(run: Run) -> tuple[LM, Drafter]:
    target, lower = early_exit(run.model, run.rows, run.options["assistant_early_exit"], run.size, run.given)
    return target, DraftModel(lower, run.drawing(target))


def _universal(run: Run) -> tuple[LM, Drafter]:
    if run.tokenizer is None or run.assistant_tokenizer is None:
        raise ValueError(
            "method 'universal' needs tokenizer= and assistant_tokenizer=, to go from the one's tokens to the other's."
        )
    target, tokenizers = run.target(), (text_tokenizer(run.tokenizer), text_tokenizer(run.assistant_tokenizer))
    readings = readings_of(run.rows, *tokenizers)
    lm = run.assistant(readings)
    return target, Universal(
        lm,
        readings,
        tokenizers,
        run.drawing(target),
        shared=run.sample or run.options["assistant_ensemble_weight"] is not None,
    )


def _mtp_layers(run: Run) -> tuple[LM, Drafter]:
    kinds = sorted(set(other_layers(run.model.config).values()))
    if kinds:
        raise Unsupported(
            f"the MTP layers of {type(run.model).__name__} cannot draft: their cache ({', '.join(kinds)}) is more than keys and values. "
            "Use another method."
        )
    if any(parameter.is_meta for parameter in run.model.parameters()):
        raise Unsupported(
            f"the MTP layers of {type(run.model).__name__} cannot draft while the model is offloaded, since they share its embedding "
            "and head: load it without offloading, or use another method."
        )
    mtp = load_mtp(run.model)
    target = run.target(hidden_states="all")
    return target, MtpLayers(mtp, target, run.rows, run.size.capacity, run.drawing(target))


def _gemma4_assistant(run: Run) -> tuple[LM, Drafter]:
    assert run.assistant_model is not None
    target = run.target(hidden_states="kept")
    if not isinstance(target, CachedLM):
        raise ValueError(
            f"the Gemma 4 drafter reads the target's keys and values, which {type(run.model).__name__} keeps in another way: use "
            "another method, or generate the prompts one by one."
        )
    return target, Gemma4Assistant(run.assistant_model, target, run.drawing(target))


_METHODS: dict[str, Callable[[Run], tuple[LM, Drafter | None]]] = {
    "plain": _plain,
    "prompt_lookup": _prompt_lookup,
    "draft_model": _draft_model,
    "early_exit": _early_exit,
    "mtp_layers": _mtp_layers,
    "gemma4_assistant": _gemma4_assistant,
    "universal": _universal,
}


def method_for(
    model: PreTrainedModel, assistant_model: PreTrainedModel | None, tokenizer: Any, assistant_tokenizer: Any
) -> str | None:
    """The method that an assistant model is for: by its class, and by what the tokenizers do; None without one.

    Raises ValueError for a pair that cannot work.
    """
    fit = check_pair(model, tokenizer, assistant_model, assistant_tokenizer)
    if assistant_model is None:
        return None
    if is_gemma4_assistant(assistant_model):
        return "gemma4_assistant"
    return "universal" if fit.tokenizers == "different" else "draft_model"


def with_defaults(method: Method, model: PreTrainedModel, sample: bool) -> Method:
    """The method with the defaults that depend on the call.

    One drafted token per MTP layer. A length that was given, in the call or a config, is kept to. Otherwise it adapts to
    measured times where the text cannot depend on them. It can where a drafter is sampled from, in block verification and in a
    lossy ensemble (constant there), and in half precision, where block sizes may break ties differently (heuristic there, which
    goes by the acceptance alone).
    """
    options = dict(method.given)
    if method.options.get("num_assistant_tokens", 0) is None:
        options["num_assistant_tokens"] = max(1, num_mtp_layers(model))
    if method.options.get("num_assistant_tokens_schedule", "") is None:
        drawn = sample and (method.name != "prompt_lookup" or method.options.get("verification") == "block")
        lossy = method.options.get("assistant_ensemble_weight") is not None
        given = options.get("num_assistant_tokens") is not None  # one per MTP layer counts as given
        free = "heuristic" if _rounds(model) else "adaptive"
        options["num_assistant_tokens_schedule"] = "constant" if given or drawn or lossy else free
    return Method(method.name, **options)


def _rounds(model: PreTrainedModel) -> bool:
    """Whether a model computes in less than float32 anywhere, by its parameters or under autocast."""
    kinds = {parameter.dtype for parameter in model.parameters()}
    return not kinds <= {torch.float32, torch.float64} or torch.is_autocast_enabled(model_device(model).type)


def assemble(method: str, run: Run) -> tuple[LM, Drafter | None]:
    """The target and the drafter of a method, for one run. Raises ValueError where the models cannot do it."""
    return _METHODS[method](run)
