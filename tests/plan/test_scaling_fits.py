"""Scaling laws: the fit finds a known one, its intervals cover, and held-out runs are predicted from smaller ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import allmlp
from allmlp.cli import main
from allmlp.cli.plan import print_scaling
from allmlp.files import RUN
from allmlp.models.cost import measure
from allmlp.models.resmlp import resmlp
from allmlp.plan.scaling import Law, Point, check_comparable, fit, fit_points, read_point, resample, scaling
from allmlp.run import Budget
from allmlp.training import train
from train.runs import small

SIZES = np.array([1e12, 4e12, 1e13, 7e13, 3e14, 2e15])


@pytest.mark.parametrize(("floor", "scale", "alpha"), [(1.7, 40.0, 0.15), (0.0, 90.0, 0.1), (2.5, 3.0, 0.0)])
def test_a_law_without_noise_is_found(floor: float, scale: float, alpha: float) -> None:
    """Also without a floor, and without a slope (alpha 0: a constant)."""
    y = floor + scale * SIZES**-alpha
    law = fit(SIZES, y)
    assert law(SIZES) == pytest.approx(y, rel=2e-3)
    assert float(law(2e17)) == pytest.approx(floor + scale * 2e17**-alpha, rel=0.01)
    if alpha > 0 and floor:
        assert law.alpha == pytest.approx(alpha, rel=0.03) and law.floor == pytest.approx(floor, rel=0.03)


def test_the_border_of_the_quadrant() -> None:
    """Neither E nor A becomes negative: rising losses give a constant, losses below a power law no floor."""
    rising = fit(SIZES, np.linspace(1, 2, 6))
    assert rising.scale == 0 and 1 < rising.floor < 2
    assert fit(SIZES, 60 * SIZES**-0.1 - 1).floor == 0


@pytest.mark.slow
def test_intervals_cover() -> None:
    """Of 30 noisy samples of a law, most 95 % intervals contain the next loss, and not all are wide."""
    random, law, inside, widths = np.random.default_rng(0), Law(1.7, 40.0, 0.15, 1.0), 0, []
    for _ in range(30):
        y = law(SIZES) * (1 + 0.01 * random.standard_normal(6))
        laws, noise = resample(fit(SIZES, y), SIZES, y, random, 150)
        low, high = np.percentile([one(1e16) * (1 + extra) for one, extra in zip(laws, noise)], [2.5, 97.5])
        inside += low <= law(1e16) * (1 + 0.01 * random.standard_normal()) <= high
        widths.append(float(high - low))
    assert inside >= 24 and np.median(widths) < 0.5


def test_too_few_sizes() -> None:
    with pytest.raises(allmlp.UserError, match="at least 4 sizes, there are 3"):
        fit(np.array([1.0, 2.0, 2.0, 3.0]), np.array([3.0, 2.0, 2.0, 1.0]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Copies of one small run, with other models and the losses of a known law."""
    place = tmp_path_factory.mktemp("runs")
    out = place / "original"
    train(small(budget=Budget(steps=2), batch_size=32), out, "cpu")
    record, made = json.loads((out / RUN).read_text()), []
    for depth in range(1, 7):
        folder = place / f"depth{depth}"
        spec = resmlp(depth, 16, 0.1, patch_size=4, img_size=8, num_classes=4).configure(in_chans=1)
        allmlp.save(allmlp.create(spec), folder)
        flops = 6 * measure(spec).macs * 64
        record["result"]["test"]["loss"] = 1.2 + 30 * flops**-0.3
        (folder / RUN).write_text(json.dumps(record))
        made.append(folder)
    return made


@pytest.mark.slow
def test_points_of_runs(runs: list[Path]) -> None:
    """FLOPs, parameters and examples of a run: two steps of 32 examples."""
    point = read_point(runs[1])
    spec = resmlp(2, 16, 0.1, patch_size=4, img_size=8, num_classes=4).configure(in_chans=1)
    assert point.examples == 64 and point.flops == 6 * measure(spec).macs * 64
    assert point.parameters == sum(weight.numel() for weight in allmlp.load(runs[1]).parameters())


