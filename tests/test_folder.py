"""Model folders: lossless saving and loading, and one-line errors for damaged files."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import AveragedModel

import allmlp
from allmlp.data.preprocessing import copy_tokenizer, read_preprocessing
from allmlp.lora import Lora
from allmlp.prediction import generate
from allmlp.weights import folder as folders
from tiny import TINY_SERIES, TINY_SPECS, tiny_model


@pytest.mark.parametrize("name", [*TINY_SPECS, *TINY_SERIES])
def test_round_trip(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, torch.float32)
    allmlp.save(model, tmp_path / "a")
    again = allmlp.load(tmp_path / "a")
    assert again.spec == model.spec and not again.training
    x = model.dummy_inputs(2)
    assert torch.equal(again(*x), model(*x))
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == ["config.json", "model.safetensors"]


def test_keys_are_public(tmp_path: Path) -> None:
    """Changing a key breaks every saved model."""
    allmlp.save(allmlp.create("resmlp_nano", overrides={"depth": 1}), tmp_path)
    assert sorted(load_file(tmp_path / "model.safetensors")) == [
        "blocks.0.channel.mix.down.bias",
        "blocks.0.channel.mix.down.weight",
        "blocks.0.channel.mix.up.bias",
        "blocks.0.channel.mix.up.weight",
        "blocks.0.channel.norm.alpha",
        "blocks.0.channel.norm.beta",
        "blocks.0.channel.scale.gamma",
        "blocks.0.token.mix.bias",
        "blocks.0.token.mix.weight",
        "blocks.0.token.norm.alpha",
        "blocks.0.token.norm.beta",
        "blocks.0.token.scale.gamma",
        "head.proj.bias",
        "head.proj.weight",
        "norm.alpha",
        "norm.beta",
        "stem.proj.bias",
        "stem.proj.weight",
    ]


def test_precision(tmp_path: Path) -> None:
    model = tiny_model("mixer_s32", torch.bfloat16)
    allmlp.save(model, tmp_path)
    kept = allmlp.load(tmp_path, dtype=None)
    assert kept.dtype == torch.bfloat16
    assert all(torch.equal(kept.state_dict()[name], weight) for name, weight in model.state_dict().items())
    assert allmlp.load(tmp_path).dtype == torch.float32
    assert allmlp.load(tmp_path, dtype=torch.float64).dtype == torch.float64


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return allmlp.save(tiny_model("mixer_s32", torch.float32), tmp_path_factory.mktemp("saved"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def refusal(folder: Path) -> str:
    with pytest.raises(allmlp.UserError) as caught:
        allmlp.load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_truncated_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "damaged or not a safetensors file" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"not weights", pickle.dumps({"a": 1}), b"\xff" * 8 + b"{}"])
def test_foreign_weights(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert "damaged or not a safetensors file" in refusal(folder)


def test_weights_of_another_model(folder: Path, tmp_path: Path) -> None:
    other = allmlp.save(tiny_model("resmlp_s12", torch.float32), tmp_path / "other")
    shutil.copy(other / "model.safetensors", folder)
    message = refusal(folder)
    assert "missing (" in message and "unexpected (" in message and "blocks.{0..1}.token" in message


def test_misshapen_weights(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["head.proj.weight"] = state["head.proj.weight"][:, :-1].contiguous()
    save_file(state, folder / "model.safetensors")
    assert "1 of another shape (head.proj.weight)" in refusal(folder)


def test_weights_without_our_metadata_are_welcome(folder: Path) -> None:
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    assert allmlp.load(folder).spec.width == 16


def test_configuration_and_weights_belong_together(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["block"]["channel"]["act"] = "relu"
    (folder / "config.json").write_text(json.dumps(config))
    assert "config.json does not match the weights: it was edited, or a save was interrupted" in refusal(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), "must be a JSON object"),
        (
            lambda folder: (folder / "config.json").write_text('{"kind": "Affine"}'),
            "contains Affine, which is not a model",
        ),
        (shutil.rmtree, "is not a model folder"),
    ],
)
def test_damaged_folders(folder: Path, damage: object, message: str) -> None:
    damage(folder)  # type: ignore[operator]
    assert message in refusal(folder)


@pytest.mark.slow
@given(st.binary(max_size=300), st.sampled_from(["config.json", "model.safetensors"]), st.integers(0, 400))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_load_or_are_refused(saved: Path, tmp_path: Path, noise: bytes, name: str, position: int) -> None:
    target = tmp_path / "fuzz"
    shutil.copytree(saved, target, dirs_exist_ok=True)
    content = (target / name).read_bytes()
    (target / name).write_bytes(content[:position] + noise + content[position + len(noise) :])
    try:
        allmlp.load(target)
    except allmlp.UserError as reason:
        assert "\n" not in str(reason)


def test_a_folder_that_lacks_something_says_where_it_comes_from(folder: Path) -> None:
    with pytest.raises(allmlp.UserError, match=r"preprocessing\.json.*: set model\.preprocessing before"):
        read_preprocessing(folder)
    (folder / "config.json").write_text('{"kind": "OwnModel"}')
    with pytest.raises(allmlp.UserError, match=r"unknown kind of config 'OwnModel'.*plug-in.*allmlp --import MODULE"):
        allmlp.load(folder)


def test_a_failed_save_leaves_the_old_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def full_disk(state: object, file: Path, metadata: object) -> None:
        Path(file).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "save_file", full_disk)
    with pytest.raises(allmlp.UserError, match="No space left on device"):
        allmlp.save(tiny_model("mixer_s32", torch.float32), folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_saving_into_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(allmlp.UserError, match="cannot write the model"):
        allmlp.save(tiny_model("mixer_s32", torch.float32), tmp_path / "file")


def test_a_copied_tokenizer_replaces_the_one_there(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder, name in ((source, "vocab.txt"), (target, "tokenizer.json")):
        folder.mkdir()
        (folder / name).write_text("[PAD]\n", encoding="utf8")
    copy_tokenizer(source, target)
    assert [file.name for file in target.iterdir()] == ["vocab.txt"]
    copy_tokenizer(tmp_path, target)  # none to copy
    assert [file.name for file in target.iterdir()] == ["vocab.txt"]


@pytest.mark.parametrize("change", ["another head", "LoRA"])
def test_a_changed_model_is_not_saved(change: str, tmp_path: Path) -> None:
    model = tiny_model("mixer_s32", torch.float32)
    message = "the model was changed: its state dict does not match its spec: "
    if change == "LoRA":
        Lora(2).apply(model)
        message = "merge them into its weights first"
    else:
        model.head = torch.nn.Linear(16, 7)
    with pytest.raises(allmlp.UserError, match=message):
        allmlp.save(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_compiled_model_is_saved_as_itself(tmp_path: Path) -> None:
    model = tiny_model("mixer_s32", torch.float32)
    allmlp.save(torch.compile(model), tmp_path)  # type: ignore[arg-type]
    assert allmlp.load(tmp_path).state_dict().keys() == model.state_dict().keys()
    average = AveragedModel(tiny_model("mixer_s32", torch.float32))
    with pytest.raises(allmlp.UserError, match=r"can be saved, not AveragedModel: save its \.module"):
        allmlp.save(average, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(allmlp.UserError, match="only models of this library can be saved, not Linear"):
        allmlp.save(torch.nn.Linear(2, 2), tmp_path)  # type: ignore[arg-type]


def test_the_precision_may_be_a_name(tmp_path: Path) -> None:
    model = tiny_model("mixer_s32", torch.float32)
    allmlp.save(model, tmp_path, dtype="bfloat16")
    assert allmlp.load(tmp_path, dtype=None).dtype == torch.bfloat16
    for wrong in ("int16", "half precision"):
        with pytest.raises(allmlp.UserError, match=f"weights cannot be stored as {wrong}"):
            allmlp.save(model, tmp_path, dtype=wrong)


def test_a_folder_of_runs_names_one(tmp_path: Path) -> None:
    for row in ("b", "a"):
        (tmp_path / "runs" / row).mkdir(parents=True)
        (tmp_path / "runs" / row / "run.json").touch()
    one = r"runs holds 2 runs: name one of them, such as .*a$"
    for read in (allmlp.load, read_preprocessing, lambda folder: next(generate(folder))):
        with pytest.raises(allmlp.UserError, match=one):
            read(tmp_path / "runs")


def test_a_file_is_not_a_model_folder(folder: Path, tmp_path: Path) -> None:
    """One in a model folder names the folder, any other how to make one."""
    assert refusal(folder / "model.safetensors").endswith(f"is a file, not a model folder: name its folder, {folder}")
    other = shutil.copy(folder / "model.safetensors", tmp_path / "other.safetensors")
    assert refusal(Path(other)).endswith(f"convert it: allmlp convert {other} FOLDER")
