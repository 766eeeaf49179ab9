"""`specnb.Memory` and predicted outputs: the text does not depend on them; bounds, files, tokenizers, refusals."""

from __future__ import annotations

import copy
import pickle
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import test_sampling
import tiny
import torch
from checks import Recorder, consistent, no_forward, padded, plain, spec
from test_sampling_methods import PROMPT, SETTINGS
from transformers import PreTrainedModel

import specnb
from specnb import Memory
from specnb.memory.memory import CONTEXT_TOKENS

NEW = 24
X = tiny.ids(0, 12)
DRAFT = tiny.noisy(tiny.llama(), 0.02)


@cache
def model(name: str = "llama") -> PreTrainedModel:
    return tiny.hybrid() if name == "hybrid" else tiny.family(name)


@cache
def tokenizer(size: int = 330) -> Any:
    return tiny.byte_tokenizer(size)


def memories(name: str = "llama") -> dict[str, Memory | None]:
    """None, empty, of other texts, of the very text, and of nearly that text."""
    text = plain(model(name), X, max_new_tokens=NEW)
    found: dict[str, Memory | None] = {"none": None, **{what: Memory() for what in ("empty", "other", "same", "near")}}
    for what, ids in (
        ("other", tiny.ids(5, 500)[0].tolist()),
        ("same", text),
        ("near", [3 if i % 5 == 4 else token for i, token in enumerate(text)]),
    ):
        found[what].add(ids, X[0].tolist())  # type: ignore[union-attr]
    return found


# ---- the text
@pytest.mark.parametrize("name", ["llama", "gemma4", "gpt2", "hybrid"])
def test_greedy_text_is_the_targets_whatever_the_memory(name: str) -> None:
    want = plain(model(name), X, max_new_tokens=NEW)
    for what, memory in memories(name).items():
        for options in ({}, {"num_assistant_tokens": 4}, {"num_assistant_tokens_schedule": "heuristic"}):
            result = spec(model(name), X, method="suffix", memory=memory, max_new_tokens=NEW, **options)
            assert list(result.ids) == want, (what, options)
            consistent(result)
        again = spec(model(name), X, method="suffix", memory=memory, max_new_tokens=NEW)
        assert what == "none" or again.target_passes <= NEW // 4
        assert result.draft_acceptance_rate <= 1 and result.method == "suffix" and not result.lossy


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_sampled_text_is_that_of_plain_sampling_whatever_the_memory(setting: str) -> None:
    target = test_sampling.target()
    given = {"do_sample": True, "max_new_tokens": 30, "attention_mask": torch.ones_like(PROMPT), **SETTINGS[setting]}
    shared, drafted = Memory(), 0
    for seed in range(4):
        want = specnb.generate(target, PROMPT, seed=seed, **given).ids
        own = Memory()
        own.add(want, PROMPT[0].tolist())
        for memory in (None, Memory(), shared, own):
            for options in ({}, {"num_assistant_tokens": 3}):
                result = specnb.generate(target, PROMPT, method="suffix", memory=memory, seed=seed, **options, **given)
                assert result.ids == want and result.seed == seed
                drafted += result.num_accepted_draft_tokens
    assert drafted > 100


def test_the_same_seed_whatever_ran_before() -> None:
    target, memory = test_sampling.target(), Memory()
    given = {"do_sample": True, "max_new_tokens": 20, "attention_mask": torch.ones_like(PROMPT), "memory": memory}
    first = [specnb.generate(target, PROMPT, seed=seed, **given).ids for seed in range(3)]
    assert [specnb.generate(target, PROMPT, seed=seed, **given).ids for seed in reversed(range(3))] == first[::-1]


def test_a_prediction_changes_only_the_speed() -> None:
    want = plain(model(), X, max_new_tokens=NEW)
    for prediction in ([], want, want[:7], want[5:], [9] * 40, torch.tensor([want]), tuple(want)):
        assert list(spec(model(), X, prediction=prediction, max_new_tokens=NEW).ids) == want
    assert spec(model(), X, prediction=want, max_new_tokens=NEW).target_passes <= 4
    alone = spec(model(), X, method="suffix", max_new_tokens=NEW).target_passes
    assert spec(model(), X, prediction=[9] * 40, max_new_tokens=NEW).target_passes <= alone + 2


def test_a_prediction_may_be_a_text() -> None:
    target = tiny.llama(vocab=330)
    given = {"tokenizer": tokenizer(), "max_new_tokens": NEW, "do_sample": False}
    want = specnb.generate(target, "the quick brown fox", **given)
    found = specnb.generate(target, "the quick brown fox", prediction=want.text, **given)
    assert found.ids == want.ids and found.method == "suffix"
    with pytest.raises(ValueError, match="needs tokenizer="):
        spec(target, tiny.ids(0, 5), prediction="the quick")


