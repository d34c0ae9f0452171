"""Every example in the help of every command works as it is printed, with stand-ins for the files that it names."""

from __future__ import annotations

import glob
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import allmlp
from allmlp.analysis import output_folder
from allmlp.cli import app, main
from allmlp.cli.app import assignments
from allmlp.data.image_folder import ImageFolder
from allmlp.data.labeled_text import LabeledText
from allmlp.data.preprocessing import ImagePreprocessing, write_preprocessing
from allmlp.data.series_table import SeriesTable
from allmlp.data.tokenizer import TokenizerConfig
from allmlp.layers import Dense, LayerNorm, LMHead
from allmlp.models.bert import bert
from allmlp.models.gmlp import gmlp, gmlp_text
from allmlp.models.mixer import mixer
from allmlp.models.zoo import preset
from allmlp.optim import AdamW
from allmlp.recipes import runs
from allmlp.run import Budget, Run
from allmlp.spec import override, override_all
from allmlp.studies import studies
from allmlp.tasks.classify import Classify
from allmlp.tasks.classify_text import ClassifyText
from allmlp.tasks.forecast import Forecast
from allmlp.training import train
from allmlp.weights.convert import convert
from data.sample_images import encode, scene
from data.test_cifar import binary as write_cifar10
from folders import image_folder, text_folder

for package in ("tokenizers", "PIL", "matplotlib", "jinja2"):
    pytest.importorskip(package)

COMMANDS: dict[str, Any] = {"": typer.main.get_command(app), **typer.main.get_command(app).commands}  # type: ignore[attr-defined]

MINUTES, NETWORK, GPU, SERVER = "takes minutes", "needs a network", "needs GPUs", "runs until it is stopped"
SIZES = "needs runs of several sizes"
NOT_RUN = {
    "allmlp train photos/": MINUTES,
    "allmlp train reviews.csv --minutes 10": MINUTES,
    "allmlp train sales.csv --horizon 28": MINUTES,
    "allmlp train photos/ --model runs/other --set optim.lr=2e-4": MINUTES,
    "allmlp train digits_mixer --epochs 5": MINUTES,
    "allmlp train cifar10_ablations/conv --set seed=1 --out runs/a": MINUTES,
    "torchrun --nproc-per-node 8 -m allmlp train cifar10_gmlp --out runs/b": GPU,
    "allmlp eval timm:mixer_b16_224 photos/ --classes classes.csv": NETWORK,
    "allmlp eval timm:mixer_b16_224 imagenet/val --real real.json": NETWORK,
    "allmlp probe allmlp:image --device cuda": GPU,
    "allmlp study digits": MINUTES,
    "allmlp study cifar10 --minutes 9 --set data.path=data/cifar10": MINUTES,
    "allmlp study cifar10_mixer --sweep optim.lr=1e-3,2e-3,4e-3 --seeds 3": MINUTES,
    "torchrun --nproc-per-node 8 -m allmlp predict runs/photos 's3://bucket/*.tar' --out answers/": NETWORK,
    "allmlp analyze mixer_l16": MINUTES,
    "allmlp plan --from runs/* --at 1e18": SIZES,
    "allmlp plan resmlp_s24 --check --batch-size 8 --calibrate resmlp_s12": MINUTES,
    "allmlp convert mixer_b16.google_in1k mixer/": NETWORK,
    "allmlp convert timm:gmlp_s16_224.ra3_in1k gmlp/": NETWORK,
    "allmlp convert google-bert/bert-base-uncased bert/": NETWORK,
    "allmlp prune runs/a --curve --data cifar10 --images 2000 --figure curve.png": MINUTES,
    "allmlp export mixer/ mixer.pt2 --aot": MINUTES,
    "allmlp export mixer/ mixer.pt2 --device cuda": GPU,
    "allmlp serve": SERVER,
    "allmlp serve runs/photos runs/reviews --port 8080": SERVER,
    "allmlp serve small=runs/a large=timm:mixer_b16_224 --device cuda": SERVER,
    "allmlp bench mixer_b16 resmlp_s24 gmlp_s16 vit_b16 --batch-size 256": MINUTES,
    "allmlp bench mixer_s16 --batch-size 1,8 --device cpu": MINUTES,
    "allmlp bench mixer_b16 timm:resnet50 --batch-size 1-1024": MINUTES,
    "allmlp bench mixer_b16 --against vit_b16": MINUTES,
    "allmlp bench mixer_b16 --train": MINUTES,
    "allmlp bench gmlp_s16 --scale tokens": MINUTES,
    "allmlp bench mixer_b16 --backends ours-fast,timm-compiled --seconds 5": MINUTES,
    "allmlp launch --nproc-per-node 8 train imagenet_mixer_b16 --out runs/b --set data.path=shards/": GPU,
    "allmlp launch --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 train imagenet_mixer_b16 --out runs/b": GPU,
    "allmlp launch --nproc-per-node 8 predict runs/photos 's3://bucket/*.tar' --out answers/": NETWORK,
}
"""Parsed and validated only; all others are run."""
OTHER_PROGRAMS = ("curl ",)
SLOW = ("allmlp analyze", "allmlp plan", "allmlp export")


