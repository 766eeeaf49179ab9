"""Universal decoding: a draft model with another tokenizer reads the same text, and proposes ids of the target's."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import tiny
import torch
from checks import STEADY, configs, consistent, no_forward, padded, plain, spec, watched
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, pipeline

import specnb
from specnb.drafters import universal
from specnb.drafters.draft_builder import DraftBuilder
from specnb.drafters.retokenize import Retokenized, continuation, shared_tokens


def sentence_piece(size: int, bos: bool = True) -> PreTrainedTokenizerFast:
    """SentencePiece-like, its bytes ordinary tokens as in released ones (to a trainer they are special)."""
    made = tiny.sp_tokenizer(size, bos)
    content = json.loads(made.backend_tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


BYTE, BYTE_2 = tiny.byte_tokenizer(330), tiny.byte_tokenizer(300)
SP = sentence_piece(400)
TEXTS = ["a  b ,  c", " leading blank", "Ünïcödé 😀", "line1\n\n  line2", "the quick brown fox jumps over"]
PAIRS: dict[str, tuple[Any, Any]] = {
    "byte to SP": (BYTE, SP),
    "SP to byte": (SP, BYTE),
    "byte to byte": (BYTE, BYTE_2),
    "SP to SP": (SP, sentence_piece(330, bos=False)),
}


def llama(tokenizer: Any, seed: int) -> PreTrainedModel:
    """A target that writes readable text, now and then a piece of a character."""
    return tiny.llama(seed=seed, vocab=len(tokenizer), layers=2)


@cache
def models(pair: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and a draft that agrees with it often: tokens spelt alike have the same embeddings and head."""
    one, two = PAIRS[pair]
    target, draft = llama(one, 0), llama(two, 0)
    mine, theirs = shared_tokens(one, two, len(one), len(two))
    with torch.no_grad():
        for name in ("embed_tokens", "lm_head"):
            a = target.lm_head.weight if name == "lm_head" else target.model.embed_tokens.weight
            b = draft.lm_head.weight if name == "lm_head" else draft.model.embed_tokens.weight
            b[theirs] = a[mine]
        draft.model.layers.load_state_dict(target.model.layers.state_dict())
    return target, draft


def given(pair: str) -> dict[str, Any]:
    one, two = PAIRS[pair]
    return {"assistant_model": models(pair)[1], "tokenizer": one, "assistant_tokenizer": two, **STEADY}


def prompt_of(pair: str, text: str) -> Tensor:
    ids: Tensor = PAIRS[pair][0](text, return_tensors="pt")["input_ids"]
    return ids


