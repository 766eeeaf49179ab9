"""The wheel: what is in it, that pip replaces nothing for it, and that it works where only it is installed.

`.ci/run` repeats this in an environment with the versions that Colab holds on to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from specnb.models import embedded

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
SESSION = """
import os, sys
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config)
for cell in (
    "%load_ext specnb",
    "%specload tiny-llama",
    "%%specgen --max-new-tokens 30 -o run\\nTell me a story about a fox who finds a lantern.",
    "import specnb; print(specnb.__file__, run.num_emitted_tokens, run.text, sep='\\\\n')",
):
    outcome = shell.run_cell(cell)
    if not outcome.success:
        sys.stdout.flush()
        os._exit(1)
sys.stdout.flush()
os._exit(0)  # leaving in good order, the shell empties itself, which takes a minute with all of torch loaded
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this folder, as an installation from it would."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    (built,) = folder.glob("specnb-*.whl")
    return built


def test_what_is_in_it(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for model in embedded.CARDS:
        for file in ("model.safetensors", "config.json", "tokenizer.json", "README.md"):
            assert f"specnb/models/embedded/{model}/{file}" in names
    assert {"specnb/notebook/token_view.js", "specnb/notebook/token_view.css"} <= names
    assert "specnb/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"specnb"}


def test_pip_replaces_nothing(wheel: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    subprocess.run([*PIP, "install", "--dry-run", "--report", str(report), str(wheel)], check=True)
    wanted = {
        f"{one['metadata']['name']} {one['metadata']['version']}" for one in json.loads(report.read_text())["install"]
    }
    assert {one.split()[0] for one in wanted} <= {"specnb"}, f"pip would install {wanted}"


@pytest.mark.slow
def test_the_magics_work_from_it(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    (tmp_path / "session.py").write_text(SESSION)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "session.py")],
        capture_output=True,
        text=True,
        check=False,
        cwd=elsewhere,
        env=os.environ
        | {"PYTHONPATH": str(target), "IPYTHONDIR": str(tmp_path / "ipython"), "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny-llama: LlamaForCausalLM, 5 layers" in done.stdout and "tokens/s (30 tokens in" in done.stdout
    place, count, text = done.stdout.splitlines()[-3:]
    assert Path(place).is_relative_to(target), "imported from the wheel"
    assert count == "30" and text.startswith("Once upon a time")
