"""What SmolLM2-135M-Instruct (Q4_1) writes greedily for the prompts of the suite, to count passes without the model.

`python tests/suite_texts.py` writes `tests/data/suite_texts.json`: 96 tokens for each prompt, for the edited prompts of
`tools.measure_suffix`, and for two classes to rewrite with type hints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLACE = Path(__file__).parent / "data" / "suite_texts.json"
EOS = 2


def texts(kind: str = "", edited: bool = False) -> list[dict[str, Any]]:
    """The records of a kind, or of all: kind, number, edited, prompt (ids) and ids (of the output)."""
    records = json.loads(PLACE.read_text(encoding="utf-8"))
    return [one for one in records if one["edited"] == edited and kind in ("", one["kind"])]


def write() -> None:
    """Write the file."""
    import specnb
    from specnb.bench import prompts
    from specnb.bench.suite import MODEL
    from specnb.text import prompt_inputs
    from tools.measure_suffix import EDITS

    pair = specnb.load(MODEL, None)
    asked = [(kind, i, False, text) for kind, found in prompts.PROMPTS.items() for i, text in enumerate(found)]
    hints = "Rewrite this class with type hints."
    asked += [
        ("type hints", i, False, prompts._edit(code, hints)) for i, code in enumerate((prompts._STACK, prompts._CART))
    ]
    asked += [
        (kind, i, True, prompts.PROMPTS[kind][i].replace(*edit))
        for kind, edits in EDITS.items()
        for i, edit in enumerate(edits)
    ]
    lines = []
    for kind, number, edited, text in asked:
        inputs = prompt_inputs(pair.tokenizer, text, device="cpu")
        ids = specnb.generate(pair, **inputs, method="plain", max_new_tokens=96, do_sample=False).ids
        record = {"kind": kind, "number": number, "edited": edited}
        record |= {"prompt": inputs["input_ids"][0].tolist(), "ids": list(ids)}
        lines.append(json.dumps(record, separators=(",", ":")))
    PLACE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    write()
