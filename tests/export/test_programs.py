"""Files of torch.export, and packages compiled by AOTInductor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import allmlp
from allmlp import layers
from allmlp.export import aot
from allmlp.export.files import export
from allmlp.export.graphs import graphs
from allmlp.export.program import as_tuple
from allmlp.export.sample_inputs import SampleInputs, sample_inputs
from emulated_device import EmulatedDevice
from export.folders import REPRESENTATIVES, kind, make
from tiny import tiny_model

pytestmark = pytest.mark.usefixtures("uncached_operators")
COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="compiling ahead of time needs a C++ compiler")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in REPRESENTATIVES if kind(name) in ("images", "text")])
def test_programs_agree_for_any_batch(name: str, tmp_path: Path) -> None:
    model = make(tmp_path / "model", name)
    (made,) = export(tmp_path / "model", tmp_path / "m.pt2")
    assert made.difference < 1e-5
    extra = {"preprocessing": "", "graph": ""}
    program = torch.export.load(made.file, extra_files=extra).module()
    assert (
        extra["preprocessing"] == (tmp_path / "model" / "preprocessing.json").read_text() and extra["graph"] == "model"
    )
    for batch in (1, 7):
        inputs = model.dummy_inputs(batch)
        if kind(name) == "text":
            inputs = (*inputs, torch.ones_like(inputs[0], dtype=torch.bool))
            inputs = (*inputs, torch.zeros_like(inputs[0])) if (model.spec.stem.segments or 0) > 1 else inputs
        torch.testing.assert_close(program(*inputs), model(*inputs[:2]), atol=1e-5, rtol=1e-5)


FASTEST = ("gmlp_causal_tiny", "resmlp_seq2seq_6")
STEPPING = [
    name if name in FASTEST else pytest.param(name, marks=pytest.mark.slow)
    for name in REPRESENTATIVES
    if kind(name) in ("causal", "translation")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPPING)
def test_steps_of_a_program_are_the_parallel_pass(name: str, tmp_path: Path) -> None:
    if name == "resmlp_seq2seq_6" and torch.__version__ < (2, 9):
        pytest.skip("torch.export of this version fixes the length of the cache")
    model = make(tmp_path / "model", name)
    first, second = export(tmp_path / "model", tmp_path / "m.pt2")
    assert second.file.name == "m.step.pt2"
    begin, step = (torch.export.load(one.file).module() for one in (first, second))
    for batch in (1, 3):
        if kind(name) == "translation":
            source, ids = model.dummy_inputs(batch)
            mask = torch.arange(12) < torch.randint(3, 12, (batch, 1))
            fixed, expected = (mask, *begin(source, mask)), model(source, ids, mask)
        else:
            (ids,) = model.dummy_inputs(batch)
            fixed, expected = (), begin(ids, torch.ones_like(ids, dtype=torch.bool))
        (graph,) = [
            graph for graph in graphs(model, sample_inputs(model, tmp_path / "model", [])) if graph.name == "step"
        ]
        past, found = graph.module.empty(batch), []
        for token in ids.split(1, dim=1):
            logits, *past = step(token, *fixed, *past)
            found.append(logits)
        torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=1e-5, rtol=1e-5)


@COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gmlp_ti16"])
def test_a_compiled_package_agrees(name: str, tmp_path: Path) -> None:
    model = make(tmp_path / "model", name)
    (made,) = export(tmp_path / "model", tmp_path / "m.pt2", aot=True)
    assert made.difference < 1e-4
    images = model.dummy_inputs(5)
    ((logits,),) = aot.run_package(made.file, [images])
    metadata = torch._inductor.aoti_load_package(str(made.file)).get_metadata()
    assert json.loads(metadata["preprocessing"])["crop_pct"] == 0.9
    torch.testing.assert_close(logits, model(*images).detach(), atol=1e-4, rtol=1e-4)


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "model", "gmlp_ti16")
    monkeypatch.setattr(aot, "has_cpp_compiler", lambda: False)
    with pytest.raises(allmlp.UserError, match=r"needs a C\+\+ compiler"):
        export(tmp_path / "model", tmp_path / "m.pt2", aot=True)
    assert not (tmp_path / "m.pt2").exists()


@pytest.mark.parametrize("name", ["gmlp_ti16", *FASTEST])
def test_graphs_on_another_device(name: str, tmp_path: Path) -> None:
    model = make(tmp_path, name)
    samples = sample_inputs(model, tmp_path, [])
    with EmulatedDevice():
        place = torch.device("meta")
        for graph in graphs(model.to(place), samples.to(place)):
            for call in graph.calls:
                assert {one.device for one in as_tuple(graph.module(*call))} == {place}


@pytest.mark.parametrize(
    ("device", "file", "aot", "message"),
    [
        ("cuda", "m.onnx", False, "a .onnx file is not bound to a device: leave out --device"),
        ("mps", "m.pt2", True, "ahead of time for CPUs and CUDA GPUs, not for mps: leave out --aot"),
        ("xpu", "m.pt2", False, "torch sees no xpu device here"),
    ],
)
def test_devices_without_such_a_file(
    device: str, file: str, aot: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allmlp.device.count_devices", {"cuda": 1, "mps": 1, "xpu": 0}.get)
    with pytest.raises(allmlp.UserError, match=message):
        export(tmp_path, tmp_path / file, aot=aot, device=device)


def test_inputs_are_real_where_there_are_any(tmp_path: Path) -> None:
    model = make(tmp_path / "a", "vit_ti16")
    found = sample_inputs(model, tmp_path / "a", [])
    assert found.description == "6 crops of photographs" and found.tensors[0].shape == (6, 3, 6, 8)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)))
    pixels = found.tensors[0] * std + mean
    assert pixels.min() > -1e-3 and pixels.max() < 1.001 and pixels.std() > 0.05
    text = make(tmp_path / "b", "bert_base")
    ids, mask = sample_inputs(text, tmp_path / "b", []).tensors
    assert ids.shape == (6, 12) and torch.equal(mask, ids != 0) and len(set(map(tuple, ids.tolist()))) == 6
    (tmp_path / "b" / "tokenizer.json").unlink()
    assert "random tokens" in sample_inputs(text, tmp_path / "b", []).description
    (tmp_path / "one.txt").write_text("the cat sat")
    own = sample_inputs(make(tmp_path / "c", "bert_base"), tmp_path / "c", [tmp_path / "one.txt"])
    assert own.description == "1 texts" and torch.equal(own.tensors[0][0], own.tensors[0][1])
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8")
    with pytest.raises(allmlp.UserError, match=r"photo\.jpg is not UTF-8 text"):
        sample_inputs(text, tmp_path / "c", [tmp_path / "photo.jpg"])


def test_too_short_to_step() -> None:
    model = allmlp.create("gmlp_causal_tiny", seq_len=2, vocab_size=9, overrides={"depth": 1}).eval()
    with pytest.raises(allmlp.UserError, match="too short to export a decoding step"):
        graphs(model, SampleInputs((torch.zeros(2, 2, dtype=torch.long), torch.ones(2, 2, dtype=torch.bool)), ""))


def test_a_recurrent_model_has_no_decoding_step(tmp_path: Path) -> None:
    """Its state is not a sequence of past tokens; the parallel pass is exported."""
    recurrent = {"depth": 1, "width": 16, "block": layers.Block(layers.TokenLstm(), channel=layers.ChannelMlp(8))}
    allmlp.save(allmlp.create("gmlp_causal_tiny", seq_len=8, vocab_size=20, overrides=recurrent), tmp_path / "model")
    assert [one.file.name for one in export(tmp_path / "model", tmp_path / "m.pt2")] == ["m.pt2"]
    spec = allmlp.preset("resmlp_seq2seq_tiny").spec.configure(seq_len=8, vocab_size=20)
    decoder = spec.decoder.replace(block=spec.decoder.block.replace(token=layers.TokenLstm()))
    allmlp.save(allmlp.create(spec.replace(decoder=decoder)), tmp_path / "translation")
    with pytest.raises(allmlp.UserError, match="TokenLstm cannot be exported"):
        export(tmp_path / "translation", tmp_path / "t.pt2")


@pytest.mark.slow
def test_grouped_queries_step_to_any_length(tmp_path: Path) -> None:
    """Llama has several heads of keys and values, each for several heads of queries."""
    overrides = {"depth": 1, "width": 16, "block.channel.hidden": 8}
    model = allmlp.create("llama_tiny", seq_len=9, vocab_size=31, overrides=overrides).eval()
    assert model.spec.block.token.num_kv_heads == 2  # type: ignore[attr-defined]
    allmlp.save(model, tmp_path / "model")
    made = export(tmp_path / "model", tmp_path / "m.pt2")
    assert [one.file.name for one in made] == ["m.pt2", "m.step.pt2"]
    step, (ids,) = torch.export.load(made[1].file).module(), model.dummy_inputs(2)
    past, found = (torch.zeros(2, 0, 16),), []
    for token in ids.split(1, dim=1):
        logits, *past = step(token, *past)
        found.append(logits)
    torch.testing.assert_close(torch.cat(found, dim=1), model(ids), atol=1e-5, rtol=1e-5)


def test_files_that_the_model_cannot_be_compared_on_are_refused(tmp_path: Path) -> None:
    """Otherwise the comparison would be on other inputs than those that were named."""
    (tmp_path / "one.txt").write_text("the cat sat")
    given = [tmp_path / "one.txt"]
    text = make(tmp_path / "text", "bert_base")
    (tmp_path / "text" / "tokenizer.json").unlink()
    with pytest.raises(allmlp.UserError, match="no tokenizer to read the texts of --on"):
        sample_inputs(text, tmp_path / "text", given)
    wide = allmlp.create("mixer_nano", overrides={"stem.in_chans": 4})
    with pytest.raises(allmlp.UserError, match="1 or 3 channels, and the model reads 4"):
        sample_inputs(wide, tmp_path, given)
    with pytest.raises(allmlp.UserError, match="--on takes images or texts"):
        sample_inputs(tiny_model("patchtsmixer"), tmp_path, given)
