"""The arguments `memory` and `prediction` of method "suffix"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from transformers import PreTrainedModel

from specnb.call.method_selection import is_requested
from specnb.decoding.contracts import Row
from specnb.memory import Memory
from specnb.options import ASKED_BY, MODEL_DRAFTERS, parts_of
from specnb.text import text_tokenizer

Prediction: TypeAlias = str | Sequence[int] | Tensor | None


@dataclass(frozen=True)
class MemoryArguments:
    """What a call gives method "suffix" to draft from.

    Args:
        memory: past requests.
        prediction: a text or token ids that the output will be similar to.

    Raises:
        ValueError: the memory is not one.
    """

    memory: Memory | None = None
    prediction: Prediction = None

    def __post_init__(self) -> None:
        if self.memory is not None and not isinstance(self.memory, Memory):
            raise ValueError(
                f"memory must be a specnb.Memory, not a {type(self.memory).__name__}: specnb.Memory.load(FILE) reads "
                "one."
            )

    def method(self, assistant_model: Any, options: Mapping[str, Any]) -> str | None:
        """The method of a call that names none: "suffix" if there is a text to draft from and nothing else drafts.

        Args:
            assistant_model: the call's draft model.
            options: the call's options, of which some ask for a method.
        """
        asked = assistant_model is not None or any(is_requested(options.get(name)) for name in ASKED_BY)
        return None if asked or (self.memory is None and self.prediction is None) else "suffix"

    def check(self, method: str | None) -> None:
        """Raise ValueError if a method uses neither; None is a method that is not known yet."""
        given = [name for name in ("memory", "prediction") if getattr(self, name) is not None]
        if not given or method is None or "suffix" in parts_of(method):
            return
        model = parts_of(method)[-1]
        use = f"suffix+{model}" if model in MODEL_DRAFTERS else "suffix"
        raise ValueError(
            f"{'= and '.join(given)}= given, but method {method!r} drafts from neither a memory nor a prediction: "
            f"use method={use!r}, or leave {'it' if len(given) == 1 else 'them'} out."
        )

    def bind(self, tokenizer: Any) -> None:
        """Tell the memory which tokenizer its tokens are of. Raises ValueError if it holds tokens of another."""
        if self.memory is not None and tokenizer is not None:
            self.memory.bind(tokenizer)

    def for_drafter(self, tokenizer: Any, model: PreTrainedModel) -> dict[str, Any]:
        """Both as fields of `drafters.MethodContext`."""
        return {"memory": self.memory, "prediction": prediction_ids(self.prediction, tokenizer, model)}

    def keep(self, rows: Sequence[Row]) -> None:
        """Add what was generated to the memory."""
        for row in rows if self.memory is not None else ():
            assert self.memory is not None
            self.memory.add(row.ids[row.prompt_length :], row.ids[: row.prompt_length])


def prediction_ids(prediction: Prediction, tokenizer: Any, model: PreTrainedModel) -> list[int]:
    """The token ids of a predicted output.

    Args:
        prediction: a text, token ids `[length]` or `[1, length]`, or None.
        tokenizer: needed for a text.
        model: the target, whose ids are valid.

    Raises:
        ValueError: it is of another type, a text without a tokenizer, or has an id that the model does not know.
    """
    if prediction is None:
        return []
    if isinstance(prediction, str):
        if tokenizer is None:
            raise ValueError("a prediction that is a text needs tokenizer= (or a Pair from specnb.load).")
        return list(text_tokenizer(tokenizer)(prediction, add_special_tokens=False)["input_ids"])
    ids = prediction.flatten().tolist() if isinstance(prediction, Tensor) else prediction
    if not isinstance(ids, (list, tuple)) or not all(type(token) is int for token in ids):
        raise ValueError(
            f"prediction={str(prediction)[:60]!r} is not valid: it must be a text, or the token ids of one output."
        )
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise ValueError(
            f"prediction holds the id {wrong}, but {type(model).__name__} has the ids 0 to {vocabulary - 1}."
        )
    return list(ids)
