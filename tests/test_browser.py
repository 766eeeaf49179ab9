"""JupyterLab in headless Chromium: a notebook is run, the panel used as a user would, saved and opened without a kernel.

Needs the packages jupyterlab and playwright and a Chromium (`apt-get install chromium`); with SPECNB_SCREENSHOTS=FOLDER
each stage leaves a picture there.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser.lab import Lab, chromium, missing, notebook, server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

_SETUP = """import time, tiny, specnb
target, tok = tiny.llama(vocab=330), tiny.byte_tokenizer()
hook = target.register_forward_pre_hook(lambda *_: time.sleep(0.012))
specnb.load = lambda name, **_: specnb.Pair(target, tok, tiny.noisy(target, 0.02), tok, name=name)
%load_ext specnb
%specload tiny"""
_GENERATE = (
    "%%specgen --method prompt_lookup --max-new-tokens 40 -o run\nthe quick <script>brown</script> fox; the quick brown"
)
_DEAD = (
    "other = specnb.Pair(target, tok, tiny.llama(vocab=330).model, tok, name='headless')\n"
    "dead = specnb.Panel(other, session=type(panel.session)())\ndead"
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Path]]:
    lacking = missing()
    if lacking:
        warnings.warn(f"THE BROWSER TESTS DID NOT RUN: not installed: {', '.join(lacking)}", stacklevel=1)
        pytest.skip(f"not installed: {', '.join(lacking)}")
    folder = tmp_path_factory.mktemp("lab")
    with server(folder, HF_HUB_OFFLINE="1") as address, chromium(address) as lab:
        yield lab, folder


@pytest.fixture(scope="module")
def opened(lab: tuple[Lab, Path]) -> Lab:
    page, folder = lab
    path = notebook(folder / "one.ipynb", _SETUP, _GENERATE, "panel = %specpanel\npanel", _DEAD)
    page.open(path)
    page.command("application:toggle-left-area")
    page.run_all()
    page.page.wait_for_selector(".specnb-panel")
    return page


def finished(lab: Lab, text: str, seconds: float = 60) -> None:
    """Wait until the panel's status says `text`."""
    lab.panel.locator(".widget-html", has_text=text).first.wait_for(timeout=1000 * seconds)


def test_marked_text_shows(opened: Lab) -> None:
    output = opened.page.locator(".jp-OutputArea-output .specnb pre").first
    output.wait_for()
    assert output.inner_text().strip()
    assert opened.page.locator("text=/prompt_lookup · 40 tokens in/").first.is_visible()
    assert opened.page.locator("text=/tokens\\/s \\(40 tokens/").first.is_visible()
    opened.shot("1-notebook")


def test_panel_runs_stops_and_runs_again(opened: Lab) -> None:
    panel = opened.panel
    panel.get_by_label("Method", exact=True).select_option(label="Prompt lookup")
    panel.locator("text=/^Prompt lookup: copies/").first.wait_for()
    panel.locator(".jupyter-widget-Collapse-header", has_text="Drafting").first.click()
    handle = panel.locator(".noUi-handle").first
    handle.focus()
    for _ in range(3):
        handle.press("ArrowRight")  # sliders answer to the keyboard
    opened.tab("Code")
    opened.page.wait_for_function(
        "() => [...document.querySelectorAll('.specnb-panel textarea')].some(t => t.value.includes('num_assistant_tokens=13'))"
    )
    opened.shot("2-options")

    opened.button("Run").click()
    finished(opened, "of at most 128 tokens")
    opened.shot("3-running")
    opened.button("Stop").click()
    finished(opened, "ended: cancelled", 10)
    stopped = panel.locator(".specnb pre").first.inner_text()
    opened.shot("4-stopped")
    opened.button("Run").click()
    finished(opened, "ended: length")
    whole = panel.locator(".specnb pre").first.inner_text()
    assert stopped and whole.startswith(stopped[:10]) and len(whole) > len(stopped)
    opened.shot("5-finished")


def test_steps_and_plots(opened: Lab) -> None:
    opened.tab("Steps")
    opened.panel.locator("th", has_text="target probability").first.wait_for()
    opened.panel.get_by_label("Step", exact=True).fill("3")
    opened.page.keyboard.press("Enter")
    opened.panel.locator("text=/^Step 3 of/").first.wait_for()
    opened.shot("6-steps")
    opened.tab("Plots")
    image = opened.panel.locator("img[alt^='Timeline of']").first
    image.wait_for(timeout=60_000)
    box, frame = image.bounding_box(), opened.panel.bounding_box()
    assert box and frame and box["width"] <= frame["width"]
    opened.shot("7-plots")


def test_compare(opened: Lab) -> None:
    opened.tab("Compare")
    opened.button("Compare").click()
    opened.panel.locator("th", has_text="speed-up").first.wait_for(timeout=180_000)
    table = opened.panel.locator("table", has_text="speed-up")
    assert table.locator("tbody tr").count() == 4 and "★" in table.inner_text()
    opened.panel.locator("img[alt^='Comparison of speed']").first.wait_for()
    opened.shot("8-compare")


def test_errors_are_one_line_with_a_fold(opened: Lab) -> None:
    prompt = opened.panel.get_by_label("Prompt", exact=True)
    before = prompt.input_value()
    prompt.fill(" ")
    prompt.blur()
    opened.button("Run").click()
    error = opened.panel.locator("text=/the prompt is empty/").first
    error.wait_for()
    trace = opened.panel.locator("summary", has_text="traceback").first
    assert not opened.panel.locator("pre", has_text="Traceback").first.is_visible()
    trace.click()
    opened.panel.locator("pre", has_text="Traceback").first.wait_for()
    opened.shot("9-error")
    prompt.fill(before)
    prompt.blur()


def test_a_pair_that_cannot_work(opened: Lab) -> None:
    dead = opened.page.locator(".specnb-panel").nth(1)
    fold = dead.locator("summary", has_text="methods cannot run with this pair")
    fold.click()
    dead.locator("text=/no language-model head/").first.wait_for()
    options = dead.get_by_label("Method", exact=True).locator("option").all_inner_texts()
    assert [text.replace("\xa0", " ") for text in options] == ["Plain decoding", "Prompt lookup", "Early exit"]
    opened.shot("10-unfit-pair", dead)


def test_saved_and_opened_without_its_kernel(opened: Lab, lab: tuple[Lab, Path]) -> None:
    page, folder = lab
    saved = opened.page.locator(".specnb-saved").first
    assert saved.count() and not saved.is_visible()  # hidden while the panel is there
    opened.save()
    path = folder / "one.ipynb"
    assert "specnb-saved" in path.read_text(encoding="utf-8")
    opened.shut_down()
    page.open(path)
    page.shut_down()
    saved = page.page.locator(".specnb-saved").first
    saved.wait_for()
    page.shot("11-without-kernel")
    assert re.search(r"\w", saved.inner_text()) and not page.page.locator(".specnb-panel").count()
    assert page.page.locator("text=/prompt_lookup · 40 tokens in/").first.is_visible()
