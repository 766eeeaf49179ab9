"""README, docs/ and CONTRIBUTING: examples run, links and tables are right. `.ci/run` builds the site."""

from __future__ import annotations

import re
import textwrap
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

import specnb
from specnb.drafters import build
from specnb.options import METHODS, OPTIONS, REGISTRY
from specnb.text import prompt_inputs
from tools import animate_run, docs_hooks, docs_tables

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
URL = "https://github.com/specnb/specnb"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", read(page), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for _, block in found]


# ---- README
def test_readme_is_short_and_has_the_two_commands() -> None:
    text = read("README.md")
    assert len(text.splitlines()) < 150
    start = "python -m venv .venv && . .venv/bin/activate && pip install -c .ci/constraints.txt -e "
    assert f"\n{start}'.[gguf]' && python -m specnb demo --model smollm2-135m-q4\n" in text
    assert f"\n{start}'.[test,gguf]' && python -m pytest -n 2\n" in text


@pytest.mark.parametrize(
    "page", ["README.md", "docs/getting-started.md", "docs/own-drafter.md", "docs/train-drafter.md"]
)
def test_python_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = blocks(page, "python")
    assert examples
    for example in examples:
        exec(compile(example, page, "exec"), {})
    for drafter in list(REGISTRY.infos):
        specnb.unregister_drafter(drafter)


# ---- pages
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_tables_are_up_to_date() -> None:
    assert docs_tables.main(["--check"]) == 0
    options = read("docs/options.md")
    assert all(f"| `{option.name}` |" in options for option in OPTIONS)
    pages = "".join(read(name(page)) for page in PAGES)
    assert all(f"<!-- table {table} -->" in pages for table in docs_tables.TABLES)


def test_every_method_has_its_section() -> None:
    headings = re.findall(r"^## (.+)$", read("docs/methods.md"), re.MULTILINE)
    for info in METHODS.values():
        assert info.name == "plain" or info.title.lower() in (heading.lower() for heading in headings)


def test_links_are_rewritten_for_the_site() -> None:
    def of(text: str, place: str, source: str) -> str:
        return docs_hooks.rewritten(text, place, source, URL)

    assert of("[a](../CONTRIBUTING.md#b)", "docs", "index.md") == "[a](CONTRIBUTING.md#b)"
    assert of("[a](docs/methods.md)", "", "CONTRIBUTING.md") == "[a](methods.md)"
    assert of("[a](../specnb/options.py)", "docs", "index.md") == f"[a]({URL}/blob/main/specnb/options.py)"
    assert of("[a](../notebooks/05_tuning.ipynb)", "docs", "index.md") == "[a](notebooks/05_tuning.ipynb)"
    assert of("[a](https://example.org/x) [b](#c)", "docs", "index.md") == "[a](https://example.org/x) [b](#c)"


def test_one_version_and_one_address() -> None:
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == specnb.__version__ and citation["repository-code"] == URL
    assert specnb.__version__ in read("CHANGELOG.md")
    for page in [*PAGES, ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]:
        for address in re.findall(r"https://github\.com/[\w-]+/[\w-]+", page.read_text(encoding="utf-8")):
            assert address == URL, f"{name(page)}: {address}"


@pytest.mark.parametrize("file", sorted((ROOT / ".github").rglob("*.yml")), ids=name)
def test_workflows_and_forms_can_be_read(file: Path) -> None:
    assert yaml.safe_load(file.read_text(encoding="utf-8"))


# ---- the picture
def test_the_picture_of_a_run() -> None:
    picture = read("docs/images/run.svg")
    assert (
        len(picture) < 200_000
        and "<script" not in picture
        and "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    )
    ElementTree.fromstring(picture)
    pair = specnb.load("tiny-llama", "tiny-llama-draft")
    assert animate_run.run_of(pair)[0] == picture, "run python -m tools.animate_run"


# ---- CONTRIBUTING
def test_the_drafter_of_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of prompt lookup's: the text is right, whatever it proposes."""
    module, _, assembly = blocks("CONTRIBUTING.md", "python")
    names: dict[str, Any] = {}
    exec(compile(module, "last_token.py", "exec"), names)
    exec(f"from __future__ import annotations\n{assembly}", names)
    monkeypatch.setitem(build._METHODS, "prompt_lookup", names["_last_token"])
    pair = specnb.load("tiny-llama")
    inputs = prompt_inputs(pair.tokenizer, "Tell me a story about a fox.")
    for options in ({"do_sample": False}, {"do_sample": True, "seed": 3}):
        found = specnb.generate(
            pair, **inputs, method="prompt_lookup", num_assistant_tokens=3, max_new_tokens=40, **options
        )
        plain = specnb.generate(pair, **inputs, method="plain", max_new_tokens=40, **options)
        assert found.ids == plain.ids and found.num_draft_tokens > 40
