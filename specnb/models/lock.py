"""A lock for loading models, one at a time.

While transformers loads a model, it replaces functions of its classes and torch's defaults for the whole process. Loads
that overlap can restore each other's replacements; then later models do not tie their weights. Other processes are not
affected, so this is a lock of threads and not of files.
"""

from __future__ import annotations

import threading

LOADING = threading.RLock()
"""Held while a model is loaded."""
