"""Forecasts of ETT by several models in one protocol: that of the recipe `ett_patchtsmixer`, or of `ett_dlinear` for
linear models. What is tested are the weights that are best on the validation part.

python benchmarks/forecasting.py data/timeseries --out forecasting.json              all cells, three seeds
python benchmarks/forecasting.py data/timeseries --models patchtsmixer dlinear --datasets ETTh1 --horizons 96 --seeds 1
python benchmarks/forecasting.py data/timeseries --speed --device cpu --out speed.json

Cells run in several processes that share the device, those of the first seed first, until `--minutes` are over. Rows
are written after every cell, and cells that the file already holds are not measured again. `--speed` measures windows
per second of training and of inference, ours and transformers' PatchTSMixer of the same sizes in turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from allmlp.device import own_device
from allmlp.files import write_atomically
from allmlp.models.zoo import create, preset
from allmlp.optim import AdamW
from allmlp.provenance import environment
from allmlp.recipes import runs
from allmlp.record import read_record
from allmlp.run import Budget
from allmlp.training import train

LINEAR = ("dlinear", "nlinear")
MODELS = ("patchtsmixer", "hf:patchtsmixer", "hf:patchtst", "dlinear", "nlinear", "resmlp_series", "gmlp_series")
DATASETS, HORIZONS = ("ETTm1", "ETTh1", "ETTh2"), (96, 192, 336, 720)


class Cell(NamedTuple):
    model: str
    dataset: str
    horizon: int
    seq_len: int
    seed: int


def measure(cell: Cell, data: str, device: str | None, changes: dict[str, Any]) -> dict[str, Any]:
    """Train and test one model."""
    recipe = "ett_dlinear" if cell.model in LINEAR else "ett_patchtsmixer"
    (run,) = runs(f"{recipe}/{cell.dataset.lower()}_{cell.horizon}").values()
    model = preset(cell.model).spec.configure(seq_len=cell.seq_len, horizon=cell.horizon)
    run = run.replace(model=model, data=run.data.replace(path=data, seq_len=cell.seq_len), seed=cell.seed, **changes)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        train(run, folder, device)
        result = read_record(Path(folder))["result"]
    commit = {"commit": environment(own_device(device))["commit"]}
    return {**cell._asdict(), "lr": run.optim.lr, **result, "wall_seconds": time.monotonic() - start, **commit}


def work(job: tuple[Cell, str, str | None, dict[str, Any]], results: Connection) -> None:
    torch.set_num_threads(1)
    try:
        results.send(measure(*job))
    except Exception as reason:  # one cell less, not all
        results.send({**job[0]._asdict(), "error": f"{type(reason).__name__}: {reason}"})


def in_process(job: tuple[Cell, str, str | None, dict[str, Any]], end: float) -> dict[str, Any] | None:
    """The row of one cell, from a process of its own; None if it is not there at the time `end`."""
    if time.monotonic() > end:
        return None
    context = multiprocessing.get_context("spawn")
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(job, sender))
    process.start()
    sender.close()
    try:
        return results.recv() if results.poll(max(end - time.monotonic(), 0.0)) else None
    except EOFError:
        return {**job[0]._asdict(), "error": "the process has ended without a result"}
    finally:
        process.kill()  # a run would go on to save itself when it is asked to end
        process.join()


def compare(options: argparse.Namespace) -> None:
    record = read_json(options.out) or {"environment": environment(own_device(options.device)), "rows": []}
    done = {Cell(*(row[name] for name in Cell._fields)) for row in record["rows"] if "error" not in row}
    cells = [
        Cell(model, dataset, horizon, options.seq_len, seed)
        for seed, dataset, horizon, model in product(
            range(options.seeds), options.datasets, options.horizons, options.models
        )
    ]
    changes: dict[str, Any] = {"budget": Budget(steps=options.steps)} if options.steps else {}
    if options.lr:
        changes["optim"] = AdamW(lr=options.lr, weight_decay=0.01)
    jobs = [(cell, options.data, options.device, changes) for cell in cells if cell not in done]
    end = time.monotonic() + 60 * options.minutes
    with ThreadPoolExecutor(options.processes) as pool:
        for row in pool.map(partial(in_process, end=end), jobs):
            if row is not None:
                record["rows"].append(row)
                save(options.out, record)
    print(summary(record["rows"]))


def save(file: Path, record: dict[str, Any]) -> None:
    text = json.dumps(record, indent=1)
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf8"))


def read_json(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text(encoding="utf8")) if file.is_file() else None


def summary(rows: list[dict[str, Any]]) -> str:
    """Mean test MSE and MAE of each model over the seeds, and over horizons; the naive forecasts below."""
    lines = [f"{'':24}{'horizon':>8}{'seeds':>6}{'MSE':>9}{'+-':>8}{'MAE':>9}{'validation MSE':>16}"]
    rows = [row for row in rows if "error" not in row]
    for dataset, model in product(DATASETS, dict.fromkeys(row["model"] for row in rows)):
        means = []
        for horizon in HORIZONS:
            found = [row for row in rows if (row["dataset"], row["model"], row["horizon"]) == (dataset, model, horizon)]
            if not found:
                continue
            mse = [row["test"]["mse"] for row in found]
            mae, val = (statistics.mean(row[part][name] for row in found) for part, name in PARTS)
            spread = statistics.stdev(mse) if len(mse) > 1 else 0.0
            means.append(statistics.mean(mse))
            lines.append(
                f"{dataset + ' ' + model:24}{horizon:8}{len(mse):6}{means[-1]:9.4f}{spread:8.4f}{mae:9.4f}{val:16.4f}"
            )
        if len(means) == len(HORIZONS):
            lines.append(f"{dataset + ' ' + model:24}{'mean':>8}{'':6}{statistics.mean(means):9.4f}")
    for dataset, horizon in product(DATASETS, HORIZONS):
        found = [row for row in rows if (row["dataset"], row["horizon"]) == (dataset, horizon)]
        for name in ("last_value", "seasonal_naive") if found else ():
            test = found[0]["test"]
            lines.append(
                f"{dataset + ' ' + name:24}{horizon:8}{'':6}{test[name + '_mse']:9.4f}{'':8}{test[name + '_mae']:9.4f}"
            )
    return "\n".join(lines)


PARTS = (("test", "mae"), ("validation", "mse"))


# --- speed --------------------------------------------------------------------------------------------------


def speed(options: argparse.Namespace) -> None:
    device = own_device(options.device)
    record: dict[str, Any] = {"environment": environment(device), "threads": torch.get_num_threads(), "rows": []}
    pair = ("patchtsmixer", "hf:patchtsmixer")
    for horizon in options.horizons:
        models = {name: create(name, seq_len=options.seq_len, horizon=horizon, device=device) for name in pair}
        rounds: dict[str, list[float]] = {f"{name} {mode}": [] for name in pair for mode in ("inference", "training")}
        for _ in range(options.rounds + 1):  # the first warms up
            for (name, model), mode in product(models.items(), ("inference", "training")):
                rounds[f"{name} {mode}"].append(rate(model, mode == "training", options.batch_size, device))
        for mode in ("inference", "training"):
            ours, theirs = (rounds[f"{name} {mode}"][1:] for name in pair)
            ratio = statistics.median(a / b for a, b in zip(ours, theirs))
            record["rows"].append({"horizon": horizon, "mode": mode, "ours": ours, "theirs": theirs, "ratio": ratio})
            print(f"horizon {horizon}, {mode}: {statistics.median(ours):.0f} windows/s, {ratio:.2f} x transformers")
    save(options.out, record)


def rate(model: torch.nn.Module, training: bool, batch_size: int, device: torch.device) -> float:
    """Windows per second of one call, or of one step of AdamW."""
    (x,) = model.train(training).dummy_inputs(batch_size)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    # One thread is timed by the processor's clock, which other programs do not change.
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    repeats, clock = 3, time.process_time if alone else time.perf_counter
    start = clock()
    for _ in range(repeats):
        with torch.set_grad_enabled(training):
            output = model(x)
        if training:
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return repeats * batch_size / (clock() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder with ETTh1.csv, ETTh2.csv and ETTm1.csv, which may be compressed")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--datasets", nargs="+", default=DATASETS)
    parser.add_argument("--horizons", nargs="+", type=int, default=HORIZONS)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, help="instead of the rate of the protocol")
    parser.add_argument("--steps", type=int, help="instead of the epochs of the recipe")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--batch-size", type=int, default=64, help="of --speed")
    parser.add_argument("--rounds", type=int, default=7, help="of --speed")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, default=Path("forecasting.json"))
    options = parser.parse_args()
    (speed if options.speed else compare)(options)


if __name__ == "__main__":
    main()
