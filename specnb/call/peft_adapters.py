"""Models with peft adapters: adapters that only change weights are supported, all others are rejected by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from specnb import compat

# Types of adapters; tests/test_cases_peft.py compares each with peft's own generate().
_TYPES = (
    "LORA ADALORA ADAPTION_PROMPT BEFT BOFT C3A DEFT DELORA FOURIERFT FROD GLORA GRALORA HIRA HRA IA3 LN_TUNING LOHA "
    "LOKR MISS OFT OSF PEANUT PSOFT PVERA RANDLORA ROAD SHIRA SUPERTUNING TINYLORA TRAINABLE_TOKENS UNILORA VBLORA "
    "VERA WAVEFT"
)
WEIGHT_ONLY_TYPES = frozenset(_TYPES.split())
# Arguments of peft's generate() with a value per row; forward hooks hold them during a call.
PER_ROW_ARGUMENTS = {"adapter_names", "alora_offsets"}


def is_peft(model: Any) -> bool:
    """Whether `model` is a peft wrapper (PeftModel or PeftMixedModel)."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))


def unwrap_peft(name: str, model: Any) -> Any:
    """The transformers model inside a peft wrapper, with the adapters in it.

    Args:
        name: the argument's name, for messages.
        model: the wrapper.

    Raises:
        ValueError: an active adapter does more than change weights.
    """
    if getattr(model, "_adapters_disabled", False):
        prompts = getattr(model.active_peft_config, "is_prompt_learning", False)
        return model.base_model if prompts else model.base_model.model
    configs = model.peft_config
    for adapter in model.active_adapters:
        _check_adapter(f"{name} has", adapter, configs[adapter])
    return model.base_model.model


def check_adapters(model: Any) -> None:
    """Check the active adapters of a model that was taken out of its peft wrapper.

    Raises:
        ValueError: an adapter does more than change weights, or the call has a value per row (see `PER_ROW_ARGUMENTS`).
    """
    prepare = vars(model).get("prepare_inputs_for_generation")
    owner = getattr(prepare, "__self__", None)
    if owner is not None and owner is not model and is_peft(owner):
        for adapter in owner.active_adapters:
            _check_adapter(
                f"the {type(owner).__name__} around {type(model).__name__} has", adapter, owner.peft_config[adapter]
            )
    configs = vars(model).get("peft_config")
    if not isinstance(configs, Mapping):
        return
    active: set[str] = set()
    per_row: set[str] = set()
    for module in model.modules():
        names = getattr(module, "active_adapters", None)  # a transformers model has a method of this name
        if isinstance(names, (list, tuple)) and not getattr(module, "disable_adapters", False):
            active.update(names)
            hooks = compat.pre_hooks(module)
            per_row.update(
                name for hook in hooks if isinstance(hook, partial) for name in PER_ROW_ARGUMENTS & hook.keywords.keys()
            )
    for adapter in active & configs.keys():
        _check_adapter(f"{type(model).__name__} has", adapter, configs[adapter])
    for name in per_row:
        reject_per_row_argument(name)


def reject_per_row_argument(name: str) -> None:
    """Raise ValueError for an argument of peft's generate() that has a value per row."""
    raise ValueError(
        f"{name}= cannot be used: rows leave the batch as they end. Choose one adapter with set_adapter()."
    )


def _check_adapter(where: str, adapter: str, config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    what = f"{where} the adapter {adapter!r} ({kind}), which"
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"{what} puts virtual tokens in front of the prompt; drafts cannot be verified through it. Use "
            "peft's own generate(), without specnb, or an adapter of weights (LoRA, ...)."
        )
    invocation_tokens = getattr(config, "alora_invocation_tokens", None)
    if kind not in WEIGHT_ONLY_TYPES or invocation_tokens:
        why = (
            "acts from certain tokens of the prompt on (aLoRA)"
            if invocation_tokens
            else "may do more than change weights"
        )
        raise ValueError(f"{what} {why}: merge it (merge_and_unload()), or use peft's own generate(), without specnb.")


@contextmanager
def use_wrapper_config(wrapper: Any, model: Any) -> Iterator[None]:
    """For one call, use the generation config that was set on the peft wrapper, as peft's generate() does."""
    wrapper_config = vars(wrapper).get("generation_config") if is_peft(wrapper) else None
    if wrapper_config is None or wrapper_config is model.generation_config:
        yield
        return
    model_config = model.generation_config
    model.generation_config = wrapper_config
    try:
        yield
    finally:
        model.generation_config = model_config
