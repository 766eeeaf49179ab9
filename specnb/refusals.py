"""What cannot be done exactly is refused by name before the first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel

from specnb.decoding.feed import forward_parameters
from specnb.decoding.prepared import cached_length
from specnb.options import BY_NAME, Method

if TYPE_CHECKING:
    from specnb.decoding.contracts import Row
    from specnb.decoding.probabilities import Processors

_PLAIN = "Use transformers' own generate() for this, without specnb."
# option of generate(): (values that change nothing, why it is refused otherwise)
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), "beam search keeps several hypotheses; speculative decoding follows one per row"),
    "penalty_alpha": ((None, 0, 0.0), "contrastive search chooses by hidden states of all candidates"),
    "guidance_scale": ((None, 1, 1.0), "its processor runs the model on a text of its own at every position"),
    "dola_layers": ((None,), "DoLa compares layers, which is another target than the model"),
    "constraints": ((None,), "constrained search needs beams"),
    "force_words_ids": ((None,), "constrained search needs beams"),
    "use_cache": ((None, True), "every step relies on the cache"),
    "token_healing": ((None, False), "it rewrites the prompt"),
    "output_attentions": ((None, False), "rejected positions have no place in that output"),
    "output_hidden_states": ((None, False), "rejected positions have no place in that output"),
}


def check_options(options: Mapping[str, Any] | GenerationConfig) -> None:
    """Raise ValueError for an option (or generation-config value) that cannot be honoured exactly."""
    for name, (harmless, why) in _REFUSED.items():
        value = options.get(name) if isinstance(options, Mapping) else getattr(options, name, None)
        if value not in harmless:
            raise ValueError(f"{name}={value!r} cannot be combined with speculative decoding: {why}. {_PLAIN}")


def check_names(model: PreTrainedModel, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument that nobody knows and that is nearly the name of one; transformers refuses the others."""
    known = {
        *vars(model.generation_config),
        *signature(type(model).generate).parameters,
        *forward_parameters(type(model)),
    }
    for name in options:
        near = [] if name in known else get_close_matches(name, [*known, *BY_NAME], 1, 0.85)
        if near:
            raise ValueError(f"unknown option {name!r}. Did you mean {near[0]!r}?")


def check_model(model: PreTrainedModel, inputs: Mapping[str, Any]) -> None:
    """Raise ValueError for a model or an input that the engine does not handle."""
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model; specnb decodes decoder-only models (its drafters continue "
            f"the prompt itself). {_PLAIN}"
        )
    check_mode(model)
    if inputs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds cannot be used: drafters and logits processors need token ids. Give input_ids.")


def check_mode(model: PreTrainedModel) -> None:
    """Raise ValueError for a model in training mode, where that changes what it computes or keeps."""
    if not model.training:
        return
    name = type(model).__name__
    if getattr(model, "is_gradient_checkpointing", False):
        raise ValueError(
            f"{name} is in training mode with gradient checkpointing, where its layers keep no cache: call model.eval() first."
        )
    random = next((key for key, module in model.named_modules() if module.training and _drops(module)), None)
    if random is not None:
        raise ValueError(
            f"{name} is in training mode, and {random} drops values at random, so no text is the model's own: call "
            "model.eval() first."
        )


def _drops(module: Any) -> bool:
    """Whether a module has a dropout of its own, or hands one to its attention."""
    rates = [vars(module).get("p")] if isinstance(module, nn.modules.dropout._DropoutNd) else []
    rates.append(vars(module).get("attention_dropout"))
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def check_past(past: Any, rows: Sequence[Row], pads: Sequence[int]) -> None:
    """Raise ValueError for a filled prompt cache that cannot be continued."""
    if not isinstance(past, Cache):
        return
    held = cached_length(past)
    if not held and not (past.is_initialized and all(past.is_linear if hasattr(past, "is_linear") else ())):
        return
    if not isinstance(past, DynamicCache) or not held:
        raise ValueError(
            f"a filled {type(past).__name__} cannot be continued; give a DynamicCache of attention layers, or no cache at all."
        )
    if len(rows) > 1:
        raise ValueError("a filled cache can be continued for one prompt at a time only.")
    if pads[0]:
        raise ValueError("a filled cache can be continued for a prompt without padding only.")
    if held >= len(rows[0].ids):
        raise ValueError(
            f"the cache holds {held} tokens but the prompt has {len(rows[0].ids)}: input_ids must be the whole text, what is "
            "cached and at least one new token."
        )


def check_rule(method: Method, sample: bool, processors: Processors) -> None:
    """Raise ValueError where the acceptance rule would call a processor with a state out of order."""
    if sample and method.options.get("verification") == "block" and processors.foreign:
        raise ValueError(
            f"verification='block' looks at all drafted positions before deciding, but {', '.join(processors.foreign)} may "
            "look at all rows or keep state from call to call; use verification='token'."
        )
