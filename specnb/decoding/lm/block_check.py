"""A check before the first token: does a model give the same logits for a block of tokens as for single tokens?

It is needed for models of families that were not tested, and for models that were changed. A few tokens are run as a
block, with a rejected draft before, and one by one as transformers runs them. If the logits differ, the model is
rejected.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb import compat
from specnb.decoding.contracts import Row, Unsupported
from specnb.decoding.lm.base import LM, has_learned_positions, max_positions, model_device
from specnb.decoding.lm.cached_lm import check_graphs
from specnb.decoding.lm.create import check_target, create_lm, select_row_inputs
from specnb.decoding.lm.model_inputs import PER_TOKEN, CacheSize, PreparedInputs
from specnb.decoding.lm.prepared_lm import prepare_arguments
from specnb.runtime.module_view import forward_replaced

TOKENS = 4  # in the block: one committed token and drafted ones
_MAX_PROMPT = 48  # tokens used of a prompt that is only text
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF = 5e-2
_KNOWN_MODULES = ("torch.nn.modules.", "transformers.activations", "transformers.models.", "transformers.pytorch_utils")
_PASSED: WeakKeyDictionary[PreTrainedModel, set[Any]] = WeakKeyDictionary()
# Layers and weights whose activations are quantized with a scale for all tokens of a pass.
_DYNAMIC_QUANTIZATION = ("torch.ao.nn.quantized.dynamic", "LinearActivationQuantizedTensor", "DynamicActivation")


def check_blocks(model: PreTrainedModel, rows: Sequence[Row], prepared: PreparedInputs, rolls_back: bool) -> None:
    """Check that `model` gives the same logits for blocks as for single tokens, once per model and kind of input.

    Args:
        rows: the prompts. Two of them are used, or all if the inputs cannot be separated by row.
        prepared: what `generate()` prepared for them.
        rolls_back: whether drafts will be rejected; otherwise tokens are run one by one.

    Raises:
        Unsupported: the logits differ, or the model cannot be run this way.
    """
    check_graphs(model, prepared.inputs)
    check_target(model, rows, prepared, rolls_back)
    if rolls_back or len(rows) > 1:
        check_activations(model)
    image = bool(prepared.inputs.extras)
    if is_tested(model, image):
        return
    state = image, rolls_back, len(rows) > 1, tuple(type(module) for module in model.modules())
    if state in _PASSED.setdefault(model, set()):
        return
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            difference, reason = _difference(model, rows, prepared, rolls_back), ""
    except Unsupported:
        raise
    except Exception as error:  # of any kind: the model is unknown code
        difference, reason = float("inf"), f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    if reason or not difference <= _TOLERANCE.get(model.dtype, _HALF):
        name, what = type(model).__name__, reason or f"logits differ by {difference:.1g} of their size"
        raise Unsupported(
            f"{name} gives another result for a block of tokens than for the same tokens one by one ({what}), so "
            "drafts cannot be verified exactly: use method='plain', or another model."
            if rolls_back
            else f"{name} cannot be decoded as transformers decodes it ({what}). Use transformers' own generate() for "
            "this."
        )
    _PASSED[model].add(state)


def check_draft(model: PreTrainedModel, lm: LM, rows: Sequence[Row]) -> None:
    """Check that a draft model can read prompts without the images that came with them.

    Args:
        lm: the draft model, following `rows`; it reads the prompts here.

    Raises:
        Unsupported: it cannot.
    """
    try:
        lm.logits(rows, [[] for _ in rows], [1 for _ in rows])
    except Exception as error:  # of any kind: the model is unknown code
        raise Unsupported(
            f"the draft model ({type(model).__name__}) cannot read this prompt without its image "
            f"({' '.join(str(error).split())[:160]}): use a draft model for text, or another method."
        ) from error


def check_activations(model: PreTrainedModel) -> None:
    """Raise Unsupported for layers in which a token's result depends on the other tokens of the pass."""
    for name, module in model.named_modules():
        weight = vars(module).get("_parameters", {}).get("weight")
        inner = Tensor if type(weight) is nn.Parameter else type(getattr(weight, "data", None))
        if _quantizes_blocks(type(module).__module__, type(weight).__name__, inner.__name__):
            raise Unsupported(
                f"{name} ({type(module).__name__}, dynamic quantisation) scales all tokens of a pass together, so a "
                "token computed in a block is another one than computed alone. Use the model as it was before "
                "quantize_dynamic(), weight-only quantisation, or method='plain' with one prompt at a time."
            )


