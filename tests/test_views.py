"""Static views: origins readable without colour, everything escaped, the same string in every process."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from specnb.trace import GenerationResult, RowResult, Step
from specnb.views.html import STYLE, TokenHtml, result_view, stats_line, token_view
from specnb.views.table import Table
from specnb.views.text import legend, marked_text, speed_text, stats_text, visible


def row(texts: list[str], rejected: bool = True) -> RowResult:
    """Three steps: one token without a draft; two accepted and a correction; all drafted accepted (one) and a bonus."""
    a, b, c, d, e, f = texts
    steps = (
        Step(3, (), 0, (1,)),
        Step(4, (2, 3, 9, 8), 2, (2, 3, 4), 0.1, 0.2),
        Step(7, (5,), 1, (5, 6), 0.1, 0.2),
    )
    wrong = ((), (" wrong", "<draft>"), ()) if rejected else None
    return RowResult((7, 7, 7), (1, 2, 3, 4, 5, 6), steps, "length", (a, b, c, d, e, f), wrong)


def result(*rows: RowResult) -> GenerationResult:
    return GenerationResult("draft_model", list(rows), {"max_new_tokens": 6}, seconds=1.25, target_passes=4)


TEXTS = ["The", " quick", " brown", " fox", " jumps", "."]


class _Checked(HTMLParser):
    """Collects tags and text; fails on elements that are not closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: set[str] = set()
        self.text: dict[str, str] = {}
        self.feed(source)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.stack.append(tag)
        self.tags.add(tag)
        assert not any(name.startswith("on") or name == "id" for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if "pre" in self.stack:
            self.text[self.stack[-1]] = self.text.get(self.stack[-1], "") + data


def test_origins_have_their_own_tags() -> None:
    parsed = _Checked(token_view(row(TEXTS)))
    assert parsed.text == {
        "pre": "\nThe",
        "ins": " quick brown jumps",
        "mark": " fox",
        "b": ".",
        "del": " wrong<draft>",
    }
    assert {"details", "summary"} <= parsed.tags and "script" not in parsed.tags


def test_token_borders_within_a_run() -> None:
    assert "<ins> quick<i></i> brown</ins>" in token_view(row(TEXTS))


def test_legend_names_what_occurs() -> None:
    shown = token_view(row(TEXTS))
    for name in ("<ins>accepted</ins>", "<mark>corrected</mark>", "<b>bonus</b>", "plain", "<del>rejected</del>"):
        assert name in shown
    only_plain = RowResult((1,), (1, 2), (Step(1, (), 0, (1,)), Step(2, (), 0, (2,))), "length", ("a", "b"))
    assert "<small>" not in token_view(only_plain)
    assert legend({"plain"}) == ""


def test_style_has_no_colour_alone() -> None:
    for tag in ("ins", "mark", "b", "del"):
        rule = re.search(rf"\.specnb {tag}\{{([^}}]*)\}}", STYLE)
        assert rule and "text-decoration" in rule[1]
    assert not re.search(r"[;{]color:(?!inherit)", STYLE)  # text keeps the theme's colour, dark or light


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "a & b < c", "\"quoted\" 'x'", "</pre>", "<!--", "&amp;"]
)
def test_everything_is_escaped(text: str) -> None:
    parsed = _Checked(token_view(row([text, *TEXTS[1:]])))
    assert parsed.text["pre"] == "\n" + text and "script" not in parsed.tags
    assert html.escape(text, quote=False) in Table([[text]], [text]).to_html()


def test_control_characters_become_visible() -> None:
    assert visible("a\x00\x1b[2Jb\n\t\x7f\r\x9b") == "a␀␛[2Jb\n\t␡␍\ufffd"
    shown = marked_text(result(row(["\x1b[31m", *TEXTS[1:]])))
    assert "\x1b" not in shown


def test_first_line_break_right_to_left_and_partial_characters() -> None:
    shown = token_view(row(["\n", "مرحبا", " שלום", "\ufffd", "", ""]))
    assert '<pre dir="auto">\n\n<ins>' in shown and "unicode-bidi:plaintext" in shown
    assert _Checked(shown).text["mark"] == "\ufffd" and "<b>" not in shown.split("</pre>")[0]


def test_without_text_the_ids_are_shown() -> None:
    bare = RowResult((7,), (1, 2), (Step(1, (1, 5), 1, (1, 2)),), "length")
    parsed = _Checked(token_view(bare))
    assert parsed.text == {"pre": "\n", "ins": "1 ", "mark": "2 ", "del": "5 "}
    assert "⟦1 ⟧‹2 ›" in marked_text(result(bare))


