"""The cells of the table: calls of specnb on one model, each compared with transformers' own plain decoding."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import specnb
from specnb.models import LoadError

from . import images
from .build import noisy

ROWS = (
    (5, 17, 23, 42, 5, 17, 61, 5, 17, 23, 42),
    (33, 7, 7, 12, 33, 7, 50, 12),
    (20, 44, 20, 44, 9, 31),
)
PACKAGE = Path(specnb.__file__).parent
SHORT, LONG = 12, 24  # new tokens: with a draft that has to run, without
STEADY = {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0, "num_assistant_tokens_schedule": "constant"}
EQUAL, REFUSED, UNSTEADY, WRONG, CRASH = "equal", "refused", "unsteady", "wrong", "crash"
NOISE = 0.02  # of the draft that is right sometimes


@dataclass(frozen=True)
class Cell:
    """A verdict: `equal`, `refused` (one line of ours, before the first token), `wrong` (another text) or `crash`.

    `unsteady`: another text, which transformers itself gives in one pass over the whole text. Rounding decides there,
    as where two experts of a router have the same score.
    """

    verdict: str
    message: str = ""
    got: Any = None
    want: Any = None
    accepted: int = 0
    drafted: int = 0

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, "", 0)}


def raised_by_specnb(error: BaseException) -> bool:
    """Whether a line of specnb itself raised it, not something that specnb called."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and is_specnbs(frames[-1].filename)


def is_specnbs(file: str) -> bool:
    """Whether a file belongs to the package."""
    return Path(file).is_relative_to(PACKAGE)


def refusal(error: BaseException, steps: int) -> bool:
    """Whether specnb refused the call as documented: one line, before the first token."""
    kinds = (ValueError, TypeError, LoadError)
    return isinstance(error, kinds) and raised_by_specnb(error) and "\n" not in str(error).strip() and not steps


def judge(
    call: Callable[[list[Any]], list[list[int]]],
    *right: list[list[int]],
    whole: Callable[[int, list[int]], list[int]] | None = None,
) -> Cell:
    """Run `call(steps)`, which appends the steps it makes, and compare its text with those that are right.

    Args:
        whole: the best tokens of one pass over a row's prompt and a text, by the row's number.
    """
    steps: list[Any] = []
    try:
        got = call(steps)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        at = f"{'/'.join(frames[-1].filename.split('/')[-2:])}:{frames[-1].lineno}" if frames else ""
        text = f"{type(error).__name__}: {str(error).strip()[:400]}"
        ours = refusal(error, len(steps))
        return Cell(REFUSED if ours else CRASH, text if ours else f"{text} @ {at} after {len(steps)} steps")
    drafted, accepted = sum(len(s.drafted) for s in steps), sum(s.accepted for s in steps)
    if got in right:
        return Cell(EQUAL, accepted=accepted, drafted=drafted)
    unsteady = whole is not None and all(
        ours == theirs or whole(row, ours)[_common(ours, theirs) :] == ours[_common(ours, theirs) :]
        for row, (ours, theirs) in enumerate(zip(got, right[-1], strict=True))
    )
    return Cell(UNSTEADY if unsteady else WRONG, got=got, want=right[-1], accepted=accepted, drafted=drafted)


def _common(one: list[int], other: list[int]) -> int:
    """The number of tokens that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def in_one_pass(model: PreTrainedModel) -> Callable[[int, list[int]], list[int]]:
    """The best tokens of one pass over a row of `ROWS` and a text."""

    def best(row: int, text: list[int]) -> list[int]:
        with torch.no_grad():
            logits = model(torch.tensor([[*ROWS[row], *text]]), use_cache=False).logits[0]
        return logits[len(ROWS[row]) - 1 : -1].argmax(-1).tolist()

    return best


def batch(rows: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """Rows padded on the left."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (width - len(r)) + list(r) for r in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows]),
    }


def plain(model: PreTrainedModel, inputs: dict[str, Any], new: int) -> list[list[int]]:
    """transformers' own greedy text: new ids per row."""
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=new, do_sample=False)
    return out[:, inputs["input_ids"].shape[1] :].tolist()


