"""The checkpoints inside the package: complete, small, and good enough that each method can be seen at work."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from checks import cache_name
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

import specnb
from specnb.models import embedded
from specnb.models.mtp import load_mtp
from specnb.models.registry import REGISTERED
from specnb.text import prompt_inputs
from tools.embedded_models import data, gemma4, glm4_moe, measure, tokenizers
from tools.embedded_models.train import RECIPES

NAMES = sorted(embedded.CARDS)
FILES = {
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "README.md",
}
TARGETS = {
    "tiny-llama": "LlamaForCausalLM",
    "tiny-gemma4": "Gemma4ForCausalLM",
    "tiny-glm4-moe": "Glm4MoeForCausalLM",
    "tiny-glm4-moe-mtp2": "Glm4MoeForCausalLM",
    "tiny-qwen3-5": "Qwen3_5ForCausalLM",
}

# method, target, options, assistant, mean acceptance length at least
LOWEST: list[tuple[str, str, dict[str, Any], str | None, float]] = [
    ("draft_model", "tiny-llama", {"num_assistant_tokens": 5}, "tiny-llama-draft", 2.5),
    ("universal", "tiny-llama", {"num_assistant_tokens": 5}, "tiny-llama-other", 2.0),
    ("early_exit", "tiny-llama", {"assistant_early_exit": 2, "num_assistant_tokens": 5}, None, 2.5),
    ("prompt_lookup", "tiny-llama", {"prompt_lookup_num_tokens": 5}, None, 1.3),
    ("gemma4_assistant", "tiny-gemma4", {"num_assistant_tokens": 4}, "tiny-gemma4-assistant", 2.5),
    ("mtp_layers", "tiny-glm4-moe", {"use_mtp": True, "num_assistant_tokens": 1}, None, 1.7),
    ("mtp_layers", "tiny-glm4-moe-mtp2", {"use_mtp": True, "num_assistant_tokens": 2}, None, 2.4),
    ("mtp_layers", "tiny-qwen3-5", {"use_mtp": True, "num_assistant_tokens": 1}, None, 1.6),
    ("prompt_lookup", "tiny-qwen3-5", {"prompt_lookup_num_tokens": 5}, None, 1.3),
    ("universal", "tiny-qwen3-5", {"num_assistant_tokens": 5}, "tiny-llama-other", 1.5),
    ("draft_model", "tiny-qwen3-5", {"num_assistant_tokens": 5}, "tiny-llama-draft", 1.5),
]


def supported(name: str) -> None:
    """Skip a model that this transformers cannot draft for."""
    if name == "tiny-qwen3-5" and cache_name(tiny.llama()) != "cache":
        pytest.skip("transformers < 5.24 refuses drafts for Qwen3.5")


@pytest.fixture(scope="module")
def bench() -> measure.Bench:
    return measure.Bench(embedded.FOLDER, 1)


def test_names() -> None:
    folders = {path.name for path in embedded.FOLDER.iterdir() if (path / "config.json").exists()}
    assert {*NAMES, *embedded.DRAFTERS} == folders == {name for name, entry in REGISTERED.items() if entry.folder}
    assert set(NAMES) == set(RECIPES) == set(measure.MEASURES)


def test_size() -> None:
    files = [path for path in embedded.FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    tiny_ones = [path for path in files if path.parent.name not in embedded.DRAFTERS]
    assert sum(path.stat().st_size for path in tiny_ones) < 20_000_000


@pytest.mark.parametrize("name", NAMES)
def test_folder_is_complete_and_loads(name: str) -> None:
    folder = embedded.FOLDER / name
    assert {path.name for path in folder.iterdir()} >= FILES
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert all(bool((p == p.half().float()).all()) for p in model.parameters())  # the float16 in the file, exactly
    assert len(tokenizer) == model.config.get_text_config().vocab_size
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
    writer = data.Writer(5)
    for chat in (writer.chat() for _ in range(20)):
        text = tokenizers.chat_text(chat)
        assert tokenizer.apply_chat_template([m._asdict() for m in chat], tokenize=False) == text
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("name", NAMES)
def test_card_and_log(name: str) -> None:
    card = (embedded.FOLDER / name / "README.md").read_text(encoding="utf-8")
    training = Path(measure.__file__).parent
    results = json.loads((training / "results.json").read_text(encoding="utf-8"))[name]
    log = json.loads((training / "log.json").read_text(encoding="utf-8"))[name]
    assert (
        card.startswith("---\nlicense: apache-2.0\n")
        and "| licence | Apache-2.0 |" in card
        and "tools/embedded_models/data.py" in card
    )
    assert not re.search(r"[{}]|/(work|tmp|home)/", card.replace("`{}`", ""))
    for entry in results["measures"]:
        assert f"| {entry['measure']} | {entry['mean_acceptance_length']:.2f} |" in card
    assert f"{log['steps']:,} steps" in card and len(log["log"]) == -(-log["steps"] // 100)
    assert "Licence: Apache-2.0" in REGISTERED[name].card


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What transformers says at its usual level while it loads a model."""
    messages: list[str] = []
    logger, handler, level = (
        logging.getLogger("transformers.modeling_utils"),
        logging.Handler(),
        hf_logging.get_verbosity(),
    )
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    hf_logging.set_verbosity_warning()
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
    hf_logging.set_verbosity(level)


@pytest.mark.parametrize("name", TARGETS)
def test_load_by_name(name: str, said: list[str]) -> None:
    pair = specnb.load(name)
    assert type(pair.target).__name__ == TARGETS[name] and not pair.target.training
    assert pair.card.startswith(REGISTERED[name].card)
    assert not said  # the MTP tensors are not reported as a surprise


