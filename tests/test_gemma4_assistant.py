"""The Gemma 4 MTP drafter: its drafts are those of a clean pass over the text, whatever was rejected before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import tiny
import torch
import transformers
from checkpoints import GEMMA_WINDOW, VOCAB, gemma4_drafter, gemma4_target
from checks import STEADY, configs, consistent, no_forward, padded, plain, spec
from test_mtp import drafting
from torch import Tensor
from transformers import PreTrainedModel

import specnb

X = tiny.ids(0, 7)
PROMPTS = [X, tiny.ids(3, 21), tiny.ids(4, 1)]

TARGETS: dict[str, dict[str, Any]] = {
    "shared keys": {},
    "all own keys": {"shared": 0},
    "no per-layer inputs": {"per_layer": 0, "shared": 0},
    "composite": {"composite": True},
}


@cache
def target(name: str = "shared keys") -> PreTrainedModel:
    return gemma4_target(**TARGETS[name])


@cache
def drafter(ordered: bool = False, name: str = "shared keys") -> PreTrainedModel:
    return gemma4_drafter(target(name), ordered=ordered)


@torch.no_grad()
def clean(model: PreTrainedModel, assistant: PreTrainedModel, ids: list[int], drafted: list[int]) -> Tensor:
    """Logits `[k, vocab]` of what `assistant` drafts after `ids`: a fresh pass of the target, then the drafter's steps.

    The target's keys are those of all tokens but the last, which the target has not seen. Keys of windowed layers go no
    further back than the window does, counted from the last token.
    """
    seen = torch.tensor([ids[:-1]])
    out = model(seen, output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
    shared = out.shared_kv_states
    state, token, logits = out.hidden_states[-1][:, -1:], ids[-1], []
    position = torch.tensor([[len(ids) - 1]])
    for next_token in drafted:
        embedded = model.get_input_embeddings()(torch.tensor([[token]]))
        step = assistant(
            inputs_embeds=torch.cat([embedded, state], -1),
            position_ids=position,
            attention_mask=None,
            shared_kv_states=shared,
        )
        logits.append(step.logits[0, -1])
        state, token = step.last_hidden_state, next_token
    return torch.stack(logits)


def check(
    drafts: list[tuple[list[int], list[int], Tensor]], model: PreTrainedModel, assistant: PreTrainedModel
) -> None:
    for ids, tokens, logits in drafts:
        expected = clean(model, assistant, ids, tokens)
        near = torch.isclose(
            logits, expected, atol=1e-4, rtol=0
        )  # ordered embeddings leave most tokens at the lowest number
        assert bool(near.all()), (len(ids), tokens, float((logits - expected).abs().max()))


# ---------------------------------------------------------------- equality
@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True], ids=["dense", "ordered"])
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_equals_plain(name: str, ordered: bool) -> None:
    """Texts several windows long, k up to 16, one row and several."""
    model, assistant = target(name), drafter(ordered, name)
    options = {"max_new_tokens": 30, "eos_token_id": [5, 9]}
    expected = [plain(model, prompt, **options) for prompt in PROMPTS]
    ids, mask = padded(PROMPTS)
    accepted = drafted = 0
    for k in (1, 3, 8, 16):
        how: dict[str, Any] = {"assistant_model": assistant, "num_assistant_tokens": k, **STEADY}
        if k == 3:
            how |= {"prefill_chunk_size": 4, "num_assistant_tokens_schedule": "heuristic"}
        if k == 8:
            how |= {"assistant_confidence_threshold": 0.3, "num_assistant_tokens_schedule": "adaptive"}
        result = spec(model, PROMPTS[k % 3], **options, **how)
        assert list(result.ids) == expected[k % 3], k
        consistent(result)
        assert result.method == "gemma4_assistant"
        result = spec(model, ids, attention_mask=mask, **options, **how)
        assert [list(row.ids) for row in result.rows] == expected, k
        accepted, drafted = accepted + result.num_accepted_draft_tokens, drafted + result.num_draft_tokens
    assert accepted > 5
    assert drafted - accepted > 5


def test_options_and_attentions() -> None:
    model, assistant = target(), drafter()
    for options in ({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"suppress_tokens": [3, 46, 23]}):
        expected = plain(model, X, max_new_tokens=24, **options)
        assert list(spec(model, X, max_new_tokens=24, assistant_model=assistant, **options, **STEADY).ids) == expected
    eager = gemma4_target()
    eager.set_attn_implementation("eager")
    small = gemma4_drafter(eager)
    small.set_attn_implementation("eager")
    with drafting() as drafts:
        result = spec(eager, X, max_new_tokens=24, assistant_model=small, **STEADY)
    assert list(result.ids) == plain(eager, X, max_new_tokens=24)
    check(drafts, eager, small)


# ---------------------------------------------------------------- proposals
@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True], ids=["dense", "ordered"])
@pytest.mark.parametrize("name", TARGETS)
def test_drafts_equal_those_of_a_clean_pass(name: str, ordered: bool) -> None:
    """In every round: short of the window, at it and far beyond; after acceptances and rejections of every length."""
    model, assistant = target(name), drafter(ordered, name)
    lengths, cut = set(), set()
    for prompt in (*PROMPTS, tiny.ids(5, GEMMA_WINDOW - 2)):
        for k in (1, 4):
            with drafting() as drafts:
                result = spec(
                    model,
                    prompt,
                    max_new_tokens=40,
                    assistant_model=assistant,
                    num_assistant_tokens=k,
                    prefill_chunk_size=6,
                    **STEADY,
                )
            assert len(drafts) == sum(bool(step.drafted) for step in result.steps)
            check(drafts, model, assistant)
            lengths |= {len(ids) for ids, _, _ in drafts}
            cut |= {len(step.rejected) for step in result.steps}
    assert {GEMMA_WINDOW - 1, GEMMA_WINDOW, GEMMA_WINDOW + 1, 2 * GEMMA_WINDOW, 5 * GEMMA_WINDOW} <= lengths
    assert {0, 1} <= cut
    assert max(cut) > 2


@pytest.mark.slow
def test_drafts_of_rows_equal_those_of_a_clean_pass() -> None:
    """Rows of different lengths, which end at different times: each reads its own keys."""
    for name in TARGETS:
        model, assistant = target(name), drafter(False, name)
        free = [plain(model, prompt, max_new_tokens=30) for prompt in PROMPTS]
        for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
            prompts = [PROMPTS[i] for i in order]
            eos = [free[order[0]][4], free[order[1]][15]]
            ids, mask = padded(prompts)
            with drafting() as drafts:
                result = spec(
                    model,
                    ids,
                    attention_mask=mask,
                    max_new_tokens=30,
                    eos_token_id=eos,
                    assistant_model=assistant,
                    num_assistant_tokens=3,
                    **STEADY,
                )
            check(drafts, model, assistant)
            ends = sorted(len(row.ids) for row in result.rows)
            assert ends[0] < ends[-1]


def test_the_reference_tells_stale_keys_apart() -> None:
    """One key too many, one too few, or another row's, move the draft's logits by far more than the tolerance."""
    model, assistant = target(), drafter()
    ids = [*X[0].tolist(), *plain(model, X, max_new_tokens=20)]
    right = clean(model, assistant, ids, [5])
    embed = model.get_input_embeddings()
    with torch.no_grad():
        for tokens in (ids, ids[:-2], [*ids[:-2], 9]):
            out = model(torch.tensor([tokens]), return_shared_kv_states=True, use_cache=False)
            state = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[-1][:, -1:]
            wrong = assistant(
                inputs_embeds=torch.cat([embed(torch.tensor([ids[-1:]])), state], -1),
                attention_mask=None,
                position_ids=torch.tensor([[len(ids) - 1]]),
                shared_kv_states=out.shared_kv_states,
            ).logits[0]
            assert (wrong - right).abs().max() > 1e-2


# ---------------------------------------------------------------- options
def test_the_length_comes_from_the_call() -> None:
    model, assistant = target(), gemma4_drafter(target())
    assistant.generation_config.num_assistant_tokens = 7
    assistant.generation_config.num_assistant_tokens_schedule = "heuristic"
    for k in (1, 2, 5):
        result = spec(model, X, max_new_tokens=30, assistant_model=assistant, num_assistant_tokens=k, **STEADY)
        assert max(len(step.drafted) for step in result.steps) == k
        assert result.options["num_assistant_tokens"] == k


def test_schedules_apply() -> None:
    how = {"assistant_model": drafter(), "num_assistant_tokens": 3, "assistant_confidence_threshold": 0}
    result = spec(target(), X, max_new_tokens=60, num_assistant_tokens_schedule="heuristic", **how)
    k, left = 3, 0
    for step in result.steps[1:]:
        left = 60 - (step.position - 7)
        assert len(step.drafted) == min(k, left - 1)
        if step.drafted:
            k = k + 2 if step.accepted == len(step.drafted) else max(1, k - 1)
    adaptive = spec(target(), X, max_new_tokens=60, num_assistant_tokens_schedule="adaptive", **how)
    assert len({len(step.drafted) for step in adaptive.steps}) > 2
    assert adaptive.ids == result.ids


def test_the_confidence_threshold_applies() -> None:
    drafted = []
    for threshold in (0, 0.2, 0.5, 1):
        with drafting() as drafts:
            result = spec(
                target(),
                X,
                max_new_tokens=40,
                assistant_model=drafter(),
                num_assistant_tokens=6,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=threshold,
            )
        drafted.append(result.num_draft_tokens / len(drafts))
        for _, tokens, logits in drafts:
            sure = logits.softmax(-1)[torch.arange(len(tokens)), torch.tensor(tokens)]
            assert bool((sure[:-1] >= threshold - 1e-5).all())
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] > 4 > drafted[-1] == 1


@contextmanager
def widths(model: PreTrainedModel) -> Iterator[list[int]]:
    """Tokens in each call of the whole model's body."""
    seen: list[int] = []
    handle = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield seen
    finally:
        handle.remove()


