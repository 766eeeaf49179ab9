"""Which method an assistant is for, whether a method can draft for a target, and defaults that depend on the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specnb.decoding.contracts import Schedule, Unsupported
from specnb.decoding.lm.base import model_device
from specnb.decoding.lm.kv_cache import is_convolutional, standard_cache_layers, unsupported_cache_layers
from specnb.decoding.lm.snapshots import has_states
from specnb.decoding.schedules import SCHEDULES
from specnb.drafters.hybrid import HybridSchedule
from specnb.models.dflash import is_dflash, settings_of
from specnb.models.eagle3 import is_eagle3
from specnb.models.gemma4 import is_gemma4_assistant
from specnb.models.mtp import mtp_config, num_mtp_layers
from specnb.models.pair import check_pair
from specnb.options import Method, drafting_options, method_info, parts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_method(method: str, model: PreTrainedModel) -> None:
    """Check that a method can draft for a target, as far as that needs no pass and no checkpoint.

    Raises:
        Unsupported: it cannot; the message says why.
    """
    if parts_of(method)[-1] != "mtp_layers":
        return
    config = mtp_config(model)
    layers = standard_cache_layers(config) if config else ()
    states = {type(layer).__name__ for layer in layers if has_states(layer) and not is_convolutional(layer, config)}
    kinds = sorted({*unsupported_cache_layers(model.config).values()} | states)
    if kinds:
        raise Unsupported(
            f"the MTP layers of {type(model).__name__} cannot draft: their cache ({', '.join(kinds)}) is more "
            "than keys and values and the inputs of convolutions. Use another method."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise Unsupported(
            f"the MTP layers of {type(model).__name__} cannot draft while the model is offloaded, since they "
            "share its embedding and head: load it without offloading, or use another method."
        )


def drafter_kind(assistant_model: PreTrainedModel | None) -> str | None:
    """The method of an assistant model that can serve no other, by its class; None for an ordinary model."""
    kinds = {"eagle3": is_eagle3, "dflash": is_dflash, "gemma4_assistant": is_gemma4_assistant}
    return next((name for name, fits in kinds.items() if assistant_model is not None and fits(assistant_model)), None)


def assistant_method(
    model: PreTrainedModel, assistant_model: PreTrainedModel | None, tokenizer: Any, assistant_tokenizer: Any
) -> str | None:
    """The method that an assistant model is for, by its class and by a comparison of the tokenizers.

    Returns:
        A method's name; None without an assistant.

    Raises:
        ValueError: the pair cannot work.
    """
    fit = check_pair(model, tokenizer, assistant_model, assistant_tokenizer)
    if assistant_model is None:
        return None
    return drafter_kind(assistant_model) or ("universal" if fit.tokenizers == "different" else "draft_model")


def with_defaults(
    method: Method, model: PreTrainedModel, sample: bool, assistant_model: PreTrainedModel | None = None
) -> Method:
    """The method with the defaults that depend on the call.

    The draft length defaults to one token per MTP layer, or to a whole block of a DFlash drafter. A length that the
    call or a config gives is kept constant.
    Without one, the schedule is

    - "constant" if the text depends on the lengths: with a sampled drafter, block verification or a lossy ensemble;
    - "heuristic" in half precision, where block sizes may break ties differently and must not depend on measured times;
    - "adaptive" otherwise.
    """
    if (parts := method_info(method.name).parts) is not None:  # length and schedule are the model drafter's
        own = {name: value for name, value in method.given.items() if name in drafting_options(parts[1])}
        chosen = with_defaults(Method(parts[1], **own), model, sample, assistant_model).options
        names = ("num_assistant_tokens", "num_assistant_tokens_schedule")
        return Method(method.name, **{**method.given, **{name: chosen[name] for name in names}})
    options = dict(method.given)
    given = options.get("num_assistant_tokens") is not None
    if method.name == "dflash" and not given:
        options["num_assistant_tokens"] = settings_of(assistant_model).max_tokens
    elif method.options.get("num_assistant_tokens", 0) is None:
        given = True  # one token per MTP layer counts as given
        options["num_assistant_tokens"] = max(1, num_mtp_layers(model))
    if method.options.get("num_assistant_tokens_schedule", "") is None:
        copied = method.name in ("prompt_lookup", "suffix") and method.options.get("verification") != "block"
        sampled = sample and not copied
        lossy = method.options.get("assistant_ensemble_weight") is not None
        free = "heuristic" if _uses_half_precision(model) else "adaptive"
        options["num_assistant_tokens_schedule"] = "constant" if given or sampled or lossy else free
    return Method(method.name, **options)


def _uses_half_precision(model: PreTrainedModel) -> bool:
    """Whether a model computes in less than float32 anywhere, by its parameters or under autocast."""
    kinds = {parameter.dtype for parameter in model.parameters()}
    return not kinds <= {torch.float32, torch.float64} or torch.is_autocast_enabled(model_device(model).type)


def make_schedules(method: Method, model: PreTrainedModel, sample: bool, count: int) -> list[Schedule]:
    """A schedule for each of `count` rows.

    In a hybrid the lookup has one of its own: the options' length and schedule are those of the model drafter. Where
    drafts are sampled, its drafts must have a constant length too, since the text depends on what was drafted.
    """
    kind, k = (method.options.get(name) for name in ("num_assistant_tokens_schedule", "num_assistant_tokens"))
    parts = method_info(method.name).parts

    def one() -> Schedule:
        return SCHEDULES[kind or "constant"](k or 0)

    if parts is None:
        return [one() for _ in range(count)]
    lookup = with_defaults(Method(parts[0]), model, sample)
    free = "constant" if sample else lookup.options["num_assistant_tokens_schedule"]
    length = lookup.options["num_assistant_tokens"]
    return [HybridSchedule(SCHEDULES[free](length), one(), parts[0]) for _ in range(count)]
