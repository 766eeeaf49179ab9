"""Cases of kinds state-leak and speed-memory: nothing outlives a call, and every run accounts for what it did."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tiny
import torch
from checks import EAGER, Recorder, configs, consistent, no_forward, padded, plain, spec, watched
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import specnb
from specnb.trace import GenerationResult

T = tiny.llama()
D = tiny.noisy(T, 0.03)
X = tiny.ids(0, 7)
WAYS: dict[str, dict[str, Any]] = {
    "draft": {"assistant_model": D, "num_assistant_tokens": 4, **EAGER},
    "lookup": {"prompt_lookup_num_tokens": 4},
}
FREE = plain(T, X, max_new_tokens=12)


class Boom(Exception):
    """What no library raises."""


def unharmed(before: list[Any]) -> None:
    """Both models are configured as before, and plain greedy writes the same text."""
    assert configs(T, D) == before
    assert plain(T, X, max_new_tokens=12) == FREE


def fails(error: type[BaseException], recorder: Recorder, **options: Any) -> GenerationResult:
    """Run into `error`; the partial result, which has the tokens of every step that was reported before."""
    shown: list[int] = []
    with pytest.raises(error) as caught:
        spec(T, X, max_new_tokens=12, streamer=recorder, on_step=lambda step: shown.extend(step.emitted), **options)
    partial: GenerationResult = caught.value.partial_result  # type: ignore[attr-defined]
    consistent(partial)
    assert list(partial.ids)[: len(shown)] == shown
    assert partial.finish_reason == "interrupted"
    assert list(partial.ids) == FREE[: len(partial.ids)]
    assert partial.sequences.tolist() == [X[0].tolist() + list(partial.ids)]
    assert recorder.ended == 1
    assert recorder.ids == (X[0].tolist() + list(partial.ids))[: len(recorder.ids)]
    return partial


# ---------------------------------------------------------------- STA-01
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize(("way", "which"), [("draft", "target"), ("draft", "draft"), ("lookup", "target")])
def test_STA_01_failure_in_every_forward(way: str, which: str, error: type[BaseException]) -> None:
    before, model = configs(T, D), {"target": T, "draft": D}[which]
    with watched(model) as calls:
        spec(T, X, max_new_tokens=12, **WAYS[way])
    assert len(calls) >= 3
    lengths = []
    for at in range(len(calls)):

        def fail(call: int, at: int = at) -> None:
            if call == at:
                raise error

        with watched(model, fail):
            lengths.append(len(fails(error, Recorder(), **WAYS[way]).ids))
        assert configs(T, D) == before
    assert lengths == sorted(lengths)
    assert lengths[0] == (0 if which == "target" else 1)  # the first token waits for no draft
    assert lengths[-1] > 1
    if which == "target":  # every pass before the failing one gave a token
        assert all(length >= passes for passes, length in enumerate(lengths))
    unharmed(before)


class FailingProcessor(LogitsProcessor):
    """Raises at its n-th call."""

    def __init__(self, n: int, error: type[BaseException]) -> None:
        self.left, self.error = n, error

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return scores


class FailingCriterion(StoppingCriteria):
    """Raises at its n-th call."""

    def __init__(self, n: int, error: type[BaseException]) -> None:
        self.left, self.error = n, error

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("way", WAYS)
def test_STA_01_failure_in_the_users_own_code(way: str, where: str, error: type[BaseException]) -> None:
    before = configs(T, D)
    for n in range(1, 12):
        if where == "logits_processor":
            mine: Any = LogitsProcessorList([FailingProcessor(n, error)])
        else:
            mine = StoppingCriteriaList([FailingCriterion(n, error)])
        partial = fails(error, Recorder(), **{where: mine}, **WAYS[way])
        assert len(partial.ids) == (n - 1 if where == "logits_processor" else n)  # a criterion is asked after the token
    unharmed(before)


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("way", WAYS)
def test_STA_01_failure_in_a_listener(way: str, error: type[BaseException]) -> None:
    """The partial result has all steps that came before the failure of on_step, the last one included."""
    before = configs(T, D)
    whole = spec(T, X, max_new_tokens=12, **WAYS[way])
    for n in range(1, len(whole.steps) + 1):
        seen: list[specnb.Step] = []

        def on_step(step: specnb.Step, seen: list[specnb.Step] = seen, n: int = n) -> None:
            seen.append(step)
            if len(seen) == n:
                raise error

        with pytest.raises(error) as caught:
            spec(T, X, max_new_tokens=12, on_step=on_step, **WAYS[way])
        partial = caught.value.partial_result  # type: ignore[attr-defined]
        consistent(partial)
        assert [s.emitted for s in partial.steps] == [s.emitted for s in seen] == [s.emitted for s in whole.steps[:n]]
    unharmed(before)


class FailingStreamer(Recorder):
    """Raises at its n-th put."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def put(self, value: Tensor) -> None:
        super().put(value)
        if len(self.puts) == self.n:
            raise Boom


