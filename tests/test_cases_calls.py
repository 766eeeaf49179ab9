"""Cases of kind drop-in: every option of generate() is followed, harmless or refused by name, wherever it stands."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from checks import cache_name, configs, no_forward, padded, plain, spec
from transformers import DynamicCache, GenerationConfig, GenerationMixin, StaticCache
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

import specnb
from specnb.call import generate_options, unsupported
from specnb.trace import GenerationResult

T = tiny.llama()
D = tiny.noisy(T, 0.03)
X = tiny.ids(0, 7)
MASK = torch.ones_like(X)
FREE = plain(T, X, max_new_tokens=20)
LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 4}
WAYS: dict[str, dict[str, Any]] = {"plain": {"method": "plain"}, "lookup": LOOKUP, "draft": {"assistant_model": D}}


def with_config(model: Any = None, **settings: Any) -> Any:
    """A model whose own generation config has these settings."""
    model = copy.copy(T if model is None else model)
    model.generation_config = copy.deepcopy(model.generation_config)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def through(decoder: Any, model: Any = T, **options: Any) -> GenerationResult:
    model.generate(
        X, attention_mask=MASK, custom_generate=decoder, **{"do_sample": False, "max_new_tokens": 20} | options
    )
    assert decoder.result is not None
    return decoder.result  # type: ignore[no-any-return]


# ---------------------------------------------------------------- the table of fields
def test_every_field_of_a_generation_config_is_in_the_table() -> None:
    """Also that nothing is in it twice, or is refused without being in it."""
    new = vars(GenerationConfig()).keys() - generate_options.FIELDS.keys()
    assert not new, f"transformers has fields that specnb does not know: {sorted(new)}"
    new = signature(GenerationMixin.generate).parameters.keys() - generate_options.PARAMETERS.keys()
    assert not new, f"generate() has parameters that specnb does not know: {sorted(new)}"
    refused = {
        name
        for table in (generate_options.FIELDS, generate_options.PARAMETERS)
        for name, what in table.items()
        if what == "unsupported"
    }
    assert refused - {"custom_generate"} == unsupported.UNSUPPORTED_OPTIONS


HARMLESS: dict[str, Any] = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "diversity_penalty": 0.5,
    "num_beam_groups": 2,
    "low_memory": True,
    "cache_config": {"nbits": 4},
    "max_cache_len": 64,
    "disable_compile": True,
    "decoder_start_token_id": 3,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_fields_change_nothing(name: str) -> None:
    assert generate_options.FIELDS[name] == "harmless"
    assert plain(T, X, max_new_tokens=20, **{name: HARMLESS[name]}) == FREE
    assert list(spec(T, X, max_new_tokens=20, **{name: HARMLESS[name]}, **LOOKUP).ids) == FREE
    assert list(spec(with_config(**{name: HARMLESS[name]}), X, max_new_tokens=20, **LOOKUP).ids) == FREE
    assert list(through(specnb.decoder(**LOOKUP), **{name: HARMLESS[name]}).ids) == FREE


HONOURED: dict[str, Any] = {
    "min_length": 12,
    "repetition_penalty": 1.4,
    "encoder_repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 5,
    "encoder_no_repeat_ngram_size": 1,
    "bad_words_ids": [[FREE[2]]],
    "renormalize_logits": True,
    "forced_eos_token_id": 5,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (3, 1.5),
    "suppress_tokens": [FREE[1]],
    "begin_suppress_tokens": [FREE[0]],
    "sequence_bias": [[[FREE[3]], -9.0]],
    "eos_token_id": [FREE[4]],
    "prefill_chunk_size": 3,
    "max_length": 11,
    "forced_bos_token_id": 3,
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HONOURED)
def test_honoured_fields_are_transformers_own(name: str, way: str) -> None:
    given = {"max_new_tokens": 14, "eos_token_id": FREE[11]} | {name: HONOURED[name]}
    if name == "max_length":
        del given["max_new_tokens"]
    assert list(spec(T, X, **given, **WAYS[way]).ids) == plain(T, X, **given)
    length = {"max_new_tokens": given.pop("max_new_tokens")} if "max_new_tokens" in given else {}
    model = with_config(**given)
    assert list(spec(model, X, **length, **WAYS[way]).ids) == plain(model, X, **length)


def test_a_field_of_a_newer_transformers_is_refused_when_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported, "NEW_FIELDS", frozenset({"novel"}))
    monkeypatch.setattr(unsupported, "NEW_PARAMETERS", frozenset({"novel_parameter"}))
    assert list(spec(T, X, max_new_tokens=20, **LOOKUP).ids) == FREE
    assert list(spec(with_config(novel=None), X, max_new_tokens=20, **LOOKUP).ids) == FREE
    for call in (
        lambda: spec(with_config(novel=3), X, max_new_tokens=4),
        lambda: spec(T, X, max_new_tokens=4, novel_parameter=1),
    ):
        with no_forward(T), pytest.raises(ValueError, match="newer than this specnb"):
            call()


@pytest.mark.parametrize("where", ["call", "target", "assistant"])
def test_speculation_type_needs_such_a_drafter(where: str) -> None:
    asked = {"speculation_type": "dflash"}
    model, draft = (
        with_config(one, **asked) if where == name else one for name, one in (("target", T), ("assistant", D))
    )
    call = asked if where == "call" else {}
    with no_forward(T, D), pytest.raises(ValueError, match="speculation_type='dflash'"):
        spec(model, X, max_new_tokens=4, assistant_model=draft, **call)
    with no_forward(T, D), pytest.raises(ValueError, match="speculation_type='dflash'"):
        through(specnb.decoder(assistant_model=draft), model, **call)


@pytest.mark.parametrize("way", WAYS)
def test_is_assistant_changes_no_text(way: str) -> None:
    """transformers itself asks a criterion that knows no scores, and fails with a TypeError."""
    assert list(spec(T, X, max_new_tokens=20, is_assistant=True, **WAYS[way]).ids) == FREE
    assert list(spec(with_config(is_assistant=True), X, max_new_tokens=20, **WAYS[way]).ids) == FREE
    assert list(spec(T, X, max_new_tokens=20, assistant_model=with_config(D, is_assistant=True)).ids) == FREE
    how = {"method": "prompt_lookup"} if way == "lookup" else WAYS[way]
    assert list(through(specnb.decoder(**how), is_assistant=True).ids) == FREE
    with no_forward(T, D), pytest.raises(ValueError, match="is_assistant"):
        spec(T, X, max_new_tokens=20, is_assistant=True, output_scores=True, return_dict_in_generate=True, **WAYS[way])


def test_custom_generate_and_synced_gpus_are_refused() -> None:
    with no_forward(T), pytest.raises(ValueError, match=r"custom_generate= .*specnb.decoder"):
        spec(T, X, max_new_tokens=4, custom_generate=lambda *_, **__: None)
    with no_forward(T), pytest.raises(ValueError, match="synced_gpus"):
        spec(T, X, max_new_tokens=4, synced_gpus=True)


# ---------------------------------------------------------------- caches
MODELS: dict[str, Callable[[], Any]] = {"llama": tiny.llama, "mistral": tiny.mistral, "gemma3": tiny.gemma3}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "cache", [c for c in ALL_CACHE_IMPLEMENTATIONS if c not in generate_options.UNSUPPORTED_CACHES]
)
def test_caches_that_hold_the_same_are_followed(cache: str, name: str) -> None:
    model, (ids, mask) = MODELS[name](), padded([tiny.ids(1, 5), tiny.ids(2, 9)])
    given = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    expected = MODELS[name]().generate(ids, cache_implementation=cache, **given).tolist()
    assert MODELS[name]().generate(ids, **given).tolist() == expected
    before = (
        {name: copy.deepcopy(value) for name, value in vars(model).items() if not name.startswith("_")},
        len(vars(model)),
    )
    assert specnb.generate(model, ids, cache_implementation=cache, **given, **LOOKUP).sequences.tolist() == expected
    assert len(vars(model)) == before[1]  # not even the length of a static cache is noted on it
    decoder = specnb.decoder(**LOOKUP)
    assert model.generate(ids, cache_implementation=cache, custom_generate=decoder, **given).tolist() == expected
    model.generation_config.cache_implementation = cache
    assert specnb.generate(model, ids, **given, **LOOKUP).sequences.tolist() == expected
    config = GenerationConfig(cache_implementation=cache, pad_token_id=0)
    result = specnb.generate(MODELS[name](), ids, generation_config=config, **given, **LOOKUP)
    assert result.sequences.tolist() == expected and config.cache_implementation == cache


@pytest.mark.parametrize("cache", generate_options.UNSUPPORTED_CACHES)
def test_caches_that_do_something_else_are_refused_by_name(cache: str) -> None:
    config = GenerationConfig(cache_implementation=cache)
    with no_forward(T):
        for call in (
            lambda: spec(T, X, max_new_tokens=4, cache_implementation=cache, **LOOKUP),
            lambda: spec(with_config(cache_implementation=cache), X, max_new_tokens=4),
            lambda: spec(T, X, max_new_tokens=4, generation_config=config, **LOOKUP),
        ):
            with pytest.raises(ValueError, match=f"cache_implementation='{cache}' cannot be followed"):
                call()
    assert (
        list(spec(with_config(cache_implementation=cache), X, max_new_tokens=20, cache_implementation="dynamic").ids)
        == FREE
    )
    if cache.startswith("offloaded"):
        with no_forward(T), pytest.raises(ValueError, match=f"cache_implementation='{cache}'"):
            through(specnb.decoder(**LOOKUP), cache_implementation=cache)


class Mine(DynamicCache):
    """A cache class that specnb does not know."""


def test_caches_given_that_are_not_a_dynamic_one_are_refused() -> None:
    for cache in (StaticCache(T.config, max_cache_len=64), Mine(config=T.config)):
        name = type(cache).__name__
        with no_forward(T), pytest.raises(ValueError, match=f"the cache given is a {name}"):
            spec(T, X, max_new_tokens=4, **{cache_name(T): cache}, **LOOKUP)
        with no_forward(T), pytest.raises(ValueError, match=f"the cache given is a {name}"):
            through(specnb.decoder(**LOOKUP), **{cache_name(T): cache})
    for wrong in (3, "x", ((torch.zeros(1), torch.zeros(1)),)):
        with no_forward(T), pytest.raises(ValueError, match="must be a DynamicCache"):
            spec(T, X, max_new_tokens=4, past_key_values=wrong, **LOOKUP)
    cache = DynamicCache(config=T.config)
    assert list(spec(T, X, max_new_tokens=20, **{cache_name(T): cache}, **LOOKUP).ids) == FREE
    assert cache.get_seq_length() == 26


# ---------------------------------------------------------------- values
@pytest.mark.parametrize("way", WAYS)
def test_temperature_0_is_greedy(way: str) -> None:
    before = configs(T, D)
    for more in ({}, {"do_sample": True}, {"do_sample": True, "top_p": 0.9, "top_k": 5}):
        result = specnb.generate(T, X, attention_mask=MASK, max_new_tokens=20, temperature=0, **more, **WAYS[way])
        assert list(result.ids) == FREE and result.seed is None
        assert result.options["do_sample"] is False and result.option_sources["do_sample"] == "call"
        config = GenerationConfig(temperature=0.0, pad_token_id=0, max_new_tokens=20, **more)
        result = specnb.generate(T, X, attention_mask=MASK, generation_config=config, **WAYS[way])
        assert list(result.ids) == FREE and config.temperature == 0.0
        model = with_config(temperature=0.0, **more)
        assert list(specnb.generate(model, X, attention_mask=MASK, max_new_tokens=20, **WAYS[way]).ids) == FREE
        assert model.generation_config.temperature == 0.0
    warm = {"do_sample": True, "temperature": 1.0, "seed": 3}
    model = with_config(temperature=0.0)
    same = [specnb.generate(m, X, attention_mask=MASK, max_new_tokens=20, **warm).ids for m in (model, T)]
    assert same[0] == same[1] != tuple(FREE)
    assert configs(T, D) == before


def test_temperature_0_in_a_comparison() -> None:
    found = specnb.bench.compare(
        T,
        [X],
        ["prompt_lookup"],
        repeats=1,
        warmup=0,
        max_new_tokens=8,
        temperature=0,
        do_sample=True,
        transformers=True,
    )
    assert [list(one[0].ids) for one in found.results.values()] == [FREE[:8]] * 2
    assert not any(row.note for row in found.rows if hasattr(row, "note"))


VALUES: dict[str, tuple[Any, str]] = {
    "max_new_tokens": (0, "make no call"),
    "num_assistant_tokens": (0, "method='plain' drafts nothing"),
    "prompt_lookup_num_tokens": (0, "method='plain' drafts nothing"),
    "top_k": (-1, "0 takes all"),
    "top_p": (1.5, "1 takes all"),
    "max_time": (0, "no limit"),
    "temperature": (-0.5, ">= 0"),
    "eos_token_id": ("x", "convert_tokens_to_ids"),
    "pad_token_id": (1.5, "token id"),
    "logits_processor": ("x", "must be a list of LogitsProcessor"),
    "stopping_criteria": ([3], "must be a list of StoppingCriteria"),
    "prefix_allowed_tokens_fn": ("x", "must be a function"),
    "on_step": (3, "must be a function"),
    "cancel": (True, "threading.Event"),
    "tokenizer": ("gpt2", "AutoTokenizer"),
    "attention_mask": ([[1] * 7], "torch.tensor"),
    "min_length": ("x", "whole number"),
    "max_length": (2.5, "whole number"),
    "typical_p": ("x", "a number"),
    "watermarking_config": (3, "WatermarkingConfig"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_cannot_be_say_what_to_do(name: str) -> None:
    value, words = VALUES[name]
    with no_forward(T, D), pytest.raises(ValueError, match=name) as caught:
        specnb.generate(
            T,
            X,
            **{"max_new_tokens": 4, name: value},
            **({} if name != "num_assistant_tokens" else {"assistant_model": D}),
        )
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_processor_without_a_list_around_it() -> None:
    with pytest.raises(ValueError, match=r"logits_processor=\[\.\.\.\]"):
        spec(T, X, max_new_tokens=4, logits_processor=lambda ids, scores: scores)


def test_top_p_0_takes_the_best_token_only() -> None:
    result = specnb.generate(T, X, attention_mask=MASK, do_sample=True, top_p=0, max_new_tokens=20, seed=0, **LOOKUP)
    assert list(result.ids) == FREE


PROMPTS: dict[str, tuple[Any, str]] = {
    "chat": ([{"role": "user", "content": "Hi"}], "apply_chat_template"),
    "chats": ([[{"role": "user", "content": "Hi"}]], "apply_chat_template"),
    "one message": ({"role": "user", "content": "Hi"}, "apply_chat_template"),
    "ids": ([3, 4, 5], r"torch.tensor\(\[ids\]\)"),
    "rows of ids": ([[3, 4], [5, 6]], r"torch.tensor\(rows\)"),
    "rows of other lengths": ([[3, 4], [5]], "padded on the left"),
    "tensors": ([X[0], X[0]], "torch.stack"),
    "numpy": (np.array([[3, 4]]), "torch.as_tensor"),
    "dict": ({"input_ids": X}, r"\*\*inputs"),
    "encoding": (tiny.byte_tokenizer()("the fox", return_tensors="pt"), r"\*\*inputs"),
    "flat tensor": (X[0], r"unsqueeze\(0\)"),
    "empty list": ([], "at least one text"),
    "empty text": ("", "empty"),
    "empty tensor": (X[:, :0], "empty"),
    "empty flat tensor": (X[0, :0], "empty"),
    "number": (7, "int"),
}


@pytest.mark.parametrize("where", ["inputs", "input_ids"])
@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_of_another_kind_name_the_remedy(kind: str, where: str) -> None:
    prompt, words = PROMPTS[kind]
    if where == "input_ids" and kind in ("empty text", "empty list"):
        return
    model, tokenizer = tiny.llama(vocab=330), tiny.byte_tokenizer()
    with no_forward(model), pytest.raises(ValueError, match=words) as caught:
        specnb.generate(model, tokenizer=tokenizer, max_new_tokens=4, **{where: prompt})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_EM_01_an_empty_prompt(way: str) -> None:
    empty = torch.zeros(1, 0, dtype=torch.long)
    how = {"method": "prompt_lookup"} if way == "lookup" else WAYS[way]
    with no_forward(T, D), pytest.raises(ValueError, match="the prompt is empty"):
        T.generate(input_ids=empty, max_new_tokens=4, custom_generate=specnb.decoder(**how))
    with no_forward(T, D), pytest.raises(ValueError, match="the prompt is empty"):
        specnb.generate(T, empty.expand(3, 0), max_new_tokens=4, **WAYS[way])


def test_a_comparison_takes_no_empty_prompt() -> None:
    pair = specnb.load("tiny-llama")
    for prompts in ("", ["a fox", " \n"]):
        with no_forward(pair.target), pytest.raises(ValueError, match="is empty"):
            specnb.bench.compare(pair, prompts, ["prompt_lookup"], repeats=1)


def test_devices_and_exits_that_cannot_be_name_what_can() -> None:
    with pytest.raises(ValueError, match="meta device holds none"):
        specnb.load("tiny-llama", device_map="meta")
    model = tiny.gemma4(shared=2, per_layer=4)
    with pytest.raises(ValueError, match="give 1 to 3"):
        spec(model, X, max_new_tokens=4, assistant_early_exit=99)
    expected = plain(model, X, max_new_tokens=8)
    for exit in (1, 2, 3):  # what the message allows
        assert list(spec(model, X, max_new_tokens=8, assistant_early_exit=exit).ids) == expected


# ---------------------------------------------------------------- whose setting counts
def test_the_draft_models_settings_count_where_call_and_target_say_nothing() -> None:
    draft = with_config(
        D,
        num_assistant_tokens=3,
        num_assistant_tokens_schedule="heuristic_transient",
        assistant_confidence_threshold=0.0,
    )
    before = configs(T, draft)
    for call in (
        lambda model, **more: spec(model, X, max_new_tokens=20, assistant_model=draft, **more),
        lambda model, **more: through(specnb.decoder(assistant_model=draft), model, **more),
        lambda model, **more: through(specnb.decoder(assistant_model=draft, **more), model),
    ):
        own = call(T)
        assert list(own.ids) == FREE
        assert own.options["num_assistant_tokens"] == 3 and len(own.steps[1].drafted) == 3
        assert own.options["num_assistant_tokens_schedule"] == "heuristic_transient"
        assert own.options["assistant_confidence_threshold"] == 0.0
        assert (
            own.option_sources["num_assistant_tokens"]
            == own.option_sources["assistant_confidence_threshold"]
            == "assistant"
        )
        assert own.option_sources["verification"] == "default"
        target = call(with_config(num_assistant_tokens=4))
        assert (target.options["num_assistant_tokens"], target.option_sources["num_assistant_tokens"]) == (4, "target")
        assert target.option_sources["num_assistant_tokens_schedule"] == "assistant"
        for k in (5, 20):  # 20 is transformers' default, and here a wish
            called = call(with_config(num_assistant_tokens=4), num_assistant_tokens=k)
            assert (called.options["num_assistant_tokens"], called.option_sources["num_assistant_tokens"]) == (
                k,
                "call",
            )
        assert call(T).options == own.options  # nothing leaks from call to call
    assert configs(T, draft) == before


def test_a_targets_wish_for_transformers_default_counts() -> None:
    model = with_config(num_assistant_tokens=20, num_assistant_tokens_schedule="constant")
    for result in (
        spec(model, X, max_new_tokens=20, assistant_model=D),
        through(specnb.decoder(assistant_model=D), model),
    ):
        assert result.options["num_assistant_tokens"] == 20
        assert (
            result.option_sources["num_assistant_tokens"]
            == result.option_sources["num_assistant_tokens_schedule"]
            == "target"
        )


def test_a_config_in_the_call_decides_over_the_targets() -> None:
    config = GenerationConfig(num_assistant_tokens=2, pad_token_id=0, max_new_tokens=20, do_sample=False)
    model = with_config(num_assistant_tokens=6, assistant_confidence_threshold=0.0)
    for result in (
        specnb.generate(model, X, attention_mask=MASK, generation_config=config, assistant_model=D),
        through(specnb.decoder(assistant_model=D), model, generation_config=config),
    ):
        assert (result.options["num_assistant_tokens"], result.option_sources["num_assistant_tokens"]) == (2, "call")
        assert result.option_sources["assistant_confidence_threshold"] == "target"
    bound = through(specnb.decoder(assistant_model=D, num_assistant_tokens=7), with_config(num_assistant_tokens=6))
    assert (bound.options["num_assistant_tokens"], bound.option_sources["num_assistant_tokens"]) == (7, "call")


def test_a_targets_setting_is_no_wish_to_draft() -> None:
    model = with_config(num_assistant_tokens=6, assistant_confidence_threshold=0.1)
    for result in (spec(model, X, max_new_tokens=20), through(specnb.decoder(), model)):
        assert result.method == "plain" and list(result.ids) == FREE


@pytest.mark.parametrize(("name", "value"), [("num_assistant_tokens", 0), ("num_assistant_tokens_schedule", "linear")])
def test_a_wrong_setting_says_where_it_stands(name: str, value: Any) -> None:
    with no_forward(T, D), pytest.raises(ValueError, match=f"in the draft model's generation config: {name}="):
        spec(T, X, max_new_tokens=4, assistant_model=with_config(D, **{name: value}))
    with no_forward(T, D), pytest.raises(ValueError, match=f"in the target's generation config: {name}="):
        spec(with_config(**{name: value}), X, max_new_tokens=4, assistant_model=D)


def test_a_method_bound_to_a_decoder_gives_way_to_the_call() -> None:
    decoder = specnb.decoder(method=specnb.Method("prompt_lookup", num_assistant_tokens=2, max_matching_ngram_size=1))
    assert through(decoder).options["num_assistant_tokens"] == 2
    result = through(decoder, num_assistant_tokens=6)
    assert (result.options["num_assistant_tokens"], result.options["max_matching_ngram_size"]) == (6, 1)
    result = through(specnb.decoder(prompt_lookup_num_tokens=3), num_assistant_tokens=6)
    assert result.options["num_assistant_tokens"] == 6


def test_sources_of_all_options_survive_json() -> None:
    model = with_config(temperature=0.7, max_new_tokens=9)
    result = specnb.generate(model, X, attention_mask=MASK, do_sample=True, top_k=5, seed=1, **LOOKUP)
    wanted = {
        "num_assistant_tokens": "call",
        "max_matching_ngram_size": "default",
        "max_new_tokens": "target",
        "temperature": "target",
        "top_k": "call",
        "do_sample": "call",
        "top_p": "default",
    }
    assert wanted.items() <= result.option_sources.items()
    assert result.option_sources.keys() == result.options.keys()
    assert GenerationResult.from_json(result.to_json()).option_sources == result.option_sources
    decoder = specnb.decoder(method="prompt_lookup")
    model.generate(X, attention_mask=MASK, do_sample=True, top_k=5, custom_generate=decoder)
    assert (wanted | {"num_assistant_tokens": "default"}).items() <= decoder.result.option_sources.items()


# ---------------------------------------------------------------- defaults
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {"assistant_model": D},
    "prompt_lookup": {"method": "prompt_lookup"},
    "suffix": {"method": "suffix"},
    "early_exit": {"assistant_early_exit": 2},
}


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_generate_and_decoder_have_the_same_defaults(method: str, dtype: torch.dtype, sample: bool) -> None:
    model, how = tiny.llama().to(dtype), METHODS[method]
    how = how | {"assistant_model": tiny.noisy(tiny.llama(), 0.03).to(dtype)} if method == "draft_model" else how
    given = {"attention_mask": MASK, "max_new_tokens": 12, "do_sample": sample}
    one = specnb.generate(model, X, seed=1, **given, **how)
    decoder = specnb.decoder(seed=1, **how)
    model.generate(X, custom_generate=decoder, **given)
    assert one.options == decoder.result.options and one.method == decoder.result.method == method
    assert one.options["num_assistant_tokens"] == (10 if method in ("prompt_lookup", "suffix") else 5)
    assert (
        one.option_sources["num_assistant_tokens"] == one.option_sources["num_assistant_tokens_schedule"] == "default"
    )
    drawn = sample and method not in ("prompt_lookup", "suffix")
    free = "adaptive" if dtype == torch.float32 else "heuristic"
    assert one.options["num_assistant_tokens_schedule"] == ("constant" if drawn else free)


def test_the_default_reads_no_clock_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        result = spec(T, X, max_new_tokens=8, method="prompt_lookup")
    assert result.options["num_assistant_tokens_schedule"] == "heuristic"


@pytest.mark.parametrize("name", ["heuristic", "heuristic_transient"])
def test_both_names_of_the_heuristic_start_afresh(name: str) -> None:
    how = {"assistant_model": tiny.noisy(T, 0), "num_assistant_tokens": 2, "assistant_confidence_threshold": 0.0}
    for _ in range(2):
        result = spec(T, X, max_new_tokens=20, num_assistant_tokens_schedule=name, **how)
        assert [len(step.drafted) for step in result.steps][:4] == [0, 2, 4, 6]
        assert result.options["num_assistant_tokens_schedule"] == name
        assert list(result.ids) == FREE


def test_use_mtp_is_a_switch() -> None:
    for wrong in ("yes", 1, 0):
        with no_forward(T), pytest.raises(ValueError, match=rf"use_mtp={wrong!r} is not valid.*True, False or None"):
            spec(T, X, max_new_tokens=4, use_mtp=wrong)
    config = GenerationConfig(max_new_tokens=4)
    config.use_mtp = "yes"
    with no_forward(T), pytest.raises(ValueError, match="in the call's generation config: use_mtp='yes' is not valid"):
        spec(T, X, generation_config=config)
    assert list(spec(T, X, max_new_tokens=4, use_mtp=False).ids) == plain(T, X, max_new_tokens=4)


def test_a_cache_under_its_older_name_warns_of_nothing_inside_specnb() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = spec(T, X, max_new_tokens=4, past_key_values=DynamicCache(config=T.config), **LOOKUP)
    assert list(result.ids) == plain(T, X, max_new_tokens=4)
