"""The page: what it holds, what it escapes, and how it behaves in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from allmlp.cli import main
from allmlp.errors import UserError
from allmlp.models.mixer import mixer
from allmlp.report.page import EXAMPLES, write
from report.folders import EVIL, LIVELY, NamedBlobs, curve, trained, written
from train.runs import language, small

pytest.importorskip("jinja2")
pytest.importorskip("PIL.Image")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two that classify, one of them with hostile names; one on text; one unfinished; three that are spoiled."""
    place = tmp_path_factory.mktemp("runs")
    trained(place / "resmlp")
    trained(
        place / "<b onmouseover=alert(1)>",
        small(data=NamedBlobs(), model=mixer(2, 16, patch=4, image=8).configure(in_channels=1)),
    )
    written(place / "text", [{"step": 5, "time": 3.0, "kind": "eval", "perplexity": 40.0}], language())
    written(place / "unfinished", curve(2000))
    for name in ("no metrics", "cut short", "no run"):
        written(place / name, curve(4))
    (place / "no metrics" / "metrics.jsonl").unlink()
    whole = (place / "cut short" / "metrics.jsonl").read_bytes()
    (place / "cut short" / "metrics.jsonl").write_bytes(whole[:-20])
    (place / "no run" / "run.json").write_text('{"run": {"kind": "<script>alert(2)</script>"}}')
    (place / "notes").mkdir()
    return place


@pytest.fixture(scope="module")
def file(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "report.html"
    count, left_out = write(sorted(runs.iterdir()), out)
    assert count == 7 and len(left_out) == 1 and "notes has no run.json" in left_out[0]
    return out


class Reader(HTMLParser):
    """Which tags and attributes a page has, and what its scripts are."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_one_file_and_asks_for_nothing(file: Path) -> None:
    read = Reader(file.read_text(encoding="utf8"))
    for tag, attributes in read.tags:
        for name in ("src", "href", "srcset", "poster", "data", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, attributes)
    assert file.stat().st_size < 400_000


def test_what_runs_say_is_only_ever_text(file: Path) -> None:
    page = file.read_text(encoding="utf8")
    read = Reader(page)
    assert [attributes.get("type") for tag, attributes in read.tags if tag == "script"] == ["application/json", None]
    assert not [attributes for _, attributes in read.tags if any(name.startswith("on") for name in attributes)]
    assert {tag for tag, _ in read.tags}.isdisjoint({"iframe", "object", "embed", "form", "base"})
    assert EVIL not in page and LIVELY not in page
    # Where it belongs it can be read, as text: a class, a name, an error, the environment.
    for said in (EVIL, LIVELY, "<b onmouseover=alert(1)>", "<script>alert(2)</script>"):
        assert said in read.text
    assert "default-src 'none'" in page


def test_every_run_is_told(file: Path) -> None:
    text = " ".join(Reader(file.read_text(encoding="utf8")).text.split())
    assert "7 runs compared" in text and "ResMLP 2 x 16" in text and "Mixer 2 x 16" in text
    assert "metrics.jsonl is missing: there are no curves" in text
    assert "metrics.jsonl is damaged: 1 line of 4 left out" in text
    assert "unknown kind of run '<script>alert(2)</script>'" in text
    assert text.count("Expected calibration error") == 2 and text.count("Confusion matrix 32 test examples; ") == 2
    assert text.count("the run has kept no model yet") == 2 * 4 and "what was run is not known" in text
    assert "Of long curves the first and the last point" in text


def test_the_examples_are_bounded_and_may_be_none(runs: Path, tmp_path: Path) -> None:
    write([runs / "resmlp"], tmp_path / "few.html", examples=10)
    text = " ".join(Reader((tmp_path / "few.html").read_text()).text.split())
    assert "10 of 32 test examples, evenly spread" in text
    write([runs / "resmlp"], tmp_path / "none.html", examples=0)
    assert "no examples were asked for" in (tmp_path / "none.html").read_text()


def test_data_that_are_gone_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ALLMLP_DATA", raising=False)
    folder = trained(tmp_path / "a")
    text = (folder / "run.json").read_text()
    blobs = re.search(r'\{\s*"kind": "Blobs".*?\}', text, re.DOTALL)
    assert blobs is not None
    gone = '{"kind": "Cifar10", "path": "", "download": true}'
    (folder / "run.json").write_text(text.replace(blobs[0], gone))
    write([folder], tmp_path / "report.html")
    said = " ".join(Reader((tmp_path / "report.html").read_text()).text.split())
    assert "Confusions, calibration and mistakes: no cifar10 in data/cifar10 or data" in said
    assert not (tmp_path / "data").exists(), "a report downloads nothing"


def test_a_damaged_model_is_said(tmp_path: Path) -> None:
    folder = trained(tmp_path / "a")
    (folder / "model.safetensors").write_bytes(b"broken")
    write([folder], tmp_path / "report.html")
    assert "its model cannot be opened: " in (tmp_path / "report.html").read_text()


def test_many_classes_are_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allmlp.report.page.CELLS", 3)
    write([trained(tmp_path / "a")], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Confusion matrix of 4 classes" in page and 'class="confusion"' not in page


def test_the_command(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "report.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(runs / "unfinished"), str(runs / "notes"), "--out", str(out)])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and out.is_file()
    assert printed.startswith("left out: ") and re.search(r"1 run, 0\.\d\d MB: ", printed)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(runs / "notes"), "--out", str(out)])
    assert ended.value.code == 2 and "there is no run to report on" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write([runs / "unfinished"], tmp_path / "file" / "report.html")


def test_the_command_asks_as_many_examples_as_the_library() -> None:
    import inspect

    from allmlp.cli.report import report

    assert inspect.signature(report).parameters["asked"].default == EXAMPLES


# --- in a browser -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def tab(browser: Any, file: Path) -> Iterator[Any]:
    yield from open_tab(browser, file)


def open_tab(browser: Any, file: Path, **options: Any) -> Iterator[Any]:
    """The page from the disk, in which nothing is loaded from elsewhere, no script fails and none but its own runs."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
    page = context.new_page()
    page.set_default_timeout(20_000)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or faults.append(request.url))
    page.goto(file.as_uri())
    yield page
    assert page.title() == "7 runs · allmlp report"
    context.close()
    assert not faults


