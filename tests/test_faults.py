"""Bad input of every kind ends in one line on stderr and exit code 2: sizes, files, places, texts, settings."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
import time
import warnings
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed.run
import zstandard
from PIL import Image
from safetensors.torch import save_file
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import allmlp
from allmlp.cli import main
from allmlp.data.dataset import subset
from allmlp.data.decode import Decode
from allmlp.data.encoded_images import EncodedImages
from allmlp.data.preprocessing import PREPROCESSING_FILE, ImagePreprocessing
from allmlp.data.text_files import read_documents
from allmlp.data.tokenizer import TokenizerConfig, load_tokenizer
from allmlp.errors import CONTROL, UserError
from allmlp.files import read_regular
from allmlp.log import drop_after, read_metrics
from allmlp.models.zoo import preset
from allmlp.optim import AdamW
from allmlp.parallel import World
from allmlp.plan import fits
from allmlp.plan.fits import check_training
from allmlp.recipes import runs
from allmlp.spec import override_all, to_json
from allmlp.tasks.task import Losses
from allmlp.train_step import TrainStep
from allmlp.training import train
from folders import text_folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command ends with."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    found = capsys.readouterr()
    last = found.err.splitlines()[-1]
    assert caught.value.code == 2 and last.startswith("error: ") and not CONTROL.search(found.out + found.err)
    return last


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = {"width": 16, "depth": 2, "block.token.hidden": 8, "block.channel.hidden": 16}
    allmlp.save(
        allmlp.create("mixer_s16", num_classes=2, img_size=8, patch_size=4, overrides=sizes, seed=0), tmp_path / "model"
    )
    inputs = ImagePreprocessing((0.5,) * 3, (0.5,) * 3, ("a\x1b[31m", "b"))
    (tmp_path / "model" / PREPROCESSING_FILE).write_text(to_json(inputs), encoding="utf8")
    return tmp_path / "model"


# --- sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("model.width=1000000", "lower the width (1000000), depth (4) or img_size"),
        ("model.depth=10000", "depth (10000)"),
        ("batch_size=16777216", "batch_size 16,777,216 needs"),
        ("budget.epochs=1e308", "budget.epochs must be a number between"),
        ("budget.minutes=0", "budget.minutes must be a number between"),
        (f"seed={'9' * 23}", "seed must be a whole number between"),
        (f"model.width={'9' * 30}", "model.width must be a whole number between"),
        (f"optim.lr={'9' * 400}", "optim.lr must be a number between"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_allocated(
    setting: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fits, "free_memory", lambda device: 2e9)
    monkeypatch.setattr("allmlp.initial_model.create", lambda *arguments, **options: pytest.fail("allocated"))
    assert named in refused(capsys, "train", "digits_mixer", "--set", setting, "--out", str(tmp_path / "out"))


def test_a_batch_that_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "free_memory", lambda device: 20e9)
    check_training(preset("mixer_b16").spec, 64, AdamW(), torch.device("cpu"))  # 5.6 GB
    with pytest.raises(UserError, match="batch_size 1,024 needs"):
        check_training(preset("mixer_b16").spec, 1024, AdamW(), torch.device("cpu"))
    check_training(preset("mixer_b16").spec, 1024, AdamW(), torch.device("cpu"), grad_accum_steps=16)
    monkeypatch.setattr(fits, "free_memory", lambda device: 0.6e9)
    check_training(preset("mixer_b16").spec, 2, AdamW(), torch.device("cpu"), lora=True)
    with pytest.raises(UserError, match="59,880,472 parameters need"):
        check_training(preset("mixer_b16").spec, 2, AdamW(), torch.device("cpu"))
    with pytest.raises(UserError, match="batch_size 64 needs"):
        check_training(preset("mixer_b16").spec, 64, AdamW(), torch.device("cpu"), lora=True)


@pytest.mark.parametrize("options", [["--samples", "1e308"], ["--samples", "1e9", "--epochs", "1e308"]])
def test_plans_out_of_range_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "plan", "mixer_b16", "--epochs", "1", *options)


# --- reading ------------------------------------------------------------------------------------------------


def test_pipes_and_devices_are_not_images(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "a.png")
    for name in (tmp_path / "a.png", "/dev/zero"):
        assert "not a regular file" in refused(capsys, "predict", str(model), str(name))
    with pytest.raises(OSError, match="more than 3"):
        read_regular(model / "config.json", 3)


def test_control_characters_do_not_reach_the_terminal(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = tmp_path / "a\x1b[31m\nb.png"
    Image.new("RGB", (8, 8)).save(name)
    with pytest.raises(SystemExit) as caught:
        main(["predict", str(model), str(name)])
    found = capsys.readouterr().out
    assert not caught.value.code and found.count("\n") == 1 and "a\\x1b[31m" in found and not CONTROL.search(found)
    name.write_bytes(b"no image")
    assert "\\x1b[31m" in refused(capsys, "predict", str(model), str(name))
    assert "\\x00" in refused(capsys, "predict", str(model), "a\0b.png")
    (tmp_path / "a.tsv").write_bytes(b"\x1b[31m\x07t\tl\x1bb\n\x1bz\t\x1bb\n" * 20)
    assert "\\x1b" in refused(capsys, "train", str(tmp_path / "a.tsv"))


def test_pillow_does_not_warn_before_the_error(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("1", (9500, 9500)).save(tmp_path / "large.png")
    with warnings.catch_warnings(record=True) as warned:
        assert "exceed max_pixels" in refused(capsys, "predict", str(model), str(tmp_path / "large.png"))
    assert not warned


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_weights_that_are_not_floating_point_are_refused(model: Path, dtype: torch.dtype) -> None:
    state = {name: tensor.to(dtype) for name, tensor in allmlp.load(model).state_dict().items()}
    save_file(state, model / "model.safetensors")
    with pytest.raises(UserError, match="not floating point"):
        allmlp.load(model)


def test_a_config_in_utf16_is_refused(model: Path) -> None:
    (model / "config.json").write_bytes((model / "config.json").read_text(encoding="utf8").encode("utf16"))
    with pytest.raises(UserError, match="does not match the weights"):
        allmlp.load(model)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("foo://x", "Protocol not known: foo"),
        ("s3://bucket/x.csv", "s3:// needs a package that is not installed: pip install 'allmlp[remote]'"),
        ("https://host/x.csv", "https:// needs a package that is not installed: pip install 'allmlp[remote]'"),
        ("sftp://host/x", "paramiko"),
        ("reference://x", "cannot read reference://x"),
        ("memory://missing.csv", "cannot read memory:///missing.csv"),
        ("~nobody/x", "~nobody/x"),
        ("~no-such-user/x.csv", "~no-such-user/x.csv"),
        ("~no\0user/x.csv", "~no\\x00user"),
        ("x" * 5000, "too long"),
    ],
)
def test_places_that_cannot_be_read(place: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    package = {"s3": "s3fs", "https": "aiohttp", "sftp": "paramiko"}.get(place.partition("://")[0])
    if package and find_spec(package):
        pytest.skip(f"{package} is installed")
    assert said in refused(capsys, "train", place)


@pytest.mark.parametrize("command", ["train digits_mixer", "predict a.png"])
def test_results_are_not_written_to_other_machines(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Into a folder named s3: either."""
    assert "--out s3://bucket/x.csv: only " in refused(capsys, *command.split(), "--out", "s3://bucket/x.csv")


