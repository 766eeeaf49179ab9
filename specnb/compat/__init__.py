"""Private and unstable names of torch, transformers and accelerate: the only module that touches them.

Each has a fallback. Where a name is gone, specnb goes on without what it served (slower, never with another text), or
refuses what needs it by name. Importing specnb never fails because of it. `missing()` lists what is gone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

_GONE: dict[str, str] = {}


def _get(module: str, name: str, effect: str) -> Any:
    """A name of a module, or None: then `effect` says what specnb does without it."""
    try:
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, RuntimeError):
        _GONE[f"{module}.{name}"] = effect
        return None
    return found


def missing() -> dict[str, str]:
    """Names that the installed torch and transformers do not have, and what specnb does without each."""
    return dict(_GONE)


# ---- torch: module views and linear layers
LINEAR: Any = _get("torch._C._nn", "linear", "linear layers run as modules, without the low-overhead ones")
_HOOKS: Any = _get("torch.nn.modules", "module", "linear layers run as modules, without the low-overhead ones")
COMPILED = "_compiled_call_impl"  # in a module's dictionary after module.compile()
_LINEARS_FILE = inspect.getfile(nn.Linear)


def linear_is_torchs() -> bool:
    """Whether `nn.Linear` does what torch made it do: no hooks for all modules, no other function in its place."""
    if LINEAR is None or _HOOKS is None:
        return False
    hooks = ("_global_forward_hooks", "_global_forward_pre_hooks")
    code = getattr(nn.Linear.forward, "__code__", None)
    patched = code is None or code.co_filename != _LINEARS_FILE or nn.functional.linear is not LINEAR
    return not patched and not any(getattr(_HOOKS, name, True) for name in hooks)


def has_hooks(module: nn.Module) -> bool:
    """Whether something hooked itself into calls of the module."""
    return bool(getattr(module, "_forward_hooks", True) or getattr(module, "_forward_pre_hooks", True))


def pre_hooks(module: nn.Module) -> list[Any]:
    """The functions that are called before a module's forward."""
    return list(getattr(module, "_forward_pre_hooks", {}).values())


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return COMPILED in vars(module)


def compiled_model(wrapper: Any) -> Any:
    """The model inside what `torch.compile(model)` returned; None for anything else."""
    return getattr(wrapper, "_orig_mod", None)


def version_of(weight: Tensor) -> int:
    """Grows with every write to a tensor that torch counts."""
    return weight._version


# ---- torch: weights in oneDNN's own layout
_REORDER: Any = _get("torch", "ops.mkldnn._reorder_linear_weight", "weights are not packed")
_MULTIPLY: Any = _get("torch", "ops.mkldnn._linear_pointwise", "weights are not packed")


def can_prepack() -> bool:
    """Whether torch can lay weights out for oneDNN and multiply with them."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and _REORDER is not None and _MULTIPLY is not None and hasattr(Tensor, "_version")


def prepack(weight: Tensor) -> Tensor:
    """A weight `[out, in]` in oneDNN's layout."""
    packed: Tensor = _REORDER(weight)
    return packed


def prepacked_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b `[..., out]` for x `[..., in]` and a packed weight."""
    out: Tensor = _MULTIPLY(x, packed, bias, "none", [], "")
    return out


# ---- accelerate: hooks that move the weights of an offloaded model
HOOK = ("_hf_hook", "_old_forward")


def hook_of(module: nn.Module) -> Any:
    """accelerate's hook on a module; None where there is none."""
    return getattr(module, HOOK[0], None)


# ---- transformers: attention
_ATTENTION = "_attn_implementation"
_SDPA: Any = _get("transformers.integrations.sdpa_attention", "sdpa_attention_forward", "attention copies shared keys")
_ATTENTIONS: Any = _get("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS", "attention copies shared keys")
_REGISTER: Any = _get("transformers", "AttentionInterface", "attention copies shared keys")
_MASKS: Any = _get("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS", "masks are always made by specnb")


def attention_implementation(config: Any) -> str:
    """Its name: "sdpa", "eager" and so on; "eager" where a config does not say."""
    return str(getattr(config, _ATTENTION, None) or "eager")


def with_attention(config: Any, name: str) -> Any:
    """A copy of a config with another attention implementation."""
    other = copy.copy(config)
    other.__dict__[f"{_ATTENTION}_internal"] = name
    return other


def makes_masks_for(attention: str) -> bool:
    """Whether transformers makes the mask for an attention implementation."""
    return _MASKS is not None and attention in _MASKS


def register_attention(name: str, function: Callable[..., Any]) -> bool:
    """Make an attention function known to transformers; False where that is not possible."""
    if _SDPA is None or _ATTENTIONS is None or _REGISTER is None:
        return False
    _REGISTER.register(name, function)
    return True


def sdpa_attention(*args: Any, **kwargs: Any) -> Any:
    """transformers' own sdpa attention."""
    return _SDPA(*args, **kwargs)


def sdpa_is_transformers() -> bool:
    """Whether "sdpa" means transformers' own function."""
    return _SDPA is not None and _ATTENTIONS is not None and _ATTENTIONS["sdpa"] is _SDPA


# ---- transformers: what generate() prepares
PREPARE, UPDATE = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"
_POSITIONS = "_prepare_position_ids_for_generation"
FIRST_PASS_INPUTS: Collection[str] | None = _get(
    "transformers.generation.utils",
    "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL",
    "all further inputs are given to the first pass only",
)
"""Inputs that belong to the first pass only."""
ConfidenceCriteria: Any = _get(
    "transformers.generation.stopping_criteria", "ConfidenceCriteria", "nothing ends a draft in its place"
)


