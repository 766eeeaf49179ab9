"""Early exit: the target's first layers draft, what they computed is reused, and the model is never touched."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import checkpoints
import pytest
import tiny
import torch
from checks import STEADY, cache_name, configs, consistent, no_forward, padded, plain, spec
from test_equality import OTHERS
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel

import specnb
from specnb.decoding import loop
from specnb.decoding.schedules import SCHEDULES, Constant

X = tiny.ids(0, 7)
FAMILIES = list(tiny.FAMILIES)


@cache
def target(family: str) -> PreTrainedModel:
    """A model of the family whose early layers are right often: what its later layers add is damped."""
    model = tiny.family(family)
    if family.startswith("gemma"):  # as they are, early layers agree
        return model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            number = next((int(part) for part in name.split(".") if part.isdigit()), 0)
            if number and ("o_proj" in name or "down_proj" in name or "c_proj" in name):
                parameter.mul_(0.3)
    return model


def depth(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def layers(model: PreTrainedModel) -> Any:
    decoder = model.get_decoder()
    return decoder.h if hasattr(decoder, "h") else decoder.layers


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[list[list[int]]]:
    """The widths of the calls of each layer."""
    widths: list[list[int]] = [[] for _ in layers(model)]

    def hook(i: int) -> Any:
        return lambda module, args, kwargs: widths[i].append((args[0] if args else kwargs["hidden_states"]).shape[1])

    handles = [layer.register_forward_pre_hook(hook(i), with_kwargs=True) for i, layer in enumerate(layers(model))]
    try:
        yield widths
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------- equality
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_plain(family: str) -> None:
    """Every exit layer, k from 1 to 16, one row and several."""
    model, rng = target(family), random.Random(family)
    prompts = [tiny.ids(i, n) for i, n in enumerate((1, 7, 20))]
    eos = rng.sample(range(3, 64), 6)
    options: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": eos}
    expected = [plain(model, prompt, **options) for prompt in prompts]
    accepted = 0
    for exit in range(1, depth(model)):
        for k in (1, 2, 5, 8, 16):
            how = {"assistant_early_exit": exit, "num_assistant_tokens": k, **STEADY}
            if k == 5:
                how |= {"prefill_chunk_size": 3, "assistant_confidence_threshold": 0.3}
            if k == 8:
                how["num_assistant_tokens_schedule"] = rng.choice(["heuristic", "adaptive"])
            i = rng.randrange(3)
            result = spec(model, prompts[i], **options, **how)
            assert list(result.ids) == expected[i], (exit, k, i)
            consistent(result)
            assert result.method == "early_exit"
            ids, mask = padded(prompts)
            result = spec(model, ids, attention_mask=mask, **options, **how)
            assert [list(row.ids) for row in result.rows] == expected, (exit, k)
            accepted += result.num_accepted_draft_tokens
    assert accepted > 10


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_every_k_with_options(family: str) -> None:
    """Options of generate() mean what they mean without drafting; attention in eager and sdpa."""
    model = target(family)
    for k in range(1, 17):
        rng = random.Random(f"{family} {k}")
        options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 20)} | rng.choice(
            [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [3, 9, 11]}, {}]
        )
        prompt = tiny.ids(k, rng.randint(1, 30))
        exit = rng.randrange(1, depth(model))
        model.set_attn_implementation("eager" if k % 4 == 0 else "sdpa")
        try:
            result = spec(model, prompt, assistant_early_exit=exit, num_assistant_tokens=k, **options, **STEADY)
            assert list(result.ids) == plain(model, prompt, **options)
        finally:
            model.set_attn_implementation("sdpa")


def test_a_second_turn_goes_on_in_the_same_cache() -> None:
    model = target("llama")
    for first in ({}, {"assistant_early_exit": 2, **STEADY}):
        past = DynamicCache(config=model.config)
        name = cache_name(model)
        one = spec(model, X, max_new_tokens=6, **{name: past}, **first)
        prompt = torch.cat([one.sequences, tiny.ids(9, 3)], 1)
        two = spec(model, prompt, max_new_tokens=8, assistant_early_exit=2, **{name: past}, **STEADY)
        assert list(two.ids) == plain(model, prompt, max_new_tokens=8)
        assert past.get_seq_length() == prompt.shape[1] + 8 - 1


# ---------------------------------------------------------------- layer calls
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [1, 4])
def test_STA_02_each_token_passes_each_layer_once(family: str, k: int) -> None:
    """Lower layers run over the prompt once, then token by token; upper layers over each drafted block in one call."""
    model, exit = target(family), 2
    rounds = spec(model, X, max_new_tokens=30, assistant_early_exit=exit, num_assistant_tokens=k, **STEADY)
    with counted(model) as checks_only, pytest.raises(RuntimeError, match="stop here"):
        spec(
            model,
            X,
            max_new_tokens=30,
            assistant_early_exit=exit,
            logits_processor=LogitsProcessorList([Stop()]),
            **STEADY,
        )
    with counted(model) as widths:
        result = spec(model, X, max_new_tokens=30, assistant_early_exit=exit, num_assistant_tokens=k, **STEADY)
    assert [s.drafted for s in result.steps] == [s.drafted for s in rounds.steps]
    before = [len(calls) - 1 for calls in checks_only]  # the check that the halves make the whole; then the prompt
    assert all(2 * n <= 8 and max(calls[:n], default=0) <= 2 for n, calls in zip(before, widths, strict=True))
    calls = [own[n:] for n, own in zip(before, widths, strict=True)]
    assert all(own[0] == 7 for own in calls)  # the prompt, once, through all layers
    blocks = [len(step.drafted) + 1 for step in result.steps[1:]]
    for i, own in enumerate(calls):
        if i >= exit:
            assert own[1:] == blocks
        else:
            assert sum(own[1:]) == sum(blocks)
            assert max(own[1:]) == 1 or k == 1
    assert result.target_passes == len(result.steps)


class Stop(LogitsProcessor):
    """Stops a run at its first token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raise RuntimeError("stop here")


