"""The picture of the token view: `python tests/browser/token_view.py [IMAGE]`, from the repository's root.

Runs a prompt with `%%specgen --interactive` in JupyterLab in headless Chromium, opens the step of a corrected token and
photographs the view, with fewer colours so that the file stays small.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from browser.lab import chromium, notebook, server

IMAGE = Path("docs/images/token-view.png")
CELLS = (
    "%load_ext specnb\n%specload tiny-llama --assistant tiny-llama-draft",
    "%%specgen --interactive --num-assistant-tokens 5 --max-new-tokens 120\n"
    "Tell me a story about a fox who finds a lantern.",
)


def main(image: Path) -> None:
    """Take the picture."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        path = notebook(Path(folder) / "tokens.ipynb", *CELLS)
        with server(Path(folder)) as address, chromium(address, width=1340, height=1100) as lab:
            lab.open(path)
            lab.command("application:toggle-left-area")
            lab.run_all()
            view = lab.page.locator(".specnb-tokens").first
            lab.show(view)
            view.get_by_label("rejected drafts").check()
            view.locator(".sn-text .sn-rejected").first.click()
            lab.page.mouse.move(0, 0)
            lab.page.wait_for_timeout(500)
            image.parent.mkdir(parents=True, exist_ok=True)
            view.screenshot(path=str(image))
    Image.open(image).convert("RGB").quantize(96).save(image, optimize=True)
    print(f"{image}: {image.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGE)
