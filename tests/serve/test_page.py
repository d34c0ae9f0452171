"""The page in a real browser: pictures and texts are asked, and what goes wrong is told."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import sync_playwright

from allmlp.serve.batching import Batcher
from allmlp.serve.limits import Allowed
from data.pictures import encode, scene
from serve.folders import CLASSES, picture_folder, running, text_folder

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab in which nothing may be loaded from elsewhere and no script may fail."""
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    tab = context.new_page()
    tab.set_default_timeout(20_000)
    faults: list[str] = []
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("request", lambda request: "//127.0.0.1:" in request.url or faults.append(request.url))
    yield tab
    context.close()
    assert not faults


@pytest.fixture
def batcher() -> Batcher:
    return Batcher()


@pytest.fixture
def pictures(batcher: Batcher, tmp_path: Path, page: Any) -> Iterator[Any]:
    with running(picture_folder(tmp_path / "small"), batcher, Allowed(body=2**20)) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#health", has_text="ready").wait_for()
        yield page


def bars(page: Any) -> list[str]:
    page.locator(".bars li").first.wait_for()
    return [name.strip() for name in page.locator(".bars .name").all_inner_texts()]


def upload(page: Any, data: bytes, name: str = "picture.png") -> None:
    page.locator("#file").set_input_files({"name": name, "mimeType": "image/png", "buffer": data})


def problem(page: Any) -> str:
    page.locator("#problem").wait_for(state="visible")
    return page.locator("#problem p").inner_text()


def test_a_picture_is_uploaded_and_answered(pictures: Any) -> None:
    assert pictures.title() == "small · allmlp"
    upload(pictures, encode(scene(60, 40)))
    assert sorted(bars(pictures)) == sorted(CLASSES)
    shares = [float(text.rstrip(" %")) for text in pictures.locator(".bars .share").all_inner_texts()]
    assert sum(shares) == pytest.approx(100, abs=0.5) and shares == sorted(shares, reverse=True)
    assert "ms" in pictures.locator("[data-time=trip]").inner_text()
    assert pictures.locator("[data-time=batch]").inner_text() == "1"
    # What the likeliest class rests on is shown, then that of another class, then nothing.
    pictures.locator("#importance-text:not(:empty)").wait_for()
    first, _, last = bars(pictures)
    assert pictures.locator("#importance-text").inner_text().rstrip(".").endswith((f"costs {first} most", first))
    pictures.locator(".bars button", has_text=last).click()
    pictures.locator("#importance-text", has_text=last).wait_for()
    assert pictures.locator(f".bars [data-name={last}]").get_attribute("aria-pressed") == "true"
    grid = pictures.evaluate("[document.getElementById('overlay').width, document.getElementById('overlay').height]")
    assert grid == [3, 2]
    pictures.locator("#show-importance").uncheck()
    assert pictures.locator("#importance-text").inner_text() == ""


def test_a_sample_by_keyboard_alone(pictures: Any) -> None:
    sample = pictures.locator("#samples button").first
    for _ in range(30):
        pictures.keyboard.press("Tab")
        if sample.evaluate("button => button === document.activeElement"):
            break
    pictures.keyboard.press("Enter")
    assert len(bars(pictures)) == 3
    assert sample.get_attribute("aria-pressed") == "true"
    assert pictures.locator("#status").inner_text().startswith(bars(pictures)[0])


def test_a_dropped_picture(pictures: Any) -> None:
    data = list(encode(scene(30, 30)))
    pictures.evaluate(
        """data => {
            const files = new DataTransfer();
            files.items.add(new File([new Uint8Array(data)], "dropped.png", { type: "image/png" }));
            document.getElementById("stage").dispatchEvent(
                new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true }));
        }""",
        data,
    )
    assert len(bars(pictures)) == 3


