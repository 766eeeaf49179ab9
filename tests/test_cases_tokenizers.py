"""Case MT-01 and its kind: tokenizers that are unlike those of most models do all that a tokenizer does here."""

from __future__ import annotations

import random
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from checks import EAGER, no_forward, run_cell, shell
from tokenizers import Tokenizer
from transformers import ByT5Tokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast, StopStringCriteria
from transformers.utils import is_mistral_common_available

import specnb
from specnb.models.pair import tokenizer_difference
from specnb.text import Detokenizer, has_chat_template, is_mistral_common, pieces, prompt_inputs, text_tokenizer

PROMPTS = ["Once upon a time", "There was once a small boat 😀"]
TEXTS = [
    "lake 😀🎉 ünï 漢字かな ok",
    "  two blanks\n\n\tand tabs ",
    "مرحبا שלום",
    "👩‍👩‍👧‍👦 family",
    "<s> and [INST] as text",
    "",
]


@pytest.fixture(scope="module")
def tekken() -> Path:
    """Mistral's tokenizer file of 2024, which comes with the package."""
    package = pytest.importorskip("mistral_common")
    if not is_mistral_common_available():
        pytest.skip("transformers does not take this version of mistral-common")
    return Path(package.__path__[0]) / "data" / "tekken_240911.json"


@pytest.fixture(scope="module")
def mistral(tekken: Path) -> Any:
    from transformers.tokenization_mistral_common import MistralCommonBackend

    return MistralCommonBackend(tokenizer_path=str(tekken))


@pytest.fixture(scope="module")
def target(mistral: Any) -> Any:
    return tiny.llama(vocab=len(mistral), layers=2)


@pytest.fixture(scope="module")
def folder(tekken: Path, target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as Mistral's are: config, weights, tekken.json."""
    place = tmp_path_factory.mktemp("mistral") / "m"
    tiny.mistral(vocab=target.config.vocab_size).save_pretrained(place)
    shutil.copy(tekken, place / "tekken.json")
    return place


def plain(model: Any, ids: list[int], n: int = 12) -> list[int]:
    """transformers' own plain greedy continuation."""
    x = torch.tensor([ids])
    written = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=n, do_sample=False)
    return list(written[0, x.shape[1] :].tolist())


def decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


# ---------------------------------------------------------------- MT-01
@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 4}], ids=["plain", "lookup"])
def test_MT_01_texts(options: dict[str, Any], target: Any, mistral: Any) -> None:
    result = specnb.generate(target, PROMPTS, tokenizer=mistral, max_new_tokens=12, **options)
    for prompt, row in zip(PROMPTS, result.rows, strict=True):
        assert list(row.ids) == plain(target, mistral(prompt)["input_ids"])
        assert row.text == decoded(mistral, list(row.ids))


def test_MT_01_pieces(mistral: Any) -> None:
    for text in TEXTS:
        ids = mistral(text)["input_ids"]
        assert "".join(pieces(mistral, ids)) == text
        assert "".join(Detokenizer(mistral, skip_special_tokens=False).push(ids)) == mistral.decode(ids)
    for seed in range(50):
        draw = random.Random(seed)
        ids = [draw.randrange(len(mistral)) for _ in range(30)] + mistral.encode("😀🎉", add_special_tokens=False)
        assert "".join(pieces(mistral, ids)) == decoded(mistral, ids)
    assert pieces(mistral, [len(mistral) + 3, *mistral.encode("a b", add_special_tokens=False)]) == (
        "",
        "a",
        " b",
    )  # padded embeddings


def test_MT_01_the_chat_template_is_used(mistral: Any) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    found = prompt_inputs(mistral, "Hi", system="Be short.")
    assert found["input_ids"].tolist() == [
        list(mistral.apply_chat_template(messages, tokenize=True, return_dict=False))
    ]
    assert found["attention_mask"].all()
    assert prompt_inputs(mistral, "Hi", chat=False) == {"inputs": "Hi"}
    assert has_chat_template(mistral) and has_chat_template(types.SimpleNamespace(tokenizer=mistral))


