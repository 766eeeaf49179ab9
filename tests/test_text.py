"""Incremental decoding: the joined pieces are the decoded whole, whatever the blocks."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import tiny

from specnb.text import Detokenizer, pieces, prompt_inputs, step_pieces
from specnb.trace import Step

TEXTS = [
    "lake 😀🎉 ünï 漢字かな ok",
    "the quick  brown fox",
    " x",
    "  two blanks\n\n\tand tabs ",
    "مرحبا שלום",
    "\ufffd literally \ufffd\ufffd",
    "<0x0A> as text",
    "👩‍👩‍👧‍👦 family",
    "",
]
TOKENIZERS = {"byte-level": tiny.byte_tokenizer, "sentencepiece-like": tiny.sp_tokenizer}


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


def whole(tokenizer: Any, ids: list[int], skip: bool = True) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    return text


def streamed(tokenizer: Any, blocks: list[list[int]], skip: bool = True) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer, skip)
    texts = [piece for block in blocks for piece in detokenizer.push(block)]
    return texts, detokenizer.flush()


def check(tokenizer: Any, ids: list[int], blocks: list[list[int]]) -> None:
    for skip in (True, False):  # the byte-fallback tokens of the tiny SentencePiece-like tokenizer count as special
        expected = whole(tokenizer, ids, skip)
        texts, rest = streamed(tokenizer, blocks, skip)
        assert len(texts) == len(ids)
        assert "".join(texts) + rest == expected
        if "\ufffd" not in expected:
            assert not any("\ufffd" in text for text in [*texts, rest])


def cut(ids: list[int], size: int) -> list[list[int]]:
    return [ids[i : i + size] for i in range(0, len(ids), size)]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_STR_01_characters_over_several_tokens(tokenizer: Any, text: str, size: int) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    check(tokenizer, ids, cut(ids, size))


@pytest.mark.parametrize("text", ["ab 😀", "😀🎉", "\n😀", "字"])
def test_STR_01_cut_within_a_character_is_flushed_once(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    for end in range(len(ids) + 1):
        for size in (1, 2, 3, 5):
            check(tokenizer, ids[:end], cut(ids[:end], size))
    detokenizer = Detokenizer(tokenizer)
    detokenizer.push(ids[:-1])
    detokenizer.flush()
    assert detokenizer.flush() == ""


def test_STR_01_unfinished_character_is_held_back() -> None:
    tokenizer = tiny.byte_tokenizer()
    ids = tokenizer("a😀b").input_ids
    texts, rest = streamed(tokenizer, [ids])
    assert rest == "" and "😀" in texts  # all of it with the token that completes it
    assert texts.count("") >= 1


def test_STR_01_random_ids_special_tokens_and_long_runs(tokenizer: Any) -> None:
    rng = random.Random(0)
    ids_of_bytes = [i for i in range(len(tokenizer)) if (tokenizer.convert_ids_to_tokens(i) or "").startswith("<0x")]
    for length in (1, 2, 7, 30, 200):
        for _ in range(40):
            ids = [rng.randrange(len(tokenizer)) for _ in range(length)]
            check(tokenizer, ids, cut(ids, rng.choice([1, 2, 3, 4, 5])))
            if ids_of_bytes:
                ids = [rng.choice(ids_of_bytes) if rng.random() < 0.7 else t for t in ids]
                check(tokenizer, ids, cut(ids, 3))
    check(tokenizer, [len(tokenizer) + 5] * 3, [[len(tokenizer) + 5] * 3])  # ids of a padded embedding


@pytest.mark.parametrize("text", ["the quick  brown fox", " x", "  x", "a", "fox  "])
def test_STR_02_all_partitions_keep_blanks(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids[:13]
    for marks in itertools.product([False, True], repeat=max(0, len(ids) - 1)):
        blocks, start = [], 0
        for i, ends in enumerate([*marks, True], 1):
            if ends:
                blocks.append(ids[start:i])
                start = i
        if max(map(len, blocks)) <= 4 or len(blocks) == 1:
            check(tokenizer, ids, blocks)


def test_STR_02_blank_after_a_special_token_stays() -> None:
    tokenizer = tiny.sp_tokenizer()
    quick = tokenizer("the quick", add_special_tokens=False).input_ids
    ids = [tokenizer.eos_token_id, *quick, tokenizer.eos_token_id, *quick, tokenizer.eos_token_id]
    check(tokenizer, ids, cut(ids, 1))


def test_pieces_are_those_of_any_streaming(tokenizer: Any) -> None:
    ids = tokenizer("lake 😀🎉 ünï 漢字かな ok").input_ids[:-2]
    texts, rest = streamed(tokenizer, cut(ids, 3))
    assert pieces(tokenizer, ids) == (*texts[:-1], texts[-1] + rest)
    assert pieces(tokenizer, []) == ()


def test_step_pieces_keep_the_blanks_of_rejected_drafts() -> None:
    tokenizer = tiny.byte_tokenizer()
    brown, quick = tokenizer(" brown").input_ids, tokenizer("the quick").input_ids
    dog = tokenizer(" 😀").input_ids
    steps = [
        Step(0, (), 0, tuple(quick)),
        Step(9, (*brown, *dog[:-1]), len(brown), (*brown, dog[0])),
        Step(9, tuple(dog[1:]), len(dog) - 1, tuple(dog[1:])),
    ]
    texts, rejected = step_pieces(tokenizer, steps)
    assert "".join(texts) == "the quick brown 😀"
    assert [len(r) for r in rejected] == [0, len(dog) - 1, 0]
    assert "".join(rejected[1]).startswith(" ") and "".join(rejected[1]).endswith("\ufffd")


def test_work_per_token_does_not_grow(tokenizer: Any) -> None:
    ids = tokenizer("the quick brown fox 😀 jumps over. " * 40).input_ids
    junk = tokenizer("😀").input_ids[-1]  # a byte that never completes a character

    def seconds(n: int, source: list[int]) -> float:
        sequence = [source[i % len(source)] for i in range(n)]
        start = time.perf_counter()
        streamed(tokenizer, cut(sequence, 5))
        return time.perf_counter() - start

    for source in (ids, [junk]):
        short = min(seconds(500, source) for _ in range(3))
        assert min(seconds(4000, source) for _ in range(2)) < 8 * short * 3 + 0.05


def test_prompt_inputs() -> None:
    tokenizer = tiny.byte_tokenizer()
    assert prompt_inputs(tokenizer, " {a} ") == {"inputs": " {a} "}
    with pytest.raises(ValueError, match="chat template"):
        prompt_inputs(tokenizer, "x", chat=True)
    with pytest.raises(ValueError, match="system message needs"):
        prompt_inputs(tokenizer, "x", system="s")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    arguments = prompt_inputs(tokenizer, " a\n", system="be brief")
    assert tokenizer.decode(arguments["input_ids"][0]) == "<system>be brief<user> a\n"
    assert arguments["attention_mask"].all() and arguments["attention_mask"].shape == arguments["input_ids"].shape
    assert prompt_inputs(tokenizer, " a\n", chat=False) == {"inputs": " a\n"}
