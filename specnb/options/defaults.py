"""Defaults of the magics, the panel, the comparison and the demo.

Defaults of single options are in `specnb.options.table` (`Option.default`) and, where a method has its own, in
`specnb.options.methods` (`MethodInfo.defaults`).
"""

from __future__ import annotations

MAGIC_MAX_NEW_TOKENS = 256
"""`max_new_tokens` of `%%specgen` and `%%specbench`, in tokens; users change it with `%config SpecMagics`."""
PANEL_MAX_NEW_TOKENS = 128
"""`max_new_tokens` of the panel, in tokens."""
COMPARE_MAX_NEW_TOKENS = 128
"""`max_new_tokens` of `specnb.bench.compare`, in tokens per prompt."""
DEMO_MAX_NEW_TOKENS = 100
"""`max_new_tokens` of `python -m specnb demo`, in tokens."""

BENCH_REPEATS = 3
"""How often a comparison times each run."""
WARM_UP_TOKENS = 8
"""Tokens generated before anything is timed, so that no run pays for one-time costs."""

METHOD_WITHOUT_DRAFT_MODEL = "prompt_lookup"
"""The method of `%%specgen` for a pair without a draft model, where none is named."""
METHOD_PREFERENCE = ("draft_model", "universal", "eagle3", "gemma4_assistant", "mtp_layers", METHOD_WITHOUT_DRAFT_MODEL)
"""The panel chooses the first of these methods that the pair can run."""