@pytest.mark.slow
def test_the_draft_is_the_first_layers_norm_and_head() -> None:
    """Drafted tokens are the choice of a model of E layers made of the same weights, in every round."""
    for family in ("llama", "qwen3", "glm4_moe", "gemma3", "gpt2"):
        model = target(family)
        for exit in range(1, depth(model)):
            fewer: dict[str, Any] = {"n_layer" if family == "gpt2" else "num_hidden_layers": exit}
            if getattr(model.config, "layer_types", None):
                fewer["layer_types"] = model.config.layer_types[:exit]
            config = type(model.config)(**model.config.to_dict() | fewer)
            small = type(model)(config).float().eval()
            small.load_state_dict(model.state_dict(), strict=False)
            for prompts in ([X], [X, tiny.ids(3, 12)]):
                ids, mask = padded(prompts)
                result = spec(model, ids, attention_mask=mask, max_new_tokens=20, assistant_early_exit=exit, **STEADY)
                for row in result.rows:
                    for step in row.steps:
                        done = step.position - len(row.prompt_ids)
                        text = [*row.prompt_ids, *row.ids[:done], *step.drafted]
                        with torch.no_grad():
                            logits = small(torch.tensor([text])).logits[0]
                        if step.drafted:
                            assert logits[step.position - 1 : -1].argmax(-1).tolist() == list(step.drafted)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma4", "deepseek_v3"])
