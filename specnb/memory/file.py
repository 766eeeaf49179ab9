"""The file of a memory: safetensors with all tokens in one row, the length of each request, and metadata."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from specnb.memory.tokenizer_identity import TokenizerIdentity

FORMAT = "specnb.Memory/1"


def write(path: Path, requests: Sequence[Sequence[int]], identity: TokenizerIdentity | None, max_tokens: int) -> None:
    """Write requests to a file. It is replaced at once, so that an interrupt leaves no half of it.

    Raises:
        OSError: it cannot be written, or is there and not a memory.
    """
    import numpy
    from safetensors.numpy import save

    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the name of a file, such as {path / 'memory.safetensors'}.")
    if path.exists() and not _is_memory(path):
        raise FileExistsError(f"{path} is there and is not a specnb.Memory: give another name, or remove it first.")
    tensors = {
        "tokens": numpy.asarray([token for ids in requests for token in ids], dtype=numpy.int64),
        "lengths": numpy.asarray([len(ids) for ids in requests], dtype=numpy.int64),
    }
    known = identity._asdict() if identity is not None else {}
    metadata = {"format": FORMAT, "max_tokens": str(max_tokens), **{f"tokenizer_{k}": v for k, v in known.items()}}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(save(tensors, metadata))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _is_memory(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return str((file.metadata() or {}).get("format", "")).startswith(FORMAT.partition("/")[0] + "/")
    except (SafetensorError, OSError):
        return False


def read(path: Path) -> tuple[list[list[int]], TokenizerIdentity | None, int]:
    """Read requests, the tokenizer's identity and the limit from a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or of another kind.
    """
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the file that Memory.save wrote.")
    path.stat()  # a missing file is an OSError of its own
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
            tokens, lengths = (file.get_tensor(name).tolist() for name in ("tokens", "lengths"))
        max_tokens = int(metadata["max_tokens"])
        flat = all(isinstance(value, int) for value in [*tokens, *lengths])
        if not flat or sum(lengths) != len(tokens) or min([*tokens, *lengths, max_tokens], default=0) < 0:
            raise ValueError("its numbers do not fit together")
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a specnb.Memory, or is damaged: {error}") from error
    requests, at = [], 0
    for length in lengths:
        requests.append(tokens[at : at + length])
        at += length
    digest = metadata.get("tokenizer_digest")
    return requests, TokenizerIdentity(metadata.get("tokenizer_name", "?"), digest) if digest else None, max_tokens