def test_held_out_runs_are_predicted_from_smaller_ones(runs: list[Path]) -> None:
    found = scaling(runs[::-1], target=1e9)
    assert [point.name for point in found.points] == [folder.name for folder in runs]
    assert found.held_out.keys() == {"depth5", "depth6"} and found.held_out_error < 1e-3
    assert found.next.loss == pytest.approx(1.2 + 30 * 1e9**-0.3, rel=0.01)
    assert found.next.low <= found.next.loss <= found.next.high
    assert found.alpha_range[0] <= found.law.alpha <= found.alpha_range[1]
    assert scaling(runs, "parameters").held_out_error < 0.01


def test_runs_of_equal_names_are_told_apart(runs: list[Path], tmp_path: Path) -> None:
    """Rows of several tables: a/gmlp, b/gmlp, ..."""
    copies = [Path(shutil.copytree(folder, tmp_path / folder.name / "row")) for folder in runs]
    found, expected = scaling(copies), scaling(runs)
    assert [*found.held_out.values()] == [*expected.held_out.values()] and len(found.held_out) == 2
    assert [*found.held_out] == [str(copies[4]), str(copies[5])]
    with pytest.raises(allmlp.UserError, match="depth3 is named twice"):
        scaling([*runs, runs[2]])


def test_the_command(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    def command(*options: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["plan", "--from", *map(str, runs), *options])
        assert not caught.value.code
        return capsys.readouterr().out

    text, found = command("--at", "1e9"), json.loads(command("--at", "1e9", "--json"))
    assert "held out: 2 runs predicted from smaller ones" in text
    assert f"at 1e+09 flops: loss {found['prediction']['loss']:.4f}" in text
    law = found["E"] + found["A"] * 1e9 ** -found["alpha"]
    assert law == pytest.approx(found["prediction"]["loss"])


def test_a_folder_stands_for_its_runs(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in runs[:4]:
        shutil.copytree(folder, tmp_path / folder.name)
    for target in ([str(tmp_path)], [*map(str, runs[:4])]):
        with pytest.raises(SystemExit) as caught:
            main(["plan", "--from", *target])
        assert not caught.value.code
    printed = capsys.readouterr().out
    assert printed[: len(printed) // 2] == printed[len(printed) // 2 :]


def test_the_guide_shows_what_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    docs = Path(__file__).parents[2] / "docs"
    record = json.loads((docs / "logs" / "scaling_digits.json").read_text(encoding="utf8"))
    print_scaling(fit_points([Point(**point) for point in record["runs"]]))
    printed = "\n".join(f"    {line}".rstrip() for line in capsys.readouterr().out.splitlines())
    assert printed in (docs / "guides" / "scale.md").read_text(encoding="utf8")


def test_what_cannot_be_fitted(runs: list[Path], tmp_path: Path) -> None:
    def changed(name: str, change: dict[str, object]) -> Path:
        record = json.loads((runs[0] / RUN).read_text())
        folder = allmlp.save(allmlp.load(runs[0]), tmp_path / name)
        (folder / RUN).write_text(json.dumps(record | change))
        return folder

    with pytest.raises(allmlp.UserError, match="has no loss to fit"):
        scaling([*runs, changed("unfinished", {"result": None})])
    with pytest.raises(allmlp.UserError, match="test splits differ"):
        scaling([*runs, changed("other", {"data": {"train": 64, "test": 7}})])
    record = json.loads((runs[0] / RUN).read_text())
    other_content = {"data": record["data"] | {"sha256": "0" * 64}}
    with pytest.raises(allmlp.UserError, match=r"their data differ \(data.sha256 in run.json\)"):
        scaling([*runs, changed("other_content", other_content)])
    check_comparable([*runs, changed("no_checksum", {"data": {"train": 64, "test": record["data"]["test"]}})])
    half = {"run": record["run"] | {"train_fraction": 0.5}}
    check_comparable([*runs, changed("half", other_content | half)])  # the checksum is that of other training examples
    for field, other_test in (
        ("val_size", {"val_size": 9}),
        ("data.examples", {"data": record["run"]["data"] | {"examples": 65}}),
    ):
        run = {"run": record["run"] | {"train_fraction": 0.5} | other_test}
        with pytest.raises(allmlp.UserError, match=f"cannot be compared: {field} differs"):
            check_comparable([*runs, changed(field, other_content | run)])
    with pytest.raises(allmlp.UserError, match="is not a run"):
        scaling([*runs, allmlp.save(allmlp.load(runs[0]), tmp_path / "model")])
    with pytest.raises(allmlp.UserError, match="cannot predict the loss at -1"):
        scaling(runs, target=-1.0)
