"""Results as static HTML without script, ids or times, so that the same result always gives the same string.

Tags and underlines show the origin of a token, not colour alone: `<ins>` accepted (underlined; dotted if a hybrid
drafted it), `<mark>` corrected (wavy underline), `<b>` bonus (bold, double underline), no tag for plain decoding,
`<del>` rejected drafts (struck through). The tags still show the difference where a page drops the style sheet, as in
untrusted notebooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from specnb.trace import GenerationResult, RowResult, Step
from specnb.views.text import SHOWN, row_steps, shown_origins, stats_text, visible

if TYPE_CHECKING:
    from specnb.views.table import Table

TAGS = {"accepted": "ins", "lookup": "ins", "corrected": "mark", "bonus": "b", "plain": ""}
STYLE = (
    "<style>"
    ".specnb{line-height:1.6}"
    ".specnb pre{white-space:pre-wrap;overflow-wrap:anywhere;word-break:normal;unicode-bidi:plaintext;font:inherit;"
    "line-height:1.8;margin:.3em 0;padding:0;border:0;background:none;color:inherit}"
    ".specnb ins{text-decoration:underline 2px #2e9e5b;text-underline-offset:3px}"
    ".specnb ins.c{text-decoration:underline dotted 2px #a25fd0}"
    ".specnb mark{color:inherit;background:rgba(230,140,0,.22);text-decoration:underline wavy 1px #d97e00}"
    ".specnb b{font-weight:700;text-decoration:underline double 1px #4a8df0;text-underline-offset:3px}"
    ".specnb del{display:none;text-decoration:line-through;opacity:.65}"
    ".specnb details[open]~pre del,.specnb small del{display:inline}"
    ".specnb i{border-left:1px dotted;margin:0 1px;opacity:.5}"
    ".specnb small,.specnb summary{font-size:.85em;opacity:.85}"
    # .specnb twice: more specific than JupyterLab's rule
    ".specnb.specnb table td,.specnb.specnb table th{padding:.15em .5em;text-align:left}"
    ".specnb.specnb table .n{text-align:right}"
    "</style>"
)
_BORDER = "<i></i>"


class TokenHtml:
    """The HTML of a text that grows step by step. The cost of adding a step does not depend on the text before it.

    Attributes:
        origins: the origins that occur in the text.
        rejected: number of rejected draft tokens.
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._open = ""  # origin of the last token
        self.origins: set[str] = set()
        self.rejected = 0

    def add(self, step: Step, texts: Sequence[str], rejected: Sequence[str] = ()) -> None:
        """Append a step.

        Args:
            step: the step.
            texts: the text of each emitted token.
            rejected: the text of each rejected draft token; hidden until the reader asks for them.
        """
        origins = shown_origins(step)
        self.origins.update(origins)
        if step.accepted:
            self._run(origins[0], texts[: step.accepted])
        if rejected:
            self._close()
            self.rejected += len(rejected)
            self._parts.append(f"<del>{_BORDER.join(escape_text(piece) for piece in rejected if piece)}</del>")
        if len(origins) > step.accepted:
            self._run(origins[-1], texts[step.accepted :])

    def html(self) -> str:
        """The text so far, in a `<pre>`."""
        end = f"</{TAGS[self._open]}>" if self._open and TAGS[self._open] else ""
        # HTML drops one line break after <pre>, so a text that begins with one needs another before it.
        return "".join(['<pre dir="auto">\n', *self._parts, end, "</pre>"])

    def _run(self, origin: str, texts: Sequence[str]) -> None:
        shown = [escape_text(text) for text in texts if text]
        if not shown:
            return
        if origin == self._open and origin == "plain":
            self._parts.append(_BORDER)
        else:  # the tokens of each step get a tag of their own
            self._close()
            self._open = origin
            self._parts.append(_opened(origin))
        self._parts.append(_BORDER.join(shown))

    def _close(self) -> None:
        if self._open and TAGS[self._open]:
            self._parts.append(f"</{TAGS[self._open]}>")
        self._open = ""


def token_view(row: RowResult) -> str:
    """The HTML of one row: its text with the origin of every token, the rejected drafts (hidden), and a legend."""
    return wrap(_row_view(row))


def result_view(result: GenerationResult, rejected: bool = False) -> str:
    """The HTML of a result: all rows, and a line of statistics without times.

    Args:
        result: the result to show.
        rejected: show rejected drafts from the beginning; otherwise the reader opens them.
    """
    count = len(result.rows)
    parts = []
    for number, row in enumerate(result.rows, 1):
        if count > 1:
            head = f"Row {number} of {count} (ended: {escape(row.finish_reason)})"
            parts.append(f"<div><small>{head}</small></div>")
        parts.append(_row_view(row, rejected))
    return wrap("".join(parts) + stats_line(result))


def live_view(tokens: TokenHtml, note: str, rejected: bool = False) -> str:
    """The HTML of a generation that is still running.

    Args:
        tokens: the text so far.
        note: a line below it.
        rejected: show rejected drafts.
    """
    switch = _rejected_switch(tokens.rejected, True) if rejected else ""
    return wrap(f"<div>{switch}{tokens.html()}</div><div><small>{escape_text(note)}</small></div>")


def stats_line(result: GenerationResult) -> str:
    """The line of statistics, as HTML."""
    return f"<div><small>{escape_text(stats_text(result))}</small></div>"


def comparison_view(table: Table, verdict: str, best: int | None = None) -> str:
    """The HTML of a comparison.

    Args:
        table: one row per run.
        verdict: the sentence below the table.
        best: index of the row that gets a star.
    """
    rows = [[f"★ {row[0]}" if i == best else row[0], *row[1:]] for i, row in enumerate(table.rows)]
    return f'{table._replace(rows=rows).to_html()}<div class="specnb">{escape_text(verdict)}</div>'


def _row_view(row: RowResult, rejected: bool = False) -> str:
    tokens = TokenHtml()
    for step, texts, dropped in row_steps(row):
        tokens.add(step, texts, dropped)
    # The <div> keeps the switch of one row from opening the next row's drafts.
    return f"<div>{_rejected_switch(tokens.rejected, rejected)}{tokens.html()}{_legend(tokens)}</div>"


def _rejected_switch(count: int, shown: bool = False) -> str:
    """A `<details>` element; the style sheet shows the `<del>` elements after it while it is open."""
    if not count:
        return ""
    noun = "token" if count == 1 else "tokens"
    return (
        f"<details{' open' * shown}><summary>rejected drafts ({count} {noun})</summary>"
        "<small>Struck through: drafted, but not what the target produced; the token after it stands instead.</small>"
        "</details>"
    )


def _legend(tokens: TokenHtml) -> str:
    if not tokens.origins - {"plain"}:
        return ""
    names = [f"{_opened(o)}{o}</{TAGS[o]}>" if TAGS[o] else o for o in SHOWN if o in tokens.origins]
    if tokens.rejected:
        names.append("<del>rejected</del>")
    return f"<div><small>{' '.join(names)}</small></div>"


def _opened(origin: str) -> str:
    """The opening tag of a token; empty for plain decoding."""
    return f"<{TAGS[origin]}{' class=c' * (origin == 'lookup')}>" if TAGS[origin] else ""


def wrap(content: str) -> str:
    """HTML content with the style sheet."""
    return f'{STYLE}<div class="specnb">{content}</div>'


def escape_text(text: str) -> str:
    """Text as HTML, with control characters made visible."""
    return escape(visible(text), quote=False)
