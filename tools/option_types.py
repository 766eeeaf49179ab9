"""Write the types of the options of `generate` and `train_drafter`: `python -m tools.option_types`."""

from __future__ import annotations

from pathlib import Path

from specnb.call.generate_options import FIELDS
from specnb.options import ASKED_BY, OPTIONS, TRAINING_OPTIONS, Option

SPECNB = Path(__file__).parent.parent / "specnb"
PLACE = SPECNB / "call" / "option_types.py"
TRAINING_PLACE = SPECNB / "training" / "option_types.py"
_PARAMETERS = {"seed", "logprobs", "top_logprobs"}  # of generate() and decoder() themselves
_ASKED_BY = {
    "prompt_lookup_num_tokens": "int | None",
    "use_mtp": "bool | None",
    "speculation_type": 'Literal["dflash"] | None',
}
_INPUTS = {
    "input_ids": "Tensor",
    "attention_mask": "Tensor | None",
    "position_ids": "Tensor | None",
    "token_type_ids": "Tensor | None",
    "pixel_values": "Any",
    "cache": "Any",
    "past_key_values": "Any",
    "generation_config": "GenerationConfig | None",
    "logits_processor": "list[Any] | None",
    "stopping_criteria": "list[Any] | None",
    "prefix_allowed_tokens_fn": "Callable[..., Any] | None",
}

_HEAD = '''"""Types of the options of `generate`. Written by `python -m tools.option_types`: do not edit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict

from torch import Tensor
from transformers import GenerationConfig


'''


_TRAINING_HEAD = '''\
"""Types of the options of `train_drafter`. Written by `python -m tools.option_types`: do not edit."""

from __future__ import annotations

from typing import TypedDict


'''


def type_of(option: Option) -> str:
    """The annotation of an option; None stands for "as if left out"."""
    kind = f"Literal[{', '.join(map(repr, option.choices))}]" if option.choices else option.type.__name__
    kind = {"float": "float", "str": "str"}.get(kind, kind)
    return (f"{kind} | list[{kind}] | None" if option.multiple else f"{kind} | None").replace("'", '"')


def source() -> str:
    """The text of the module."""
    drafting = {option.name: type_of(option) for option in OPTIONS if option.group == "drafting"}
    drafting |= {name: kind for name, kind in _ASKED_BY.items() if name in ASKED_BY}
    others = {option.name: type_of(option) for option in OPTIONS if option.name not in drafting.keys() | _PARAMETERS}
    honoured = [name for name, what in FIELDS.items() if what == "honoured"]
    passed = {name: "Any" for name in honoured if name not in others} | _INPUTS
    return (
        _HEAD
        + "\n\n\n".join(
            [
                _typed_dict("DraftingOptions", "TypedDict", "The drafting options, as in `specnb.options`.", drafting),
                _typed_dict(
                    "GenerateOptions",
                    "DraftingOptions",
                    "The options of `specnb.generate`, and what is handed on to transformers' `generate()`.",
                    others | passed,
                ),
            ]
        )
        + "\n"
    )


def training_source() -> str:
    """The text of the module for `train_drafter`."""
    fields = {option.name: type_of(option) for option in TRAINING_OPTIONS}
    doc = "The options of `specnb.train_drafter`, as in `specnb.options`."
    return _TRAINING_HEAD + _typed_dict("TrainingOptions", "TypedDict", doc, fields) + "\n"


def _typed_dict(name: str, base: str, doc: str, fields: dict[str, str]) -> str:
    lines = [f"    {field}: {kind}" for field, kind in fields.items()]
    return "\n".join([f"class {name}({base}, total=False):", f'    """{doc}"""', "", *lines])


if __name__ == "__main__":
    PLACE.write_text(source(), encoding="utf-8")
    TRAINING_PLACE.write_text(training_source(), encoding="utf-8")
