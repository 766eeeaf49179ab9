"""The tutorial notebooks as files: outputs are stored, and they hold nothing that depends on the machine.

No kernel is started here. The notebooks are run and compared by
`pytest --nbval --nbval-current-env --nbval-sanitize-with notebooks/sanitize.cfg notebooks/`.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

from tools import narrow_domain

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks"
NAMES = [
    "01_first_speculation",
    "02_gemma4_mtp",
    "03_glm_mtp",
    "04_all_methods",
    "05_tuning",
    "06_write_a_drafter",
    "07_make_your_own_drafter",
]
PATHS = re.compile(r"/(?:home|root|tmp|Users|work|opt|usr)/|[A-Z]:\\\\|site-packages|0x[0-9a-f]{6,}")
MODELS = {
    "01_first_speculation": "tiny-llama",
    "02_gemma4_mtp": "tiny-gemma4",
    "03_glm_mtp": "tiny-glm4-moe",
    "04_all_methods": "tiny-llama",
    "05_tuning": "tiny-llama",
    "06_write_a_drafter": "tiny-llama",
    "07_make_your_own_drafter": "tiny",
}


def load_refresh() -> ModuleType:
    """`notebooks/refresh.py`, which is in no package."""
    spec = util.spec_from_file_location("refresh", FOLDER / "refresh.py")
    assert spec is not None and spec.loader is not None
    loaded = util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


refresh = load_refresh()


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in code(notebook) for output in cell.outputs]


def test_all_notebooks_are_here() -> None:
    assert [path.stem for path in refresh.all_notebooks()] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stored_and_of_this_code(name: str) -> None:
    assert refresh.problems_of(read(name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_NBT_01_no_stderr_no_bars(name: str) -> None:
    for output in outputs(read(name)):
        assert output.get("name") != "stderr"
        assert "\r" not in output.get("text", "") and "it/s" not in str(output)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_static(name: str) -> None:
    for output in outputs(read(name)):
        for kind, content in output.get("data", {}).items():
            assert kind in ("text/plain", "text/html", "image/png"), kind
            if kind == "text/html":
                assert not re.search(r"<script|<iframe|\son\w+=|javascript:|https?://", content, re.IGNORECASE)


@pytest.mark.parametrize("name", NAMES)
def test_NBT_02_no_paths_addresses_or_times(name: str) -> None:
    notebook = read(name)
    rules = [
        line.split(": ", 1)[1]
        for line in (FOLDER / "sanitize.cfg").read_text().splitlines()
        if line.startswith("regex: ")
    ]
    for cell in code(notebook):
        for output in cell.outputs:
            texts = [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if k != "image/png")]
            for text in texts:
                for rule in rules:
                    text = re.sub(rule, "", text)
                assert not PATHS.search(re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)), text
                if "nbval-ignore-output" not in cell.metadata.get("tags", []):
                    assert "tokens/s" not in text and not re.search(r"\d+ (ms|s)\b", text), text


@pytest.mark.parametrize("name", NAMES)
def test_metadata_is_the_same_on_every_machine(name: str) -> None:
    notebook = read(name)
    assert set(notebook.metadata) == {"kernelspec", "language_info", "specnb"}
    assert notebook.metadata.kernelspec.name == "python3" and set(notebook.metadata.language_info) == {"name"}
    assert all(set(cell.metadata) <= {"tags", "cellView"} for cell in notebook.cells)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


@pytest.mark.parametrize("name", NAMES)
def test_first_cells(name: str) -> None:
    notebook = read(name)
    title, install, form = notebook.cells[0].source, *(cell.source for cell in code(notebook)[:2])
    assert title.startswith(f"# {int(name[:2])}. ")
    for place in ("colab.research.google.com/github", "kaggle.com/kernels/welcome?src=", "mybinder.org/v2/gh"):
        assert place in title
    assert title.count(f"notebooks/{name}.ipynb") == 3
    assert "google.colab" in install and "KAGGLE_KERNEL_RUN_TYPE" in install
    assert "find_spec" in install and "%pip install" in install and install.endswith("%load_ext specnb")
    assert f'MODEL = "{MODELS[name]}"  # @param ["{MODELS[name]}"' in form
    told = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    offered = re.findall(r'"([^"]+)"', form.split("# @param ")[1].splitlines()[0])
    for model in offered:
        assert re.search(rf"^\| `{re.escape(model)}` \|.*GB", told, re.MULTILINE), f"memory of {model}"


@pytest.mark.parametrize("name", NAMES)
def test_claims_are_asserted_and_things_shown(name: str) -> None:
    cells = code(read(name))
    assert sum("assert " in cell.source for cell in cells) >= 5
    assert (
        sum("<img" in str(o.get("data", "")) or "image/png" in o.get("data", {}) for c in cells for o in c.outputs) >= 2
    )
    ignored = [cell for cell in cells if "nbval-ignore-output" in cell.metadata.get("tags", [])]
    assert len(ignored) <= len(cells) // 3, "most outputs are compared"
    assert all(len(cell.source.splitlines()) <= 40 for cell in cells), "short cells"


def test_the_real_run_of_notebook_7(tmp_path: Path) -> None:
    """Its prompts are the notebook's own, and its table goes into the cell that waits for it, again and again."""
    learn, test = narrow_domain.prompts()
    assert len(learn) > 200 and len(test) == 16 and not {*learn} & {*test}
    before, copied = read(NAMES[6]), tmp_path / "copy.ipynb"
    shutil.copy(FOLDER / f"{NAMES[6]}.ipynb", copied)
    for page in ("| a | table |", "| another |"):
        narrow_domain.into_notebook(copied, f"{page}\n")
        after = nbformat.read(copied, as_version=4)
        assert refresh.code_hash(after) == refresh.code_hash(before)
        told = "".join(cell.source for cell in after.cells if cell.cell_type == "markdown")
        assert told.count(page) == 1 and told.count("<!-- narrow-domain -->") == 1 and "has all options" in told
    assert "| a | table |" not in told