@pytest.mark.parametrize("name", TARGETS)
def test_the_target_runs_over_new_tokens_only(name: str) -> None:
    """The prompt once, then each block once; the drafter needs no pass of the target of its own."""
    model = target(name)
    with widths(model) as seen:
        result = spec(model, PROMPTS[1], max_new_tokens=30, assistant_model=drafter(False, name), **STEADY)
    assert seen == [21, *(len(step.drafted) + 1 for step in result.steps[1:])]
    assert result.target_passes == len(result.steps)


def test_nothing_is_changed_in_either_model() -> None:
    model = gemma4_target(composite=True)
    assistant = gemma4_drafter(model, ordered=True)
    before = configs(model, assistant)
    weights = [{name: value.clone() for name, value in m.state_dict().items()} for m in (model, assistant)]
    modules = [[id(module) for module in m.modules()] for m in (model, assistant)]
    spec(model, X, max_new_tokens=20, assistant_model=assistant, **STEADY)
    specnb.generate(model, X, do_sample=True, seed=1, max_new_tokens=20, assistant_model=assistant, **STEADY)
    assert configs(model, assistant) == before
    assert modules == [[id(module) for module in m.modules()] for m in (model, assistant)]
    for m, old in zip((model, assistant), weights, strict=True):
        assert all(torch.equal(old[name], value) for name, value in m.state_dict().items())
        assert not any(x._forward_hooks or x._forward_pre_hooks for x in m.modules())


