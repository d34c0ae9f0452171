"""The table of published weights compared with their publishers' data, and downloads."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import allmlp
from allmlp.data.preprocessing import ImagePreprocessing, image_preprocessing
from allmlp.models.cost import measure
from allmlp.models.mixer import mixer
from allmlp.models.zoo import presets
from allmlp.weights import fetch as fetching
from allmlp.weights.bundled import BUNDLED, bundled_models
from allmlp.weights.convert import FORMATS, convert
from allmlp.weights.fetch import fetch
from allmlp.weights.pretrained import pretrained
from allmlp.weights.published import HALF, PLAIN, PublishedWeights, find_weights, published_weights
from command import run

ROWS = published_weights()


def test_names_and_urls() -> None:
    for name, row in ROWS.items():
        assert name.partition(".")[0] in presets() and row.source in FORMATS and bool(row.url or row.hub)
        assert row.url.endswith(f"/{row.file}") if row.url else not row.file
        assert not row.sha256 or row.file.endswith(f"-{row.sha256}.pth")
        assert "\n" not in row.note and row.description
    assert len(ROWS) == 40 and len({(row.url, row.hub) for row in ROWS.values()}) == 40


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.size])
def test_sizes_match_the_models(name: str) -> None:
    """The file sizes that Google's bucket lists: four bytes per weight, plus less than 0.5 % for the keys."""
    classes = 21843 if "in21k" in name else 1000
    spec = presets()[name.partition(".")[0]].spec.configure(num_classes=classes)
    assert ROWS[name].size == pytest.approx(4 * measure(spec).parameters, rel=5e-3)


def test_timm_has_the_same_metadata() -> None:
    timm = pytest.importorskip("timm")
    urls = {}
    for row in ROWS.values():
        if row.hub:
            config = timm.get_pretrained_cfg(row.hub.removeprefix("timm/"))
            assert config.tag and row.hub == config.hf_hub_id, row.name
            assert tuple(config.mean) == row.normalization.mean and tuple(config.std) == row.normalization.std, row.name
            assert config.crop_pct == row.normalization.crop_pct
            urls[row.name] = config.url
    for name, row in ROWS.items():
        if row.source == "timm" and row.url:
            assert urls[name] == row.url
        if row.source == "fair":
            assert urls[f"{name}@timm"] == row.url


def test_mislabeled_weights_are_corrected() -> None:
    wrong = [row for row in ROWS.values() if row.hub.endswith("goog_in21k_ft_in1k")]
    assert [row.name for row in wrong] == ["mixer_b16.google_in1k@timm", "mixer_l16.google_in1k@timm"]
    for row in wrong:
        assert row.description.endswith("ImageNet-1k only") and "trained on ImageNet-1k only" in row.note
        assert row.top1 == ROWS[row.name.removesuffix("@timm")].top1
    for row in ROWS.values():
        assert ("_dino" in row.name) == ("not a trained classifier" in row.note)
        assert ("b24" in row.name) == ("the paper's B24 has 16" in row.note)
    assert {name for name, row in ROWS.items() if row.normalization == PLAIN} == {
        "mixer_b16.miil_in1k",
        "mixer_b16.miil_in21k",
    }


# --- the command -------------------------------------------------------------------------------------------


