"""The result of a generation: its rows of steps (`specnb.steps`), and metrics under vLLM's names.

Neither torch nor transformers is imported at import time, so a saved result can be read anywhere.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specnb.steps import ORIGINS, RowResult, Step, Token

__all__ = ["FINISH_REASONS", "FORMAT", "ORIGINS", "GenerationResult", "RowResult", "Step", "Token"]

_ENDED = ("eos", "stop_string", "stopping_criteria", "length")
FORMAT = "specnb.GenerationResult/2"
_RENAMED = {"specnb.GenerationResult/1": {"signal": "match_length", "withheld": "lookahead_token"}}
"""Fields of a step that have other names in older formats."""
FINISH_REASONS = (*_ENDED, "max_time", "context", "cancelled", "interrupted")


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
        model, assistant: names of the target and of the assistant model; empty if there is none.
        call: runs the call again from other tokens, for `branch`. None if read from JSON, or from `specnb.decoder`.
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
    model: str = ""
    assistant: str = ""
    call: Any = field(default=None, repr=False, compare=False)

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
        left_out = ("sequences", "scores", "logits", "rows", "call")
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

    def branch(self, index: int, token: int | None = None, *, row: int = 0, **options: Any) -> GenerationResult:
        """Generate again from the prompt and the first `index` tokens, with another token next.

        Args:
            index: how many of the row's tokens are kept, 0 to all of them.
            token: id of the token that follows; None leaves it to the model.
            row: index of the row.
            options: arguments of `specnb.generate` that differ from those of this result's call, such as `method`.

        Returns:
            The result of the new call. Its prompt ends with the kept tokens and the given one.

        Raises:
            ValueError: `index` is out of bounds, no new token may follow, or the model is no longer there.
        """
        if self.call is None:
            raise ValueError("this result cannot branch: only what specnb.generate() returned knows its model.")
        found = self.rows[row]
        if not 0 <= index <= len(found.ids):
            raise ValueError(f"index={index!r} is not valid: the row has {len(found.ids)} tokens, so 0 to that many.")
        new = () if token is None else (token,)
        result: GenerationResult = self.call(found.prompt_ids, (*found.ids[:index], *new), len(self.rows), **options)
        return result

    def view(self, plain: GenerationResult | None = None) -> Any:
        """The interactive view of the tokens, for a notebook; static HTML where it cannot be shown.

        Args:
            plain: a run of plain decoding from the same prompt, whose times the replay shows beside this run's. None
                estimates them from this run's passes.
        """
        import specnb
        from specnb.views.html import StaticView

        try:
            return specnb.TokenView(self, plain)
        except ImportError as error:
            return StaticView(self, f"The interactive view needs the package {error.name}: %pip install {error.name}")

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
    if fields.get("token_texts") is not None:
        fields["token_texts"] = {int(token): text for token, text in fields["token_texts"].items()}
    steps = tuple(
        Step(**{renamed.get(key, key): tuples(value) for key, value in step.items()}) for step in data["steps"]
    )
    return RowResult(**fields, steps=steps)