def test_reused_states_equal_a_clean_pass_after_rejections(family: str) -> None:
    """The logits of every round, made of stored lower-layer states, against a forward without any cache."""
    model = target(family)
    worst: list[float] = []

    class Watch(loop.BlockDistributions):
        def __init__(self, row: Any, draft: Any, logits: Tensor, weight: float | None = None) -> None:
            super().__init__(row, draft, logits, weight)
            with torch.no_grad():
                clean = model(torch.tensor([row.ids + draft.tokens])).logits[0, -len(logits) :]
            worst.append(float((clean - logits).abs().max()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "BlockDistributions", Watch)
        ids, mask = padded([X, tiny.ids(4, 15), tiny.ids(5, 2)])
        result = spec(model, ids, attention_mask=mask, max_new_tokens=30, assistant_early_exit=2, **STEADY)
    assert len(worst) > 15
    assert max(worst) < 1e-4
    assert 0 < result.num_accepted_draft_tokens < result.num_draft_tokens


# ---------------------------------------------------------------- nothing is changed
def snapshot(model: PreTrainedModel) -> Any:
    return (
        configs(model),
        [
            (name, id(module), sorted(vars(module)), dict(vars(module)["_modules"]))
            for name, module in model.named_modules()
        ],
        [(name, id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()],
        Counter(type(module).forward for module in model.modules()),
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    )


def same(before: Any, after: Any) -> None:
    for old, new in zip(before, after, strict=True):
        if old and isinstance(old, list) and isinstance(old[0], tuple) and isinstance(old[0][-1], Tensor):
            assert [item[:2] for item in old] == [item[:2] for item in new]
            assert all(torch.equal(a[2], b[2]) for a, b in zip(old, new, strict=True))
        else:
            assert old == new


@pytest.mark.parametrize("family", FAMILIES)
def test_STA_01_nothing_is_registered_or_replaced(family: str) -> None:
    model = target(family)
    before = snapshot(model)
    seen: list[Any] = []

    def during(step: specnb.Step) -> None:
        seen.append(step)
        same(before, snapshot(model))  # not even while it runs

    spec(model, X, max_new_tokens=8, assistant_early_exit=1, on_step=during, **STEADY)
    assert seen
    same(before, snapshot(model))


class Interrupt(LogitsProcessor):
    """KeyboardInterrupt at its n-th call."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return scores


@pytest.mark.parametrize("call", [1, 2, 5])
def test_STA_01_an_interrupt_leaves_the_model_as_it_was(call: int) -> None:
    model = tiny.llama()
    expected, before = plain(model, X, max_new_tokens=8), snapshot(model)
    with pytest.raises(KeyboardInterrupt) as caught:
        spec(
            model,
            X,
            max_new_tokens=20,
            assistant_early_exit=2,
            logits_processor=LogitsProcessorList([Interrupt(call)]),
            **STEADY,
        )
    partial = caught.value.partial_result  # type: ignore[attr-defined]
    assert list(partial.ids) == expected[: call - 1]
    same(before, snapshot(model))
    assert model.config.num_hidden_layers == 4
    assert plain(model, X, max_new_tokens=8) == expected


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize("family", FAMILIES)
def test_STA_02_exit_layers_outside_the_model_name_the_range(family: str) -> None:
    model = target(family)
    n, before = depth(model), plain(model, X, max_new_tokens=8)
    for exit in (-1, 0, n, n + 5):
        with no_forward(model), pytest.raises(ValueError, match=rf"assistant_early_exit={exit}.*1 to {n - 1}"):
            spec(model, X, max_new_tokens=8, assistant_early_exit=exit)
    for exit in (1, n - 1):
        assert list(spec(model, X, max_new_tokens=8, assistant_early_exit=exit).ids) == before
    assert plain(model, X, max_new_tokens=8) == before


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "RwkvForCausalLM"])
def test_STA_02_other_architectures_work_or_are_refused_by_name(name: str) -> None:
    """Refused models are named by their class before the first token. In either case the model is unchanged."""
    model = tiny._build(name, 0, **{**tiny._shape(64, layers=2), **OTHERS[name]})
    expected, seen = plain(model, X, max_new_tokens=16), []
    for k in (1, 4):
        try:
            result = spec(
                model,
                X,
                max_new_tokens=16,
                assistant_early_exit=1,
                num_assistant_tokens=k,
                on_step=seen.append,
                **STEADY,
            )
        except ValueError as refusal:
            assert name in str(refusal)  # noqa: PT017
            assert not seen
        else:
            assert list(result.ids) == expected
            assert result.num_draft_tokens
    assert plain(model, X, max_new_tokens=16) == expected


def test_STA_02_GPT_2_and_OPT_work() -> None:
    for name in ("GPT2LMHeadModel", "OPTForCausalLM"):
        model = (
            tiny.gpt2() if name.startswith("GPT2") else tiny._build(name, 0, **tiny._shape(64, layers=3) | OTHERS[name])
        )
        ids, mask = padded([X, tiny.ids(3, 12)])
        for exit in (1, 2):
            result = spec(model, ids, attention_mask=mask, max_new_tokens=20, assistant_early_exit=exit, **STEADY)
            assert [list(row.ids) for row in result.rows] == [
                plain(model, p, max_new_tokens=20) for p in (X, tiny.ids(3, 12))
            ]


def test_STA_02_an_encoder_decoder_is_refused_by_name() -> None:
    import transformers

    shape = {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "decoder_start_token_id": 0}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=32, num_heads=4, **shape)
    )
    with no_forward(model), pytest.raises(ValueError, match="T5ForConditionalGeneration.*encoder-decoder"):
        spec(model, X, max_new_tokens=4, assistant_early_exit=1)


def test_layers_that_share_keys_across_the_exit_draft_with_a_cache_of_their_own() -> None:
    """Gemma 4's last layers read keys of earlier ones. An exit between the two reuses nothing; the text is the same."""
    model, reused = checkpoints.gemma4_target(), []
    expected = plain(model, X, max_new_tokens=12)
    for exit in range(1, 6):
        with counted(model) as widths:
            result = spec(model, X, max_new_tokens=12, assistant_early_exit=exit, **STEADY)
        assert list(result.ids) == expected and result.num_draft_tokens
        # The first layer runs once per token if its work is reused, else again for each verification. Before that, the
        # two halves are compared on two tokens, which takes up to six more.
        reused.append(sum(widths[0]) - sum(widths[-1]) <= 6)
    assert reused == [True, True, False, False, False]


@pytest.mark.slow
def test_the_composite_class_works_too() -> None:
    model = checkpoints.gemma4_target(shared=0, composite=True)
    ids, mask = padded([X, tiny.ids(3, 12)])
    for exit in range(1, 6):
        result = spec(model, ids, attention_mask=mask, max_new_tokens=16, assistant_early_exit=exit, **STEADY)
        assert [list(row.ids) for row in result.rows] == [
            plain(model, p, max_new_tokens=16) for p in (X, tiny.ids(3, 12))
        ]


class _Uneven(Constant):
    """Lengths that differ from row to row, 0 among them."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.asked = k

    def length(self, match_length: int = 0) -> int:
        self.asked += 1
        return (0, 3, 2, 0, 0, 4)[(self.asked * self.asked) % 6]


class _PerRow(LogitsProcessor):  # type: ignore[misc]
    """A processor that specnb does not know, so that all rows of a step have drafts of the same length."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 0.001 * torch.arange(64) * torch.arange(1, len(ids) + 1)[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("exit", [1, 2, 3])
def test_drafts_that_are_cut_to_nothing_leave_no_states(exit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with drafts of one length drop what the shortest draft lacks, although the lower layers ran for it."""
    monkeypatch.setitem(SCHEDULES, "constant", _Uneven)
    model = tiny.family("gemma3")
    for seed in range(5):
        ids = torch.cat([tiny.ids(10 * seed + 1, 9), tiny.ids(10 * seed + 2, 9)])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 30}
        expected = model.generate(ids, logits_processor=[_PerRow()], **options)
        result = specnb.generate(
            model, ids, logits_processor=[_PerRow()], assistant_early_exit=exit, **options, **STEADY
        )
        assert torch.equal(result.sequences, expected)
