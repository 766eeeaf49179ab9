"""Cases of kinds vocab, sampling and device-dtype: what a draft may know, propose and be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
import transformers
from checks import EAGER, no_forward, padded, plain, spec, true_shares, watched
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, WatermarkingConfig
from transformers.generation import logits_process

import specnb

X = tiny.ids(0, 7)


# ---------------------------------------------------------------- VOC-01
SIZES = {"smaller": 338, "unpadded": 330, "larger": 420}


@pytest.mark.parametrize("size", SIZES)
def test_VOC_01_padded_embeddings(size: str) -> None:
    """Nothing special has to be given; ids that only the draft has are never proposed."""
    tokenizer, model = tiny.byte_tokenizer(), tiny.llama(vocab=394)
    draft = tiny.llama(seed=3, vocab=SIZES[size])
    prompt = tokenizer("the quick brown fox jumps", return_tensors="pt")["input_ids"]
    expected = plain(model, prompt, max_new_tokens=20)
    for given in ({}, {"tokenizer": tokenizer, "assistant_tokenizer": tiny.byte_tokenizer()}):
        result = spec(model, prompt, max_new_tokens=20, assistant_model=draft, **given, **EAGER)
        assert list(result.ids) == expected
        sampled = specnb.generate(
            model,
            prompt,
            do_sample=True,
            top_k=0,
            temperature=2.0,
            max_new_tokens=40,
            seed=1,
            assistant_model=draft,
            **given,
            **EAGER,
        )
        for step in result.steps + sampled.steps:
            assert all(token < min(394, SIZES[size]) for token in step.drafted)
        assert all(token < 394 for token in sampled.ids)


VOCAB_OPTIONS: dict[str, dict[str, Any]] = {
    "sequence_bias": {"sequence_bias": {(5,): 4.0, (70, 6): -3.0, (75,): 2.0}},
    "bad_words": {"bad_words_ids": [[70], [5, 7], [9]]},
    "watermark": {"watermarking_config": WatermarkingConfig(greenlist_ratio=0.5, bias=3.0)},
    "suppress": {"suppress_tokens": [70, 5, 79]},
    "suppress what the draft has": {"suppress_tokens": list(range(64))},
    "eos": {"eos_token_id": [70, 71, 5], "min_new_tokens": 6},
    "forced_eos": {"forced_eos_token_id": 75},
    "decay": {"exponential_decay_length_penalty": (2, 1.4), "eos_token_id": 70},
    "repetition": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("option", VOCAB_OPTIONS)
@pytest.mark.parametrize("size", [64, 72, 96])
def test_VOC_01_options_with_ids_that_one_model_lacks(size: int, option: str) -> None:
    """A processor sees the target's vocabulary, whoever asks; and the options work after an unequal pair as before."""
    model, draft = tiny.llama(vocab=80), tiny.llama(seed=3, vocab=size)
    options = VOCAB_OPTIONS[option] | {"max_new_tokens": 24}
    prompts = [tiny.ids(1, 7, 64), tiny.ids(2, 3, 64)]
    expected = [plain(model, prompt, **options) for prompt in prompts]
    for prompt, alone in zip(prompts, expected, strict=True):
        assert list(spec(model, prompt, assistant_model=draft, **options, **EAGER).ids) == alone
        sampled = specnb.generate(model, prompt, do_sample=True, seed=1, assistant_model=draft, **options, **EAGER)
        assert 0 < len(sampled.ids) <= 24
    ids, mask = padded(prompts)
    # processors see the padding: before transformers 5.24 its id counts as one of the text's
    together = model.generate(ids, attention_mask=mask, do_sample=False, **options)
    result = spec(model, ids, attention_mask=mask, assistant_model=draft, **options, **EAGER)
    assert torch.equal(result.sequences, together)


