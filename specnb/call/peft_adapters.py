"""Models with peft's adapters: those that only change weights are taken as they are, the others are refused by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

# Each tried against peft's own generate(): tests/test_cases_peft.py.
_WEIGHTS = frozenset(
    [
        "LORA",
        "ADALORA",
        "ADAPTION_PROMPT",
        "BEFT",
        "BOFT",
        "C3A",
        "DEFT",
        "DELORA",
        "FOURIERFT",
        "FROD",
        "GLORA",
        "GRALORA",
        "HIRA",
        "HRA",
        "IA3",
        "LN_TUNING",
        "LOHA",
        "LOKR",
        "MISS",
        "OFT",
        "OSF",
        "PEANUT",
        "PSOFT",
        "PVERA",
        "RANDLORA",
        "ROAD",
        "SHIRA",
        "SUPERTUNING",
        "TINYLORA",
        "TRAINABLE_TOKENS",
        "UNILORA",
        "VBLORA",
        "VERA",
        "WAVEFT",
    ]
)
PER_ROW = {
    "adapter_names",
    "alora_offsets",
}  # arguments of peft's generate() that hooks of a call keep, a value per row


def is_peft(model: Any) -> bool:
    """Whether a model is peft's wrapper around one."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))


def base_of(name: str, model: Any) -> Any:
    """The model inside peft's wrapper, with the adapters in it. `name` is the argument's, for messages.

    Raises ValueError for an adapter that does more than change weights.
    """
    if getattr(model, "_adapters_disabled", False):
        prompts = getattr(model.active_peft_config, "is_prompt_learning", False)
        return model.base_model if prompts else model.base_model.model
    configs = model.peft_config
    for adapter in model.active_adapters:
        _check(f"{name} has", adapter, configs[adapter])
    return model.base_model.model


def check(model: Any) -> None:
    """Raise ValueError for a model inside of peft's wrapper whose adapters do more than change weights."""
    prepare = vars(model).get("prepare_inputs_for_generation")
    owner = getattr(prepare, "__self__", None)
    if owner is not None and owner is not model and is_peft(owner):
        for adapter in owner.active_adapters:
            _check(f"the {type(owner).__name__} around {type(model).__name__} has", adapter, owner.peft_config[adapter])
    configs = vars(model).get("peft_config")
    if not isinstance(configs, Mapping):
        return
    active: set[str] = set()
    per_row: set[str] = set()
    for module in model.modules():
        names = getattr(module, "active_adapters", None)  # of a transformers model, a method
        if isinstance(names, (list, tuple)) and not getattr(module, "disable_adapters", False):
            active.update(names)
            hooks = module._forward_pre_hooks.values()
            per_row.update(
                name for hook in hooks if isinstance(hook, partial) for name in PER_ROW & hook.keywords.keys()
            )
    for adapter in active & configs.keys():
        _check(f"{type(model).__name__} has", adapter, configs[adapter])
    for name in per_row:
        refuse_per_row(name)


def refuse_per_row(name: str) -> None:
    """Raise ValueError for an argument of peft's that has a value for each row."""
    raise ValueError(
        f"{name}= cannot be used: rows leave the batch as they end. Choose one adapter with set_adapter()."
    )


def _check(where: str, adapter: str, config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    what = f"{where} the adapter {adapter!r} ({kind}), which"
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"{what} puts virtual tokens in front of the prompt; drafts cannot be verified through it. Use "
            "peft's own generate(), without specnb, or an adapter of weights (LoRA, ...)."
        )
    invoked = getattr(config, "alora_invocation_tokens", None)
    if kind not in _WEIGHTS or invoked:
        why = "acts from certain tokens of the prompt on (aLoRA)" if invoked else "may do more than change weights"
        raise ValueError(f"{what} {why}: merge it (merge_and_unload()), or use peft's own generate(), without specnb.")


@contextmanager
def own_config(wrapper: Any, model: Any) -> Iterator[None]:
    """A generation config set on peft's wrapper holds for a call of the model inside, as in peft's generate()."""
    theirs = vars(wrapper).get("generation_config") if is_peft(wrapper) else None
    if theirs is None or theirs is model.generation_config:
        yield
        return
    before = model.generation_config
    model.generation_config = theirs
    try:
        yield
    finally:
        model.generation_config = before
