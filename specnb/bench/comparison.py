"""The results of a comparison: the measurements of every run, and their table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from specnb.trace import GenerationResult

if TYPE_CHECKING:
    from specnb.views.table import Table

_COUNTED = ("acceptance rate", "mean acceptance length", "target passes", "same text as plain")
_TIMED = ("tokens/s", "from", "to", "speed-up", "predicted", "draft/verify/rest %")
_OWN = "x transformers' own"
_FORMAT = "specnb.Comparison/1"


@dataclass(frozen=True)
class Run:
    """The measurements of one run over all prompts: one value per repeat for speeds, medians over repeats for costs.

    Attributes:
        label: short name of the run.
        options: the run's arguments of `generate`.
        tokens_per_second: per repeat, generated tokens per second of the whole calls.
        speed_ups: per repeat, the speed divided by that of plain decoding in the same repeat.
        draft_acceptance_rate: accepted / drafted tokens; None where nothing was drafted.
        mean_acceptance_length: tokens per step that drafted; None where nothing was drafted.
        tokens_per_pass: generated tokens per row and target pass.
        target_passes: number of target passes.
        same_text: whether all texts equal those of plain decoding; None when sampling.
        lossy: whether the method changes the target's distribution.
        draft_cost: seconds per drafted token.
        pass_cost: seconds per target pass, without prefill.
        parts: seconds of drafting, of verifying, and of the rest.
        predicted: the speed-up that the cost model of Leviathan et al. (2211.17192, section 3.3) predicts; None where
            nothing was drafted. With acceptance rate a, a draft of k tokens yields 1 + a + ... + a^k tokens for k
            draft costs and one pass.
        own_ratios: per repeat, the speed divided by that of transformers' own implementation; empty if it did not run.
        own: why transformers' own implementation did not run.
    """

    label: str
    options: Mapping[str, Any]
    tokens_per_second: tuple[float, ...]
    speed_ups: tuple[float, ...]
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    tokens_per_pass: float
    target_passes: int
    same_text: bool | None
    lossy: bool
    draft_cost: float
    pass_cost: float
    parts: tuple[float, float, float] = (0.0, 0.0, 0.0)
    predicted: float | None = None
    own_ratios: tuple[float, ...] = ()
    own: str = ""

    @property
    def median(self) -> float:
        """Median of the tokens per second."""
        return statistics.median(self.tokens_per_second)

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest repeat, in tokens per second."""
        return min(self.tokens_per_second), max(self.tokens_per_second)

    @property
    def speed_up(self) -> float:
        """Median of the speed-ups over plain decoding."""
        return statistics.median(self.speed_ups)

    @property
    def own_ratio(self) -> float | None:
        """Median of the speeds over transformers' own implementation of the method; None where it was not run."""
        return statistics.median(self.own_ratios) if self.own_ratios else None

    @property
    def shares(self) -> str:
        """Drafting, verifying and the rest, in percent of the time."""
        whole = sum(self.parts)
        return "/".join(f"{100 * part / whole:.0f}" for part in self.parts) if whole else ""


