"""Throughput of serving: of the batching engine in process, and over HTTP with the stage that limits it.

    python benchmarks/serving.py engine --model mixer_nano  # on a CPU
    python benchmarks/serving.py engine --model mixer_b16 --device cuda --batch-size 256 --seconds 10
    python benchmarks/serving.py http                       # a server, and clients in another process
    python benchmarks/serving.py http --device cuda --batch-size 128 --clients 256
    python benchmarks/serving.py cost --threads 1           # processor time of an image
    python benchmarks/serving.py lone --busy 2              # one client: threads by measurement, and one thread
    python benchmarks/serving.py engine --out record.json

`engine` compares images a second that go through the engine one by one, as uint8 pixels in main memory, with those of
the same model on one batch of tensors on the device, as `allmlp bench` times it, in interleaved rounds; the engine
always has a few batches waiting. `http` tells
how busy each stage is: the event loop (HTTP, JSON), the decoders, the model. The busiest one limits the rate; where
no stage is busy all the time, cores are missing, or clients. `cost` compares the processor time of an image with that
of the model called directly on batches of the same size. `lone` compares what one client gets with the number of
threads that is chosen by measurement and with one, from two servers in turns, beside `--busy` busy processes.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in `allmlp serve`; before torch is imported
import torch

import allmlp
from allmlp.bench.clock import CpuClock
from allmlp.bench.timing import Timing, speedup, time_interleaved
from allmlp.data.preprocessing import ImagePreprocessing
from allmlp.files import write_json_atomically
from allmlp.models.zoo import presets
from allmlp.prediction import ImagePredictor, open_predictor
from allmlp.provenance import environment
from allmlp.serve.engine import GPU_THREADS, BatchingEngine, BatchResult
from allmlp.threads import Threads, limit
from serve import quantile, read_load, start_load

WAITING = 8
"""Batches in the engine at a time: as many as `allmlp serve` accepts."""


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
    # On a GPU filling and draining the engine would be a good part of eight batches; a CPU would take minutes for more.
    batches = WAITING * (8 if options.device == "cuda" else 1)
    size, total = options.batch_size, options.batch_size * batches
    pixels = torch.randint(0, 256, (size, predictor.decoding.channels, *predictor.img_size), dtype=torch.uint8)
    images, batch = list(pixels), predictor.collate(list(pixels))
    predictor.probabilities(images)
    threads = options.threads or (torch.get_num_threads() if options.device == "cpu" else min(limit(), GPU_THREADS))
    with BatchingEngine(size, threads) as running:

        def through_engine() -> None:
            waiting: deque[Future[BatchResult]] = deque()
            for number in range(total):
                if number >= size * WAITING:
                    waiting.popleft().result()
                waiting.append(running.submit(predictor.probabilities, images[number % size]))
            for future in waiting:
                future.result()

        def on_tensors() -> None:
            with torch.inference_mode():
                for _ in range(batches):
                    found = predictor.model(batch)
                found.flatten()[0].item()  # waits for the device, as the engine does

        calls: dict[str, Callable[[], object]] = {"tensors": on_tensors, "engine": through_engine}
        timings = time_interleaved(calls, CpuClock(), options.seconds)
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


class Served(NamedTuple):
    """A server in this process, for clients in another one."""

    port: int
    predictor: ImagePredictor
    loop: threading.Thread
    decoders: list[threading.Thread]
    batches: list[tuple[int, float]]
    """Size and seconds of every batch since the list was cleared."""


@contextmanager
def serving(options: argparse.Namespace) -> Iterator[Served]:
    """Serve a model as `allmlp serve` does; connections and threads are warm."""
    from allmlp.serve.app import create_app
    from allmlp.serve.batching import Batcher
    from allmlp.serve.images import ImageService
    from allmlp.serve.server import Server, listen, warm_up

    predictor = predictor_of(options.model, options.device)
    service = ImageService(predictor)
    on_gpu, batches = options.device == "cuda", list[tuple[int, float]]()
    running = BatchingEngine(options.batch_size, options.threads or (min(limit(), GPU_THREADS) if on_gpu else None))
    batcher = Batcher(running, max(8 * options.batch_size, 2 * options.clients), 60.0, limit() if on_gpu else 1)
    server = Server(create_app({"model": service}, batcher), batcher)
    running.start()
    warm_up(running, [service])
    running.on_batch = lambda size, seconds: batches.append((size, seconds))
    with listen("127.0.0.1", 0) as listener:
        loop = threading.Thread(target=server.run, args=([listener],))
        loop.start()
        port = listener.getsockname()[1]
        read_load(start_load(port, options.clients, 2.0))
        try:
            yield Served(port, predictor, loop, [*batcher.decoders._threads], batches)
        finally:
            server.handle_exit(signal.SIGTERM, None)
            loop.join(30)


def http(options: argparse.Namespace) -> dict[str, Any]:
    with serving(options) as served:
        loop, decoders = [served.loop], served.decoders
        before, before_decode = cpu_seconds(loop), cpu_seconds(decoders)
        served.batches.clear()
        load = read_load(start_load(served.port, options.clients, options.seconds))
        sizes = [size for size, _ in served.batches]
        stages = {
            "http": (cpu_seconds(loop) - before) / load.seconds,
            "decode": (cpu_seconds(decoders) - before_decode) / load.seconds / len(decoders),
            "model": sum(seconds for _, seconds in served.batches) / load.seconds,
        }
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


def cost(options: argparse.Namespace) -> dict[str, Any]:
    with serving(options) as served:
        served.batches.clear()
        loop, decoders = cpu_seconds([served.loop]), cpu_seconds(served.decoders)
        before = time.process_time()
        load = read_load(start_load(served.port, options.clients, options.seconds))
        spent = time.process_time() - before
        loop, decoders = cpu_seconds([served.loop]) - loop, cpu_seconds(served.decoders) - decoders
    images = sum(size for size, _ in served.batches)
    size = round(images / len(served.batches))
    pixels = torch.zeros(served.predictor.decoding.channels, *served.predictor.img_size, dtype=torch.uint8)
    if options.threads:
        torch.set_num_threads(options.threads)
    threads = Threads(active=options.threads is None and options.device == "cpu")
    calls, start = 0, time.process_time()
    while time.process_time() - start < options.seconds:
        with threads:
            served.predictor.probabilities([pixels] * size)
        calls += 1
    direct = (time.process_time() - start) / (calls * size)
    per_image = {"all": spent / images, "http": loop / images, "decode": decoders / images}
    print(f"cost: {options.model}, {options.device}, {options.clients} clients, mean batch {size}")
    print(f"  direct  {1e3 * direct:8.3f} ms of processor time an image")
    print(f"  server  {1e3 * per_image['all']:8.3f} ms: {per_image['all'] / direct - 1:+.1%}")
    print(f"  of that http {1e3 * per_image['http']:.3f} ms, decoding {1e3 * per_image['decode']:.3f} ms")
    return {"direct": direct, "server": per_image, "batch_size": size, "statuses": dict(load.statuses)}


def lone(options: argparse.Namespace, rounds: int = 24) -> dict[str, Any]:
    answers, seconds = {"chosen": [0] * rounds, "one": [0] * rounds}, {"chosen": 0.0, "one": 0.0}
    with ExitStack() as stack:
        for _ in range(options.busy):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        settings = {name: {**vars(options), "clients": 1, "threads": count} for name, count in zip(answers, (None, 1))}
        servers = {
            name: stack.enter_context(serving(argparse.Namespace(**changed))) for name, changed in settings.items()
        }
        for turn in range(rounds):
            for name, served in list(servers.items())[:: -1 if turn % 2 else 1]:
                load = read_load(start_load(served.port, 1, options.seconds))
                answers[name][turn] = load.statuses["200"]
                seconds[name] += load.seconds
    rates = {name: sum(found) / seconds[name] for name, found in answers.items()}
    print(f"lone: {options.model}, {options.device}, one client, {options.busy} busy processes, {rounds} turns")
    for name, rate in rates.items():
        print(f"  threads {name:<7} {rate:8.1f} images/s")
    print(f"  chosen / one: {rates['chosen'] / rates['one']:.2f}")
    return {"answers": answers, "images_per_second": rates, "ratio": rates["chosen"] / rates["one"]}


def cpu_seconds(threads: list[threading.Thread]) -> float:
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["engine", "http", "cost", "lone"])
    parser.add_argument("--model", default="allmlp:cifar10", help="a preset with new weights, or a trained model")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--threads", type=int, help="of the model; chosen by measurement if not given")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--busy", type=int, default=0, help="processes that use a core each, for lone")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    found = {"engine": engine, "http": http, "cost": cost, "lone": lone}[options.what](options)
    if options.out:
        settings = {name: value for name, value in vars(options).items() if name != "out"}
        record = {"settings": settings, "environment": environment(torch.device(options.device)), "result": found}
        write_json_atomically(options.out, record)


if __name__ == "__main__":
    main()