def examples_of(command: Any) -> list[str]:
    lines = (command.epilog or "").splitlines()
    return [line.strip() for line in lines[lines.index("Examples:") + 1 :]] if "Examples:" in lines else []


EXAMPLES = dict.fromkeys(example for command in COMMANDS.values() for example in examples_of(command))


def arguments(example: str) -> list[str]:
    """The words after `allmlp`, with file patterns expanded as by the shell."""
    words = shlex.split(example, comments=True)
    words = words[words.index("allmlp") + 1 :]
    quoted = {word for word in shlex.split(example, posix=False) if word[0] in "'\""}
    found = []
    for word in words:
        is_pattern = "*" in word and f"'{word}'" not in quoted
        found += sorted(glob.glob(word)) if is_pattern else [word]
        assert found, f"no stand-in for {word}"
    return found


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files and folders that examples name."""
    place = tmp_path_factory.mktemp("examples")
    for name in ("photo.jpg", "query.jpg", "cat.jpg", "dog.jpg"):
        (place / name).write_bytes(encode(scene(40, 30, seed=len(name)), "JPEG"))
    for folder in ("photos", "other_photos"):
        for number, label in enumerate(("cat", "dog", "ship")):
            (place / folder / label).mkdir(parents=True)
            for seed in range(8):
                (place / folder / label / f"{seed}.png").write_bytes(encode(scene(20, 20, seed=10 * number + seed)))
    (place / "new_photos").mkdir()
    for seed in range(3):
        (place / "new_photos" / f"{seed}.png").write_bytes(encode(scene(20, 20, seed=seed)))
        (place / "photos" / f"{seed}.png").write_bytes(encode(scene(20, 20, seed=seed)))
    lines = [
        f"the {thing} was {word},{word}"
        for thing in ["film", "book", "play", "song", "game", "show"]
        for word in ("good", "bad")
    ]
    (place / "reviews.csv").write_text("\n".join(["review,label", *lines]))
    short = {"batch_size": 8, "budget": Budget(steps=2), "optim": AdamW(), "seed": 0, "save_every": 1}
    images = Run(
        model=mixer(2, 16, patch_size=4, img_size=16).configure(num_classes=3),
        task=Classify(),
        data=ImageFolder(str(place / "photos"), img_size=(16, 16)),
        **short,
    )
    train(images, place / "runs" / "photos", "cpu")
    texts = Run(
        model=gmlp_text(2, 16, 32),
        task=ClassifyText(),
        data=LabeledText(
            str(place / "reviews.csv"), tokenizer=TokenizerConfig(vocab_size=60), seq_len=12, cache=str(place / "cache")
        ),
        **short,
    )
    train(texts, place / "runs" / "reviews", "cpu")
    days = [f"{np.datetime64('2024-01-01') + number},{number % 7}" for number in range(60)]
    for name in ("sales.csv", "new_sales.csv"):
        (place / name).write_text("\n".join(["date,sales", *days]))
    series = Run(model=preset("nlinear").spec, task=Forecast(), data=SeriesTable(str(place / "sales.csv")), **short)
    train(series, place / "runs" / "sales", "cpu")
    for source, copies in {"photos": ("a", "b"), "reviews": ("text",)}.items():
        for name in copies:
            shutil.copytree(place / "runs" / source, place / "runs" / name)
    for name, task in {"mlm": "text", "squad": "span", "causal": "causal", "translate": "translation"}.items():
        text_folder(place / "runs" / name, task)
    image_folder(place / "path" / "to" / "model")
    for name, spec in {
        "mixer": mixer(2, 16, patch_size=56, img_size=224),
        "gmlp": gmlp(2, 16, patch_size=32, img_size=96),
        "bert": bert(2, 16, 2, seq_len=16, vocab_size=40),
    }.items():
        allmlp.save(allmlp.create(spec, seed=0), place / name)
        if name != "bert":
            write_preprocessing(place / name, ImagePreprocessing((0.5,) * 3, (0.5,) * 3))
    convert(str(place / "mixer"), str(place / "Mixer-B_16.npz"), "google")
    spec = gmlp_text(2, 16, 32, seq_len=12, vocab_size=40, causal=True).replace(head=LMHead(tied=False, bias=True))
    for path in ("norm", "block.norm", "block.channel.inner.norm"):
        spec = override(spec, path, LayerNorm(1e-5))
    allmlp.save(allmlp.create(override(spec, "block.channel.inner.projection", Dense())), place / "theirs")
    convert(str(place / "theirs"), str(place / "gmlp.pth"), "lucidrains")
    (place / "data" / "cifar10").mkdir(parents=True)
    write_cifar10(place / "data" / "cifar10")
    recipe = "from allmlp.recipes import runs\n\n\ndef my_run():\n    run = runs('digits_mixer')['digits_mixer']\n"
    recipe += "    return run.replace(budget=run.budget.replace(epochs=None, steps=2))\n"
    (place / "experiments.py").write_text(recipe)
    metric = "def f1(logits, labels):\n    return (logits.argmax(1) == labels).float().mean()\n"
    (place / "metrics.py").write_text(metric)
    with pytest.raises(SystemExit):
        main(
            ["embed", *(str(place / name) for name in ("runs/photos", "photos")), "--out", str(place / "features.npy")]
        )
    return place


def test_every_command_has_three_examples() -> None:
    few = {name: examples_of(command) for name, command in COMMANDS.items() if len(examples_of(command)) < 3}
    assert not few
    for name, command in COMMANDS.items():
        if name:
            assert all(f"allmlp {name}" in one or one.startswith(OTHER_PROGRAMS) for one in examples_of(command)), name


def test_what_is_not_run_is_an_example() -> None:
    assert not set(NOT_RUN) - {plain(example) for example in EXAMPLES}, "no longer in any help: remove it here"


def plain(example: str) -> str:
    return example.partition(" #")[0].rstrip()


@pytest.mark.parametrize("example", [example for example in EXAMPLES if plain(example) in NOT_RUN])
def test_an_example_is_understood(example: str) -> None:
    """Its command, options and values exist, and the recipes, fields and models that it names."""
    name, *words = arguments(example.replace("*", "_"))
    context = COMMANDS[name].make_context(name, words)
    assert context.params and not context.args
    given = context.params
    source = given.get("source") or given.get("name") if name in ("train", "study") else None
    if source and "." not in source and not source.endswith("/") and source not in studies():
        fields = assignments(
            [*(given["overrides"] or []), *(one.partition(",")[0] for one in given.get("sweep") or [])]
        )
        assert all(override_all(run, fields) for run in runs(source).values())
    for model in [*given.get("models", ()), *(given.get("against") or ())]:
        if name == "bench":
            assert preset(model)


@pytest.mark.slow
@pytest.mark.usefixtures("onnx_registry")
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, marks=pytest.mark.slow if example.startswith(SLOW) else [])
        for example in EXAMPLES
        if plain(example) not in NOT_RUN and not example.startswith(OTHER_PROGRAMS)
    ],
)
def test_an_example_runs(
    example: str,
    workspace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(workspace, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    # Figures are built but not rendered, which takes most of the time; tests/analysis/test_figures.py renders them.
    monkeypatch.setattr(output_folder, "save", lambda figure, file, kind: file.touch())
    with pytest.raises(SystemExit) as ended:
        main(arguments(example))
    printed = capsys.readouterr()
    assert not ended.value.code, printed.err
    assert "--json" in example or not re.search("^next:", printed.out, re.MULTILINE), "on stderr, not among the results"
