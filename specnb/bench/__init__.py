"""Comparisons of methods on the same prompts: interleaved, repeated, and always with plain decoding."""

from specnb.bench.compare import compare, environment, label_runs
from specnb.bench.comparison import Comparison, Run

__all__ = ["Comparison", "Run", "compare", "environment", "label_runs"]
