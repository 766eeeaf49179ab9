"""What can go wrong while loading a model, told in one paragraph: what failed, why, and what works instead."""

from __future__ import annotations

import errno
import pickle
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from specnb.models.embedded import CARDS
from specnb.models.registry import REGISTERED, nearest


class LoadError(OSError):
    """A model could not be loaded. The message says why and what to do; `__cause__` is the original error."""


OFFLINE = (
    f"What works offline: the models that come with specnb ({', '.join(CARDS)}), local folders and .gguf files, hub models that are "
    "already in the hub's cache on this machine, and 'smollm2-135m-q4' once it has been loaded (the first time it needs a Python "
    "package index, not the hub)."
)


def unknown_name(name: str, detail: str) -> LoadError:
    """For a name that stands for nothing."""
    return LoadError(
        f"there is no model {name!r}: {detail}.{nearest(name)} Give a registered name ({', '.join(REGISTERED)}), a hub id "
        "such as 'HuggingFaceTB/SmolLM2-135M-Instruct', or the path of a folder or a .gguf file."
    )


@contextmanager
def load_errors(name: str, from_hub: bool = False, quantised: str = "") -> Iterator[None]:
    """Turn whatever goes wrong while loading `name` from its files, or from the hub, into a `LoadError` of one line.

    `quantised` is the method with which the checkpoint is quantised, if it is.
    """
    try:
        yield
    except LoadError:
        raise
    except Exception as error:
        raise (_hub_error(name, error, quantised) if from_hub else _failed(name, error, quantised)) from error


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
            "it is not a registered name, not a file or folder here, and the hub has no such model (a private one needs a "
            "login)",
        )
    if any(isinstance(e, hub.LocalEntryNotFoundError | hub.OfflineModeIsEnabled | ConnectionError) for e in chain):
        return LoadError(
            f"the Hugging Face hub cannot be reached, and {name!r} is not in its cache on this machine."
            f"{nearest(name)} {OFFLINE}"
        )
    return _failed(name, error, quantised)


def _failed(name: str, error: BaseException, quantised: str = "") -> LoadError:
    """For any other failure: a full disk, a missing package, code that would have to run, or what transformers said."""
    chain, said = _chain(error), broken(error)
    if any(isinstance(e, OSError) and e.errno == errno.ENOSPC for e in chain):
        return LoadError(f"not enough disk space to load {name!r}: {said}")
    if isinstance(error, MemoryError) or "out of memory" in said.lower():
        return LoadError(
            f"not enough memory to load {name!r}: {said} (device_map='auto' spreads a model; a smaller dtype takes "
            "less.)"
        )
    if any(isinstance(e, pickle.UnpicklingError) for e in chain):
        return LoadError(
            f"{name!r} cannot be loaded: its weights are a pickle that is damaged, or that would run code of its own. "
            "Get the model as "
            ".safetensors, or convert it where you trust it: torch.load(FILE, weights_only=False), then "
            "save_pretrained()."
        )
    if "trust_remote_code" in said:
        return LoadError(
            f"{name!r} needs code of its own, which comes with it (auto_map in its config) and which specnb.load does "
            "not run. If you have read "
            "that code and trust it, load the model with transformers and trust_remote_code=True and give "
            "specnb.Pair(model, tokenizer)."
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
"""What transformers' quantisers need, by the `quant_method` of a config."""


def broken(error: BaseException) -> str:
    """What an error says, in one line of bearable length."""
    said = f"a setting is missing or unknown: {error}" if isinstance(error, KeyError) else str(error)
    return textwrap.shorten(said, 500, placeholder=" ...") or type(error).__name__


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and what caused it, outermost first."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