def test_rows_share_a_memory() -> None:
    prompts = [X, X[:, 3:], X[:, 6:]]
    ids, mask = padded(prompts)
    want = [plain(model(), one, max_new_tokens=NEW) for one in prompts]
    memory = Memory()
    for _ in range(2):
        found = spec(model(), ids, attention_mask=mask, memory=memory, max_new_tokens=NEW)
        assert [list(one.ids) for one in found.rows] == want
    assert memory.num_requests == 6 and found.target_passes <= NEW // 4
    assert memory.requests()[:3] == [one[0].tolist() + text for one, text in zip(prompts, want, strict=True)]


def test_through_generate_itself() -> None:
    want, memory = plain(model(), X, max_new_tokens=NEW), Memory()
    decoder = specnb.decoder(memory=memory)
    for _ in range(2):
        out = model().generate(X, max_new_tokens=NEW, do_sample=False, custom_generate=decoder)
        assert out[0, X.shape[1] :].tolist() == want
    assert decoder.result.method == "suffix" and decoder.result.target_passes <= 4 and memory.num_requests == 2
    decoder = specnb.decoder(method="suffix", prediction=want, suffix_decoding_max_spec_factor=1.0)
    model().generate(X, max_new_tokens=NEW, do_sample=False, custom_generate=decoder)
    assert decoder.result.options["suffix_decoding_max_spec_factor"] == 1.0 and decoder.result.target_passes <= 5


def test_half_precision_has_a_schedule_of_its_own() -> None:
    half = tiny.llama(seed=0).to(torch.bfloat16)
    result = spec(half, X, memory=Memory(), max_new_tokens=NEW)
    assert result.options["num_assistant_tokens_schedule"] == "heuristic" and len(result.ids) == NEW


# ---- what is kept
def test_interrupted_runs_are_kept() -> None:
    memory = Memory()

    def stop(step: Any) -> None:
        if step.position > X.shape[1] + 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        spec(model(), X, method="suffix", memory=memory, max_new_tokens=NEW, on_step=stop)
    ids = list(caught.value.partial_result.ids)  # type: ignore[attr-defined]
    assert ids and memory.requests() == [X[0].tolist() + ids]
    cancel = threading.Event()
    cancel.set()
    assert not spec(model(), X, memory=memory, max_new_tokens=NEW, cancel=cancel).ids
    assert memory.num_requests == 1  # nothing was written


def test_only_the_end_of_a_prompt_is_kept() -> None:
    memory, prompt = Memory(), list(range(100))
    memory.add([7, 8], prompt)
    assert memory.requests() == [[*prompt[-CONTEXT_TOKENS:], 7, 8]]
    memory.add([], prompt)
    assert memory.num_requests == 1


def test_the_oldest_requests_go_first() -> None:
    memory = Memory(max_tokens=10)
    for start in (0, 10, 20, 30):
        memory.add(range(start, start + 4))
    assert memory.requests() == [[20, 21, 22, 23], [30, 31, 32, 33]] and len(memory) == 8
    assert memory.matches([1, 2], 1, 8, 8) == [] and memory.matches([20, 21], 1, 8, 8)
    memory.add(range(100, 130))
    assert memory.requests() == [list(range(120, 130))]
    assert repr(memory) == "Memory(10 of 10 tokens in 1 requests)"
    memory.clear()
    assert (memory.num_tokens, memory.num_requests, memory.requests(), bool(memory)) == (0, 0, [], True)
    for wrong in (0, -1, 1.5, True, "x"):
        with pytest.raises(ValueError, match="whole number >= 1"):
            Memory(wrong)  # type: ignore[arg-type]


def test_threads_may_share_a_memory() -> None:
    memory, want, wrong = Memory(max_tokens=100), plain(model(), X, max_new_tokens=NEW), []

    def work() -> None:
        for _ in range(6):
            if list(spec(model(), X, memory=memory, max_new_tokens=NEW).ids) != want:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and memory.num_tokens <= 100 and all(one[-len(want) :] == want for one in memory.requests())


# ---- files
def test_saved_and_loaded(tmp_path: Path) -> None:
    memory = Memory(max_tokens=500, tokenizer=tokenizer())
    assert Memory.load(saved(memory, tmp_path)).requests() == []
    memory.add([5, 6, 7], prompt=[1])
    memory.add([300])
    loaded = Memory.load(saved(memory, tmp_path))
    assert loaded.requests() == memory.requests() == [[1, 5, 6, 7], [300]]
    assert (loaded.max_tokens, loaded.tokenizer_name) == (500, memory.tokenizer_name)
    loaded.bind(tokenizer())
    with pytest.raises(ValueError, match="holds tokens of the tokenizer"):
        loaded.bind(tiny.sp_tokenizer())
    assert Memory.load(saved(memory, tmp_path), max_tokens=1).requests() == [[300]]
    assert [file.name for file in tmp_path.iterdir()] == ["memory.safetensors"]
    with pytest.raises(FileNotFoundError):
        memory.save(tmp_path / "no" / "folder")
    with pytest.raises(FileNotFoundError):
        Memory.load(tmp_path / "no file")


