"""Cases of kind output-parity: the same text as plain greedy, or a refusal; never silently another text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import tiny
import torch
from checks import EAGER, cache_name, consistent, no_forward, padded, plain, spec, watched
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    WatermarkingConfig,
)

import specnb

T = tiny.llama()
D = tiny.noisy(T, 0.03)
X = tiny.ids(0, 7)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "draft": {"assistant_model": D, "num_assistant_tokens": 5, **EAGER},
    "lookup": {"prompt_lookup_num_tokens": 3},
}
DRAFTING = ["draft", "lookup"]


# ---------------------------------------------------------------- PAR-01
def turn(model: PreTrainedModel, ids: Tensor, new: int, cache: Any, way: dict[str, Any]) -> list[int]:
    """One turn of a chat; "plain" is transformers' own."""
    options = {"max_new_tokens": new, cache_name(model): cache}
    return list(spec(model, ids, **options, **way).ids) if way else plain(model, ids, **options)


@pytest.mark.parametrize(("first", "second"), itertools.product(WAYS, WAYS))
def test_PAR_01_reused_cache(first: str, second: str) -> None:
    cache = DynamicCache()
    said = turn(T, X, 6, cache, WAYS[first])
    assert cache.get_seq_length() == 7 + 6 - 1
    prompt = torch.cat([X, torch.tensor([said]), tiny.ids(9, 3)], 1)
    assert (
        turn(T, prompt, 8, cache, WAYS[second]) == plain(T, prompt, max_new_tokens=8) == [48, 30, 22, 4, 15, 29, 3, 3]
    )
    assert cache.get_seq_length() == prompt.shape[1] + 8 - 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gemma4", "deepseek_v3", "glm4_moe", "gpt2"])
def test_PAR_01_reused_cache_of_other_families(family: str) -> None:
    """Three turns over the window (6), with caches that know the window and ones that do not."""
    model = tiny.family(family)
    drafts = {"assistant_model": tiny.noisy(model, 0.03), **EAGER}
    for config, order in itertools.product(
        (True, False), itertools.permutations(({}, drafts, {"method": "prompt_lookup"}))
    ):
        cache = DynamicCache(config=model.config) if config else DynamicCache()
        text = tiny.ids(3, 4)
        for way in order:
            text = torch.cat([text, tiny.ids(text.shape[1], 3)], 1)
            expected = plain(model, text, max_new_tokens=5)
            assert turn(model, text, 5, cache, way) == expected
            text = torch.cat([text, torch.tensor([expected])], 1)
            assert cache.get_seq_length() == text.shape[1] - 1


@pytest.mark.parametrize("way", DRAFTING)
def test_PAR_01_cache_after_an_eos_inside_a_block(way: str) -> None:
    said = plain(T, X, max_new_tokens=12)
    for place in range(1, 9):
        cache, eos = DynamicCache(), said[place]
        expected = plain(T, X, max_new_tokens=12, eos_token_id=eos)
        how = WAYS[way] | ({"assistant_model": tiny.noisy(T, 0)} if way == "draft" else {})
        assert list(spec(T, X, max_new_tokens=12, eos_token_id=eos, **{cache_name(T): cache}, **how).ids) == expected
        assert cache.get_seq_length() == 7 + len(expected) - 1
        prompt = torch.cat([X, torch.tensor([expected]), tiny.ids(9, 2)], 1)
        assert turn(T, prompt, 6, cache, WAYS[way]) == plain(T, prompt, max_new_tokens=6)


@pytest.mark.parametrize("way", DRAFTING)
def test_PAR_01_padded_prompt_with_a_filled_cache(way: str) -> None:
    """The cache of a left-padded prompt holds the padding too; continue it rightly or refuse it."""
    for pads in (1, 4, 9):
        cache = DynamicCache()
        ids = torch.nn.functional.pad(X, (pads, 0))
        mask = (ids != 0).long()
        said = plain(T, ids, attention_mask=mask, max_new_tokens=6, **{cache_name(T): cache})
        ids = torch.cat([ids, torch.tensor([said]), tiny.ids(9, 12)], 1)
        mask = torch.cat([mask, torch.ones(1, 18, dtype=torch.long)], 1)
        with watched(T) as calls:
            try:
                result = spec(T, ids, attention_mask=mask, max_new_tokens=8, **{cache_name(T): cache}, **WAYS[way])
            except ValueError as refusal:
                assert "cache" in str(refusal)  # noqa: PT017
                assert not calls.widths
                continue
        assert list(result.ids) == plain(T, ids[:, pads:], max_new_tokens=8)


