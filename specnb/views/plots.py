"""Plots of results as matplotlib figures. They do not use pyplot, so any thread may draw.

The colours are those of Okabe and Ito, which colour-blind readers can distinguish; hatches and outlines repeat what
colour says. Every figure has alt text. Its text/plain form holds no times, so that stored notebooks can be compared.
"""

from __future__ import annotations

import base64
import io
from html import escape
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specnb.options import unknown
from specnb.trace import GenerationResult

if TYPE_CHECKING:
    from specnb.bench import Comparison, Run
    from specnb.training.result import TrainingResult

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#767676"
_WIDTH = 7.0  # inches at 100 dots per inch: the width of a notebook's output


class Picture(Figure):
    """A figure that notebooks show as an image with alt text.

    Args:
        height: in inches.
        stable: description without times; shown where images cannot be.

    Attributes:
        alt: the alt text; may hold times.
        stable: the description without times.
    """

    def __init__(self, height: float, stable: str) -> None:
        super().__init__(figsize=(_WIDTH, height), dpi=100, layout="constrained", facecolor="white")
        self.stable = self.alt = stable

    def png(self) -> bytes:
        """The image in PNG format."""
        out = io.BytesIO()
        self.savefig(out, format="png", metadata={"Software": None})
        return out.getvalue()

    def html(self) -> str:
        """The image with its alt text, as static HTML."""
        data = base64.b64encode(self.png()).decode("ascii")
        return f'<img alt="{escape(self.alt)}" style="max-width:100%;height:auto" src="data:image/png;base64,{data}">'

    def __repr__(self) -> str:
        return self.stable

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return self.html()


def plot(result: GenerationResult, kind: str = "timeline") -> Picture:
    """The plot of a result by name.

    Raises:
        ValueError: `kind` is not one of `KINDS`.
    """
    if kind not in KINDS:
        raise ValueError(unknown("plot", kind, KINDS))
    return KINDS[kind](result)


def acceptance_by_position(result: GenerationResult) -> Picture:
    """Bars: how often the first, second, ... drafted token of a step was accepted."""
    rates = result.acceptance_rate_by_position
    shown = ", ".join(f"{i}: {rate:.0%}" for i, rate in enumerate(rates, 1)) or "nothing was drafted"
    figure = Picture(2.8, f"Acceptance by draft position, {result.method}: {shown}.")
    axes = figure.subplots()
    bars = axes.bar(range(1, len(rates) + 1), [100 * rate for rate in rates], color=BLUE, width=0.7)
    if rates:
        axes.bar_label(bars, [f"{rate:.0%}" for rate in rates], padding=2, fontsize=9)
    else:
        _note(axes, "nothing was drafted")
    axes.set(ylim=(0, 112), xlim=(0.4, max(4, len(rates)) + 0.6), xlabel="position in the draft", ylabel="accepted (%)")
    axes.set_yticks(range(0, 101, 25))
    axes.set_title(f"Acceptance by draft position ({result.method}, {result.num_spec_steps} steps that drafted)")
    _whole_numbers(axes)
    return figure


