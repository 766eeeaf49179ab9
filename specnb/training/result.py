"""The result of a training: how the loss fell, what is accepted on held-out texts, and whether the drafter pays."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specnb.bench import Comparison
    from specnb.models import Pair
    from specnb.views.plots import Picture

FORMAT = "specnb.TrainingResult/1"
_LEARNED = 0.15  # share of first tokens that are accepted where a drafter has begun to learn


@dataclass(frozen=True)
class Evaluation:
    """What was measured during training.

    Attributes:
        seconds: of training, since its start.
        step: number of optimizer steps.
        loss: mean training loss since the evaluation before; None before the first step.
        acceptance: by position, the share of held-out tokens at which a greedy draft is right up to this position.
    """

    seconds: float
    step: int
    loss: float | None
    acceptance: tuple[float, ...]

    @property
    def mean_acceptance_length(self) -> float:
        """Expected tokens per target pass: 1 + the sum of `acceptance`."""
        return 1 + sum(self.acceptance)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Evaluation:
        """From what `dataclasses.asdict` gave, after a way through JSON."""
        return cls(**{**values, "acceptance": tuple(values["acceptance"])})


@dataclass(frozen=True)
class Progress:
    """What a training is doing.

    Attributes:
        part: "answers", "states", "training" or "measuring".
        share: how much of the part is done, 0 to 1.
        seconds: since the start of the call.
        remaining_seconds: until its end; None with a budget of steps.
        message: one line for people.
    """

    part: str
    share: float
    seconds: float
    remaining_seconds: float | None
    message: str

    @property
    def done(self) -> bool:
        """Whether this is the last one; its message is `TrainingResult.verdict`."""
        return self.part == "measuring" and self.share >= 1


@dataclass
class TrainingResult:
    """What `specnb.train_drafter` returns.

    Attributes:
        out: the folder of the drafter; `specnb.load(TARGET, out)` and vLLM read it.
        settings: all options in effect.
        counts: numbers of examples and tokens, coverage of the draft vocabulary, parameters of the drafter.
        seconds: of each part: answers, states, training, measuring.
        history: the evaluations, in order.
        best: the evaluation of the weights that were kept.
        comparison: plain decoding, prompt lookup and the drafter with several draft lengths on held-out prompts; None
            if nothing could be measured.
        finished: False if it was interrupted.
        pair: the target with the new drafter, ready to use; None if read from JSON.
    """

    out: str
    settings: Mapping[str, Any]
    counts: Mapping[str, Any]
    seconds: Mapping[str, float]
    history: Sequence[Evaluation]
    best: Evaluation
    comparison: Comparison | None = None
    finished: bool = True
    pair: Pair | None = field(default=None, repr=False, compare=False)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """On held-out texts, the share of drafts that are right up to each position."""
        return self.best.acceptance

    @property
    def mean_acceptance_length(self) -> float:
        """Expected tokens per target pass on held-out texts."""
        return self.best.mean_acceptance_length

    @property
    def best_k(self) -> int | None:
        """The draft length that was fastest on held-out prompts; None if nothing was measured."""
        run = self._fastest()
        return int(run.options["num_assistant_tokens"]) if run else None

    @property
    def speed_up(self) -> float | None:
        """Speed over plain decoding on held-out prompts, with `best_k`; None if nothing was measured."""
        run = self._fastest()
        return run.speed_up if run else None

    @property
    def pays(self) -> bool | None:
        """Whether the drafter was faster than plain decoding and than prompt lookup; None if nothing was measured."""
        run = self._fastest()
        if run is None or self.comparison is None:
            return None
        others = [row.speed_up for row in self.comparison.rows if row.options.get("method") != "eagle3"]
        # one repeat can be lucky: the cost model, which knows what was accepted, must agree
        return bool(run.speed_up > max(others) and run.predicted is not None and run.predicted > 1)

    def _fastest(self) -> Any:
        rows = self.comparison.rows if self.comparison else ()
        mine = [row for row in rows if row.options.get("method") == "eagle3"]
        return max(mine, key=lambda row: row.speed_up, default=None)

    @property
    def verdict(self) -> str:
        """What was reached, whether it pays, and if not, what would help."""
        shares = ", ".join(f"{share:.0%}" for share in self.acceptance_by_position)
        reached = f"Held-out texts: accepted {shares}; {self.mean_acceptance_length:.2f} tokens per target pass."
        run = self._fastest()
        if run is None or self.comparison is None:
            return f"{reached} Its speed was not measured: that takes prompts, and some of the minutes."
        rows = self.comparison.rows
        lookup = next((row for row in rows if row.options.get("method") == "prompt_lookup"), None)
        speed = f"{run.speed_up:.2f} times plain decoding with k = {self.best_k}, {self.comparison.prompts} prompts"
        if lookup is not None:
            speed += f" (prompt lookup: {lookup.speed_up:.2f})"
        if self.pays:
            return f"{reached} It pays: {speed}."
        return f"{reached} It does not pay: {speed}. {self._advice(run)}"

    def _advice(self, run: Any) -> str:
        """What would help, by what holds the drafter back."""
        counts = self.counts
        if self.best.acceptance[0] < _LEARNED:
            return "It has hardly learned yet: give it more minutes (or steps), and more prompts."
        if counts.get("coverage", 1) < 0.9:
            full = counts.get("draft vocabulary", 0) >= self.settings.get("draft_vocab_size", 0)
            return (
                f"The draft vocabulary has only {counts['coverage']:.0%} of the held-out tokens: "
                + ("raise draft_vocab_size, or " if full else "")
                + "give more prompts like the held-out ones."
            )
        if run.pass_cost and run.draft_cost > 0.25 * run.pass_cost:
            return (
                f"A drafted token costs {run.draft_cost / run.pass_cost:.0%} of a target pass: the target is small for "
                "its drafter. A larger target gains more; a smaller draft_vocab_size helps, too."
            )
        return (
            f"It has seen {counts.get('training tokens', 0):,} tokens: more minutes, more prompts, or a narrower "
            "domain raise the acceptance."
        )

    def plot(self) -> Picture:
        """Loss and held-out acceptance by position over the time of training."""
        from specnb.views.plots import training_curves

        return training_curves(self)

    def to_json(self, **dumps: Any) -> str:
        """The result as JSON, without the pair.

        Args:
            dumps: arguments of `json.dumps`.
        """
        data = {
            "out": self.out,
            "settings": dict(self.settings),
            "counts": dict(self.counts),
            "seconds": dict(self.seconds),
            "history": [asdict(one) for one in self.history],
            "best": asdict(self.best),
            "finished": self.finished,
            "comparison": json.loads(self.comparison.to_json()) if self.comparison else None,
        }
        return json.dumps({"format": FORMAT, **data}, default=str, **dumps)

    @classmethod
    def from_json(cls, text: str) -> TrainingResult:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is JSON of another kind.
        """
        from specnb.bench import Comparison

        data = json.loads(text)
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f"this is not a training result ({FORMAT}).")
        data["history"] = [Evaluation.from_json(one) for one in data["history"]]
        data["best"] = Evaluation.from_json(data["best"])
        if data["comparison"] is not None:
            data["comparison"] = Comparison.from_json(json.dumps(data["comparison"]))
        return cls(**data)

    def __repr__(self) -> str:
        return f"TrainingResult({self.out!r}). {self.verdict}"
