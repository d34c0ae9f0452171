"""The Hugging Face Hub: saving with a model card, uploading and loading, with and without a network."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import allmlp
from allmlp.data.preprocessing import ImagePreprocessing, TextPreprocessing, read_preprocessing, write_preprocessing
from allmlp.models.llama import llama
from allmlp.models.mixer import mixer
from allmlp.weights import fetch
from allmlp.weights import model_card as card
from allmlp.weights.convert import convert
from allmlp.weights.fetch import MAX_DOWNLOAD_BYTES
from folders import text_folder
from tiny import randomize, tiny_model

hub = pytest.importorskip("huggingface_hub")
SMALL: dict[str, Any] = {"patch_size": 4, "img_size": 8, "num_classes": 3}


def small_mixer() -> Any:
    model = mixer(1, 8, **SMALL).build().eval()
    randomize(model)
    return model


class Hub:
    """The Hub as a local folder, behind the functions of huggingface_hub that the library calls."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.online = root, True
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.sizes: dict[str, int] = {}
        world = self

        class Api:
            def __init__(self, token: Any = None) -> None:
                self.token = token

            def create_repo(self, **options: Any) -> Any:
                world.call("create_repo", token=self.token, **options)
                (world.root / options["repo_id"]).mkdir(parents=True, exist_ok=True)
                return SimpleNamespace(repo_id=options["repo_id"])

            def create_branch(self, **options: Any) -> None:
                world.call("create_branch", **options)

            def upload_folder(self, **options: Any) -> str:
                world.call("upload_folder", **options)
                for file in Path(options["folder_path"]).iterdir():
                    if file.name in options["allow_patterns"]:
                        shutil.copy(file, world.root / options["repo_id"] / file.name)
                return f"https://hub/{options['repo_id']}/commit/1"

            def model_info(self, repository: str, **options: Any) -> Any:
                world.call("model_info", token=self.token, **options)
                files = sorted((world.root / repository).iterdir())
                sizes = [(file.name, world.sizes.get(file.name, file.stat().st_size)) for file in files]
                return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=size) for name, size in sizes])

        def download(repository: str, name: str, **options: Any) -> str:
            world.call("download", name=name, **options)
            target = world.root / "cache" / repository / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(world.root / repository / name, target)
            return str(target)

        def snapshot(repository: str, **options: Any) -> str:
            assert options["local_files_only"]
            if not (world.root / "cache" / repository).is_dir():
                raise FileNotFoundError("it is not in the cache")
            return str(world.root / "cache" / repository)

        monkeypatch.setattr(hub, "HfApi", Api)
        monkeypatch.setattr(hub, "hf_hub_download", download)
        monkeypatch.setattr(hub, "snapshot_download", snapshot)

    def call(self, what: str, **options: Any) -> None:
        if not self.online:
            raise ConnectionError("no route\nto the hub")
        self.calls.append((what, options))

    def called(self, name: str) -> dict[str, Any]:
        return next(options for called, options in self.calls if called == name)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(tmp_path / "hub", monkeypatch)


def test_the_hub_has_these_functions() -> None:
    """The stand-ins have the arguments of the real functions."""
    api = hub.HfApi
    for function, options in (
        (api.create_repo, {"repo_id": "a/b", "private": True, "exist_ok": True}),
        (api.create_branch, {"repo_id": "a/b", "branch": "c", "exist_ok": True}),
        (api.model_info, {"repo_id": "a/b", "revision": "c", "files_metadata": True, "timeout": 30}),
    ):
        inspect.signature(function).bind(None, **options)
    where = {"revision": "c", "token": "d", "cache_dir": "e"}
    inspect.signature(hub.hf_hub_download).bind("a/b", "config.json", force_download=True, **where)
    inspect.signature(hub.snapshot_download).bind("a/b", local_files_only=True, **where)
    upload = {"repo_id": "a/b", "folder_path": "c", "allow_patterns": [], "commit_message": "d", "revision": "e"}
    inspect.signature(api.upload_folder).bind(None, create_pr=False, **upload)


