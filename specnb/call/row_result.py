"""The result of one row, from what the loop left in it."""

from __future__ import annotations

from typing import Any

from specnb.decoding.contracts import Row
from specnb.text import prompt_text, step_pieces, token_texts
from specnb.trace import RowResult


def row_result(row: Row, tokenizer: Any, listed: bool) -> RowResult:
    """The result of a row.

    Args:
        row: the row, as far as it was decoded.
        tokenizer: gives the texts; None leaves them out.
        listed: the steps list the best tokens, whose texts are needed too.
    """
    ids = tuple(token for step in row.steps for token in step.emitted)
    prompt, reason = tuple(row.ids[: row.prompt_length]), row.finish_reason or "interrupted"
    result = RowResult(prompt, ids, tuple(row.steps), reason)
    if tokenizer is not None:
        result.pieces, result.rejected_pieces = step_pieces(tokenizer, row.steps)
        result.prompt_text = prompt_text(tokenizer, prompt)
        if listed:
            result.token_texts = token_texts(tokenizer, result.listed_ids())
    return result
