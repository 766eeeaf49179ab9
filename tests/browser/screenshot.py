"""The README's picture of the panel: `python tests/browser/screenshot.py [IMAGE]`, from the repository's root.

Loads MODEL below (fetched on first use), runs a prompt with prompt lookup, opens JupyterLab in headless Chromium and
photographs the panel, with fewer colours so that the file stays small.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from browser.lab import chromium, notebook, server

MODEL = "smollm2-135m-q4"
IMAGE = Path("notebooks/images/panel.png")
PROMPT = (
    "Copy this text:\n\nThe old fisherman rowed out to the lighthouse every morning before sunrise. The keeper of the "
    "lighthouse gave the old fisherman a cup of hot tea, and the old fisherman gave the keeper a basket of fresh fish."
)


def main(image: Path) -> None:
    """Take the picture."""
    from PIL import Image

    cells = (
        "%load_ext specnb",
        f"%specload {MODEL}",
        f"panel = %specpanel\npanel.set(method='prompt_lookup', max_new_tokens=64, prompt={PROMPT!r})\npanel",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = notebook(Path(folder) / "panel.ipynb", *cells)
        with server(Path(folder)) as address, chromium(address, width=1000, height=1300) as lab:
            lab.open(path)
            lab.command("application:toggle-left-area")
            lab.run_all()
            lab.panel.wait_for(timeout=300_000)
            lab.button("Run").click()
            lab.panel.locator(".widget-html", has_text="ended:").first.wait_for(timeout=300_000)
            lab.page.mouse.move(0, 0)
            lab.page.wait_for_timeout(500)
            image.parent.mkdir(parents=True, exist_ok=True)
            lab.panel.screenshot(path=str(image))
    Image.open(image).convert("RGB").quantize(64).save(image, optimize=True)
    print(f"{image}: {image.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGE)