def step_timeline(result: GenerationResult) -> Picture:
    """Per step: milliseconds of drafting and verifying, and how many of the drafted tokens were accepted."""
    steps = result.steps
    drafted, accepted = result.num_draft_tokens, result.num_accepted_draft_tokens
    stable = f"Timeline of {len(steps)} steps, {result.method}: {accepted} of {drafted} drafted tokens accepted."
    figure = Picture(4.4, stable)
    figure.alt = (
        f"{stable} {result.draft_seconds:.2f} s drafting, {result.verify_seconds:.2f} s verifying, of which "
        f"{result.prefill_seconds:.2f} s for the prompt."
    )
    above, below = figure.subplots(2, sharex=True)
    edges = [i + 0.5 for i in range(len(steps) + 1)]
    draft = [1000 * step.draft_seconds for step in steps]
    whole = [ms + 1000 * step.verify_seconds for ms, step in zip(draft, steps, strict=True)]
    if steps:
        _fill_steps(above, edges, whole, draft, facecolor=BLUE, label="verify (target)")
        _fill_steps(above, edges, draft, facecolor=ORANGE, hatch="////", edgecolor="white", label="draft")
        above.set_ylim(bottom=0)
        later = sorted(whole[1:]) or whole
        if whole[0] > 3 * later[-1]:  # cut the prefill off, so that the other steps remain readable
            top = 1.3 * later[-1]
            above.set_ylim(0, top)
            label = f"prompt: {whole[0]:.0f} ms"
            above.annotate(label, (1, top), (6, -10), textcoords="offset points", fontsize=9)
        below.stairs(
            [len(step.drafted) for step in steps], edges, fill=False, color=GREY, linewidth=1.3, label="drafted"
        )
        _fill_steps(below, edges, [step.accepted for step in steps], facecolor=GREEN, label="accepted")
        below.set_ylim(0, max(1, *(len(step.drafted) for step in steps)) * 1.15)
    above.set(ylabel="milliseconds")
    below.set(ylabel="drafted tokens", xlabel="step")
    above.set_title(f"Time per step ({result.method})")
    below.set_title(f"Accepted of drafted: {accepted} of {drafted}" if drafted else "Nothing was drafted")
    for axes in (above, below) if drafted else (above,):
        if steps:
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
    _whole_numbers(below)
    below.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def comparison_bars(comparison: Comparison) -> Picture:
    """Tokens per second of every run: bars for the medians, lines for the spread, and the speed-ups as text."""
    rows = comparison.rows
    figure = Picture(1.4 + 0.42 * len(rows), f"Comparison of speed: {', '.join(row.label for row in rows)}.")
    figure.alt = f"{figure.stable} {_speeds(rows)} {comparison.verdict}"
    axes = figure.subplots()
    places = range(len(rows))
    best = comparison.best
    medians = [row.median for row in rows]
    bars = axes.barh(places, medians, color=[GREY, *[BLUE] * (len(rows) - 1)], height=0.6)
    for bar, row in zip(bars, rows, strict=True):
        if row is best:
            bar.set(hatch="//", edgecolor="white")
    axes.errorbar(medians, places, xerr=_errors(rows), fmt="none", ecolor="black", capsize=3, linewidth=1)
    top = max(row.spread[1] for row in rows)
    for i, row in enumerate(rows):
        text = f"{row.median:.1f}" + (f" ({row.speed_up:.2f}x)" if i else "") + (" ★" if row is best else "")
        axes.annotate(text, (row.spread[1], i), (6, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(places, [_wrap_label(row.label) for row in rows])
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.28 * top or 1), xlabel="tokens per second (median; line: slowest to fastest)")
    axes.set_title(
        f"Speed, {comparison.prompts} prompt{'s' * (comparison.prompts > 1)}, "
        f"{comparison.repeats} repeat{'s' * (comparison.repeats > 1)}"
    )
    _plain_frame(axes)
    return figure


