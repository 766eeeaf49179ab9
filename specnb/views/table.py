"""Tables: one data structure, written as plain text, HTML or Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from specnb.views.html import escape_text, wrap
from specnb.views.text import visible


class Table(NamedTuple):
    """Rows of values under headers.

    Attributes:
        rows: one sequence of values per row, as long as `headers`. None is an empty cell.
        headers: one name per column.
    """

    rows: Sequence[Sequence[object]]
    headers: Sequence[str]

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]]) -> Table:
        """A table with one row per record. All records have the same keys, which become the headers."""
        found = list(records)
        return cls([list(record.values()) for record in found], list(found[0]))

    def to_text(self) -> str:
        """Plain text with aligned columns; numbers are aligned to the right."""
        cells = self._cells()
        right = self._numeric_columns(cells)
        lines = [list(self.headers), *cells]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.headers))]
        lines.insert(1, ["-" * width for width in widths])
        padded = [[t.rjust(w) if r else t.ljust(w) for t, w, r in zip(x, widths, right, strict=True)] for x in lines]
        return "\n".join("  ".join(line).rstrip() for line in padded)

    def to_html(self) -> str:
        """Static HTML; columns of numbers are aligned to the right."""
        cells = self._cells()
        right = self._numeric_columns(cells)

        def line(texts: Sequence[str], tag: str) -> str:
            pairs = zip(texts, right, strict=True)
            return "<tr>" + "".join(f"<{tag}{' class=n' * r}>{escape_text(t)}</{tag}>" for t, r in pairs) + "</tr>"

        body = "".join(line(texts, "td") for texts in cells)
        return wrap(f"<table><thead>{line(self.headers, 'th')}</thead><tbody>{body}</tbody></table>")

    def to_markdown(self) -> str:
        """A Markdown table. Empty cells stay empty, and a False stands out as NO."""
        lines = [
            [name.strip() for name in self.headers],
            ["---"] * len(self.headers),
            *([_markdown_cell(value) for value in row] for row in self.rows),
        ]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def _cells(self) -> list[list[str]]:
        return [[_cell(value) for value in row] for row in self.rows]

    def _numeric_columns(self, cells: Sequence[Sequence[str]]) -> list[bool]:
        """Which columns hold only numbers, apart from dashes and empty cells."""
        columns = [[row[i] for row in cells if row[i] not in ("", "-")] for i in range(len(self.headers))]
        return [bool(column) and all(text[:1].isdigit() or text[:1] == "-" for text in column) for column in columns]


def _cell(value: object) -> str:
    """A cell in text and HTML: floats with two decimals, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else visible(str(value))


def _markdown_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
