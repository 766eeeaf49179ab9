"""The body of a cell magic, as typed, and the names in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from IPython.core.error import UsageError

_NAME = re.compile(r"\{\{([^\W\d]\w*)\}\}|\{([^\W\d]\w*)\}")


def exact_body(line: str, cell: str, typed: Sequence[str], magic: str = "%%specgen") -> str:
    """The body of a cell magic exactly as it was typed, without what IPython adds or strips.

    This also holds for a magic below other cell magics (%%capture, %%time, ...).

    Args:
        line: the line of the magic, without its name.
        cell: the body that IPython passed to the magic.
        typed: the running cells as typed, the outermost first.
        magic: the name of the magic with its percent signs.

    Returns:
        The text below the magic's line in the typed cell that has it, else `cell` without its last line break.
    """
    passed = cell.splitlines()
    for raw in typed:  # the outermost first: IPython adds a line break to the cells that it runs itself
        rest = raw
        while rest:
            first, _, rest = rest.partition("\n")
            if first.strip() == f"{magic} {line}".strip():
                body = rest.splitlines()
                if len(body) == len(passed) and all(t.endswith(p) for t, p in zip(body, passed, strict=True)):
                    return rest
            if first.strip() and not first.strip().startswith("%%"):
                break
    return cell.removesuffix("\n")


def expand(body: str, names: dict[str, Any]) -> str:
    """Replace `{name}` by `str(names[name])` and `{{name}}` by `{name}`. All other braces stay.

    Raises:
        UsageError: a name is not defined.
    """
    missing = sorted({match[2] for match in _NAME.finditer(body) if match[2] and match[2] not in names})
    if missing:
        raise UsageError(
            f"--expand: not defined: {', '.join(missing)}. Write {{{{{missing[0]}}}}} for {{{missing[0]}}} itself."
        )
    return _NAME.sub(lambda match: f"{{{match[1]}}}" if match[1] else str(names[match[2]]), body)
