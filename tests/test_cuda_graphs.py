"""CUDA graphs. Without a GPU, a traced program serves as the graph: it repeats the same work without Python, too."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from checkpoints import gemma4_drafter, gemma4_target, mtp_model
from checks import EAGER, STEADY, configs, consistent, padded, plain, spec
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaForCausalLM

import specnb
from specnb.decoding import loop
from specnb.decoding.distributions import BlockDistributions, read_choices
from specnb.decoding.lm import cached_lm as cached
from specnb.decoding.lm.kv_cache import KVCache
from specnb.runtime import cuda_graphs as graphs

X = tiny.ids(0, 9)
PROMPTS = [X, tiny.ids(3, 21), tiny.ids(4, 2)]


class Recorder:
    """Traces a pass; notes the shapes recorded, counts the repetitions."""

    def __init__(self) -> None:
        self.recorded: list[torch.Size] = []
        self.repeated = 0

    def __call__(self, step: graphs.Block, block: torch.Tensor) -> Callable[[], graphs.Pass]:
        with torch.no_grad():
            program = make_fx(lambda given: [part for part in step(given) if part is not None])(block)
        self.recorded.append(block.shape)

        def repeat() -> graphs.Pass:
            self.repeated += 1
            with torch.no_grad():
                return graphs.Pass(*program(block))

        return repeat


@pytest.fixture(autouse=True)
def recorder() -> Iterator[Recorder]:
    yield Recorder()
    graphs._RECORDERS.clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "sdpa"), ("gemma4", "sdpa"), ("gemma3", "eager"), ("gpt2", "eager"), ("glm4_moe", "sdpa")],
)
def test_the_text_is_the_same_and_the_model_too(name: str, attention: str, recorder: Recorder) -> None:
    model = tiny.family(name)
    model.set_attn_implementation(attention)
    draft = tiny.noisy(model, 0.02)
    expected = plain(model, X, max_new_tokens=30)
    before, modules = configs(model, draft), [id(module) for one in (model, draft) for module in one.modules()]
    graphs._RECORDERS[model] = graphs._RECORDERS[draft] = recorder
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": draft, **STEADY}, {"assistant_early_exit": 1}):
        repeated = recorder.repeated
        result = spec(model, X, max_new_tokens=30, **options)
        assert list(result.ids) == expected
        consistent(result)
        assert ("assistant_early_exit" in options) == (recorder.repeated == repeated)
    assert configs(model, draft) == before
    assert [id(module) for one in (model, draft) for module in one.modules()] == modules


def test_most_passes_are_repetitions(recorder: Recorder) -> None:
    model = tiny.llama()
    graphs._RECORDERS[model] = recorder
    assert list(spec(model, X, max_new_tokens=40).ids) == plain(model, X, max_new_tokens=40)
    # One pass over the prompt and two ordinary ones of one token. The third is compared; it and all later ones repeat.
    assert (recorder.recorded, recorder.repeated) == ([(1, 2)], 40 - 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma4"])
def test_rows_leave_and_the_kv_cache_grows(name: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.family(name)
    model.generation_config.eos_token_id = plain(model, X, max_new_tokens=12)[-1]
    expected = [plain(model, prompt, max_new_tokens=60) for prompt in PROMPTS]
    graphs._RECORDERS[model] = recorder
    monkeypatch.setattr(cached, "KVCache", lambda config, rows, _: KVCache(config, rows, 8))
    ids, mask = padded(PROMPTS)
    how = {"assistant_model": tiny.noisy(model, 0.02), "num_assistant_tokens": 2, **STEADY}
    result = spec(model, ids, attention_mask=mask, max_new_tokens=60, **how)
    assert [list(row.ids) for row in result.rows] == expected
    assert len({len(row.ids) for row in result.rows}) > 1
    assert len({rows for rows, _ in recorder.recorded}) > 1
    assert recorder.repeated > 5


@pytest.mark.parametrize("recorded", [False, True])
def test_the_kv_cache_goes_with_the_call(recorded: bool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    model, stores = tiny.llama(), []

    def noted(*given: Any) -> KVCache:
        store = KVCache(*given)
        stores.append(weakref.ref(store))
        return store

    monkeypatch.setattr(cached, "KVCache", noted)
    if recorded:
        graphs._RECORDERS[model] = recorder
    gc.collect()
    gc.disable()  # on a device nobody collects before memory runs out
    try:
        spec(model, X, max_new_tokens=12)
        assert [store() for store in stores] == [None]
    finally:
        gc.enable()


@pytest.mark.slow
def test_sampling_is_the_same(recorder: Recorder) -> None:
    model = tiny.llama().double()
    draft = tiny.noisy(model, 0.02)
    options: dict[str, Any] = {"do_sample": True, "seed": 4, "max_new_tokens": 40, "top_k": 20}
    asked: list[dict[str, Any]] = [{}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": draft, **EAGER}]
    expected = [specnb.generate(model, X, **options, **more).ids for more in asked]
    graphs._RECORDERS[model] = graphs._RECORDERS[draft] = recorder
    assert [specnb.generate(model, X, **options, **more).ids for more in asked] == expected
    assert recorder.repeated > 40


@pytest.mark.slow
def test_drafters_that_read_the_targets_states(recorder: Recorder) -> None:
    gemma = gemma4_target()
    assistant, glm = gemma4_drafter(gemma), mtp_model("glm4_moe")
    for model, options in ((gemma, {"assistant_model": assistant}), (glm, {"use_mtp": True})):
        expected = plain(model, X, max_new_tokens=40)
        ordinary = spec(model, X, max_new_tokens=40, num_assistant_tokens=3, **STEADY, **options)
        graphs._RECORDERS[model] = recorder
        before = recorder.repeated
        result = spec(model, X, max_new_tokens=40, num_assistant_tokens=3, **STEADY, **options)
        assert list(result.ids) == list(ordinary.ids) == expected
        assert [step.drafted for step in result.steps] == [step.drafted for step in ordinary.steps]
        assert recorder.repeated > before + 5


def test_what_cannot_be_recorded_runs_as_ever() -> None:
    model, asked = tiny.llama(), []

    def waits(step: graphs.Block, block: torch.Tensor) -> Callable[[], graphs.Pass]:
        step(block)
        asked.append(block.shape)
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs._RECORDERS[model] = waits
    assert list(spec(model, X, max_new_tokens=30).ids) == plain(model, X, max_new_tokens=30)
    assert len(asked) == 1  # not again in every step


class Counting(LlamaForCausalLM):
    """Takes its positions from the length of its cache; a recording would repeat the same position."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        kwargs["position_ids"] = cache.get_seq_length() + torch.arange(kwargs["input_ids"].shape[1])[None]
        return super().forward(*args, **kwargs)


