"""Screenshot of the `allmlp serve` page with a sample: python docs/tools/images/serve_page.py OUTPUT [SAMPLE]."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

from PIL import Image
from playwright.sync_api import sync_playwright


def screenshot(output: str, sample: str = "cat", scheme: str = "light", width: int = 1120, height: int = 800) -> None:
    command = [sys.executable, "-m", "allmlp", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as started:
        try:
            (address,) = re.findall(r"http://[\d.:]+\d", server.stdout.readline())
            browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(address)
            page.get_by_role("button", name=f"Sample: {sample}").click()
            page.locator("#importance-text:not(:empty)").wait_for()
            page.locator("#detail-text:not(:empty)").wait_for()
            page.wait_for_timeout(800)  # the bars are animated
            page.screenshot(path=output, full_page=True)
            browser.close()
        finally:
            server.terminate()
    Image.open(output).convert("RGB").quantize(256, kmeans=4).save(output, optimize=True)


if __name__ == "__main__":
    screenshot(*sys.argv[1:4], *map(int, sys.argv[4:]))
