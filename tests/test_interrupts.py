"""Failures at any call while drafting or verifying leave model, configs and tokenizer unchanged. Threads do not mix."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dflash_checkpoints
import pytest
import tiny
import torch
from checkpoints import gemma4_drafter, gemma4_target, mtp_model
from checks import STEADY, consistent, plain, spec
from eagle3_checkpoints import drafter_folder
from torch import nn
from transformers import PreTrainedModel, pipeline

import specnb
from specnb.models.mtp import load_mtp

BYTE, SP = tiny.byte_tokenizer(), tiny.sp_tokenizer()
X = tiny.ids(0, 7)
NEW = 8


@cache
def way(name: str) -> tuple[PreTrainedModel, dict[str, Any], dict[str, PreTrainedModel]]:
    """The target, the options of the method, and the models (by role) whose every call is made to fail."""
    how: dict[str, Any] = {"num_assistant_tokens": 3, **STEADY}
    if name == "prompt lookup":
        model = tiny.llama()
        return model, {"prompt_lookup_num_tokens": 3}, {"target": model}
    if name == "draft model":
        model = tiny.llama()
        draft = tiny.noisy(model, 0.03)
        return model, how | {"assistant_model": draft}, {"target": model, "draft": draft}
    if name == "early exit":
        model = tiny.family("qwen3")
        return model, how | {"assistant_early_exit": 2}, {"target": model}
    if name == "hybrid":
        model = tiny.hybrid()
        draft = tiny.noisy(model, 0.03)
        return model, how | {"assistant_model": draft}, {"target": model, "draft": draft}
    if name == "hybrid early exit":
        model = tiny.hybrid()
        return model, how | {"assistant_early_exit": 1}, {"target": model}
    if name == "MTP":
        model = mtp_model("glm4_moe", 2, 2)
        return model, how | {"use_mtp": True}, {"target": model}
    if name == "EAGLE-3":
        model = tiny.llama()
        with TemporaryDirectory() as folder:
            assistant = specnb.load_drafter(drafter_folder(Path(folder), model, draft=40))
        return model, how | {"assistant_model": assistant}, {"target": model, "draft": assistant}
    if name == "DFlash":
        model = tiny.llama()
        with TemporaryDirectory() as folder:
            assistant = specnb.load_drafter(dflash_checkpoints.zlab(Path(folder), model, {}))
        return model, how | {"assistant_model": assistant}, {"target": model, "draft": assistant}
    if name == "Gemma 4":
        model = gemma4_target()
        assistant = gemma4_drafter(model)
        return model, how | {"assistant_model": assistant}, {"target": model, "draft": assistant}
    model, draft = tiny.llama(vocab=len(BYTE), layers=2), tiny.llama(vocab=len(SP), layers=2, seed=3)
    given = {"assistant_model": draft, "tokenizer": BYTE, "assistant_tokenizer": SP}
    return model, how | given, {"target": model, "draft": draft}


WAYS = [
    "prompt lookup",
    "draft model",
    "early exit",
    "hybrid",
    "hybrid early exit",
    "MTP",
    "EAGLE-3",
    "DFlash",
    "Gemma 4",
    "universal",
    "universal sampling",
]


def parts(name: str) -> list[nn.Module]:
    """The modules whose forwards are made to fail: first and last layers, norms and heads of all models involved."""
    model, _, models = way(name.removesuffix(" sampling"))
    found: list[nn.Module] = []
    for one in models.values():
        if name == "DFlash" and one is not model:  # its layers are run part by part
            found += [one.fc, one.layers[0].mlp, one.norm]
            continue
        layers = one.get_decoder().layers
        found += [layers[0], layers[-1], one.get_output_embeddings()]
    if name == "MTP":
        found += list(load_mtp(model).layers)
    return found


def everything(name: str) -> Any:
    """All that a call might change: weights, modules, configs, hooks, tokenizers."""
    _, _, models = way(name.removesuffix(" sampling"))
    state: list[Any] = []
    for one in models.values():
        state.append(json.dumps([one.config.to_dict(), one.generation_config.to_dict()], default=str, sort_keys=True))
        state.append([(path, id(m), type(m), m.training, sorted(vars(m))) for path, m in one.named_modules()])
        state.append(
            [(path, id(p), p.requires_grad, float(p.detach().double().sum())) for path, p in one.named_parameters()]
        )
        state.append([(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in one.modules()])
    state += [(t.backend_tokenizer.to_str(), sorted(vars(t)), t.padding_side, t.truncation_side) for t in (BYTE, SP)]
    return state


@contextmanager
def failing(modules: list[nn.Module], at: int, error: type[BaseException]) -> Iterator[list[int]]:
    """The `at`-th call of any of the modules raises; -1: none. Yields a list with the number of calls."""
    calls = [0]

    def hook(module: nn.Module, args: Any) -> None:
        calls[0] += 1
        if calls[0] - 1 == at:
            raise error

    handles = [module.register_forward_pre_hook(hook) for module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class Boom(Exception):
    """What no library raises."""


def run(name: str, **options: Any) -> specnb.GenerationResult:
    model, how, _ = way(name.removesuffix(" sampling"))
    if name.endswith(" sampling"):
        return specnb.generate(
            model, X, attention_mask=torch.ones_like(X), do_sample=True, seed=3, max_new_tokens=NEW, **how | options
        )
    return spec(model, X, max_new_tokens=NEW, **how | options)


@pytest.mark.slow
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("name", WAYS)
def test_STA_01_failure_at_every_forward_of_draft_and_verify(name: str, error: type[BaseException]) -> None:
    model = way(name.removesuffix(" sampling"))[0]
    free = plain(model, X, max_new_tokens=NEW)
    whole = run(name)
    modules, before = parts(name), everything(name)
    with failing(modules, -1, error) as calls:
        run(name)
    total, lengths = calls[0], []
    assert total > 2 * len(whole.steps)
    for at in range(0, total, 1 if error is KeyboardInterrupt else 5):
        shown: list[int] = []  # the tokens of the steps that were reported before the failure

        def on_step(step: specnb.Step, shown: list[int] = shown) -> None:
            shown.extend(step.emitted)

        with failing(modules, at, error), pytest.raises((error, ValueError)) as caught:
            run(name, on_step=on_step)
        if isinstance(caught.value, ValueError):  # the block check says what it met, before the first token
            assert at < 24 and error is Boom and not shown
            continue
        partial = getattr(caught.value, "partial_result", None)
        assert partial is not None or not shown
        if partial is not None:
            consistent(partial)
            assert partial.finish_reason == "interrupted"
            assert list(partial.ids) == shown == list(whole.ids[: len(shown)])
            lengths.append(len(shown))
        if at % 10 == 0:
            assert everything(name) == before
    ends = [0, *accumulate(len(step.emitted) for step in whole.steps)]
    assert lengths == sorted(lengths)
    assert set(lengths) <= set(ends[:-1])
    if error is KeyboardInterrupt:  # at every call, so in every step
        assert set(lengths) == set(ends[:-1])
    assert len(set(lengths) - {0}) > len(whole.steps) / 3
    assert everything(name) == before
    assert plain(model, X, max_new_tokens=NEW) == free
    assert run(name).ids == whole.ids


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_two_threads_on_one_model(name: str) -> None:
    """Each gets its own text, with the same method and beside another one."""
    model, how, _ = way(name.removesuffix(" sampling"))
    prompts = [tiny.ids(20 + i, 5 + 3 * i) for i in range(2)]
    sample = {"do_sample": name.endswith(" sampling"), "max_new_tokens": 24}

    def text(i: int, plainly: bool = False) -> list[int]:
        given = {} if plainly else how
        mask = torch.ones_like(prompts[i])
        return list(
            specnb.generate(
                model, prompts[i], attention_mask=mask, seed=i if sample["do_sample"] else None, **sample, **given
            ).ids
        )

    alone = [text(0), text(1), text(0, plainly=True)]
    for jobs in ([lambda: text(0), lambda: text(1)], [lambda: text(0), lambda: text(1), lambda: text(0, plainly=True)]):
        found: dict[int, Any] = {}

        def work(i: int, job: Callable[[], list[int]], found: dict[int, Any] = found) -> None:
            try:
                found[i] = [job() for _ in range(2)]
            except Exception as error:
                found[i] = error

        threads = [threading.Thread(target=work, args=(i, job)) for i, job in enumerate(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {i: [alone[i]] * 2 for i in range(len(jobs))}


# ---------------------------------------------------------------- pipelines and generate()
@pytest.mark.parametrize("name", ["prompt lookup", "draft model", "early exit", "universal"])
def test_a_pipeline_with_each_method(name: str) -> None:
    model, how, _ = way("universal")
    options: dict[str, dict[str, Any]] = {
        "prompt lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2},
        "draft model": {"assistant_model": tiny.noisy(model, 0.03), **STEADY},
        "early exit": {"assistant_early_exit": 1, **STEADY},
        "universal": how,
    }
    decoder = specnb.decoder(**options[name])
    pipe = pipeline("text-generation", model=model, tokenizer=BYTE, device="cpu")
    text = "the dog the dog the dog the"
    said = pipe(text, do_sample=False, max_new_tokens=12, custom_generate=decoder, return_full_text=False)
    prompt = BYTE(text, return_tensors="pt")["input_ids"]
    assert said[0]["generated_text"] == BYTE.decode(plain(model, prompt, max_new_tokens=12), skip_special_tokens=True)
    assert decoder.result is not None
    assert decoder.result.num_draft_tokens > 0
    assert decoder.result.method == name.replace(" ", "_")


@pytest.mark.parametrize("name", ["prompt lookup", "early exit", "MTP"])
def test_options_given_to_generate_itself(name: str) -> None:
    """What transformers lets through need not be bound."""
    model, how, _ = way(name)
    decoder = specnb.decoder()
    how = {key: value for key, value in how.items() if value != 0} | {"assistant_confidence_threshold": 0.01}
    if name == "prompt lookup":
        del how["assistant_confidence_threshold"]
    out = model.generate(
        X, attention_mask=torch.ones_like(X), do_sample=False, max_new_tokens=12, custom_generate=decoder, **how
    )
    assert out[0, 7:].tolist() == plain(model, X, max_new_tokens=12)
    assert decoder.result is not None
    assert decoder.result.method == {"MTP": "mtp_layers"}.get(name, name.replace(" ", "_"))
    assert max(len(step.drafted) for step in decoder.result.steps) <= 3
    assert decoder.result.num_draft_tokens


@pytest.mark.parametrize("name", ["draft model", "EAGLE-3", "DFlash", "Gemma 4", "universal"])
def test_options_that_have_to_be_bound(name: str) -> None:
    """Models and tokenizers are bound; the drafting options may come with the call, and decide."""
    model, how, _ = way(name)
    bound = {key: value for key, value in how.items() if "model" in key or "tokenizer" in key}
    decoder = specnb.decoder(num_assistant_tokens=7, **bound)
    out = model.generate(
        X,
        attention_mask=torch.ones_like(X),
        do_sample=False,
        max_new_tokens=12,
        num_assistant_tokens=2,
        assistant_confidence_threshold=0.001,
        custom_generate=decoder,
    )
    assert out[0, 7:].tolist() == plain(model, X, max_new_tokens=12)
    assert decoder.result is not None
    methods = {"Gemma 4": "gemma4_assistant", "EAGLE-3": "eagle3", "DFlash": "dflash"}
    assert decoder.result.method == methods.get(name, name.replace(" ", "_"))
    assert decoder.result.options["num_assistant_tokens"] == 2
    if name != "universal":
        assert max(len(step.drafted) for step in decoder.result.steps) == 2
