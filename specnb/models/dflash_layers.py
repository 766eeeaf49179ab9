"""The layers of a DFlash drafter (arXiv 2602.06036), with the tensor names of released checkpoints.

They hold weights and small parts of the forward; `specnb.drafters.dflash` runs them over the context and a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm


class DFlashAttention(nn.Module):
    """Projections of one attention: queries of the block, keys and values of context and block."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        size, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(size, heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(size, groups * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(size, groups * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)


class DynamicConvolution(nn.Module):
    """DFlash 2: causal convolutions over the block before and after a sublayer, with kernels made from its input.

    A kernel has one weight per channel and tap, and what is added to it depends on the token, once per group of
    channels.
    """

    def __init__(self, size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps, self.groups = taps, size // group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * self.groups, bias=False)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The convolved input `[rows, block, size]` of the sublayer, and the kernels for its output."""
        kernels = self.kernel_projection(states).view(*states.shape[:-1], 2, self.taps, self.groups)
        return self._convolve(states, 0, kernels[..., 0, :, :]), kernels[..., 1, :, :]

    def after(self, states: Tensor, kernels: Tensor) -> Tensor:
        """The convolved output of the sublayer."""
        return self._convolve(states, 1, kernels)

    def _convolve(self, states: Tensor, side: int, kernels: Tensor) -> Tensor:
        grouped = states.view(*states.shape[:-1], self.groups, -1)
        base = self.base_kernel[side].to(states.dtype).view(self.taps, self.groups, -1)
        out = torch.zeros_like(grouped)
        for tap in range(self.taps):
            shifted = pad(grouped, (0, 0, 0, 0, tap, 0))[:, : grouped.shape[1]]
            out = out + shifted * (base[tap] + kernels[:, :, tap, :, None])
        return out.flatten(-2)


class CandidateSelector(nn.Module):
    """DFlash 2: scores the best tokens of each position together with the token before them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k = int(config.selector_top_k)
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, logits: Tensor, projected: Tensor, token: int) -> Tensor:
        """The scores of one position, `[vocab]`: those of its `top_k` best tokens, minus infinity for all others.

        Args:
            logits: `[vocab]`.
            projected: the position's state after `hidden_projection`, `[rank]`.
            token: the one before.
        """
        logits = logits.to(projected.device)
        best, ids = logits.topk(min(self.top_k, logits.shape[-1]))
        # embeddings may be padded beyond the vocabulary of the codebooks, but no token is there
        edges = self.successor_codebook[ids.clamp(max=len(self.successor_codebook) - 1)]
        joint = edges @ (self.predecessor_codebook[token] * projected)
        return torch.full_like(logits, -torch.inf).scatter(0, ids, best + joint.to(best.dtype))


class DFlashLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DFlashAttention(config)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)
        if config.conv_kernel_size:
            shape = config.hidden_size, config.conv_kernel_size, config.conv_group_size
            self.attention_conv, self.mlp_conv = DynamicConvolution(*shape), DynamicConvolution(*shape)
