"""The `allmlp plan` command."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allmlp.recipes import runs
from allmlp.spec import override
from command import run

SCALE = (Path(__file__).parents[2] / "docs" / "guides" / "scale.md").read_text(encoding="utf8")

EXAMPLE = ["plan", "mixer_h14", "--samples", "300e6", "--epochs", "14", "--gpus", "1024"]


@pytest.mark.slow
def test_printed_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *EXAMPLE)
    assert code == 0 and max(map(len, out.splitlines())) <= 100
    for word in (
        "DDP",
        "FSDP2",
        "weights",
        "optimizer state",
        "activations",
        "network",
        "object store",
        "goodput",
        "GPU-days",
    ):
        assert word in out
    assert "MTBF         49.5 h" in out and "1,025,391 steps" in out and "5.19 GB" in out


@pytest.mark.parametrize("columns", [80, 120])
def test_help_is_readable(columns: int) -> None:
    """Option names are whole and descriptions have room."""
    environment = os.environ | {"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns)}
    command = [sys.executable, "-m", "allmlp", "plan", "--help"]
    out = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True, env=environment).stdout
    lines = out.splitlines()
    assert max(map(len, lines)) <= columns
    assert "--grad-checkpointing / --no-grad-checkpointing" in out and "--network-bandwidth" in out
    for text in ("Size of the training set, e.g. 300e6.", "Recompute blocks in the backward pass."):
        assert any(text in line for line in lines), "descriptions have room for whole phrases"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *EXAMPLE, "--json", "--mfu", "0.4", "--seed", "7")
    found = json.loads(out)
    assert code == 0 and found["mfu"] == 0.4 and found["strategies"]["DDP"]["memory"]["weights"] == 4 * 432_350_952
    hours = found["hours_simulated"]
    assert found["hours"] == pytest.approx(hours["mean"], abs=3 * hours["error"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["mixer_h14", "--samples", "1e6", "--gpus", "0"], "error: --gpus must be a whole number"),
        (["mixer_h15", "--samples", "1e6"], "unknown model or recipe 'mixer_h15'; did you mean 'mixer_h14'"),
        ([str(Path(__file__).parent), "--samples", "1e6"], "is neither a model nor a recipe; losses of finished runs"),
        (["mixer_h14"], "pass --samples 300e6"),
        (["mixer_h14", "--samples", "0"], "error: --samples must be"),
        (["mixer_h14", "--samples", "1e6", "--epochs", "0"], "error: --epochs must be"),
        (["mixer_h14", "--samples", "1e6", "--gpus", "8192"], "less than one example"),
        (["mixer_h14", "--samples", "1e6", "--gpu", "v100"], "--gpu must be 'h200' or 'h100' or 'a100'"),
        (["mixer_h14", "--samples", "1e6", "--mfu", "1.5"], "error: --mfu must be"),
        (["mixer_h14", "--samples", "1e6", "--sample-bytes", "-5"], "error: --sample-bytes must be"),
        (["cifar10_gmlp", "--grad-accum-steps", "0"], "error: --grad-accum-steps must be"),
        (["mixer_h14", "--samples", "1e6", "--optim", "adam"], "did you mean 'adamw'"),
        (["mixer_h14", "--samples", "1e6", "--sharding", "zero"], "'ddp' or 'fsdp'"),
        (["mixer_h14", "--samples", "1e6", "--calibrate", "mixer_s16"], "need --check"),
        (["mixer_nano", "--check", "--samples", "1e6"], "--check runs steps on one device of this machine: leave out"),
        (["runs/a", "--from", "--gpus", "4"], "--from fits the losses of finished runs: leave out --gpus"),
        (["mixer_nano", "--check", "--gpus", "4"], "--check runs steps on one device of this machine: leave"),
        (["mixer_nano", "--check", "--gpu", "a100"], "leave out --gpu"),
        (["mixer_nano", "--check", "--sharding", "fsdp"], "leave out --sharding"),
        (["mixer_nano", "--check", "--grad-accum-steps", "2"], "leave out --grad-accum-steps"),
        *(
            ([target, how, option, value], f"leave out {option}")
            for target, how in (("mixer_nano", "--check"), ("runs/a", "--from"))
            for option, value in (("--storage-bandwidth", "2"), ("--restart-minutes", "0"), ("--simulations", "500"))
        ),
        (["mixer_nano", "--check", "--seed", "0"], "leave out --seed"),
        (["runs/a", "--from", "--seed", "-3"], "'--seed'"),
        (["mixer_nano", "--check", "--device", "cpu", "--mfu", "0.3"], "the peak speed of a CPU is unknown"),
        (["mixer_nano", "--check", "--calibrate", "mixer_nano", "--mfu", "0.3"], "leave out --mfu"),
        (["mixer_nano", "--check", "--device", "cpu", "--batch-size", "0"], "error: --batch-size must be"),
        (["mixer_nano", "--by", "flops", "--samples", "1e6"], "--by and --at need --from"),
        (["hf:resnet50", "--samples", "1e6"], "no measured MFU"),
        (["cifar10_ablations"], "contains several runs"),
        (["wiki_gmlp"], "pass --samples N --epochs E"),
        (["sst2"], "no model of its own"),
        (["mixer_h14", "--samples", "1e6", "--gpus", "4000000", "--batch-size", "4000000"], "would never finish"),
    ],
)
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
    code, out, err = run(capsys, "plan", *arguments)
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("error: ") and reason in err


@pytest.mark.parametrize("option", ["--storage-bandwidth", "--network-bandwidth", "--restart-minutes"])
@pytest.mark.parametrize("value", ["-1", "inf", "nan"])
def test_limits_are_in_the_units_of_the_options(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    code, _, err = run(capsys, "plan", "mixer_h14", "--samples", "1e6", option, value)
    assert code == 2 and err.count("\n") == 1 and option in err and "Job." not in err


@pytest.mark.slow
def test_check_against_real_steps(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--check", "--gpus", "1", "--batch-size", "2", "--device", "cpu", "--json"]
    code, out, _ = run(capsys, "plan", "resmlp_nano", *options, "--calibrate", "mixer_nano")
    found = json.loads(out)
    assert code == 0 and "mixer_nano" in found["basis"]
    assert found["rows"]["optimizer state"]["error"] == 0 and abs(found["rows"]["peak"]["error"]) < 0.1
    assert found["rows"]["step time"]["predicted"] > 0
    code, out, _ = run(capsys, "plan", "resmlp_nano", *options[:-1])
    assert code == 0 and "--calibrate MODEL" in out and "activations" in out


def test_check_takes_the_settings_of_a_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number format, but one micro-batch: the batch may be smaller than the recipe's number of them."""
    given: list[Any] = []
    monkeypatch.setattr("allmlp.plan.check.check", lambda *arguments: given.append(arguments) or [])
    code, _, err = run(capsys, "plan", "imagenet_resmlp_s12", "--check", "--batch-size", "1", "--device", "cpu")
    assert code == 0, err
    code, _, err = run(capsys, "plan", "finetune_mixer_b16/cifar10", "--check", "--batch-size", "1", "--device", "cpu")
    assert code == 0, err
    (*_, first_half), (*_, other_half) = given
    assert not first_half and other_half, "ResMLP is trained in float32"


def test_docs_show_the_printed_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    (command, shown), *others = re.findall(r"^    \$ allmlp (.*)\n((?:(?:    .*)?\n)+)", SCALE, re.MULTILINE)
    code, out, _ = run(capsys, *command.split())
    assert code == 0 and not others
    assert [line.rstrip() for line in out.splitlines()] == [line[4:].rstrip() for line in shown.rstrip().splitlines()]


def test_docs_name_recipes_and_fields() -> None:
    lines = [
        line.partition("#")[0] for line in SCALE.splitlines() if line.startswith("    ") and "allmlp train " in line
    ]
    assert len(lines) >= 4
    for line in lines:
        name, *options = shlex.split(line.partition("allmlp train ")[2])
        for option, value in itertools.pairwise([name, *options]):
            if option == "--set":
                for made in runs(name).values():
                    override(made, *value.split("=", 1))
    (made,) = runs("imagenet_mixer_b16").values()
    for value in re.findall(r"^    --set (\S+)", SCALE, re.MULTILINE):
        override(made, *value.split("=", 1))


def test_help_needs_no_torch() -> None:
    code = """
import sys
from allmlp.cli import main
try: main(["plan", "--help"])
except SystemExit as end: assert not end.code
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
