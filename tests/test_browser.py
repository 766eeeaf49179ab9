"""JupyterLab in headless Chromium: run the first notebook, use its panel as a user would, save, open without a kernel.

Needs the packages jupyterlab and playwright and a Chromium (`apt-get install chromium`); with SPECNB_SCREENSHOTS=FOLDER
each stage leaves a picture there.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from browser.lab import Lab, chromium, missing, server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
FIRST = "01_first_speculation.ipynb"
# The tiny target is too quick to be stopped in the middle.
_SLOW = (
    "import time\nsleep = 0.0\n"
    "hook = get_ipython()._specnb_session.pair().target.register_forward_pre_hook(lambda *_: time.sleep(sleep))"
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Path]]:
    lacking = missing()
    if lacking:
        warnings.warn(f"THE BROWSER TESTS DID NOT RUN: not installed: {', '.join(lacking)}", stacklevel=1)
        pytest.skip(f"not installed: {', '.join(lacking)}")
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(NOTEBOOKS / "images", folder / "images")
    book = nbformat.read(NOTEBOOKS / FIRST, as_version=4)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(book, folder / FIRST)
    with server(folder, HF_HUB_OFFLINE="1") as address, chromium(address) as lab:
        yield lab, folder


@pytest.fixture(scope="module")
def opened(lab: tuple[Lab, Path]) -> Lab:
    page, folder = lab
    page.open(folder / FIRST)
    page.command("application:toggle-left-area")
    assert page.run_all() == []
    page.page.wait_for_selector(".specnb-panel")
    page.execute(_SLOW)
    return page


def finished(lab: Lab, text: str, seconds: float = 60) -> None:
    """Wait until the panel's status says `text`."""
    lab.panel.locator(".widget-html", has_text=text).first.wait_for(timeout=1000 * seconds)


# Controls without a name for those who do not see the page, and things to click that no key reaches.
_UNNAMED = """panel => [...panel.querySelectorAll("input, select, textarea, button, [role]")].filter(
    e => e.offsetParent && !e.getAttribute("aria-label") && !e.title && !e.textContent.trim()
        && ![...e.labels ?? []].some(label => label.textContent.trim())
        && !e.closest(".widget-slider")?.querySelector("label")?.textContent.trim()
).map(e => e.outerHTML.slice(0, 200))"""
_UNREACHED = """panel => [...panel.querySelectorAll(
    "input, select, textarea, button, summary, .noUi-handle, .jupyter-widget-Collapse-header, "
    + ["button", "slider", "checkbox", "link", "radio", "tab", "option"].map(role => `[role=${role}]`)
)].filter(e => e.offsetParent && !e.disabled && e.tabIndex < 0
    && !e.closest("[role=listbox], [role=tablist]")?.querySelector("[tabindex='0']")  // arrow keys lead to it
).map(e => e.outerHTML.slice(0, 200))"""


def test_marked_text_shows(opened: Lab) -> None:
    cell = opened.page.locator(".jp-CodeCell", has_text="%%specgen --num-assistant-tokens 5 --max-new-tokens 120").first
    opened.show(cell)
    text = cell.locator(".jp-OutputArea-output .specnb pre").first
    text.wait_for()
    for tag in ("ins", "mark", "b"):
        assert any(piece.strip() for piece in text.locator(tag).all_inner_texts()), tag
    assert cell.locator("text=/^draft_model · \\d+ tokens in \\d+ target passes/").first.is_visible()
    assert cell.locator("text=/tokens\\/s \\(\\d+ tokens/").first.is_visible()
    opened.shot("01-notebook")


def test_panel_runs_stops_and_runs_again(opened: Lab) -> None:
    panel = opened.panel
    opened.show(panel)
    panel.get_by_label("Prompt", exact=True).fill("Tell me a story about a fox who finds a lantern.")
    panel.get_by_label("Method", exact=True).select_option(label="Draft model")
    panel.locator("text=/^Draft model: a smaller model/").first.wait_for()
    fold = panel.locator("button", has_text="Drafting")
    fold.focus()
    fold.press("Enter")
    handle = panel.locator(".noUi-handle").first
    handle.wait_for()
    handle.focus()
    for _ in range(2):
        handle.press("ArrowLeft")  # sliders answer to the keyboard
    opened.tab("Code")
    opened.page.wait_for_function(
        "() => [...document.querySelectorAll('.specnb-panel textarea')]"
        ".some(t => t.value.includes('num_assistant_tokens=3'))"
    )
    opened.shot("02-options")

    opened.execute("sleep = 0.15")
    opened.button("Run").click()
    finished(opened, "of at most 128 tokens")
    opened.shot("03-running")
    opened.button("Stop").click()
    finished(opened, "ended: cancelled", 10)
    opened.execute("sleep = 0.0")
    stopped = panel.locator(".specnb-tokens .sn-text").first.inner_text().strip()
    opened.shot("04-stopped")
    opened.button("Run").click()
    panel.locator("text=/ended: (eos|length)/").first.wait_for()
    whole = panel.locator(".specnb-tokens .sn-text").first.inner_text()
    assert stopped and whole.startswith(stopped[:10]) and len(whole) > len(stopped)
    opened.shot("05-finished")