# ---------------------------------------------------------------- VOC-02
def test_VOC_02_equal_sizes_hide_no_other_tokenizer() -> None:
    """Such a draft model is refused, with the difference named; with any other method the text is the target's."""
    ours, theirs = tiny.byte_tokenizer(330), tiny.sp_tokenizer(330)
    model, draft = tiny.llama(vocab=330), tiny.llama(seed=3, vocab=330)
    prompt = ours("a small boat sails", return_tensors="pt")["input_ids"]
    expected = plain(model, prompt, max_new_tokens=30)
    named = {"assistant_model": draft, "tokenizer": ours, "assistant_tokenizer": theirs}
    with no_forward(model, draft), pytest.raises(ValueError, match="tokenizer"):
        spec(model, prompt, max_new_tokens=30, method="draft_model", **named)
    result = spec(model, prompt, max_new_tokens=30, **named)
    assert list(result.ids) == expected
    assert result.method != "draft_model"
    assert list(spec(model, prompt, max_new_tokens=30, assistant_model=draft).ids) == expected  # nothing to compare


# ---------------------------------------------------------------- VOC-03
def test_VOC_03_the_draft_is_given_nothing_of_another_length() -> None:
    """The target's own inputs (types, positions) stay with the target; every input of the draft fits its ids."""
    for family in ("llama", "gpt2", "gemma4"):
        model = tiny.family(family)
        draft = tiny.noisy(model, 0.03)
        given = {"token_type_ids": torch.zeros_like(X)} if family == "gpt2" else {}
        ids, mask = padded([X, tiny.ids(1, 4)])
        with watched(draft) as calls:
            spec(model, X, max_new_tokens=20, assistant_model=draft, **EAGER)
            spec(model, ids, attention_mask=mask, max_new_tokens=20, assistant_model=draft, **EAGER)
            if family != "gpt2":
                spec(model, X, position_ids=torch.arange(7)[None], max_new_tokens=20, assistant_model=draft, **EAGER)
        assert len(calls) > 10
        for inputs in calls.inputs:
            shape = inputs["input_ids"].shape
            assert "token_type_ids" not in inputs
            assert inputs["position_ids"].shape in (shape, (1, shape[1])) if "position_ids" in inputs else True
            assert "attention_mask" not in inputs or inputs["attention_mask"].dim() == 4
        if given:
            try:
                result = spec(model, X, max_new_tokens=9, assistant_model=draft, **given, **EAGER)
            except ValueError as refusal:
                assert "token_type_ids" in str(refusal)  # noqa: PT017
            else:
                assert list(result.ids) == plain(model, X, max_new_tokens=9, **given)


# ---------------------------------------------------------------- SMP-01
S_T = tiny.llama(vocab=32, layers=1, std=0.15)
S_D = tiny.llama(seed=7, vocab=32, layers=1, std=0.15)
S_X = tiny.ids(2, 5, 32)
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0.5": {"temperature": 0.5, "top_k": 0},
    "temperature 1.5": {"temperature": 1.5, "top_k": 0},
    "top_k 8": {"top_k": 8},
    "top_p 0.8": {"top_p": 0.8, "top_k": 0},
}


def distribution_after(model: PreTrainedModel, ids: Tensor, settings: dict[str, Any]) -> Tensor:
    """The target's distribution of the next token, by transformers' warpers on a forward without cache."""
    made = LogitsProcessorList()
    if settings.get("temperature", 1) != 1:
        made.append(logits_process.TemperatureLogitsWarper(settings["temperature"]))
    if settings.get("top_k"):
        made.append(logits_process.TopKLogitsWarper(settings["top_k"]))
    if settings.get("top_p", 1) < 1:
        made.append(logits_process.TopPLogitsWarper(settings["top_p"]))
    with torch.no_grad():
        return made(ids, model(ids, use_cache=False).logits[:, -1].float())[0].double().softmax(-1)


def within_noise(tokens: list[int], p: Tensor) -> bool:
    """Total variation below the one that 1 of 1,000 true samples of that size exceeds; no impossible token."""
    counts = torch.tensor(tokens).bincount(minlength=len(p)).double() / len(tokens)
    simulated = true_shares(p, len(tokens), 2000)
    bound = ((simulated - p).abs().sum(-1) / 2).quantile(0.999)
    return bool((counts - p).abs().sum() / 2 < bound) and not bool(counts[p == 0].any())


