"""Gemma 4's MTP drafter: recognises it, and checks that it was made for the target."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def is_gemma4_assistant(model: Any) -> bool:
    """Whether a model is a Gemma 4 MTP drafter."""
    return type(model).__name__ in ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")


def check_assistant(target: PreTrainedModel, assistant: PreTrainedModel) -> None:
    """Check that a drafter was made for the target.

    Raises:
        ValueError: it was made for another one. The message names both and what differs.
    """
    config, own = target.config.get_text_config(decoder=True), assistant.config.get_text_config(decoder=True)
    names = f"{type(assistant).__name__} cannot draft for {type(target).__name__}"
    if not str(config.model_type).startswith("gemma4"):
        raise ValueError(f"{names}: it attends to the keys and values of a Gemma 4 target.")
    if assistant.config.backbone_hidden_size != config.hidden_size:
        raise ValueError(
            f"{names}: it was made for a hidden size of {assistant.config.backbone_hidden_size}, the target has "
            f"{config.hidden_size}. Use the assistant of the same name as the target."
        )
    if own.vocab_size != config.vocab_size:
        raise ValueError(f"{names}: its vocabulary has {own.vocab_size} tokens, the target's {config.vocab_size}.")
    theirs, mine = _attentions(target), _attentions(assistant)
    missing = mine.keys() - theirs.keys()
    if missing:
        raise ValueError(
            f"{names}: it needs keys and values of {', '.join(sorted(missing))} layers, which the target does not "
            "share."
        )
    for kind, attention in mine.items():
        shape, wanted = _heads(theirs[kind]), _heads(attention)
        if shape != wanted:
            raise ValueError(
                f"{names}: its {kind} layers read {wanted[0]} key/value heads of size {wanted[1]}, the target has "
                f"{shape[0]} of size {shape[1]}."
            )


def _attentions(model: PreTrainedModel) -> dict[str, Any]:
    """Per kind of layer, the attention whose keys and values are shared: the last one with a k_proj, else the first."""
    found: dict[str, Any] = {}
    for layer in model.get_decoder().layers:
        attention = layer.self_attn
        if hasattr(attention, "k_proj") or attention.layer_type not in found:
            found[attention.layer_type] = attention
    return found


def _heads(attention: Any) -> tuple[int, int]:
    """Number and size of the key/value heads of an attention module."""
    return attention.q_proj.out_features // attention.head_dim // attention.num_key_value_groups, attention.head_dim