def trained(folder: Path, model: Any, inputs: ImagePreprocessing | TextPreprocessing) -> Path:
    """A folder as `allmlp train` writes it."""
    allmlp.save(model, folder)
    write_preprocessing(folder, inputs)
    record = {
        "run": {
            "kind": "Run",
            "data": {"kind": "Cifar10", "path": "/home/me/data/cifar", "size": 32},
            "optim": {"kind": "AdamW", "lr": 0.002, "groups": {"kind": "Groups"}},
            "batch_size": 64,
            "init_from": None,
        },
        "environment": {
            "allmlp": "0.1.0",
            "device": "a card",
            "command": ["/usr/bin/allmlp", "train", "cifar10_mixer", "--set", "data.path=/home/me/data/cifar"],
        },
        "result": {
            "validation": {"accuracy": 0.91234, "loss": 0.5},
            "test": {"accuracy": 0.9, "loss": 0.6, "majority": 0.1},
            "best_step": 2,
            "steps": 3,
        },
    }
    (folder / "run.json").write_text(json.dumps(record))
    return folder


# --- a folder ----------------------------------------------------------------------------------------------


def test_a_folder_is_read_without_a_network(world: Hub, tmp_path: Path) -> None:
    world.online = False
    model = small_mixer()
    folder = model.save_pretrained(tmp_path / "ours", license="mit")
    assert sorted(file.name for file in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    again = allmlp.from_pretrained(folder)
    (images,) = model.dummy_inputs(2)
    assert torch.equal(again(images), model(images)) and not again.training and again.spec == model.spec
    assert allmlp.load(folder).spec == model.spec
    assert allmlp.from_pretrained(str(folder), img_size=16).spec.input_size == (16, 16)
    with pytest.raises(TypeError, match="imge"):
        allmlp.from_pretrained(folder, imge=16)


@pytest.mark.parametrize("name", ["gmlp_l18", "resmlp_seq2seq_6", "vit_ti16", "bert_base", "amlp_ti16"])
def test_every_kind_of_model_has_a_card(name: str, tmp_path: Path) -> None:
    model = tiny_model(name, torch.float32)
    folder = model.save_pretrained(tmp_path / "ours")
    text = (folder / "README.md").read_text()
    count = sum(weight.numel() for weight in model.parameters())
    assert text.startswith("---\nlibrary_name: allmlp\n") and f"{count / 1e6:,.2f} M parameters" in text
    assert "## License\n\nNot stated." in text and f"{type(model.spec).__name__}(\n    " in text
    used = text.partition("## Usage\n\n```python\n")[2].partition("\n```")[0]
    exec(used.replace('"ours"', repr(str(folder))))  # the code in the card runs


def test_card_describes_the_run(tmp_path: Path) -> None:
    run = trained(
        tmp_path / "run", small_mixer(), ImagePreprocessing((0.5,) * 3, (0.25,) * 3, ("cat", "dog", "owl"), 0.9)
    )
    folder = allmlp.load(run).save_pretrained(tmp_path / "ours", run=run, repo_id="me/owls", license="Apache-2.0")
    assert read_preprocessing(folder) == read_preprocessing(run)
    assert not (folder / "run.json").exists() and not (folder / "metrics.jsonl").exists()
    text = (folder / "README.md").read_text()
    front, _, rest = text.removeprefix("---\n").partition("\n---\n")
    assert "pipeline_tag: image-classification" in front and "license: apache-2.0" in front and "- mlp-mixer" in front
    for words in (
        "# me/owls",
        "Input: 8x8 image. 3 classes: cat, dog, owl.",
        'allmlp.from_pretrained("me/owls")',
        "| data | Cifar10 (path cifar, size 32) |",
        "| optim | AdamW (lr 0.002) |",
        "| batch_size | 64 |",
        "allmlp train cifar10_mixer --set data.path=cifar",
        "|  | validation | test |\n| --- | --- | --- |\n| accuracy | 0.9123 | 0.9 |",
        "| majority |  | 0.1 |",
        "after 2 steps",
        "a center crop of 90.0% of the short side",
        "Apache-2.0",
    ):
        assert words in rest, words
    assert "/home/me" not in text and "init_from" not in text


@pytest.mark.parametrize(
    ("name", "gives", "task"),
    [
        ("gmlp_l18", "text", "fill-mask"),
        ("gmlp_causal_tiny", "text", "text-generation"),
        ("bert_base", "classes", "text-classification"),
        ("bert_base", "span", "question-answering"),
        ("resmlp_seq2seq_6", "translation", "translation"),
    ],
)
def test_pipeline_tags_of_text_models(name: str, gives: Any, task: str, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", tiny_model(name, torch.float32), TextPreprocessing(gives, 12))
    (run / "tokenizer.json").write_text("{}")
    folder = allmlp.load(run).save_pretrained(tmp_path / "ours", run=run)
    assert f"pipeline_tag: {task}" in (folder / "README.md").read_text() and (folder / "tokenizer.json").is_file()


def test_a_run_without_records(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("[1")
    text = (small_mixer().save_pretrained(tmp_path / "ours", run=tmp_path / "run") / "README.md").read_text()
    assert "## Training" not in text and "## Results" not in text
    with pytest.raises(allmlp.UserError, match="nowhere is not the folder of a run"):
        small_mixer().save_pretrained(tmp_path / "ours", run=tmp_path / "nowhere")


def test_folders_of_a_machine_are_left_out() -> None:
    text = "allmlp train x --set data.path=/home/me/a.tsv --out ~/runs/b --set init_from=hf:me/c https://host/d/e"
    found = card.without_folders(text)
    assert found == "allmlp train x --set data.path=a.tsv --out b --set init_from=hf:me/c https://host/d/e"


# --- the hub -----------------------------------------------------------------------------------------------


def test_push_and_pull(world: Hub, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", small_mixer(), ImagePreprocessing((0.5,) * 3, (0.25,) * 3, ("cat", "dog", "owl")))
    model = allmlp.load(run)
    where = model.push_to_hub("me/owls", run=run, private=True, token="secret", commit_message="Owls", branch="best")
    assert where == "https://hub/me/owls/commit/1"
    assert world.called("create_repo") == {"repo_id": "me/owls", "private": True, "exist_ok": True, "token": "secret"}
    assert world.called("create_branch")["branch"] == world.called("upload_folder")["revision"] == "best"
    assert world.called("upload_folder")["commit_message"] == "Owls"
    there = {file.name for file in (tmp_path / "hub" / "me/owls").iterdir()}
    assert there == {"README.md", "config.json", "model.safetensors", "preprocessing.json"}
    (images,) = model.dummy_inputs()
    for options in ({"revision": "best", "token": "secret"}, {"local_files_only": True}):
        again = allmlp.from_pretrained("me/owls", **options)
        assert torch.equal(again(images), model(images))
    assert world.called("model_info")["revision"] == world.called("download")["revision"] == "best"
    world.online = False  # from the cache
    assert torch.equal(allmlp.from_pretrained("me/owls")(images), model(images))
    assert convert("hf:me/owls", str(tmp_path / "copy.npz"), to="google").is_file()
    copy = convert("me/owls", str(tmp_path / "copy"))
    assert torch.equal(allmlp.load(copy)(images), model(images)) and read_preprocessing(copy) == read_preprocessing(run)


def test_save_and_push_in_one(world: Hub, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "secret.txt").write_text("do not publish")
    small_mixer().save_pretrained(tmp_path / "ours", repo_id="me/mixer", push_to_hub=True)
    assert not (tmp_path / "hub" / "me/mixer" / "secret.txt").exists()
    assert (tmp_path / "hub" / "me/mixer" / "model.safetensors").is_file()


def test_models_of_others_on_the_hub(world: Hub, tmp_path: Path) -> None:
    """A ViT of transformers, and only the files that are needed."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3)
    peer = transformers.ViTForImageClassification(config).eval()
    folder = tmp_path / "hub" / "org" / "vit"
    peer.save_pretrained(folder)
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "tf_model.h5").write_bytes(b"large")
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        ours = allmlp.from_pretrained("org/vit")
        torch.testing.assert_close(ours(images), peer(images).logits, rtol=1e-5, atol=1e-5)
    assert sorted(options["name"] for name, options in world.calls if name == "download") == [
        "config.json",
        "model.safetensors",
    ]
    copy = convert("org/vit", str(tmp_path / "ours"))
    assert load_file(copy / "model.safetensors").keys() == ours.state_dict().keys()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_weights_in_several_parts(kind: str, world: Hub, tmp_path: Path) -> None:
    """As large Llamas are published, with files of other libraries beside them."""
    model = allmlp.create(llama(2, 16, 24, 4, 2, seq_len=8, vocab_size=20), seed=0).eval()
    whole = convert(str(allmlp.save(model, tmp_path / "ours")), str(tmp_path / "whole"), to="hf")
    state, folder = load_file(whole / "model.safetensors"), tmp_path / "hub" / "org" / "llama"
    folder.mkdir(parents=True)
    shutil.copy(whole / "config.json", folder)
    stem = "model" if kind == "safetensors" else "pytorch_model"
    names = {key: f"{stem}-0000{1 + number % 2}-of-00002.{kind}" for number, key in enumerate(state)}
    for name in sorted(set(names.values())):
        part = {key: state[key] for key in state if names[key] == name}
        save_file(part, folder / name) if kind == "safetensors" else torch.save(part, folder / name)
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "consolidated-00001-of-00002.safetensors").write_bytes(b"x")
    copy = allmlp.load(convert("org/llama", str(tmp_path / "copy")))
    assert all(torch.equal(copy.state_dict()[name], weight) for name, weight in model.state_dict().items())
    assert not any("consolidated" in options.get("name", "") for _, options in world.calls)


def test_hub_errors_are_one_line(world: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "me" / "empty"
    folder.mkdir(parents=True)
    with pytest.raises(allmlp.UserError, match=r"has neither model.safetensors nor pytorch_model.bin"):
        allmlp.from_pretrained("me/empty")
    (folder / "model.safetensors").write_bytes(b"x")
    world.sizes["model.safetensors"] = MAX_DOWNLOAD_BYTES + 1
    with pytest.raises(allmlp.UserError, match=r"at most 8,589,934,592 are downloaded"):
        allmlp.from_pretrained("me/empty")
    world.online = False
    with pytest.raises(allmlp.UserError) as caught:
        allmlp.from_pretrained("runs/typo")
    assert "runs/typo is not a local folder, not in the Hub's cache" in str(caught.value)
    assert "(no route to the hub)" in str(caught.value) and "pass the path of a local copy" in str(caught.value)
    with pytest.raises(allmlp.UserError, match=r"local_files_only is set"):
        allmlp.from_pretrained("runs/typo", local_files_only=True)
    with pytest.raises(allmlp.UserError, match=r"cannot push to me/x on the Hub: no route to the hub; log in"):
        small_mixer().push_to_hub("me/x")


def test_without_huggingface_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder needs no package; the Hub names the missing one in one line."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    model = small_mixer()
    assert allmlp.from_pretrained(model.save_pretrained(tmp_path / "ours")).spec == model.spec
    for use in (lambda: model.push_to_hub("me/x"), lambda: allmlp.from_pretrained("me/x")):
        with pytest.raises(allmlp.UserError, match=r"this needs huggingface_hub: pip install 'allmlp\[hub\]'"):
            use()


def test_a_text_model_of_the_hub_in_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf, tokenizer = pytest.importorskip("allmlp.hf"), pytest.importorskip("allmlp.data.tokenizer")
    folder = text_folder(tmp_path / "reviews", "classes")
    monkeypatch.setattr(fetch, "from_hub", lambda repository, **options: folder)
    known = tokenizer.load_tokenizer(folder)
    assert hf.wrap("me/reviews").config.pad_token_id == known.pad_token_id
    assert len(hf.processor("me/reviews")) == len(known)
