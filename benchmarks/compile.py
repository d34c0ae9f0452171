"""Time to the first step and steady throughput of training, with the step compiled per block and as a whole.

python benchmarks/compile.py                                        an 18-block gMLP for text, batch 256
python benchmarks/compile.py --model gmlp_s16 --batch-size 128
python benchmarks/compile.py --recipe stdlib_gmlp                   also `allmlp train` from its start to the first step
python benchmarks/compile.py --model mixer_nano --batch-size 8 --device cpu --steps 3 --rounds 1     a trial

Every measurement is a process of its own, in alternating order. "first step" counts from the model being built (torch's
compiler is loaded then, as by `allmlp train` while it reads its data) to the end of the first step, with an empty
compile cache; "cached" is the same again with the cache that this has left. On a GPU the step runs in bfloat16 and is
recorded as a CUDA graph, as in `allmlp train`.

Python must be able to keep its bytecode (PYTHONDONTWRITEBYTECODE unset), or all of torch is compiled at every start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import torch

import allmlp
from allmlp.bench.training import build_task, examples
from allmlp.compilation import compile_task, load_compiler
from allmlp.optim import AdamW
from allmlp.parallel import World
from allmlp.train_step import RecordedStep, TrainStep

REGIONS = ("step", "blocks")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """In a child process: seconds to the first step, and examples per second after that."""
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    model = allmlp.create(options.model, seed=0, device=device)
    # What the benchmarks of `allmlp bench` hold for several packages, here for one model.
    alone: Any = SimpleNamespace(spec=model.spec, first=model, models={"ours": model})
    inputs = examples(alone, options.batch_size)
    task = build_task(model, alone).train()
    optimizer = AdamW().build(task)
    cuda = device.type == "cuda"
    train_step = TrainStep(task, optimizer, World(0, 1, device), torch.bfloat16 if cuda else torch.float32)
    step = RecordedStep(train_step) if cuda else train_step

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            losses = step([inputs])
        losses.total.item()
        return time.perf_counter() - start

    load_compiler()
    start = time.perf_counter()
    compile_task(task, options.region)
    seconds(1)
    first = time.perf_counter() - start
    seconds(5)  # records the CUDA graph
    return {"first": first, "rate": options.steps * options.batch_size / seconds(options.steps)}


def caching_in(folder: str) -> dict[str, str]:
    return {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}


def run(options: argparse.Namespace, region: str, cache: str) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--region", region]
    done = subprocess.run(command, env=caching_in(cache), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def from_start(options: argparse.Namespace, cache: str) -> float:
    """Seconds from the start of `allmlp train` to the end of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "train",
            options.recipe,
            "--out",
            folder,
            "--device",
            options.device,
            "--set",
            f"model={options.model}",
        ]
        words += ["--set", f"batch_size={options.batch_size}", "--set", "compile=true", "--set", "log_every=1"]
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "allmlp", *words],
            env=caching_in(cache),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        lines = list[str]()
        try:
            for line in process.stdout:
                lines.append(line)
                if "step 1/" in line:
                    return time.perf_counter() - start
        finally:
            process.kill()
            process.wait()
    sys.exit(f"no first step: {''.join(lines[-5:])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gmlp_l18")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50, help="timed steps")
    parser.add_argument("--rounds", type=int, default=2, help="measurements per variant")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipe", help="measure `allmlp train RECIPE` with the model, too")
    parser.add_argument("--region", choices=REGIONS, help="measure this one in this process, and print JSON")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.region:
        print(json.dumps(measure(options)))
        return
    found: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {region: [] for region in REGIONS}
    for round_ in range(options.rounds):
        for region in REGIONS if round_ % 2 == 0 else REGIONS[::-1]:
            with tempfile.TemporaryDirectory() as cache:
                found[region].append((run(options, region, cache), run(options, region, cache)))
    print(f"{options.model}, batch {options.batch_size}, {options.device}, torch {torch.__version__}")
    for region, pairs in found.items():
        first = statistics.median(cold["first"] for cold, _ in pairs)
        cached = statistics.median(warm["first"] for _, warm in pairs)
        rates = [one["rate"] for pair in pairs for one in pair]
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        print(f"{region:7} first step {first:6.1f} s   cached {cached:6.1f} s   examples/s {spread}")
    if options.recipe:
        cold, warm = list[float](), list[float]()
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(from_start(options, cache))
                warm.append(from_start(options, cache))
        print(f"allmlp train {options.recipe}, from its start to the first step: {statistics.median(cold):.1f} s")
        print(f"with the compile cache that this has left: {statistics.median(warm):.1f} s")


if __name__ == "__main__":
    main()
