"""Makes the target's LM and the drafter of a method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from specnb.decoding.contracts import Drafter, Row, Unsupported
from specnb.decoding.lm.base import LM, LMOptions
from specnb.decoding.lm.block_check import check_draft
from specnb.decoding.lm.cached_lm import CachedLM
from specnb.decoding.lm.create import create_lm
from specnb.decoding.lm.model_inputs import CacheSize, PreparedInputs
from specnb.drafters.dflash import DFlash
from specnb.drafters.draft_builder import DraftSampling
from specnb.drafters.draft_model import DraftModel
from specnb.drafters.eagle3 import Eagle3
from specnb.drafters.early_exit import early_exit
from specnb.drafters.gemma4_assistant import Gemma4Assistant
from specnb.drafters.hybrid import Hybrid
from specnb.drafters.mtp_layers import mtp_drafter
from specnb.drafters.prompt_lookup import PromptLookup
from specnb.drafters.registered import DrafterContext, RegisteredDrafter
from specnb.drafters.suffix import Limits, Suffix
from specnb.drafters.universal import Universal, retokenize_rows
from specnb.memory import Memory
from specnb.models.dflash import settings_of
from specnb.models.eagle3 import Eagle3Drafter
from specnb.models.mtp import load_mtp
from specnb.options import MethodInfo, method_info
from specnb.text import text_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MethodContext:
    """What a method needs: the models, the rows and its options in effect.

    Args:
        size: of a kv cache.
        prepared: what `generate()` prepared for the target.
        probabilities: drafts report the probability of each token.
        top_logprobs: drafts report this many of the best tokens at each position.
        memory: past requests, for suffix decoding.
        prediction: token ids of an output that is expected to be similar, for suffix decoding.
    """

    model: PreTrainedModel
    rows: Sequence[Row]
    options: Mapping[str, Any]
    sample: bool
    eos: Collection[int]
    size: CacheSize
    prepared: PreparedInputs
    assistant_model: PreTrainedModel | None = None
    tokenizer: Any = None
    assistant_tokenizer: Any = None
    probabilities: bool = False
    top_logprobs: int = 0
    memory: Memory | None = None
    prediction: Sequence[int] = ()

    def target(self, **kwargs: Any) -> LM:
        """The target's LM; `kwargs` go to `create_lm`."""
        return create_lm(self.model, self.rows, self.size, prepared=self.prepared, **kwargs)

    def assistant(self, rows: Sequence[Any] | None = None, **kwargs: Any) -> LM:
        """The draft model's LM.

        If the prompts may have images, the draft model reads them here, since it may not be able to.

        Args:
            rows: what the LM follows, if not the context's rows.
            kwargs: for `create_lm`.
        """
        model, rows = self.assistant_model, rows or self.rows
        assert model is not None
        lm = create_lm(model, rows, self.size, role="draft model", **kwargs)
        if self.prepared.inputs.extras or model.config.get_text_config(decoder=True) is not model.config:
            check_draft(model, lm, rows)
        return lm

    def sampling(self, target: LM) -> DraftSampling:
        """How a drafter picks tokens from its logits."""
        return DraftSampling(
            sample=self.sample,
            keep_probs=self.sample or self.options.get("assistant_ensemble_weight") is not None,
            threshold=self.options["assistant_confidence_threshold"],
            probabilities=self.probabilities,
            device=target.device,
            vocab_size=target.vocab_size,
            top_logprobs=self.top_logprobs,
        )


def _plain(context: MethodContext) -> tuple[LM, Drafter | None]:
    return context.target(rolls_back=False), None


def _prompt_lookup(context: MethodContext) -> tuple[LM, Drafter]:
    target = context.target()
    return target, _lookup("prompt_lookup", context, target)


def _suffix(context: MethodContext) -> tuple[LM, Drafter]:
    target = context.target()
    return target, _lookup("suffix", context, target)


def _lookup(name: str, context: MethodContext, target: LM, alone: bool = True) -> PromptLookup | Suffix:
    """A drafter that copies, alone or as part of a hybrid."""
    options = context.options
    if name == "prompt_lookup":
        return PromptLookup(options["max_matching_ngram_size"], context.eos)
    names = ("max_tree_depth", "max_spec_factor", "min_token_prob")
    limits = Limits(*(options[f"suffix_decoding_{name}"] for name in names))
    # A sampled text depends on what is drafted where a hybrid's other part draws its tokens: not on a memory, then.
    fixed = context.sample and not alone
    memory, prediction = (None, ()) if fixed else (context.memory, context.prediction)
    return Suffix(memory, prediction, limits, context.eos, target.vocab_size)


def _draft_model(context: MethodContext) -> tuple[LM, Drafter]:
    target, lm = context.target(), context.assistant(options=LMOptions(clamp_ids=True))
    return target, DraftModel(lm, context.sampling(target))


