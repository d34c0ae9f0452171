"""ONNX files agree with the model at any batch size and from an empty past, and need only ONNX Runtime."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import allmlp
from allmlp.cli import main
from allmlp.data.preprocessing import TextPreprocessing, image_preprocessing, write_preprocessing
from allmlp.data.tokenizer import load_tokenizer
from allmlp.export import files
from allmlp.export.files import ExportedFile, export
from allmlp.layers.head import ClassifierHead
from allmlp.layers.pool import MeanPool
from allmlp.models.encoder_decoder import EncoderDecoderModel
from allmlp.tasks.causal_lm import generate
from allmlp.tasks.masked_lm import fill_masks
from allmlp.tasks.translate import translate
from export.folders import REPRESENTATIVES, kind, make, shallow
from tiny import randomize

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.usefixtures("onnx_registry", "uncached_operators")
EXAMPLES = Path(__file__).parents[2] / "examples"


def session(file: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def ask(runtime: Any, **inputs: Tensor | np.ndarray) -> list[np.ndarray]:
    return runtime.run(None, {name: np.asarray(value) for name, value in inputs.items()})


def close(found: np.ndarray, expected: Tensor) -> None:
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-4, rtol=1e-4)


def read_on(runtime: Any, ids: Tensor, **fixed: np.ndarray) -> np.ndarray:
    """Scores after each token, read one at a time."""
    names = [value.name for value in runtime.get_inputs() if value.name.startswith("past.")]
    widths = [value.shape[2] for value in runtime.get_inputs() if value.name.startswith("past.")]
    past = [np.zeros((len(ids), 0, width), np.float32) for width in widths]
    found = []
    for token in ids.split(1, dim=1):
        logits, *past = ask(runtime, token=token, **fixed, **dict(zip(names, past)))
        found.append(logits)
    return np.concatenate(found, axis=1)


class Exported(NamedTuple):
    folder: Path
    """Holds model/ and the files in out/."""
    model: allmlp.Model
    files: list[ExportedFile]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Export a tiny model to out/m.onnx, once for all tests."""

    @cache
    def export_once(name: str) -> Exported:
        folder = tmp_path_factory.mktemp(name)
        model = make(folder / "model", name)
        return Exported(folder, model, export(folder / "model", folder / "out" / "m.onnx"))

    return export_once


# Together these have the layers of all: token MLPs, spatial gating, attention with segments, convolution and BatchNorm.
FAST = ("mixer_s32", "gmlp_l18", "bert_base", "convmixer_768_32")
NAMES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
    for name in [*REPRESENTATIVES, "transformer_l6"]  # the last has relative positions
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_family_agrees(name: str, exported: Callable[[str], Exported]) -> None:
    folder, model, made = exported(name)
    assert all(isinstance(one, ExportedFile) and one.difference < 1e-4 for one in made)
    assert ("photographs" if kind(name) == "images" else "docstrings") in made[0].compared_on
    written = [one.file.name for one in made]
    assert sorted(file.name for file in (folder / "out").iterdir()) == sorted(written)
    for batch in (1, 5):
        torch.manual_seed(batch)
        inputs = model.dummy_inputs(batch)
        if isinstance(model, EncoderDecoderModel):
            assert written == ["m.encoder.onnx", "m.step.onnx"]
            source, target = inputs
            mask = torch.arange(12) < torch.randint(3, 12, (batch, 1))
            runtime = session(folder / "out" / "m.encoder.onnx")
            memory = dict(zip((value.name for value in runtime.get_outputs()), ask(runtime, source=source, mask=mask)))
            found = read_on(session(folder / "out" / "m.step.onnx"), target, mask=mask.numpy(), **memory)
            close(found, model(source, target, mask))
            continue
        runtime = session(folder / "out" / "m.onnx")
        names = [value.name for value in runtime.get_inputs()]
        if kind(name) == "images":
            assert names == ["images"] and runtime.get_inputs()[0].shape == ["batch", 3, 6, 8]
            close(ask(runtime, images=inputs[0])[0], model(*inputs))
            continue
        ids, mask = inputs[0], torch.arange(12) < torch.randint(3, 12, (batch, 1))
        told = {"segments": torch.randint(0, 2, ids.shape)} if "segments" in names else {}
        assert names[:2] == ["ids", "mask"]
        close(ask(runtime, ids=ids, mask=mask, **told)[0], model(ids, mask, **told))
        if kind(name) == "causal":
            assert written == ["m.onnx", "m.step.onnx"]
            runtime = session(folder / "out" / "m.step.onnx")
            assert runtime.get_inputs()[1].shape[:2] == ["batch", "past"]
            close(read_on(runtime, ids), model(ids))


