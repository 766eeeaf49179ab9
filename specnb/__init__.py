"""specnb: speculative decoding in notebooks, exact and fast. Public names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOME = {
    "Draft": "specnb.decoding.contracts",
    "DraftRow": "specnb.drafters.registered",
    "DrafterContext": "specnb.drafters.registered",
    "DrafterError": "specnb.drafters.registered",
    "GenerationResult": "specnb.trace",
    "LoadError": "specnb.models",
    "Memory": "specnb.memory",
    "Method": "specnb.options",
    "Option": "specnb.options",
    "Pair": "specnb.models",
    "Panel": "specnb.notebook.panel",
    "Step": "specnb.trace",
    "TokenView": "specnb.notebook.token_view",
    "TrainingResult": "specnb.training",
    "cuda_graphs": "specnb.runtime.cuda_graphs",
    "decoder": "specnb.call.api",
    "generate": "specnb.call.api",
    "load": "specnb.models",
    "load_drafter": "specnb.models",
    "load_mtp": "specnb.models.mtp",
    "pack": "specnb.runtime.prepacked_linear",
    "register_drafter": "specnb.drafters.registration",
    "save_pair": "specnb.models",
    "train_drafter": "specnb.training",
    "truncate": "specnb.models",
    "unregister_drafter": "specnb.drafters.registration",
    "unpack": "specnb.runtime.prepacked_linear",
}
"""The public names, and the module that each is imported from."""
_MODULES = ("bench",)
"""Public modules."""
__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from specnb.call.api import decoder as decoder
    from specnb.call.api import generate as generate
    from specnb.decoding.contracts import Draft as Draft
    from specnb.drafters.registered import DrafterContext as DrafterContext
    from specnb.drafters.registered import DrafterError as DrafterError
    from specnb.drafters.registered import DraftRow as DraftRow
    from specnb.drafters.registration import register_drafter as register_drafter
    from specnb.drafters.registration import unregister_drafter as unregister_drafter
    from specnb.memory import Memory as Memory
    from specnb.models import LoadError as LoadError
    from specnb.models import Pair as Pair
    from specnb.models import save_pair as save_pair
    from specnb.models.loading import load as load
    from specnb.models.loading import load_drafter as load_drafter
    from specnb.models.mtp import load_mtp as load_mtp
    from specnb.models.truncation import truncate as truncate
    from specnb.notebook.panel import Panel as Panel
    from specnb.notebook.token_view import TokenView as TokenView
    from specnb.options import Method as Method
    from specnb.options import Option as Option
    from specnb.runtime.cuda_graphs import cuda_graphs as cuda_graphs
    from specnb.runtime.prepacked_linear import pack as pack
    from specnb.runtime.prepacked_linear import unpack as unpack
    from specnb.trace import GenerationResult as GenerationResult
    from specnb.trace import Step as Step
    from specnb.training import TrainingResult as TrainingResult
    from specnb.training import train_drafter as train_drafter


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"specnb.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'specnb' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics: `%load_ext specnb`."""
    from specnb import notebook

    notebook.load_ipython_extension(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Remove the magics: `%unload_ext specnb`."""
    from specnb import notebook

    notebook.unload_ipython_extension(ipython)