def sampled(
    model: PreTrainedModel, draft: PreTrainedModel, prompt: Tensor, runs: int, **options: Any
) -> list[tuple[int, ...]]:
    prompts = prompt.repeat(runs, 1)
    result = specnb.generate(
        model,
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        seed=7000,
        assistant_model=draft,
        **EAGER,
        **options,
    )
    return [row.ids for row in result.rows]


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("setting", SETTINGS)
def test_SMP_01_first_and_second_token(setting: str, k: int) -> None:
    """The second token is compared after each frequent first one: there a draft was verified."""
    texts = sampled(S_T, S_D, S_X, 2400, num_assistant_tokens=k, max_new_tokens=3, **SETTINGS[setting])
    assert within_noise([text[0] for text in texts], distribution_after(S_T, S_X, SETTINGS[setting]))
    firsts = [text[0] for text in texts]
    for first in sorted(set(firsts), key=firsts.count, reverse=True)[:2]:
        p = distribution_after(S_T, torch.cat([S_X, torch.tensor([[first]])], 1), SETTINGS[setting])
        assert within_noise([text[1] for text in texts if text[0] == first], p)


@pytest.mark.slow
@pytest.mark.parametrize("size", [26, 40])
def test_SMP_01_VOC_01_sampling_with_an_unequal_vocabulary(size: int) -> None:
    """Tokens that only the target has stay reachable; those that only the draft has never appear."""
    draft = tiny.llama(seed=7, vocab=size, layers=1, std=0.15)
    for options in ({"top_k": 0, "temperature": 1.5}, {"top_k": 0, "temperature": 1.5, "verification": "block"}):
        texts = sampled(S_T, draft, S_X, 2400, num_assistant_tokens=4, max_new_tokens=3, **options)
        firsts = [text[0] for text in texts]
        for first in sorted(set(firsts), key=firsts.count, reverse=True)[:2]:
            p = distribution_after(S_T, torch.cat([S_X, torch.tensor([[first]])], 1), {"temperature": 1.5})
            assert within_noise([text[1] for text in texts if text[0] == first], p)
    assert size > 32 or max(max(text) for text in texts) >= size


def test_SMP_02_an_argmax_drafter_is_a_point_mass() -> None:
    """Prompt lookup proposes the target's own greedy text as a point mass; sampling still follows the target."""
    prompt = torch.tensor([[9, 5, 6, 7, 9, 5, 6, 7, 9, 5, 6]])
    prompts = prompt.repeat(3000, 1)
    result = specnb.generate(
        S_T,
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        temperature=0.6,
        max_new_tokens=2,
        seed=1,
        method="prompt_lookup",
    )
    assert all(row.steps[0].drafted == (7,) for row in result.rows)
    assert within_noise([row.ids[0] for row in result.rows], distribution_after(S_T, prompt, {"temperature": 0.6}))


def test_SMP_02_the_gemma_4_drafter_is_not_taken_for_a_draft_model() -> None:
    """It has no cache of its own: the result is the target's text, or an error before the first pass."""
    if not hasattr(transformers, "Gemma4AssistantForCausalLM"):
        pytest.skip("this version of transformers has no Gemma 4 drafter")
    own = {
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 6,
        "hidden_size_per_layer_input": 0,
        "num_hidden_layers": 2,
        "vocab_size_per_layer_input": 0,
        "num_kv_shared_layers": 2,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    text = transformers.Gemma4TextConfig(**tiny._shape(64, hidden=16, layers=2) | own)
    config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32)
    drafter, target = transformers.Gemma4AssistantForCausalLM(config).eval(), tiny.gemma4()
    with watched(target) as calls:
        try:
            result = spec(target, X, max_new_tokens=12, assistant_model=drafter)
        except ValueError as refusal:
            assert "Gemma4Assistant" in str(refusal)  # noqa: PT017
            assert not calls.widths
        else:
            assert result.method != "draft_model"
            assert list(result.ids) == plain(target, X, max_new_tokens=12)