def text_of(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def unfinished(tokenizer: Any, ids: list[int]) -> bool:
    """Whether the text ends in a run of single bytes, which may yet become something else."""
    return str(tokenizer.convert_ids_to_tokens(ids[-1])).startswith("<0x")


@contextmanager
def readings() -> Iterator[list[tuple[list[int], list[int]]]]:
    """(the target's ids, the draft's ids) of every reading of a row."""
    seen: list[tuple[list[int], list[int]]] = []
    read = universal.Universal._update

    def record(self: Any, row: Any) -> Any:
        reading = read(self, row)
        seen.append((list(row.ids), list(reading.ids)))
        return reading

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(universal.Universal, "_update", record)
        yield seen


# ---------------------------------------------------------------- VOC-03
@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pair", PAIRS)
def test_VOC_03_greedy_equals_plain(pair: str, text: str) -> None:
    """And the draft is given ids that decode to the same text, with at most one BOS, at every round."""
    (one, two), (target, draft) = PAIRS[pair], models(pair)
    prompt = prompt_of(pair, text)
    expected = plain(target, prompt, max_new_tokens=30)
    for k in (1, 4, 9):
        with readings() as seen, watched(draft) as calls:
            result = spec(target, prompt, max_new_tokens=30, num_assistant_tokens=k, **given(pair))
        assert list(result.ids) == expected
        assert result.method == "universal"
        consistent(result)
        assert len(seen) > 3
        for ids, theirs in seen:
            mine, read = text_of(one, ids).removeprefix(" "), text_of(two, theirs).removeprefix(" ")
            assert mine.startswith(read)
            assert not mine[len(read) :].strip("\ufffd") or unfinished(one, ids)
            assert theirs.count(two.bos_token_id) <= 1
            assert two.eos_token_id not in theirs
            if two.bos_token_id in theirs:
                assert theirs[0] == two.bos_token_id
        for inputs in calls.inputs:
            assert int(inputs["input_ids"].max()) < len(two)


@pytest.mark.parametrize("pair", PAIRS)
def test_drafts_are_accepted(pair: str) -> None:
    target, _ = models(pair)
    prompt = prompt_of(pair, "the quick brown fox")
    greedy = spec(target, prompt, max_new_tokens=60, **given(pair))
    assert list(greedy.ids) == plain(target, prompt, max_new_tokens=60)
    sampled = specnb.generate(target, prompt, do_sample=True, max_new_tokens=60, top_k=0, seed=1, **given(pair))
    assert greedy.num_accepted_draft_tokens + sampled.num_accepted_draft_tokens > 0
    assert all(token < target.config.vocab_size for step in greedy.steps + sampled.steps for token in step.drafted)


def test_a_draft_that_writes_the_same_text_is_accepted_in_full() -> None:
    """Word for word the same language in two vocabularies of another order: greedy drafts hit, at every round."""
    names = [f"w{i}" for i in range(20)]
    one, two = tiny.word_tokenizer(names), tiny.word_tokenizer(names[::-1])
    target = tiny.llama(vocab=23, layers=1)
    draft = tiny.noisy(target, 0)
    order = [0, 1, 2, *range(22, 2, -1)]
    with torch.no_grad():
        target.lm_head.weight[:3] = 0  # no special token is ever the best
        draft.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight[order])
        draft.lm_head.weight.copy_(target.lm_head.weight[order])
    prompt = one("w1 w2 w3", return_tensors="pt")["input_ids"]
    how = {"assistant_model": draft, "tokenizer": one, "assistant_tokenizer": two, **STEADY}
    expected = plain(target, prompt, max_new_tokens=30)
    result = spec(target, prompt, max_new_tokens=30, **how)
    assert list(result.ids) == expected
    assert result.draft_acceptance_rate == 1
    assert result.num_draft_tokens > 20
    sampled = specnb.generate(
        target, prompt, do_sample=True, top_k=0, seed=3, max_new_tokens=30, suppress_tokens=[0, 1, 2], **how
    )
    assert sampled.draft_acceptance_rate == 1  # the same distribution in other ids


@pytest.mark.parametrize("pair", ["byte to SP", "SP to byte"])
def test_VOC_03_rows_equal_their_single_runs(pair: str) -> None:
    target, _ = models(pair)
    prompts = [prompt_of(pair, text) for text in TEXTS]
    ids, mask = padded(prompts, pad=0)
    expected = [plain(target, prompt, max_new_tokens=20, eos_token_id=[40, 60, 90]) for prompt in prompts]
    result = spec(target, ids, attention_mask=mask, max_new_tokens=20, eos_token_id=[40, 60, 90], **given(pair))
    assert [list(row.ids) for row in result.rows] == expected
    consistent(result)
    sampling = {"do_sample": True, "top_k": 0, "max_new_tokens": 20, **given(pair)}
    many = specnb.generate(target, ids, attention_mask=mask, seed=5, **sampling)
    for i, prompt in enumerate(prompts):
        alone = specnb.generate(target, prompt, attention_mask=torch.ones_like(prompt), seed=5 + i, **sampling)
        assert many.rows[i].ids == alone.ids


