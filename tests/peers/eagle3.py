"""What speculators 0.9.0 drafts with the checkpoints of `tests/eagle3_reference.py`: writes `results/eagle3.json`.

It needs an environment of its own, since that library wants an older transformers:

    pip install torch==2.13.0 transformers==5.19.0
    pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
    pip install pydantic pydantic-settings loguru typer rich httpx openai aiohttp psutil datasets click
    python tests/peers/eagle3.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

sys.path.insert(0, str(Path(__file__).parent.parent))
from eagle3_reference import D2T, DRAFT_VOCAB, EXPECTED, IDS, LAYERS, SHAPE, STEPS, T2D, VARIANTS, fill


def drafter(folder: Path, given: dict[str, Any]) -> Any:
    """The library's drafter for a target in `folder`."""
    flags = dict(given)
    kind, layers = flags.pop("kind", "llama"), flags.pop("layers", 1)
    target_layers = flags.pop("target_layers", LAYERS)
    layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](num_hidden_layers=layers, **SHAPE)
    layer._attn_implementation = "eager"  # the default is flex attention
    verifier = VerifierConfig(name_or_path=str(folder), architectures=["LlamaForCausalLM"])
    methods = [GreedyTokenProposalConfig(speculative_tokens=STEPS)]
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=target_layers,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=methods, default_proposal_method="greedy", verifier=verifier
        ),
        **flags,
    )
    model = Eagle3DraftModel(config)
    model.load_vocab_mappings(T2D, D2T)
    model.load_verifier_weights()
    embeddings = model.embed_tokens.weight.clone()
    fill(model)
    model.embed_tokens.weight.data = embeddings  # the target's
    return model


def main(keep: Path | None = None) -> None:
    """Draft at every position of IDS with each variant; `keep` is a folder for the checkpoints."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        target = fill(LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, tie_word_embeddings=False, **SHAPE)))
        target.save_pretrained(folder / "target")
        for name, given in VARIANTS.items():
            model, seen = drafter(folder / "target", given), []
            model.lm_head.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out[0]))
            with torch.no_grad():
                states = target(torch.tensor([IDS]), output_hidden_states=True).hidden_states
                aux = torch.cat([states[i] for i in given.get("target_layers", LAYERS)], -1)[:, :-1]
                ids, n = torch.tensor([IDS[1:]]), len(IDS) - 1
                documents = torch.zeros(1, n, dtype=torch.long)
                drafted = model(hidden_states=aux, input_ids=ids, document_ids=documents, ttt_steps=STEPS)
            found[name] = {
                "drafted": [step[0].tolist() for step in drafted],
                "logits": [[round(x, 4) for x in step[10].tolist()] for step in seen],
            }
            if keep:
                model.save_pretrained(keep / name)
    EXPECTED.write_text(json.dumps(found).replace("}, ", "},\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