def test_other_surprises_are_reported(said: list[str], tmp_path: Path) -> None:
    shutil.copytree(embedded.FOLDER / "tiny-glm4-moe", tmp_path / "odd")
    file = tmp_path / "odd" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"v_head.weight": torch.zeros(1)}, file, metadata={"format": "pt"})
    specnb.load(tmp_path / "odd")  # a part that the model does not have, which changes no text
    assert len(said) == 1 and "v_head.weight" in said[0]
    save_file(tensors | {"model.layers.9.odd": torch.zeros(1)}, file, metadata={"format": "pt"})
    with pytest.raises(specnb.LoadError, match="the config has no place for model.layers.9.odd"):
        specnb.load(tmp_path / "odd")
    assert len(said) == 1


def test_held_out_prompts_are_in_no_training_text() -> None:
    prompts = {prompt for prompt, _ in data.held_out(8)}
    writer = data.Writer(1)
    assert len(prompts) == 8 * len(data.FRESH)
    assert not prompts & {writer.chat()[0].content for _ in range(5000)}
    assert data.Writer(3).chat() == data.Writer(3).chat()


@pytest.mark.parametrize(
    ("method", "target", "options", "assistant", "lowest"), LOWEST, ids=[f"{row[0]}-{row[1]}" for row in LOWEST]
)
def test_method(
    bench: measure.Bench, method: str, target: str, options: dict[str, Any], assistant: str | None, lowest: float
) -> None:
    """The same text as plain greedy decoding, in fewer steps, on three held-out prompts."""
    supported(target)
    pair = specnb.load(target, assistant=assistant)
    results = []
    for prompt, _ in data.held_out(1)[2:]:  # a summary and two edits
        inputs = prompt_inputs(pair.tokenizer, prompt)
        kwargs = {"max_new_tokens": 100, "do_sample": False}
        plain = pair.target.generate(**inputs, **kwargs)
        result = specnb.generate(pair, **inputs, **kwargs, **options)
        assert result.method == method and torch.equal(result.sequences, plain)
        results.append(result)
    assert measure.pooled(results).mean_acceptance_length >= lowest


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_answers_are_readable(bench: measure.Bench, name: str) -> None:
    results = bench.plainly(name)
    assert all(result.finish_reason == "eos" for result in results)
    assert results[0].text.startswith(("Once upon a time there was a ", "There was once a "))
    for result in results:  # no loops: no eight words come twice in a row
        words = result.text.split()
        assert not any(words[i : i + 8] == words[i + 8 : i + 16] for i in range(len(words)))
    assert bench.quality(name)["exact"]["question"] == 1


def test_drafter_is_trained_as_it_is_used() -> None:
    """Training's guesses for all positions at once are those of the drafter, step by step."""
    pair = specnb.load("tiny-gemma4", assistant="tiny-gemma4-assistant")
    prompt = data.held_out(3)[-1][0]  # longer than the window
    ids = prompt_inputs(pair.tokenizer, prompt)["input_ids"]
    assert ids.shape[1] > gemma4.WINDOW + 2
    calls: list[torch.Tensor] = []
    hook = pair.assistant.register_forward_hook(lambda _m, _i, out: calls.append(out.logits[0, -1]))
    result = specnb.generate(
        pair, ids, max_new_tokens=8, num_assistant_tokens=4, assistant_confidence_threshold=0, do_sample=False
    )
    hook.remove()
    step = next(step for step in result.steps if step.drafted)
    known = torch.tensor([[*result.sequences[0, : step.position].tolist(), *step.drafted]])
    with torch.no_grad():
        out = pair.target(known, use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
        embedded_ids = pair.target.get_input_embeddings()(known)
        guesses = gemma4.unrolled(pair.assistant, embedded_ids, out, torch.ones_like(known), len(step.drafted))
    for guess, called in zip(guesses, calls, strict=False):
        torch.testing.assert_close(guess[0, step.position - 1], called, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["tiny-glm4-moe", "tiny-glm4-moe-mtp2", "tiny-qwen3-5"])
def test_mtp_layers_are_trained_as_they_are_stored(name: str) -> None:
    """The layers read from the file guess, over a whole text, what the target says next, and after that."""
    supported(name)
    pair = specnb.load(name)
    mtp = load_mtp(pair.target)
    chat = data.Writer(9).chat("rename")
    batch = tokenizers.batch(pair.tokenizer, [pair.tokenizer(tokenizers.chat_text(chat))["input_ids"]])
    with torch.no_grad():
        out = pair.target(batch.ids, use_cache=False, output_hidden_states=True)
        state = out.hidden_states[-1]
        for depth in (1, 2):
            state = glm4_moe.ahead(mtp, min(depth, len(mtp.layers)) - 1, state, batch, depth)
            answer = (batch.weights == 1)[0, 1 + depth :]
            guesses = mtp._project_to_logits(state).argmax(-1)[0, : -1 - depth]
            assert float((guesses == out.logits.argmax(-1)[0, depth:-1])[answer].float().mean()) > 0.7


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
def test_a_gemma4_drafter_in_another_dtype(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    pair = specnb.load("tiny-gemma4", assistant="tiny-gemma4-assistant")
    pair.target.to(dtypes[0])
    pair.assistant.to(dtypes[1])
    plain = specnb.generate(pair, "Once upon a time", method="plain", max_new_tokens=24, do_sample=False)
    result = specnb.generate(pair, "Once upon a time", num_assistant_tokens=4, max_new_tokens=24, do_sample=False)
    assert result.text == plain.text and result.num_accepted_draft_tokens > 8
