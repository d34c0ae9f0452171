"""Has a change made anything slower or less accurate? Eight speeds and one training run against stored records.

python benchmarks/guard.py --data data/cifar10               on an H200
python benchmarks/guard.py --data data/cifar10 --update      write the records anew, with three training runs
python benchmarks/guard.py --device cpu --models mixer_nano --steps 20 --records guard.json --update     a trial

Cards of one kind differ by 6 %, so a speed is the FLOPs per second of a model as a share of those of a large matrix
product in the same run. It may be 3 % below its record. The training run has a fixed number of steps, so that its
accuracy does not depend on speed. It may be two standard errors below the mean m of its records:

    accuracy >= m - 2 s sqrt(1 + 1/n)        s: standard deviation of the n records, with other seeds

Without --data it trains on the embedded digits. The exit code is 1 if anything is below.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import allmlp
from allmlp.bench.runner import BenchOptions, Measurement, bench
from allmlp.errors import UserError
from allmlp.files import write_json_atomically
from allmlp.provenance import environment

RECORDS = Path(__file__).with_name("records") / "guard.json"
MODELS = "mixer_b16,resmlp_s24,gmlp_s16"
TOLERANCE = 0.03
STANDARD_ERRORS = 2
REPEATS = 3
"""Training runs of a record."""
STEPS = {"cifar10_gmlp": 2000, "digits_mixer": 720}
"""Chosen for about a minute on an H200, compilation included; of the digits, the whole recipe."""


def measure_speeds(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Share of the matrix peak of every cell."""
    models, cuda = tuple(options.models.split(",")), options.device == "cuda"
    batches, train = ((256,), "ours-cuda-graph") if cuda else ((2,), "ours-eager")
    plans: list[dict[str, Any]] = [
        {"models": models, "batches": batches, "backends": ("ours-fast",)},
        {"models": models[-1:], "batches": (1,), "backends": ("ours-fast",)},  # gMLP: the most layers
        {"models": models, "batches": batches, "backends": (train,), "train": True},
    ]
    if cuda:
        plans.append({"models": models[:1], "batches": batches, "backends": ("ours-fp8",)})
    common = {"device": options.device, "precision": "bfloat16" if cuda else "float32", "seconds": options.seconds}
    log = partial(print, file=sys.stderr, flush=True)
    rows: list[Measurement] = [row for plan in plans for row in bench(BenchOptions(**common, **plan), log).rows]
    peak = statistics.median(row.peak_flop_per_s for row in rows if row.peak_flop_per_s)
    return {
        f"{row.task} {row.model} {row.backend}, batch {row.batch}": {
            "share": row.flop_per_s / peak if row.flop_per_s else None,
            "rate_per_s": row.rate_per_s,
            "unit": row.unit,
            "note": row.note,
        }
        for row in rows
    }


def measure_accuracy(options: argparse.Namespace, seed: int) -> tuple[str, float]:
    """The recipe with its number of steps, and its accuracy on the test split."""
    recipe = "cifar10_gmlp" if options.data else "digits_mixer"
    steps = options.steps or STEPS[recipe]
    budget = {"budget.epochs": None, "budget.steps": steps, "eval_every": steps, "save_every": steps, "seed": seed}
    data = {"data.path": options.data} if options.data else {}
    with tempfile.TemporaryDirectory() as folder:
        found = allmlp.train(recipe, Path(folder) / "run", device=options.device, overrides={**budget, **data})
    return f"{recipe}, {steps} steps", found["accuracy"]


def read_records(file: Path, device: str) -> dict[str, Any]:
    if not file.exists():
        raise UserError(f"there are no records in {file}: run this with --update first")
    found = json.loads(file.read_text(encoding="utf8"))
    known = found["environment"]["device"]
    if known != device:
        raise UserError(f"{file} is of {known}, this is {device}: name another file by --records, first with --update")
    return found


def compare_speeds(found: dict[str, dict[str, Any]], records: dict[str, dict[str, Any]]) -> Iterator[tuple[bool, str]]:
    """For every cell whether it is as fast as its record, and a line."""
    for name, new in found.items():
        known = records.get(name, {}).get("share")
        if not new["share"] or not known:
            yield False, f"{name}: {new['note'] or 'no record'}"
        else:
            change, rate = new["share"] / known - 1, f"{new['rate_per_s']:,.0f} {new['unit']}/s"
            words = f"{new['share']:.1%} of the matrix peak, {change:+.1%} from {known:.1%}; {rate}"
            yield change >= -TOLERANCE, f"{name}: {words}"


def compare_accuracy(name: str, accuracy: float, record: list[float] | None) -> tuple[bool, str]:
    if not record:
        return False, f"{name}: no record"
    mean, error = statistics.mean(record), statistics.stdev(record) * (1 + 1 / len(record)) ** 0.5
    lowest = mean - STANDARD_ERRORS * error
    return accuracy >= lowest, f"{name}: accuracy {accuracy:.2%}, records {mean:.2%} with standard error {error:.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help="folder or archive of CIFAR-10 [default: the embedded digits]")
    parser.add_argument("--update", action="store_true", help="write the records instead of comparing with them")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds per speed")
    parser.add_argument("--steps", type=int, default=0, help="steps of the training run [default: the recipe's]")
    options = parser.parse_args()
    try:
        sys.exit(guard(options))
    except UserError as reason:
        sys.exit(f"error: {reason}")


def guard(options: argparse.Namespace) -> int:
    about = environment(torch.device(options.device))
    exists = options.records.exists()
    records = read_records(options.records, about["device"]) if exists or not options.update else {}
    speeds = measure_speeds(options)
    runs = [measure_accuracy(options, seed) for seed in range(REPEATS if options.update else 1)]
    name, accuracy = runs[0]
    if options.update:
        accuracies = {**records.get("accuracies", {}), name: [accuracy for _, accuracy in runs]}
        write_json_atomically(options.records, {"environment": about, "speeds": speeds, "accuracies": accuracies})
        print(f"records of {about['device']} in {options.records}")
        return 0
    found = [*compare_speeds(speeds, records["speeds"])]
    found.append(compare_accuracy(name, accuracy, records["accuracies"].get(name)))
    for good, words in found:
        print("ok   " if good else "BELOW", words)
    return int(not all(good for good, _ in found))


if __name__ == "__main__":
    main()