@pytest.mark.parametrize(
    ("name", "file", "graph"),
    [
        ("gmlp_l18", "m.onnx", "model"),
        pytest.param("gmlp_causal_tiny", "m.step.onnx", "step", marks=pytest.mark.slow),
    ],
)
def test_metadata_describes_the_model_without_local_paths(
    name: str, file: str, graph: str, exported: Callable[[str], Exported]
) -> None:
    folder, _, made = exported(name)
    metadata = session(folder / "out" / file).get_modelmeta().custom_metadata_map
    assert metadata["allmlp"] == allmlp.__version__ and metadata["graph"] == graph
    assert json.loads(metadata["preprocessing"]) == json.loads((folder / "model" / "preprocessing.json").read_text())
    assert metadata["tokenizer"] == (folder / "model" / "tokenizer.json").read_text()
    assert json.loads(metadata["config"])["kind"] == "Encoder"
    for one in made:
        onnx.checker.check_model(onnx.load(one.file), full_check=True)
        assert str(Path(allmlp.__file__).parent).encode() not in one.file.read_bytes()


def test_example_predicts_without_torch(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    """The example, which cannot import torch and allmlp here, prints what `allmlp predict` prints. Pillow's resizing
    may differ from torch's by 2 of 255.
    """
    from PIL import Image

    folder, _, (made,) = exported("mixer_s32")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 61, 3), dtype=np.uint8)
    images = [str(tmp_path / name) for name in ("wide.png", "tall.png", "clear.png", "gray.png", "deep.png")]
    Image.fromarray(pixels).save(images[0])
    Image.fromarray(pixels[:, :21]).save(images[1])
    transparent = Image.fromarray(pixels)
    transparent.putalpha(60)
    transparent.save(images[2])
    Image.fromarray(pixels[:, :, 0]).save(images[3], transparency=int(pixels[0, 0, 0]))
    Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 256).save(images[4])
    expected = allmlp.predict(folder / "model", [Path(image) for image in images])
    for line, predictions in zip(run_example(made.file, images), expected, strict=True):
        found = [part.split(" ") for part in line.split(": ")[1].split("  ")]
        assert [label for label, _ in found] == [one.label for one in predictions]
        chances = [float(chance.rstrip("%")) / 100 for _, chance in found]
        assert chances == pytest.approx([one.probability for one in predictions], abs=0.01)


def test_example_prints_the_values_of_a_regression(exported: Callable[[str], Exported], tmp_path: Path) -> None:
    from PIL import Image

    folder, _, (made,) = exported("mixer_s32")
    shutil.copytree(folder / "model", tmp_path / "model")
    preprocessing = image_preprocessing(tmp_path / "model").replace(task="values")
    write_preprocessing(tmp_path / "model", preprocessing)
    proto = onnx.load(made.file)
    for entry in proto.metadata_props:
        if entry.key == "preprocessing":
            entry.value = (tmp_path / "model" / "preprocessing.json").read_text()
    onnx.save(proto, tmp_path / "m.onnx")
    Image.new("RGB", (20, 20), "red").save(tmp_path / "red.png")
    (line,) = run_example(tmp_path / "m.onnx", [str(tmp_path / "red.png")])
    found = dict(part.split(" ") for part in line.split(": ")[1].split("  "))
    (expected,) = allmlp.predict(tmp_path / "model", [tmp_path / "red.png"])
    assert [*found] == [one.label for one in expected]
    assert [float(value) for value in found.values()] == pytest.approx([one.value for one in expected], abs=1e-4)