def test_VOC_03_the_targets_own_inputs_stay_with_the_target() -> None:
    pair = "byte to SP"
    target, draft = models(pair)
    prompt = prompt_of(pair, TEXTS[0])
    with watched(draft) as calls:
        result = spec(
            target, prompt, max_new_tokens=12, position_ids=torch.arange(prompt.shape[1])[None], **given(pair)
        )
    assert list(result.ids) == plain(target, prompt, max_new_tokens=12)
    for inputs in calls.inputs:
        assert inputs["position_ids"].shape[-1] == inputs["input_ids"].shape[-1]
        assert "token_type_ids" not in inputs
        assert "attention_mask" not in inputs
    gpt2 = tiny.gpt2(vocab=330)
    types = {"token_type_ids": torch.zeros_like(prompt)}
    with watched(draft) as calls:
        result = spec(gpt2, prompt, max_new_tokens=12, **types, **given(pair))
    assert list(result.ids) == plain(gpt2, prompt, max_new_tokens=12, **types)
    assert not any("token_type_ids" in inputs for inputs in calls.inputs)


def test_the_draft_reads_each_token_once() -> None:
    """Re-encoding costs the draft model no more than a window of its cache."""
    pair = "byte to SP"
    target, draft = models(pair)
    prompt = prompt_of(pair, "the lazy dog sails over the lake " * 12)
    with watched(draft) as calls:
        result = spec(target, prompt, max_new_tokens=60, num_assistant_tokens=4, **given(pair))
    drafts = sum(bool(step.drafted) or step.draft_seconds > 0 for step in result.steps)
    assert max(calls.widths[1:]) < calls.widths[0]
    assert sum(calls.widths[1:]) < 12 * drafts


def test_eos_of_the_two_tokenizers_are_counterparts() -> None:
    names = [f"w{i}" for i in range(12)]
    one, two = tiny.word_tokenizer(names), tiny.word_tokenizer(["more", *names[::-1]])
    mine, theirs = shared_tokens(one, two, len(one), len(two))
    pairs = dict(zip(mine.tolist(), theirs.tolist(), strict=True))
    assert pairs[one.eos_token_id] == two.eos_token_id
    assert {one.convert_ids_to_tokens(a): two.convert_ids_to_tokens(b) for a, b in pairs.items()} == {
        "</s>": "</s>",
        **{name: name for name in names},
    }
    assert 0 not in pairs  # <unk> is no text
    small = shared_tokens(one, two, 8, 10)  # models with fewer ids than their tokenizers
    assert int(small[0].max()) < 8
    assert int(small[1].max()) < 10


# ---------------------------------------------------------------- SMP-04
W_ONE = tiny.word_tokenizer([f"w{i}" for i in range(16)])
W_TWO = tiny.word_tokenizer([*(f"w{i}" for i in range(13, -1, -1)), *(f"x{i}" for i in range(1, 5))])
W_T = tiny.llama(seed=0, vocab=len(W_ONE), layers=1)
W_D = tiny.llama(seed=7, vocab=len(W_TWO), layers=1)
W_X = W_ONE("w1 w2 w3 w4", return_tensors="pt")["input_ids"]


