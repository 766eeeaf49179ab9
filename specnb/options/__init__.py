"""Every option and every method, declared once.

Validation, the arguments of the magics, the widgets of the panel and the documentation are all built from these tables.
Option names are those of transformers' `generate()` wherever it has the option. An option whose default is None is left
to the model's generation config. This package imports nothing else of specnb and no torch.

`METHODS` and `OPTIONS` are specnb's own. Registered drafters and their options come on top of them: `method_info`,
`method_names`, `options_of` and `all_options` know both.
"""

from specnb.options.defaults import (
    BENCH_REPEATS,
    COMPARE_MAX_NEW_TOKENS,
    DEMO_MAX_NEW_TOKENS,
    MAGIC_MAX_NEW_TOKENS,
    METHOD_PREFERENCE,
    METHOD_WITHOUT_DRAFT_MODEL,
    PANEL_MAX_NEW_TOKENS,
    WARM_UP_TOKENS,
)
from specnb.options.methods import (
    ASKED_BY,
    METHODS,
    Method,
    MethodInfo,
    all_options,
    default,
    drafting_options,
    greedy_at_zero,
    hybrid_names,
    method_info,
    method_names,
    methods_with,
    options_of,
    parts_of,
    selectable_methods,
)
from specnb.options.option import Option, unknown
from specnb.options.registered import REGISTRY
from specnb.options.table import BY_NAME, LOOKUPS, MODEL_DRAFTERS, OPTIONS, OPTIONS_OF_REGISTERED
from specnb.options.training import TRAINING_OPTIONS

__all__ = [
    "ASKED_BY",
    "BENCH_REPEATS",
    "BY_NAME",
    "COMPARE_MAX_NEW_TOKENS",
    "DEMO_MAX_NEW_TOKENS",
    "LOOKUPS",
    "MAGIC_MAX_NEW_TOKENS",
    "METHODS",
    "METHOD_PREFERENCE",
    "METHOD_WITHOUT_DRAFT_MODEL",
    "MODEL_DRAFTERS",
    "OPTIONS",
    "OPTIONS_OF_REGISTERED",
    "PANEL_MAX_NEW_TOKENS",
    "REGISTRY",
    "TRAINING_OPTIONS",
    "WARM_UP_TOKENS",
    "Method",
    "MethodInfo",
    "Option",
    "all_options",
    "default",
    "drafting_options",
    "greedy_at_zero",
    "hybrid_names",
    "method_info",
    "method_names",
    "methods_with",
    "options_of",
    "parts_of",
    "selectable_methods",
    "unknown",
]