@pytest.mark.parametrize("place", ["~no-such-user/a.png", "~no\0user/a.png"])
def test_homes_of_users_that_do_not_exist(place: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no file ~no" in refused(capsys, "predict", str(model), place)
    refused(capsys, "predict", place, "a.png")
    refused(capsys, "eval", str(model), place)


def test_text_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allmlp.data.text_files.SLACK_BYTES", 2**16)
    (tmp_path / "bomb.txt.gz").write_bytes(gzip.compress(b"a b\n" * 2**22))
    with pytest.raises(UserError, match="200 times its size"):
        list(read_documents([str(tmp_path / "bomb.txt.gz")]))


def test_a_zst_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    text = "\n\n".join(f"document {number}" for number in range(20_000)).encode()
    packed = zstandard.ZstdCompressor().compress(text)
    (tmp_path / "a.txt.zst").write_bytes(packed + zstandard.ZstdCompressor().compress(text))
    assert sum(1 for _ in read_documents([str(tmp_path / "a.txt.zst")])) == 39_999
    (tmp_path / "a.txt.zst").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UserError, match="cut off"):
        list(read_documents([str(tmp_path / "a.txt.zst")]))


def test_hostile_tokenizers(tmp_path: Path) -> None:
    content = json.loads(TokenizerConfig(vocab_size=50).build(["the cat sat", "on a mat"]).to_json())
    split = {"type": "Split", "pattern": {"Regex": "(?:(?:a|aa)+)+$"}, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "pre_tokenizer": split}), encoding="utf8")
    with pytest.raises(UserError, match="the tokenizer fails on this text"):
        load_tokenizer(tmp_path).encode(["a" * 60 + "b"])
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    grown = {**content, "normalizer": {"type": "Sequence", "normalizers": [grow] * 6}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(grown), encoding="utf8")
    with pytest.raises(UserError, match="times as long"):
        load_tokenizer(tmp_path)
    other = {**content, "model": {**content["model"], "unk_token": "[NONE]"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(other), encoding="utf8")
    with pytest.raises(UserError, match=r"the tokenizer fails on this text: .*Missing"):
        load_tokenizer(tmp_path).encode(["Ω"])


def test_a_word_of_a_megabyte_does_not_slow_the_tokenizer_down() -> None:
    start = time.monotonic()
    TokenizerConfig(vocab_size=60).build(["x" * 2**20 + "\ud800", "the cat sat on a mat"])
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(("task", "command"), [("classes", ["predict"]), ("causal", ["generate", "--prompt"])])
def test_half_a_pair_of_surrogates(
    task: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As bytes that are not UTF-8 arrive from a shell."""
    folder = text_folder(tmp_path / task, task)
    with pytest.raises(SystemExit) as caught:
        main([command[0], str(folder), *command[1:], "the \ud800 cat"])
    found = capsys.readouterr()
    assert not caught.value.code and found.out and not CONTROL.search(found.out + found.err)


def test_resizing_leaves_room_for_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"width": 16, "depth": 1, "block.channel.hidden": 16}
    allmlp.save(allmlp.create("gmlp_base", vocab_size=20, seq_len=8, overrides=sizes, seed=0), tmp_path / "text")
    assert "at least 3" in refused(capsys, "resize", str(tmp_path / "text"), str(tmp_path / "out"), "--seq-len", "2")


# --- the command --------------------------------------------------------------------------------------------


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLMLP_DEBUG", "")
    with pytest.raises(SystemExit):
        main(["train", "nothing"])
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--debug", "train", "nothing"])
    found = capsys.readouterr().err
    assert "Traceback" in found and found.splitlines()[-1].startswith("error: 'nothing'")
    assert "allmlp --debug" in refused(capsys, "train", "nothing", "--debug")


def test_running_out_of_memory_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        torch.empty(2**60)

    monkeypatch.setattr("allmlp.resolve.resolve", fail)
    assert "out of memory" in refused(capsys, "train", "digits_mixer")


def test_of_several_processes_one_tells_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        report = tmp_path / str(rank) / "error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
        with pytest.raises(SystemExit) as caught:
            main(["train", "nothing", "--set", "x"])
        assert caught.value.code == 2 and "error: --set" in json.loads(report.read_text())["message"]["message"]
        told.append(capsys.readouterr().err.count("\n"))
    assert told == [1, 0]


@pytest.mark.parametrize(
    ("ended", "status", "said"),
    [(2, 2, ""), (130, 130, ""), (1, 1, "error: process 1 ended with exit status 1\n"), (-9, 137, "by SIGKILL\n")],
)
def test_a_failed_launch_is_one_line(
    ended: int, status: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing where the process has said why; torch's arguments are those of torchrun -m allmlp."""
    given = []

    def fail(arguments: Namespace) -> None:
        given.append((arguments.nproc_per_node, arguments.module, arguments.training_script))
        given.append(arguments.training_script_args)
        raise ChildFailedError("allmlp", {1: ProcessFailure(1, 123, ended, "")})

    run_processes = torch.distributed.run.run
    monkeypatch.setattr("torch.distributed.run.run", fail)
    monkeypatch.setattr("logging.disable", lambda level: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as caught:
        main(["launch", "--nproc-per-node", "2", "train", "x", "--set", "seed=1"])
    found = capsys.readouterr()
    assert caught.value.code == status and found.err.endswith(said) and bool(found.err) == bool(said)
    assert given == [("2", True, "allmlp"), ["train", "x", "--set", "seed=1"]]
    assert "--nproc" in refused(capsys, "launch", "--nproc", "2", "--no-such-option", "train")
    monkeypatch.setattr("torch.distributed.run.run", run_processes)
    assert "two" in refused(capsys, "launch", "--nproc-per-node", "two", "train", "digits_mixer")


def test_a_row_that_a_study_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert "has no row 'nothing'" in refused(capsys, "study", "permuted", "--rows", "nothing", "--out", str(out))
    assert not out.exists()


@pytest.mark.slow
def test_a_mistake_in_several_processes_is_one_line() -> None:
    command = [sys.executable, "-m", "allmlp", "launch", "--nproc-per-node", "2", "train", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and re.fullmatch(r"error: 'nothing' [^\n]+\n", done.stderr), done.stderr


# --- runs ---------------------------------------------------------------------------------------------------


def test_records_survive_a_kill_while_later_ones_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"kind": "train", "step": step}) + "\n" for step in (1, 2, 3)))
    child = os.fork()
    if not child:
        try:
            # The process dies where the file is truncated or replaced.
            sys.addaudithook(lambda event, given: os._exit(9) if is_written(event, given) else None)
            drop_after(file, 2)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert {1, 2} <= {record["step"] for record in read_metrics(file)}


