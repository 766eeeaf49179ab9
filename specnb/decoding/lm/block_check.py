"""A net under everything: a model of a family that was not tested, or that was changed, shows once that it can be decoded in blocks.

Before its first token a few tokens are run as a block, with a rejected draft in between, and one by one as transformers each
them. Where the logits differ the model is refused by name.
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

from specnb.decoding.contracts import Row, Unsupported
from specnb.decoding.lm.base import LM, has_learned_positions, model_device, positions
from specnb.decoding.lm.cached import check_graphs
from specnb.decoding.lm.create import check_target, create_lm, select_row_inputs
from specnb.decoding.lm.model_inputs import PER_TOKEN, CacheSize, PreparedInputs
from specnb.decoding.lm.prepared import prepare_arguments

TOKENS = 4  # in the block: the first is certain, the others drafted
_MAX_PROMPT = 48  # tokens of a prompt that is only text
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF = 5e-2
_KNOWN_MODULES = ("torch.nn.modules.", "transformers.activations", "transformers.models.", "transformers.pytorch_utils")
_PASSED: WeakKeyDictionary[PreTrainedModel, set[Any]] = WeakKeyDictionary()
# Layers that scale the values of all tokens of a pass together.
_DYNAMIC_QUANTIZATION = ("torch.ao.nn.quantized.dynamic", "LinearActivationQuantizedTensor", "DynamicActivation")


def check_blocks(model: PreTrainedModel, rows: Sequence[Row], prepared: PreparedInputs, rolls_back: bool) -> None:
    """Raise Unsupported unless blocks of `model` give what its tokens give one by one; once per model and kind of input.

    Args:
        rows: the prompts; two of them are tried, or all where what came with them cannot be told apart.
        prepared: what `generate()` prepared for them.
        rolls_back: whether drafts will be rejected; without, tokens are tried one by one.
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
    except Exception as error:  # of any kind: the model is not known
        difference, reason = float("inf"), f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    if reason or not difference <= _TOLERANCE.get(model.dtype, _HALF):
        name, what = type(model).__name__, reason or f"logits differ by {difference:.1g} of their size"
        raise Unsupported(
            f"{name} gives another result for a block of tokens than for the same tokens one by one ({what}), so drafts cannot "
            "be verified exactly: use method='plain', or another model."
            if rolls_back
            else f"{name} cannot be decoded as transformers decodes it ({what}). Use transformers' own generate() for this."
        )
    _PASSED[model].add(state)


def check_draft(model: PreTrainedModel, lm: LM, rows: Sequence[Row]) -> None:
    """Raise Unsupported for a draft model that cannot read the prompts without the images that came with them.

    Args:
        lm: follows `rows` for the draft model; it processes the prompts here.
    """
    try:
        lm.logits(rows, [[] for _ in rows], [1 for _ in rows])
    except Exception as error:  # of any kind: the model is not known
        raise Unsupported(
            f"the draft model ({type(model).__name__}) cannot read this prompt without its image ({' '.join(str(error).split())[:160]}): "
            "use a draft model for text, or another method."
        ) from error


def check_activations(model: PreTrainedModel) -> None:
    """Raise Unsupported for layers that compute a token differently with others beside it."""
    for name, module in model.named_modules():
        weight = vars(module).get("_parameters", {}).get("weight")
        kinds = (type(module).__module__, type(weight).__name__, type(getattr(weight, "data", None)).__name__)
        if any(kind.startswith(dynamic) for kind in kinds for dynamic in _DYNAMIC_QUANTIZATION):
            raise Unsupported(
                f"{name} ({type(module).__name__}, dynamic quantisation) scales all tokens of a pass together, so a token computed in a block is "
                "another one than computed alone. Use the model as it was before quantize_dynamic(), weight-only quantisation, or method='plain' "
                "with one prompt at a time."
            )


