"""Packed weights: another layout of the same numbers, beside an unpatched model."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import tiny
import torch

import specnb
from specnb.runtime import prepacked_linear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


MEASURE = prepacked_linear._pays_from


@pytest.fixture(autouse=True)
def always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack every layer, whatever this processor likes best."""
    monkeypatch.setattr(prepacked_linear, "_pays_from", lambda layer, size: 1)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_packed_logits_and_text(family: str) -> None:
    model = tiny.family(family)
    before = copy.deepcopy(model.state_dict())
    modules = dict(model.named_modules())
    ids = tiny.ids(0, 9)
    plain = specnb.generate(model, ids, max_new_tokens=20, do_sample=False).sequences
    view = specnb.pack(model)
    assert prepacked_linear.view(model).lm_head is view.lm_head
    with torch.no_grad():
        assert torch.allclose(view(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    for options in (
        {},
        {"prompt_lookup_num_tokens": 4},
        {"assistant_early_exit": 1},
        {"assistant_model": tiny.noisy(model, 0.03)},
    ):
        assert torch.equal(specnb.generate(model, ids, max_new_tokens=20, do_sample=False, **options).sequences, plain)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    specnb.unpack(model)
    assert prepacked_linear.view(model) is model


def test_changed_weights_are_packed_again() -> None:
    model = tiny.llama()
    specnb.pack(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    ids = tiny.ids(1, 6)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(specnb.generate(model, ids, max_new_tokens=12, do_sample=False).sequences, plain)


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.data.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))),
        lambda weight: weight.data.copy_(weight.data.roll(1, 0).clone()),
        lambda weight: weight.data[7].mul_(-3),
        lambda weight: weight.data[:, 3:9].fill_(2),
        lambda weight: weight.detach().numpy().__imul__(-0.5),
    ],
)
@pytest.mark.parametrize("path", ["lm_head", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"])
def test_a_write_past_the_version_is_seen(path: str, write: Callable[[torch.Tensor], object]) -> None:
    """A LoRA merge adds to `weight.data`, which leaves address and version as they were."""
    model = tiny.llama()
    old = specnb.pack(model).get_submodule(path).packed
    weight, ids = model.get_submodule(path).weight, tiny.ids(1, 6)
    before = weight.data_ptr(), weight._version
    write(weight)
    assert (weight.data_ptr(), weight._version) == before
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    for options in ({}, {"prompt_lookup_num_tokens": 4}, {"assistant_early_exit": 2}):
        assert torch.equal(
            specnb.generate(model, ids, max_new_tokens=12, do_sample=False, **options).sequences, expected
        )
    new = prepacked_linear.view(model).get_submodule(path).packed
    assert new is not old
    x = torch.randn(3, weight.shape[1])
    assert torch.allclose(prepacked_linear.multiply(x, new.data, None), x @ weight.detach().T, atol=1e-4)


def test_a_truncated_draft_shares_the_packed_weights() -> None:
    model = tiny.llama()
    draft = specnb.truncate(model, 2)
    first, second = specnb.pack(model), specnb.pack(draft)
    one, two = (view.get_submodule("model.layers.0.mlp.up_proj").packed for view in (first, second))
    assert one is two


def test_packed_weights_go_with_the_model() -> None:
    model = tiny.llama()
    kept = weakref.ref(specnb.pack(model).get_submodule("lm_head").packed)
    del model
    gc.collect()
    assert kept() is None


def test_only_float32_linear_layers_without_hooks_are_packed() -> None:
    half = tiny.llama().to(torch.bfloat16)
    assert specnb.pack(half) is half
    hooked = tiny.llama()
    hooked.lm_head.register_forward_hook(lambda *_: None)
    view = specnb.pack(hooked)
    assert view.lm_head is hooked.lm_head
    assert view.model.layers[0].mlp.up_proj is not hooked.model.layers[0].mlp.up_proj


def test_two_threads_pack_once() -> None:
    model = tiny.llama()
    views: list[object] = []
    threads = [threading.Thread(target=lambda: views.append(specnb.pack(model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(view.lm_head) for view in views}) == 1


def test_measuring_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked_linear, "_FROM", {})
    before = torch.get_rng_state()
    MEASURE(tiny.llama().lm_head, 10**5)
    assert prepacked_linear._FROM and torch.equal(torch.get_rng_state(), before)