def test_PAR_01_caches_that_cannot_be_continued_are_refused() -> None:
    full = DynamicCache()
    plain(T, X, max_new_tokens=6, **{cache_name(T): full})
    static = StaticCache(config=T.config, max_cache_len=64)
    plain(T, X, max_new_tokens=3, **{cache_name(T): static})
    two, mask = padded([tiny.ids(1, 20), tiny.ids(2, 20)])
    for cache, ids in ((full, X), (full, tiny.ids(1, 12)), (static, tiny.ids(1, 20)), (full, two)):
        given = {"attention_mask": mask} if ids is two else {}
        for way in DRAFTING:
            with no_forward(T, D), pytest.raises(ValueError, match="cache"):
                spec(T, ids, max_new_tokens=4, **given, **{cache_name(T): cache}, **WAYS[way])


# ---------------------------------------------------------------- PAR-03
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", DRAFTING)
def test_PAR_03_half_precision_differs_at_ties_only(way: str, dtype: torch.dtype) -> None:
    """The first difference from plain greedy is a near tie, the trace says so, and everything before is equal."""
    model, draft = tiny.llama().to(dtype), tiny.noisy(tiny.llama(), 0.03).to(dtype)
    how = (
        {"assistant_model": draft, "num_assistant_tokens": 5, **EAGER}
        if way == "draft"
        else {"prompt_lookup_num_tokens": 5}
    )
    for seed in range(6):
        prompt = tiny.ids(seed, 7)
        expected = plain(model, prompt, max_new_tokens=60)
        result = spec(model, prompt, max_new_tokens=60, **how)
        consistent(result)
        margins = [margin for step in result.steps for margin in step.margins or ()]
        assert len(margins) == len(result.ids) == 60
        at = next((i for i, (a, b) in enumerate(zip(result.ids, expected, strict=True)) if a != b), None)
        with torch.no_grad():
            scale = model(prompt).logits.abs().max().float()
        ulp = float(torch.finfo(dtype).eps * scale)
        assert at is None or margins[at] <= 8 * ulp
        if at is not None:  # one forward over the whole text agrees that the two were close
            with torch.no_grad():
                logits = (
                    model(torch.cat([prompt, torch.tensor([expected[:at]], dtype=torch.long)], 1)).logits[0, -1].float()
                )
            assert abs(float(logits[result.ids[at]] - logits[expected[at]])) <= 8 * ulp


@pytest.mark.slow
def test_PAR_03_float32_is_exact() -> None:
    for seed, way in itertools.product(range(6), DRAFTING):
        prompt = tiny.ids(seed, 7)
        assert list(spec(T, prompt, max_new_tokens=60, **WAYS[way]).ids) == plain(T, prompt, max_new_tokens=60)


# ---------------------------------------------------------------- PAR-04
@pytest.mark.parametrize("way", DRAFTING)
def test_PAR_04_guidance_is_refused_by_name(way: str) -> None:
    with no_forward(T, D), pytest.raises(ValueError, match="guidance_scale=1.5"):
        spec(T, X, max_new_tokens=40, guidance_scale=1.5, **WAYS[way])
    assert list(spec(T, X, max_new_tokens=9, guidance_scale=1.0, **WAYS[way]).ids) == plain(T, X, max_new_tokens=9)


class Parity(LogitsProcessor):
    """Even ids at even calls, odd ids at odd ones: its state is the number of its calls."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        odd = len(self.lengths) % 2
        self.lengths.append(input_ids.shape[1])
        return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 != odd, -torch.inf)


@pytest.mark.slow
@pytest.mark.parametrize("way", DRAFTING)
def test_PAR_04_processor_with_a_state(way: str) -> None:
    for seed in range(6):
        prompt, ours, theirs = tiny.ids(seed, 7), Parity(), Parity()
        expected = plain(T, prompt, max_new_tokens=40, logits_processor=LogitsProcessorList([theirs]))
        result = spec(T, prompt, max_new_tokens=40, logits_processor=LogitsProcessorList([ours]), **WAYS[way])
        assert list(result.ids) == expected
        assert ours.lengths == theirs.lengths == list(range(7, 47))  # once per token, in order, not for the draft


@pytest.mark.parametrize("way", DRAFTING)
def test_PAR_04_processor_with_a_state_in_rows(way: str) -> None:
    """It is called for all rows together, once per token, with the padded text: also one that cannot be copied."""

    class Grammar(Parity):
        def __deepcopy__(self, memo: Any) -> Grammar:
            raise TypeError("no copies of this grammar")

    prompts, ours = [tiny.ids(1, 4), tiny.ids(2, 9), tiny.ids(3, 6)], Grammar()
    ids, mask = padded(prompts)
    result = spec(
        T, ids, attention_mask=mask, max_new_tokens=15, logits_processor=LogitsProcessorList([ours]), **WAYS[way]
    )
    for row, prompt in zip(result.rows, prompts, strict=True):
        assert list(row.ids) == plain(T, prompt, max_new_tokens=15, logits_processor=LogitsProcessorList([Parity()]))
    assert ours.lengths == list(range(9, 24))


@pytest.mark.parametrize("way", DRAFTING)
def test_PAR_04_block_verification_refuses_a_state(way: str) -> None:
    with no_forward(T, D), pytest.raises(ValueError, match="Parity"):
        specnb.generate(
            T,
            X,
            do_sample=True,
            max_new_tokens=5,
            verification="block",
            logits_processor=LogitsProcessorList([Parity()]),
            **WAYS[way],
        )


@pytest.mark.parametrize("way", DRAFTING)
def test_PAR_04_prefix_allowed_tokens(way: str) -> None:
    """A grammar in transformers' form: a function of the prefix."""

    def allowed(row: int, ids: Tensor) -> list[int]:
        return [i for i in range(3, 64) if (i + int(ids[-1])) % 3]

    for seed in range(3):
        prompt = tiny.ids(seed, 7)
        expected = plain(T, prompt, max_new_tokens=30, prefix_allowed_tokens_fn=allowed)
        assert list(spec(T, prompt, max_new_tokens=30, prefix_allowed_tokens_fn=allowed, **WAYS[way]).ids) == expected


