"""Results as static HTML: no script, no ids, no times, so that the same result always gives the same string.

Origins are told apart by tags and underlines, not by colour alone: `<ins>` accepted (underlined), `<mark>` corrected (wavy
underline), `<b>` bonus (bold, double underline), no tag for plain decoding, `<del>` rejected drafts (struck through).
Where a page drops the style sheet (untrusted notebooks), the tags still show the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from specnb.trace import ORIGINS, GenerationResult, RowResult, Step
from specnb.views.text import cell, numeric_columns, row_steps, stats_text, visible

TAGS = {"accepted": "ins", "corrected": "mark", "bonus": "b", "plain": ""}
STYLE = (
    "<style>"
    ".specnb{line-height:1.6}"
    ".specnb pre{white-space:pre-wrap;overflow-wrap:anywhere;word-break:normal;unicode-bidi:plaintext;font:inherit;line-height:1.8;"
    "margin:.3em 0;padding:0;border:0;background:none;color:inherit}"
    ".specnb ins{text-decoration:underline 2px #2e9e5b;text-underline-offset:3px}"
    ".specnb mark{color:inherit;background:rgba(230,140,0,.22);text-decoration:underline wavy 1px #d97e00}"
    ".specnb b{font-weight:700;text-decoration:underline double 1px #4a8df0;text-underline-offset:3px}"
    ".specnb del{display:none;text-decoration:line-through;opacity:.65}"
    ".specnb details[open]~pre del,.specnb small del{display:inline}"
    ".specnb i{border-left:1px dotted;margin:0 1px;opacity:.5}"
    ".specnb small,.specnb summary{font-size:.85em;opacity:.85}"
    ".specnb.specnb table td,.specnb.specnb table th{padding:.15em .5em;text-align:left}"  # twice, to count for more than JupyterLab's
    ".specnb.specnb table .n{text-align:right}"
    "</style>"
)
_BORDER = "<i></i>"


class TokenHtml:
    """Marked HTML that grows step by step: adding a step costs what the step holds, not what came before."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._open = ""  # origin of the run that is being written
        self.origins: set[str] = set()
        self.rejected = 0

    def add(self, step: Step, texts: Sequence[str], rejected: Sequence[str] = ()) -> None:
        """Append a step: the texts of its emitted tokens, and of its rejected drafts (shown on demand)."""
        origins = step.origins
        self.origins.update(origins)
        self._run("accepted", texts[: step.accepted])
        if rejected:
            self._close()
            self.rejected += len(rejected)
            self._parts.append(f"<del>{_BORDER.join(_text(piece) for piece in rejected if piece)}</del>")
        if len(origins) > step.accepted:
            self._run(origins[-1], texts[step.accepted :])

    def rest(self, text: str) -> None:
        """Append text that was held back, to the last token."""
        self._parts.append(_text(text))

    def html(self) -> str:
        """The text so far, in a `<pre>`."""
        end = f"</{TAGS[self._open]}>" if self._open and TAGS[self._open] else ""
        # The line break after <pre> is dropped by HTML; without it a text's own first one would be.
        return "".join(['<pre dir="auto">\n', *self._parts, end, "</pre>"])

    def _run(self, origin: str, texts: Sequence[str]) -> None:
        shown = [_text(text) for text in texts if text]
        if not shown:
            return
        if origin == self._open and origin == "plain":
            self._parts.append(_BORDER)
        else:  # every step's drafted tokens are a run of their own
            self._close()
            self._open = origin
            self._parts.append(f"<{TAGS[origin]}>" if TAGS[origin] else "")
        self._parts.append(_BORDER.join(shown))

    def _close(self) -> None:
        if self._open and TAGS[self._open]:
            self._parts.append(f"</{TAGS[self._open]}>")
        self._open = ""


def token_view(row: RowResult) -> str:
    """One row's text with every token's origin, rejected drafts on demand, and a legend."""
    return _wrap(_row_view(row))


def result_view(result: GenerationResult, rejected: bool = False) -> str:
    """All rows with the line of statistics; what a result shows of itself in a notebook. `rejected` opens the drafts."""
    count = len(result.rows)
    parts = []
    for number, row in enumerate(result.rows, 1):
        if count > 1:
            parts.append(f"<div><small>Row {number} of {count} (ended: {escape(row.finish_reason)})</small></div>")
        parts.append(_row_view(row, rejected))
    return _wrap("".join(parts) + stats_line(result))


def live_view(tokens: TokenHtml, note: str, rejected: bool = False) -> str:
    """The view while tokens still come: the text so far and a plain note; `rejected` opens the drafts."""
    switch = _rejected_switch(tokens.rejected, True) if rejected else ""
    return _wrap(f"<div>{switch}{tokens.html()}</div><div><small>{_text(note)}</small></div>")


def stats_line(result: GenerationResult) -> str:
    """The line of statistics."""
    return f"<div><small>{_text(stats_text(result))}</small></div>"


def comparison_view(
    rows: Iterable[Sequence[object]], headers: Sequence[str], verdict: str, best: int | None = None
) -> str:
    """A table of runs, the best one marked with a star, and the sentence that sums it up."""
    lines = [[f"★ {line[0]}" if i == best else line[0], *line[1:]] for i, line in enumerate(rows)]
    return f'{table(lines, headers)}<div class="specnb">{_text(verdict)}</div>'


def table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """A table; columns of numbers are aligned to the right."""
    cells = [[cell(value) for value in row] for row in rows]
    right = numeric_columns(cells, len(headers))

    def line(texts: Sequence[str], tag: str) -> str:
        pairs = zip(texts, right, strict=True)
        return "<tr>" + "".join(f"<{tag}{' class=n' * r}>{_text(t)}</{tag}>" for t, r in pairs) + "</tr>"

    body = "".join(line(texts, "td") for texts in cells)
    return _wrap(f"<table><thead>{line(headers, 'th')}</thead><tbody>{body}</tbody></table>")


def _row_view(row: RowResult, rejected: bool = False) -> str:
    tokens = TokenHtml()
    for step, texts, dropped in row_steps(row):
        tokens.add(step, texts, dropped)
    # The <div> keeps the switch of one row from opening the next row's drafts.
    return f"<div>{_rejected_switch(tokens.rejected, rejected)}{tokens.html()}{_legend(tokens)}</div>"


def _rejected_switch(count: int, shown: bool = False) -> str:
    """A `<details>` whose open state shows the `<del>` elements of the text that follows it."""
    if not count:
        return ""
    noun = "token" if count == 1 else "tokens"
    return (
        f"<details{' open' * shown}><summary>rejected drafts ({count} {noun})</summary>"
        "<small>Struck through: drafted, but not what the target produced; the token after it stands instead.</small></details>"
    )


def _legend(tokens: TokenHtml) -> str:
    if not tokens.origins - {"plain"}:
        return ""
    names = [f"<{TAGS[o]}>{o}</{TAGS[o]}>" if TAGS[o] else o for o in ORIGINS if o in tokens.origins]
    if tokens.rejected:
        names.append("<del>rejected</del>")
    return f"<div><small>{' '.join(names)}</small></div>"


def _wrap(content: str) -> str:
    return f'{STYLE}<div class="specnb">{content}</div>'


def _text(text: str) -> str:
    return escape(visible(text), quote=False)