def test_steps_and_plots(opened: Lab) -> None:
    opened.tab("Steps")
    opened.panel.get_by_label("Step", exact=True).fill("2")
    opened.page.keyboard.press("Enter")
    opened.panel.locator("text=/^Step 2 of/").first.wait_for()
    first = opened.panel.locator("table tbody tr").first
    assert re.match(r"\s*1\s.*(accepted|rejected)\s+[01]\.\d{4}\s+[01]\.\d{4}", first.inner_text())
    opened.shot("06-steps")
    opened.tab("Plots")
    image = opened.panel.locator("img[alt^='Timeline of']").first
    image.wait_for(timeout=60_000)
    box, frame = image.bounding_box(), opened.panel.bounding_box()
    assert box and frame and box["width"] <= frame["width"]
    opened.shot("07-plots")


def test_compare(opened: Lab) -> None:
    opened.tab("Compare")
    opened.panel.get_by_label("Compare", exact=True).select_option(label="values of one option")
    opened.panel.get_by_label("Values", exact=True).fill("1, 3-5")
    opened.button("Compare").click()
    opened.panel.locator("th", has_text="speed-up").first.wait_for(timeout=180_000)
    table = opened.panel.locator("table", has_text="speed-up")
    assert table.locator("tbody tr").count() == 5 and "★" in table.inner_text()
    opened.panel.locator("img[alt^='Speed and tokens per target pass']").first.wait_for()
    opened.shot("08-compare")


def test_every_control_has_a_name_and_is_reached_by_keys(opened: Lab) -> None:
    for tab in ("Text", "Steps", "Plots", "Compare", "Train", "Code", "Load"):
        opened.tab(tab)
        assert opened.panel.evaluate(_UNNAMED) == []
        assert opened.panel.evaluate(_UNREACHED) == []


def load(lab: Lab, name: str, draft: str) -> None:
    lab.tab("Load")
    lab.panel.get_by_label("Name, folder or hub id", exact=True).fill(name)
    lab.panel.get_by_label("Draft model (may stay empty)", exact=True).fill(draft)
    lab.button("Load").click()


def test_errors_are_one_line_with_a_fold(opened: Lab) -> None:
    load(opened, "tiny-llama", "no-such-model")
    opened.panel.locator("strong", has_text="⚠").first.wait_for()
    trace = opened.panel.locator("summary", has_text="traceback").first
    assert not opened.panel.locator("pre", has_text="Traceback").first.is_visible()
    opened.shot("09-error")
    trace.click()
    opened.panel.locator("pre", has_text="Traceback").first.wait_for()


def test_a_pair_that_cannot_work(opened: Lab) -> None:
    load(opened, "tiny-llama", "tiny-gemma4-assistant")
    opened.panel.locator("text=/Gemma4AssistantForCausalLM cannot draft for LlamaForCausalLM/").first.wait_for()
    opened.shot("10-unfit-pair")
    load(opened, "tiny-llama", "")
    finished(opened, "loaded: tiny-llama")
    opened.panel.locator("summary", has_text="methods cannot run with this pair").click()
    opened.panel.locator("text=/no multi-token-prediction layers/").first.wait_for()
    methods = opened.panel.get_by_label("Method", exact=True).locator("option").all_inner_texts()
    expected = ["Plain decoding", "Prompt lookup", "Suffix decoding", "Early exit"]
    assert [text.replace("\xa0", " ") for text in methods] == expected


def test_dark_and_narrow(opened: Lab) -> None:
    opened.tab("Text")
    opened.command("apputils:change-theme", theme="JupyterLab Dark")
    opened.page.wait_for_selector("body[data-jp-theme-light='false']", state="attached")
    opened.shot("11-dark")
    opened.page.set_viewport_size({"width": 480, "height": 1500})
    opened.page.wait_for_timeout(500)
    for tab in ("Text", "Steps", "Compare", "Load"):
        opened.tab(tab)
        opened.shot(f"12-narrow-{tab.lower()}")
        assert opened.panel.evaluate("panel => panel.scrollWidth - panel.clientWidth") <= 1, tab
    opened.page.set_viewport_size({"width": 1100, "height": 1500})
    opened.command("apputils:change-theme", theme="JupyterLab Light")


def test_saved_and_opened_without_its_kernel(opened: Lab, lab: tuple[Lab, Path]) -> None:
    page, folder = lab
    opened.show(opened.panel)
    saved = opened.page.locator(".specnb-saved").first
    assert saved.count() and not saved.is_visible()  # hidden while the panel is there
    opened.save()
    path = folder / FIRST
    assert "specnb-saved" in path.read_text(encoding="utf-8")
    opened.shut_down()
    page.open(path)
    page.shut_down()
    page.show(page.page.locator(".specnb-saved").first)
    saved = page.page.locator(".specnb-saved").first
    page.shot("13-without-kernel")
    assert re.search(r"speed-up|tokens in", saved.inner_text()) and not page.page.locator(".specnb-panel").count()