@dataclass
class Comparison:
    """What `compare` returns.

    Attributes:
        rows: the runs, plain decoding first.
        prompts: number of prompts.
        repeats: number of complete repeats.
        options: options that all runs share.
        environment: model, machine, versions and date, as of `environment`.
        results: by label, the results of the last repeat, one per prompt.
    """

    rows: list[Run]
    prompts: int
    repeats: int
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, list[GenerationResult]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def best(self) -> Run:
        """The run with the highest median speed-up over plain decoding."""
        return max(self.rows, key=lambda row: row.speed_up)

    @property
    def varied_option(self) -> str | None:
        """The numeric option in which the runs differ; None if they differ in others too, or in none."""
        runs = [row.options for row in self.rows if row.options.get("method") != "plain"]
        names = {name for run in runs for name in run}
        varying = [name for name in names if len({repr(run.get(name)) for run in runs}) > 1]
        numeric = len(varying) == 1 and all(isinstance(run.get(varying[0]), (int, float)) for run in runs)
        return varying[0] if numeric else None

    @property
    def verdict(self) -> str:
        """A sentence that says which run is best, and whether the measurements are clear enough to tell."""
        best, where = self.best, "this prompt" if self.prompts == 1 else "these prompts"
        once = " One run each: times vary from run to run." if self.repeats == 1 else ""
        if best is self.rows[0]:
            rivals = [row for row in self.rows if max(row.speed_ups) > 1]
            if not rivals:
                return f"Plain decoding is fastest for {where}: no method pays off here.{once}"
            near = max(rivals, key=lambda row: row.speed_up).label
            return f"No clear winner for {where}: plain decoding in the median, but {near} was faster in some repeat."
        gain = f"{best.label}, {best.speed_up:.2f} times plain decoding"
        if min(best.speed_ups) <= 1:
            return f"No clear winner for {where}: {gain} in the median, but not faster than it in some repeat."
        note = " (lossy: it changes what the target would write)" if best.lossy else ""
        return f"Best for {where}: {gain}{note}.{once}"

    def table(self, times: bool = True) -> Table:
        """The table of the runs. Without `times` it only has columns that are the same on every machine."""
        from specnb.views.table import Table

        lines: list[list[object]] = []
        own = any(row.own_ratios or row.own for row in self.rows)
        for row in self.rows:
            rate = None if row.draft_acceptance_rate is None else f"{row.draft_acceptance_rate:.1%}"
            speed = [f"{v:.1f}" for v in (row.median, *row.spread)] + [f"{row.speed_up:.2f}x"]
            speed += ["" if row.predicted is None else f"{row.predicted:.2f}x", row.shares]
            speed += [row.own if row.own_ratio is None else f"{row.own_ratio:.2f}"] if own else []
            counted = [rate, row.mean_acceptance_length, row.target_passes, row.same_text]
            lines.append([row.label + row.lossy * " (lossy)", *(speed if times else ()), *counted])
        timed = (*_TIMED, *([_OWN] if own else [])) if times else ()
        return Table(lines, ("run", *timed, *_COUNTED))

    def text(self) -> str:
        """The table as plain text, with times, and the verdict."""
        return f"{self.table().to_text()}\n{self.verdict}"

    def to_json(self, **dumps: Any) -> str:
        """Measurements, verdict, options and environment as JSON, without `results`.

        Args:
            dumps: arguments of `json.dumps`.
        """
        data = {
            "rows": [asdict(row) for row in self.rows],
            "prompts": self.prompts,
            "repeats": self.repeats,
            "verdict": self.verdict,
            "options": self.options,
            "environment": self.environment,
        }
        return json.dumps({"format": _FORMAT, **data}, default=str, **dumps)

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is JSON of another kind.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"this is not a comparison ({_FORMAT}) but {found!r}.")

        def row(values: dict[str, Any]) -> Run:
            fields: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
            }
            return Run(**fields)

        rows = [row(values) for values in data["rows"]]
        return cls(rows, data["prompts"], data["repeats"], data["options"], data["environment"])

    def to_pandas(self) -> Any:
        """A DataFrame with one row per run and repeat.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas") from error
        return pandas.DataFrame(
            [
                {**asdict(row), "repeat": i, "tokens_per_second": speed, "speed_ups": row.speed_ups[i]}
                for row in self.rows
                for i, speed in enumerate(row.tokens_per_second)
            ]
        ).rename(columns={"speed_ups": "speed_up"})

    def plot(self) -> Any:
        """A matplotlib figure: speed against the values of `varied_option` if there is one, else one bar per run."""
        from specnb.views import plots

        return plots.by_option(self) if self.varied_option else plots.comparison_bars(self)

    def __str__(self) -> str:
        return self.table(times=False).to_text()

    def __repr__(self) -> str:
        from specnb.views.text import count_noun

        prompts, repeats = count_noun(self.prompts, "prompt"), count_noun(self.repeats, "repeat")
        return f"Comparison({len(self.rows)} runs, {prompts}, {repeats})"

    def _repr_html_(self) -> str:
        from specnb.views.html import comparison_view

        return comparison_view(self.table(), self.verdict, self.rows.index(self.best))