@pytest.mark.parametrize("n", [1, 2, 3])
def test_STA_01_failure_in_the_streamer(n: int) -> None:
    before = configs(T, D)
    partial = fails(Boom, FailingStreamer(n), **WAYS["draft"])
    assert len(partial.ids) >= n - 1  # the first call shows the prompt
    unharmed(before)


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_STA_01_failure_with_rows(error: type[BaseException]) -> None:
    """Every row keeps whole steps, and says "interrupted" unless it had ended in a step that it kept."""
    before = configs(T, D)
    prompts = [X, tiny.ids(1, 4), tiny.ids(2, 9)]
    ids, mask = padded(prompts)
    free = [plain(T, prompt, max_new_tokens=12) for prompt in prompts]
    eos = [free[1][3], free[2][6]]
    free = [plain(T, prompt, max_new_tokens=12, eos_token_id=eos) for prompt in prompts]

    def check(partial: GenerationResult, kept: Sequence[int]) -> None:
        """Each row is a beginning of its text, with at least `kept` tokens of it."""
        consistent(partial)
        for row, whole, n in zip(partial.rows, free, kept, strict=True):
            assert list(row.ids) == whole[: len(row.ids)]
            assert len(row.ids) >= min(n, len(whole))
            ended = len(row.ids) == len(whole)
            assert row.finish_reason == (("eos" if whole[-1] in eos else "length") if ended else "interrupted")

    for at in range(5):

        def fail(call: int, at: int = at) -> None:
            if call == at:
                raise error

        with watched(T, fail), pytest.raises(error) as caught:
            spec(T, ids, attention_mask=mask, max_new_tokens=12, eos_token_id=eos, **WAYS["draft"])
        check(caught.value.partial_result, [at] * 3)  # type: ignore[attr-defined]
    for n in range(1, 14):
        seen: list[specnb.Step] = []

        def on_step(step: specnb.Step, seen: list[specnb.Step] = seen, n: int = n) -> None:
            seen.append(step)
            if len(seen) == n:
                raise error

        try:
            spec(T, ids, attention_mask=mask, max_new_tokens=12, eos_token_id=eos, on_step=on_step, **WAYS["draft"])
        except error as raised:
            kept = [sum(len(step.emitted) for step in seen if step.row == row) for row in range(3)]
            assert len(seen) == n and sum(kept) >= n
            check(raised.partial_result, kept)  # type: ignore[attr-defined]
        else:
            assert 5 < len(seen) < n  # it had fewer steps
    unharmed(before)


def test_STA_01_the_decoder_keeps_the_partial_result() -> None:
    decoder = specnb.decoder(**WAYS["draft"])

    def fail(call: int) -> None:
        if call == 2:
            raise KeyboardInterrupt

    with watched(T, fail), pytest.raises(KeyboardInterrupt):
        T.generate(X, attention_mask=torch.ones_like(X), do_sample=False, max_new_tokens=12, custom_generate=decoder)
    assert decoder.result is not None
    assert decoder.result.finish_reason == "interrupted"
    assert 2 <= len(decoder.result.ids) < 12  # two passes came before
    assert list(decoder.result.ids) == FREE[: len(decoder.result.ids)]


def test_STA_01_a_refused_call_leaves_no_old_result() -> None:
    """After a call that failed, `.result` is not the result of the one before."""
    decoder = specnb.decoder(**WAYS["draft"])
    T.generate(X, attention_mask=torch.ones_like(X), do_sample=False, max_new_tokens=4, custom_generate=decoder)
    assert decoder.result is not None
    with pytest.raises(ValueError, match="guidance_scale"):
        T.generate(
            X,
            attention_mask=torch.ones_like(X),
            do_sample=False,
            max_new_tokens=4,
            guidance_scale=2.0,
            custom_generate=decoder,
        )
    assert decoder.result is None


@pytest.mark.parametrize("layer", [-1, 0, 4, 9])
def test_STA_01_STA_02_exit_layers_outside_the_model_are_refused_by_name(layer: int) -> None:
    before = configs(T, D)
    with no_forward(T, D):
        with pytest.raises(ValueError, match=f"assistant_early_exit={layer}"):
            spec(T, X, max_new_tokens=8, assistant_early_exit=layer)
        with pytest.raises(ValueError, match="assistant_early_exit|early_exit"):
            spec(T, X, max_new_tokens=8, assistant_early_exit=layer, **WAYS["draft"])
    unharmed(before)