def _early_exit(context: MethodContext) -> tuple[LM, Drafter]:
    target, lower = early_exit(
        context.model, context.rows, context.options["assistant_early_exit"], context.size, context.prepared
    )
    return target, DraftModel(lower, context.sampling(target))


def _universal(context: MethodContext) -> tuple[LM, Drafter]:
    if context.tokenizer is None or context.assistant_tokenizer is None:
        raise ValueError(
            "method 'universal' needs tokenizer= and assistant_tokenizer=, to convert the tokens of one to those of "
            "the other."
        )
    target = context.target()
    tokenizers = text_tokenizer(context.tokenizer), text_tokenizer(context.assistant_tokenizer)
    retokenized = retokenize_rows(context.rows, *tokenizers)
    lm = context.assistant(retokenized)
    return target, Universal(
        lm,
        retokenized,
        tokenizers,
        context.sampling(target),
        shared=context.sample or context.options.get("assistant_ensemble_weight") is not None,
    )


def _mtp_layers(context: MethodContext) -> tuple[LM, Drafter]:
    mtp = load_mtp(context.model)
    target = context.target(options=LMOptions(hidden_states="all"))
    return target, mtp_drafter(mtp, target, context.rows, context.size.capacity, context.sampling(target))


def _eagle3(context: MethodContext) -> tuple[LM, Drafter]:
    drafter = context.assistant_model
    assert isinstance(drafter, Eagle3Drafter)
    layers = drafter.config.target_layers(int(context.model.config.get_text_config(decoder=True).num_hidden_layers))
    target = context.target(options=LMOptions(hidden_states="all", layers=layers))
    return target, Eagle3(drafter, target, context.rows, context.size.capacity, context.sampling(target))


def _dflash(context: MethodContext) -> tuple[LM, Drafter]:
    drafter = context.assistant_model
    assert drafter is not None
    _check_shared_weights(context.model)
    target = context.target(options=LMOptions(hidden_states="all", layers=settings_of(drafter).layers))
    return target, DFlash(drafter, target, context.rows, context.size.capacity, context.sampling(target))


def _check_shared_weights(model: PreTrainedModel) -> None:
    """Raise Unsupported if the target's embedding or head, which a DFlash drafter shares, is offloaded."""
    parts = model.get_input_embeddings(), model.get_output_embeddings()
    if any(parameter.is_meta for part in parts for parameter in part.parameters()):
        raise Unsupported(
            f"a DFlash drafter shares the embedding and the head of {type(model).__name__}, which are offloaded: "
            "load it without offloading them, or use another method."
        )


def _gemma4_assistant(context: MethodContext) -> tuple[LM, Drafter]:
    assert context.assistant_model is not None
    target = context.target(options=LMOptions(hidden_states="kept"))
    if not isinstance(target, CachedLM):
        raise ValueError(
            f"the Gemma 4 drafter reads the target's keys and values, which {type(context.model).__name__} keeps in "
            "another way: use another method, or generate the prompts one by one."
        )
    return target, Gemma4Assistant(context.assistant_model, target, context.sampling(target))


def _registered(info: MethodInfo, context: MethodContext) -> tuple[LM, Drafter]:
    target = context.target()
    given = DrafterContext(
        model=context.model,
        tokenizer=context.tokenizer,
        vocab_size=target.vocab_size,
        device=target.device,
        eos=frozenset(context.eos),
        sample=context.sample,
        options=MappingProxyType(dict(context.options)),
    )
    return target, RegisteredDrafter(info, given, context.top_logprobs, context.probabilities)


_METHODS: dict[str, Callable[[MethodContext], tuple[LM, Drafter | None]]] = {
    "plain": _plain,
    "prompt_lookup": _prompt_lookup,
    "suffix": _suffix,
    "draft_model": _draft_model,
    "early_exit": _early_exit,
    "mtp_layers": _mtp_layers,
    "eagle3": _eagle3,
    "dflash": _dflash,
    "gemma4_assistant": _gemma4_assistant,
    "universal": _universal,
}


def build_method(method: str, context: MethodContext) -> tuple[LM, Drafter | None]:
    """The target's LM and the drafter of a method; None as drafter for plain decoding.

    Raises:
        ValueError: the models cannot be used for it.
    """
    info = method_info(method)
    if info.parts is not None:
        lookup, model = info.parts
        target, drafter = _METHODS[model](context)
        assert drafter is not None
        copies = _lookup(lookup, context, target, alone=False)
        return target, Hybrid(copies, drafter, info.parts, learns=isinstance(copies, PromptLookup))
    return _METHODS[method](context) if info.factory is None else _registered(info, context)


def runtime_by_role(target: LM, drafter: Drafter | None) -> dict[str, dict[str, Any]]:
    """The runtime optimizations of the models, by role (see `GenerationResult.runtime`)."""
    lm = getattr(drafter, "lm", None)
    roles = {"target": target} if lm is None else {"target": target, "assistant": lm}
    return {
        role: {**asdict(one.runtime), "state_snapshot_bytes": one.state_snapshot_bytes} for role, one in roles.items()
    }
