"""tiny-glm4-moe and tiny-glm4-moe-mtp2: mixture of experts and one or two MTP layers, trained together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Glm4MoeConfig
from transformers.modeling_layers import MtpModel

from tools.embedded_models.fitting import (
    agreement,
    cross_entropy,
    in_two_parts,
    save,
    save_half,
    set_config,
)
from tools.embedded_models.tokenizers import Batch, train_tokenizer

BALANCE = 1e-3
"""Step of the bias that evens out the experts' shares (DeepSeek-V3's balancing without a loss)."""


DEPTH = 2
"""How many tokens beyond the next one the MTP layers learn to guess; a single layer goes again over what it said."""


def target(folder: Path, steps: Sequence[int], layers: int = 1) -> dict[str, Any]:
    """Four layers, three of them with eight experts, and MTP layers whose loss is added to the main one."""
    tokenizer = train_tokenizer(folder)
    torch.manual_seed(6)
    config = Glm4MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        moe_intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        use_qk_norm=True,
        num_mtp_layers=layers,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").train()
    mtp = mtp_layers(model, layers)
    for module in [*model.modules(), *mtp.layers.modules()]:
        if hasattr(module, "e_score_correction_bias"):
            module.register_forward_hook(_balance)
    parameters = [*model.named_parameters(), *mtp.layers.named_parameters()]

    def loss(batch: Batch, step: int) -> tuple[Tensor, dict[str, float]]:
        return mtp_loss(model, mtp, batch)

    log = in_two_parts(folder.name, parameters, tokenizer, 6, loss, steps)
    save(model, tokenizer, folder)
    add_mtp(folder, mtp)
    return log


def mtp_loss(model: Any, mtp: Any, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """The main loss and a share of that of each depth, and how often the MTP layers agree with the model."""
    out = model(batch.ids, attention_mask=batch.mask, use_cache=False, output_hidden_states=True)
    main = cross_entropy(out.logits, batch)
    state = out.hidden_states[-1]
    total, parts = main, {"loss": float(main.detach())}
    for depth in range(1, DEPTH + 1):
        state = ahead(mtp, min(depth, len(mtp.layers)) - 1, state, batch, depth)
        logits = mtp._project_to_logits(state)
        taught = cross_entropy(logits, batch, 1 + depth)
        total = total + 0.3**depth * taught
        goal, weights = out.logits[:, depth:-1], batch.weights[:, 1 + depth :]
        parts[f"agreement_{depth}"] = agreement(logits[:, : goal.shape[1]], goal, weights)
    return total, parts


def mtp_layers(model: Any, count: int) -> Any:
    """New MTP layers for `model`, mixtures of experts like its own last layers."""
    dense, model.config.first_k_dense_replace = model.config.first_k_dense_replace, 0
    mtp = MtpModel(model, count).train()
    model.config.first_k_dense_replace = dense
    return mtp


def ahead(mtp: Any, layer: int, states: Tensor, batch: Batch, depth: int) -> Tensor:
    """An MTP layer over a whole batch: slot s reads `states[:, s]` and token s + `depth`, and predicts the next."""
    width = batch.ids.shape[1]
    embedded = mtp.embed_tokens(batch.ids.roll(-depth, 1))
    at = (torch.arange(width) + depth)[None].expand(len(batch.ids), -1)
    mask = batch.mask[:, None, None, :].bool() & torch.ones(width, width).tril().bool()
    angles = mtp.rotary_emb(embedded, position_ids=at)
    out: Tensor = mtp.layers[layer](embedded, states, angles, mask, at, None)
    return out


def _balance(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    """After a pass: raise the bias of the experts chosen less than others."""
    chosen = torch.bincount(output[2].flatten(), minlength=router.num_experts).float()
    router.e_score_correction_bias += BALANCE * torch.sign(chosen.mean() - chosen)


def add_mtp(folder: Path, mtp: Any) -> None:
    """Put the MTP layers' tensors into a saved model under the names that the released checkpoints have."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    first = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    for name, tensor in mtp.layers.state_dict().items():
        number, _, rest = name.partition(".")
        base = f"model.layers.{first + int(number)}."
        rest = rest.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
        if rest.endswith("experts.gate_up_proj"):  # one tensor in memory, one for every expert in the file
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                tensors[f"{base}mlp.experts.{e}.gate_proj.weight"] = gate
                tensors[f"{base}mlp.experts.{e}.up_proj.weight"] = up
        elif rest.endswith("experts.down_proj"):
            for e, down in enumerate(tensor):
                tensors[f"{base}mlp.experts.{e}.down_proj.weight"] = down
        else:
            tensors[base + rest] = tensor
    save_half({name: tensor.clone() for name, tensor in tensors.items()}, file)
    set_config(folder / "config.json", num_mtp_layers=None)
    set_config(folder / "config.json", num_nextn_predict_layers=len(mtp.layers))