def test_a_run_changes_no_model() -> None:
    before = configs(T, D)
    weights = [copy.deepcopy(model.state_dict()) for model in (T, D)]
    for way in WAYS.values():
        spec(T, X, max_new_tokens=12, **way)
        specnb.generate(
            T, X, do_sample=True, temperature=0.7, top_k=3, max_new_tokens=12, repetition_penalty=1.2, **way
        )
    unharmed(before)
    for model, old in zip((T, D), weights, strict=True):
        assert all(torch.equal(old[name], value) for name, value in model.state_dict().items())
        assert not any(parameter.grad is not None for parameter in model.parameters())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_models_in_training_mode_and_with_gradients_stay_so() -> None:
    model, draft = tiny.llama().train(), tiny.noisy(tiny.llama(), 0.03).train()
    result = spec(model, X, max_new_tokens=12, assistant_model=draft, **EAGER)
    assert list(result.ids) == FREE  # no dropout in these
    assert model.training
    assert draft.training
    assert not result.sequences.requires_grad


# ---------------------------------------------------------------- STA-04
def test_STA_04_the_heuristic_schedule_starts_afresh() -> None:
    perfect = tiny.noisy(T, 0)
    before = configs(T, perfect)
    how = {"assistant_model": perfect, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic", **EAGER}
    runs = [[len(step.drafted) for step in spec(T, X, max_new_tokens=30, **how).steps] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2] == [0, 3, 5, 7, 9, 0]  # 1 + 4 + 6 + 8 + 10 + 1 tokens
    assert configs(T, perfect) == before
    decoder = specnb.decoder(**how)
    for _ in range(2):
        T.generate(X, attention_mask=torch.ones_like(X), do_sample=False, max_new_tokens=30, custom_generate=decoder)
        assert decoder.result is not None
        assert [len(step.drafted) for step in decoder.result.steps] == runs[0]


def test_STA_04_the_heuristic_schedule_follows_the_acceptance() -> None:
    how = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "heuristic", **EAGER}
    for eps in (0.02, 0.05, 0.5):
        result = spec(T, X, max_new_tokens=80, assistant_model=tiny.noisy(T, eps), **how)
        k = 4
        left = 80
        for step in result.steps[1:]:
            left = 80 - (step.position - 7)
            assert len(step.drafted) == min(k, left - 1)
            if step.drafted:
                k = k + 2 if step.accepted == len(step.drafted) else max(1, k - 1)


# ---------------------------------------------------------------- STA-05
def test_STA_05_an_option_in_the_call_decides() -> None:
    perfect = tiny.noisy(T, 0)
    perfect.generation_config.num_assistant_tokens = 5
    perfect.generation_config.assistant_confidence_threshold = 1.0
    perfect.generation_config.num_assistant_tokens_schedule = "heuristic"
    before = configs(T, perfect)
    with watched(T) as calls:
        result = spec(T, X, max_new_tokens=20, assistant_model=perfect, num_assistant_tokens=2, **EAGER)
    assert calls.widths[0] == 7
    assert max(calls.widths[1:]) == 3
    assert calls.widths[1:].count(3) >= 6
    assert result.options["num_assistant_tokens"] == 2
    assert result.options["assistant_confidence_threshold"] == 0
    assert result.options["num_assistant_tokens_schedule"] == "constant"
    assert configs(T, perfect) == before


def test_STA_05_the_targets_config_is_next_and_the_drafts_is_never_read() -> None:
    model, perfect = tiny.llama(), tiny.noisy(T, 0)
    perfect.generation_config.num_assistant_tokens = 9
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.assistant_confidence_threshold = 0.0
    result = spec(model, X, max_new_tokens=20, assistant_model=perfect)
    assert max(len(step.drafted) for step in result.steps) == result.options["num_assistant_tokens"] == 4
    result = spec(model, X, max_new_tokens=20, assistant_model=perfect, num_assistant_tokens=3)
    assert max(len(step.drafted) for step in result.steps) == 3
    model.generation_config.prompt_lookup_num_tokens = 6
    result = spec(model, X, max_new_tokens=20)
    assert result.method == "prompt_lookup"
    assert result.options["num_assistant_tokens"] == 6


@pytest.mark.slow
def test_STA_05_the_confidence_threshold_ends_drafts() -> None:
    drafted = []
    for threshold in (0, 0.2, 0.5, 0.9, 1):
        result = spec(
            T, X, max_new_tokens=60, assistant_model=D, num_assistant_tokens=8, assistant_confidence_threshold=threshold
        )
        assert result.options["assistant_confidence_threshold"] == threshold
        drafted.append(result.num_draft_tokens / result.num_spec_steps)
        for step in result.steps:  # every drafted token but the last was above the threshold
            for i in range(1, len(step.drafted)):
                text = torch.tensor(
                    [X[0].tolist() + list(result.ids[: step.position - 7]) + list(step.drafted[: i - 1])]
                )
                with torch.no_grad():
                    probs = D(text).logits[0, -1].softmax(-1)
                assert probs[step.drafted[i - 1]] >= threshold - 1e-5
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] > 6 > 1.5 > drafted[-1]


