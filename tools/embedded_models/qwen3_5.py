"""tiny-qwen3-5: three layers of linear attention, one of full attention and one MTP layer, trained together.

Without GPU kernels, transformers solves a chunk token by token in a Python loop, which makes a training step ten times
as long. In training, `gated_delta_rule` solves a whole chunk at once; the trained model runs on transformers' code.
Muon computes in float32 here: the CPU that trained this model has no bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig
from transformers.modeling_layers import MtpModel
from transformers.models.qwen3_5 import modeling_qwen3_5

from specnb.models.save import mtp_tensors
from tools.embedded_models.fitting import in_two_parts, save, save_half, set_config
from tools.embedded_models.glm4_moe import mtp_loss
from tools.embedded_models.tokenizers import Batch, train_tokenizer


def target(folder: Path, steps: Sequence[int]) -> dict[str, Any]:
    """Train four layers and an MTP layer, whose loss is added to the main loss."""
    tokenizer = train_tokenizer(folder)
    torch.manual_seed(8)
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        num_mtp_layers=1,
        mtp_layer_types=["full_attention"],
    )
    model = AutoModelForCausalLM.from_config(config).train()
    mtp = MtpModel(model, 1).train()
    parameters = [*model.named_parameters(), *mtp.layers.named_parameters()]

    def loss(batch: Batch, step: int) -> tuple[Tensor, dict[str, float]]:
        return mtp_loss(model, mtp, batch)

    check_rule()
    rule = patch.object(modeling_qwen3_5, "torch_chunk_gated_delta_rule", gated_delta_rule)
    with rule, patch.object(Tensor, "bfloat16", Tensor.clone):
        log = in_two_parts(folder.name, parameters, tokenizer, 8, loss, steps)
    save(model, tokenizer, folder)
    file = folder / "model.safetensors"
    save_half(load_file(file) | mtp_tensors(model, mtp), file)
    set_config(folder / "config.json", num_mtp_layers=None, mtp_layer_types=None)
    set_config(folder / "config.json", mtp_num_hidden_layers=1)
    return log


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64, **_: Any
) -> tuple[Tensor, None]:
    """The gated delta rule from a zero state, chunk by chunk (2412.06464, section 3.3).

    Args:
        query, key: `[rows, length, heads, key size]`.
        value: `[rows, length, heads, value size]`.
        g: logarithm of the decay, `[rows, length, heads]`.
        beta: how much of an old value is replaced, `[rows, length, heads]`.
        chunk_size: number of tokens that are solved for at once.

    Returns:
        `[rows, length, heads, value size]`, and no final state.
    """
    rows, length, heads, size = key.shape
    pad = -length % chunk_size

    def chunks(x: Tensor) -> Tensor:  # [rows, heads, chunks, chunk_size, ...]
        x = functional.pad(x, (0, 0) * (x.dim() - 2) + (0, pad)).transpose(1, 2)
        return x.unflatten(2, (-1, chunk_size))

    query, key = (functional.normalize(x, dim=-1, eps=1e-6) for x in (query, key))
    q, k, v = chunks(query * size**-0.5), chunks(key), chunks(value)
    decay, b = chunks(g[..., None])[..., 0].cumsum(-1), chunks(beta[..., None])
    weights = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
    system = torch.eye(chunk_size) + ((k * b) @ k.transpose(-1, -2) * weights).tril(-1)
    right = torch.cat([v * b, k * b * decay.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], size], -1)
    inside = q @ k.transpose(-1, -2) * weights
    state, out = v.new_zeros(rows, heads, size, v.shape[-1]), []
    for c in range(q.shape[2]):
        grown, last = decay[:, :, c].exp()[..., None], decay[:, :, c, -1:]
        new = u[:, :, c] - w[:, :, c] @ state
        out.append((q[:, :, c] * grown) @ state + inside[:, :, c] @ new)
        left = (last - decay[:, :, c]).exp()[..., None]
        state = state * last.exp()[..., None] + (k[:, :, c] * left).transpose(-1, -2) @ new
    return torch.cat(out, 2)[:, :, :length].transpose(1, 2), None


def check_rule() -> None:
    """Compare `gated_delta_rule` with transformers' code on random inputs."""
    q, k, v = torch.randn(3, 2, 150, 4, 32).unbind()
    g, beta = -torch.rand(2, 150, 4), torch.rand(2, 150, 4)
    theirs, _ = modeling_qwen3_5.torch_chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(gated_delta_rule(q, k, v, g, beta)[0], theirs, rtol=1e-4, atol=1e-5)