def test_the_composite_class_with_token_types_of_the_processor() -> None:
    """What a multimodal processor adds to a text-only prompt passes unharmed."""
    model, assistant = target("composite"), drafter(False, "composite")
    assert type(model).__name__ == "Gemma4ForConditionalGeneration"
    types = {"mm_token_type_ids": torch.zeros_like(X)}
    expected = plain(model, X, max_new_tokens=20)
    assert plain(model, X, max_new_tokens=20, **types) == expected
    assert list(spec(model, X, max_new_tokens=20, assistant_model=assistant, **types, **STEADY).ids) == expected


def test_an_image_passes_unharmed() -> None:
    """Pixels, their places and token types of transformers' image processor; image tokens see each other both ways."""
    from PIL import Image
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    tower = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 128,
    }
    model = gemma4_target(composite=True, vision=tower)
    assistant = gemma4_drafter(model)
    process = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    texts = []
    for image in (Image.radial_gradient("L").convert("RGB"), Image.linear_gradient("L").convert("RGB")):
        seen = process(image.resize((48, 40)), return_tensors="pt")
        soft = int(seen.pop("num_soft_tokens_per_image"))
        ids = torch.cat([X, torch.full((1, soft), model.config.image_token_id), tiny.ids(5, 4)], 1)
        inputs = {**seen, "mm_token_type_ids": (ids == model.config.image_token_id).long()}
        expected = plain(model, ids, max_new_tokens=20, **inputs)
        before = {name: value.clone() for name, value in inputs.items()}
        methods = (
            {"assistant_model": assistant, **STEADY},
            {"assistant_early_exit": 2, **STEADY},
            {"prompt_lookup_num_tokens": 4},
        )
        for method in methods:
            result = spec(model, ids, max_new_tokens=20, **method, **inputs)
            assert list(result.ids) == expected, method
            assert result.num_draft_tokens or result.method == "prompt_lookup"
        assert all(torch.equal(before[name], value) for name, value in inputs.items())
        with drafting() as drafts:
            spec(model, ids, max_new_tokens=20, assistant_model=assistant, **inputs, **STEADY)
        texts.append((expected, [logits for _, _, logits in drafts]))
    assert texts[0][0] != texts[1][0] or not torch.equal(texts[0][1][0], texts[1][1][0])  # the picture is looked at


def test_a_filled_cache_is_continued() -> None:
    from checks import cache_name
    from transformers import DynamicCache

    model, assistant = target("all own keys"), drafter(False, "all own keys")
    past = DynamicCache(config=model.config)
    one = spec(model, X, max_new_tokens=12, **{cache_name(model): past})
    prompt = torch.cat([one.sequences, tiny.ids(9, 3)], 1)
    with drafting() as drafts:
        two = spec(model, prompt, max_new_tokens=16, assistant_model=assistant, **{cache_name(model): past}, **STEADY)
    assert list(two.ids) == plain(model, prompt, max_new_tokens=16)
    check(drafts, model, assistant)


