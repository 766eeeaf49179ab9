"""The two tokenizers, trained on the training text, and chats as token ids with a weight for each token."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tools.embedded_models.data import KINDS, Message, Writer

PAD, END, USER, ASSISTANT = "<pad>", "<|end|>", "<|user|>", "<|assistant|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROMPT_WEIGHT = 0.2
LONGEST = 256


class Batch(NamedTuple):
    """Rows of equal length, padded behind: ids, the weight of each token as something to predict, and what is real."""

    ids: Tensor
    weights: Tensor
    mask: Tensor


def chat_text(messages: list[Message], prompt: bool = False) -> str:
    """What the chat template makes of it; `prompt` opens the next answer."""
    return "".join(f"<|{m.role}|>{m.content}{END}\n" for m in messages) + (ASSISTANT if prompt else "")


def texts(seed: int, kinds: Mapping[str, int] = KINDS) -> Iterator[str]:
    """Training texts without end: chats, and one in ten a bare story without the chat's marks."""
    writer, draw = Writer(seed, kinds=kinds), random.Random(seed)
    while True:
        if draw.random() < 0.1:
            yield writer.chat("story")[1].content + END
        else:
            yield chat_text(writer.chat())


def train_tokenizer(path: Path, other: bool = False) -> PreTrainedTokenizerFast:
    """Train and save: byte-level BPE, or (`other`) one with marked spaces, byte fallback and fewer tokens."""
    sample = texts(99)
    text = [next(sample) for _ in range(6000)]
    if other:
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        specials = ["<unk>", USER, ASSISTANT, END, PAD]
        alphabet = [f"<0x{i:02X}>" for i in range(256)]
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        specials, alphabet = [PAD, END, USER, ASSISTANT], []
    trainer = trainers.BpeTrainer(
        vocab_size=896 if other else 1024,
        special_tokens=specials + alphabet,
        initial_alphabet=[] if other else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(text, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[USER, ASSISTANT],
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        **({"unk_token": "<unk>"} if other else {}),
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(path)
    return loaded


def batches(tokenizer: Any, seed: int, tokens: int, source: Iterator[str] | None = None) -> Iterator[Batch]:
    """Batches without end, of texts alike in length and about `tokens` tokens."""
    source = source or texts(seed)
    draw = random.Random(seed)
    while True:
        rows = [ids for ids in tokenizer([next(source) for _ in range(512)])["input_ids"] if len(ids) <= LONGEST]
        rows.sort(key=len)
        groups: list[list[list[int]]] = [[]]
        for ids in rows:
            if len(ids) * (len(groups[-1]) + 1) > tokens:
                groups.append([])
            groups[-1].append(ids)
        draw.shuffle(groups)
        yield from (batch(tokenizer, group) for group in groups)


def batch(tokenizer: Any, rows: list[list[int]]) -> Batch:
    """Rows of ids as a batch; what the user says counts less than the answers."""
    width = max(map(len, rows))
    user, end = tokenizer.convert_tokens_to_ids([USER, END])
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    weights, mask = torch.zeros(len(rows), width), torch.zeros(len(rows), width, dtype=torch.long)
    for r, row in enumerate(rows):
        ids[r, : len(row)], mask[r, : len(row)] = torch.tensor(row), 1
        weight = 1.0
        for i, token in enumerate(row):
            weight = PROMPT_WEIGHT if token == user else weight
            weights[r, i] = weight
            if token == end and row[0] == user:
                asked = weight < 1
                weight = 1.0 if asked else PROMPT_WEIGHT
    return Batch(ids, weights, mask)
