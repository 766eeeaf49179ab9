"""Inputs of a call: a wrong model, prompt or option is refused before anything runs; the message says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from checks import no_forward, plain, spec

import specnb
from specnb.bench import compare
from specnb.text import prompt_inputs

MODEL, X = tiny.llama(), tiny.ids(0, 6)


@pytest.fixture(scope="module")
def pair() -> specnb.Pair:
    target, tokenizer = tiny.llama(vocab=330), tiny.byte_tokenizer()
    return specnb.Pair(target, tokenizer, tiny.noisy(target, 0.03), tokenizer, name="tiny")


def test_a_pair_stands_for_its_target_and_tokenizer(pair: specnb.Pair) -> None:
    draft = specnb.Pair(pair.assistant, pair.tokenizer)
    one = specnb.generate(pair, "the quick", max_new_tokens=12, do_sample=False, assistant_model=draft)
    two = specnb.generate(pair, "the quick", max_new_tokens=12, do_sample=False, method="plain")
    assert one.method == "draft_model" and one.ids == two.ids
    decoder = specnb.decoder(assistant_model=draft, tokenizer=pair.tokenizer)
    ids = pair.tokenizer("the quick", return_tensors="pt").input_ids
    pair.target.generate(ids, custom_generate=decoder, max_new_tokens=12, do_sample=False)
    assert decoder.result is not None and decoder.result.method == "draft_model" and decoder.result.ids == two.ids


NAMES: list[tuple[Any, list[str]]] = [
    (lambda pair: specnb.generate("tiny-llama", "Hi"), ["model", "'tiny-llama'", "specnb.load('tiny-llama')"]),
    (lambda pair: specnb.generate(pair, "Hi", assistant_model="x"), ["assistant_model", "specnb.load('x')"]),
    (lambda pair: specnb.decoder(assistant_model=5), ["assistant_model", "int"]),
    (lambda pair: compare("tiny-llama", "Hi", ["plain"]), ["specnb.load('tiny-llama')"]),
    (lambda pair: specnb.save_pair(pair.target, "x"), ["LlamaForCausalLM", "specnb.Pair(model, tokenizer)"]),
    (lambda pair: specnb.load(None), ["name or a path", "None"]),
    (lambda pair: specnb.load(pair.target), ["name or a path", "a LlamaForCausalLM"]),
    (lambda pair: specnb.load("tiny-llama", 2.5), ["number of layers", "2.5"]),
    (lambda pair: specnb.pack(pair), ["not a Pair", "pair.target"]),
    (lambda pair: specnb.unpack("tiny-llama"), ["not a str"]),
    (lambda pair: specnb.cuda_graphs(pair), ["not a Pair", "specnb.cuda_graphs(pair.target)"]),
    (lambda pair: specnb.generate(None, "x"), ["model is None", "specnb.load"]),
    (lambda pair: specnb.generate(pair, "x", streamer=3), ["put() and end()", "int"]),
    (lambda pair: specnb.generate(pair, "x", generation_config={"max_new_tokens": 3}), ["GenerationConfig", "dict"]),
    (lambda pair: prompt_inputs(pair.tokenizer, ["a", "b"]), ["one text", "list"]),
    (lambda pair: specnb.load("tiny-llama", pack="maybe"), ["pack='maybe'", "True, False or None"]),
    (
        lambda pair: specnb.load("tiny-llama", device_map="gpu"),
        ["device_map='gpu'", "no device 'gpu'", "'cpu'", "auto"],
    ),
    (lambda pair: specnb.load("tiny-llama", device_map={"": "cuda:99"}), ["no device 'cuda:99'", "'cpu'", "auto"]),
    (lambda pair: specnb.load("tiny-llama", device_map=3.5), ["device_map=3.5", "'cpu'", "auto"]),
    (lambda pair: specnb.load("tiny-llama", cuda_graphs=True), ["cuda_graphs=True", "device_map='cuda'"]),
    (lambda pair: specnb.load("tiny-llama", dtype="float7"), ["dtype='float7'", "bfloat16"]),
    (lambda pair: specnb.Panel(pair, method="draft_mode"), ["draft_mode", "Did you mean 'draft_model'"]),
]


@pytest.mark.parametrize(("call", "words"), NAMES)
def test_a_name_or_another_thing_in_the_place_of_a_model(call: Any, words: list[str], pair: specnb.Pair) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call(pair)
    assert all(word in str(caught.value) for word in words), caught.value


def test_short_names_of_dtypes() -> None:
    assert specnb.load("tiny-llama", dtype="bf16").target.dtype == torch.bfloat16


PROMPTS: list[tuple[Any, dict[str, Any], str]] = [
    (None, {}, "there is no prompt"),
    (X[0], {}, r"\[rows, length\], not a tensor \[6\] of torch.int64"),
    (X[:, :0], {}, r"empty"),
    (X.float(), {}, "whole numbers"),
    (torch.tensor([[3, 64]]), {}, "holds the id 64.*0 to 63"),
    (torch.tensor([[3, -1]]), {}, "holds the id -1"),
    (X, {"attention_mask": torch.ones(1, 3)}, r"\[1, 3\].*\[1, 6\]"),
    (X, {"attention_mask": torch.ones(2, 6)}, r"\[2, 6\].*\[1, 6\]"),
    (torch.tensor([[5, 0, 7, 8]]), {}, r"has holes.*pad id.*ones_like"),
]


@pytest.mark.parametrize(("ids", "more", "words"), PROMPTS)
def test_prompts_that_are_none(ids: Any, more: dict[str, Any], words: str) -> None:
    with no_forward(MODEL), pytest.raises(ValueError, match=words):
        specnb.generate(MODEL, ids, max_new_tokens=4, do_sample=False, **more)


def test_a_pad_id_that_is_meant() -> None:
    ids = torch.tensor([[5, 0, 7, 8]])
    assert list(spec(MODEL, ids, max_new_tokens=8).ids) == plain(
        MODEL, ids, max_new_tokens=8
    )  # both with a mask of ones


def test_a_prompt_longer_than_the_positions() -> None:
    model = tiny.gpt2(positions=32)
    for n, count in ((33, None), (32, 1), (27, 6)):
        if count is None:
            with pytest.raises(ValueError, match="33 tokens, but GPT2LMHeadModel has positions for 32"):
                spec(model, tiny.ids(0, n), max_new_tokens=9, prompt_lookup_num_tokens=3)
        else:
            result = spec(model, tiny.ids(0, n), max_new_tokens=9, prompt_lookup_num_tokens=3)
            assert (len(result.ids), result.finish_reason) == (count, "context")


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens=0 is not valid"),
    ({"max_new_token": 3}, "unknown option 'max_new_token'. Did you mean 'max_new_tokens'"),
    ({"num_assistant_token": 3}, "'num_assistant_token'. Did you mean 'num_assistant_tokens'"),
    ({"assistant_early_exit": 0}, "assistant_early_exit=0.*1 to 3"),
    ({"seed": 2**70}, "seed=1180591620717411303424 is not valid"),
    ({"stop_strings": ["the", ""]}, "empty text"),
    ({"stop_strings": ""}, "empty text"),
]


@pytest.mark.parametrize(("options", "words"), OPTIONS)
def test_options_out_of_bounds(options: dict[str, Any], words: str, pair: specnb.Pair) -> None:
    with no_forward(pair.target), pytest.raises(ValueError, match=words):
        specnb.generate(pair, "the quick", max_new_tokens=4, **options)


def test_no_text_at_all(pair: specnb.Pair) -> None:
    with pytest.raises(ValueError, match="empty list"):
        specnb.generate(pair, [])


def test_an_option_that_is_none_was_not_given(pair: specnb.Pair) -> None:
    result = specnb.generate(pair, "the quick", max_new_tokens=6, method="plain", assistant_early_exit=None)
    assert result.method == "plain"


def test_the_nearest_name_is_one_that_begins_alike() -> None:
    from specnb.options import unknown

    assert "Did you mean '--stop-strings'?" in unknown("option", "--stop", ["--top-p", "--stop-strings"])


def test_compare_refuses_what_it_would_have_to_ignore(pair: specnb.Pair) -> None:
    for call, words in (
        (lambda: compare(pair, "x", ["plain"], transformers=["zz"]), "zz.*labels of runs: plain"),
        (lambda: compare(pair, "x", ["plain"], transformers="plain"), "labels of runs"),
        (lambda: compare(pair, "x", ["plain"], warmup=-1), "warmup >= 0"),
        (lambda: compare(pair, "x", ["plain"], repeats="x"), "repeats >= 1"),
        (lambda: compare(pair, "x", [5]), "not 5"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    runs = [{"method": "plain", "repetition_penalty": 1.9}, "plain"]
    found = compare(pair, "the quick", runs, repeats=1, warmup=0, max_new_tokens=4, do_sample=False)
    assert [row.label for row in found.rows] == ["plain", "plain, repetition_penalty=1.9"]
    assert [row.label for row in compare(pair, "the quick", "prompt_lookup", repeats=1, max_new_tokens=4).rows] == [
        "plain",
        "prompt_lookup",
    ]


def test_a_saved_pair_comes_back_whole(tmp_path: Path) -> None:
    pair = specnb.load("tiny-llama", "tiny-llama-draft")
    specnb.save_pair(pair, tmp_path / "pair")
    again = specnb.load(tmp_path / "pair")
    assert again.assistant is not None and pair.assistant is not None
    assert again.assistant.num_parameters() == pair.assistant.num_parameters()
    options = {"max_new_tokens": 12, "do_sample": False}
    assert specnb.generate(again, "Tell", **options).ids == specnb.generate(pair, "Tell", **options).ids
    with pytest.raises(ValueError, match="draft model of another pair"):
        specnb.save_pair(specnb.load("tiny-llama"), tmp_path / "pair")
    specnb.save_pair(specnb.load("tiny-glm4-moe"), tmp_path / "one")
    specnb.save_pair(specnb.load("tiny-llama"), tmp_path / "one")  # nothing of the other model is left
    assert sorted(path.name for path in (tmp_path / "one").glob("*.safetensors*")) == ["model.safetensors"]


def test_a_gemma_drafter_is_no_target_and_fits_its_own_only() -> None:
    with pytest.raises(ValueError, match="cannot generate alone.*target"):
        specnb.load("tiny-gemma4-assistant")
    with pytest.raises(ValueError, match="Gemma4AssistantForCausalLM cannot draft for LlamaForCausalLM"):
        specnb.load("tiny-llama", "tiny-gemma4-assistant")


def test_MTP_05_layers_are_read_when_the_pair_is_loaded(tmp_path: Path) -> None:
    specnb.save_pair(specnb.load("tiny-glm4-moe"), tmp_path / "released")
    pair = specnb.load(tmp_path / "released")
    (tmp_path / "released").rename(tmp_path / "elsewhere")
    result = specnb.generate(pair, "Tell me a story", use_mtp=True, max_new_tokens=16, do_sample=False)
    assert result.num_accepted_draft_tokens > 0
