"""The tables of the documentation that come from code and measurements: `python -m tools.docs_tables [--check]`.

Each stands in a page of docs/ between two comments, `<!-- table NAME -->` and `<!-- end of table -->`; this script
writes what is between them. With `--check` it changes nothing and fails where a table is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specnb.options import METHODS, OPTIONS, Option, default

ROOT = Path(__file__).resolve().parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "tests" / "results"
MODELS = ROOT / "tools" / "embedded_models" / "results.json"
_BLOCK = re.compile(r"(<!-- table (.+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_KINDS = ("edit code", "summarise", "open story")
_RUNS = {
    "transformers": "transformers {transformers}",
    "economize": "economize 0.3.2",
    "flashspec": "flashspec 0.3.1",
    "specnb, k=8, not packed": "specnb, k = 8, weights not packed",
    "specnb, k=8": "specnb, k = 8",
    "specnb": "**specnb, default settings**",
    "specnb plain": "specnb, plain decoding",
}
_MEASURES = (
    ("draft model, k = 5", "tiny-llama-draft", "draft model, k=5"),
    ("universal (another tokenizer), k = 5", "tiny-llama-other", "universal, k=5"),
    ("early exit after layer 2 of 5, k = 5", "tiny-llama", "early exit after layer 2, k=5"),
    ("Gemma 4 drafter, k = 4", "tiny-gemma4-assistant", "Gemma 4 drafter, k=4"),
    ("MTP layer, k = 1", "tiny-glm4-moe", "MTP layer, k=1"),
    ("MTP layer used recursively, k = 3", "tiny-glm4-moe", "MTP layer, again and again, k=3"),
    ("two MTP layers, k = 2", "tiny-glm4-moe-mtp2", "two MTP layers, k=2"),
    ("MTP layer of a hybrid model, k = 1", "tiny-qwen3-5", "MTP layer, k=1"),
    ("prompt lookup, k = 5", "tiny-llama", "prompt lookup, k=5"),
)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [list(headers), ["---"] * len(headers), *map(list, rows)]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


# ---- options
def options(group: str) -> str:
    """The options of a group, as `specnb.options` declares them."""
    own = [option for option in OPTIONS if option.group == group]
    headers = ("option", "value", "default", "what it does")
    rows = [(f"`{option.name}`", _allowed(option), _default(option), option.help) for option in own]
    if group == "drafting":
        headers = (*headers, "methods")
        rows = [
            (*row, ", ".join(f"`{name}`" for name in option.methods)) for row, option in zip(rows, own, strict=True)
        ]
    return table(headers, rows)


def _allowed(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    return option.allowed


_LENGTHS = {"mtp_layers": "one per MTP layer", "dflash": "the whole block"}
"""Draft lengths that follow from the model."""


def _default(option: Option) -> str:
    values = {name: default(option.name, name) for name in option.methods or METHODS}
    shown = [] if option.default is None else [f"`{option.default}`"]
    for name, value in values.items():
        if value != option.default:
            shown.append(f"{f'`{value}`' if value is not None else _LENGTHS[name]} (`{name}`)")
    return "; ".join(shown) or "-"


# ---- measurements
def peers(file: str) -> str:
    """Medians over the prompts of a kind, the lowest in brackets."""
    found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    rows = []
    for run, name in _RUNS.items():
        values = [found["x_plain"][kind][run] for kind in _KINDS]
        cells = [f"{statistics.median(one):.2f} ({min(one):.2f})" for one in values]
        bold = [f"**{cell}**" for cell in cells] if name.startswith("**") else cells
        rows.append((name.format(**found["environment"]), *bold))
    return table(("", *_KINDS), rows)


def conditions(file: str) -> str:
    """What a measurement ran on, in a line."""
    on = json.loads((RESULTS / file).read_text(encoding="utf-8"))["environment"]
    threads = f"{on['threads']} thread{'s' * (on['threads'] > 1)}"
    parts = (on["model"], on["dtype"], on["machine"], threads, f"Python {on['python']}", f"torch {on['torch']}",
             f"transformers {on['transformers']}", f"specnb {on['specnb']}", on["date"][:10])  # fmt: skip
    return ", ".join(parts) + ".\n"


def section(file: str, heading: str) -> str:
    """The tables below a heading of a page of results."""
    text = (RESULTS / file).read_text(encoding="utf-8")
    (part,) = (one for one in text.split("\n## ") if one.startswith(heading + "\n"))
    blocks = [block for block in part.split("\n\n") if block.startswith("|")]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def only_table(file: str) -> str:
    """The table of a page of results that has one."""
    (block,) = (one for one in (RESULTS / file).read_text(encoding="utf-8").split("\n\n") if one.startswith("|"))
    return block.strip() + "\n"


def acceptance() -> str:
    """Acceptance on the embedded pairs."""
    found = json.loads(MODELS.read_text(encoding="utf-8"))
    rows = []
    for name, model, measured in _MEASURES:
        (one,) = (measure for measure in found[model]["measures"] if measure["measure"] == measured)
        length, rate = one["mean_acceptance_length"], one["draft_acceptance_rate"]
        rows.append((name, f"`{model}`", f"{length:.2f}", f"{rate:.0%}"))
    return table(("method", "measured with", "mean acceptance length", "drafted tokens accepted"), rows)


def families() -> str:
    """How many families of transformers were compared, and what came of it."""
    found = json.loads((RESULTS / "families.json").read_text(encoding="utf-8"))
    columns = ("families", "equal in all", "refused in part", "refused wholly", "with a wrong text", "not run")
    kinds = {"causal": "text", "image-text": "image-text, prompts without image", "images": "image-text, with images"}
    return table(("", *columns), ((name, *(str(found[kind][c]) for c in columns)) for kind, name in kinds.items()))


RECURRENT = {
    "Qwen3.5": ("qwen3_5_text", "qwen3_5_moe_text"),
    "Qwen3-Next": ("qwen3_next",),
    "Granite 4": ("granitemoehybrid",),
    "Nemotron-H": ("nemotron_h",),
    "Falcon-H1": ("falcon_h1",),
    "Kimi Linear": ("kimi_linear",),
    "Bailing hybrid": ("bailing_hybrid",),
    "OLMo hybrid": ("olmo_hybrid",),
    "LFM2, LFM3": ("lfm2", "lfm2_moe", "lfm3"),
    "DeepSeek-V4": ("deepseek_v4",),
    "Bamba": ("bamba",),
    "Zamba, Zamba2": ("zamba", "zamba2"),
    "Jamba": ("jamba",),
    "Mamba, Mamba 2, Falcon-Mamba": ("mamba", "mamba2", "falcon_mamba"),
    "RWKV": ("rwkv",),
    "MiniMax": ("minimax",),
    "RecurrentGemma": ("recurrent_gemma",),
}
"""Families with running states, by the names that people know."""


def recurrent() -> str:
    """What the families run found for families with running states, by kind of call."""
    lines = (RESULTS / "families-causal.jsonl").read_text(encoding="utf-8").splitlines()
    found = {one["family"]: one.get("cells", {}) for one in map(json.loads, lines)}
    columns = {
        "plain": ("plain",),
        "draft model": ("draft", "draft = copy"),
        "prompt lookup": ("lookup",),
        "early exit": ("exit 1", "exit mid"),
        "rows": ("rows plain", "rows draft", "rows lookup", "rows exit"),
    }

    def verdict(names: Sequence[str], cells: Sequence[str]) -> str:
        kinds = {found[name][cell]["verdict"] for name in names for cell in cells if cell in found[name]}
        return ", ".join(sorted(kinds))

    rows = ((title, *(verdict(names, cells) for cells in columns.values())) for title, names in RECURRENT.items())
    return table(("family", *columns), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    **{f"options {group}": lambda group=group: options(group) for group in ("drafting", "length", "sampling", "trace")},
    "peers 1": lambda: peers("peers-1-thread.json"),
    "peers 2": lambda: peers("peers-2-threads.json"),
    "conditions peers 1": lambda: conditions("peers-1-thread.json"),
    "conditions peers 2": lambda: conditions("peers-2-threads.json"),
    "conditions suite": lambda: conditions("bench-1-thread.json"),
    "suite prompts": lambda: section("bench-1-thread.md", "Prompt lookup on a real model"),
    "suite methods": lambda: section("bench-1-thread.md", "Draft model and early exit on the real model"),
    "suite embedded": lambda: section("sections-1-thread.md", "Every method on the embedded pairs"),
    "suite rows": lambda: section("bench-1-thread.md", "Rows of a batch"),
    "suite contexts": lambda: section("bench-1-thread.md", "Long contexts"),
    "suite first token": lambda: section("bench-1-thread.md", "First token"),
    "suite own share": lambda: section("sections-1-thread.md", "Own share"),
    "runtime": lambda: only_table("runtime-1-thread.md"),
    "recurrent cost": lambda: only_table("recurrent-1-thread.md"),
    "acceptance": acceptance,
    "families": families,
    "recurrent": recurrent,
}


def filled(text: str) -> str:
    """A page with its tables as they should be."""

    def fill(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise KeyError(f"there is no table {match[2]!r}; there are {', '.join(TABLES)}")
        return f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}"

    return _BLOCK.sub(fill, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a table is out of date")
    given = parser.parse_args(arguments)
    stale: list[Any] = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            stale.append(page.relative_to(ROOT))
            if not given.check:
                page.write_text(new, encoding="utf-8")
    for page in stale:
        print(f"{page}: {'out of date; run python -m tools.docs_tables' if given.check else 'written'}")
    return int(given.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
