"""tiny-gemma4, and its drafter tiny-gemma4-assistant, trained the way it is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma4AssistantConfig, Gemma4TextConfig

from tools.embedded_models.fitting import (
    TOKENS,
    agreement,
    cross_entropy,
    divergence,
    fit,
    in_two_parts,
    save,
)
from tools.embedded_models.llama import mixed, written_by
from tools.embedded_models.tokenizers import Batch, batches, train_tokenizer

WINDOW = 64
DEPTH = 4
"""How many tokens ahead the drafter learns to guess."""


def _config(tokenizer: Any, **sizes: Any) -> Gemma4TextConfig:
    return Gemma4TextConfig(
        vocab_size=len(tokenizer),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        sliding_window=WINDOW,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )


def target(folder: Path, steps: Sequence[int]) -> dict[str, Any]:
    """Six layers, sliding and full; the last two read keys and values of earlier ones; per-layer input embeddings."""
    tokenizer = train_tokenizer(folder)
    torch.manual_seed(4)
    config = _config(
        tokenizer,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=len(tokenizer),
        final_logit_softcapping=30.0,
    )
    model = AutoModelForCausalLM.from_config(config).train()

    def loss(batch: Batch, step: int) -> tuple[Tensor, dict[str, float]]:
        value = cross_entropy(model(batch.ids, attention_mask=batch.mask, use_cache=False).logits, batch)
        return value, {"loss": float(value.detach())}

    log = in_two_parts(folder.name, list(model.named_parameters()), tokenizer, 4, loss, steps)
    save(model, tokenizer, folder)
    return log


def unrolled(assistant: Any, embedded: Tensor, out: Any, real: Tensor, depth: int) -> list[Tensor]:
    """The drafter's logits, started from every position t at once: item i holds the guesses of token t + 1 + i.

    It reads the token at t + i beside the target's state at t - 1 (then its own projected state), at position t, and
    sees the target's keys and values before t. `embedded` are the target's embeddings, `out` is the
    target's output, `real` marks the tokens that are not padding.
    """
    rows, width = real.shape
    at = torch.arange(width)
    ago = at[:, None] - at  # how far back a key lies from where the drafter stands
    behind = (ago > 0) | (at == 0)[:, None] & (at == 0)  # the first position has nothing behind it; any key will do
    seen = real[:, None, None, :].bool() & behind
    masks = {"full_attention": seen, "sliding_attention": seen & (ago <= WINDOW + 1)}
    state = out.hidden_states[-1].roll(1, 1)
    guesses = []
    for i in range(depth):
        inputs = assistant.pre_projection(torch.cat([embedded.roll(-i, 1), state], -1))
        hidden = assistant.model(
            inputs_embeds=inputs,
            attention_mask=masks,
            position_ids=at.expand(rows, -1),
            use_cache=False,
            shared_kv_states=out.shared_kv_states,
            output_hidden_states=True,
        ).last_hidden_state
        guesses.append(assistant.lm_head(hidden))
        state = assistant.post_projection(hidden)
    return guesses


def assistant(folder: Path, steps: Sequence[int]) -> dict[str, Any]:
    """Four layers that share the target's keys and values, taught its distributions several tokens deep."""
    place = folder.parent / "tiny-gemma4"
    teacher, tokenizer = AutoModelForCausalLM.from_pretrained(place).eval(), AutoTokenizer.from_pretrained(place)
    own = written_by(teacher, tokenizer, 1024, 41)
    torch.manual_seed(5)
    text = _config(
        tokenizer,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_kv_shared_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        use_double_wide_mlp=False,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
    )
    config = Gemma4AssistantConfig(text_config=text.to_dict(), backbone_hidden_size=teacher.config.hidden_size)
    model = AutoModelForCausalLM.from_config(config).train()

    def loss(batch: Batch, step: int) -> tuple[Tensor, dict[str, float]]:
        with torch.no_grad():
            out = teacher(
                batch.ids,
                attention_mask=batch.mask,
                use_cache=False,
                output_hidden_states=True,
                return_shared_kv_states=True,
            )
            embedded = teacher.get_input_embeddings()(batch.ids)
        total, parts = torch.zeros(()), {}
        for i, guess in enumerate(unrolled(model, embedded, out, batch.mask, DEPTH)):
            last = batch.ids.shape[1] - 1 - i  # what is guessed must lie inside the text
            guess, goal, weights = guess[:, 1:last], out.logits[:, 1 + i : last + i], batch.weights[:, 2 + i :]
            taught = divergence(guess, goal, weights)
            total = total + 0.8**i * taught
            parts[f"agreement_{i + 1}"] = agreement(guess, goal, weights)
        return total, {"divergence": float(total.detach()), **parts}

    log = fit(
        folder.name, list(model.named_parameters()), batches(tokenizer, 5, TOKENS, mixed(own, 5, 2)), loss, sum(steps)
    )
    model.generation_config.num_assistant_tokens = (
        DEPTH  # for transformers, which would draft 20; specnb reads nothing here
    )
    model.generation_config.num_assistant_tokens_schedule = "constant"
    save(model, tokenizer, folder)
    return log
