"""The animated picture of a run: `python -m tools.animate_run [--output FILE]`, from the repository's root.

Decodes PROMPT with the embedded pair tiny-llama + tiny-llama-draft (greedy) and draws every step: the drafted tokens in
grey, then which of them the target accepted or rejected, then its own token. The file is plain SVG with CSS animation
and no script, so it plays in an <img>. Where animation is off it shows the finished text.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

PROMPT = "Tell me a story about a fox who finds a lantern."
DRAFT_LENGTH, MAX_NEW_TOKENS = 5, 56
OUTPUT = Path("docs/images/run.svg")

# seconds
START, PER_DRAFT, CHECK, JUDGED, REJECTED, SETTLED, END = 0.6, 0.12, 0.4, 0.3, 0.5, 0.35, 4.0

WIDTH, MARGIN, COLUMNS, CELL, LINE, TOP = 800, 28, 72, 10.0, 31, 126
_BAR_LEFT, _BAR_WIDTH = 330, 380

# Each kind of token has a mark of its own beside its colour.
STYLE = """
svg{--paper:#ffffff;--edge:#d0d7de;--ink:#1f2328;--soft:#59636e;--drafted:#6e7781;
--accepted:#1a7f37;--rejected:#cf222e;--corrected:#9a5b00;--bonus:#0757ba;
--accepted-back:#dafbe1;--corrected-back:#fff1d2;--bonus-back:#ddf0ff}
@media (prefers-color-scheme:dark){svg{--paper:#0d1117;--edge:#3d444d;--ink:#f0f6fc;--soft:#9ba4ae;--drafted:#9198a1;
--accepted:#56d364;--rejected:#ff7b72;--corrected:#f0b54a;--bonus:#79c0ff;
--accepted-back:#12301c;--corrected-back:#3a2a0a;--bonus-back:#10294a}}
text{font:16px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",monospace;
fill:var(--ink);white-space:pre}
.s{font:14px system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;fill:var(--soft)}
.h{font:600 16px system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
.n{font:600 16px system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;text-anchor:end}
.paper{fill:var(--paper);stroke:var(--edge)}
.drafted text{fill:var(--drafted);font-style:italic}.drafted rect{fill:none;stroke:var(--drafted);stroke-dasharray:3 2}
.accepted text{fill:var(--accepted)}.accepted rect{fill:var(--accepted-back)}.accepted path{stroke:var(--accepted)}
.rejected text{fill:var(--rejected)}.rejected rect{fill:none;stroke:var(--rejected)}
.rejected path{stroke:var(--rejected)}
.corrected text{fill:var(--corrected);font-weight:700}.corrected rect{fill:var(--corrected-back)}
.corrected path{stroke:var(--corrected)}
.bonus text{fill:var(--bonus);font-weight:700}.bonus rect{fill:var(--bonus-back)}.bonus path{stroke:var(--bonus)}
path{fill:none;stroke-width:1.8}
.s.pass{fill:var(--paper);text-anchor:middle}
.s.note{font-size:12.5px}
.bar{fill:var(--bonus)}.bar.plain{fill:var(--drafted)}.track{fill:none;stroke:var(--edge)}
.gone{opacity:0}
"""


@dataclass(frozen=True)
class Shown:
    """One step as it is drawn: texts of the drafted tokens, how many were accepted, and the target's own token."""

    drafted: tuple[str, ...]
    accepted: int
    closing: str
    origin: str


@dataclass
class Timeline:
    """The picture while it is built: shapes, and the keyframes that show them in their part of the time."""

    seconds: float
    shapes: list[str] = field(default_factory=list)
    windows: dict[tuple[float, float | None], str] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)

    def percent(self, second: float) -> str:
        """A time as a share of the whole."""
        return f"{100 * second / self.seconds:.2f}%"

    def during(self, start: float, end: float | None = None) -> str:
        """The class of what is shown from `start` to `end`; without an end it stays, also where animation is off."""
        name = self.windows.setdefault((start, end), f"w{len(self.windows)}")
        return name if end is None else f"{name} gone"

    def style(self) -> str:
        """The animations. They are left out for who has asked the system for less motion."""
        rules = list(self.extra)
        for (start, end), name in self.windows.items():
            hidden = "" if start == 0 else "0%{opacity:0}"
            away = "" if end is None else f"{self.percent(end)}{{opacity:0}}"
            rules.append(f"@keyframes {name}{{{hidden}{self.percent(start)}{{opacity:1}}{away}}}")
            rules.append(f".{name}{{animation:{name} {self.seconds:.2f}s step-end infinite}}")
        return STYLE + "@media (prefers-reduced-motion:no-preference){\n" + "\n".join(rules) + "\n}\n"


def steps_of(result: Any) -> list[Shown]:
    """The steps of a result with one row. The last step is left out where a stop cut it short."""
    (row,) = result.rows
    shown, start = [], 0
    for step, rejected in zip(row.steps, row.rejected_pieces, strict=True):
        texts = row.pieces[start : start + len(step.emitted)]
        start += len(step.emitted)
        if len(step.emitted) != step.accepted + 1:
            break
        shown.append(Shown((*texts[:-1], *rejected), step.accepted, texts[-1], step.origins[-1]))
    return shown


def place(texts: Sequence[str], column: int, line: int) -> Iterator[tuple[str, int, int]]:
    """Columns and lines of texts written one after the other; a text that does not fit goes to the next line."""
    for text in texts:
        text = text.replace("\n", " ")
        if column + len(text) > COLUMNS:
            column, line = 0, line + 1
            text = text.lstrip()
        yield text, column, line
        column += len(text)


def token(kind: str, text: str, column: int, line: int, window: str) -> str:
    """One token: its text, a box behind it, and the mark of its kind."""
    body = text.lstrip()
    if not body:
        return ""
    x = MARGIN + CELL * (column + len(text) - len(body))
    y, width = TOP + LINE * line, CELL * len(body)
    box = f'<rect x="{x:g}" y="{y - 17}" width="{width:g}" height="23" rx="4"/>' if kind != "plain" else ""
    words = f'<text x="{x:g}" y="{y}" textLength="{width:g}" lengthAdjust="spacingAndGlyphs">{escape(body)}</text>'
    return f'<g class="{kind} {window}">{box}{words}{_mark(kind, x, y, width)}</g>'


def _mark(kind: str, x: float, y: float, width: float) -> str:
    """A line under accepted tokens, a wave under corrected ones, two lines under a bonus, one through rejected ones."""
    left, right = x + 2, x + width - 2
    if kind == "accepted":
        return f'<path d="M{left:g} {y + 4}H{right:g}"/>'
    if kind == "rejected":
        return f'<path d="M{left - 2:g} {y - 5}H{right + 2:g}"/>'
    if kind == "bonus":
        return f'<path d="M{left:g} {y + 2.5:g}H{right:g}M{left:g} {y + 5.5:g}H{right:g}"/>'
    if kind == "corrected":
        return f'<path d="M{left:g} {y + 4}' + "q2 -3 4 0t4 0" * max(1, int((right - left) // 8)) + '"/>'
    return ""


def timed(shown: Sequence[Shown]) -> Iterator[tuple[Shown, float, float, float, float]]:
    """Each step with the times in seconds of its draft, the target's pass, the verdict and the target's own token."""
    now = START
    for step in shown:
        drafted = now + PER_DRAFT * len(step.drafted)
        judged = drafted + CHECK
        settled = judged + (JUDGED if step.drafted else 0) + (REJECTED if step.accepted < len(step.drafted) else 0)
        yield step, now, drafted, judged, settled
        now = settled + SETTLED


def picture(shown: Sequence[Shown], title: str, note: str) -> str:
    """The SVG of a run."""
    times = list(timed(shown))
    timeline = Timeline(times[-1][4] + END)
    draw = timeline.shapes.append
    column, line, lowest = 0, 0, 0
    for step, began, drafted, judged, settled in times:
        places = list(place(step.drafted, column, line))
        for i, (text, x, y) in enumerate(places):
            lowest = max(lowest, y)
            draw(token("drafted", text, x, y, timeline.during(round(began + PER_DRAFT * i, 2), judged)))
            if i < step.accepted:
                draw(token("accepted", text, x, y, timeline.during(judged)))
            else:
                draw(token("rejected", text, x, y, timeline.during(judged, settled)))
        for text, x, y in places[: step.accepted]:
            column, line = x + len(text), y
        ((text, column, line),) = place([step.closing], column, line)
        draw(token(step.origin, text, column, line, timeline.during(settled)))
        column, lowest = column + len(text), max(lowest, line)
        if step.drafted:
            box = f'<rect x="{WIDTH - 196}" y="20" width="168" height="26" rx="13" class="bar"/>'
            words = f'<text x="{WIDTH - 112}" y="38" class="s pass">target checks the draft</text>'
            draw(f'<g class="{timeline.during(drafted, judged)}">{box}{words}</g>')
    _counters(timeline, times)
    height = TOP + LINE * lowest + 78
    _legend(timeline, height - 36)
    head = f'<text x="{MARGIN}" y="38" class="h">{escape(title)}</text>'
    foot = f'<text x="{MARGIN}" y="{height - 14}" class="s note">{escape(note)}</text>'
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    paper = f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8" class="paper"/>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(note)}</desc>",
        f"<style>{timeline.style()}</style>",
        *(paper, head, *(shape for shape in timeline.shapes if shape), foot),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _counters(timeline: Timeline, times: Sequence[tuple[Shown, float, float, float, float]]) -> None:
    """Passes of the target so far, beside those that plain decoding takes for the same tokens: one each."""
    passes, plain = [(0.0, 0)], [(0.0, 0)]
    for step, _, _, judged, settled in times:
        before = plain[-1][1]
        passes.append((judged, len(passes)))
        if step.accepted:
            plain.append((judged, before + step.accepted))
        plain.append((settled, before + step.accepted + 1))
    for name, kind, y, counts in (
        ("passes of the target", "", 66, passes),
        ("plain decoding, same text", "plain", 90, plain),
    ):
        draw = timeline.shapes.append
        draw(f'<text x="{MARGIN}" y="{y}" class="s">{name}</text>')
        frames = []
        for i, (second, count) in enumerate(counts):
            end = counts[i + 1][0] if i + 1 < len(counts) else None
            draw(f'<text x="{_BAR_LEFT - 18}" y="{y}" class="n {timeline.during(second, end)}">{count}</text>')
            frames.append(f"{timeline.percent(second)}{{transform:scaleX({count / counts[-1][1]:.4f})}}")
        bar = f"bar{y}"
        timeline.extra.append(f"@keyframes {bar}{{{''.join(frames)}}}")
        timeline.extra.append(
            f".{bar}{{transform-origin:{_BAR_LEFT}px 0;animation:{bar} {timeline.seconds:.2f}s step-end infinite}}"
        )
        width = _BAR_WIDTH * counts[-1][1] / plain[-1][1]
        place = f'x="{_BAR_LEFT}" y="{y - 11}" height="12" rx="3"'
        draw(f'<rect {place} width="{_BAR_WIDTH}" class="track"/>')
        draw(f'<rect {place} width="{width:.1f}" class="bar {kind} {bar}"/>')


def _legend(timeline: Timeline, y: float) -> None:
    """What the kinds of tokens look like."""
    column = 0.0
    for kind in ("drafted", "accepted", "rejected", "corrected", "bonus"):
        timeline.shapes.append(
            f'<g transform="translate({CELL * column:g} {y - TOP:g})">{token(kind, kind, 0, 0, "")}</g>'
        )
        column += len(kind) + 2


def run_of(pair: Any) -> tuple[str, str]:
    """The picture of the run, and what it shows in a few words."""
    import specnb
    from specnb.text import prompt_inputs

    options = {"num_assistant_tokens": DRAFT_LENGTH, "assistant_confidence_threshold": 0.0, "do_sample": False}
    inputs = prompt_inputs(pair.tokenizer, PROMPT)
    shown = steps_of(specnb.generate(pair, **inputs, **options, max_new_tokens=MAX_NEW_TOKENS))
    note = f"“{PROMPT}”  tiny-llama, drafts of {DRAFT_LENGTH} tokens by tiny-llama-draft, greedy"
    tokens = sum(step.accepted + 1 for step in shown)
    return picture(shown, "Speculative decoding, step by step", note), f"{tokens} tokens in {len(shown)} passes"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE", help=f"default: {OUTPUT}")
    given = parser.parse_args(arguments)

    import specnb

    svg, said = run_of(specnb.load("tiny-llama", "tiny-llama-draft"))
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(svg, encoding="utf-8")
    print(f"{given.output}: {len(svg) / 1000:.0f} kB, {said}")


if __name__ == "__main__":
    main()
