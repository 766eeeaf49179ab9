"""One model is loaded at a time, whoever asks.

While transformers loads a model it replaces functions of its classes and torch's defaults for the whole process. Two loads that
overlap can put each other's replacements back: then no later model ties its weights.
"""

from __future__ import annotations

import threading

LOADING = threading.RLock()
