"""Screenshot of a page in a browser: python docs/tools/images/screenshot.py PAGE[#ANCHOR] OUTPUT [WIDTH HEIGHT]."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright


def take(page: str, output: str, width: int = 1180, height: int = 1000) -> None:
    file, _, place = page.partition("#")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": height})
        tab.goto(f"{Path(file).resolve().as_uri()}#{place}")
        tab.wait_for_timeout(1000)  # images load lazily
        tab.screenshot(path=output)
        browser.close()
    Image.open(output).convert("RGB").quantize(256).save(output, optimize=True)


if __name__ == "__main__":
    take(*sys.argv[1:3], *map(int, sys.argv[3:]))
