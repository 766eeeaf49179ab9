"""What a drafter learns from: the target's own answers to prompts, or given texts, as token ids."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specnb.text import prompt_inputs, text_tokenizer

if TYPE_CHECKING:
    from specnb.models import Pair

SAMPLED_TEMPERATURE = 0.6
"""The temperature of the sampled share of the answers."""


@dataclass(frozen=True)
class Example:
    """One text.

    Attributes:
        prompt: ids of the prompt, on which nothing is learned; empty for a given text.
        answer: ids that the drafter learns to predict.
        sampled: whether the answer was sampled.
    """

    prompt: list[int]
    answer: list[int]
    sampled: bool = False

    @property
    def ids(self) -> list[int]:
        """Prompt and answer."""
        return [*self.prompt, *self.answer]


def encode_prompts(pair: Pair, prompts: Sequence[str], chat: bool | None) -> list[list[int]]:
    """The ids of the prompts, as `%%specgen` would send them."""
    encoded = []
    for prompt in prompts:
        given = prompt_inputs(pair.tokenizer, prompt, chat=chat)
        if "inputs" in given:
            encoded.append([int(token) for token in text_tokenizer(pair.tokenizer)(prompt)["input_ids"]])
        else:
            encoded.append([int(token) for token in given["input_ids"][0]])
    return encoded


def encode_texts(pair: Pair, texts: Sequence[str], max_length: int) -> list[Example]:
    """Given texts, cut into pieces of at most `max_length` tokens; pieces of one token are dropped."""
    tokenizer, examples = text_tokenizer(pair.tokenizer), []
    for text in texts:
        ids = [int(token) for token in tokenizer(text)["input_ids"]]
        pieces = [ids[i : i + max_length] for i in range(0, len(ids), max_length)]
        examples += [Example([], piece) for piece in pieces if len(piece) > 1]
    return examples


class AnswerFile:
    """The answers so far, one JSON line each, so that an interrupted run goes on where it was."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Example]:
        """The answers in the file; a last line that was cut off is dropped, so that others can follow.

        Raises:
            OSError: the disk is full; the file is as it was.
        """
        if not self.path.exists():
            return []
        found = read_answers(self.path)
        whole = "".join(_line(one) for one in found)
        if whole != self.path.read_text(encoding="utf-8"):
            part = self.path.with_name(f"{self.path.name}.part")
            part.write_text(whole, encoding="utf-8")
            part.replace(self.path)
        return found

    def append(self, examples: Iterable[Example]) -> None:
        """Add answers. Raises OSError if the disk is full; those that are there stay."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(_line(one) for one in examples)
        except OSError as error:
            raise OSError(
                f"the answers cannot be written to {self.path}: {error}. Free some space there; resume=True goes on "
                "with those that are in it."
            ) from error


def read_answers(path: Path) -> list[Example]:
    """The answers in a file, which is left as it is; what comes after a line that was cut off is dropped."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(Example(**json.loads(line)))
        except (ValueError, TypeError):
            break
    return found


def _line(example: Example) -> str:
    return json.dumps(asdict(example)) + "\n"


def answer_prompts(
    pair: Pair,
    prompts: Sequence[list[int]],
    *,
    rows: int,
    max_new_tokens: int,
    sampled_share: float,
    seed: int,
    until: float | None,
    on_answers: Callable[[list[Example]], object],
    numbers: Sequence[int] | None = None,
    cancel: threading.Event | None = None,
) -> None:
    """Let the target answer the prompts, `rows` at a time.

    Batches are sampled or greedy, so that over time `sampled_share` of them is sampled. The same prompts, numbers and
    seed give the same answers, whatever the machine.

    Args:
        prompts: token ids.
        numbers: of the prompts to answer; None for all.
        until: the time (`time.monotonic`) after which no further batch is begun.
        on_answers: called with the answers of each batch.
        cancel: set to stop; the batch that is being answered is dropped.

    Raises:
        KeyboardInterrupt: `cancel` was set.
    """
    import specnb

    device = pair.target.get_input_embeddings().weight.device
    wanted = list(range(len(prompts)) if numbers is None else numbers)
    for begin in range(0, len(wanted), rows):
        if until is not None and time.monotonic() >= until:
            return
        first = wanted[begin]
        asked, batch = [prompts[i] for i in wanted[begin : begin + rows]], first // rows
        sample = int((batch + 1) * sampled_share) > int(batch * sampled_share)
        inputs = _left_padded(asked, device)
        options: dict[str, Any] = {"temperature": SAMPLED_TEMPERATURE, "top_k": 0, "top_p": 1.0} if sample else {}
        result = specnb.generate(
            pair.target,
            **inputs,
            method="plain",
            do_sample=sample,
            seed=seed + first,
            max_new_tokens=max_new_tokens,
            logprobs=False,
            cancel=cancel,
            **options,
        )
        if cancel is not None and cancel.is_set():
            raise KeyboardInterrupt
        on_answers([Example(ids, list(row.ids), sample) for ids, row in zip(asked, result.rows, strict=True)])


def _left_padded(rows: Sequence[list[int]], device: torch.device) -> dict[str, Any]:
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}