def test_what_is_no_memory_is_not_written_over(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    memory, other = Memory(), tmp_path / "notes.txt"
    save_file({}, tmp_path / "weights", {"format": "pt"})
    other.write_text("keep me")
    for path, said in (
        (tmp_path, "is a folder: give"),
        (other, "not a specnb.Memory"),
        (tmp_path / "weights", "not a"),
    ):
        with pytest.raises(OSError, match=said):
            memory.save(path)
    assert other.read_text() == "keep me" and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(OSError, match="is a folder: give the file"):
        Memory.load(tmp_path)


def test_copies_and_pickles() -> None:
    memory = Memory(max_tokens=50, tokenizer=tokenizer())
    memory.add([5, 6, 7], prompt=[1])
    for made in (copy.copy(memory), copy.deepcopy({"kept": memory})["kept"]):
        assert (made.requests(), repr(made)) == (memory.requests(), repr(memory))
        made.add([9])
        assert memory.num_requests == 1 and made.num_requests == 2
    with pytest.raises(TypeError, match="is not pickled: write it with save"):
        pickle.dumps(memory)


def saved(memory: Memory, folder: Path) -> Path:
    memory.save(folder / "memory.safetensors")
    return folder / "memory.safetensors"


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    import numpy
    from safetensors.numpy import save_file

    memory = Memory()
    memory.add(range(50))
    path = saved(memory, tmp_path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:40], whole[:-8], b"\x80\x04]q\x00.", whole.replace(b"Memory/1", b"Memory/9")):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="memory.safetensors is not a specnb.Memory, or is damaged"):
            Memory.load(path)
    for tensors in (
        {"tokens": [1, 2], "lengths": [3]},
        {"tokens": [1, -2], "lengths": [2]},
        {"tokens": [[1, 2]], "lengths": [1]},
        {"tokens": [1.0, 2.0], "lengths": [2]},
        {"tokens": [1, 2]},
    ):
        save_file(
            {name: numpy.asarray(value) for name, value in tensors.items()},
            path,
            {"format": "specnb.Memory/1", "max_tokens": "5"},
        )
        with pytest.raises(ValueError, match="damaged"):
            Memory.load(path)


# ---- what is refused
def test_one_tokenizer_for_a_memory() -> None:
    target, memory = tiny.llama(vocab=400), Memory()
    spec(target, X, memory=memory, tokenizer=tokenizer(), max_new_tokens=4)
    spec(target, X, memory=memory, tokenizer=tiny.byte_tokenizer(), max_new_tokens=4)  # a copy does the same
    with no_forward(target), pytest.raises(ValueError, match="use another specnb.Memory"):
        spec(target, X, memory=memory, tokenizer=tiny.sp_tokenizer(), max_new_tokens=4)
    assert memory.num_requests == 2
    memory.clear()
    spec(target, X, memory=memory, tokenizer=tiny.sp_tokenizer(), max_new_tokens=4)


def test_ids_that_the_model_does_not_know_are_not_drafted() -> None:
    memory = Memory()
    memory.add([5000, 6000, 7000], X[0].tolist())
    result = spec(model(), X, memory=memory, max_new_tokens=6)
    assert list(result.ids) == plain(model(), X, max_new_tokens=6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "prompt_lookup", "memory": Memory()}, "memory= given, but method 'prompt_lookup'"),
        ({"method": "plain", "prediction": [1]}, "prediction= given, but method 'plain'"),
        ({"method": "suffix", "memory": [1, 2]}, "memory must be a specnb.Memory, not a list"),
        ({"method": "suffix", "prediction": [1, 2.5]}, "must be a text, or the token ids"),
        ({"method": "suffix", "prediction": 7}, "must be a text, or the token ids"),
        ({"method": "suffix", "prediction": [1, 64]}, "prediction holds the id 64"),
        ({"method": "suffix", "verification": "block"}, "no option verification; these have it: draft_model, "),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, "suffix_decoding_max_spec_factor=0"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "suffix_decoding_min_token_prob=2"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth=0"),
        ({"prompt_lookup_num_tokens": 3, "memory": Memory()}, "but method 'prompt_lookup' drafts from neither"),
        ({"assistant_model": DRAFT, "memory": Memory()}, "use method='suffix\\+draft_model'"),
        ({"assistant_early_exit": 1, "prediction": [1]}, "use method='suffix\\+early_exit'"),
        ({"method": "suffix", "assistant_model": DRAFT}, "choose 'suffix\\+draft_model' or 'draft_model'"),
        ({"method": "prompt_lookup", "suffix_decoding_max_tree_depth": 3}, "suffix_decoding_max_tree_depth"),
    ],
)
def test_refused_before_the_first_token(options: dict[str, Any], said: str) -> None:
    with no_forward(model()), pytest.raises(ValueError, match=said):
        spec(model(), X, max_new_tokens=4, **options)
    if {"memory", "prediction", "assistant_model"} & options.keys():
        with pytest.raises(ValueError, match=said):
            model().generate(X, max_new_tokens=4, custom_generate=specnb.decoder(**options))


def test_a_streamer_gets_the_text() -> None:
    streamer, memory = Recorder(), Memory()
    for _ in range(2):
        streamer = Recorder()
        result = spec(model(), X, memory=memory, max_new_tokens=NEW, streamer=streamer)
        assert streamer.ids == [*X[0].tolist(), *result.ids] and streamer.ended == 1
