"""specnb.decoder inside transformers' own generate() and pipelines; which option decides; what is refused, and when."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tiny
import torch
from checks import EAGER, Recorder, configs, consistent, no_forward, padded, plain, spec
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, TextStreamer, pipeline
from transformers.generation import GenerateDecoderOnlyOutput

import specnb

T = tiny.llama()
D = tiny.noisy(T, 0.03)
PERFECT = tiny.noisy(T, 0)
X = tiny.ids(0, 7)
MASK = torch.ones_like(X)
WAYS: dict[str, dict[str, Any]] = {
    "draft": {"assistant_model": D, "num_assistant_tokens": 4, **EAGER},
    "lookup": {"method": "prompt_lookup", "num_assistant_tokens": 4},
}
FREE = plain(T, X, max_new_tokens=20)


def through(decoder: Any, **options: Any) -> Any:
    """transformers' generate() with our decoder, greedy unless told otherwise."""
    given = {"do_sample": False, "max_new_tokens": 20, "attention_mask": MASK} | options
    return T.generate(X, custom_generate=decoder, **given)


def longest(decoder: Any) -> int:
    return max(len(step.drafted) for step in decoder.result.steps)


# ---------------------------------------------------------------- generate()
@pytest.mark.parametrize("way", WAYS)
def test_generate_returns_what_it_always_returns(way: str) -> None:
    decoder = specnb.decoder(**WAYS[way])
    before = configs(T, D)
    out = through(decoder)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == torch.long
    assert out.tolist() == [X[0].tolist() + FREE]
    assert configs(T, D) == before
    assert decoder.result.sequences.tolist() == out.tolist()
    assert decoder.result.num_draft_tokens > 0
    consistent(decoder.result)
    assert list(spec(T, X, max_new_tokens=20, **WAYS[way]).ids) == FREE


@pytest.mark.parametrize("way", WAYS)
def test_return_dict(way: str) -> None:
    out = through(specnb.decoder(**WAYS[way]), return_dict_in_generate=True)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert out.sequences.tolist() == [X[0].tolist() + FREE]
    result = spec(T, X, max_new_tokens=20, return_dict_in_generate=True, **WAYS[way])
    assert result.sequences.tolist() == out.sequences.tolist()


def test_a_decoder_without_anything_is_plain_decoding() -> None:
    decoder = specnb.decoder()
    assert through(decoder)[0, 7:].tolist() == FREE
    assert decoder.result.method == "plain"
    assert decoder.result.num_draft_tokens == 0


def test_one_decoder_many_calls_and_models() -> None:
    """Nothing is kept from call to call."""
    decoder, other = specnb.decoder(method="prompt_lookup"), tiny.gpt2()
    for model in (T, other, T):
        out = model.generate(X, attention_mask=MASK, do_sample=False, max_new_tokens=12, custom_generate=decoder)
        assert out[0, 7:].tolist() == plain(model, X, max_new_tokens=12)


@pytest.mark.parametrize("way", WAYS)
def test_several_return_sequences(way: str) -> None:
    decoder = specnb.decoder(seed=3, **WAYS[way])
    out = through(decoder, do_sample=True, num_return_sequences=3, top_k=0)
    assert out.shape == (3, 27)
    assert len({row.ids for row in decoder.result.rows}) == 3
    assert through(decoder, do_sample=True, num_return_sequences=3, top_k=0).tolist() == out.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_a_padded_batch(way: str) -> None:
    prompts = [tiny.ids(1, 5), tiny.ids(2, 9)]
    ids, mask = padded(prompts)
    eos = plain(T, prompts[0], max_new_tokens=9)[4]
    out = T.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=14,
        eos_token_id=eos,
        custom_generate=specnb.decoder(**WAYS[way]),
    )
    expected = [plain(T, prompt, max_new_tokens=14, eos_token_id=eos) for prompt in prompts]
    width = max(map(len, expected))
    assert out[:, 9:].tolist() == [row + [0] * (width - len(row)) for row in expected]


