"""Low-overhead modules: the same bits as the model's own, hooks still run, and the model is unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from checks import configs, plain, spec
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from specnb.runtime.low_overhead import FusedRMSNorm, LowOverheadLinear, replacements
from specnb.runtime.module_view import with_replacements

X = tiny.ids(0, 40)


def low_overhead(model: nn.Module) -> Any:
    """The module tree with low-overhead modules in it, or the model itself."""
    return with_replacements(model, replacements)


def kinds(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules()}


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma4", "glm4_moe", "gpt2"])
def test_the_bits_are_the_models_own(name: str) -> None:
    model = tiny.family(name) if name in ("qwen2", "qwen3") else getattr(tiny, name)()
    for parameter in model.parameters():  # norms whose weights are all ones could be scaled in any way
        parameter.data += 0.1 * torch.rand_like(parameter)
    before, modules = configs(model), [id(module) for module in model.modules()]
    tree = low_overhead(model)
    assert LowOverheadLinear in kinds(tree) and nn.Linear not in kinds(tree)
    norms = {kind for kind in kinds(tree) if kind.__name__.endswith("RMSNorm")}
    assert norms == (set() if name == "gpt2" else {FusedRMSNorm})
    for x in (X, X[:, :1], X[:, :5].repeat(3, 1)):
        assert torch.equal(model(x).logits, tree(x).logits)
    assert configs(model) == before and [id(module) for module in model.modules()] == modules


def test_half_precision_keeps_its_norms() -> None:
    model = tiny.llama().to(torch.bfloat16)
    tree = low_overhead(model)
    assert FusedRMSNorm not in kinds(tree) and LlamaRMSNorm in kinds(tree)
    assert torch.equal(model(X).logits, tree(X).logits)


class Doubled(Gemma3RMSNorm):
    """A norm that only looks like one that is known."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Gated(LlamaRMSNorm):
    """A norm with a second input."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        return out if gate is None else out * gate


@pytest.mark.parametrize("norm", [Doubled, Gated])
def test_other_norms_are_left(norm: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), norm(8))
    assert type(low_overhead(model)[1]) is norm


def test_hooks_and_replaced_forwards_are_heard() -> None:
    model, prompt = tiny.llama(), tiny.ids(2, 6)
    expected, heard = plain(model, prompt, max_new_tokens=4), []
    linear = model.model.layers[0].mlp.up_proj
    hook = linear.register_forward_hook(lambda *_: heard.append("hook"))
    assert list(spec(model, prompt, max_new_tokens=4, method="plain").ids) == expected and len(heard) == 4
    hook.remove()
    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, *_: heard.append("all") if module is linear else None
    )
    assert low_overhead(model) is model
    spec(model, prompt, max_new_tokens=4, method="plain")
    everywhere.remove()
    assert heard.count("all") == 4
    linear.forward = lambda x: heard.append("forward") or nn.functional.linear(x, linear.weight)
    assert low_overhead(model) is model
    del linear.forward


def test_weights_written_to_between_calls_count() -> None:
    model, prompt = tiny.gemma3(), tiny.ids(3, 6)
    spec(model, prompt, max_new_tokens=8, method="plain")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.5)
    assert list(spec(model, prompt, max_new_tokens=8, method="plain").ids) == plain(model, prompt, max_new_tokens=8)
