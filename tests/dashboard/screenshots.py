"""Takes the pictures of the README: `python -m tests.dashboard.screenshots` writes them to docs/images.

They show bundled results only, so that anyone gets the same pictures. It needs Debian's chromium.
"""

import io
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.dashboard.browser import PATIENCE, chromium, dashboard, settle

OUT = Path(__file__).parents[2] / "docs" / "images"
WIDTH = 1280
SHOTS = {  # how many plots there are to wait for, and the height in pixels
    "plan": ("", 5, 1140),
    "policy-lab": ("policy-lab", 4, 1575),
    "trust": ("trust", 3, 1360),
}


def take(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as elsewhere, sync_playwright() as playwright:
        (Path(elsewhere) / "runs").mkdir()
        with dashboard("runs", Path(elsewhere)) as address, chromium(playwright) as browser:
            page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
            page.set_default_timeout(PATIENCE)
            for name, (path, plots, height) in SHOTS.items():
                page.goto(f"{address}/{path}")
                page.set_viewport_size({"width": WIDTH, "height": 3200})  # what is out of sight is not drawn
                settle(page, plots)
                page.wait_for_timeout(2000)
                shot = page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
                picture = Image.open(io.BytesIO(shot)).convert("RGB")
                picture.save(out / f"{name}.webp", lossless=True, method=6)
                print(f"{out / name}.webp: {(out / f'{name}.webp').stat().st_size:,} bytes")


if __name__ == "__main__":
    take(OUT)
