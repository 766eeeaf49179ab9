"""Case PE-01 and its kind: models inside of peft's wrappers, against peft's own generate()."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from checks import configs, no_forward
from transformers import GenerationConfig

import specnb
from specnb.call import peft_adapters

peft = pytest.importorskip("peft")
X = tiny.ids(0, 7)
K: dict[str, Any] = {"attention_mask": torch.ones_like(X), "max_new_tokens": 20, "do_sample": False}
BARE = tiny.llama().generate(X, **K)[0, 7:].tolist()
OWN: dict[str, dict[str, Any]] = {  # what a kind's config needs beside the modules
    "IA3": {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "ADALORA": {"total_step": 10},
    "VBLORA": {"vector_length": 16, "num_vectors": 8},
    "BOFT": {"boft_block_size": 4, "boft_block_num": 0},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
    "FOURIERFT": {"n_frequency": 20},
    "WAVEFT": {"n_frequency": 20},
    "RANDLORA": {"r": 4},
    "MISS": {"r": 4},
    "SHIRA": {"r": 4},
    "PSOFT": {"r": 8},
    "ROAD": {"group_size": 8},
    "C3A": {"block_size": 8},
    "TRAINABLE_TOKENS": {"token_indices": list(range(64))},
    "PROMPT_TUNING": {"num_virtual_tokens": 5},
    "PREFIX_TUNING": {"num_virtual_tokens": 5},
    "P_TUNING": {"num_virtual_tokens": 5, "encoder_hidden_size": 16},
    "CARTRIDGE": {"num_virtual_tokens": 5},
    "CPT": {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]},
}
PROMPTS = ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "CARTRIDGE", "CPT")


def adapted(kind: str, model: Any = None, **more: Any) -> Any:
    """A tiny model with a random adapter of a kind around it."""
    classes = {getattr(key, "value", key): made for key, made in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if kind not in classes:
        pytest.skip(f"this peft has no {kind}")
    own = {"task_type": "CAUSAL_LM"} | OWN.get(kind, {}) | more
    if "target_modules" in classes[kind].__dataclass_fields__ and kind not in ("ADAPTION_PROMPT", "TRAINABLE_TOKENS"):
        own.setdefault("target_modules", ["q_proj", "v_proj"])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(tiny.llama() if model is None else model, classes[kind](**own)).eval()
    random = torch.Generator().manual_seed(3)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=random).to(parameter.dtype)
    return wrapped


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(peft_adapters.WEIGHT_ONLY_TYPES))
def test_adapters_that_change_weights(kind: str) -> None:
    wrapped = adapted(kind)
    base = wrapped.base_model.model
    before = configs(base), set(vars(base))
    expected = wrapped.generate(X, **K)[0, 7:].tolist()
    assert expected != BARE
    draft = tiny.noisy(tiny.llama(), 0.03)
    for how in (
        {"method": "plain"},
        {"prompt_lookup_num_tokens": 4},
        {"assistant_early_exit": 2},
        {"assistant_model": draft},
    ):
        assert list(specnb.generate(wrapped, X, **K, **how).ids) == expected
    assert (configs(base), set(vars(base))) == before
    decoder = specnb.decoder(method="prompt_lookup")
    assert wrapped.generate(X, **K, custom_generate=decoder)[0, 7:].tolist() == expected
    assert list(specnb.generate(tiny.llama(), X, **K, assistant_model=wrapped).ids) == BARE
    assert list(specnb.generate(specnb.Pair(wrapped, None, wrapped), X, **K).ids) == expected


@pytest.mark.parametrize("kind", PROMPTS)
def test_PE_01_virtual_tokens_are_refused_by_name(kind: str) -> None:
    wrapped, base = adapted(kind), tiny.llama()
    words = f"adapter 'default' \\({kind}\\), which puts virtual tokens"
    with no_forward(base):
        for call in (
            lambda: specnb.generate(wrapped, X, **K, prompt_lookup_num_tokens=4),
            lambda: specnb.generate(specnb.Pair(wrapped, None), X, **K),
            lambda: specnb.generate(base, X, **K, assistant_model=wrapped),
            lambda: specnb.decoder(assistant_model=wrapped),
            lambda: wrapped.generate(**K, input_ids=X, custom_generate=specnb.decoder(method="prompt_lookup")),
            lambda: wrapped.generate(**K, input_ids=X, custom_generate=specnb.decoder()),
        ):
            with pytest.raises(ValueError, match=words) as caught:
                call()
            assert "\n" not in str(caught.value)
    inner = wrapped.get_base_model()  # the model without the adapter, which peft's generate() has just been through
    assert list(specnb.generate(inner, X, **K, prompt_lookup_num_tokens=4).ids) == BARE
    with wrapped.disable_adapter():
        assert list(specnb.generate(wrapped, X, **K, prompt_lookup_num_tokens=4).ids) == BARE


@pytest.mark.parametrize(("kind", "more"), [("LILY", {}), ("LORA", {"alora_invocation_tokens": [3]})])
def test_adapters_that_do_more_are_refused_by_name(kind: str, more: dict[str, Any]) -> None:
    wrapped = adapted(kind, **more)
    for call in (
        lambda: specnb.generate(wrapped, X, **K, prompt_lookup_num_tokens=4),
        lambda: specnb.generate(wrapped.base_model.model, X, **K, prompt_lookup_num_tokens=4),
        lambda: wrapped.generate(X, **K, custom_generate=specnb.decoder(method="prompt_lookup")),
    ):
        with pytest.raises(ValueError, match=f"adapter 'default' \\({kind}\\), which .*merge it"):
            call()
    with wrapped.disable_adapter():
        assert list(specnb.generate(wrapped, X, **K, prompt_lookup_num_tokens=4).ids) == BARE


def test_an_adapter_for_each_row_is_refused() -> None:
    wrapped = adapted("LORA")
    ids, names = X.expand(2, -1), ["default", "__base__"]
    given = {**K, "attention_mask": torch.ones_like(ids), "adapter_names": names}
    with pytest.raises(ValueError, match="adapter_names= cannot be used"):
        specnb.generate(wrapped, ids, **given)
    with pytest.raises(ValueError, match="adapter_names= cannot be used"):
        wrapped.generate(ids, **given, custom_generate=specnb.decoder(method="prompt_lookup"))


def test_adapters_switched_off_chosen_mixed_and_merged() -> None:
    wrapped = adapted("LORA")
    own = wrapped.generate(X, **K)[0, 7:].tolist()
    wrapped.add_adapter(
        "other", peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    )
    other = None
    for name in ("other", "default", "other"):
        wrapped.set_adapter(name)
        expected = wrapped.generate(X, **K)[0, 7:].tolist()
        assert list(specnb.generate(wrapped, X, **K, prompt_lookup_num_tokens=4).ids) == expected
        other = expected if name == "other" else other
        assert name == "other" or expected == own != other
    with wrapped.disable_adapter():
        assert list(specnb.generate(wrapped, X, **K, prompt_lookup_num_tokens=4).ids) == BARE
    wrapped.set_adapter("default")
    merged = wrapped.merge_and_unload()
    expected = merged.generate(X, **K)[0, 7:].tolist()
    assert list(specnb.generate(merged, X, **K, prompt_lookup_num_tokens=4).ids) == expected
    mixed = peft.PeftMixedModel(tiny.llama(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    expected = mixed.eval().generate(X, **K)[0, 7:].tolist()
    assert expected != BARE
    assert list(specnb.generate(mixed, X, **K, prompt_lookup_num_tokens=4).ids) == expected


def test_a_generation_config_set_on_the_wrapper_holds_for_the_call() -> None:
    wrapped = adapted("LORA")
    base = wrapped.base_model.model
    own = base.generation_config
    wrapped.generation_config = GenerationConfig(max_new_tokens=5, pad_token_id=0)
    result = specnb.generate(wrapped, X, attention_mask=K["attention_mask"], do_sample=False)
    assert len(result.ids) == 5 and base.generation_config is own
