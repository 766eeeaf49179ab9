"""Compare methods fairly: the same prompts, runs interleaved and repeated, plain decoding always among them."""

from specnb.bench.compare import compare, environment, label_runs
from specnb.bench.comparison import Comparison, Run

__all__ = ["Comparison", "Run", "compare", "environment", "label_runs"]
