"""Prepacked linear layers: another layout of the same numbers, compared with an unchanged model."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from checks import plain, spec
from torch import nn

import specnb
from specnb import compat
from specnb.runtime import prepacked_linear

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")

LINEAR, MULTIPLY, PAYS_FROM = nn.functional.linear, compat.prepacked_linear, prepacked_linear._pays_from


@pytest.fixture(autouse=True)
def always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepack every layer, whatever is faster on this machine."""
    monkeypatch.setattr(prepacked_linear, "_pays_from", lambda layer, size: 1)


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_packed_logits_and_text(family: str) -> None:
    model = tiny.family(family)
    before = copy.deepcopy(model.state_dict())
    modules = dict(model.named_modules())
    ids = tiny.ids(0, 9)
    expected = specnb.generate(model, ids, max_new_tokens=20, do_sample=False).sequences
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
        assert torch.equal(
            specnb.generate(model, ids, max_new_tokens=20, do_sample=False, **options).sequences, expected
        )
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
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(specnb.generate(model, ids, max_new_tokens=12, do_sample=False).sequences, expected)


@pytest.mark.slow
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
    assert torch.allclose(compat.prepacked_linear(x, new.data, None), x @ weight.detach().T, atol=1e-4)


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
    monkeypatch.setattr(prepacked_linear, "_PAYS_FROM", {})
    before = torch.get_rng_state()
    PAYS_FROM(tiny.llama().lm_head, 10**5)
    assert prepacked_linear._PAYS_FROM and torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------- which kernel runs