def by_option(comparison: Comparison) -> Picture:
    """Tokens per second and per target pass against the values of the option that was varied.

    For the draft length, another line shows the prediction of the cost model (`specnb.bench.Run`).

    Raises:
        ValueError: the runs do not differ in just one option with numbers as values.
    """
    name = comparison.varied_option
    if name is None:
        raise ValueError("by_option() needs runs that differ in one numeric option only; use comparison_bars().")
    plain, *rows = sorted(comparison.rows, key=lambda row: (row.label != "plain", row.options.get(name, 0)))
    values = [row.options[name] for row in rows]
    figure = Picture(3.2, f"Speed and tokens per target pass against {name} = {', '.join(map(str, values))}.")
    figure.alt = f"{figure.stable} {_speeds([plain, *rows])} {comparison.verdict}"
    left, right = figure.subplots(1, 2)
    left.errorbar(
        values, [row.median for row in rows], yerr=_errors(rows), color=BLUE, marker="o", capsize=3, label="measured"
    )
    left.axhline(plain.median, color=GREY, linestyle="--", label="plain decoding")
    if name == "num_assistant_tokens":
        left.plot(
            values,
            [(row.predicted or 1) * plain.median for row in rows],
            color=RED,
            linestyle=":",
            marker="x",
            label="cost model",
        )
    left.set_ylim(0, 1.3 * max(row.spread[1] for row in [plain, *rows]))
    left.set(xlabel=name, ylabel="tokens per second", title="Speed")
    left.legend(frameon=False, fontsize=8)
    right.plot(values, [row.tokens_per_pass for row in rows], color=GREEN, marker="s")
    right.axhline(1, color=GREY, linestyle="--")
    right.set(xlabel=name, ylabel="tokens per target pass", title="Tokens per pass (plain: 1)")
    right.set_ylim(0, 1.15 * max(1.0, *(row.tokens_per_pass for row in rows)))
    for axes in (left, right):
        _plain_frame(axes)
        if all(isinstance(value, int) for value in values):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def training_curves(result: TrainingResult) -> Picture:
    """The loss, and the held-out acceptance by position, over the seconds of training."""
    history, best = result.history, result.best
    positions = range(1, len(best.acceptance) + 1)
    figure = Picture(3.2, f"Training of a drafter: loss, and acceptance at positions 1 to {len(best.acceptance)}.")
    shares = ", ".join(f"{i}: {share:.0%}" for i, share in zip(positions, best.acceptance, strict=True))
    figure.alt = f"{figure.stable} Accepted at last: {shares}; {best.mean_acceptance_length:.2f} tokens a pass."
    left, right = figure.subplots(1, 2)
    learned = [one for one in history if one.loss is not None]
    left.plot([one.seconds for one in learned], [one.loss for one in learned], color=BLUE, marker="o", markersize=3)
    left.set(xlabel="seconds of training", ylabel="loss", title="Loss")
    seconds = [one.seconds for one in history]
    for i in positions:
        shade = 1 - 0.8 * (i - 1) / max(1, len(best.acceptance))
        values = [100 * one.acceptance[i - 1] for one in history]
        right.plot(seconds, values, color=GREEN, alpha=shade, marker="o", markersize=3, label=f"position {i}")
        right.annotate(str(i), (seconds[-1], values[-1]), (4, 0), textcoords="offset points", va="center", fontsize=9)
    right.axvline(best.seconds, color=GREY, linestyle="--", linewidth=1)
    right.set(xlabel="seconds of training", ylabel="accepted (%)", title="Held-out drafts right up to position")
    right.set_ylim(0, 100)
    for axes in (left, right):
        _plain_frame(axes)
    return figure


def _speeds(rows: list[Run]) -> str:
    return "; ".join(f"{row.label}: {row.median:.1f} tokens/s, {row.speed_up:.2f} times plain" for row in rows) + "."


def _errors(rows: list[Run]) -> list[list[float]]:
    return [[row.median - row.spread[0] for row in rows], [row.spread[1] - row.median for row in rows]]


def _wrap_label(label: str) -> str:
    return label.replace(", ", "\n", 1)


def _fill_steps(axes: Any, edges: list[float], tops: list[Any], bottoms: list[Any] | None = None, **style: Any) -> None:
    """Fill a bar for each step. `axes.stairs` would take seconds to find the limits of thousands of them."""
    lows = 0 if bottoms is None else [*bottoms, bottoms[-1]]
    axes.fill_between(edges, [*tops, tops[-1]], lows, step="post", linewidth=0, **style)


def _whole_numbers(axes: Any) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _plain_frame(axes)


def _plain_frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _note(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)


KINDS = {"timeline": step_timeline, "acceptance": acceptance_by_position}
"""The plots of a result by name."""
