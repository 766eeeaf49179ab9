"""JupyterLab in headless Chromium: a server of its own, and a page with a notebook in it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat

TESTS = Path(__file__).resolve().parents[1]
CHROMIUM = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)


def missing() -> list[str]:
    """What is needed here and not installed."""
    packages = [name for name in ("jupyterlab", "playwright") if find_spec(name) is None]
    return packages + ([] if CHROMIUM else ["chromium"])


def notebook(path: Path, *cells: str) -> Path:
    """Write a notebook with these code cells."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, path)
    return path


@contextmanager
def server(folder: Path, theme: str = "JupyterLab Light", **environment: str) -> Iterator[str]:
    """A JupyterLab server on `folder` with settings of its own; yields its address."""
    home = folder / ".home"
    settings = home / "config" / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True, exist_ok=True)
    (settings / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False})
    )
    (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "IPYTHONDIR": str(home / "ipython"),
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
        f"--ServerApp.root_dir={folder}",
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.open_browser=False",
    ]
    log = (folder / "server.log").open("w")
    process = subprocess.Popen(command, env={**os.environ, **own, **environment}, stdout=log, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        _until(lambda: _answers(f"{address}/api"), 60, process)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        log.close()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _until(done: Any, seconds: float, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + seconds
    while not done():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError("JupyterLab did not start; see server.log")
        time.sleep(0.2)


_READY = """() => {
    const context = window.jupyterapp?.shell.currentWidget?.sessionContext;
    return context?.isReady && context.session?.kernel?.status === "idle";
}"""
# Asked of the notebook itself: cells out of sight are not in the page.
_RAN = """() => {
    const cells = [...window.jupyterapp.shell.currentWidget.content.model.cells].filter(cell => cell.type === "code");
    const failed = cells.some(cell => cell.outputs.toJSON().some(output => output.output_type === "error"));
    return failed || cells.length && cells.every(cell => cell.executionCount && cell.executionState !== "running");
}"""
_FAILED = """() => [...window.jupyterapp.shell.currentWidget.content.model.cells].flatMap(
    cell => cell.type === "code" ? cell.outputs.toJSON().filter(output => output.output_type === "error") : []
).map(output => output.ename + ": " + output.evalue)"""
_EXECUTE = """code => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute(
    {code, store_history: false}).done.then(reply => reply.content.status)"""


class Lab:
    """A page of JupyterLab with one notebook, driven as a user would."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address

    def open(self, path: Path) -> None:
        """Open a notebook and wait for its kernel."""
        self.page.goto(f"{self.address}/lab/tree/{path.name}?reset")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.page.wait_for_function(_READY, timeout=60_000)

    def shut_down(self) -> None:
        """End the notebook's kernel."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")

    def command(self, name: str, **arguments: Any) -> None:
        """Execute one of JupyterLab's commands, without waiting for its end."""
        self.page.evaluate("([name, given]) => { window.jupyterapp.commands.execute(name, given) }", [name, arguments])

    def run_all(self) -> list[str]:
        """Run all cells, wait for their end; the errors among their outputs."""
        self.command("notebook:run-all-cells")
        self.page.wait_for_function(_RAN, timeout=120_000)
        return list(self.page.evaluate(_FAILED))

    def execute(self, code: str) -> None:
        """Run code in the notebook's kernel, in no cell."""
        assert self.page.evaluate(_EXECUTE, code) == "ok", code

    def show(self, element: Any) -> None:
        """Scroll through the notebook until the element, of whose cell nothing may be in the page yet, is in sight."""
        for _ in range(40):
            if element.count():
                for _ in range(2):  # what comes into sight is only then laid out, and moves the rest
                    element.scroll_into_view_if_needed()
                    self.page.wait_for_timeout(500)
                return
            self.page.mouse.wheel(0, 900)
            self.page.wait_for_timeout(100)
        raise AssertionError(f"not in the notebook: {element}")

    def save(self) -> None:
        """Save the notebook."""
        self.command("docmanager:save")
        self.page.wait_for_timeout(1500)

    def button(self, name: str) -> Any:
        """A button of the panel."""
        return self.panel.locator("button:not(.widget-toggle-button)", has_text=name).first

    def tab(self, name: str) -> None:
        """Open a page of the panel."""
        self.panel.locator(".specnb-pages button", has_text=name).click()
        self.panel.locator(f".specnb-{name.lower()}").wait_for()

    @property
    def panel(self) -> Any:
        """The panel's element."""
        return self.page.locator(".specnb-panel").first

    def shot(self, name: str, element: Any = None) -> Path | None:
        """A screenshot in the folder that SPECNB_SCREENSHOTS names; nothing without it."""
        folder = os.environ.get("SPECNB_SCREENSHOTS")
        if not folder:
            return None
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"{name}.png"
        (element or self.page).screenshot(path=str(path))
        return path


@contextmanager
def chromium(address: str, width: int = 1100, height: int = 1500, dark: bool = False) -> Iterator[Lab]:
    """Headless Chromium on the server."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")
        page.set_default_timeout(30_000)
        try:
            yield Lab(page, address)
        finally:
            browser.close()