# ---------------------------------------------------------------- SPD-01
DRAFTS: dict[str, Callable[[], Any]] = {
    "0": lambda: tiny.noisy(T, 0),
    "0.03": lambda: tiny.noisy(T, 0.03),
    "0.5": lambda: tiny.noisy(T, 0.5),
    "unrelated": lambda: tiny.llama(seed=7),
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
@pytest.mark.parametrize("k", [1, 5, 20])
@pytest.mark.parametrize("draft", DRAFTS)
def test_SPD_01_counters_agree_with_the_models(draft: str, k: int, schedule: str) -> None:
    model = DRAFTS[draft]()
    with watched(T) as calls, watched(model) as of_draft:
        result = spec(
            T,
            X,
            max_new_tokens=60,
            assistant_model=model,
            num_assistant_tokens=k,
            num_assistant_tokens_schedule=schedule,
            **EAGER,
        )
    consistent(result)
    assert result.target_passes == len(result.steps) == len(calls) <= 60
    assert result.num_draft_tokens == len(of_draft)  # one draft pass per drafted token
    assert result.num_accepted_draft_tokens + len(result.steps) == result.num_emitted_tokens == 60
    assert [len(step.drafted) + 1 for step in result.steps[1:]] == calls.widths[1:]  # only what is new goes through
    assert max(of_draft.widths[1:], default=0) <= 2  # the prompt once, then one token, or two after a full acceptance
    assert sum(of_draft.widths) <= 7 + 60 + result.num_draft_tokens
    assert f"{result.num_accepted_draft_tokens} of {result.num_draft_tokens} drafted tokens accepted" in repr(result)
    if draft == "0":
        assert result.draft_acceptance_rate == 1
        assert k == 1 or result.target_passes < 20
    if draft in ("0.5", "unrelated"):
        assert result.draft_acceptance_rate < 0.2


@pytest.mark.parametrize("chunk", [None, 3, 10])
def test_SPD_01_the_prompt_is_processed_once(chunk: int | None) -> None:
    prompt = tiny.ids(3, 50)
    for way in WAYS.values():
        with watched(T.model) as calls:
            result = spec(T, prompt, max_new_tokens=20, prefill_chunk_size=chunk, **way)
        prefill = len(calls) - len(result.steps) + 1
        assert sum(calls.widths[:prefill]) - len(result.steps[0].drafted) == 50
        assert max(calls.widths) <= (chunk or 50) + 4
        assert calls.widths[prefill:] == [len(step.drafted) + 1 for step in result.steps[1:]]


def test_SPD_01_no_copy_of_the_kv_cache_per_step() -> None:
    """The memory of the kv cache is allocated once and written in place while its capacity suffices."""
    from specnb.decoding.contracts import Row
    from specnb.decoding.distributions import Processors
    from specnb.decoding.lm.cached_lm import CachedLM
    from specnb.decoding.lm.model_inputs import CacheSize
    from specnb.decoding.schedules import Constant

    row = Row(0, tiny.ids(0, 30)[0].tolist(), 100, torch.Generator(), Processors(), Constant(5))
    lm = CachedLM(T, [row], CacheSize(200))
    places = set()
    for i in range(40):
        lm.logits([row], [[5, 6, 7]], [4])
        row.ids += [5, 6, 7 + i % 3]
        places |= {layer.keys.data_ptr() for layer in lm.kv_cache.row_layers}
        assert lm.kv_cache.row_layers[0].keys.shape[2] == 200
    assert len(places) == T.config.num_hidden_layers


def test_SPD_01_the_kv_cache_grows_geometrically() -> None:
    from specnb.decoding.contracts import Row
    from specnb.decoding.distributions import Processors
    from specnb.decoding.lm.cached_lm import CachedLM
    from specnb.decoding.schedules import Constant

    row = Row(0, [5], 10**6, torch.Generator(), Processors(), Constant(5))
    lm = CachedLM(tiny.llama(positions=4096), [row])
    sizes = set()
    for _ in range(200):
        lm.logits([row], [[]], [1])
        row.ids += [5, 6, 7]
        sizes.add(lm.kv_cache.row_layers[0].keys.shape[2])
    assert len(sizes) < 14
    assert max(sizes) < 2 * len(row.ids) + 10