# ---------------------------------------------------------------- PAR-05
CHANGING: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[32], [5, 7], [48], [30]]},
    "suppress": {"suppress_tokens": [32, 15, 33, 48, 30]},
    "sequence_bias": {"sequence_bias": {(32,): -3.0, (48,): -9.0, (15, 29): -9.0}},
    "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": [32, 15, 3, 48]},
    "min_length": {"min_length": 25, "eos_token_id": [32, 15, 3, 48]},
    "forced_eos": {"forced_eos_token_id": 2},
    "decay": {"exponential_decay_length_penalty": (4, 1.6), "eos_token_id": 5},
    "watermark": {"watermarking_config": WatermarkingConfig(greenlist_ratio=0.4, bias=4.0)},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", DRAFTING)
@pytest.mark.parametrize("option", CHANGING)
def test_PAR_05_options_change_the_text_as_in_plain_decoding(option: str, way: str) -> None:
    given = CHANGING[option]
    without = {key: value for key, value in given.items() if key == "eos_token_id"}
    changed = 0
    for seed in range(6):
        prompt = tiny.ids(seed, 7)
        expected = plain(T, prompt, max_new_tokens=40, **given)
        assert list(spec(T, prompt, max_new_tokens=40, **given, **WAYS[way]).ids) == expected
        changed += expected != plain(T, prompt, max_new_tokens=40, **without)
    assert changed


# ---------------------------------------------------------------- PAR-07
@pytest.mark.parametrize("way", DRAFTING)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma4", "gpt2"])
def test_PAR_07_left_padded_prompt(family: str, way: str) -> None:
    model = tiny.family(family)
    how = {"assistant_model": tiny.noisy(model, 0.03), **EAGER} if way == "draft" else WAYS[way]
    for pads in (1, 4, 11):
        ids = torch.nn.functional.pad(X, (pads, 0))
        result = spec(model, ids, attention_mask=(ids != 0).long(), max_new_tokens=20, **how)
        assert list(result.ids) == plain(model, X, max_new_tokens=20)
        assert result.sequences[0].tolist() == ids[0].tolist() + list(result.ids)


@pytest.mark.parametrize("way", DRAFTING)
def test_PAR_07_encoder_decoder_is_refused_with_the_reason(way: str) -> None:
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval()
    with no_forward(model, model.get_encoder(), D), pytest.raises(ValueError, match="encoder-decoder"):
        spec(model, tiny.ids(0, 9), max_new_tokens=20, **WAYS[way])
    with no_forward(T, model), pytest.raises(ValueError, match="encoder-decoder"):
        spec(T, X, max_new_tokens=20, assistant_model=model)


@pytest.mark.parametrize("given", ["position_ids", "token_type_ids"])
@pytest.mark.parametrize("way", DRAFTING)
def test_PAR_07_positions_and_types_of_the_caller(way: str, given: str) -> None:
    """Inputs per token given by the caller are continued for new tokens, as in generate(), or refused."""
    model = tiny.gpt2()
    value = torch.arange(7)[None] + 3 if given == "position_ids" else torch.full((1, 7), 5)
    how = {"assistant_model": tiny.noisy(model, 0.03), **EAGER} if way == "draft" else WAYS[way]
    expected = plain(model, X, max_new_tokens=20, **{given: value})
    assert expected != plain(model, X, max_new_tokens=20)
    try:
        result = spec(model, X, max_new_tokens=20, **{given: value}, **how)
    except ValueError as refusal:
        assert given in str(refusal)  # noqa: PT017
    else:
        assert list(result.ids) == expected
