"""The page: its contents, escaping, and behavior in a real browser."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allmlp.accuracy import format_accuracy
from allmlp.cli import main
from allmlp.cli.train import finish
from allmlp.data.image_folder import ImageFolder
from allmlp.errors import UserError
from allmlp.models.mixer import mixer
from allmlp.report.filters import Filters
from allmlp.report.page import COLORS, EXAMPLES, RunDetail, columns, differences, recipe, table, write, write_run_report
from allmlp.report.runs import read_logged
from report.folders import EVIL, LIVELY, NamedBlobs, curve, trained, written
from train.runs import language, small

pytest.importorskip("jinja2")
pytest.importorskip("PIL.Image")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classifiers, one with hostile names; one on text; one unfinished; three damaged."""
    place = tmp_path_factory.mktemp("runs")
    trained(place / "resmlp")
    trained(
        place / "<b onmouseover=alert(1)>",
        small(data=NamedBlobs(), model=mixer(2, 16, patch_size=4, img_size=8).configure(in_chans=1)),
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
    count, skipped = write(sorted(runs.iterdir()), out)
    assert count == 7 and len(skipped) == 1 and "notes has no run.json" in skipped[0]
    return out


class Reader(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.slow
def test_the_page_loads_no_other_file(file: Path) -> None:
    read = Reader(file.read_text(encoding="utf8"))
    for tag, attributes in read.tags:
        for name in ("src", "href", "srcset", "poster", "data", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, attributes)
    assert file.stat().st_size < 400_000


def test_contents_of_runs_are_escaped(file: Path) -> None:
    page = file.read_text(encoding="utf8")
    read = Reader(page)
    assert [attributes.get("type") for tag, attributes in read.tags if tag == "script"] == ["application/json", None]
    assert not [attributes for _, attributes in read.tags if any(name.startswith("on") for name in attributes)]
    assert {tag for tag, _ in read.tags}.isdisjoint({"iframe", "object", "embed", "form", "base"})
    assert EVIL not in page and LIVELY not in page
    # It is still readable as text: a class, a name, an error, the environment.
    for said in (EVIL, LIVELY, "<b onmouseover=alert(1)>", "<script>alert(2)</script>"):
        assert said in read.text
    assert "default-src 'none'" in page


def test_every_run_is_described(file: Path) -> None:
    text = " ".join(Reader(file.read_text(encoding="utf8")).text.split())
    assert "7 runs compared" in text and "ResMLP 2 x 16" in text and "Mixer 2 x 16" in text
    assert "metrics.jsonl is missing: no curves" in text
    assert "metrics.jsonl is damaged: 1 line of 4 skipped" in text
    assert "unknown kind of run '<script>alert(2)</script>'" in text
    assert text.count("Expected calibration error") == 2 and text.count("Confusion matrix 32 test examples; ") == 2
    assert text.count("the run has not saved a model yet") == 2 * 4 and "run.json cannot be read" in text
    assert "Long curves are reduced to 300 points" in text


def test_the_number_of_examples(runs: Path, tmp_path: Path) -> None:
    write([runs / "resmlp"], tmp_path / "few.html", examples=10)
    text = " ".join(Reader((tmp_path / "few.html").read_text()).text.split())
    assert "10 of 32 test examples, evenly spread" in text
    write([runs / "resmlp"], tmp_path / "none.html", examples=0)
    assert "disabled by --examples 0" in (tmp_path / "none.html").read_text()


def test_the_page_of_one_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `allmlp train` writes at the end: accuracy with its interval on the whole test split, how to repeat it."""
    file = write_run_report(runs / "resmlp")
    assert file == runs / "resmlp" / "report.html"
    read = Reader(file.read_text(encoding="utf8"))
    text = " ".join(read.text.split())
    logged = read_logged("resmlp", runs / "resmlp")
    assert logged.proportion is not None
    split, correct, total = logged.proportion
    assert (split, total) == ("test", 32) and correct / total == logged.config["result"]["test"]["accuracy"]
    assert f"test accuracy{format_accuracy(correct, total)}" in text and "runs compared" not in text
    assert f"allmlp train {runs / 'resmlp' / 'run.json'} --out {runs / 'resmlp_again'}" in text
    assert "Label smoothing is part of the training loss only." in text
    (table,) = [attributes for tag, attributes in read.tags if attributes.get("id") == "runs"]
    assert "hidden" in table
    file.unlink()
    assert (
        write_run_report(runs / "notes")
        == f"no run to report on: {runs / 'notes'} has no run.json and no metrics.jsonl"
    )
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert write_run_report(runs / "resmlp") == "this needs jinja2: pip install 'allmlp[analysis]'"
    assert not file.exists()


def test_a_report_that_fails_is_a_warning(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is saved by then: `allmlp train` warns and ends well."""

    def fail(*_: object) -> None:
        raise RuntimeError("Expected all tensors to be on the same device,\n but found cuda:0 and cpu")

    monkeypatch.setattr("allmlp.report.page.collect_predictions", fail)
    finish(runs / "resmlp", "cpu")
    warning, *_ = capsys.readouterr().err.splitlines()
    cause = "Expected all tensors to be on the same device, but found cuda:0 and cpu"
    again = f"allmlp report {runs / 'resmlp'} tries again"
    assert warning == f"warning: no report: {cause}; the run is complete: {again}"


def test_an_accuracy_of_other_examples_has_no_interval(runs: Path, tmp_path: Path) -> None:
    """Of tokens, or of one of several test sets: it is no fraction of the examples of the split."""
    shutil.copytree(runs / "resmlp", tmp_path / "a")
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    record["result"]["test"]["accuracy"] = 0.7
    (tmp_path / "a" / "run.json").write_text(json.dumps(record))
    assert read_logged("a", tmp_path / "a").proportion is None


def test_the_command_to_repeat_names_the_processes(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "resmlp", tmp_path / "a b")
    record = json.loads((tmp_path / "a b" / "run.json").read_text())
    record |= {"processes": 8, "environment": {"command": ["train.py", "--fast now"]}}
    (tmp_path / "a b" / "run.json").write_text(json.dumps(record))
    found = recipe(read_logged("a b", tmp_path / "a b"))
    assert found["command"] == "train.py '--fast now'"
    assert found["again"].startswith(f"torchrun --nproc-per-node 8 -m allmlp train '{tmp_path}/a b/run.json' --out ")


def test_missing_data_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "Confusion matrix, calibration and mistakes: no cifar10 in data/cifar10 or data" in said
    assert not (tmp_path / "data").exists(), "a report downloads nothing"


def test_a_damaged_model_is_reported(tmp_path: Path) -> None:
    folder = trained(tmp_path / "a")
    (folder / "model.safetensors").write_bytes(b"broken")
    write([folder], tmp_path / "report.html")
    assert "the model cannot be loaded: " in (tmp_path / "report.html").read_text()


def test_many_classes_are_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allmlp.report.page.CELLS", 3)
    write([trained(tmp_path / "a")], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Confusion matrix of 4 classes" in page and 'class="confusion"' not in page


def test_runs_on_other_examples_are_no_rivals(tmp_path: Path) -> None:
    """Two folders of images; the same folder with another training set, of which the checksum depends."""

    def details(*runs: tuple[str, str]) -> list[RunDetail]:
        found = []
        for number, (path, digest) in enumerate(runs):
            run = small().replace(data=ImageFolder(path=path))
            place = tmp_path / f"{len(list(tmp_path.iterdir()))}"
            written(place, [{"kind": "eval", "accuracy": 0.5 + 0.1 * number}], run)
            record = json.loads((place / "run.json").read_text()) | {"data": {"sha256": digest, "test": 9}}
            (place / "run.json").write_text(json.dumps(record))
            found.append(RunDetail(read_logged(place.name, place), Filters([], ""), None, ""))
        return found

    assert [set(row.best) for row in table(details(("cats", "1"), ("dogs", "2")))] == [set(), set()]
    assert [set(row.best) for row in table(details(("cats", "1"), ("cats", "2")))] == [set(), {"accuracy"}]
    assert [set(row.best) for row in table(details(("cats", "1"), ("moved", "1")))] == [set(), {"accuracy"}]


def test_the_best_of_comparable_runs(tmp_path: Path) -> None:
    """More accuracy and less loss, among runs on the same data and task only."""
    found = {"a": (0.5, 1.0, small()), "b": (0.7, 0.5, small()), "text": (0.9, 0.1, language())}
    logged = [
        read_logged(name, written(tmp_path / name, [{"kind": "eval", "accuracy": accuracy, "loss": loss}], run))
        for name, (accuracy, loss, run) in found.items()
    ]
    rows = table([RunDetail(one, Filters([], ""), None, "") for one in logged])
    assert {row.name: set(row.best) for row in rows} == {"a": set(), "b": {"accuracy", "loss"}, "text": set()}
    assert columns(logged) == ["accuracy", "loss"]


def test_only_settings_that_differ_are_listed(tmp_path: Path) -> None:
    runs = {"a": small(), "b": small(seed=7, model=small().model.replace(depth=5))}
    logged = [read_logged(name, written(tmp_path / name, [], run)) for name, run in runs.items()]
    assert differences(logged) == [("seed", ["0", "7"]), ("model.depth", ["2", "5"])]


@pytest.mark.parametrize(
    ("name", "written"), [("new", "new/report.html"), ("a.html", "a.html"), ("b/c.htm", "b/c.htm")]
)
def test_out_is_a_page_or_a_folder(
    name: str, written: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next command names the run, also if it was found in a folder."""
    parent = tmp_path / "of one"
    shutil.copytree(runs / "unfinished", parent / "only")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(parent), "--examples", "0", "--out", str(tmp_path / name)])
    assert ended.value.code == 0 and (tmp_path / written).is_file()
    captured = capsys.readouterr()
    assert captured.out.endswith(f": {tmp_path / written}\n")
    assert f"next: allmlp analyze '{parent / 'only'}'" in captured.err


def test_a_read_only_folder_is_refused_before_any_model_runs(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(dir: Path) -> None:  # of a user who is not root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))

    monkeypatch.setattr("allmlp.files.tempfile.TemporaryFile", refuse)
    monkeypatch.setattr("allmlp.report.page.inspect", lambda *arguments: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match=r"cannot write .*a\.html: .*Permission denied"):
        write([runs / "unfinished"], tmp_path / "a.html")


def test_another_format_than_html_is_refused(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", str(runs / "unfinished"), "--out", str(tmp_path / "a.pdf")])
    assert f"call it {tmp_path / 'a.html'}, or name a folder" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_the_command(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "report.html"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(runs / "unfinished"), str(runs / "notes"), "--out", str(out)])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and out.is_file()
    assert printed.startswith("skipped: ") and re.search(r"1 run, 0\.\d\d MB: ", printed)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(runs / "notes"), "--out", str(out)])
    assert ended.value.code == 2 and "no run to report on" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write([runs / "unfinished"], tmp_path / "file" / "report.html")


def test_the_command_has_the_default_of_the_library() -> None:
    import inspect

    from allmlp.cli.report import report

    assert inspect.signature(report).parameters["max_examples"].default == EXAMPLES


VISION = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
"""Linear RGB as it is perceived (Machado et al., 2009)."""


def lab(color: str, vision: str) -> list[float]:
    """OKLab, in which Euclidean distance is perceived difference (Ottosson, 2020)."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_lms = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    to_lab = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return list(np.array(to_lab) @ np.cbrt(np.array(to_lms) @ np.clip(np.array(VISION[vision]) @ linear, 0, 1)))


@pytest.mark.parametrize("vision", VISION)
def test_colors_of_runs_can_be_told_apart(vision: str) -> None:
    style = (files("allmlp.report") / "page" / "style.css").read_text(encoding="utf8")
    found = re.findall(r"--run-(\d): (#\w{6});", style)
    assert [int(number) for number, _ in found] == [*range(COLORS)] * 2, "a light and a dark palette"
    for palette in (found[:COLORS], found[COLORS:]):
        for (_, one), (_, other) in combinations(palette, 2):
            distance = np.linalg.norm(np.subtract(lab(one, vision), lab(other, vision)))
            assert distance > (0.2 if vision == "normal" else 0.12), (one, other)


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
    """The page from disk; nothing is loaded from elsewhere, no script fails, and none but its own runs."""
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


def test_the_legend_names_the_runs_that_are_drawn(tab: Any) -> None:
    items = tab.locator("#legend li:not(.kinds)")
    names = tab.locator("#table tbody th a").all_inner_texts()
    assert [text.strip() for text in items.all_inner_texts()] == [name.strip() for name in names]
    losses(tab).scroll_into_view_if_needed()
    losses(tab).locator("path.curve").first.wait_for()
    stroke = "one => getComputedStyle(one).stroke"
    item = items.filter(has_text="unfinished").locator("path")
    assert item.evaluate(stroke) == losses(tab).locator("path.curve[data-run='6']").evaluate(stroke)
    tab.locator("#table tbody tr", has_text="unfinished").last.locator("input").uncheck()
    assert items.filter(has_text="unfinished", visible=True).count() == 0
    assert items.filter(visible=True).count() == len(names) - 1


@pytest.mark.parametrize("width", [360, 1280])
def test_the_table_of_runs_fits_a_phone_and_a_laptop(browser: Any, file: Path, width: int) -> None:
    """No column is cut off."""
    for page in open_tab(browser, file, viewport={"width": width, "height": 800}):
        assert page.locator("#table").evaluate("table => table.parentNode.scrollWidth <= table.parentNode.clientWidth")
        assert page.locator("#table tbody input").first.is_visible()


def test_columns_are_sorted(tab: Any) -> None:
    heading = tab.locator("#table thead th", has_text="parameters")
    number = heading.evaluate("heading => [...heading.parentNode.children].indexOf(heading)")
    for order, sort in (("descending", -1), ("ascending", 1)):
        heading.locator("button").click()
        assert heading.get_attribute("aria-sort") == order
        shown = column(tab, number)
        known = [float(text) for text in shown if text]
        assert known == sorted(known, key=lambda value: sort * value) and len(known) == 6
        assert shown[-1] == "", "missing values stay at the bottom"
    name = tab.locator("#table thead th", has_text="run").first
    name.locator("button").focus()
    tab.keyboard.press("Enter")
    assert name.get_attribute("aria-sort") == "ascending" and heading.get_attribute("aria-sort") == "none"
    assert column(tab, 1)[-2:] == ["text", "unfinished"]


def losses(page: Any) -> Any:
    """The chart with the loss of the runs `resmlp`, `unfinished` and `cut short`."""
    return page.locator(".chart", has=page.get_by_text("Blobs · Classify", exact=True)).first


def labels(page: Any) -> list[float]:
    """The ticks of its x axis."""
    texts = losses(page).locator(".plot svg text[text-anchor=middle]").all_text_contents()
    return [float(text.replace(",", "")) for text in texts[:-1]]


def test_curves_are_zoomed_and_read(tab: Any) -> None:
    chart = losses(tab).locator(".plot svg")
    chart.scroll_into_view_if_needed()
    losses(tab).locator("path.curve").first.wait_for()
    assert max(labels(tab)) == 2000
    box = chart.bounding_box()
    across = [box["x"] + box["width"] * fraction for fraction in (0.3, 0.5)]
    tab.mouse.move(across[0], box["y"] + 100)
    tip = losses(tab).locator(".tip")
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
    chart = losses(tab).locator(".plot svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 100)
    where, shown = (cell.inner_text() for cell in losses(tab).locator(".tip").locator("th:first-child, td + td").all())
    step = int(where.removeprefix("step").replace(",", ""))
    # The run's loss is 1 / step; of a long curve the nearest point that was kept is read.
    assert float(shown) == pytest.approx(1 / step, rel=0.02)


def test_axes_runs_and_kinds_are_chosen(tab: Any) -> None:
    tab.locator("#charts").scroll_into_view_if_needed()
    first = losses(tab).locator(".plot")
    first.locator("path.curve").first.wait_for()
    count = first.locator("path.curve").count()
    tab.locator("label", has_text="epochs").click()
    assert max(labels(tab)) == 200
    tab.locator("label", has_text="training").click()
    assert 0 < first.locator("path.curve").count() < count
    tab.locator("#all").click()
    assert first.locator("path.curve").count() == 0
    assert "no curves selected" in first.text_content()


def test_run_details(tab: Any) -> None:
    shown = tab.locator("#one article:visible")
    tab.locator("#table tbody a", has_text="resmlp").click()
    assert shown.count() == 1 and shown.get_attribute("aria-label") == "resmlp"
    assert tab.locator("#which option:checked").inner_text() == "resmlp"
    cells = shown.locator(".confusion tbody td").all_inner_texts()
    assert len(cells) == 16 and sum(int(text or 0) for text in cells) == 32
    images = shown.locator("img")
    assert images.count() >= 2
    images.first.scroll_into_view_if_needed()
    images.first.evaluate("image => image.decode()")
    assert images.first.evaluate("image => image.naturalWidth") > 0
    tab.locator("#which").select_option(label="no metrics")
    assert "metrics.jsonl is missing" in shown.inner_text()
    tab.locator("#before").click()
    assert shown.get_attribute("aria-label") == "cut short"


def test_no_content_of_a_run_is_executed(tab: Any) -> None:
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
        colors = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        text, back = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors)
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
    # Ten times what it takes on an idle desktop, so that other load does not fail the test.
    assert loaded < 5000 and answered < 2000
