"""Forecasts of ETT by several models in one protocol: that of the recipe `ett_patchtsmixer`, or of `ett_dlinear` for
linear models. What is tested are the weights that are best on the validation part.

python benchmarks/forecasting.py data/timeseries --out forecasting.json              all cells, three seeds
python benchmarks/forecasting.py data/timeseries --models patchtsmixer dlinear --datasets ETTh1 --horizons 96 --seeds 1
python benchmarks/forecasting.py data/timeseries --speed --device cpu --out speed.json

Cells run in several processes that share the device, those of the first seed first, until `--minutes` are over. Rows
are written after every cell, and cells that the file already holds are not measured again. `--speed` measures windows
per second of training and of inference, ours and transformers' PatchTSMixer of the same sizes in turns; of inference
also ours in allmlp.fast(measure=True) and in int8, and theirs compiled.
"""

from __future__ import annotations

import argparse
import copy
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
from torch import Tensor

from allmlp.device import own_device
from allmlp.files import write_json_atomically
from allmlp.inference import fast
from allmlp.models.zoo import create, preset
from allmlp.optim import AdamW
from allmlp.provenance import environment
from allmlp.recipes import runs
from allmlp.record import read_record
from allmlp.run import Budget
from allmlp.training import train

LINEAR = ("dlinear", "nlinear")
MODELS = ("patchtsmixer", "hf:patchtsmixer", "hf:patchtst", "dlinear", "nlinear", "resmlp_series", "gmlp_series")
Side = tuple[torch.nn.Module, Tensor]
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
                write_json_atomically(options.out, record)
    print(summary(record["rows"]))


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
    for horizon, batch_size in product(options.horizons, options.batch_sizes):
        for mode, models in sides(horizon, batch_size, options.seq_len, device).items():
            rounds = {name: [] for name in models}
            for _ in range(options.rounds + 1):  # the first warms up
                for name, (model, x) in models.items():
                    rounds[name].append(rate(model, x, mode == "training", device))
            rates = {name: found[1:] for name, found in rounds.items()}
            record["rows"].append({"horizon": horizon, "batch_size": batch_size, "mode": mode, "rates": rates})
            medians = ", ".join(f"{name} {statistics.median(found):.0f}" for name, found in rates.items())
            print(f"horizon {horizon}, batch {batch_size}, {mode}, windows/s: {medians}", flush=True)
            write_json_atomically(options.out, record)


def sides(horizon: int, batch_size: int, seq_len: int, device: torch.device) -> dict[str, dict[str, Side]]:
    """What is compared, by mode: ours and transformers' as they are and at their fastest, on the same windows."""
    names = {"ours": "patchtsmixer", "transformers": "hf:patchtsmixer"}
    build = partial(create, seq_len=seq_len, horizon=horizon, device=device)
    training = {side: build(name).train() for side, name in names.items()}
    ours, theirs = (build(name).eval() for name in names.values())
    (x,) = ours.dummy_inputs(batch_size)
    compiled = copy.deepcopy(theirs)
    compiled.compile()
    inference = {"ours": ours, "ours, fast": fast(ours, measure=True, batch_size=batch_size)}
    if device.type == "cpu":
        inference["ours, int8"] = fast(ours, torch.int8)
    inference |= {"transformers": theirs, "transformers, compiled": compiled}
    found = {"inference": inference, "training": training}
    return {mode: {side: (model, x) for side, model in models.items()} for mode, models in found.items()}


def rate(model: torch.nn.Module, x: Tensor, training: bool, device: torch.device) -> float:
    """Windows per second of one call, or of one step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if training else None
    # One thread is timed by the processor's clock, which other programs do not change.
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    repeats, clock = max(3, 64 // len(x)), time.process_time if alone else time.perf_counter
    start = clock()
    for _ in range(repeats):
        with torch.set_grad_enabled(training):
            output = model(x)
        if optimizer is not None:
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return repeats * len(x) / (clock() - start)


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
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=(1, 32), help="of --speed")
    parser.add_argument("--rounds", type=int, default=7, help="of --speed")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, default=Path("forecasting.json"))
    options = parser.parse_args()
    (speed if options.speed else compare)(options)


if __name__ == "__main__":
    main()