class Shuffled:
    """A tokenizer whose get_vocab() yields its entries in another order."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["tokenizer"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def get_vocab(self) -> dict[str, int]:
        entries = list(self.tokenizer.get_vocab().items())
        order = torch.randperm(len(entries), generator=torch.Generator().manual_seed(self.seed)).tolist()
        return {entries[i][0]: entries[i][1] for i in order}


def by_hand(text: str) -> Tensor:
    """The draft's distribution over the target's ids after a text: softmax over the tokens that both have."""
    own, probs = W_TWO.get_vocab(), torch.zeros(len(W_ONE))
    with torch.no_grad():
        logits = W_D(torch.tensor([W_TWO(text)["input_ids"]])).logits[0, -1]
    for word, i in W_ONE.get_vocab().items():
        if word in own and word not in ("<unk>", "<s>"):
            probs[i] = logits[own[word]].exp()
    return probs / probs.sum()


@pytest.mark.parametrize("order", [None, 1, 2])
def test_SMP_04_q_is_the_one_computed_by_hand(order: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (W_ONE, W_TWO) if order is None else (Shuffled(W_ONE, order), Shuffled(W_TWO, order + 9))
    seen: list[tuple[list[int], Tensor, list[int]]] = []
    add = DraftBuilder.add

    def record(self: DraftBuilder, logits: Tensor) -> None:
        text = [*self.row.ids, *self.tokens]
        add(self, logits)
        seen.append((text, self.probs[-1], self.tokens))

    monkeypatch.setattr(DraftBuilder, "add", record)
    result = specnb.generate(
        W_T,
        W_X,
        attention_mask=torch.ones_like(W_X),
        do_sample=True,
        top_k=0,
        seed=3,
        max_new_tokens=90,
        assistant_model=W_D,
        tokenizer=one,
        assistant_tokenizer=two,
        **STEADY,
    )
    assert result.method == "universal"
    assert len(seen) > 30
    for ids, q, tokens in seen:
        text = W_ONE.decode([i for i in ids if i > 2])
        assert (q - by_hand(text)).abs().max() < 1e-5
        assert not q[[3 + 14, 3 + 15, 0, 1]].any()  # w14, w15 and the specials are the target's alone
        assert all(q[token] > 0 for token in tokens[-1:])
    assert {17, 18} & set(result.ids)  # and reachable all the same


def test_SMP_04_tables_do_not_depend_on_the_order_of_get_vocab() -> None:
    for one, two in (*PAIRS.values(), (W_ONE, W_TWO)):
        plainly = shared_tokens(one, two, len(one), len(two))
        for seed in (1, 2):
            shuffled = shared_tokens(Shuffled(one, seed), Shuffled(two, seed), len(one), len(two))
            assert all(torch.equal(a, b) for a, b in zip(plainly, shuffled, strict=True))
        assert len(plainly[0]) > 10
        assert len(set(plainly[0].tolist())) == len(set(plainly[1].tolist())) == len(plainly[0])


@pytest.mark.parametrize("pair", PAIRS)
def test_shared_tokens_add_the_same_text(pair: str) -> None:
    one, two = PAIRS[pair]
    mine, theirs = (table.tolist() for table in shared_tokens(one, two, len(one), len(two)))
    heads = [tokenizer("a", add_special_tokens=False)["input_ids"] for tokenizer in (one, two)]
    for a, b in zip(mine, theirs, strict=True):
        if a == one.eos_token_id:
            continue
        texts = [
            text_of(tokenizer, [*head, token])[len(text_of(tokenizer, head)) :]
            for tokenizer, head, token in ((one, heads[0], a), (two, heads[1], b))
        ]
        assert texts[0] == texts[1] != ""


def test_tokenizers_without_a_common_token() -> None:
    one, two = tiny.word_tokenizer(["a", "b", "c"]), tiny.word_tokenizer(["x", "y", "z"])
    two.eos_token = None
    target, draft = tiny.llama(vocab=6), tiny.llama(vocab=6, seed=3)
    prompt = torch.tensor([[3, 4, 5]])
    how = {"assistant_model": draft, "tokenizer": one, "assistant_tokenizer": two, "max_new_tokens": 8}
    with no_forward(target, draft), pytest.raises(ValueError, match="no token in common"):
        specnb.generate(target, prompt, do_sample=True, **how)
    assert list(spec(target, prompt, **how).ids) == plain(target, prompt, max_new_tokens=8)


# ---------------------------------------------------------------- the draft is left alone
def test_two_drafts_with_one_pair_of_tokenizers() -> None:
    pair = "byte to SP"
    target, first = models(pair)
    second = llama(SP, 5)
    drafts = (first, second)
    before, prompt = configs(target, *drafts), prompt_of(pair, TEXTS[4])
    weights = [copy.deepcopy(model.state_dict()) for model in drafts]
    heads = [model.get_output_embeddings() for model in drafts]
    alone = [plain(model, torch.tensor([[1, 270, 280]]), max_new_tokens=12) for model in drafts]
    expected = plain(target, prompt, max_new_tokens=20)
    for _ in range(2):
        for draft in drafts:
            how = given(pair) | {"assistant_model": draft}
            assert list(spec(target, prompt, max_new_tokens=20, **how).ids) == expected
            specnb.generate(target, prompt, do_sample=True, seed=1, max_new_tokens=20, **how)
    assert configs(target, *drafts) == before
    for model, old, head, text in zip(drafts, weights, heads, alone, strict=True):
        assert model.get_output_embeddings() is head
        assert list(model.state_dict()) == list(old)
        assert all(torch.equal(old[name], value) for name, value in model.state_dict().items())
        assert plain(model, torch.tensor([[1, 270, 280]]), max_new_tokens=12) == text


def test_tokenizers_are_left_alone() -> None:
    pair = "SP to byte"
    target, _ = models(pair)
    before = [(t.backend_tokenizer.to_str(), sorted(vars(t)), t.padding_side) for t in PAIRS[pair]]
    spec(target, prompt_of(pair, TEXTS[0]), max_new_tokens=12, **given(pair))
    specnb.generate(target, prompt_of(pair, TEXTS[0]), do_sample=True, max_new_tokens=12, **given(pair))
    assert [(t.backend_tokenizer.to_str(), sorted(vars(t)), t.padding_side) for t in PAIRS[pair]] == before


# ---------------------------------------------------------------- which path
def test_equal_tokenizers_take_the_plain_path_whatever_the_sizes() -> None:
    for size in (330, 352, 300 + 40):
        draft = tiny.llama(seed=3, vocab=size)
        prompt = BYTE("the quick", return_tensors="pt")["input_ids"]
        target = models("byte to SP")[0]
        result = spec(
            target,
            prompt,
            max_new_tokens=12,
            assistant_model=draft,
            tokenizer=BYTE,
            assistant_tokenizer=tiny.byte_tokenizer(330),
            **STEADY,
        )
        assert result.method == "draft_model"


def test_models_smaller_or_larger_than_their_tokenizers() -> None:
    """No id beyond a model's vocabulary reaches it, in either direction."""
    for of_target, of_draft in ((len(BYTE) - 30, len(SP) - 60), (len(BYTE) + 30, len(SP) + 60)):
        target, draft = tiny.llama(vocab=of_target, layers=2), tiny.llama(vocab=of_draft, layers=2, seed=3)
        prompt = torch.tensor([[40, 50, 60, 70, 80]])
        how = {"assistant_model": draft, "tokenizer": BYTE, "assistant_tokenizer": SP, **STEADY}
        with watched(draft) as calls:
            assert list(spec(target, prompt, max_new_tokens=40, **how).ids) == plain(target, prompt, max_new_tokens=40)
            sampled = specnb.generate(
                target, prompt, do_sample=True, top_k=0, temperature=2.0, seed=1, max_new_tokens=40, **how
            )
        assert max(sampled.ids) < of_target
        assert all(int(inputs["input_ids"].max()) < of_draft for inputs in calls.inputs)