def install(monkeypatch: pytest.MonkeyPatch, linear: Callable[..., Any], multiply: Callable[..., Any]) -> None:
    """Exchange the two kernels in `prepacked_linear` only: a linear function patched for all turns prepacking off."""
    shim = SimpleNamespace(Linear=nn.Linear, functional=SimpleNamespace(linear=linear))
    monkeypatch.setattr(prepacked_linear, "nn", shim)
    monkeypatch.setattr(compat, "prepacked_linear", multiply)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The linear layers that ran: the kernel and its rows."""
    ran: list[tuple[str, int]] = []

    def linear(x: torch.Tensor, *more: Any) -> torch.Tensor:
        ran.append(("linear", x.shape[:-1].numel()))
        return LINEAR(x, *more)

    def multiply(x: torch.Tensor, *more: Any) -> torch.Tensor:
        ran.append(("prepacked", x.shape[:-1].numel()))
        return MULTIPLY(x, *more)

    install(monkeypatch, linear, multiply)
    return ran


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (3,), (4,), (5,), (1, 3), (1, 4), (2, 2), (3, 1), ()], ids=str)
def test_the_number_of_rows_chooses_the_kernel(shape: tuple[int, ...], bias: bool, calls: list[Any]) -> None:
    layer = nn.Linear(32, 16, bias=bias).requires_grad_(False)
    prepacked = prepacked_linear.PrepackedLinear(layer, 4)
    x = torch.randn(*shape, 32)
    rows, out = x.shape[:-1].numel(), prepacked(x)
    assert calls == [("prepacked" if rows >= 4 else "linear", rows)]
    expected = LINEAR(x, layer.weight, layer.bias)
    assert out.shape == expected.shape
    assert torch.allclose(out, expected, atol=1e-5)
    assert rows >= 4 or torch.equal(out, expected)  # the very same kernel


def test_plain_decoding_uses_the_ordinary_kernel_and_verification_the_prepacked_one(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepacked_linear, "_pays_from", lambda layer, size: 4)
    model, prompt = tiny.llama(), tiny.ids(1, 3)
    expected = plain(model, prompt, max_new_tokens=12)
    specnb.pack(model)
    layers = sum(type(module) is nn.Linear for module in model.modules())
    calls.clear()
    assert list(spec(model, prompt, max_new_tokens=12, method="plain").ids) == expected
    assert {name for name, _ in calls} == {"linear"} and max(rows for _, rows in calls) == 3
    calls.clear()
    draft = {"assistant_model": tiny.noisy(model, 0), "assistant_confidence_threshold": 0.0}
    options = draft | {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
    assert list(spec(model, prompt, max_new_tokens=12, **options).ids) == expected
    prepacked = [rows for name, rows in calls if name == "prepacked"]
    assert len(prepacked) >= 2 * layers and set(prepacked) == {4}  # blocks of 3 drafted tokens and one more
    assert all(rows < 4 for name, rows in calls if name == "linear")


# ---------------------------------------------------------------- from how many rows on
Cost = Callable[[int], float]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cost, Cost], list[int]]:
    """Makes `_pays_from` measure kernels that take the given seconds for a number of rows, on a clock of its own.

    Returns a list to which the rows of each call of the ordinary kernel are appended.
    """

    def start(ordinary: Cost, prepacked: Cost) -> list[int]:
        now, ran = [0.0], []

        def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
            ran.append(len(x))
            now[0] += ordinary(len(x))
            return x

        def multiply(x: torch.Tensor, packed: torch.Tensor, bias: Any = None) -> torch.Tensor:
            now[0] += prepacked(len(x))
            return x

        monkeypatch.setattr(prepacked_linear, "_PAYS_FROM", {})
        monkeypatch.setattr(prepacked_linear, "_pays_from", PAYS_FROM)
        monkeypatch.setattr(prepacked_linear, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        install(monkeypatch, linear, multiply)
        return ran

    return start


def faster_at(*rows: int) -> Cost:
    """Seconds of the prepacked kernel, where the ordinary one takes 1: half of it for these numbers of rows, else 2."""
    return lambda n: 0.5 if n in rows else 2.0


@pytest.mark.parametrize(
    ("prepacked", "start"),
    [
        (faster_at(1, 2, 4, 8, 16, 64), 1),
        (faster_at(2, 4, 8, 16, 64), 2),
        (faster_at(4, 8, 16, 64), 4),
        (faster_at(16, 64), 16),
        (faster_at(64), None),  # only prompts would gain
        (faster_at(), None),
        (faster_at(1, 2, 8, 16, 64), 8),  # slower in between: from where it stays faster
        (faster_at(1, 2, 4, 8, 16), None),  # slower for prompts
        (lambda rows: 0.94, 1),
        (lambda rows: 0.96, None),  # less than a twentieth is no gain
        (lambda rows: 1.0, None),
    ],
)
def test_the_decision_follows_the_measured_times(prepacked: Cost, start: int | None, timed: Any) -> None:
    timed(lambda rows: 1.0, prepacked)
    assert prepacked_linear._pays_from(nn.Linear(32, 16), 10**5) == start


def test_the_decision_compares_times_for_the_same_rows(timed: Any) -> None:
    """An ordinary kernel that slows down with the rows, and a prepacked one that costs the same for any number."""
    timed(lambda rows: 0.2 * rows, lambda rows: 1.0)
    assert prepacked_linear._pays_from(nn.Linear(32, 16), 10**5) == 8


def test_a_slow_first_round_does_not_decide(timed: Any) -> None:
    rounds = iter([100.0] * 3)
    timed(lambda rows: 1.0, lambda rows: next(rounds, 0.5))
    assert prepacked_linear._pays_from(nn.Linear(32, 16), 1) == 1


def test_a_decision_is_made_once_for_a_shape_and_a_number_of_threads(timed: Any) -> None:
    ran = timed(lambda rows: 1.0, faster_at(8, 16, 64))
    layer, size = nn.Linear(32, 16), 5 * 32 * 16 * 4  # of which five copies take `size` bytes
    assert prepacked_linear._pays_from(layer, size) == 8
    assert sorted(set(ran)) == list(prepacked_linear.ROWS)
    assert ran.count(1) % 5 == 0  # every round reads five weights
    measured = len(ran)
    assert prepacked_linear._pays_from(nn.Linear(32, 16), size) == 8 and len(ran) == measured
    prepacked_linear._pays_from(nn.Linear(16, 32), size)
    assert len(ran) == 2 * measured
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        prepacked_linear._pays_from(layer, size)
    finally:
        torch.set_num_threads(threads)
    assert len(ran) == 3 * measured


def test_pack_replaces_the_layers_that_gain(timed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wide layers of a block gain from 2 rows on, the others never."""
    model = tiny.llama()
    timed(lambda rows: 1.0, faster_at())
    assert specnb.pack(model) is model
    specnb.unpack(model)
    by_shape = {(64, 32): 2, (32, 64): None}
    decide = lambda layer, size: by_shape.get(tuple(layer.weight.shape), 16)  # noqa: E731
    monkeypatch.setattr(prepacked_linear, "_pays_from", decide)
    view = specnb.pack(model)
    block, own = view.model.layers[0], model.model.layers[0]
    assert block.mlp.up_proj.rows == 2 and block.mlp.gate_proj.rows == 2
    assert block.self_attn.q_proj.rows == 16
    assert block.mlp.down_proj is own.mlp.down_proj
    assert type(own.mlp.up_proj) is nn.Linear
