"""The web page in a browser: images, texts, series, and error messages. It needs playwright and chromium.

axe-core checks the accessibility if AXE names its file: `npm pack axe-core`, and AXE=package/axe.min.js.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import sync_playwright

from allmlp.data.preprocessing import SeriesPreprocessing, read_preprocessing, write_preprocessing
from allmlp.serve.batching import Batcher
from allmlp.serve.limits import RequestLimits
from data.sample_images import encode, scene
from folders import CLASSES, TASKS, image_folder, series_folder, text_folder
from serve.servers import running

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab that fails the test on script errors and on requests to other hosts."""
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
def images(batcher: Batcher, tmp_path: Path, page: Any) -> Iterator[Any]:
    with running(image_folder(tmp_path / "small"), batcher=batcher, limits=RequestLimits(max_body=2**20)) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#health", has_text="ready").wait_for()
        yield page


def bars(page: Any) -> list[str]:
    page.locator(".bars li").first.wait_for()
    return [name.strip() for name in page.locator(".bars .label").all_inner_texts()]


def upload(page: Any, data: bytes, name: str = "image.png") -> None:
    page.locator("#file").set_input_files({"name": name, "mimeType": "image/png", "buffer": data})


def error(page: Any) -> str:
    page.locator("#error").wait_for(state="visible")
    return page.locator("#error p").inner_text()


def test_uploaded_image(images: Any) -> None:
    assert images.title() == "small · allmlp"
    upload(images, encode(scene(60, 40)))
    assert sorted(bars(images)) == sorted(CLASSES)
    percentages = [float(text.rstrip(" %")) for text in images.locator(".bars .probability").all_inner_texts()]
    assert sum(percentages) == pytest.approx(100, abs=0.5) and percentages == sorted(percentages, reverse=True)
    assert "ms" in images.locator("[data-time=total_ms]").inner_text()
    assert images.locator("[data-time=batch_size]").inner_text() == "1"
    # Important patches are shown for the top class, then for another class, then hidden.
    images.locator("#importance-text:not(:empty)").wait_for()
    first, _, last = bars(images)
    assert images.locator("#importance-text").inner_text().endswith(f" {first}.")
    images.locator(".bars button", has_text=last).click()
    images.locator("#importance-text", has_text=last).wait_for()
    assert images.locator(f".bars [data-label={last}]").get_attribute("aria-pressed") == "true"
    grid = images.evaluate("[document.getElementById('overlay').width, document.getElementById('overlay').height]")
    assert grid == [3, 2]
    images.locator("#show-importance").uncheck()
    assert images.locator("#importance-text").inner_text() == ""


def test_sample_by_keyboard(images: Any) -> None:
    sample = images.locator("#samples button").first
    for _ in range(30):
        images.keyboard.press("Tab")
        if sample.evaluate("button => button === document.activeElement"):
            break
    images.keyboard.press("Enter")
    assert len(bars(images)) == 3
    assert sample.get_attribute("aria-pressed") == "true"
    assert images.locator("#status").inner_text().startswith(bars(images)[0])


def test_dropped_image(images: Any) -> None:
    data = list(encode(scene(30, 30)))
    images.evaluate(
        """data => {
            const files = new DataTransfer();
            files.items.add(new File([new Uint8Array(data)], "dropped.png", { type: "image/png" }));
            document.getElementById("stage").dispatchEvent(
                new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true }));
        }""",
        data,
    )
    assert len(bars(images)) == 3


def test_token_mixing_maps(images: Any) -> None:
    images.locator("#detail-text:not(:empty)").wait_for()
    before = images.locator("#detail-text").inner_text()
    assert before.startswith("Output patch (2, 2): largest weight ")
    images.locator("#mosaic").focus()
    images.keyboard.press("ArrowRight")
    assert images.locator("#detail-text").inner_text().startswith("Output patch (2, 3): largest weight ")
    images.locator("#layer").focus()
    images.keyboard.press("ArrowRight")
    images.locator("#layer-name", has_text="2 of 2").wait_for()


def test_broken_and_large_files(images: Any) -> None:
    upload(images, b"not an image")
    assert error(images).startswith("Not an image, or not one of the formats")
    assert images.locator("#retry").is_hidden()
    upload(images, bytes(2**20 + 1))
    assert "the server accepts at most 1 MB" in error(images)
    upload(images, encode(scene()))
    assert len(bars(images)) == 3 and images.locator("#error").is_hidden()


def test_busy_server_is_retried(images: Any, batcher: Batcher) -> None:
    batcher.in_flight = batcher.max_concurrency
    upload(images, encode(scene()))
    images.locator("#status", has_text="The server is busy. Retrying in 1 s").wait_for()
    batcher.in_flight = 0
    assert len(bars(images)) == 3
    batcher.in_flight = batcher.max_concurrency
    upload(images, encode(scene()))
    assert error(images).startswith("The server is busy with 128 inputs")
    batcher.in_flight = 0
    images.locator("#retry").click()
    assert len(bars(images)) == 3


