"""What a generation recorded: the steps of each row, its tokens and their origin.

This module imports nothing else of specnb, nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ORIGINS = ("accepted", "corrected", "bonus", "plain")


@dataclass(frozen=True)
class Step:
    """One target pass for one row.

    Attributes:
        position: length of the row in tokens, prompt included, before the step.
        drafted: ids of the drafted tokens.
        accepted: how many of the drafted tokens were accepted.
        emitted: ids of the tokens that the step added to the row.
        draft_seconds, verify_seconds, other_seconds: the row's share of the time of the step.
        row: index of the row.
        margins: per emitted token, the gap between the target's two highest scores (logits after all logits
            processors). Only in half precision, where a gap of a few units in the last place is a tie that other block
            sizes may break differently.
        match_length: in prompt lookup and suffix decoding, length of the match in tokens.
        distances: in a lossy method, per position, the total variation distance from the target's distribution.
        draft_probabilities: with `probabilities=True`, what the drafter's distribution gave each drafted token. None
            where there is no such distribution: for tokens from a lookup, and for text that was encoded again.
        target_probabilities: with `probabilities=True`, what the target's distribution, after all logits processors,
            gave each drafted token up to the first rejected one.
        lookahead_token: in prompt lookup and suffix decoding, the token that would have been drafted next.
        replayed_tokens: committed tokens that the pass fed again, since running states only roll back to a copy.
        logprobs: per emitted token, its log-probability: the log-softmax of the target's logits before any logits
            processor, temperature included (vLLM's default). None with `logprobs=False`.
        top_logprobs: with `top_logprobs=n`, per emitted token, the n best `(id, logprob)` of the same distribution.
        ranks: with `top_logprobs=n`, per emitted token, its rank in the same distribution; 1 is the most probable.
        target_ranks: with `top_logprobs=n`, per drafted token up to the first rejected one, the same.
        draft_top_logprobs: with `top_logprobs=n`, per drafted token, the n best of the drafter's logits if it has any.
        source: in a hybrid, the method that drafted.
    """

    position: int
    drafted: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    row: int = 0
    margins: tuple[float, ...] | None = None
    match_length: int = 0
    distances: tuple[float, ...] | None = None
    draft_probabilities: tuple[float, ...] | None = None
    target_probabilities: tuple[float, ...] | None = None
    lookahead_token: int | None = None
    replayed_tokens: int = 0
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    draft_top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    source: str = ""
    ranks: tuple[int, ...] | None = None
    target_ranks: tuple[int, ...] | None = None

    @property
    def origins(self) -> tuple[str, ...]:
        """The origin of each emitted token, one of `ORIGINS`."""
        closing = "plain" if not self.drafted else "bonus" if self.accepted == len(self.drafted) else "corrected"
        return ("accepted",) * self.accepted + (closing,) * (len(self.emitted) - self.accepted)

    @property
    def rejected(self) -> tuple[int, ...]:
        """Ids of the drafted tokens that were not accepted."""
        return self.drafted[self.accepted :]


@dataclass(frozen=True)
class Token:
    """A generated token: id, text (None without a tokenizer) and origin. The joined texts are the whole text."""

    id: int
    text: str | None
    origin: str


@dataclass
class RowResult:
    """The output of one prompt.

    Attributes:
        prompt_ids: ids of the prompt.
        ids: ids of the generated tokens.
        steps: the steps, in order.
        finish_reason: why the row ended, one of `FINISH_REASONS`.
        pieces: the text of each generated token; None without a tokenizer.
        rejected_pieces: per step, the text of each rejected token; None without a tokenizer.
        prompt_text: the text of the prompt, special tokens included; None without a tokenizer.
        token_texts: with `top_logprobs=n`, the text of each token among the n best, by id; None without a tokenizer.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    steps: tuple[Step, ...]
    finish_reason: str
    pieces: tuple[str, ...] | None = None
    rejected_pieces: tuple[tuple[str, ...], ...] | None = None
    prompt_text: str | None = None
    token_texts: Mapping[int, str] | None = None

    @property
    def text(self) -> str:
        """The generated text without special tokens; ValueError if no tokenizer was given."""
        if self.pieces is None:
            raise ValueError("this result has no text: give `tokenizer=` to generate(), or decode `.ids` yourself.")
        return "".join(self.pieces)

    @property
    def tokens(self) -> list[Token]:
        """The generated tokens, in order."""
        origins = [origin for step in self.steps for origin in step.origins]
        texts: Sequence[str | None] = self.pieces if self.pieces is not None else [None] * len(self.ids)
        return [Token(*t) for t in zip(self.ids, texts, origins, strict=True)]

    def listed_ids(self) -> set[int]:
        """Ids of all tokens that the steps name: emitted, drafted, and with `top_logprobs` the best of each model."""
        ids = {token for step in self.steps for token in (*step.emitted, *step.drafted)}
        for step in self.steps:
            for tops in (step.top_logprobs or (), step.draft_top_logprobs or ()):
                ids |= {token for pairs in tops for token, _ in pairs}
        return ids