def test_list_weights(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list", "weights")
    lines = out.splitlines()
    assert code == 0 and max(map(len, lines)) <= 100
    own = len(bundled_models())
    assert [line.split()[0] for line in lines[:own]] == list(bundled_models())
    assert [line.split()[0] for line in lines[own + 1 : own + len(ROWS) + 1]] == list(ROWS)
    assert "mixer_b16.google_in1k@timm" in out and "goog_in21k_ft_in1k" in out
    _, out, _ = run(capsys, "list", "weights", "--json")
    table = {row["name"]: row for row in json.loads(out)}
    assert table["mixer_b16.miil_in1k"]["normalization"]["std"] == [1.0, 1.0, 1.0]
    assert table["mixer_l16.google_in21k"]["url"].endswith("imagenet21k/Mixer-L_16.npz")
    assert table[BUNDLED]["result"] == "test accuracy 95.69 %"
    _, out, _ = run(capsys, "list", "weights", "*cifar10*")
    assert out.splitlines()[0].startswith("allmlp:cifar10  gMLP for CIFAR-10, test accuracy")


def test_list_weights_does_not_load_torch() -> None:
    code = """
import sys
from allmlp.cli import main
try: main(["list", "weights"])
except SystemExit as end: assert not end.code, end.code
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


# --- downloads ---------------------------------------------------------------------------------------------


class Shelf:
    """A local file server whose responses can be made invalid."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.claimed: int | None = None
        shelf = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                shelf.asked.append(self.path)
                content = shelf.files.get(self.path)
                self.send_response(404 if content is None else 200)
                body = content or b""
                self.send_header("Content-Length", str(shelf.claimed or len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    shelf = Shelf()
    yield shelf
    shelf.close()


def offer(shelf: Shelf, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> PublishedWeights:
    """Serve the weights of a small Mixer in Google's format and add them to the table."""
    model = mixer(1, 8, patch_size=4, img_size=8, num_classes=3).build()
    torch.nn.init.normal_(model.head.proj.weight)
    allmlp.save(model, folder / "made")
    file = convert(str(folder / "made"), str(folder / "small-mixer.npz"), to="google")
    content = shelf.files["/small-mixer.npz"] = file.read_bytes()
    row = PublishedWeights(
        "small_mixer.test",
        "google",
        "a small Mixer",
        HALF,
        None,
        "small-mixer.npz",
        f"{shelf.url}/small-mixer.npz",
        sha256=hashlib.sha256(content).hexdigest()[:8],
        note="called otherwise elsewhere",
    )._replace(**changes)
    monkeypatch.setattr(fetching, "published_weights", lambda: {row.name: row})
    return row


def test_weights_are_downloaded_once(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = offer(shelf, tmp_path, monkeypatch, normalization=PLAIN)
    notes: list[str] = []
    folder = convert(row.name, str(tmp_path / "ours"), notify=notes.append)
    assert notes == ["called otherwise elsewhere"] and len(shelf.asked) == 1
    assert image_preprocessing(folder) == ImagePreprocessing(PLAIN.mean, PLAIN.std, crop_pct=0.875)
    made = allmlp.load(tmp_path / "made")
    (images,) = made.dummy_inputs()
    again = allmlp.from_pretrained(row.name)
    assert torch.equal(again(images), made(images)) and len(shelf.asked) == 1
    assert allmlp.from_pretrained(row.name, img_size=12).spec.input_size == (12, 12)
    monkeypatch.setattr("allmlp.weights.pretrained.published_weights", fetching.published_weights)
    assert pretrained(row.name).preprocessing.mean == PLAIN.mean
    kept = tmp_path / "cache" / "weights" / row.name
    assert [file.name for file in kept.iterdir()] == [row.file]


@pytest.mark.parametrize(
    ("changes", "claimed", "message"),
    [
        ({"sha256": "00000000"}, None, "not 00000000...; it was discarded; try again"),
        ({"size": 1000 - 2**20}, None, "is larger than the 1,000 bytes expected; it was discarded"),
        ({}, 10**6, "of 1000000 bytes; it was discarded; try again"),
        ({"url": "/missing.npz"}, None, "HTTP Error 404: Not Found); without a network, download it elsewhere"),
    ],
    ids=["checksum", "size", "short", "missing"],
)
def test_bad_downloads_are_discarded(
    changes: dict[str, Any],
    claimed: int | None,
    message: str,
    shelf: Shelf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = offer(shelf, tmp_path, monkeypatch, **changes)
    row = row._replace(url=row.url if ":" in row.url else shelf.url + row.url)
    shelf.claimed = claimed
    with pytest.raises(allmlp.UserError) as caught:
        fetch(row)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not list((tmp_path / "cache" / "weights" / row.name).iterdir())


def test_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ALLMLP_CACHE", str(tmp_path / "cache"))

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("the network is unreachable")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    code, out, err = run(capsys, "convert", "mixer_b16.google_in1k", str(tmp_path / "ours"))
    assert code == 2 and not out and err.count("\n") == 1
    assert "cannot download https://storage.googleapis.com/mixer_models/imagenet1k/Mixer-B_16.npz" in err
    assert "pass its path instead of mixer_b16.google_in1k" in err and not (tmp_path / "ours").exists()


def test_unknown_names() -> None:
    with pytest.raises(allmlp.UserError, match=r"was not found; did you mean 'mixer_b16.google_in1k'"):
        allmlp.from_pretrained("mixer_b16.googl_in1k")
    with pytest.raises(
        allmlp.UserError, match=r"was not found; name a weights file, a model folder, or one of `allmlp"
    ):
        allmlp.from_pretrained("zebra")


def test_published_file_is_recognized_by_its_name(tmp_path: Path) -> None:
    """MIIL's Mixer has another normalization than timm's other models, which its file does not state."""
    spec = mixer(1, 8, patch_size=4, img_size=8, num_classes=3)
    allmlp.save(spec.build(), tmp_path / "made")
    state = convert(str(tmp_path / "made"), str(tmp_path / "plain.safetensors"), to="timm")
    assert image_preprocessing(convert(str(state), str(tmp_path / "a"))).mean == (0.5, 0.5, 0.5)
    state = state.rename(tmp_path / "mixer_b16_224_miil-9229a591.pth")
    assert image_preprocessing(convert(str(state), str(tmp_path / "b"))).mean == (0.0, 0.0, 0.0)
    found = find_weights("Mixer-B_16.npz")
    assert find_weights("model.safetensors") is None and found is not None and found.normalization == HALF


def test_timm_folder_of_the_hub(tmp_path: Path) -> None:
    """Its config.json defines the preprocessing; timm itself is not needed."""
    allmlp.save(mixer(1, 8, patch_size=4, img_size=8, num_classes=3).build(), tmp_path / "made")
    folder = tmp_path / "theirs"
    folder.mkdir()
    convert(str(tmp_path / "made"), str(folder / "model.safetensors"), to="timm")
    settings = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop_pct": 0.95, "num_classes": 3}
    (folder / "config.json").write_text(json.dumps({"architecture": "mixer_b16_224", "pretrained_cfg": settings}))
    inputs = image_preprocessing(convert(str(folder), str(tmp_path / "ours")))
    assert inputs == ImagePreprocessing((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), crop_pct=0.95)
    for invalid in ({"mean": "red"}, {"crop_pct": 7}, {"std": [1, [2], 3]}):
        (folder / "config.json").write_text(json.dumps({"pretrained_cfg": settings | invalid}))
        with pytest.raises(allmlp.UserError, match=r"ImagePreprocessing\.\w+"):
            convert(str(folder), str(tmp_path / "ours"))
    (folder / "config.json").write_text(json.dumps({"model_args": {"img_size": 8, "act_layer": "relu"}}))
    with pytest.raises(allmlp.UserError, match=r"its configuration replaces act_layer, .*; convert timm:NAME"):
        convert(str(folder), str(tmp_path / "ours"))
    (folder / "config.json").write_text(json.dumps({"pretrained_cfg": "none"}))
    assert image_preprocessing(convert(str(folder), str(tmp_path / "ours"))).crop_pct == 0.875
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(allmlp.UserError, match="the format is not recognized"):
        convert(str(folder), str(tmp_path / "ours"))