def is_written(event: str, given: tuple[object, ...]) -> bool:
    if event == "open" and str(given[0]).endswith("metrics.jsonl") and "w" in str(given[1]):
        # Truncated, as it is when the call returns.
        Path(str(given[0])).unlink()
        return True
    return event == "os.rename"


class Steep(torch.nn.Module):
    """A finite loss whose gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Losses:
        return Losses(self.weight.abs().sqrt().sum() + x.sum(), {})


def test_a_step_with_gradients_that_are_not_finite_is_skipped() -> None:
    task = Steep()
    task.weight.data.fill_(0.0)
    step = TrainStep(task, torch.optim.SGD(task.parameters(), 0.1), World(0, 1, torch.device("cpu")), skip_nan=True)  # type: ignore[arg-type]
    step([(torch.ones(1),)])
    assert task.weight.isfinite().all()


def test_a_run_does_not_end_with_a_ruined_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"budget.steps": 2, "nan": "skip", "model.depth": 1, "ema_decay": None}
    monkeypatch.setattr(TrainStep, "update", ruin)
    with pytest.raises(UserError, match="no longer finite"):
        train(override_all(runs("digits_mixer")["digits_mixer"], changes), tmp_path / "out", "cpu")
    assert not (tmp_path / "out" / "model.safetensors").exists()


def ruin(step: TrainStep, losses: Losses) -> None:
    with torch.no_grad():
        next(step.task.parameters()).fill_(torch.nan)


class Numbered(EncodedImages):
    """Image number 3 is corrupt; the others are as bright as their number."""

    def read(self, index: int) -> bytes:
        target = io.BytesIO()
        Image.new("RGB", (4, 4), (10 * index,) * 3).save(target, "PNG")
        return b"damaged" if index == 3 else target.getvalue()

    def name(self, index: int) -> str:
        return str(index)


def test_a_corrupt_image_is_replaced_by_one_of_the_same_subset() -> None:
    images = Numbered(torch.arange(8), (4, 4), Decode(), 1)
    odd = subset(images, torch.tensor([1, 3, 5, 7]))
    assert odd.fetch(torch.arange(4)).labels.tolist() == [1, 5, 5, 7]
    assert subset(odd, torch.tensor([0, 1])).fetch(torch.arange(2)).labels.tolist() == [1, 1]
    assert images.fetch(torch.tensor([3])).labels.tolist() == [4]
