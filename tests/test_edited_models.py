"""Models edited between calls, or with a replaced forward: the text is that of the model as it is at the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import transformers
from checks import STEADY, no_forward, plain, spec
from torch import nn
from torch.nn.modules import module as module_of_torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import specnb
from specnb.runtime import prepacked_linear

X = tiny.ids(0, 9)
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "early exit": {"assistant_early_exit": 2, **STEADY},
}


class Lora(nn.Module):
    """An adapter around a linear layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base, self.scale = layer, 1.7

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) * self.scale


def adapters(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)


def another_mlp(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp = tiny.llama(seed=5).model.layers[0].mlp


def another_norm(model: PreTrainedModel) -> None:
    norm = tiny.llama(seed=5).model.norm
    nn.init.uniform_(norm.weight, -2, 2)
    model.model.norm = norm


def another_head(model: PreTrainedModel) -> None:
    model.lm_head = nn.Linear(32, 64, bias=False)
    nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(3))


def other_embeddings(model: PreTrainedModel) -> None:
    model.set_input_embeddings(tiny.llama(seed=5).get_input_embeddings())


def another_scaling(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 3.0


EDITS = [adapters, another_mlp, another_norm, another_head, other_embeddings, another_scaling]


@pytest.mark.slow
@pytest.mark.parametrize("prepacked", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("edit", EDITS)
def test_the_model_is_taken_as_it_is_now(
    edit: Callable[[PreTrainedModel], None], method: str, prepacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepacked_linear, "_pays_from", lambda layer, size: 1)
    model = tiny.llama(vocab=64)
    if prepacked:
        specnb.pack(model)
    before = plain(model, X, max_new_tokens=20)
    assert list(spec(model, X, max_new_tokens=20, **METHODS[method]).ids) == before
    edit(model)
    after = plain(model, X, max_new_tokens=20)
    assert after != before
    assert list(spec(model, X, max_new_tokens=20, **METHODS[method]).ids) == after
    if edit is adapters:  # and taken off again
        for layer in model.model.layers:
            layer.self_attn.q_proj = layer.self_attn.q_proj.base
        assert list(spec(model, X, max_new_tokens=20, **METHODS[method]).ids) == before


def negated(module: Any) -> None:
    """Replace the forward on the instance."""
    forward = module.forward

    def replaced(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            return -out
        name = "logits" if "logits" in out else "last_hidden_state"
        out[name] = -out[name]
        return out

    module.forward = replaced


@pytest.mark.slow
@pytest.mark.parametrize("path", ["", "model", "model.layers.2", "model.layers.2.mlp", "lm_head"])
@pytest.mark.parametrize("prepacked", [False, True])
def test_a_replaced_forward_is_kept_or_the_method_refused(path: str, prepacked: bool) -> None:
    model = tiny.llama()
    if prepacked:
        specnb.pack(model)
    before = plain(model, X, max_new_tokens=16)
    negated(model.get_submodule(path))
    after = plain(model, X, max_new_tokens=16)
    assert after != before
    for method in ("plain", "prompt lookup"):
        assert list(spec(model, X, max_new_tokens=16, **METHODS[method]).ids) == after
    if path in ("", "model"):
        with no_forward(model), pytest.raises(ValueError, match="forward of a Llama.* was replaced"):
            spec(model, X, max_new_tokens=16, **METHODS["early exit"])
    else:
        assert list(spec(model, X, max_new_tokens=16, **METHODS["early exit"]).ids) == after


class Wrapped(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A subclass whose forward does not name its arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_subclass_with_a_forward_of_unnamed_arguments() -> None:
    like = tiny.llama()
    model = Wrapped(like.config).eval()
    model.load_state_dict(like.state_dict())
    model.generation_config = like.generation_config
    for method in METHODS.values():
        assert list(spec(model, X, max_new_tokens=16, **method).ids) == plain(like, X, max_new_tokens=16)


@pytest.mark.slow
def test_a_compiled_model() -> None:
    """A model compiled in place works with every method; the wrapper of torch.compile() is refused with advice."""
    model = tiny.llama()
    expected = plain(model, X, max_new_tokens=12)
    with pytest.raises(ValueError, match=r"torch.compile\(\) made of a LlamaForCausalLM; give the model itself"):
        spec(torch.compile(model, backend="eager"), X, max_new_tokens=4, method="plain")
    model.compile(backend="eager")
    for options in METHODS.values():
        assert list(spec(model, X, max_new_tokens=12, **options).ids) == expected
    assert "_compiled_call_impl" in model.__dict__


def norm_class(patch: pytest.MonkeyPatch) -> None:
    kind = transformers.models.llama.modeling_llama.LlamaRMSNorm
    forward = kind.forward
    patch.setattr(kind, "forward", lambda self, x: forward(self, x).flip(-1))


def linear_class(patch: pytest.MonkeyPatch) -> None:
    forward = nn.Linear.forward
    patch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x).flip(-1))


def linear_function(patch: pytest.MonkeyPatch) -> None:
    function = nn.functional.linear
    patch.setattr(nn.functional, "linear", lambda x, weight, bias=None: function(x, weight, bias).flip(-1))


def attention_function(patch: pytest.MonkeyPatch) -> None:
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def halved(*args: Any, **kwargs: Any) -> Any:
        out, weights = sdpa(*args, **kwargs)
        return -2 * out, weights

    patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", halved)


def hook_of_all(patch: pytest.MonkeyPatch) -> None:
    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        return out.flip(-1) if isinstance(module, nn.Linear) else None

    patch.setitem(module_of_torch._global_forward_hooks, 1 << 40, hook)


def hook_before_all(patch: pytest.MonkeyPatch) -> None:
    def hook(module: nn.Module, args: Any) -> Any:
        return (args[0].flip(-1),) if isinstance(module, nn.Linear) else None

    patch.setitem(module_of_torch._global_forward_pre_hooks, 1 << 40, hook)


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit", [norm_class, linear_class, linear_function, attention_function, hook_of_all, hook_before_all]
)
@pytest.mark.parametrize("pack", [False, True])
def test_what_is_patched_for_all_models(edit: Callable[[pytest.MonkeyPatch], None], pack: bool) -> None:
    """Functions replaced on a class or in a table, hooks for all modules: they count as they do in generate()."""
    model = tiny.llama()
    if pack:
        specnb.pack(model)
    kept = prepacked_linear._PACKED.get(model)
    before = plain(model, X, max_new_tokens=16)
    for options in METHODS.values():
        assert list(spec(model, X, max_new_tokens=16, **options).ids) == before
    with pytest.MonkeyPatch.context() as patch:
        edit(patch)
        after = plain(model, X, max_new_tokens=16)
        assert after != before
        for options in METHODS.values():
            assert list(spec(model, X, max_new_tokens=16, **options).ids) == after
        assert prepacked_linear._PACKED.get(model) is kept  # kept all the time
    for options in METHODS.values():
        assert list(spec(model, X, max_new_tokens=16, **options).ids) == before


@pytest.mark.filterwarnings("ignore")  # torch's own, about the quantisation
def test_layers_that_scale_a_whole_block_are_refused() -> None:
    model = tiny.llama()
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)
    with pytest.raises(ValueError, match="dynamic quantisation.*quantize_dynamic.*method='plain'"):
        spec(model, X, max_new_tokens=8, prompt_lookup_num_tokens=4)
    assert list(spec(model, X, max_new_tokens=8).ids) == plain(model, X, max_new_tokens=8)
