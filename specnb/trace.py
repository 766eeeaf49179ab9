"""The result of a generation: steps, tokens with their origin, and metrics under vLLM's names.

This module imports neither torch nor anything else of specnb at import time, so a saved result can be read anywhere.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ORIGINS = ("accepted", "corrected", "bonus", "plain")
_ENDED = ("eos", "stop_string", "stopping_criteria", "length")
FORMAT = "specnb.GenerationResult/2"
_RENAMED = {"specnb.GenerationResult/1": {"signal": "match_length", "withheld": "lookahead_token"}}
"""Fields of a step that have other names in older formats."""
FINISH_REASONS = (*_ENDED, "max_time", "context", "cancelled", "interrupted")


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
        draft_top_logprobs: with `top_logprobs=n`, per drafted token, the same of the drafter's logits if it has any.
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
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    steps: tuple[Step, ...]
    finish_reason: str
    pieces: tuple[str, ...] | None = None
    rejected_pieces: tuple[tuple[str, ...], ...] | None = None

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


@dataclass
class GenerationResult:
    """What `specnb.generate` returns. For a single row, `.text`, `.ids`, `.tokens` and `.finish_reason` are the row's.

    Attributes:
        method: name of the method.
        rows: one result per prompt.
        options: the options in effect.
        seed: the seed that was used; None when greedy.
        seconds: of the whole call.
        lossy: whether the method changes the target's distribution.
        target_passes: number of target passes of the whole batch.
        sequences: what transformers' `generate()` would return, `[rows, length]`, long. None if read from JSON.
        scores, logits: with `output_scores` and `output_logits`, what `generate()` returns under these names: one
            float32 `[rows, vocab]` per token, after and before the logits processors. None if read from JSON.
        option_sources: where each option comes from: "call", "target" or "assistant" (generation configs), "default".
        runtime: for "target" and "assistant", how many modules were replaced by which kind
            (`specnb.runtime.prepare.Runtime`).
    """

    method: str
    rows: list[RowResult]
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    seconds: float = 0.0
    lossy: bool = False
    target_passes: int = 0
    sequences: Any = field(default=None, repr=False, compare=False)
    scores: Any = field(default=None, repr=False, compare=False)
    logits: Any = field(default=None, repr=False, compare=False)
    option_sources: Mapping[str, str] = field(default_factory=dict)
    runtime: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    # ---- one row
    @property
    def _row(self) -> RowResult:
        if len(self.rows) != 1:
            raise ValueError(f"this result has {len(self.rows)} rows: use .rows[i].")
        return self.rows[0]

    text = property(lambda self: self._row.text, doc="The generated text of the only row, without special tokens.")
    ids = property(lambda self: self._row.ids, doc="The generated ids of the only row.")
    tokens = property(lambda self: self._row.tokens, doc="The generated tokens of the only row, with origin.")
    finish_reason = property(lambda self: self._row.finish_reason, doc="Why the only row ended.")

    @property
    def steps(self) -> list[Step]:
        """All rows' steps, row by row."""
        return [step for row in self.rows for step in row.steps]

    # ---- metrics
    @property
    def num_spec_steps(self) -> int:
        """Number of steps with drafted tokens."""
        return sum(bool(step.drafted) for step in self.steps)

    @property
    def num_draft_tokens(self) -> int:
        """Number of drafted tokens."""
        return sum(len(step.drafted) for step in self.steps)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Number of drafted tokens that were accepted."""
        return sum(step.accepted for step in self.steps)

    @property
    def num_emitted_tokens(self) -> int:
        """Number of generated tokens, all rows together."""
        return sum(len(row.ids) for row in self.rows)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted; 0 when nothing was drafted."""
        return self.num_accepted_draft_tokens / max(1, self.num_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step that drafted: 1 + accepted tokens / `num_spec_steps`."""
        return 1 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)

    @property
    def acceptance_rate_by_position(self) -> list[float]:
        """For draft position i (from 0): steps that accepted it / steps that drafted at all (vLLM's definition)."""
        longest = max((len(step.drafted) for step in self.steps), default=0)
        return [sum(step.accepted > i for step in self.steps) / max(1, self.num_spec_steps) for i in range(longest)]

    @property
    def tokens_per_pass(self) -> float:
        """Generated tokens per row and target pass, plain steps included."""
        return self.num_emitted_tokens / max(1, len(self.steps))

    @property
    def draft_seconds(self) -> float:
        """Seconds spent drafting."""
        return sum(step.draft_seconds for step in self.steps)

    @property
    def verify_seconds(self) -> float:
        """Seconds spent in target passes."""
        return sum(step.verify_seconds for step in self.steps)

    @property
    def prefill_seconds(self) -> float:
        """Seconds of prefill: the first target pass of each row."""
        return sum(row.steps[0].verify_seconds for row in self.rows if row.steps)

    @property
    def other_seconds(self) -> float:
        """Seconds spent neither drafting nor verifying."""
        return max(0.0, self.seconds - self.draft_seconds - self.verify_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all rows per second of the whole call, prefill included."""
        return self.num_emitted_tokens / self.seconds if self.seconds else 0.0

    def metrics(self) -> dict[str, float | int | list[float]]:
        """The metrics without times, by name; they are the same on every run."""
        names = (
            "num_emitted_tokens",
            "target_passes",
            "num_spec_steps",
            "num_draft_tokens",
            "num_accepted_draft_tokens",
            "draft_acceptance_rate",
            "mean_acceptance_length",
            "acceptance_rate_by_position",
        )
        return {name: getattr(self, name) for name in names}

    # ---- other forms
    def to_json(self, **dumps: Any) -> str:
        """The result as JSON, without `sequences`, `scores` and `logits`. `dumps` are arguments of `json.dumps`."""
        left_out = ("sequences", "scores", "logits", "rows")
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
        data["rows"] = [dataclasses.asdict(row) for row in self.rows]
        return json.dumps({"format": FORMAT, **data}, default=str, **dumps)

    @classmethod
    def from_json(cls, text: str) -> GenerationResult:
        """Read what `to_json` wrote; ValueError for anything else."""
        try:
            data = json.loads(text)
            if (made := data.pop("format")) not in (FORMAT, *_RENAMED):
                raise KeyError("format")
            data["rows"] = [_row(row, _RENAMED.get(made, {})) for row in data["rows"]]
            return cls(**data)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a specnb.GenerationResult in JSON: {error!r}") from error

    def to_pandas(self) -> Any:
        """A DataFrame with one row per step; ImportError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas") from error
        counts = [{"num_drafted": len(step.drafted), "num_emitted": len(step.emitted)} for step in self.steps]
        return pandas.DataFrame([dataclasses.asdict(s) | count for s, count in zip(self.steps, counts, strict=True)])

    def plot(self, kind: str = "timeline") -> Any:
        """A matplotlib figure: "timeline" (time and tokens of each step) or "acceptance" (by draft position)."""
        from specnb.views import plots

        return plots.plot(self, kind)

    def __repr__(self) -> str:
        count = f"{self.num_emitted_tokens} tokens in {len(self.steps)} steps"
        if len(self.rows) > 1:
            count += f" over {len(self.rows)} rows"
        if self.num_draft_tokens:
            count += f", {self.num_accepted_draft_tokens} of {self.num_draft_tokens} drafted tokens accepted"
        return f"GenerationResult({self.method}: {count})"

    def _repr_html_(self) -> str:
        from specnb.views.html import result_view

        return result_view(self)

    def __str__(self) -> str:
        from specnb.views.text import marked_text

        return marked_text(self)


def _row(data: Mapping[str, Any], renamed: Mapping[str, str]) -> RowResult:
    def tuples(value: Any) -> Any:
        return tuple(tuples(v) for v in value) if isinstance(value, list) else value

    fields = {key: tuples(value) for key, value in data.items() if key != "steps"}
    steps = tuple(
        Step(**{renamed.get(key, key): tuples(value) for key, value in step.items()}) for step in data["steps"]
    )
    return RowResult(**fields, steps=steps)