def test_SMP_05_an_ensemble_weight_that_cannot_apply_is_refused_by_name() -> None:
    """A drafter without a distribution cannot be mixed in, and a weight outside (0, 1) is refused."""
    for w in (0.05, 0.5):
        with no_forward(S_T), pytest.raises(ValueError, match="assistant_ensemble_weight"):
            spec(S_T, S_X, max_new_tokens=5, prompt_lookup_num_tokens=3, assistant_ensemble_weight=w)
    for w in (-0.5, 2.0):
        with no_forward(S_T, S_D), pytest.raises(ValueError, match="assistant_ensemble_weight"):
            spec(S_T, S_X, max_new_tokens=5, assistant_model=S_D, assistant_ensemble_weight=w)


# ---------------------------------------------------------------- DEV-01
def test_DEV_01_models_without_weights_are_refused() -> None:
    model, hollow = tiny.llama(), copy.deepcopy(tiny.llama()).to("meta")
    with no_forward(model, hollow):
        with pytest.raises(ValueError, match=r"draft model .* no real weights"):
            spec(model, X, max_new_tokens=5, assistant_model=hollow)
        with pytest.raises(ValueError, match=r"target .* no real weights"):
            spec(hollow, X, max_new_tokens=5, prompt_lookup_num_tokens=3)
        decoder = specnb.decoder(assistant_model=hollow)
        with pytest.raises(ValueError, match=r"draft model .* no real weights"):
            model.generate(X, attention_mask=torch.ones_like(X), max_new_tokens=5, custom_generate=decoder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_DEV_01_target_and_draft_of_different_number_formats(dtype: torch.dtype) -> None:
    model, draft = tiny.llama(), tiny.noisy(tiny.llama(), 0.03).to(dtype)
    assert list(spec(model, X, max_new_tokens=20, assistant_model=draft, **EAGER).ids) == plain(
        model, X, max_new_tokens=20
    )
    ids, mask = padded([X, tiny.ids(1, 4)])
    result = spec(model, ids, attention_mask=mask, max_new_tokens=20, assistant_model=draft, **EAGER)
    assert [list(row.ids) for row in result.rows] == [plain(model, p, max_new_tokens=20) for p in (X, tiny.ids(1, 4))]
    for verification in ("token", "block"):
        one = specnb.generate(
            model, X, do_sample=True, max_new_tokens=20, seed=3, assistant_model=draft, verification=verification
        )
        assert len(one.ids) == 20
    wide = tiny.llama().double()
    assert list(spec(wide, X, max_new_tokens=20, assistant_model=draft, **EAGER).ids) == plain(
        wide, X, max_new_tokens=20
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize(("of_target", "of_draft"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_DEV_01_two_devices(of_target: str, of_draft: str) -> None:
    model, draft = tiny.llama().to(of_target), tiny.noisy(tiny.llama(), 0.03).to(of_draft)
    prompt = X.to(of_target)
    expected = plain(model, prompt, max_new_tokens=20)
    for ids in (prompt, X):
        assert list(spec(model, ids, max_new_tokens=20, assistant_model=draft, **EAGER).ids) == expected
        assert list(spec(model, ids, max_new_tokens=20, prompt_lookup_num_tokens=4).ids) == expected
    for verification in ("token", "block"):
        options = {
            "do_sample": True,
            "max_new_tokens": 20,
            "seed": 3,
            "assistant_model": draft,
            "verification": verification,
        }
        assert specnb.generate(model, prompt, **options).ids == specnb.generate(model, prompt, **options).ids
    rows, mask = padded([X, tiny.ids(1, 4)])
    result = spec(
        model, rows.to(of_target), attention_mask=mask.to(of_target), max_new_tokens=20, assistant_model=draft, **EAGER
    )
    assert list(result.rows[0].ids) == expected
