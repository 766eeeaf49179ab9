"""Whether the Hugging Face hub can be reached, and how files are looked up where it cannot."""

from __future__ import annotations

import socket
import urllib.parse
import urllib.request
from typing import Any


def hub_options(local: bool) -> dict[str, Any]:
    """transformers' options for finding files: those here only, for a folder or where the hub cannot be reached.

    Without a network, the hub's client would retry for half a minute before it looks into its cache.
    """
    return {"local_files_only": True} if local or not _hub_reachable() else {}


def _hub_reachable() -> bool:
    """Whether the host name of the hub can be resolved. With a proxy it need not be, so then the answer is True."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    host = urllib.parse.urlsplit(constants.ENDPOINT).hostname
    if urllib.request.getproxies() or host is None:
        return True
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