def test_a_recording_that_repeats_a_position_is_not_used(recorder: Recorder) -> None:
    model = tiny.llama()
    model.__class__ = Counting
    expected = plain(model, X, max_new_tokens=30)
    assert list(spec(model, X, max_new_tokens=30).ids) == expected  # after the block check that an unknown class gets
    graphs._RECORDERS[model] = recorder
    assert list(spec(model, X, max_new_tokens=30).ids) == expected
    assert (len(recorder.recorded), recorder.repeated) == (1, 1)


def test_an_interrupt_while_recording() -> None:
    model = tiny.llama()

    def interrupted(step: graphs.Block, block: torch.Tensor) -> Callable[[], graphs.Pass]:
        raise KeyboardInterrupt

    graphs._RECORDERS[model] = interrupted
    with pytest.raises(KeyboardInterrupt) as caught:
        spec(model, X, max_new_tokens=30)
    partial = caught.value.partial_result  # type: ignore[attr-defined]
    assert list(partial.ids) == plain(model, X, max_new_tokens=30)[: len(partial.ids)]
    assert partial.ids


def test_a_model_elsewhere_is_refused() -> None:
    model = tiny.llama()
    with pytest.raises(ValueError, match="all of LlamaForCausalLM on one CUDA device, but it is on cpu"):
        specnb.cuda_graphs(model)
    assert specnb.cuda_graphs(model, on=False) is model


def test_a_model_that_makes_its_own_masks_is_refused(recorder: Recorder) -> None:
    model = tiny.llama()
    model.config._attn_implementation = "flash_attention_2"
    graphs._RECORDERS[model] = recorder
    with pytest.raises(
        ValueError, match=r"CUDA graphs cannot be used.*flash_attention_2.*cuda_graphs\(model, on=False\)"
    ):
        spec(model, X, max_new_tokens=4)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}])
def test_choices_are_read_at_once(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    class Read(BlockDistributions):
        def argmax(self, i: int) -> int:
            found = super().argmax(i)
            fresh = BlockDistributions(self.row, self.draft, self.logits)
            read_choices([BlockDistributions(self.row, self.draft, self.logits[:1]), fresh])
            read.append(fresh._choices is not None)
            assert fresh._choices is None or fresh._choices[i] == found
            return found

    monkeypatch.setattr(loop, "BlockDistributions", Read)
    model = tiny.llama()
    assert list(spec(model, X, max_new_tokens=12, prompt_lookup_num_tokens=3, **options).ids) == plain(
        model, X, max_new_tokens=12, **options
    )
    assert set(read) == {not options}  # a processor that looks at the text is asked in order, position by position


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_on_a_device(name: str) -> None:
    model = tiny.family(name).to("cuda")
    draft = tiny.noisy(model.cpu(), 0.02).to("cuda")
    model = model.to("cuda")
    ids = X.to("cuda")
    expected = plain(model, ids, max_new_tokens=40)
    specnb.cuda_graphs(model)
    specnb.cuda_graphs(draft)
    for options in ({}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": draft, **EAGER}):
        assert list(spec(model, ids, max_new_tokens=40, **options).ids) == expected
