"""Drafters trained from a target's own answers: one-layer EAGLE-3 (Li et al. 2503.01840) in the speculators format."""

from specnb.training.api import train_drafter
from specnb.training.result import Evaluation, Progress, TrainingResult

__all__ = ["Evaluation", "Progress", "TrainingResult", "train_drafter"]