def column(page: Any, number: int) -> list[str]:
    return page.locator("#table tbody tr").evaluate_all(
        "(rows, number) => rows.map((row) => row.children[number].dataset.value)", number
    )


def test_columns_are_sorted(tab: Any) -> None:
    heading = tab.locator("#table thead th", has_text="parameters")
    number = heading.evaluate("heading => [...heading.parentNode.children].indexOf(heading)")
    for order, sort in (("descending", -1), ("ascending", 1)):
        heading.locator("button").click()
        assert heading.get_attribute("aria-sort") == order
        shown = column(tab, number)
        known = [float(text) for text in shown if text]
        assert known == sorted(known, key=lambda value: sort * value) and len(known) == 6
        assert shown[-1] == "", "what is missing stays below"
    name = tab.locator("#table thead th", has_text="run").first
    name.locator("button").focus()
    tab.keyboard.press("Enter")
    assert name.get_attribute("aria-sort") == "ascending" and heading.get_attribute("aria-sort") == "none"
    assert column(tab, 1)[-2:] == ["text", "unfinished"]


def labels(page: Any) -> list[float]:
    """The numbers along the lower edge of the first chart."""
    texts = page.locator(".plot svg").first.locator("text[text-anchor=middle]").all_text_contents()
    return [float(text.replace(",", "")) for text in texts[:-1]]


def test_curves_are_zoomed_and_read(tab: Any) -> None:
    chart = tab.locator(".plot svg").first
    chart.scroll_into_view_if_needed()
    tab.locator(".plot path.curve").first.wait_for()
    assert max(labels(tab)) == 2000
    box = chart.bounding_box()
    across = [box["x"] + box["width"] * share for share in (0.3, 0.5)]
    tab.mouse.move(across[0], box["y"] + 100)
    tip = tab.locator(".tip").first
    assert "unfinished" in tip.inner_text() and "step" in tip.inner_text()
    tab.mouse.down()
    tab.mouse.move(across[1], box["y"] + 120, steps=3)
    tab.mouse.up()
    assert min(labels(tab)) > 300 and max(labels(tab)) < 1000
    assert tab.locator("#zoom-all").is_enabled()
    tab.mouse.dblclick(across[0], box["y"] + 100)
    assert max(labels(tab)) == 2000 and tab.locator("#zoom-all").is_disabled()
    # The same by keyboard.
    chart.focus()
    tab.keyboard.press("ArrowRight")
    assert "unfinished" in tab.locator("#reading").inner_text()
    tab.keyboard.press("+")
    assert max(labels(tab)) - min(labels(tab)) <= 1000
    tab.keyboard.press("Escape")
    assert max(labels(tab)) == 2000


