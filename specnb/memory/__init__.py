"""Texts to draft from: an index of where each n-gram occurred, and a memory of past requests."""

from specnb.memory.memory import Memory

__all__ = ["Memory"]