@pytest.mark.slow
def test_check_refuses_missing_or_old_outputs(tmp_path: Path) -> None:
    good = read(NAMES[0])
    empty, stale, broken = (copy.deepcopy(good) for _ in range(3))
    for cell in code(empty):
        cell.outputs, cell.execution_count = [], None
    code(stale)[-1].source += "\n"
    code(broken)[-1].outputs = [nbformat.v4.new_output("stream", name="stderr", text="UsageError: no such option")]
    for number, (notebook, words) in enumerate(
        [(empty, "missing"), (stale, "changed"), (broken, "refused its arguments")]
    ):
        path = tmp_path / f"0{number}_x.ipynb"
        nbformat.write(notebook, path)
        done = subprocess.run(
            [sys.executable, str(FOLDER / "refresh.py"), "--check", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1 and words in done.stderr, done.stderr


@pytest.mark.notebook
def test_the_guard_fails_a_silent_usage_error(tmp_path: Path) -> None:
    """NBT: a `UsageError` alone leaves the cell green for nbval; our guard makes it red. So does a line on stderr."""
    cells = ["%load_ext specnb", "%%specgen --nope 1\nprompt", "import sys\nprint('note', file=sys.stderr)", "print(1)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    nbformat.write(notebook, tmp_path / "guard.ipynb")
    for name in ("conftest.py", "refresh.py"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--nbval",
        "--nbval-current-env",
        "-q",
        str(tmp_path),
    ]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}
    )
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "unknown option '--nope'" in done.stdout and "written to stderr: note" in done.stdout


# ---- Binder
def test_binder_files() -> None:
    binder = ROOT / "binder"
    assert (binder / "runtime.txt").read_text().strip() == "python-3.11"
    script = (binder / "postBuild").read_text()
    assert "set -e" in script and "--no-deps" in script
    for name in ("postBuild", "start"):
        assert os.access(binder / name, os.X_OK) and (binder / name).read_text().startswith("#!/")
        assert subprocess.run(["bash", "-n", str(binder / name)], check=False).returncode == 0
    said = subprocess.run(
        [binder / "start", "sh", "-c", "echo $OMP_NUM_THREADS"], capture_output=True, text=True, check=True
    )
    assert said.stdout == "1\n"
    wanted = dict(re.findall(r"^([a-zA-Z0-9_-]+)==(\S+)$", (binder / "requirements.txt").read_text(), re.MULTILINE))
    tested = dict(re.findall(r"^([a-zA-Z0-9_-]+)==(\S+)$", (ROOT / ".ci/constraints.txt").read_text(), re.MULTILINE))
    assert {"torch", "transformers", "accelerate", "ipywidgets", "matplotlib"} <= set(wanted)
    for package in set(wanted) & set(tested):
        assert wanted[package].removesuffix("+cpu") == tested[package], f"{package}: Binder and the tested set differ"
