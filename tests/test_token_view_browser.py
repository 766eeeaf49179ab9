"""The token view in JupyterLab: point, open, branch, replay, keys, colours, dark theme, and opened without a kernel.

As in test_browser.py, SPECNB_SCREENSHOTS=FOLDER leaves pictures there.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from browser.lab import Lab, chromium, missing, notebook, server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

CELLS = (
    "%load_ext specnb\n%specload tiny-llama --assistant tiny-llama-draft",
    "%%specgen --interactive --num-assistant-tokens 5 --max-new-tokens 60 -o run\n"
    "Tell me a story about a fox who finds a lantern.",
)
_SLOW = (
    "import time\nsleep = 0.0\n"
    "hook = get_ipython()._specnb_session.pair().target.register_forward_pre_hook(lambda *_: time.sleep(sleep))"
)
_NAMED = """root => [...root.querySelectorAll("button, select, input, summary, [role]")].filter(
    e => e.offsetParent && e.getAttribute("role") !== "status" && !e.getAttribute("aria-label") && !e.textContent.trim()
        && ![...e.labels ?? []].length
).map(e => e.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if lacking := missing():
        warnings.warn(f"THE BROWSER TESTS DID NOT RUN: not installed: {', '.join(lacking)}", stacklevel=1)
        pytest.skip(f"not installed: {', '.join(lacking)}")
    folder = tmp_path_factory.mktemp("lab")
    path = notebook(folder / "tokens.ipynb", *CELLS)
    with server(folder, HF_HUB_OFFLINE="1") as address, chromium(address, width=1400, height=1000) as lab:
        lab.path = path  # type: ignore[attr-defined]
        lab.errors = []  # type: ignore[attr-defined]
        lab.page.on("pageerror", lambda error: lab.errors.append(str(error)))  # type: ignore[attr-defined]
        lab.open(path)
        lab.command("application:toggle-left-area")
        assert lab.run_all() == []
        lab.show(lab.page.locator(".specnb-tokens"))
        lab.execute(_SLOW)
        yield lab


@pytest.fixture
def view(lab: Lab) -> Any:
    """The widget, with nothing opened."""
    found = lab.page.locator(".specnb-tokens").first
    close = found.get_by_label("Close the step")
    if close.count():
        close.click()
    return found


def token(view: Any, i: int) -> Any:
    return view.locator(".sn-text .sn-token").nth(i)


def test_pointing_at_a_token(lab: Lab, view: Any) -> None:
    drafted = view.locator(".sn-text .sn-token[data-origin=accepted]").nth(3)
    drafted.hover()
    tip = view.get_by_role("tooltip")
    tip.wait_for()
    text = tip.inner_text()
    assert re.search(r"accepted\s+step \d+ of \d+ · written by draft model", text), text
    assert re.search(r"target\s+\d+%\s+draft\s+\d+%\s+rank\s+1", text), text
    lab.shot("tokens-1-hover", view)
    # the same text is static HTML in the output, for readers without a kernel, and hidden here
    saved = lab.page.locator(".specnb-saved")
    assert saved.count() == 1 and not saved.first.is_visible()


def test_a_click_opens_the_step(lab: Lab, view: Any) -> None:
    view.locator(".sn-text .sn-token[data-origin=corrected]").first.click()
    opened = view.get_by_role("region", name="The opened step")
    opened.get_by_text(re.compile(r"^Step \d+ of \d+$")).wait_for()
    tabs = opened.get_by_role("tab")
    gone = opened.locator(".sn-gone")
    assert gone.count() >= 1 and gone.first.inner_text()
    gone.first.click()
    assert opened.get_by_text(re.compile("^“.*” Rejected; the target wrote “")).count() == 1
    for name in ("target", "draft model"):
        assert opened.get_by_label(f"Best tokens of {name}").locator("li").count() == 5
    lab.shot("tokens-2-step", view)
    before = tabs.all_inner_texts()
    opened.get_by_label("Next step").click()
    assert tabs.all_inner_texts() != before


def test_keys_do_it_all(lab: Lab, view: Any) -> None:
    keys, active = lab.page.keyboard, "document.activeElement"
    token(view, 0).focus()
    for key, place in (("ArrowRight", "1"), ("ArrowLeft", "0"), ("ArrowDown", "1"), ("End", "last"), ("Home", "0")):
        keys.press(key)
        at = lab.page.evaluate(f"{active}.dataset.i")
        assert at == (str(view.locator(".sn-text .sn-token").count() - 1) if place == "last" else place), key
    assert view.locator(".sn-text [tabindex='0']").count() == 1
    keys.press("ArrowDown")
    keys.press("Enter")
    assert lab.page.evaluate(f"{active}.getAttribute('role')") == "tab"
    name = lab.page.evaluate(f"{active}.getAttribute('aria-label')")
    keys.press("ArrowRight")
    assert lab.page.evaluate(f"{active}.getAttribute('aria-label')") != name
    keys.press("Tab")
    assert re.match("Branch here with “", lab.page.evaluate(f"{active}.getAttribute('aria-label')"))
    lab.page.locator(".sn-positions [tabindex='0']").focus()
    keys.press("Escape")
    assert lab.page.evaluate(f"{active}.getAttribute('role')") == "option"
    label = lab.page.evaluate(f"{active}.getAttribute('aria-label')")
    assert re.search(r"“.*”, \w+, step \d+ of \d+, written by .*, target [\d.]+%.*, rank \d+", label), label
    assert view.evaluate(_NAMED) == []


def test_the_replay_goes_step_by_step_and_at_its_own_pace(lab: Lab, view: Any) -> None:
    steps = view.get_by_label("Step of the replay")
    steps.focus()
    last = int(steps.get_attribute("max"))
    lab.page.keyboard.press("Home")
    assert view.locator(".sn-text .sn-token:not(.sn-future)").count() == 0
    for number in (1, 2, 3):
        lab.page.keyboard.press("ArrowRight")
        assert steps.input_value() == str(number)
    shown = view.locator(".sn-text .sn-token:not(.sn-future)").count()
    assert 0 < shown < view.locator(".sn-text .sn-token").count()
    assert re.match(rf"step 3 of {last}, [\d.]+ m?s, {shown} tokens", steps.get_attribute("aria-valuetext"))
    counts = view.locator(".sn-count").all_inner_texts()
    assert counts[0] == f"{shown} tokens" and re.fullmatch(r"\d+ tokens?", counts[1])
    assert view.locator(".sn-lane-name em").inner_text() == "estimated"
    lab.shot("tokens-3-replay", view)
    view.get_by_label("Play", exact=True).click()
    view.get_by_label("Play", exact=True).wait_for(timeout=60_000)  # it is "Pause" until the end
    assert steps.input_value() == str(last) and view.locator(".sn-future").count() == 0


def test_colours_have_a_legend_each(lab: Lab, view: Any) -> None:
    legend = view.get_by_label("Legend")
    for name, words in (
        ("source", "draft model"),
        ("target probability", "the target was sure: 100%"),
        ("saved time", "earlier than plain decoding"),
        ("outcome", "corrected"),
    ):
        view.get_by_text(name, exact=True).first.click()
        legend.get_by_text(words).first.wait_for()
        lab.shot(f"tokens-4-{name.replace(' ', '-')}", view)
    assert view.locator(".sn-text .sn-rejected").first.is_hidden()
    view.get_by_label("rejected drafts").check()
    assert view.locator(".sn-text .sn-rejected").first.is_visible()
    view.get_by_label("rejected drafts").uncheck()


def test_a_branch_and_back(lab: Lab, view: Any) -> None:
    text = view.locator(".sn-text").inner_text()
    at = view.locator(".sn-text .sn-token[data-origin=corrected]").first
    at.click()
    index = int(at.get_attribute("data-i"))
    lab.execute("sleep = 0.1")
    branch = view.get_by_role("button", name=re.compile("^Branch here")).first
    chosen = branch.locator(".sn-alternative").inner_text()
    branch.click()
    view.get_by_text(re.compile(r"branch: \d+ tokens? so far")).wait_for()
    lab.execute("assert True")  # the kernel answers meanwhile
    assert view.get_by_role("button", name="Stop").is_visible()
    lab.execute("sleep = 0.0")
    runs = view.get_by_label("Runs")
    runs.wait_for()
    assert runs.get_by_role("button").count() == 2
    assert token(view, index).get_attribute("data-origin") == "chosen"
    assert token(view, index).inner_text() == chosen
    assert view.locator(".sn-text .sn-token[data-kept]").count() == index + 1
    lab.shot("tokens-5-branch", view)
    runs.get_by_role("button", name="the first run").click()
    assert view.locator(".sn-text").inner_text() == text
    view.get_by_role("button", name="Measure plain decoding").click()
    view.locator(".sn-lane-name em", has_text="measured").wait_for(timeout=60_000)
    lab.execute("assert run.ids == _specgen.ids")


def test_dark_and_narrow(lab: Lab, view: Any) -> None:
    lab.command("apputils:change-theme", theme="JupyterLab Dark")
    lab.page.wait_for_selector(".specnb-tokens[data-theme=dark]")
    view.locator(".sn-text .sn-token[data-origin=corrected]").first.click()
    lab.page.wait_for_timeout(500)
    lab.shot("tokens-6-dark", view)
    light = "e => getComputedStyle(e).color.match(/[0-9]+/g).slice(0, 3).every(v => v > 180)"
    assert view.evaluate(light)
    lab.page.set_viewport_size({"width": 800, "height": 1000})
    lab.page.wait_for_timeout(500)
    lab.shot("tokens-7-dark-800", view)
    assert view.evaluate("e => e.scrollWidth - e.clientWidth") <= 1
    lab.command("apputils:change-theme", theme="JupyterLab Light")
    lab.page.wait_for_selector(".specnb-tokens[data-theme=light]")
    lab.page.wait_for_timeout(500)
    lab.shot("tokens-8-light-800", view)
    lab.page.set_viewport_size({"width": 1400, "height": 1000})
    assert lab.errors == []  # type: ignore[attr-defined]


def test_saved_and_opened_without_its_kernel(lab: Lab, view: Any) -> None:
    words = view.locator(".sn-text").inner_text().split("<|")[0].split()
    lab.save()
    lab.shut_down()
    lab.open(lab.path)  # type: ignore[attr-defined]
    lab.shut_down()
    saved = lab.page.locator(".specnb-saved").first
    lab.show(saved)
    assert saved.is_visible() and not lab.page.locator(".specnb-tokens").count()
    assert saved.locator("pre").first.inner_text().split()[:8] == words[:8]
    assert re.search(r"accepted, target \d+%", saved.locator("ins span").first.get_attribute("title"))
    assert "Branch at token" in saved.inner_text()
    saved.locator("details.call summary").first.click()
    shown = saved.locator("details.call").first.inner_text()
    assert "tiny-llama with tiny-llama-draft, draft_model" in shown and "num_assistant_tokens=5" in shown
    assert "Tell me a story about a fox" in shown
    lab.shot("tokens-9-without-kernel", saved)
