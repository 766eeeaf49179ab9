"""DFlash: blocks are those of the reference implementations, whatever was rejected before, and no text changes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dflash_checkpoints as made
import pytest
import tiny
import torch
from checks import STEADY, consistent, padded, plain, spec
from test_mtp import drafting
from torch import Tensor
from transformers import PreTrainedModel

from specnb.models.dflash import load_dflash, settings_of

X = made.PROMPT
PROMPTS = [X, tiny.ids(3, 21), tiny.ids(4, 1)]
FORMATS = {"zlab": made.ZLAB, "speculators": made.SPECULATORS}
CASES = [(form, name) for form, variants in FORMATS.items() for name in variants]
RESULTS = Path(__file__).parent / "results"
_FOLDER = TemporaryDirectory(prefix="dflash-")


def load(folder: Path) -> PreTrainedModel:
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return load_dflash(folder.name, str(folder), values)


@cache
def drafter(form: str, name: str, damp: float = made.WEAK) -> PreTrainedModel:
    build = getattr(made, form)
    return load(build(Path(_FOLDER.name) / f"{form} {name} {damp}", made.target(), FORMATS[form][name], damp=damp))


def recorded(form: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"dflash-{form}.json").read_text(encoding="utf-8"))
    return found


# ---------------------------------------------------------------- the reference implementations
@pytest.mark.parametrize(("form", "name"), CASES)
def test_blocks_are_those_of_the_reference(form: str, name: str) -> None:
    """After texts short of the window, at it and beyond: the same ids, and the same best logits."""
    expected, draft = recorded(form)[name], drafter(form, name, made.STRONG)
    assert len({tuple(block) for block in expected["drafted"]}) > 3
    for text, tokens, best in zip(made.texts(), expected["drafted"], expected["best"], strict=True):
        with drafting() as drafts:
            spec(made.target(), torch.tensor([text[:-1]]), max_new_tokens=8, assistant_model=draft, **STEADY)
        ids, drafted, logits = drafts[0]
        assert (ids, drafted) == (text, tokens)
        if name != "dflash 2":  # recorded before its selector
            assert torch.allclose(logits.amax(-1), torch.tensor(best), atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", made.ZLAB)
def test_steps_are_those_of_the_reference(name: str) -> None:
    """z-lab's own loop accepts the same number of tokens in each step, up to the end, where it shortens its blocks."""
    result = spec(made.target(), X, max_new_tokens=60, assistant_model=drafter("zlab", name), **STEADY)
    consistent(result)
    counts, total = recorded("zlab")[name]["produced"], 0
    for step, count in zip(result.steps[1:], counts, strict=False):
        if (total := total + count) > 60 - made.BLOCK:
            break
        assert len(step.emitted) == count
    assert list(result.ids) == recorded("zlab")[name]["ids"][X.shape[1] :] == plain(made.target(), X, max_new_tokens=60)