def _difference(model: PreTrainedModel, rows: Sequence[Row], prepared: PreparedInputs, rolls_back: bool) -> float:
    """The largest difference of logits between blocks and single tokens, relative to the logits' size."""
    if len(rows) == 1 or all(name in PER_TOKEN for name in prepared.inputs.extras):
        each = [
            prepared.inputs if len(rows) == 1 else select_row_inputs(model, prepared.inputs, r, row)
            for r, row in enumerate(rows)
        ][:2]
        whole = bool(prepared.inputs.extras) or prepared.inputs.position_ids is not None
        end = _max_prompt_length(model) if whole else min(_MAX_PROMPT, _max_prompt_length(model))
        ids = [row.ids[:end] for row in rows[:2]]
        expected = [
            _reference_logits(model, torch.tensor([row]), prepare_arguments(model, row, **inputs.with_positions()))[0]
            for row, inputs in zip(ids, each, strict=True)
        ]
        prepared = PreparedInputs(inputs=prepared.inputs)
    else:  # images, say: the batch as it came
        ids = [row.ids for row in rows]
        expected = _reference_logits(model, prepared.prompts, prepared.arguments)
        prepared = PreparedInputs(inputs=prepared.inputs)
    copies = [_make_row(i, row) for i, row in enumerate(ids)]
    lm = create_lm(model, copies, CacheSize(max(map(len, ids)) + 8), prepared=prepared, rolls_back=rolls_back)
    tokens = [logits[:-1].argmax(-1).tolist() for logits in expected]
    found = [[logits] for logits in lm.logits(copies, [[] for _ in copies], [1 for _ in copies])]
    if rolls_back:
        for copied, right in zip(copies, tokens, strict=True):
            copied.ids.append(right[0])
        num_logits = [TOKENS for _ in copies]
        lm.logits(copies, [[(token + 1) % lm.vocab_size for token in right[1:]] for right in tokens], num_logits)
        for one, logits in zip(found, lm.logits(copies, [right[1:] for right in tokens], num_logits), strict=True):
            one.append(logits)
    else:
        for n in range(TOKENS):
            for copied, right in zip(copies, tokens, strict=True):
                copied.ids.append(right[n])
            for one, logits in zip(found, lm.logits(copies, [[] for _ in copies], [1 for _ in copies]), strict=True):
                one.append(logits)
    return max(_relative_difference(right, torch.cat(one)) for right, one in zip(expected, found, strict=True))


def _max_prompt_length(model: PreTrainedModel) -> int:
    """How long a prompt may be so that the tokens tried behind it have a position."""
    config = model.config.get_text_config(decoder=True)
    limit = positions(config)
    return limit - TOKENS if limit is not None and has_learned_positions(config) else sys.maxsize


def _reference_logits(model: PreTrainedModel, prompts: Tensor, arguments: Mapping[str, Any]) -> list[Tensor]:
    """Logits `[TOKENS + 1, vocab]` of each row after its prompt and each of its next tokens, as transformers decodes."""
    ids, arguments = prompts.to(model_device(model)), copy.deepcopy(dict(arguments))
    every = []
    for i in range(TOKENS + 1):
        inputs = model.prepare_inputs_for_generation(
            ids, next_sequence_length=1 if i else None, is_first_iteration=not i, **arguments
        )
        out = model(**inputs, return_dict=True)
        arguments = model._update_model_kwargs_for_generation(out, arguments, is_encoder_decoder=False)
        every.append(out.logits[:, -1].clone())
        ids = torch.cat([ids, every[-1].argmax(-1, keepdim=True).to(ids.device)], -1)
    return list(torch.stack(every, 1))


def _relative_difference(expected: Tensor, found: Tensor) -> float:
    """The largest difference relative to the largest number, of those that are numbers in both."""
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


# ---- what needs no trial
@cache
def tested_families() -> dict[str, Any]:
    """The model types that `tests/families` found right with this transformers (but for its last number), with text and with an image."""
    listed = resources.files("specnb.decoding.lm") / "tested_families.json"
    found: dict[str, Any] = json.loads(listed.read_text(encoding="utf-8")) if listed.is_file() else {}
    return found if _minor(found.get("transformers", "")) == _minor(transformers.__version__) else {}


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def is_tested(model: PreTrainedModel, image: bool) -> bool:
    """Whether the model is of a tested family and as transformers makes it: no with_replacements, quantised or patched part."""
    if model.config.model_type not in tested_families().get("image" if image else "text", ()):
        return False
    if getattr(model.config.get_text_config(decoder=True), "_attn_implementation", "eager") not in ("sdpa", "eager"):
        return False
    return getattr(model, "hf_quantizer", None) is None and all(map(_is_unmodified, model.modules()))


def _is_unmodified(module: nn.Module) -> bool:
    own = module.__dict__
    if "forward" in own and "_hf_hook" not in own:
        return False
    if not type(module).__module__.startswith(_KNOWN_MODULES):
        return False
    return all(type(one) is nn.Parameter for one in own["_parameters"].values() if one is not None)
