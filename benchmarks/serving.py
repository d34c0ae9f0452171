"""Throughput of serving: of the batching engine in process, and over HTTP with the stage that limits it.

    python benchmarks/serving.py engine --model mixer_nano  # on a CPU
    python benchmarks/serving.py engine --model mixer_b16 --device cuda --batch-size 256 --seconds 10
    python benchmarks/serving.py http                       # a server, and clients in another process
    python benchmarks/serving.py http --device cuda --batch-size 128 --clients 256
    python benchmarks/serving.py engine --out record.json

`engine` compares images a second that go through the engine one by one, as uint8 pixels in main memory, with those of
the same model on one batch of tensors on the device, as `allmlp bench` times it, in interleaved rounds. `http` tells
how busy each stage is: the event loop (HTTP, JSON), the decoders, the model. The busiest one limits the rate; where
no stage is busy all the time, cores are missing, or clients.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import allmlp
from allmlp.bench.clock import clock_of
from allmlp.bench.timing import Timing, speedup, time_interleaved
from allmlp.data.preprocessing import ImagePreprocessing
from allmlp.models.zoo import presets
from allmlp.prediction import ImagePredictor, open_predictor
from allmlp.provenance import environment
from allmlp.serve.app import create_app
from allmlp.serve.batching import Batcher
from allmlp.serve.engine import BatchingEngine
from allmlp.serve.images import ImageService
from allmlp.serve.server import Server, listen, warm_up
from allmlp.threads import limit
from serve import quantile, read_load, start_load

BATCHES = 4
"""In flight in the engine."""


def predictor_of(model: str, device: str) -> ImagePredictor:
    """A preset with new weights, or a trained model; converted by `allmlp.fast`."""
    if model in presets():
        made = allmlp.create(model, seed=0, device=device).eval()
        return ImagePredictor(model, made, ImagePreprocessing((0.5,) * 3, (0.25,) * 3), fast=True)
    found = open_predictor(model, device=device, fast=True)
    assert isinstance(found, ImagePredictor)
    return found


def engine(options: argparse.Namespace) -> dict[str, Any]:
    predictor = predictor_of(options.model, options.device)
    size, total = options.batch_size, options.batch_size * BATCHES
    pixels = torch.randint(0, 256, (size, predictor.decoding.channels, *predictor.img_size), dtype=torch.uint8)
    images, batch = list(pixels), predictor.collate(list(pixels))
    predictor.probabilities(images)
    threads = torch.get_num_threads() if options.device == "cpu" else limit()
    with BatchingEngine(size, threads) as running:

        def through_engine() -> None:
            futures = [running.submit(predictor.probabilities, images[number % size]) for number in range(total)]
            for future in futures:
                future.result()

        def on_tensors() -> None:
            with torch.inference_mode():
                for _ in range(BATCHES):
                    predictor.model(batch)

        calls: dict[str, Callable[[], object]] = {"tensors": on_tensors, "engine": through_engine}
        timings = time_interleaved(calls, clock_of(predictor.device), options.seconds)
    tensors, through = timings["tensors"], timings["engine"]
    if not isinstance(tensors, Timing) or not isinstance(through, Timing):
        raise SystemExit(f"failed: {timings}")
    share = speedup(through.calls, tensors.calls)
    print(f"engine: {options.model}, batches of {size}, {options.device}")
    print(f"  tensors on the device  {total / tensors.call.median:10,.1f} images/s")
    print(f"  engine, one by one     {total / through.call.median:10,.1f} images/s")
    print(f"  share {share.median:.1%} (quartiles {share.low:.1%} to {share.high:.1%})")
    return {
        "tensors_per_second": total / tensors.call.median,
        "engine_per_second": total / through.call.median,
        "share": share._asdict(),
    }


def http(options: argparse.Namespace) -> dict[str, Any]:
    service = ImageService(predictor_of(options.model, options.device))
    running = BatchingEngine(options.batch_size)
    decode_threads = limit() if options.device == "cuda" else 1
    batcher = Batcher(running, max(8 * options.batch_size, options.clients), 60.0, decode_threads)
    server = Server(create_app({"model": service}, batcher), batcher)
    busy, sizes = 0.0, list[int]()

    def on_batch(size: int, seconds: float) -> None:
        nonlocal busy
        busy += seconds
        sizes.append(size)

    running.start()
    warm_up(running, [service])
    running.on_batch = on_batch
    with listen("127.0.0.1", 0) as listener:
        loop = threading.Thread(target=server.run, args=([listener],))
        loop.start()
        port = listener.getsockname()[1]
        read_load(start_load(port, options.clients, 2.0))  # warms up connections and threads
        decoders = [*batcher.decoders._threads]
        busy, before, before_decode = 0.0, cpu_seconds([loop]), cpu_seconds(decoders)
        sizes.clear()
        load = read_load(start_load(port, options.clients, options.seconds))
        stages = {
            "http": (cpu_seconds([loop]) - before) / load.seconds,
            "decode": (cpu_seconds(decoders) - before_decode) / load.seconds / decode_threads,
            "model": busy / load.seconds,
        }
        server.handle_exit(signal.SIGTERM, None)
        loop.join(30)
    good = load.latencies.get("200", [])
    rate, limiting = len(good) / load.seconds, max(stages, key=stages.__getitem__)
    print(
        f"http: {options.model}, batches of at most {options.batch_size}, {options.device}, {options.clients} clients"
    )
    print(
        f"  {rate:,.1f} images/s, p50 {quantile(good, 0.5)} ms, p99 {quantile(good, 0.99)} ms, "
        f"mean batch {sum(sizes) / max(len(sizes), 1):.1f}, statuses {dict(load.statuses)}"
    )
    print("  busy: " + ", ".join(f"{name} {share:.0%}" for name, share in stages.items()) + f"; limit: {limiting}")
    return {"images_per_second": rate, "busy": stages, "limit": limiting, "statuses": dict(load.statuses)}


def cpu_seconds(threads: list[threading.Thread]) -> float:
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["engine", "http"])
    parser.add_argument("--model", default="allmlp:cifar10", help="a preset with new weights, or a trained model")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    found = {"engine": engine, "http": http}[options.what](options)
    if options.out:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        record = {"settings": settings, "environment": environment(torch.device(options.device)), "result": found}
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
