"""Attention that reads shared key/value heads in place: transformers' bits, an unchanged model, nothing copied."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from checks import configs, plain, spec
from torch import nn
from transformers.integrations import sdpa_attention

from specnb.runtime.grouped_query_attention import replacements
from specnb.runtime.module_view import with_replacements

X = tiny.ids(0, 40)


def grouped_query(model: nn.Module) -> Any:
    """The module tree with grouped-query attentions in it, or the model itself."""
    return with_replacements(model, replacements)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma4", "glm4_moe"])
def test_the_bits_are_transformers_own(name: str) -> None:
    model = tiny.family(name) if name in ("qwen2", "qwen3") else getattr(tiny, name)()
    before, modules = configs(model), [id(module) for module in model.modules()]
    tree = grouped_query(model)
    assert tree is not model
    for mask in (None, torch.cat([torch.zeros(1, 7), torch.ones(1, 33)], 1)):
        assert torch.equal(model(X, attention_mask=mask).logits[0, 7:], tree(X, attention_mask=mask).logits[0, 7:])
    assert configs(model) == before
    assert [id(module) for module in model.modules()] == modules


def test_a_model_without_shared_heads_or_with_another_attention_is_left() -> None:
    model = tiny.gpt2()
    assert grouped_query(model) is model
    model = tiny.llama()
    assert grouped_query(model) is not model
    model.set_attn_implementation("eager")
    assert grouped_query(model) is model
    model.set_attn_implementation("sdpa")
    assert grouped_query(model) is not model


def test_no_step_copies_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """After prefill keys are not copied, and nothing as large as one layer's kv cache is allocated."""
    model, prompt = tiny.llama(positions=4096), tiny.ids(1, 8).repeat(1, 128)
    expected = plain(model, prompt, max_new_tokens=12)

    def copies(*args: object) -> None:
        raise AssertionError("keys were copied")

    monkeypatch.setattr(sdpa_attention, "repeat_kv", copies)
    kept = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    options = {"max_new_tokens": 12, "prompt_lookup_num_tokens": 4, "num_assistant_tokens_schedule": "constant"}
    steps = 0

    def on_step(step: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 2:  # the kv cache has its final size
            kept.start()

    result = spec(model, prompt, on_step=on_step, **options)
    kept.stop()
    assert list(result.ids) == expected
    assert len(result.steps) > 3
    largest = [event.self_cpu_memory_usage for event in kept.events() if event.self_cpu_memory_usage > 0]
    layer = 1024 * 2 * 8 * 4  # positions x key heads x size x bytes
    assert max(largest) < layer / 2
