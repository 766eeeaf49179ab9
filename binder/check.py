"""Run notebooks 1 to 3 in JupyterLab under Binder's memory limit, and print the peak.

    python binder/check.py [--megabytes 2048] [--log FILE]

Run it with the Python of an environment made from this folder's files: `pip install -r binder/requirements.txt`, then
`binder/postBuild`. As on Binder, `start` starts the server. The server and its kernels run in a memory cgroup with
that limit, which takes Linux and usually root. The kernels stay open, as in JupyterLab, so at the end all three are in
memory together. The check fails if a cell fails, if a process was killed for lack of memory, or if all together used
more than the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
import psutil
import websocket

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ("01_first_speculation", "02_gemma4_mtp", "03_glm_mtp")
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
CELL_SECONDS = 300
TOKEN = secrets.token_hex()
HEADERS = {"Authorization": f"token {TOKEN}"}


class Group:
    """A memory cgroup with a limit, of version 1 or 2."""

    def __init__(self, limit: int) -> None:
        old = V1.is_dir()
        self.path = (V1 if old else V2) / f"specnb-{os.getpid()}"
        self.events = self.path / ("memory.oom_control" if old else "memory.events")
        self.path.mkdir()
        (self.path / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
        if not old:
            with suppress(OSError):  # no swap here
                (self.path / "memory.swap.max").write_text("0")

    def processes(self) -> list[psutil.Process]:
        """Those in it."""
        found = []
        for pid in (self.path / "cgroup.procs").read_text().split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def enter(self) -> None:
        """Put the calling process in; its children follow."""
        (self.path / "cgroup.procs").write_text("0")

    def kills(self) -> int:
        """How many processes were ended for want of memory."""
        found = [line.split()[1] for line in self.events.read_text().splitlines() if line.startswith("oom_kill ")]
        return int(found[0])

    def memory(self) -> int:
        """What its processes hold, pages that several share counted once."""
        total = 0
        for process in self.processes():
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def close(self) -> None:
        """End what still runs in it, and remove it."""
        while left := self.processes():
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.2)
        self.path.rmdir()


class Peak(threading.Thread):
    """Looks at the group's memory several times a second."""

    def __init__(self, group: Group) -> None:
        super().__init__(daemon=True)
        self.group, self.bytes, self.ended = group, 0, threading.Event()

    def run(self) -> None:
        with suppress(FileNotFoundError):  # the group is gone
            while not self.ended.wait(0.2):
                self.bytes = max(self.bytes, self.group.memory())


@contextmanager
def jupyterlab(group: Group, log: Any) -> Iterator[str]:
    """JupyterLab on the repository, inside the group; its address. The group is removed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(ROOT / "binder" / "start"),
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        f"--ServerApp.root_dir={ROOT}",
    ]
    with tempfile.TemporaryDirectory() as home:
        own = {name: f"{home}/{name}" for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
        process = subprocess.Popen(
            command, env=os.environ | own | {"JUPYTER_TOKEN": TOKEN}, preexec_fn=group.enter, stdout=log, stderr=log
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):  # short of memory, it may not even get to its end
                process.wait(20)
            group.close()
            process.wait()


def call(address: str, body: dict[str, Any] | None = None) -> Any:
    """A call of the server's REST interface, repeated for a minute while it is not up yet."""
    data = json.dumps(body).encode() if body is not None else None
    end = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(address, data, HEADERS), timeout=60) as reply:
                return json.load(reply)
        except OSError:  # URLError is one
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def run(address: str, name: str) -> None:
    """Open a notebook's kernel and run its cells, as Run All does. RuntimeError for a cell that fails."""
    path = f"notebooks/{name}.ipynb"
    session = call(
        f"{address}/api/sessions", {"path": path, "name": path, "type": "notebook", "kernel": {"name": "python3"}}
    )
    channels = f"{address.replace('http', 'ws', 1)}/api/kernels/{session['kernel']['id']}/channels"
    line = websocket.create_connection(channels, timeout=CELL_SECONDS, header=HEADERS)
    for cell in nbformat.read(ROOT / path, as_version=4).cells:
        if cell.cell_type == "code":
            execute(line, cell.source)
    line.close()


def execute(line: Any, source: str) -> None:
    """Run one cell and wait for its end."""
    header = {
        "msg_id": uuid.uuid4().hex,
        "msg_type": "execute_request",
        "session": "check",
        "username": "",
        "version": "5.3",
    }
    content = {"code": source, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": True}
    request = {
        "header": header,
        "parent_header": {},
        "metadata": {},
        "channel": "shell",
        "buffers": [],
        "content": content,
    }
    line.send(json.dumps(request))
    while True:
        message = json.loads(line.recv())
        if message["msg_type"] == "status" and message["content"]["execution_state"] in ("restarting", "dead"):
            raise RuntimeError("the kernel died")
        if message.get("parent_header", {}).get("msg_id") != header["msg_id"]:
            continue
        if message["msg_type"] == "error" or "UsageError" in str(message["content"].get("text")):
            raise RuntimeError(f"a cell failed: {message['content']}\n{source}")
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2048, help="the limit; default 2048")
    parser.add_argument(
        "--log", type=argparse.FileType("w"), default=subprocess.DEVNULL, help="for the server's output"
    )
    options = parser.parse_args()
    limit = options.megabytes * 2**20
    group = Group(limit)
    peak = Peak(group)
    with jupyterlab(group, options.log) as address:
        peak.start()
        call(f"{address}/api")
        print(f"JupyterLab alone: peak {peak.bytes / 2**20:.0f} MB", flush=True)
        for name in NOTEBOOKS:
            start = time.monotonic()
            run(address, name)
            print(f"{name}: {time.monotonic() - start:.0f} s, peak so far {peak.bytes / 2**20:.0f} MB", flush=True)
        kills = group.kills()
        peak.ended.set()
        peak.join()
    print(f"peak {peak.bytes / 2**20:.0f} MB of {options.megabytes}, {kills} processes killed for want of memory")
    return int(kills > 0 or peak.bytes > limit)


if __name__ == "__main__":
    sys.exit(main())