def test_layers_are_looked_at(pictures: Any) -> None:
    pictures.locator("#detail-text:not(:empty)").wait_for()
    before = pictures.locator("#detail-text").inner_text()
    assert before.startswith("The patch in row 2, column 2 reads most from row ")
    pictures.locator("#mosaic").focus()
    pictures.keyboard.press("ArrowRight")
    assert pictures.locator("#detail-text").inner_text().startswith("The patch in row 2, column 3 reads")
    pictures.locator("#layer").focus()
    pictures.keyboard.press("ArrowRight")
    pictures.locator("#layer-name", has_text="2 of 2").wait_for()


def test_broken_and_large_files(pictures: Any) -> None:
    upload(pictures, b"this is no picture")
    assert problem(pictures).startswith("Not a picture, or of a format other than")
    assert pictures.locator("#again").is_hidden()
    upload(pictures, bytes(2**20 + 1))
    assert "the server takes 1 MB at most" in problem(pictures)
    upload(pictures, encode(scene()))
    assert len(bars(pictures)) == 3 and pictures.locator("#problem").is_hidden()


def test_a_busy_server_is_asked_again(pictures: Any, batcher: Batcher) -> None:
    batcher.inside = batcher.capacity
    upload(pictures, encode(scene()))
    pictures.locator("#status", has_text="The server is busy. Trying again in 1 s").wait_for()
    batcher.inside = 0
    assert len(bars(pictures)) == 3
    batcher.inside = batcher.capacity
    upload(pictures, encode(scene()))
    assert problem(pictures).startswith("The server is busy with 128 requests")
    batcher.inside = 0
    pictures.locator("#again").click()
    assert len(bars(pictures)) == 3


def test_a_server_that_has_gone(page: Any, tmp_path: Path) -> None:
    with running(picture_folder(tmp_path / "small")) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#health", has_text="ready").wait_for()
        page.set_viewport_size({"width": 390, "height": 700})
    upload(page, encode(scene()))
    assert problem(page) == "The server does not answer. Is it still running?"
    assert page.evaluate("document.getElementById('problem').getBoundingClientRect().bottom <= innerHeight")


@pytest.mark.parametrize("gives", ["text", "causal", "classes", "span", "translation"])
def test_texts(page: Any, tmp_path: Path, gives: str) -> None:
    pytest.importorskip("tokenizers")
    with running(text_folder(tmp_path / gives, gives)) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#sentences button").first.click()
        page.locator(".bars, .written").first.wait_for()
        page.locator("#sentence").fill("the cat [MASK] on the [MASK] mat" if gives == "text" else "the cat sat")
        if gives == "span":
            page.locator("#context").fill("😀 the cat sat on the red mat")
        page.keyboard.press("Tab")
        page.locator("#ask").click()
        page.locator("#timing").wait_for()
        if gives == "text":
            page.locator("h3", has_text="[MASK] number 2").wait_for()
            assert page.locator(".bars").count() == 2
            assert page.locator(".filled mark").count() == 2
            page.locator("#sentence").fill("no gap")
            page.locator("#ask").click()
            assert problem(page) == "The text has no [MASK] to fill in"
        if gives == "span":
            page.locator(".filled", has_text="😀").wait_for()
            assert page.locator(".filled mark").inner_text().strip() == bars(page)[0]
        if gives == "classes":
            assert sorted(bars(page)) == sorted(CLASSES)


@pytest.mark.parametrize("width", [320, 390, 768, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_sticks_out_and_everything_has_a_name(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    with running(picture_folder(tmp_path / "small")) as port:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#samples button").first.click()
        bars(page)
        page.locator("#detail-text:not(:empty)").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input, canvas[role=img], textarea, a, img")]
                .filter((one) => one.checkVisibility() && !one.ariaLabel && !one.textContent.trim()
                    && !one.labels?.length && !one.querySelector("img[alt]") && one.getAttribute("alt") === null)
                .map((one) => one.outerHTML)"""
        )
        assert nameless == []
        context.close()