# ---------------------------------------------------------------- proposals
@torch.no_grad()
def clean(model: PreTrainedModel, draft: Any, ids: list[int], drafted: list[int]) -> Tensor:
    """Logits `[k, vocab]` of the first tokens of the block after `ids`, computed from nothing, one query at a time."""
    settings, anchor, size = settings_of(draft), len(ids) - 1, draft.config.hidden_size
    states = model(torch.tensor([ids[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
    context = draft.hidden_norm(draft.fc(torch.cat([states[i][0] for i in settings.layers], -1)))
    block = torch.tensor([ids[-1], *[settings.mask_token_id] * (settings.block_size - 1)])
    x = model.get_input_embeddings().weight[block]
    at = torch.arange(anchor + settings.block_size)
    cos, sin = (part[0] for part in draft.rotary_emb(x, at[None]))

    def heads(projected: Tensor) -> Tensor:
        return projected.view(len(projected), -1, 8).transpose(0, 1)

    def turned(one: Tensor, where: Tensor) -> Tensor:
        return one * cos[where] + torch.cat([-one[..., 4:], one[..., :4]], -1) * sin[where]

    for layer, window, causal in zip(draft.layers, settings.windows, settings.causal, strict=True):
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        both = torch.cat([context, normed])
        keys = turned(attention.k_norm(heads(attention.k_proj(both))), at).repeat_interleave(2, 0)
        values = heads(attention.v_proj(both)).repeat_interleave(2, 0)
        queries = turned(attention.q_norm(heads(attention.q_proj(normed))), at[anchor:])
        own = at[anchor:, None]
        seen = at <= own if causal else at >= 0
        if window is not None:
            seen = seen & ((anchor if settings.window_from_anchor else own) - at < window)
        scores = (queries @ keys.mT * 8**-0.5).masked_fill(~seen, -torch.inf)
        out = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
        x = x + attention.o_proj(out)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    states = draft.norm(x)[settings.first :][: len(drafted)]
    head = getattr(draft, "lm_head", None)
    assert states.shape[-1] == size
    if head is None:
        return model.get_output_embeddings()(states)  # type: ignore[no-any-return]
    return head(states)  # type: ignore[no-any-return]


_SLOW = pytest.mark.slow
EXACT = [
    pytest.param("zlab", "full", marks=_SLOW),
    ("zlab", "sliding"),
    ("zlab", "sliding, not causal"),
    ("speculators", "sliding"),
    pytest.param("speculators", "sliding, not causal", marks=_SLOW),
    pytest.param("speculators", "draft vocabulary", marks=_SLOW),
    pytest.param("speculators", "from the anchor", marks=_SLOW),
]


@pytest.mark.parametrize(("form", "name"), EXACT)
def test_blocks_equal_those_computed_from_nothing(form: str, name: str) -> None:
    """In every step, after acceptances and rejections of every length, short of the window and far beyond it."""
    lengths, cut = set(), set()
    draft = drafter(form, name)
    for prompt, k in ((X, 6), (PROMPTS[2], 3)):
        how = {"assistant_model": draft, "num_assistant_tokens": k, "prefill_chunk_size": 5, **STEADY}
        with drafting() as drafts:
            result = spec(made.target(), prompt, max_new_tokens=36, **how)
        for ids, tokens, logits in drafts:
            expected = clean(made.target(), draft, ids, tokens)
            assert torch.allclose(logits, expected, atol=1e-5, rtol=1e-5), (len(ids), tokens)
        lengths |= {len(ids) for ids, _, _ in drafts}
        cut |= {step.accepted for step in result.steps}
    assert min(lengths) < made.WINDOW < max(lengths) / 4
    assert {0, 1} <= cut
    assert max(cut) > 2 or not settings_of(draft).first


@pytest.mark.parametrize(("form", "name"), [("zlab", "sliding"), ("speculators", "draft vocabulary")])
def test_blocks_of_rows_equal_those_computed_from_nothing(form: str, name: str) -> None:
    """Rows of different lengths, which end at different times, and a schedule of its own for each."""
    draft = drafter(form, name)
    free = [plain(made.target(), prompt, max_new_tokens=30) for prompt in PROMPTS]
    ids, mask = padded(PROMPTS)
    how = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0}
    with drafting() as drafts:
        result = spec(
            made.target(),
            ids,
            attention_mask=mask,
            max_new_tokens=30,
            eos_token_id=[free[0][4], free[1][15]],
            assistant_model=draft,
            **how,
        )
    for text, tokens, logits in drafts:
        expected = clean(made.target(), draft, text, tokens)
        assert torch.allclose(logits, expected, atol=1e-5, rtol=1e-5), (len(text), tokens)
    ends = sorted(len(row.ids) for row in result.rows)
    assert ends[0] < ends[-1]
    for row, expected_ids in zip(result.rows, free, strict=True):
        assert list(row.ids) == expected_ids[: len(row.ids)]


def test_the_reference_tells_stale_keys_apart() -> None:
    """One state too many, one too few, or one of another token move the logits by far more than the tolerance."""
    draft, ids = drafter("zlab", "full"), [*X[0].tolist(), *plain(made.target(), X, max_new_tokens=20)]
    right = clean(made.target(), draft, ids, [5, 5])
    for wrong in ([*ids[:-1], ids[-2], ids[-1]], [*ids[:-2], ids[-1]], [*ids[:-2], 9, ids[-1]]):
        assert (clean(made.target(), draft, wrong, [5, 5]) - right).abs().max() > 1e-3