def test_the_context_of_the_draft_is_respected() -> None:
    """Its text may be longer in tokens than the target's: near its end it drafts less, never beyond."""
    target = tiny.llama(vocab=len(BYTE), layers=2)
    for draft in (tiny.gpt2(vocab=len(SP), positions=40), tiny.llama(vocab=len(SP), positions=40)):
        prompt = BYTE("the quick brown fox jumps over the lazy dog", return_tensors="pt")["input_ids"]
        how = {"assistant_model": draft, "tokenizer": BYTE, "assistant_tokenizer": SP, **STEADY}
        for sample in (False, True):
            with watched(draft) as calls:
                result = specnb.generate(
                    target,
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=sample,
                    seed=1,
                    max_new_tokens=60,
                    num_assistant_tokens=9,
                    **how,
                )
            assert len(result.ids) == 60
            assert calls.largest_position < 40
            if not sample:
                assert list(result.ids) == plain(target, prompt, max_new_tokens=60)


# ---------------------------------------------------------------- text with rough edges
@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_partial_characters_and_specials(pair: str) -> None:
    """The target writes single bytes of characters and special tokens: the draft waits or reads on, never breaks."""
    (one, _), (target, _) = PAIRS[pair], models(pair)
    smile = one("😀 é ü", add_special_tokens=False)["input_ids"]
    for cut in range(1, len(smile) + 1):
        prompt = torch.tensor([[*one("the dog", add_special_tokens=False)["input_ids"], *smile[:cut]]])
        expected = plain(target, prompt, max_new_tokens=10)
        assert list(spec(target, prompt, max_new_tokens=10, **given(pair)).ids) == expected
        sampled = specnb.generate(target, prompt, do_sample=True, seed=cut, max_new_tokens=10, **given(pair))
        assert len(sampled.ids) == 10
    for special in ([1], [2], [0], [1, 1, 2], [2, 0]):
        prompt = torch.tensor([[*special, 60, *special, 70]])
        expected = plain(target, prompt, max_new_tokens=10)
        assert list(spec(target, prompt, max_new_tokens=10, **given(pair)).ids) == expected
        only = torch.tensor([special])
        assert list(spec(target, only, max_new_tokens=10, **given(pair)).ids) == plain(target, only, max_new_tokens=10)