def _difference(model: PreTrainedModel, rows: Sequence[Row], prepared: PreparedInputs, rolls_back: bool) -> float:
    """The largest difference of logits between blocks and single tokens, relative to the largest logit."""
    if len(rows) == 1 or all(name in PER_TOKEN for name in prepared.inputs.extras):
        inputs_by_row = [
            prepared.inputs if len(rows) == 1 else select_row_inputs(model, prepared.inputs, r, row)
            for r, row in enumerate(rows)
        ][:2]
        whole = bool(prepared.inputs.extras) or prepared.inputs.position_ids is not None
        end = _max_prompt_length(model) if whole else min(_MAX_PROMPT, _max_prompt_length(model))
        ids = [row.ids[:end] for row in rows[:2]]
        expected = [
            _reference_logits(model, torch.tensor([row]), prepare_arguments(model, row, **inputs.with_positions()))[0]
            for row, inputs in zip(ids, inputs_by_row, strict=True)
        ]
        prepared = PreparedInputs(inputs=prepared.inputs)
    else:  # images, for example: the batch as it was given
        ids = [row.ids for row in rows]
        expected = _reference_logits(model, prepared.prompts, prepared.arguments)
        prepared = PreparedInputs(inputs=prepared.inputs)
    copies = [_make_row(i, row) for i, row in enumerate(ids)]
    lm = create_lm(model, copies, CacheSize(max(map(len, ids)) + 8), prepared=prepared, rolls_back=rolls_back)
    tokens = [logits[:-1].argmax(-1).tolist() for logits in expected]
    found = [[logits] for logits in lm.logits(copies, [[] for _ in copies], [1 for _ in copies])]
    if rolls_back:
        for row, new in zip(copies, tokens, strict=True):
            row.ids.append(new[0])
        num_logits = [TOKENS for _ in copies]
        lm.logits(copies, [[(token + 1) % lm.vocab_size for token in new[1:]] for new in tokens], num_logits)
        for blocks, logits in zip(found, lm.logits(copies, [new[1:] for new in tokens], num_logits), strict=True):
            blocks.append(logits)
    else:
        for n in range(TOKENS):
            for row, new in zip(copies, tokens, strict=True):
                row.ids.append(new[n])
            for blocks, logits in zip(found, lm.logits(copies, [[] for _ in copies], [1 for _ in copies]), strict=True):
                blocks.append(logits)
    return max(
        _relative_difference(reference, torch.cat(blocks)) for reference, blocks in zip(expected, found, strict=True)
    )


def _max_prompt_length(model: PreTrainedModel) -> int:
    """How long a prompt may be so that the tokens after it have positions."""
    config = model.config.get_text_config(decoder=True)
    limit = max_positions(config)
    return limit - TOKENS if limit is not None and has_learned_positions(config) else sys.maxsize


def _reference_logits(model: PreTrainedModel, prompts: Tensor, arguments: Mapping[str, Any]) -> list[Tensor]:
    """Logits `[TOKENS + 1, vocab]` of each row after its prompt and each next token, decoded as transformers does."""
    ids, arguments = prompts.to(model_device(model)), copy.deepcopy(dict(arguments))
    logits = []
    for i in range(TOKENS + 1):
        inputs = model.prepare_inputs_for_generation(
            ids, next_sequence_length=1 if i else None, is_first_iteration=not i, **arguments
        )
        out = model(**inputs, return_dict=True)
        arguments = compat.update_model_kwargs(model, out, arguments)
        logits.append(out.logits[:, -1].clone())
        ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True).to(ids.device)], -1)
    return list(torch.stack(logits, 1))


def _relative_difference(expected: Tensor, found: Tensor) -> float:
    """The largest difference relative to the largest expected number; infinite if shapes or infinities differ."""
    expected, found = expected.double(), found.double()
    if expected.shape != found.shape or not torch.equal(expected.isfinite(), found.isfinite()):
        return float("inf")
    finite = expected.isfinite()
    if not finite.any():
        return 0.0
    return float((expected - found)[finite].abs().max() / expected[finite].abs().max().clamp(min=1e-6))


def _make_row(index: int, ids: Sequence[int]) -> Row:
    from specnb.decoding.distributions import Processors
    from specnb.decoding.schedules import Constant

    return Row(index, list(ids), TOKENS, torch.Generator(), Processors(), Constant(0))


@cache
def _quantizes_blocks(*names: str) -> bool:
    """Whether a module of these names quantizes activations with one scale for all tokens of a pass."""
    return any(name.startswith(dynamic) for name in names for dynamic in _DYNAMIC_QUANTIZATION)


# ---- models that need no check
@cache
def tested_families() -> dict[str, Any]:
    """The model types that `tests/families` found correct, with text and with an image.

    Empty if they were tested with another minor version of transformers.
    """
    listed = resources.files("specnb.decoding.lm") / "tested_families.json"
    found: dict[str, Any] = json.loads(listed.read_text(encoding="utf-8")) if listed.is_file() else {}
    return found if _minor(found.get("transformers", "")) == _minor(transformers.__version__) else {}


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def is_tested(model: PreTrainedModel, image: bool) -> bool:
    """Whether the model is of a tested family and unchanged: no replaced, quantized or patched part."""
    if model.config.model_type not in tested_families().get("image" if image else "text", ()):
        return False
    if compat.attention_implementation(model.config.get_text_config(decoder=True)) not in ("sdpa", "eager"):
        return False
    return getattr(model, "hf_quantizer", None) is None and all(map(_is_unmodified, model.modules()))


def _is_unmodified(module: nn.Module) -> bool:
    """Whether a module is of a class of torch or transformers, with that class's forward and plain parameters."""
    if forward_replaced(module) or not _is_known(type(module).__module__):
        return False
    return all(
        type(parameter) is nn.Parameter for parameter in vars(module)["_parameters"].values() if parameter is not None
    )


@cache
def _is_known(name: str) -> bool:
    """Whether a Python module belongs to torch or transformers."""
    return name.startswith(_KNOWN_MODULES)
