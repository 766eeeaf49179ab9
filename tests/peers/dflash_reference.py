"""What the reference implementations of DFlash draft with the checkpoints of `tests/dflash_checkpoints.py`.

    python tests/peers/dflash_reference.py zlab
    python tests/peers/dflash_reference.py speculators

write `tests/results/dflash-*.json`: per checkpoint, the ids and the best logits of the blocks after some lengths of a
text. The first needs torch, transformers 5.15 or newer, and `pip install --no-deps dflash==0.1.0`. The second needs an
environment of its own:

    pip install torch==2.13.0 transformers==5.19.0
    pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
    pip install pydantic pydantic-settings loguru typer rich httpx openai aiohttp psutil datasets click
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import dflash_checkpoints as made


def rounded(values: torch.Tensor) -> list[float]:
    """The best logits, before a selector, to four digits."""
    return [round(value, 4) for value in values.tolist()]


@torch.no_grad()
def zlab(folder: Path) -> dict[str, Any]:
    """z-lab's package: what each block drafts, and a whole generation with the tokens that each step produced."""
    from dflash import model as reference

    reference._cuda_time = lambda: 0.0
    target, found = made.target(), {}
    for name, options in made.ZLAB.items():
        kind = reference.DFlash2DraftModel if "selector_rank" in options else reference.DFlashDraftModel
        strong, weak = (
            kind.from_pretrained(made.zlab(folder / f"{name} {damp}", target, options, damp=damp)).eval()
            for damp in (made.STRONG, made.WEAK)
        )
        draft, drafted, best = strong, [], []
        for text in made.texts():
            ids = torch.tensor([text])
            states = target(ids[:, :-1], output_hidden_states=True).hidden_states
            block = torch.full((1, draft.block_size), draft.mask_token_id)
            block[:, 0] = ids[:, -1]
            scale = float(reference._draft_value(draft.config, "input_embedding_scale", 1.0))
            hidden = draft(
                target_hidden=reference.extract_context_feature(states, draft.target_layer_ids),
                noise_embedding=reference._raw_input_embeddings(target, block, scale),
                position_ids=torch.arange(len(text) - 1 + draft.block_size)[None],
            )[:, 1:]
            if isinstance(draft, reference.DFlash2DraftModel):
                tokens = draft.propose(hidden, block[:, 0], target.lm_head, 0.0)[0]
            else:
                tokens = draft.compute_logits(hidden, target.lm_head).argmax(-1)
            drafted.append(tokens[0].tolist())
            best.append(rounded(draft.compute_logits(hidden, target.lm_head)[0].amax(-1)))
        run = reference.dflash_generate(weak, target, made.PROMPT, 60, None, return_stats=True)
        found[name] = {
            "drafted": drafted,
            "best": best,
            "produced": run.acceptance_lengths,
            "ids": run.output_ids[0].tolist(),
        }
    return found


@torch.no_grad()
def speculators(folder: Path) -> dict[str, Any]:
    """speculators: what each block drafts, with every length of the text as an anchor."""
    from speculators.models.dflash import DFlashDraftModel
    from speculators.models.dflash2 import DFlash2DraftModel

    target, found = made.target(), {}
    target.save_pretrained(folder / "target")
    for name, options in made.SPECULATORS.items():
        place = made.speculators(folder / name, target, options, damp=made.STRONG, verifier=str(folder / "target"))
        config = json.loads((place / "config.json").read_text())
        kind = DFlash2DraftModel if config["speculators_model_type"] == "dflash2" else DFlashDraftModel
        read = kind.config_class.from_pretrained(place)
        read.transformer_layer_config._attn_implementation = "eager"
        draft = kind.from_pretrained(place, config=read).eval()
        draft.load_verifier_weights()
        drafted, best = [], []
        for text in made.texts():
            ids = torch.tensor([text + [0] * made.BLOCK])  # no anchor may be in the last block of a text
            states = target(ids, output_hidden_states=True).hidden_states
            mask = torch.zeros(ids.shape)
            mask[0, len(text) - 1] = 1  # the only anchor
            hidden, logits, *_ = draft._backbone_forward(
                hidden_states=torch.cat([states[i] for i in config["aux_hidden_state_layer_ids"]], -1),
                input_ids=ids,
                loss_mask=mask,
                verifier_last_hidden_states=states[-1],
                document_ids=torch.zeros(ids.shape, dtype=torch.long),
                max_anchors=1,
            )
            if not options.get("sample_from_anchor"):
                hidden, logits = hidden[:, 1:], logits[:, 1:]
            if kind is DFlash2DraftModel:
                tokens, before = [], ids[:, len(text) - 1]
                for i in range(logits.shape[1]):
                    candidates, scores = draft.candidate_selector.select(logits[:, i], hidden[:, i], before)
                    before = candidates.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
                    tokens.append(int(before))
            else:
                tokens = logits[0].argmax(-1)
                tokens = (tokens + draft.d2t[tokens] if draft.use_draft_vocab else tokens).tolist()
            drafted.append(tokens)
            best.append(rounded(logits[0].amax(-1)))
        found[name] = {"drafted": drafted, "best": best}
    return found


if __name__ == "__main__":
    which = sys.argv[1]
    with TemporaryDirectory() as folder:
        recorded = {"zlab": zlab, "speculators": speculators}[which](Path(folder))
    out = Path(__file__).parents[1] / "results" / f"dflash-{which}.json"
    out.write_text(json.dumps(recorded, separators=(",", ":")) + "\n", encoding="utf-8")
    print(out, {name: one["drafted"][0] for name, one in recorded.items()})