def test_long_texts_are_small_and_quick() -> None:
    steps = tuple(
        Step(4 * i, (1, 2, 9), 2, (1, 2, 3, 4)[: 3 + i % 2] if i % 2 == 0 else (1, 2, 3)) for i in range(3400)
    )
    count = sum(len(step.emitted) for step in steps)
    long = RowResult((1,), (1,) * count, steps, "length", (" <word>",) * count, ((" wrong",),) * len(steps))
    assert count > 10_000
    start = time.perf_counter()
    shown = token_view(long)
    assert time.perf_counter() - start < 1 and len(shown.encode()) < 2_000_000


def test_growing_view_equals_the_static_one() -> None:
    one, tokens, start = row(TEXTS, rejected=False), TokenHtml(), 0
    for step in one.steps:
        tokens.add(step, TEXTS[start : start + len(step.emitted)])
        start += len(step.emitted)
        _Checked(tokens.html())
    assert tokens.html() in token_view(one)


def test_marked_text() -> None:
    shown = marked_text(result(row(TEXTS)))
    assert shown == (
        "The⟦ quick brown⟧‹ fox›⟦ jumps⟧«.»\n"
        "⟦accepted⟧ ‹corrected› «bonus» plain\n"
        "draft_model · 6 tokens in 4 target passes · accepted 3 of 5 drafted (60.0%) · mean acceptance length 2.50"
        " · ended: length"
    )
    assert str(result(row(TEXTS))) == shown


def test_ansi_styles_differ_without_colour() -> None:
    shown = marked_text(result(row(TEXTS)), ansi=True)
    assert "\x1b[4;32m quick brown\x1b[0m\x1b[1;33m fox\x1b[0m" in shown and "\x1b[1;4;36m.\x1b[0m" in shown
    assert "⟦" not in shown


def test_several_rows() -> None:
    both = result(row(TEXTS), row(TEXTS))
    assert result_view(both).count("<pre") == 2 and "Row 2 of 2 (ended: length)" in result_view(both)
    assert marked_text(both).count("Row ") == 2 and "ended: length" not in stats_text(both)


def test_statistics_have_no_times() -> None:
    slow, quick = result(row(TEXTS)), result(row(TEXTS))
    quick.seconds = 0.001
    for view in (result_view, stats_line, marked_text, stats_text, repr, str):
        assert view(slow) == view(quick)
    assert speed_text(slow) == "4.8 tokens/s (6 tokens in 1.25 s)"


def test_tables() -> None:
    rows = [["plain", 1.0, None, True], ["lookup", 12.345, 3, False]]
    headers = ["method", "tokens/s", "passes", "same"]
    assert Table(rows, headers).to_text() == (
        "method  tokens/s  passes  same\n"
        "------  --------  ------  ----\n"
        "plain       1.00       -  yes\n"
        "lookup     12.35       3  no"
    ).replace("12.35", f"{12.345:.2f}")
    parsed = _Checked(Table(rows, headers).to_html())
    assert "table" in parsed.tags and "<td class=n>1.00</td>" in Table(rows, headers).to_html()
    assert Table([], ["a"]).to_text() == "a\n-"


_PROGRAM = """
import sys; sys.path.insert(0, {tests!r})
from test_views import TEXTS, result, row
from specnb.views.table import Table
one = result(row(TEXTS), row(["<a>", *TEXTS[1:]]))
print(ascii([repr(one), str(one), one._repr_html_(), Table([["plain", 1.5, 2, None]], ["a", "b", "c", "d"]).to_html()]))
"""


def test_NBT_02_same_strings_in_two_processes() -> None:
    tests = str(Path(__file__).parent)
    outputs = []
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", _PROGRAM.format(tests=tests)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(tests).parent,
        )
        outputs.append(run.stdout)
    assert outputs[0] == outputs[1]
    assert " at 0x" not in outputs[0] and tests not in outputs[0] and "tokens/s" not in outputs[0]


def test_tooltips_and_what_was_asked_for() -> None:
    made = result(row(TEXTS))
    html_text = result_view(made)
    assert '<ins title="step 2: 2 of 4 drafted tokens accepted (draft_model)"> quick' in html_text
    assert '<b title="step 3: 1 of 1 drafted tokens accepted (draft_model)">' in html_text
    assert "<details class" not in html_text  # nothing is known of models and prompt
    made.model, made.assistant, made.rows[0].prompt_text = "big", "small", "<b>" + "x" * 5000
    _Checked(result_view(made, details=True))
    shown = result_view(made)
    assert "<summary>big with small, draft_model</summary><small>max_new_tokens=6</small>" in shown
    assert "&lt;b&gt;x" in shown and "(5003 characters)" in shown and "x" * 4000 not in shown
    assert '<span title="accepted, step 2: 2 of 4 drafted' in result_view(made, details=True)