@pytest.mark.slow
def test_MT_01_tokenizers_are_compared(mistral: Any, tekken: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer
    from transformers.tokenization_mistral_common import MistralCommonBackend

    assert tokenizer_difference(mistral, MistralCommonBackend(tokenizer_path=str(tekken))) is None
    for one, two in ((mistral, tiny.byte_tokenizer()), (tiny.byte_tokenizer(), mistral)):
        assert "The quick brown fox" in str(tokenizer_difference(one, two))
    tiny.llama(vocab=64, layers=1).save_pretrained(tmp_path)
    shutil.copy(tekken, tmp_path / "tekken.json")
    other = AutoTokenizer.from_pretrained(
        tmp_path
    )  # the same file read by another backend, which spells tokens otherwise
    assert not is_mistral_common(other)
    assert other.convert_ids_to_tokens(29706) == mistral.convert_ids_to_tokens(29706) or other.decode(
        [29706]
    ) == mistral.decode([29706])
    assert tokenizer_difference(mistral, other) is None and tokenizer_difference(other, mistral) is None


@pytest.mark.slow
@pytest.mark.parametrize("way", ["target", "draft"])
@pytest.mark.parametrize("sampling", [False, True])
def test_MT_01_universal_decoding(way: str, sampling: bool, target: Any, mistral: Any) -> None:
    other, theirs = tiny.llama(seed=4, vocab=330, layers=2), tiny.byte_tokenizer()
    one, two = ((target, mistral), (other, theirs)) if way == "target" else ((other, theirs), (target, mistral))
    options = {"do_sample": True, "seed": 3} if sampling else {}
    result = specnb.generate(
        one[0],
        PROMPTS[0],
        tokenizer=one[1],
        assistant_model=two[0],
        assistant_tokenizer=two[1],
        num_assistant_tokens=4,
        max_new_tokens=20,
        **options,
        **EAGER,
    )
    assert result.method == "universal" and result.num_draft_tokens
    assert result.text == decoded(one[1], list(result.ids))
    if not sampling:
        assert list(result.ids) == plain(one[0], one[1](PROMPTS[0])["input_ids"], 20)


def test_MT_01_a_draft_of_the_same_tokenizer(target: Any, mistral: Any) -> None:
    draft = tiny.noisy(target, 0.01)
    result = specnb.generate(
        target,
        PROMPTS[0],
        tokenizer=mistral,
        assistant_model=draft,
        assistant_tokenizer=mistral,
        max_new_tokens=12,
        **EAGER,
    )
    assert result.method == "draft_model" and result.num_accepted_draft_tokens
    assert list(result.ids) == plain(target, mistral(PROMPTS[0])["input_ids"])


def test_MT_01_stop_strings(target: Any, mistral: Any) -> None:
    free = plain(target, mistral(PROMPTS[0])["input_ids"])
    stop = decoded(mistral, free[3:6])[1:-1]  # begins and ends amid tokens
    for options in ({}, {"prompt_lookup_num_tokens": 4}):
        result = specnb.generate(target, PROMPTS[0], tokenizer=mistral, max_new_tokens=12, stop_strings=stop, **options)
        assert list(result.ids) == free[:6]
        assert result.finish_reason == "stop_string"


def test_MT_01_a_stop_string_of_parts_of_characters(mistral: Any) -> None:
    """An emoji over three tokens: none of them is text by itself."""
    ids = mistral.encode("a 🦊 b", add_special_tokens=False)
    assert any("\ufffd" in mistral.decode([i]) for i in ids)
    model = tiny.llama(vocab=len(mistral), layers=1)
    with torch.no_grad():  # writes the text, whatever the prompt
        model.lm_head.weight.zero_()
    order = iter(ids)

    class Says:
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(scores, -torch.inf)
            forced[:, next(order)] = 0
            return forced

    result = specnb.generate(
        model,
        "x",
        tokenizer=mistral,
        method="plain",
        max_new_tokens=len(ids),
        stop_strings=["🦊"],
        logits_processor=[Says()],
    )
    # transformers 5.15 sees no stop string in parts of characters, with any tokenizer
    assert result.text == ("a 🦊" if hasattr(StopStringCriteria, "_get_stop_string_matching_mode") else "a 🦊 b")


@pytest.mark.slow
def test_MT_01_load_save_and_magics(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = specnb.load(folder)
    assert is_mistral_common(pair.tokenizer)
    specnb.save_pair(pair, tmp_path / "again")
    assert tokenizer_difference(specnb.load(tmp_path / "again").tokenizer, pair.tokenizer) is None
    with shell(tmp_path, monkeypatch) as ip:
        assert run_cell(ip, f"%specload {folder} --assistant 1") == ""
        for options in ("", " --no-chat", " --method draft_model", " -q"):
            assert run_cell(ip, f"%%specgen{options} --max-new-tokens 6 --no-do-sample -o r\nOnce upon a time") == ""
            row = ip.user_ns["r"].rows[0]
            prompt = prompt_inputs(pair.tokenizer, "Once upon a time")["input_ids"][0].tolist()
            if "--no-chat" in options:
                prompt = pair.tokenizer("Once upon a time")["input_ids"]
            assert list(row.prompt_ids) == prompt
            assert list(row.ids) == plain(pair.target, prompt, 6)
            assert row.text == decoded(pair.tokenizer, list(row.ids))


def test_MT_01_the_panel_offers_a_chat(folder: Path) -> None:
    pair = specnb.load(folder)
    panel = specnb.Panel(pair, thread=False)
    panel.set(prompt="Hi", max_new_tokens=4, do_sample=False)
    panel.run(wait=True)
    assert list(panel.result.rows[0].prompt_ids) == prompt_inputs(pair.tokenizer, "Hi")["input_ids"][0].tolist()


# ---------------------------------------------------------------- siblings
class Characters(PreTrainedTokenizer):
    """One written in Python, a token a character, without bos, eos or pad; it has no token for ids beyond its own."""

    def __init__(self, **options: Any) -> None:
        self._known = {c: i for i, c in enumerate(["<unk>", *map(chr, range(32, 127))])}
        super().__init__(unk_token="<unk>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self._known)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._known)

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._known.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return list(self._known)[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


class Bare:
    """Not transformers' own, and its `decode` takes ids only."""

    def __init__(self) -> None:
        self._inner = tiny.byte_tokenizer()
        self.all_special_ids = [0, 1, 2]
        self.pad_token_id = self.eos_token_id = self.bos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self._inner(text)["input_ids"]}

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return self._inner.convert_ids_to_tokens(ids)

    def decode(self, ids: Any) -> str:
        return str(self._inner.decode(ids))


KINDS: dict[str, tuple[Callable[[], Any], int]] = {
    "byte-level": (tiny.byte_tokenizer, 330),
    "sentencepiece-like": (tiny.sp_tokenizer, 400),
    "bytes": (ByT5Tokenizer, 384),
    "characters": (Characters, 100),
}


def model_of(kind: str) -> tuple[Any, Any]:
    make, vocab = KINDS[kind]
    return tiny.llama(seed=vocab, vocab=vocab, layers=2), make()


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_every_kind(kind: str) -> None:
    model, tokenizer = model_of(kind)
    result = specnb.generate(
        model, ["Once upon", "a time there was"], tokenizer=tokenizer, prompt_lookup_num_tokens=3, max_new_tokens=12
    )
    for prompt, row in zip(["Once upon", "a time there was"], result.rows, strict=True):
        assert list(row.ids) == plain(model, list(tokenizer(prompt)["input_ids"]))
        assert row.text == decoded(tokenizer, [i for i in row.ids if i < len(tokenizer)])  # padded embeddings have more


@pytest.mark.parametrize(("one", "two"), [(a, b) for a in KINDS for b in KINDS if a != b])
def test_universal_between_every_two_kinds(one: str, two: str) -> None:
    model, tokenizer = model_of(one)
    draft, theirs = model_of(two)
    common: dict[str, Any] = dict(
        tokenizer=tokenizer,
        assistant_model=draft,
        assistant_tokenizer=theirs,
        num_assistant_tokens=3,
        max_new_tokens=10,
        **EAGER,
    )
    result = specnb.generate(model, "Once upon", **common)
    assert result.method == "universal"
    assert list(result.ids) == plain(model, list(tokenizer("Once upon")["input_ids"]), 10)
    assert len(specnb.generate(model, "Once upon", do_sample=True, seed=1, **common).ids) == 10


def test_a_decode_without_options() -> None:
    model, tokenizer = tiny.llama(vocab=330, layers=2), Bare()
    result = specnb.generate(model, "Once upon", tokenizer=tokenizer, max_new_tokens=12)
    full = tiny.byte_tokenizer()
    assert list(result.ids) == plain(model, full("Once upon")["input_ids"])
    assert result.text == decoded(full, list(result.ids))
    assert "".join(pieces(tokenizer, [1, *full.encode("a 😀"), 2])) == "a 😀"
    with no_forward(model):
        with pytest.raises(
            ValueError, match="stop_strings cannot be used with this tokenizer: a Bare has no get_vocab"
        ):
            specnb.generate(model, "Once", tokenizer=tokenizer, stop_strings="x", max_new_tokens=2)
        with pytest.raises(ValueError, match="a draft model cannot be used with this tokenizer: a Bare has no encode"):
            specnb.generate(
                model, "Once", tokenizer=tokenizer, assistant_model=model, assistant_tokenizer=full, max_new_tokens=2
            )


def test_special_tokens_that_are_added_later_are_left_out() -> None:
    tokenizer = tiny.byte_tokenizer()
    ids = tokenizer.encode("a<|x|>b")
    assert "".join(pieces(tokenizer, ids)) == "a<|x|>b"
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|x|>"]})
    assert "".join(pieces(tokenizer, tokenizer.encode("a<|x|>b"))) == "ab"


def test_processors_and_what_is_no_tokenizer() -> None:
    tokenizer = tiny.byte_tokenizer()
    assert text_tokenizer(types.SimpleNamespace(tokenizer=tokenizer)) is text_tokenizer(tokenizer) is tokenizer
    odd = tiny.byte_tokenizer()
    odd.tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # an attribute of the same name
    assert text_tokenizer(odd) is odd
    model = tiny.llama(vocab=330, layers=2)
    for wrong, named in (("gpt2", "the name 'gpt2'"), (tokenizer.backend_tokenizer, "a Tokenizer"), (7, "a int")):
        for prompt in ("Once", torch.tensor([[5, 6]])):
            with (
                no_forward(model),
                pytest.raises(
                    ValueError,
                    match=f"must be (a tokenizer|one of transformers' tokenizers or processors), not {named}",
                ),
            ):
                specnb.generate(model, prompt, tokenizer=wrong, max_new_tokens=2)
        with pytest.raises(ValueError, match=f"must be one of transformers' tokenizers or processors, not {named}"):
            specnb.decoder(method="plain", tokenizer=wrong)


def test_chat_templates_of_processors_and_refusals_of_templates() -> None:
    tokenizer = tiny.byte_tokenizer()
    processor = types.SimpleNamespace(tokenizer=tokenizer, chat_template=None)
    assert not has_chat_template(processor)
    assert prompt_inputs(processor, "hi") == {"inputs": "hi"}
    raises = "{% if m.role == 'system' %}{{ raise_exception('No system role.\nAt all') }}{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}" + raises + "{{ m.content }}{% endfor %}"
    assert prompt_inputs(processor, "hi")["input_ids"].tolist() == [tokenizer.encode("hi")]
    with pytest.raises(
        ValueError, match="chat template does not take a system message and a user message: No system role. At all"
    ):
        prompt_inputs(tokenizer, "hi", system="Be short.")


def test_fast_tokenizers_without_special_tokens() -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny.byte_tokenizer().backend_tokenizer, clean_up_tokenization_spaces=False
    )
    assert tokenizer.eos_token_id is None and tokenizer.pad_token_id is None
    model = tiny.llama(vocab=330, layers=2)
    result = specnb.generate(model, ["Once upon", "a"], tokenizer=tokenizer, max_new_tokens=8)
    assert [list(row.ids) for row in result.rows] == [
        plain(model, tokenizer(text)["input_ids"], 8) for text in ("Once upon", "a")
    ]
