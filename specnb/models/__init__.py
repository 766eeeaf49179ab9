"""Loads a target and its draft model by name, and checks that they fit each other."""

from specnb.models.errors import LoadError
from specnb.models.loading import load, load_drafter
from specnb.models.pair import Pair, PairCheck, check_pair
from specnb.models.save import save_pair
from specnb.models.truncation import truncate

__all__ = ["LoadError", "Pair", "PairCheck", "check_pair", "load", "load_drafter", "save_pair", "truncate"]