def test_what_generate_does_not_hand_on_is_bound() -> None:
    recorder, seen, cancel = Recorder(), [], threading.Event()
    decoder = specnb.decoder(streamer=recorder, on_step=seen.append, cancel=cancel, **WAYS["draft"])
    through(decoder)
    assert recorder.ids == X[0].tolist() + FREE
    assert recorder.ended == 1
    assert seen == decoder.result.steps
    cancel.set()
    through(specnb.decoder(cancel=cancel, **WAYS["draft"]))


@pytest.mark.parametrize("given", [{"streamer": Recorder()}, {"assistant_model": tiny.noisy(T, 0.02)}])
def test_what_is_given_to_generate_but_not_handed_on_is_named(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ValueError, match=rf"^{name}= given to generate\(\).*specnb.decoder\(\) instead"):
        through(specnb.decoder(), **given)
    if name == "streamer":
        assert given[name].ids == X[0].tolist() and given[name].ended == 1


def test_transformers_text_streamer(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, model = tiny.byte_tokenizer(), tiny.llama(vocab=330)
    result = specnb.generate(
        model,
        "the quick brown",
        tokenizer=tokenizer,
        do_sample=False,
        max_new_tokens=20,
        method="prompt_lookup",
        streamer=TextStreamer(tokenizer, skip_prompt=True),
    )
    assert capsys.readouterr().out == tokenizer.decode(result.ids) + "\n"


@pytest.mark.parametrize("way", WAYS)
def test_a_pipeline(way: str) -> None:
    tokenizer, model = tiny.byte_tokenizer(), tiny.llama(vocab=330)
    how = {"assistant_model": tiny.noisy(model, 0.02), **EAGER} if way == "draft" else WAYS[way]
    decoder = specnb.decoder(tokenizer=tokenizer, **how)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    options = {"do_sample": False, "max_new_tokens": 20, "return_full_text": False}
    for text in ("the quick brown fox", "numbers 1 2 3"):
        expected = pipe(text, **options)[0]["generated_text"]
        assert pipe(text, custom_generate=decoder, **options)[0]["generated_text"] == expected
        assert decoder.result is not None
        assert decoder.result.num_draft_tokens > 0


# ---------------------------------------------------------------- which option decides
def test_options_in_the_call_reach_the_decoder() -> None:
    decoder = specnb.decoder(assistant_model=PERFECT, **EAGER)
    through(decoder, num_assistant_tokens=2)
    assert longest(decoder) == decoder.result.options["num_assistant_tokens"] == 2
    through(decoder, num_assistant_tokens=3, num_assistant_tokens_schedule="heuristic")
    assert [len(step.drafted) for step in decoder.result.steps][:4] == [0, 3, 5, 7]
    decoder = specnb.decoder()
    through(decoder, prompt_lookup_num_tokens=3, max_matching_ngram_size=1)
    assert decoder.result.method == "prompt_lookup"
    assert decoder.result.options["num_assistant_tokens"] == 3
    assert decoder.result.options["max_matching_ngram_size"] == 1
    through(decoder)
    assert decoder.result.method == "plain"


def test_options_in_a_generation_config_reach_the_decoder() -> None:
    decoder = specnb.decoder(assistant_model=PERFECT)
    config = GenerationConfig(
        num_assistant_tokens=2, assistant_confidence_threshold=0.0, max_new_tokens=20, do_sample=False
    )
    T.generate(X, attention_mask=MASK, generation_config=config, custom_generate=decoder)
    assert longest(decoder) == 2
    assert list(decoder.result.ids) == FREE
    model = tiny.llama()
    model.generation_config.num_assistant_tokens = 6
    model.generation_config.assistant_confidence_threshold = 0.0
    model.generate(X, attention_mask=MASK, do_sample=False, max_new_tokens=20, custom_generate=decoder)
    assert longest(decoder) == 6


def test_the_call_decides_over_what_is_bound() -> None:
    decoder = specnb.decoder(assistant_model=PERFECT, num_assistant_tokens=7, **EAGER)
    through(decoder)
    assert longest(decoder) == 7
    for k in (2, 3, 5, 11):
        through(decoder, num_assistant_tokens=k)
        assert decoder.result.options["num_assistant_tokens"] == k
    through(decoder, num_assistant_tokens_schedule="heuristic")
    assert decoder.result.options["num_assistant_tokens_schedule"] == "heuristic"


def test_method_and_seed_in_the_call_of_generate() -> None:
    decoder = specnb.decoder(assistant_model=D, seed=1)
    sampled = {"do_sample": True, "top_k": 0}
    first = through(decoder, seed=8, **sampled).tolist()
    assert decoder.result.seed == 8
    assert decoder.result.method == "draft_model"
    assert through(specnb.decoder(assistant_model=D, seed=8), **sampled).tolist() == first
    assert through(decoder, **sampled).tolist() != first
    assert decoder.result.seed == 1
    through(specnb.decoder(), method="prompt_lookup")
    decoder = specnb.decoder()
    through(decoder, method=specnb.Method("prompt_lookup", num_assistant_tokens=2))
    assert (decoder.result.method, decoder.result.options["num_assistant_tokens"]) == ("prompt_lookup", 2)


def test_a_method_object_brings_its_options() -> None:
    result = spec(
        T,
        X,
        max_new_tokens=20,
        method=specnb.Method("prompt_lookup", num_assistant_tokens=2, max_matching_ngram_size=1),
    )
    assert (result.options["num_assistant_tokens"], result.options["max_matching_ngram_size"]) == (2, 1)
    assert list(result.ids) == FREE


def test_options_in_effect_are_reported() -> None:
    result = specnb.generate(
        T, X, do_sample=True, temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=6, seed=2, **WAYS["draft"]
    )
    wanted = {
        "num_assistant_tokens": 4,
        "assistant_confidence_threshold": 0,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "do_sample": True,
        "max_new_tokens": 6,
        "verification": "token",
    }
    assert wanted.items() <= result.options.items()
    assert result.seed == 2


def test_a_generation_config_in_the_call() -> None:
    config = GenerationConfig(
        num_assistant_tokens=2, assistant_confidence_threshold=0.0, max_new_tokens=9, do_sample=False
    )
    result = specnb.generate(T, X, attention_mask=MASK, generation_config=config, assistant_model=PERFECT)
    assert list(result.ids) == FREE[:9]
    assert max(len(step.drafted) for step in result.steps) == 2
    result = specnb.generate(
        T, X, attention_mask=MASK, generation_config=config, assistant_model=PERFECT, num_assistant_tokens=4
    )
    assert max(len(step.drafted) for step in result.steps) == 4
    assert config.num_assistant_tokens == 2


def test_texts_and_lists_of_texts() -> None:
    tokenizer, model = tiny.byte_tokenizer(), tiny.llama(vocab=330)
    texts = ["the quick", "a small boat sails on the lake", "x"]
    single = [
        specnb.generate(model, text, tokenizer=tokenizer, do_sample=False, max_new_tokens=9, method="prompt_lookup")
        for text in texts
    ]
    many = specnb.generate(model, texts, tokenizer=tokenizer, do_sample=False, max_new_tokens=9, method="prompt_lookup")
    for one, row, text in zip(single, many.rows, texts, strict=True):
        assert one.ids == row.ids
        assert one.text == row.text == tokenizer.decode(row.ids, skip_special_tokens=True)
        assert tokenizer.decode(row.prompt_ids) == text
        assert list(row.ids) == plain(model, torch.tensor([row.prompt_ids]), max_new_tokens=9)


# ---------------------------------------------------------------- refusals, all before any pass
REFUSED: dict[str, Any] = {
    "num_beams": 3,
    "penalty_alpha": 0.6,
    "guidance_scale": 1.5,
    "dola_layers": "high",
    "constraints": ["something"],
    "force_words_ids": [[5]],
    "use_cache": False,
    "token_healing": True,
    "output_attentions": True,
    "output_hidden_states": True,
}


@pytest.mark.parametrize("way", ["plain", *WAYS])
@pytest.mark.parametrize("name", REFUSED)
def test_options_that_cannot_be_exact_are_refused_by_name(name: str, way: str) -> None:
    with no_forward(T, D), pytest.raises(ValueError, match=name):
        spec(T, X, max_new_tokens=4, **{name: REFUSED[name]}, **WAYS.get(way, {}))


@pytest.mark.parametrize(
    "name", ["num_beams", "guidance_scale", "use_cache", "output_attentions", "output_hidden_states"]
)
def test_the_decoder_refuses_them_too(name: str) -> None:
    with no_forward(T, D), pytest.raises(ValueError, match=name):
        through(specnb.decoder(**WAYS["draft"]), **{name: REFUSED[name]})
    config = GenerationConfig(max_new_tokens=4, pad_token_id=0, do_sample=False)
    setattr(config, name, REFUSED[name])
    with no_forward(T, D), pytest.raises(ValueError, match=name):
        T.generate(X, attention_mask=MASK, generation_config=config, custom_generate=specnb.decoder(**WAYS["lookup"]))
    with no_forward(T, D), pytest.raises(ValueError, match=name):
        specnb.generate(T, X, attention_mask=MASK, generation_config=config, **WAYS["lookup"])


def test_mtp_layers_that_a_model_does_not_have_are_refused_by_name() -> None:
    with no_forward(T, D), pytest.raises(ValueError, match="MTP layers"):
        spec(T, X, max_new_tokens=4, use_mtp=True)


def test_refusals_say_what_to_do_instead() -> None:
    with pytest.raises(ValueError, match=r"transformers' own generate\(\)"):
        spec(T, X, max_new_tokens=4, num_beams=2, **WAYS["draft"])


def test_embeddings_are_refused() -> None:
    embeddings = T.get_input_embeddings()(X).detach()
    with no_forward(T, D):
        with pytest.raises(ValueError, match="inputs_embeds"):
            specnb.generate(T, inputs_embeds=embeddings, attention_mask=MASK, max_new_tokens=4, **WAYS["lookup"])
        with pytest.raises(ValueError, match="inputs_embeds"):
            T.generate(
                inputs_embeds=embeddings,
                attention_mask=MASK,
                max_new_tokens=4,
                custom_generate=specnb.decoder(**WAYS["lookup"]),
            )


def test_masks_with_holes_are_refused() -> None:
    for mask in ([[1, 1, 0, 1, 1, 1, 1]], [[0] * 7]):
        with no_forward(T, D), pytest.raises(ValueError, match="attention_mask row 0"):
            spec(T, X, attention_mask=torch.tensor(mask), max_new_tokens=4, **WAYS["draft"])


CONFLICTS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown method": ({"method": "prompt_lookpu"}, "prompt_lookup"),
    "no draft model": ({"method": "draft_model"}, "assistant_model="),
    "two methods": ({"method": "prompt_lookup", "assistant_model": D}, "assistant_model="),
    "plain with a draft": ({"method": "plain", "assistant_model": D}, "assistant_model="),
    "lookup and a draft": ({"prompt_lookup_num_tokens": 4, "assistant_model": D}, "prompt_lookup"),
    "two lengths": ({"prompt_lookup_num_tokens": 4, "num_assistant_tokens": 5}, "num_assistant_tokens"),
    "given twice": ({"method": specnb.Method("prompt_lookup"), "num_assistant_tokens": 5}, "num_assistant_tokens"),
    "n-grams with a draft": ({"assistant_model": D, "max_matching_ngram_size": 2}, "max_matching_ngram_size"),
    "threshold with lookup": (
        {"method": "prompt_lookup", "assistant_confidence_threshold": 0.2},
        "assistant_confidence_threshold",
    ),
    "nothing drafts": ({"num_assistant_tokens": 5}, "num_assistant_tokens"),
    "k = 0": ({"assistant_model": D, "num_assistant_tokens": 0}, "num_assistant_tokens=0"),
    "k = 2.5": ({"assistant_model": D, "num_assistant_tokens": 2.5}, "num_assistant_tokens=2.5"),
    "k = True": ({"assistant_model": D, "num_assistant_tokens": True}, "num_assistant_tokens=True"),
    "lookup k = 0": ({"prompt_lookup_num_tokens": 0}, "0"),
    "threshold": ({"assistant_model": D, "assistant_confidence_threshold": 1.5}, "assistant_confidence_threshold=1.5"),
    "schedule": ({"assistant_model": D, "num_assistant_tokens_schedule": "constnat"}, "num_assistant_tokens_schedule"),
    "verification": ({"assistant_model": D, "verification": "blok"}, "verification"),
    "temperature": ({"assistant_model": D, "temperature": -1, "do_sample": True}, "temperature"),
    "seed": ({"assistant_model": D, "seed": -1}, "seed=-1"),
    "max_new_tokens": ({"assistant_model": D, "max_new_tokens": 0}, "max_new_tokens=0"),
    "misspelt": ({"assistant_model": D, "max_new_tokns": 4}, "max_new_tokns"),
    "prompt given twice": ({"input_ids": X}, "twice"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_options_that_cannot_apply_raise(name: str) -> None:
    options, named = CONFLICTS[name]
    options = {"max_new_tokens": 4, "attention_mask": MASK} | options
    with no_forward(T, D), pytest.raises(ValueError, match=named):
        specnb.generate(T, X, **options)


def test_a_text_needs_a_tokenizer_and_some_text() -> None:
    tokenizer = tiny.byte_tokenizer()
    with no_forward(T):
        with pytest.raises(ValueError, match="tokenizer="):
            specnb.generate(T, "text", max_new_tokens=3)
        with pytest.raises(ValueError, match="empty"):
            specnb.generate(T, "", tokenizer=tokenizer, max_new_tokens=3)
        with pytest.raises(ValueError, match="empty"):
            specnb.generate(T, ["a", ""], tokenizer=tokenizer, max_new_tokens=3)
        for wrong in ([3, 4], 7):
            with pytest.raises(ValueError, match="inputs must be"):
                specnb.generate(T, wrong, tokenizer=tokenizer, max_new_tokens=3)  # type: ignore[arg-type]


def test_what_a_decoder_cannot_be_bound_to() -> None:
    for options, named in (
        ({"max_new_tokens": 5}, "max_new_tokens"),
        ({"num_assistant_tokns": 5}, "num_assistant_tokens"),
        ({"method": "promptlookup"}, "prompt_lookup"),
        ({"method": "prompt_lookup", "assistant_model": D}, "assistant_model="),
        ({"stop_strings": ["a"]}, "tokenizer="),
        ({"num_assistant_tokens": 0, "assistant_model": D}, "num_assistant_tokens=0"),
        ({"seed": -3}, "seed=-3"),
    ):
        with pytest.raises(ValueError, match=named):
            specnb.decoder(**options)  # type: ignore[arg-type]
    for options, named in (
        ({"method": "draft_model"}, "assistant_model="),
        ({"method": "prompt_lookup", "assistant_confidence_threshold": 0.3}, "assistant_confidence_threshold"),
    ):
        with no_forward(T, D), pytest.raises(ValueError, match=named):
            through(specnb.decoder(**options))  # type: ignore[arg-type]


class Own(LogitsProcessor):
    """A processor of the user's."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_a_processor_of_the_users_and_block_verification() -> None:
    mine = LogitsProcessorList([Own()])
    with no_forward(T, D), pytest.raises(ValueError, match="Own"):
        through(specnb.decoder(verification="block", **WAYS["draft"]), do_sample=True, logits_processor=mine)
    assert through(specnb.decoder(verification="block", **WAYS["draft"]), logits_processor=mine)[0, 7:].tolist() == FREE
