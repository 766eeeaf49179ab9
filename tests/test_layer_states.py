"""The states of chosen layers that an LM keeps for a drafter are those of transformers' `output_hidden_states`."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from checks import cache_name, configs
from families.build import CAUSAL, IMAGE_TEXT, build
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from specnb.decoding.contracts import Row
from specnb.decoding.distributions import Processors
from specnb.decoding.lm.base import LM, LMOptions
from specnb.decoding.lm.cached_lm import CachedLM
from specnb.decoding.lm.create import create_lm
from specnb.decoding.lm.model_inputs import CacheSize, PreparedInputs
from specnb.decoding.lm.prepared_lm import PreparedLM
from specnb.decoding.lm.rowwise_lm import RowwiseLM
from specnb.decoding.schedules import Constant
from specnb.runtime.module_view import layers_path

NEW = "cache" in inspect.signature(tiny.llama().forward).parameters  # transformers 5.24: states go back to a copy
IDS = range(3, 60)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{name: (lambda name=name: tiny.family(name)) for name in ("llama", "qwen3", "gemma3", "gpt2", "deepseek_v3")},
    "falcon": lambda: build("falcon", CAUSAL),  # its rows are run one by one
    "gpt_neo": lambda: build("gpt_neo", CAUSAL),
    "prepares its inputs": lambda: build("deepseek_v32" if NEW else "ctrl", CAUSAL),
    "gemma3 with images": lambda: build("gemma3", IMAGE_TEXT),
    "qwen3_vl": lambda: build("qwen3_vl", IMAGE_TEXT),
    "hybrid": tiny.hybrid,
}


def row_of(ids: list[int], index: int = 0) -> Row:
    return Row(index, list(ids), 10**6, torch.Generator(), Processors(), Constant(0))


def depth_of(model: PreTrainedModel) -> int:
    layers: Any = model.get_submodule(layers_path(model))
    return len(layers)


@torch.no_grad()
def expected(model: PreTrainedModel, ids: list[int], layers: tuple[int, ...]) -> Tensor:
    """transformers' states `[n, layers * size]` of these tokens."""
    states = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[i][0] for i in layers], -1)


def check(model: PreTrainedModel, lm: LM, row: Row, drafted: list[int], layers: tuple[int, ...], start: int) -> None:
    """The states that `lm` keeps of a row are right, and there from position `start` on."""
    first, states = lm.hidden_states[row.index]
    whole = expected(model, row.ids + drafted, layers)
    assert first <= start
    assert len(whole) - first == len(states)
    assert (states - whole[first:]).abs().max() < 1e-4 * whole.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_the_states_are_those_of_transformers(name: str) -> None:
    """Each layer's own, after accepted and rejected drafts, for one row and for rows of different lengths."""
    model, rng = MODELS[name](), random.Random(name)
    if name == "hybrid" and not NEW:
        pytest.skip("rolled back since transformers 5.24")
    layers = tuple(range(depth_of(model) + 1))
    before = configs(model)
    for lengths in ((7,), (3, 12, 5)):
        rows = [row_of(rng.choices(IDS, k=n), index) for index, n in enumerate(lengths)]
        lm = create_lm(model, rows, CacheSize(64), options=LMOptions(hidden_states="all", layers=layers))
        for turn in range(4):
            starts = [0 if turn == 0 else len(row.ids) - 1 for row in rows]
            drafted = [rng.choices(IDS, k=rng.randint(0, 4)) if turn else [] for _ in rows]
            lm.logits(rows, drafted, [len(tokens) + 1 for tokens in drafted])
            for row, tokens, start in zip(rows, drafted, starts, strict=True):
                check(model, lm, row, tokens, layers, start)
                row.ids += tokens[: rng.randint(0, len(tokens))] + rng.choices(IDS, k=1)
    assert configs(model) == before


def test_each_kind_of_lm_was_tried() -> None:
    def kind(name: str, rows: int) -> type[LM]:
        return type(create_lm(MODELS[name](), [row_of([5], i) for i in range(rows)], CacheSize(8)))

    assert kind("llama", 2) is CachedLM
    assert kind("falcon", 2) is RowwiseLM
    assert kind("prepares its inputs", 1) is PreparedLM


def test_the_order_is_the_callers_and_kept_states_are_the_last_ones() -> None:
    model, row = tiny.llama(), row_of([5, 6, 7, 8, 9])
    lm = create_lm(model, [row], CacheSize(16), options=LMOptions(hidden_states="kept", layers=(4, 1, 1, 0)))
    lm.logits([row], [[3]], [2])
    first, states = lm.hidden_states[0]
    whole = expected(model, [5, 6, 7, 8, 9, 3], (4, 1, 1, 0))
    assert (first, states.shape) == (4, (2, 4 * 32))
    assert (states - whole[4:]).abs().max() < 1e-5


def test_a_long_prompt_in_chunks() -> None:
    model, row = tiny.gemma3(), row_of(tiny.ids(2, 23)[0].tolist())
    options = LMOptions(hidden_states="all", layers=(1, 3))
    lm = create_lm(model, [row], CacheSize(64, prefill_chunk_size=4), options=options)
    lm.logits([row], [[]], [1])
    check(model, lm, row, [], (1, 3), 0)


def test_the_states_of_tokens_in_a_given_cache_are_missing() -> None:
    """They start with the first token that was computed, and the position says which it is."""
    model, ids = tiny.llama(), tiny.ids(2, 12)
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :8], use_cache=True, **{cache_name(model): past})
    row = row_of(ids[0].tolist())
    options = LMOptions(hidden_states="all", layers=(2,))
    lm = create_lm(model, [row], CacheSize(32), prepared=PreparedInputs(ids, past=past), options=options)
    lm.logits([row], [[]], [1])
    assert lm.hidden_states[0][0] == 8
    check(model, lm, row, [], (2,), 8)


@pytest.mark.parametrize("layers", [(5,), (0, -1)])
def test_a_layer_that_is_not_there_is_refused_by_name(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has 4 layers: give 0 \(the embeddings\) to 4"):
        create_lm(tiny.llama(), [row_of([5])], CacheSize(8), options=LMOptions(hidden_states="all", layers=layers))


def test_layers_with_several_streams_are_refused_by_name() -> None:
    model, row = build("gemma3n_text", CAUSAL), row_of([5, 6])
    lm = create_lm(model, [row], CacheSize(8), options=LMOptions(hidden_states="all", layers=(1, 2)))
    with pytest.raises(ValueError, match="do not give one state per token"):
        lm.logits([row], [[]], [1])
