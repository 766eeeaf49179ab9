"""What can go wrong while loading a model, told in one paragraph: what failed, why, and what works instead."""

from __future__ import annotations

import errno
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
def load_errors(name: str, from_hub: bool = False) -> Iterator[None]:
    """Turn what goes wrong while loading `name` from its files, or from the hub, into a `LoadError`."""
    from safetensors import SafetensorError

    try:
        yield
    except LoadError:
        raise
    except (OSError, ValueError, KeyError, NotImplementedError, SafetensorError) as error:
        raise (_hub_error(name, error) if from_hub else _failed(name, error)) from error


def _hub_error(name: str, error: BaseException) -> LoadError:
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
    return _failed(name, error)


def _failed(name: str, error: BaseException) -> LoadError:
    """For any other failure: a full disk, or what transformers said."""
    if any(isinstance(e, OSError) and e.errno == errno.ENOSPC for e in _chain(error)):
        return LoadError(f"not enough disk space to load {name!r}: {error}")
    said = textwrap.shorten(str(error), 500, placeholder=" ...") or type(error).__name__
    return LoadError(f"{name!r} cannot be loaded: {said}")


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and what caused it, outermost first."""
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found
