"""The arguments `memory` and `prediction` of method "suffix"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from transformers import PreTrainedModel

from specnb.decoding.contracts import Row
from specnb.memory import Memory
from specnb.options import parts_of
from specnb.text import text_tokenizer

Prediction: TypeAlias = str | Sequence[int] | Tensor | None


@dataclass(frozen=True)
class MemoryArguments:
    """What a call gives method "suffix" to draft from.

    Args:
        memory: past requests.
        prediction: a text or token ids that the output will be similar to.
    """

    memory: Memory | None = None
    prediction: Prediction = None

    @property
    def method(self) -> str | None:
        """The method of a call that names none: "suffix" if there is anything to draft from."""
        return None if self.memory is None and self.prediction is None else "suffix"

    def check(self, method: str, tokenizer: Any) -> None:
        """Check both for a call, and bind the memory to its tokenizer.

        Raises:
            ValueError: the method uses neither, the memory is of another tokenizer, or of the wrong type.
        """
        given = [name for name in ("memory", "prediction") if getattr(self, name) is not None]
        if given and "suffix" not in parts_of(method):
            raise ValueError(
                f"{'= and '.join(given)}= given, but method {method!r} drafts from neither a memory nor a prediction: "
                f"use method='suffix', or leave {'it' if len(given) == 1 else 'them'} out."
            )
        if self.memory is None:
            return
        if not isinstance(self.memory, Memory):
            raise ValueError(
                f"memory must be a specnb.Memory, not a {type(self.memory).__name__}: specnb.Memory.load(FILE) reads "
                "one."
            )
        if tokenizer is not None:
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