# ---------------------------------------------------------------- misfits
MISFITS: dict[str, tuple[Any, str]] = {
    "hidden size": ({"backbone_hidden_size": 48}, "48.*32|32.*48"),
    "vocabulary": ({"vocab_size": 48}, "48.*64|64.*48"),
    "head size": ({"head_dim": 16, "per_layer_config": None}, "size"),
    "full head size": ({"per_layer_config": {3: {"head_dim": 32}}, "global_head_dim": 32}, "size"),
    "head count": ({"num_key_value_heads": 2}, "heads"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_drafter_of_another_target_is_refused_naming_both(misfit: str) -> None:
    other, said = MISFITS[misfit]
    model, assistant = target(), gemma4_drafter(target(), **other)
    for call in (
        lambda: spec(model, X, max_new_tokens=4, assistant_model=assistant),
        lambda: model.generate(
            X,
            attention_mask=torch.ones_like(X),
            max_new_tokens=4,
            do_sample=False,
            custom_generate=specnb.decoder(assistant_model=assistant),
        ),
    ):
        with no_forward(model, assistant), pytest.raises(ValueError, match=said) as caught:
            call()
        assert "Gemma4AssistantForCausalLM" in str(caught.value)
        assert "Gemma4ForCausalLM" in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_other_targets_are_refused_naming_both(family: str) -> None:
    model = tiny.family(family)
    with no_forward(model, drafter()), pytest.raises(ValueError, match=f"Gemma4Assistant.*{type(model).__name__}"):
        spec(model, X, max_new_tokens=4, assistant_model=drafter())


def test_a_target_without_one_kind_of_layer_is_refused() -> None:
    model = transformers.Gemma4ForCausalLM(
        transformers.Gemma4TextConfig(
            **tiny._shape(VOCAB, layers=2),
            head_dim=8,
            global_head_dim=8,
            layer_types=["full_attention"] * 2,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=0,
            num_kv_shared_layers=0,
            enable_moe_block=False,
        )
    ).eval()
    with no_forward(model, drafter()), pytest.raises(ValueError, match="sliding_attention|heads"):
        spec(model, X, max_new_tokens=4, assistant_model=drafter())


# ---------------------------------------------------------------- transformers' own ways in
def test_bound_and_through_generate() -> None:
    model, assistant = target(), drafter()
    decoder = specnb.decoder(assistant_model=assistant, num_assistant_tokens=3, **STEADY)
    ids, mask = padded(PROMPTS)
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20, custom_generate=decoder)
    assert out[:, 21:].tolist() == [plain(model, prompt, max_new_tokens=20) for prompt in PROMPTS]
    assert decoder.result is not None
    assert decoder.result.method == "gemma4_assistant"
    assert max(len(step.drafted) for step in decoder.result.steps) == 3
    named = spec(model, X, max_new_tokens=20, method="gemma4_assistant", assistant_model=assistant, **STEADY)
    assert list(named.ids) == plain(model, X, max_new_tokens=20)
    with no_forward(model, assistant), pytest.raises(ValueError, match="draft_model"):
        spec(model, X, max_new_tokens=4, method="draft_model", assistant_model=assistant)


def test_the_unified_classes_work_alike() -> None:
    if not hasattr(transformers, "Gemma4UnifiedAssistantForCausalLM"):
        pytest.skip("this version of transformers has no unified Gemma 4")
    from specnb.models.gemma4 import is_gemma4_assistant

    config = transformers.Gemma4UnifiedAssistantConfig(
        text_config=drafter().config.get_text_config().to_dict() | {"model_type": "gemma4_unified_text"},
        backbone_hidden_size=32,
    )
    assistant = transformers.Gemma4UnifiedAssistantForCausalLM(config).float().eval()
    assert is_gemma4_assistant(assistant)
    result = spec(target(), X, max_new_tokens=20, assistant_model=assistant, **STEADY)
    assert list(result.ids) == plain(target(), X, max_new_tokens=20)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [(4, 9), (9, 4), (1, 2, 30), (30, 7, 8)])
def test_rows_of_any_lengths(lengths: tuple[int, ...], attention: str) -> None:
    """Their prompts end at different columns of the first pass, of which the model keeps only the last states."""
    model = gemma4_target(**TARGETS["shared keys"])
    model.set_attn_implementation(attention)
    prompts = [tiny.ids(i, n) for i, n in enumerate(lengths)]
    ids, mask = padded(prompts)
    options = {"assistant_model": gemma4_drafter(model), "num_assistant_tokens": 3, "max_new_tokens": 12, **STEADY}
    result = spec(model, ids, attention_mask=mask, **options)
    assert [list(row.ids) for row in result.rows] == [plain(model, prompt, max_new_tokens=12) for prompt in prompts]
