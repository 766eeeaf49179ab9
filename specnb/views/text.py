"""Results as plain text. Marks show the origin of tokens, or ANSI styles in a terminal. Only `speed_text` has times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specnb.options import LOOKUPS
from specnb.trace import ORIGINS, GenerationResult, RowResult, Step

SHOWN = ("accepted", "lookup", *ORIGINS[1:])
"""How tokens are shown: by their origin; accepted ones of a hybrid's lookup have a mark of their own."""
MARKS = {"accepted": ("⟦", "⟧"), "lookup": ("⟪", "⟫"), "corrected": ("‹", "›"), "bonus": ("«", "»"), "plain": ("", "")}
# Underline, bold, or both, so that colour is not needed.
_STYLES = {
    "accepted": "\x1b[4;32m",
    "lookup": "\x1b[4;35m",
    "corrected": "\x1b[1;33m",
    "bonus": "\x1b[1;4;36m",
    "plain": "",
}
_RESET = "\x1b[0m"
# Control characters are shown as symbols, so that generated text cannot control a terminal or break HTML.
_VISIBLE: dict[int, str | int] = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: 0x2421} | dict.fromkeys(range(128, 160), "�")


def visible(text: str) -> str:
    """The text with control characters, except line break and tab, replaced by visible symbols."""
    return text.translate(_VISIBLE)


def row_pieces(row: RowResult) -> Sequence[str]:
    """The text of each token of a row; the ids of the tokens if the row has no text."""
    return row.pieces if row.pieces is not None else [f"{token} " for token in row.ids]


def row_steps(row: RowResult) -> Iterable[tuple[Step, Sequence[str], Sequence[str]]]:
    """Each step of a row, with the text of each emitted token and of each rejected one."""
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
    """Text with the marks of its origin, or with the style (`ansi`). Empty text stays empty."""
    if not text:
        return ""
    left, right = (_STYLES[origin], _RESET if _STYLES[origin] else "") if ansi else MARKS[origin]
    return f"{left}{visible(text)}{right}"


def step_marks(step: Step, texts: Sequence[str], ansi: bool = False) -> str:
    """The text that a step added, with marks or styles. `texts` has one entry per emitted token."""
    closing = step.origins[-1] if step.emitted else "plain"
    accepted, rest = "".join(texts[: step.accepted]), "".join(texts[step.accepted :])
    kind = shown_origins(step)[0] if step.accepted else closing
    return mark(accepted, kind, ansi) + mark(rest, closing, ansi)


def shown_origins(step: Step) -> tuple[str, ...]:
    """How each emitted token is shown, one of `SHOWN`."""
    looked_up = step.source in LOOKUPS
    return tuple("lookup" if looked_up and origin == "accepted" else origin for origin in step.origins)


def legend(origins: Iterable[str], ansi: bool = False) -> str:
    """The line that explains the marks of the origins that occur; empty if all tokens are from plain decoding."""
    present = set(origins)
    names = [mark(origin, origin, ansi) for origin in SHOWN if origin in present]
    return " ".join(names) if present - {"plain"} else ""


def marked_text(result: GenerationResult, ansi: bool = False, text: bool = True) -> str:
    """A result as text: the marked text of each row, a legend, and a line of statistics without times.

    Args:
        result: the result to show.
        ansi: ANSI styles instead of marks.
        text: False leaves out the text of the rows.
    """
    blocks = []
    for number, row in enumerate(result.rows if text else [], 1):
        count = len(result.rows)
        head = f"Row {number} of {count} (ended: {row.finish_reason})\n" if count > 1 else ""
        blocks.append(head + "".join(step_marks(step, texts, ansi) for step, texts, _ in row_steps(row)))
    blocks.append(legend({origin for step in result.steps for origin in shown_origins(step)}, ansi))
    blocks.append(stats_text(result))
    return "\n".join(block for block in blocks if block)


def stats_text(result: GenerationResult) -> str:
    """The line of statistics: method, counts and acceptance, without times."""
    passes = result.target_passes or len(result.steps)
    parts = [result.method, f"{count_noun(result.num_emitted_tokens, 'token')} in {count_noun(passes, 'target pass')}"]
    if result.num_draft_tokens:
        share = f"{result.draft_acceptance_rate:.1%}{_by_source(result)}"
        parts.append(f"accepted {result.num_accepted_draft_tokens} of {result.num_draft_tokens} drafted ({share})")
        parts.append(f"mean acceptance length {result.mean_acceptance_length:.2f}")
    if result.lossy:
        parts.append("lossy")
    if result.seed is not None:
        parts.append(f"seed {result.seed}")
    if len(result.rows) == 1:
        parts.append(f"ended: {result.finish_reason}")
    return " · ".join(parts)


def _by_source(result: GenerationResult) -> str:
    """Of a hybrid: how many tokens each part drafted, and how many of them were accepted."""
    counts: dict[str, list[int]] = {}
    for step in result.steps:
        if step.source:
            count = counts.setdefault(step.source, [0, 0])
            count[0] += step.accepted
            count[1] += len(step.drafted)
    return "".join(f"; {source} {accepted} of {drafted}" for source, (accepted, drafted) in sorted(counts.items()))


def speed_text(result: GenerationResult) -> str:
    """The line with times: tokens per second, and seconds."""
    tokens = count_noun(result.num_emitted_tokens, "token")
    return f"{result.tokens_per_second:.1f} tokens/s ({tokens} in {result.seconds:.2f} s)"


def count_noun(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless the number is 1: "1 token", "2 passes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"