def run_example(model: Path, images: list[str], example: str = "onnx_predict.py") -> list[str]:
    """The lines printed by the example where torch and allmlp cannot be imported."""
    code = f"""
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "allmlp"): raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
sys.argv = [{example!r}, {str(model)!r}, *{images!r}, "--top-k", "5"]
runpy.run_path({str(EXAMPLES / example)!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def parts(line: str) -> list[tuple[str, float]]:
    """Labels and probabilities in a line of an example."""
    words = [part.rpartition(" ") for part in line.split(": ")[1].split("  ")]
    return [(label, float(chance.rstrip("%")) / 100) for label, _, chance in words]


def test_example_fills_in_words_and_classifies_texts(tmp_path: Path, exported: Callable[[str], Exported]) -> None:
    folder, model, (made,) = exported("gmlp_l18")
    tokenizer = load_tokenizer(folder / "model")
    (line,) = run_example(made.file, ["the [MASK] sat"], "onnx_text.py")
    ((expected,),) = fill_masks(model, tokenizer, ["the [MASK] sat"], 5)
    assert [label for label, _ in parts(line)] == [token for token, _ in expected]
    assert [chance for _, chance in parts(line)] == pytest.approx([chance for _, chance in expected], abs=1e-3)

    spec = shallow("bert_base", vocab_size=len(tokenizer), seq_len=12)
    classifier = spec.replace(pool=MeanPool(), head=ClassifierHead(3)).build().eval()
    randomize(classifier)
    allmlp.save(classifier, tmp_path / "model")
    shutil.copy(folder / "model" / "tokenizer.json", tmp_path / "model")
    write_preprocessing(tmp_path / "model", TextPreprocessing("classes", 12, ("a", "b", "c")))
    (made,) = export(tmp_path / "model", tmp_path / "m.onnx")
    texts = ["the cat sat", "a dog ran over the hill and the cats and dogs do not like the rain"]
    for second in (None, "a dog ran over the cats and dogs"):
        lines = run_example(made.file, [*texts, *(["--pair", second] if second else [])], "onnx_text.py")
        for line, text in zip(lines, texts, strict=True):
            (expected,) = allmlp.predict(tmp_path / "model", [(text, second) if second else text])
            assert [label for label, _ in parts(line)] == [one.label for one in expected]
            assert [chance for _, chance in parts(line)] == pytest.approx(
                [one.probability for one in expected], abs=1e-3
            )


@pytest.mark.slow
def test_example_continues_and_translates(exported: Callable[[str], Exported]) -> None:
    prompt = "the cat sat"
    folder, model, made = exported("gmlp_causal_tiny")
    tokenizer = load_tokenizer(folder / "model")
    found = "\n".join(run_example(made[0].file, [prompt], "onnx_text.py"))
    assert found == prompt + tokenizer.decode(generate(model, tokenizer, prompt, 20, temperature=0))
    name = next(name for name in REPRESENTATIVES if kind(name) == "translation")
    folder, model, made = exported(name)
    (line,) = run_example(made[0].file, [prompt], "onnx_text.py")
    assert line == f"{prompt}: {translate(model, load_tokenizer(folder / 'model'), [prompt], num_beams=1)[0]}".rstrip()


@pytest.mark.slow
def test_int8_is_smaller_and_nearly_the_same(tmp_path: Path) -> None:
    model = allmlp.create("gmlp_nano", seed=0, overrides={"depth": 1}).eval()
    with torch.no_grad():
        model.head.proj.weight.normal_()
    allmlp.save(model, tmp_path / "model")
    (small,) = export(tmp_path / "model", tmp_path / "q.onnx", int8=True)
    assert 1e-4 < small.difference < 0.1
    assert small.file.stat().st_size < 0.5 * (tmp_path / "model" / "model.safetensors").stat().st_size
    images = torch.randn(8, 3, 32, 32)
    found, expected = ask(session(small.file), images=images)[0], model(images).detach().numpy()
    assert np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)
    kinds = {node.op_type for node in onnx.load(small.file).graph.node}
    assert "MatMulInteger" in kinds and session(small.file).get_modelmeta().custom_metadata_map["graph"] == "model"


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_file_that_disagrees_is_not_left(
    int8: bool, exported: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, (made,) = exported("resmlp_s12")
    run, calls = files.run_onnx, []
    monkeypatch.setattr(files, "write_onnx", lambda graph, file, settings: shutil.copy(made.file, file))

    def wrong(file: Path, inputs: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        calls.append(file)
        error = 1e-3 if not int8 else 10.0 * (len(calls) == 2)
        return [tuple(output + error for output in outputs) for outputs in run(file, inputs)]

    monkeypatch.setattr(files, "run_onnx", wrong)
    target = tmp_path / "out" / "m.onnx"
    target.parent.mkdir()
    target.write_text("an older file")
    with pytest.raises(allmlp.UserError, match=r"m\.onnx would differ from the model by .* not written"):
        export(folder / "model", target, int8=int8)
    assert [file.name for file in target.parent.iterdir()] == ["m.onnx"] and target.read_text() == "an older file"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m.bin"], "suffix must be .onnx or .pt2"),
        (["m.pt2", "--int8"], "int8 requires a .onnx file"),
        (["m.onnx", "--aot"], "requires a .pt2 file"),
        (["m.onnx", "--on", "nowhere.png"], "cannot read"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    make(tmp_path / "model", "resmlp_s12")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["export", "model", *arguments])
    assert end.value.code == 2 and message in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=pytest.mark.slow)])
def test_comparing_on_one_image(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    make(tmp_path / "model", "resmlp_s12")
    Image.new("RGB", (20, 20), "red").save(tmp_path / "red.png")
    with pytest.raises(SystemExit) as end:
        main(["export", str(tmp_path / "model"), str(tmp_path / f"m{suffix}"), "--on", str(tmp_path / "red.png")])
    told = capsys.readouterr().out
    assert end.value.code == 0 and "any batch size" in told and "on 1 image" in told


def test_bundled_models_keep_their_preprocessing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}

    def write(_graph: Any, file: Path, settings: dict[str, str], *_: Any) -> float:
        found.update(settings)
        file.touch()
        return 0.0

    monkeypatch.setattr(files, "write_and_compare", write)
    (exported,) = export(Path("allmlp:text"), tmp_path / "m.onnx")
    assert {"preprocessing", "tokenizer"} <= set(found) and exported.compared_on == "6 docstrings of Python"


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "model", "resmlp_s12")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(allmlp.UserError, match="damaged"):
        export(tmp_path / "model", tmp_path / "m.onnx")
    with pytest.raises(allmlp.UserError, match="not a model folder"):
        export(tmp_path, tmp_path / "m.onnx")


@pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=pytest.mark.slow)])
def test_nan_outputs_are_refused(suffix: str, tmp_path: Path) -> None:
    model = make(tmp_path / "model", "resmlp_s12")
    with torch.no_grad():
        model.head.proj.bias[0] = float("nan")
    allmlp.save(model, tmp_path / "model")
    with pytest.raises(allmlp.UserError, match="differ from the model by nan"):
        export(tmp_path / "model", tmp_path / f"m{suffix}")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