@pytest.mark.parametrize(
    "tokenizer", [BYTE, SP, BYTE_2, PAIRS["SP to SP"][1]], ids=["byte", "SP", "byte 2", "SP no bos"]
)
def test_growing_text_keeps_its_meaning(tokenizer: Any) -> None:
    """Whatever the pieces, the ids decode to the text so far, and the ids reported as unchanged are unchanged."""
    text = "".join(TEXTS) + " a b\n\t 12,3 éé😀😀🎉 the quick  brown  fox " * 4
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        at = int(torch.randint(0, 8, (), generator=generator))
        held = Retokenized(tokenizer, text[:at])
        while at < len(text):
            step = int(torch.randint(1, 9, (), generator=generator))
            before = list(held.ids)
            unchanged = held.extend(text[at : at + step])
            at += step
            assert held.ids[:unchanged] == before[:unchanged]
            assert held.text == text[:at]
            decoded = text_of(tokenizer, held.ids)
            assert decoded.removeprefix(" ") == text[:at].removeprefix(" ")
            assert len(held.ends) == len(held.ids)


def test_continuations_begin_where_the_context_ends() -> None:
    for tokenizer in (BYTE, SP):
        for text in (*TEXTS, "the lazy dog sails over"):
            for cut in range(1, len(text)):
                ids = continuation(tokenizer, text[:cut], text[cut:])
                if ids:
                    anchor = tokenizer(text[:cut], add_special_tokens=False)["input_ids"]
                    assert text_of(tokenizer, [*anchor, *ids]).strip(" ") == text.strip(" ")


# ---------------------------------------------------------------- transformers' own ways in
def test_bound_and_in_a_pipeline() -> None:
    pair = "byte to SP"
    target, _ = models(pair)
    expected = plain(target, prompt_of(pair, "the quick"), max_new_tokens=16)
    decoder = specnb.decoder(**given(pair))
    prompt = prompt_of(pair, "the quick")
    out = target.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16, custom_generate=decoder
    )
    assert out[0, prompt.shape[1] :].tolist() == expected
    pipe = pipeline("text-generation", model=target, tokenizer=BYTE, device="cpu")
    said = pipe("the quick", do_sample=False, max_new_tokens=16, custom_generate=decoder, return_full_text=False)
    assert said[0]["generated_text"] == BYTE.decode(expected, skip_special_tokens=True)
    assert decoder.result is not None
    assert decoder.result.method == "universal"