def test_many_images(images: Any) -> None:
    files = [
        {"name": f"{number}.png", "mimeType": "image/png", "buffer": encode(scene(40, 30, number))}
        for number in range(5)
    ]
    broken = {"name": "broken.png", "mimeType": "image/png", "buffer": b"no image"}
    large = {"name": "large.png", "mimeType": "image/png", "buffer": bytes(2**20 + 1)}
    images.locator("#file").set_input_files([*files, broken, large])
    images.locator(".gallery li").first.wait_for()
    tiles = images.locator(".gallery li").all_inner_texts()
    assert len(tiles) == 7 and all("%" in tile for tile in tiles[:5])
    assert "ot an image" in tiles[5] and "larger than 1 MB" in tiles[6]
    assert images.locator("#status").inner_text().startswith("7 images: ")
    # A tile shows its image alone.
    images.locator(".gallery button").nth(2).click()
    assert len(bars(images)) == 3 and images.locator(".gallery").count() == 0


def test_choice_of_model(page: Any, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with running(image_folder(tmp_path / "small"), text_folder(tmp_path / "words", "classes")) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#model option").first.wait_for(state="attached")
        assert page.locator("#model option").all_inner_texts() == ["small", "words"]
        page.locator("#model").select_option("words")
        page.locator("#sample-texts button").first.click()
        assert sorted(bars(page)) == sorted(CLASSES) and page.url.endswith("?model=words")
        assert page.locator("#title").inner_text() == "words"
        page.go_back()
        upload(page, encode(scene()))
        assert sorted(bars(page)) == sorted(CLASSES) and page.locator("#title").inner_text() == "small"


def test_attention_of_a_text(page: Any, tmp_path: Path) -> None:
    """The layer that attends is after those with fixed weights; it has maps once there is a text."""
    pytest.importorskip("tokenizers")
    with running(text_folder(tmp_path / "translator", "translation")) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#layer").focus()
        page.keyboard.press("End")
        page.locator("#mixing-text", has_text="enter a text above").wait_for()
        page.locator("#first").fill("the cat sat")
        page.locator("#submit").click()
        page.locator("#mixing-text", has_text="Most attended: ").wait_for()
        assert page.locator("#detail-text").inner_text().startswith("Head ")


def test_stopped_server(page: Any, tmp_path: Path) -> None:
    with running(image_folder(tmp_path / "small")) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#health", has_text="ready").wait_for()
        page.set_viewport_size({"width": 390, "height": 700})
    upload(page, encode(scene()))
    assert error(page) == "The server does not respond. Is it still running?"
    assert page.evaluate("document.getElementById('error').getBoundingClientRect().bottom <= innerHeight")


@pytest.mark.parametrize("task", TASKS)
def test_texts(page: Any, tmp_path: Path, task: str) -> None:
    pytest.importorskip("tokenizers")
    with running(text_folder(tmp_path / task, task)) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.locator("#sample-texts button").first.click()
        page.locator(".bars, .generated").first.wait_for()
        page.locator("#first").fill("the cat [MASK] on the [MASK] mat" if task == "text" else "the cat sat")
        if task == "span":
            page.locator("#second").fill("😀 the cat sat on the red mat")
        page.keyboard.press("Tab")
        page.locator("#submit").click()
        page.locator("#timing").wait_for()
        if task == "text":
            page.locator("h3", has_text="[MASK] 2").wait_for()
            assert page.locator(".bars").count() == 2
            assert page.locator(".filled mark").count() == 2
            page.locator("#first").fill("no mask")
            page.locator("#submit").click()
            assert error(page) == "The text has no [MASK] to fill in"
        if task == "span":
            page.locator(".filled", has_text="😀").wait_for()
            assert page.locator(".filled mark").inner_text().strip() == bars(page)[0]
        if task == "classes":
            assert sorted(bars(page)) == sorted(CLASSES)


def test_pairs_of_texts(page: Any, tmp_path: Path) -> None:
    """The second text was called optional."""
    pytest.importorskip("tokenizers")
    folder = text_folder(tmp_path / "model", "classes")
    write_preprocessing(folder, read_preprocessing(folder).replace(text_columns=("premise", "hypothesis")))
    with running(folder) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.get_by_label("First text (premise)").wait_for()
        page.locator("#sample-texts button").first.click()
        page.locator(".bars").wait_for()
        assert page.get_by_label("Second text (hypothesis)").input_value()


@pytest.mark.parametrize("width", [320, 390, 768, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_layout_and_accessible_names(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    with running(image_folder(tmp_path / "small")) as port:
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


# --- accessibility ----------------------------------------------------------------------------------------------------

VIOLATIONS = """() => axe.run().then(({violations}) =>
    violations.map(({id, nodes}) => id + ": " + nodes.map((node) => node.html).join(" ")))"""


def folder_of(kind: str, folder: Path) -> Path:
    if kind in ("image", "mixer"):
        return image_folder(folder / kind, mixer=kind == "mixer")
    return series_folder(folder / kind) if kind == "series" else text_folder(folder / kind, kind)


def answer(page: Any, kind: str) -> None:
    """Have the first sample answered, or a table."""
    if kind == "series":
        page.locator("#first").fill(
            "time,heat,load\n" + "\n".join(f"2026-01-{day:02},{day},{-day}" for day in range(1, 29))
        )
        page.locator("#submit").click()
    else:
        page.locator("#samples button, #sample-texts button").first.click()
    page.locator("#timing").wait_for()


@pytest.mark.skipif("AXE" not in os.environ, reason="AXE does not name the file axe.min.js of axe-core")
@pytest.mark.parametrize("kind", ["image", "mixer", *TASKS, "series"])
def test_axe_finds_no_violation(browser: Any, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("tokenizers")
    axe = Path(os.environ["AXE"]).read_text(encoding="utf8")
    with running(folder_of(kind, tmp_path), image_folder(tmp_path / "other")) as port:
        for settings in ({"color_scheme": "light"}, {"color_scheme": "dark"}, {"forced_colors": "active"}):
            context = browser.new_context(reduced_motion="reduce", **settings)
            page = context.new_page()
            page.goto(f"http://127.0.0.1:{port}/")
            page.locator("#health", has_text="ready").wait_for()
            page.evaluate(axe)
            assert page.evaluate(VIOLATIONS) == [], settings
            answer(page, kind)
            for details in page.locator("details").all():
                details.locator("summary").click()
            assert page.evaluate(VIOLATIONS) == [], settings
            if kind == "image":
                page.locator("#file").set_input_files(
                    [{"name": f"{number}.png", "mimeType": "image/png", "buffer": encode(scene())} for number in (0, 1)]
                )
                page.locator(".gallery li").first.wait_for()
                assert page.evaluate(VIOLATIONS) == [], settings
                upload(page, b"no image")
                error(page)
                assert page.evaluate(VIOLATIONS) == [], settings
            context.close()


COLORS = """() => Object.fromEntries([...document.querySelectorAll(".fill, .track, .past, .forecast, .band, .swatch")]
    .map((one) => [one.getAttribute("class"), getComputedStyle(one)])
    .map(([name, style]) => [name, name === "band" ? style.fill
        : ["past", "forecast"].includes(name) ? style.stroke : style.backgroundColor]))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_forced_colors(browser: Any, tmp_path: Path, scheme: str) -> None:
    """What is told by color alone keeps a color that differs from its ground's; what is chosen has an outline."""
    with running(image_folder(tmp_path / "small"), series_folder(tmp_path / "series")) as port:
        context = browser.new_context(forced_colors="active", color_scheme=scheme)
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        answer(page, "image")
        ground = page.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor")
        found = page.evaluate(COLORS)
        assert found["fill"] not in (found["track"], ground)
        assert len({found["swatch minus"], found["swatch zero"], found["swatch plus"]}) == 3
        page.locator(".bars [aria-pressed=true]").first.wait_for()
        for chosen in page.locator("[aria-pressed=true]").all():
            assert chosen.evaluate("one => getComputedStyle(one).outlineStyle") == "solid"
        page.locator("#model").select_option("series")
        answer(page, "series")
        found = page.evaluate(COLORS)
        assert len({found["past"], found["forecast"], found["band"], ground}) == 4
        context.close()


def test_series(page: Any, tmp_path: Path) -> None:
    folder = series_folder(tmp_path / "series")
    known = read_preprocessing(folder)
    assert isinstance(known, SeriesPreprocessing)
    write_preprocessing(folder, known.replace(id_columns=("shop",)))
    with running(folder) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        answer(page, "series")
        assert page.locator(".chart svg").count() == 2 and page.locator("h3", has_text="load").count() == 1
        page.locator("summary").click()
        assert page.locator("#result tr").count() == 1 + 4
        page.locator("#first").fill("shop,day,heat,load\na,2026-01-01,1,2\na,2026-01-02,3,4")
        page.locator("#submit").click()
        page.locator("#result td", has_text="2026-01-03").wait_for(state="attached")
        page.locator("#first").fill("shop,day,heat,load\na,2026-01-01,1,2\nb,2026-01-02,3,4")
        page.locator("#submit").click()
        assert error(page) == "The table has 2 series, such as a and b. Keep the rows of one."
        page.locator("#first").fill("heat,load\n1,2\n3,many")
        page.locator("#submit").click()
        assert error(page) == '"many" is not a number.' and page.locator("#retry").is_hidden()