def test_the_value_under_the_pointer_is_that_of_the_run(tab: Any, runs: Path) -> None:
    tab.locator("#all").click()
    tab.locator("#table tbody tr", has_text="unfinished").last.locator("input").check()
    chart = tab.locator(".plot svg").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 100)
    where, shown = (cell.inner_text() for cell in tab.locator(".tip").first.locator("th:first-child, td + td").all())
    step = int(where.removeprefix("step").replace(",", ""))
    # The run's loss is 1 / step; of a long curve the nearest point that was kept is read.
    assert float(shown) == pytest.approx(1 / step, rel=0.02)


def test_axes_runs_and_kinds_are_chosen(tab: Any) -> None:
    tab.locator("#charts").scroll_into_view_if_needed()
    first = tab.locator(".plot").first
    first.locator("path.curve").first.wait_for()
    count = first.locator("path.curve").count()
    tab.locator("label", has_text="epochs").click()
    assert max(labels(tab)) == 200
    tab.locator("label", has_text="while training").click()
    assert 0 < first.locator("path.curve").count() < count
    tab.locator("#all").click()
    assert first.locator("path.curve").count() == 0
    assert "nothing to show here" in first.text_content()


def test_one_run_is_looked_at(tab: Any) -> None:
    shown = tab.locator("#one article:visible")
    tab.locator("#table tbody a", has_text="resmlp").click()
    assert shown.count() == 1 and shown.get_attribute("aria-label") == "resmlp"
    assert tab.locator("#which option:checked").inner_text() == "resmlp"
    cells = shown.locator(".confusion tbody td").all_inner_texts()
    assert len(cells) == 16 and sum(int(text or 0) for text in cells) == 32
    pictures = shown.locator("img")
    assert pictures.count() >= 2
    pictures.first.scroll_into_view_if_needed()
    pictures.first.evaluate("picture => picture.decode()")
    assert pictures.first.evaluate("picture => picture.naturalWidth") > 0
    tab.locator("#which").select_option(label="no metrics")
    assert "metrics.jsonl is missing" in shown.inner_text()
    tab.locator("#before").click()
    assert shown.get_attribute("aria-label") == "cut short"


def test_nothing_that_a_run_says_is_run(tab: Any) -> None:
    tab.locator("#which").select_option(label="<b onmouseover=alert(1)>")
    article = tab.locator("#one article:visible")
    assert EVIL in article.inner_text() and LIVELY in article.inner_text()
    assert tab.locator("body b[onmouseover], body img[onerror]").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_every_width_and_scheme(browser: Any, file: Path, width: int, scheme: str) -> None:
    for page in open_tab(browser, file, viewport={"width": width, "height": 800}, color_scheme=scheme):
        page.locator("#charts").scroll_into_view_if_needed()
        page.locator(".plot path.curve").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        colours = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        text, back = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
        assert (text < back) == (scheme == "light") and abs(text - back) > 400
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input, select, a, img, svg[role=img]")]
                .filter((one) => !one.ariaLabel && !one.textContent.trim() && !one.labels?.length && !one.alt)
                .map((one) => one.outerHTML)"""
        )
        assert nameless == []


def test_twenty_runs_open_fast(browser: Any, tmp_path: Path, runs: Path) -> None:
    for number in range(20):
        shutil.copytree(runs / "resmlp", tmp_path / f"run {number}", ignore=shutil.ignore_patterns("checkpoints"))
        lines = [f'{{"kind": "train", "step": {s}, "time": {s}, "loss": {1 / s + number}}}\n' for s in range(1, 3000)]
        (tmp_path / f"run {number}" / "metrics.jsonl").write_text("".join(lines))
    out = tmp_path / "report.html"
    write(sorted(tmp_path.glob("run *")), out)
    assert out.stat().st_size < 1_500_000
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(out.as_uri())
    loaded = page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    answered = page.evaluate(
        """() => new Promise((done) => {
            const start = performance.now();
            document.querySelectorAll("#table thead button")[1].click();
            requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
        })"""
    )
    context.close()
    # A tenth of this on an idle desktop; what runs beside the tests must not make them fail.
    assert loaded < 5000 and answered < 2000