def ours(model: PreTrainedModel, inputs: dict[str, Any], new: int, **options: Any) -> Callable[[list[Any]], Any]:
    """A call of specnb for `judge`."""

    def call(steps: list[Any]) -> list[list[int]]:
        result = specnb.generate(model, **inputs, max_new_tokens=new, do_sample=False, on_step=steps.append, **options)
        return result.sequences[:, inputs["input_ids"].shape[1] :].tolist()

    return call


def middle(model: PreTrainedModel) -> int:
    """Half of the layers."""
    return max(1, (getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None) or 2) // 2)


def text_cells(model: PreTrainedModel) -> Iterator[tuple[str, Cell]]:
    """The ten cells for prompts of text."""
    one, three, mid = batch(ROWS[:1]), batch(ROWS), middle(model)
    short, long = plain(model, one, SHORT), plain(model, one, LONG)
    draft = noisy(model, NOISE)
    whole = in_one_pass(model)
    for name, new, options in (
        ("plain", LONG, {"method": "plain"}),
        ("draft = copy", SHORT, {"assistant_model": copy.deepcopy(model), **STEADY}),
        ("draft", SHORT, {"assistant_model": draft, **STEADY}),
        ("lookup", LONG, {"prompt_lookup_num_tokens": 3}),
        ("exit 1", SHORT, {"assistant_early_exit": 1, **STEADY}),
        ("exit mid", SHORT, {"assistant_early_exit": mid, **STEADY}),
    ):
        if name != "exit mid" or mid > 1:
            yield name, judge(ours(model, one, new, **options), short if new == SHORT else long, whole=whole)
    alone = {new: [plain(model, batch((row,)), new)[0] for row in ROWS] for new in (SHORT, LONG)}
    together = {new: _together(model, three, new, alone[new]) for new in (SHORT, LONG)}
    for name, new, options in (
        ("rows plain", SHORT, {"method": "plain"}),
        ("rows draft", SHORT, {"assistant_model": draft, **STEADY}),
        ("rows lookup", LONG, {"prompt_lookup_num_tokens": 3}),
        ("rows exit", SHORT, {"assistant_early_exit": mid, **STEADY}),
    ):
        yield name, judge(ours(model, three, new, **options), together[new], alone[new], whole=whole)


def _together(model: PreTrainedModel, rows: dict[str, Any], new: int, alone: list[list[int]]) -> list[list[int]]:
    """transformers' text for the padded rows; each row's own where it cannot do several."""
    try:
        return plain(model, rows, new)
    except Exception:
        return alone


def image_cells(model: PreTrainedModel) -> Iterator[tuple[str, Cell]]:
    """The cells for a prompt with an image, and two rows of them where transformers can.

    Raises NoImage where no image could be made.
    """
    one, mid = images.image_inputs(model), middle(model)
    short, long = plain(model, one, SHORT), plain(model, one, LONG)
    draft = noisy(model, NOISE)
    yield "image plain", judge(ours(model, one, LONG, method="plain"), long)
    yield "image draft = copy", judge(ours(model, one, SHORT, assistant_model=copy.deepcopy(model), **STEADY), short)
    yield "image draft", judge(ours(model, one, SHORT, assistant_model=draft, **STEADY), short)
    yield "image lookup", judge(ours(model, one, LONG, prompt_lookup_num_tokens=3), long)
    yield "image exit", judge(ours(model, one, SHORT, assistant_early_exit=mid, **STEADY), short)
    try:
        two = images.two_rows(model)
        together = plain(model, two, SHORT)
    except Exception:
        return  # transformers itself, or our making of inputs, cannot
    yield "image rows plain", judge(ours(model, two, SHORT, method="plain"), together)
    yield "image rows lookup", judge(ours(model, two, SHORT, prompt_lookup_num_tokens=3), together)
    yield "image rows draft", judge(ours(model, two, SHORT, assistant_model=draft, **STEADY), together)
