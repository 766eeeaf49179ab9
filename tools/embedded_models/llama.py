"""tiny-llama with early exits, and its two draft models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tools.embedded_models.data import Writer
from tools.embedded_models.fitting import (
    TOKENS,
    agreement,
    cross_entropy,
    divergence,
    fit,
    in_two_parts,
    save,
)
from tools.embedded_models.tokenizers import Batch, batches, chat_text, texts, train_tokenizer

EXITS = (2, 3)


def _model(tokenizer: Any, hidden: int, layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config).train()


def target(folder: Path, steps: Sequence[int]) -> dict[str, Any]:
    """Five layers; every step also teaches one early exit to say what the whole model says (LayerSkip's loss)."""
    tokenizer = train_tokenizer(folder)
    model = _model(tokenizer, 128, 5, 1)

    def loss(batch: Batch, step: int) -> tuple[Tensor, dict[str, float]]:
        out = model(batch.ids, attention_mask=batch.mask, use_cache=False, output_hidden_states=True)
        whole = cross_entropy(out.logits, batch)
        early = model.lm_head(model.model.norm(out.hidden_states[EXITS[step % len(EXITS)]]))
        share = (batch.weights > 0).float() * batch.weights
        taught = divergence(early, out.logits.detach(), share) if step > steps[0] // 5 else cross_entropy(early, batch)
        return whole + 0.4 * taught, {
            "loss": float(whole.detach()),
            "early_exit_agreement": agreement(early, out.logits, batch.weights),
        }

    log = in_two_parts(folder.name, list(model.named_parameters()), tokenizer, 1, loss, steps)
    save(model, tokenizer, folder)
    return log


@torch.no_grad()
def written_by(model: Any, tokenizer: Any, count: int, seed: int) -> list[str]:
    """Chats whose last answer is the model's own greedy one: what its draft models will be asked for."""
    writer, done = Writer(seed), []
    sides = {"padding_side": "left", "return_tensors": "pt", "padding": True}
    prompts = sorted((chat_text(writer.chat()[:1], prompt=True) for _ in range(count)), key=len)
    for i in range(0, count, 64):
        inputs = tokenizer(prompts[i : i + 64], **sides)
        out = model.generate(**inputs, max_new_tokens=160, do_sample=False)
        texts = tokenizer.batch_decode(out, skip_special_tokens=False)
        done += [text.replace(tokenizer.pad_token, "") + "\n" for text in texts]
    torch.manual_seed(seed)
    return [done[i] for i in torch.randperm(count).tolist()]


def mixed(own: list[str], seed: int, share: int) -> Iterator[str]:
    """Training texts, each followed by `share` - 1 of the target's own."""
    fresh, again = texts(seed), cycle(own)
    return chain.from_iterable(chain([text], islice(again, share - 1)) for text in fresh)


def _target(folder: Path) -> tuple[Any, Any]:
    return (
        AutoModelForCausalLM.from_pretrained(folder.parent / "tiny-llama").eval(),
        AutoTokenizer.from_pretrained(folder.parent / "tiny-llama"),
    )


def draft(folder: Path, steps: Sequence[int]) -> dict[str, Any]:
    """Two layers, distilled from the target's distributions, mostly on the target's own answers."""
    teacher, tokenizer = _target(folder)
    own = written_by(teacher, tokenizer, 1536, 21)
    model = _model(tokenizer, 64, 2, 2)

    def loss(batch: Batch, step: int) -> tuple[Tensor, dict[str, float]]:
        with torch.no_grad():
            goal = teacher(batch.ids, attention_mask=batch.mask, use_cache=False).logits
        logits = model(batch.ids, attention_mask=batch.mask, use_cache=False).logits
        taught = divergence(logits, goal, batch.weights)
        return taught, {"divergence": float(taught.detach()), "agreement": agreement(logits, goal, batch.weights)}

    data = batches(tokenizer, 2, TOKENS, mixed(own, 2, 2))
    log = fit(folder.name, list(model.named_parameters()), data, loss, sum(steps), rate=6e-3)
    save(model, tokenizer, folder)
    return log


def other(folder: Path, steps: Sequence[int]) -> dict[str, Any]:
    """Two layers and another tokenizer, taught by texts: the target's own answers, and training texts."""
    teacher, tokenizer = _target(folder)
    own = written_by(teacher, tokenizer, 1536, 21)
    tokenizer = train_tokenizer(folder, other=True)
    model = _model(tokenizer, 96, 2, 3)

    def loss(batch: Batch, step: int) -> tuple[Tensor, dict[str, float]]:
        value = cross_entropy(model(batch.ids, attention_mask=batch.mask, use_cache=False).logits, batch)
        return value, {"loss": float(value.detach())}

    data = batches(tokenizer, 3, TOKENS, mixed(own, 3, 3))
    log = fit(folder.name, list(model.named_parameters()), data, loss, sum(steps), rate=6e-3)
    save(model, tokenizer, folder)
    return log
