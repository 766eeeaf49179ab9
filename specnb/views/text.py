"""Results as text: marks per origin, or ANSI styles in a terminal. No times, addresses or paths unless asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specnb.trace import ORIGINS, GenerationResult, RowResult, Step

MARKS = {"accepted": ("⟦", "⟧"), "corrected": ("‹", "›"), "bonus": ("«", "»"), "plain": ("", "")}
# Underline, bold and both: told apart without colour too.
_STYLES = {"accepted": "\x1b[4;32m", "corrected": "\x1b[1;33m", "bonus": "\x1b[1;4;36m", "plain": ""}
_RESET = "\x1b[0m"
# Control characters are shown by their pictures, so that generated text cannot steer a terminal or break HTML.
_VISIBLE: dict[int, str | int] = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(128, 160), "�")


def visible(text: str) -> str:
    """The text with control characters, except line break and tab, replaced by visible signs."""
    return text.translate(_VISIBLE)


def row_pieces(row: RowResult) -> Sequence[str]:
    """A row's text per token; its ids where it has no text."""
    return row.pieces if row.pieces is not None else [f"{token} " for token in row.ids]


def row_steps(row: RowResult) -> Iterable[tuple[Step, Sequence[str], Sequence[str]]]:
    """Each step with the texts of its emitted and of its rejected tokens."""
    texts, start = row_pieces(row), 0
    for number, step in enumerate(row.steps):
        end = start + len(step.emitted)
        if row.rejected_pieces is not None:
            rejected: Sequence[str] = row.rejected_pieces[number]
        else:
            rejected = [f"{token} " for token in step.rejected] if row.pieces is None else ()
        yield step, texts[start:end], rejected
        start = end


def mark(text: str, origin: str, ansi: bool = False) -> str:
    """A piece of text with the marks, or the style, of its origin; empty text stays empty."""
    if not text:
        return ""
    left, right = (_STYLES[origin], _RESET if _STYLES[origin] else "") if ansi else MARKS[origin]
    return f"{left}{visible(text)}{right}"


def step_marks(step: Step, texts: Sequence[str], ansi: bool = False) -> str:
    """What one step added to the text, marked."""
    closing = step.origins[-1] if step.emitted else "plain"
    accepted, rest = "".join(texts[: step.accepted]), "".join(texts[step.accepted :])
    return mark(accepted, "accepted", ansi) + mark(rest, closing, ansi)


def legend(origins: Iterable[str], ansi: bool = False) -> str:
    """The line that explains the marks of the origins that occur; empty if all is plain."""
    present = set(origins)
    names = [mark(origin, origin, ansi) for origin in ORIGINS if origin in present]
    return " ".join(names) if present - {"plain"} else ""


def marked_text(result: GenerationResult, ansi: bool = False, text: bool = True) -> str:
    """The text with its marks, the legend and the statistics (`text=False`: only these two); no times."""
    blocks = []
    for number, row in enumerate(result.rows if text else [], 1):
        head = f"Row {number} of {len(result.rows)} (ended: {row.finish_reason})\n" if len(result.rows) > 1 else ""
        blocks.append(head + "".join(step_marks(step, texts, ansi) for step, texts, _ in row_steps(row)))
    blocks.append(legend({origin for step in result.steps for origin in step.origins}, ansi))
    blocks.append(stats_text(result))
    return "\n".join(block for block in blocks if block)


def stats_text(result: GenerationResult) -> str:
    """One line of statistics, without times."""
    passes = result.target_passes or len(result.steps)
    parts = [result.method, f"{counted(result.num_emitted_tokens, 'token')} in {counted(passes, 'target pass')}"]
    if result.num_draft_tokens:
        share = f"{result.draft_acceptance_rate:.1%}"
        parts.append(f"accepted {result.num_accepted_draft_tokens} of {result.num_draft_tokens} drafted ({share})")
        parts.append(f"mean acceptance length {result.mean_acceptance_length:.2f}")
    if result.lossy:
        parts.append("lossy")
    if result.seed is not None:
        parts.append(f"seed {result.seed}")
    if len(result.rows) == 1:
        parts.append(f"ended: {result.finish_reason}")
    return " · ".join(parts)


def speed_text(result: GenerationResult) -> str:
    """The one line with times: tokens per second and seconds."""
    tokens = counted(result.num_emitted_tokens, "token")
    return f"{result.tokens_per_second:.1f} tokens/s ({tokens} in {result.seconds:.2f} s)"


def table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """A table in plain text: columns aligned, numbers to the right."""
    cells = [[cell(value) for value in row] for row in rows]
    right = numeric_columns(cells, len(headers))
    lines = [list(headers), *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    lines.insert(1, ["-" * width for width in widths])
    padded = [[t.rjust(w) if r else t.ljust(w) for t, w, r in zip(x, widths, right, strict=True)] for x in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def cell(value: object) -> str:
    """A table cell's text: numbers rounded to what is worth reading, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else visible(str(value))


def numeric_columns(cells: Sequence[Sequence[str]], count: int) -> list[bool]:
    """Which columns hold numbers only (dashes and gaps aside)."""
    columns = [[row[i] for row in cells if row[i] not in ("", "-")] for i in range(count)]
    return [bool(column) and all(text[:1].isdigit() or text[:1] == "-" for text in column) for column in columns]


def counted(number: int, noun: str) -> str:
    """A number and its noun, in the plural where there is not one: "1 token", "2 passes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