def default_generation_params() -> dict[str, Any]:
    """What transformers fills in where neither call nor config says anything."""
    defaults = getattr(GenerationConfig, "_get_default_generation_params", None)
    if defaults is not None:
        return dict(defaults())
    return {name: value for name, value in vars(GenerationConfig()).items() if value is not None}


def pad_token_id(config: GenerationConfig) -> int:
    """The id that pads rows, as generate() prepared it: an end of sequence where there is no pad."""
    prepared = getattr(config, "_pad_token_tensor", None)
    if prepared is not None:
        return int(prepared)
    eos = config.eos_token_id
    ids = [config.pad_token_id, *(eos if isinstance(eos, list) else [eos])]
    return int(next((one for one in ids if one is not None), 0))


def given_by_caller(past: Any) -> bool:
    """Whether a cache came with the call, and was not made by generate()."""
    return bool(getattr(past, "_is_user_defined", False))


_NOT_HANDED_ON = ("streamer", "assistant_model")


def not_handed_on() -> dict[str, Any]:
    """Arguments that the running `generate()` was given and does not hand on to its `custom_generate` callable.

    They are found among its local variables, for a message only: nothing is found where transformers renames them.
    """
    code = getattr(inspect.unwrap(GenerationMixin.generate), "__code__", None)
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    given = {} if frame is None else frame.f_locals
    return {name: given[name] for name in _NOT_HANDED_ON if given.get(name) is not None}


def own_method(model: PreTrainedModel, name: str) -> Callable[..., Any] | None:
    """A model's own version of a method of GenerationMixin, on the class; None where it is the standard one."""
    standard = getattr(GenerationMixin, name, None)
    method = getattr(type(model), name, standard)
    return None if method is standard else method


def prepares_positions(model: PreTrainedModel) -> bool:
    """Whether `generate()` asks the model itself for position ids (several planes, as with M-RoPE)."""
    return own_method(model, _POSITIONS) is not None


def update_model_kwargs(model: PreTrainedModel, outputs: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the next pass after one with `outputs`."""
    updated: dict[str, Any] = getattr(model, UPDATE)(outputs, dict(kwargs), is_encoder_decoder=False)
    return updated


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether a model has layers with a running state, which cannot be rolled back."""
    return bool(getattr(model, "_is_stateful", False))


# ---- transformers: multi-token prediction
def project_to_logits(mtp: Any, states: Tensor) -> Tensor:
    """The logits `[rows, vocab]` of MTP states `[rows, size]`."""
    logits: Tensor = mtp._project_to_logits(states)
    return logits


# ---- transformers: files of a checkpoint
def find_file(place: str, name: str, **options: Any) -> str | None:
    """The path of a file in a folder or of a hub model; None if there is no such file. `options`: of `cached_file`."""
    from transformers.utils import cached_file

    found: str | None = cached_file(place, name, _raise_exceptions_for_missing_entries=False, **options)
    return found


# ---- transformers: the parts of decoder layers
class DecoderParts(NamedTuple):
    """Classes of modules that make a model type's decoder layers."""

    attention: Any
    mlp: Any
    norm: Any
    rotary: Any
    layer: Any


_PREFIXES = {"llama": "Llama", "qwen3": "Qwen3"}


def decoder_parts(model_type: str) -> DecoderParts | None:
    """The parts of a llama or qwen3 layer; None for another type, or where transformers does not have them."""
    prefix, home = _PREFIXES.get(model_type), f"transformers.models.{model_type}.modeling_{model_type}"
    if prefix is None:
        return None
    names = ("Attention", "MLP", "RMSNorm", "RotaryEmbedding", "DecoderLayer")
    found = [_get(home, prefix + name, f"there are no EAGLE-3 drafters with {model_type} layers") for name in names]
    return None if None in found else DecoderParts(*found)


def was_loaded(model: PreTrainedModel) -> bool:
    """Whether `from_pretrained()` loaded the model's weights; a config alone also says where it comes from."""
    return hasattr(model, "_weight_conversions")


_UNEXPECTED = "_keys_to_ignore_on_load_unexpected"


def ignored_keys(model: PreTrainedModel) -> list[str]:
    """Patterns of tensors that a checkpoint may have and the model does not load."""
    return list(getattr(model, _UNEXPECTED, None) or ())


def set_ignored_keys(model: PreTrainedModel, patterns: list[str]) -> None:
    """Set those patterns on a copy of a model, for transformers' search for MTP layers."""
    setattr(model, _UNEXPECTED, patterns)


# ---- transformers: names that changed
@cache
def cache_field() -> str:
    """The name of the cache in generate()'s output: "cache", or "past_key_values" before transformers 5.24."""
    from transformers.generation import GenerateDecoderOnlyOutput

    return cache_keyword(GenerateDecoderOnlyOutput.__dataclass_fields__)


CACHE_NAMES = ("cache", "past_key_values")
"""Names of the cache among a model's arguments: the first since transformers 5.24, the second before."""


def cache_keyword(parameters: Collection[str]) -> str:
    """The name under which a forward takes its cache."""
    return CACHE_NAMES[0] if CACHE_NAMES[0] in parameters else CACHE_NAMES[1]


def cache_among(arguments: Mapping[str, Any], *others: str) -> Any:
    """The cache among arguments or outputs of a model, also under one of the `others`; None where there is none."""
    return next((arguments[name] for name in (*CACHE_NAMES, *others) if arguments.get(name) is not None), None)
