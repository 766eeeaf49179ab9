"""Errors of loading. Each message is one paragraph: what failed, why, and what works instead."""

from __future__ import annotations

import errno
import pickle
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from specnb.models.embedded import CARDS
from specnb.models.registry import REGISTERED, suggest_name


class LoadError(OSError):
    """A model could not be loaded. The message says why and what to do; `__cause__` is the original error, if any."""


OFFLINE = (
    f"What works offline: the models that come with specnb ({', '.join(CARDS)}), local folders and .gguf files, hub "
    "models that are already in the hub's cache on this machine, and 'smollm2-135m-q4' once it has been loaded (the "
    "first time it needs a Python package index, not the hub)."
)
"""The part of a message that says what can be loaded without a network."""


def unknown_name(name: str, detail: str) -> LoadError:
    """The error for a name that does not exist. `detail` says where it was looked up."""
    return LoadError(
        f"there is no model {name!r}: {detail}.{suggest_name(name)} Give a registered name ({', '.join(REGISTERED)}), "
        "a hub id such as 'HuggingFaceTB/SmolLM2-135M-Instruct', or the path of a folder or a .gguf file."
    )


@contextmanager
def load_errors(name: str, from_hub: bool = False, quantised: str = "") -> Iterator[None]:
    """Turn every error of the block into a `LoadError` of one paragraph.

    Args:
        name: the name of the model that the block loads.
        from_hub: whether it is loaded from the hub.
        quantised: the quantisation method of the checkpoint, if any.

    Raises:
        LoadError: the block raised an error.
    """
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        raise (_hub_error(name, error, quantised) if from_hub else _load_error(name, error, quantised)) from error


def _hub_error(name: str, error: BaseException, quantised: str) -> LoadError:
    from huggingface_hub import errors as hub

    chain = _chain(error)
    if any(isinstance(e, hub.GatedRepoError) for e in chain):
        return LoadError(
            f"the model {name!r} is gated: accept its conditions on its page on the hub, then log in on this machine "
            "(huggingface_hub.login(), or the variable HF_TOKEN)."
        )
    if any(isinstance(e, hub.RepositoryNotFoundError | hub.HFValidationError) for e in chain):
        return unknown_name(
            name,
            "it is not a registered name, not a file or folder here, and the hub has no such model (a private one "
            "needs a login)",
        )
    if any(isinstance(e, hub.LocalEntryNotFoundError | hub.OfflineModeIsEnabled | ConnectionError) for e in chain):
        return LoadError(
            f"the Hugging Face hub cannot be reached, and {name!r} is not in its cache on this machine."
            f"{suggest_name(name)} {OFFLINE}"
        )
    return _load_error(name, error, quantised)


def _load_error(name: str, error: BaseException, quantised: str = "") -> LoadError:
    """The error for any other failure, such as a full disk, a missing package or a checkpoint with code of its own."""
    chain, said = _chain(error), error_summary(error)
    if any(isinstance(e, OSError) and e.errno == errno.ENOSPC for e in chain):
        return LoadError(f"not enough disk space to load {name!r}: {said}")
    if isinstance(error, MemoryError) or "out of memory" in said.lower():
        return LoadError(
            f"not enough memory to load {name!r}: {said} (device_map='auto' spreads a model over devices; a smaller "
            "dtype takes less.)"
        )
    if any(isinstance(e, pickle.UnpicklingError) for e in chain):
        return LoadError(
            f"{name!r} cannot be loaded: its weights are a pickle that is damaged, or that would run code of its own. "
            "Get the model as .safetensors, or convert it if you trust it: torch.load(FILE, weights_only=False), then "
            "save_pretrained()."
        )
    if "trust_remote_code" in said:
        return LoadError(
            f"{name!r} needs code of its own, which comes with it (auto_map in its config) and which specnb.load does "
            "not run. If you have read that code and trust it, load the model with transformers and "
            "trust_remote_code=True and give specnb.Pair(model, tokenizer)."
        )
    if quantised and isinstance(error, ImportError | RuntimeError | NotImplementedError | ValueError):
        package = _PACKAGES.get(quantised, "")
        needs = (
            f", which needs a package that is not here: pip install {package}"
            if package and isinstance(error, ImportError)
            else ""
        )
        return LoadError(
            f"{name!r} is quantised with {quantised}{needs} ({said}). Or load a version of the model that is not "
            "quantised."
        )
    if isinstance(error, ImportError):
        package = f" (pip install {error.name.split('.')[0]})" if error.name else ""
        return LoadError(f"{name!r} needs a package that is not installed here{package}: {said}")
    return LoadError(f"{name!r} cannot be loaded: {said}")


_PACKAGES = {
    "aqlm": "aqlm[cpu]",
    "auto-round": "auto-round",
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "kernels",
    "fouroversix": "fouroversix",
    "fp_quant": "fp_quant",
    "gptq": "optimum gptqmodel",
    "hqq": "hqq",
    "mxfp4": "kernels",
    "quanto": "optimum-quanto",
    "quark": "amd-quark",
    "sinq": "sinq",
    "spqr": "spqr_quant[gpu]",
    "torchao": "torchao",
    "vptq": "vptq",
}
"""The packages that transformers needs to read quantised weights, by `quant_method` of the config."""


def error_summary(error: BaseException) -> str:
    """The message of an error, in one line of at most 500 characters."""
    said = f"a setting is missing or unknown: {error}" if isinstance(error, KeyError) else str(error)
    return textwrap.shorten(said, 500, placeholder=" ...") or type(error).__name__


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and its causes, outermost first."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
