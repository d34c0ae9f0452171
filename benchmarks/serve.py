"""Load tests of `allmlp serve`: a second process on the same machine sends requests over TCP.

    python benchmarks/serve.py                        # all of them, about four minutes
    python benchmarks/serve.py batching --seconds 10
    python benchmarks/serve.py overload --minutes 10
    python benchmarks/serve.py sigterm
    python benchmarks/serve.py malformed --count 10000
    python benchmarks/serve.py openapi                # requests generated from the OpenAPI schema by schemathesis
    python benchmarks/serve.py openapi --folder runs/mlm

The load generator uses only the standard library, so that it takes little CPU time from the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "src" / "allmlp" / "serve" / "page" / "samples" / "cifar10-cat.png"
COMPLETED = ("200", "422", "504")
"""Statuses of accepted requests."""


# --- server ----------------------------------------------------------------------------------------------------------


class ServerProcess:
    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "allmlp", "serve", "--port", "0", *options]
        if options == ("plain",):
            command = [sys.executable, __file__, "plain"]
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://[\d.]+:(\d+)", line)
        if not found:
            raise SystemExit(f"the server did not start: {line}{self.process.communicate()[1]}")
        self.port = int(found[1])

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as response:
            lines = [line for line in response.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def cpu(self) -> float:
        """CPU seconds used so far."""
        user, system = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def terminate(self) -> tuple[int, str, str]:
        """Send SIGTERM and return the exit code, stdout and stderr."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@contextmanager
def server(*options: str) -> Iterator[ServerProcess]:
    served = ServerProcess(*options)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.process.communicate()


# --- load generator, a process of its own ----------------------------------------------------------------------------


@dataclass
class Load:
    """Responses and latencies by status, and the requests without a response."""

    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, list[float]] = field(default_factory=dict)
    refused: int = 0
    """Failed connections."""
    closed: int = 0
    """Requests whose connection was closed without a response."""
    skipped: int = 0
    """Requests not sent because every client was waiting."""

    def add(self, status: str, seconds: float) -> None:
        self.statuses[status] += 1
        self.latencies.setdefault(status, []).append(seconds)


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int, request: bytes, load: Load) -> None:
        self.port, self.request, self.load = port, request, load
        self.writer: asyncio.StreamWriter | None = None
        self.retry_after = 0.0

    async def send(self) -> bool:
        """Send one request and read the response; False if the server is gone."""
        start = time.perf_counter()
        try:
            if self.writer is not None and self.reader.at_eof():
                self.close()  # the server closed the idle connection
            if self.writer is None:
                self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            self.load.refused += 1
            return False
        try:
            self.writer.write(self.request)
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"content-length: (\d+)", head)[1])
            await self.reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            self.load.closed += 1
            self.close()
            return True
        self.load.add(head[9:12].decode(), time.perf_counter() - start)
        after = re.search(rb"retry-after: (\d+)", head)
        self.retry_after = random.uniform(0.8, 1.2) * int(after[1]) if after else 0.0
        if b"connection: close" in head:
            self.close()
        return True

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.writer = None


def image_request() -> bytes:
    data = SAMPLE.read_bytes()
    return (
        b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\n"
        b"content-length: %d\r\n\r\n" % len(data)
    ) + data


async def closed_loop(port: int, clients: int, seconds: float) -> Load:
    """Each client sends its next request after a response, or after Retry-After if that was a 503."""
    load, start = Load(), time.perf_counter()

    async def go() -> None:
        client = Client(port, image_request(), load)
        while time.perf_counter() < start + seconds:
            if not await client.send():
                break
            await asyncio.sleep(client.retry_after)
        client.close()

    await asyncio.gather(*(go() for _ in range(clients)))
    load.seconds = time.perf_counter() - start  # includes the last responses
    return load


async def open_loop(port: int, clients: int, seconds: float, rate: float) -> Load:
    """Send `rate` requests per second, independent of the responses."""
    load, started = Load(), time.perf_counter()
    free: asyncio.Queue[Client] = asyncio.Queue()
    for _ in range(clients):
        free.put_nowait(Client(port, image_request(), load))
    tasks: set[asyncio.Task[None]] = set()

    async def go(client: Client) -> None:
        await client.send()
        free.put_nowait(client)

    number = 0
    while (now := time.perf_counter() - started) < seconds:
        while number <= now * rate:
            number += 1
            if free.empty():
                load.skipped += 1
                continue
            task = asyncio.ensure_future(go(free.get_nowait()))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(0.005)
    await asyncio.gather(*tasks)
    load.seconds = time.perf_counter() - started
    return load


def start_load(port: int, clients: int, seconds: float, rate: float = 0.0) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "load", str(port), str(clients), str(seconds), str(rate)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def read_load(process: subprocess.Popen[str]) -> Load:
    found = json.loads(process.communicate()[0])
    return Load(**{**found, "statuses": Counter(found["statuses"])})


def quantile(values: list[float], q: float) -> str:
    return f"{1e3 * sorted(values)[min(int(q * len(values)), len(values) - 1)]:.0f}" if values else "-"


# --- measurements ----------------------------------------------------------------------------------------------------


def throughput(name: str, served: ServerProcess, clients: int, seconds: float) -> float:
    """Print and return the responses per second."""
    cpu = served.cpu()
    load = read_load(start_load(served.port, clients, seconds))
    used = served.cpu() - cpu
    good = load.latencies.get("200", [])
    print(
        f"  {name:<10} {len(good) / load.seconds:6.1f}/s  p50 {quantile(good, 0.5):>5} ms"
        f"  p99 {quantile(good, 0.99):>5} ms  server CPU {1e3 * used / max(len(good), 1):5.1f} ms/request"
        f" ({used / load.seconds:.2f} cores), {sum(load.statuses.values()) - len(good)} others",
        flush=True,
    )
    return len(good) / load.seconds


def batching(seconds: float, clients: int = 64, rounds: int = 8) -> None:
    """Compare the server with and without batching and a plain endpoint, in interleaved rounds."""
    print(f"batching: {clients} clients, {rounds} rounds of {seconds:g} s each")
    variants = {"plain": ("plain",), "batch 1": ("--batch-size", "1"), "batch 16": ("--batch-size", "16")}
    rates: dict[str, list[float]] = {name: [] for name in variants}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(server(*options)) for name, options in variants.items()}
        for served in servers.values():
            read_load(start_load(served.port, clients, 1.0))
        for _ in range(rounds):
            for name, served in servers.items():
                rates[name].append(throughput(name, served, clients, seconds))
    for name in ("batch 1", "plain"):
        ratios = sorted(many / one for many, one in zip(rates["batch 16"], rates[name], strict=True))
        print(f"  batch 16 / {name}: {statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    print()


def serve_plain() -> None:
    """Serve the model without batching, in FastAPI's thread pool."""
    import uvicorn
    from fastapi import Body, FastAPI

    from allmlp.prediction import most_probable
    from allmlp.serve.app import load_service
    from allmlp.serve.server import address, listen
    from allmlp.weights.bundled import bundled

    service, app = load_service(bundled()), FastAPI()

    @app.post("/predict")
    def predict(data: bytes = Body(media_type="image/png")) -> list[tuple[str, float | None]]:
        (row,) = most_probable(service.classify([service.decode(data)])[0][None], service.class_names, 5)
        return [tuple(prediction) for prediction in row]

    with listen("127.0.0.1", 0) as listener:
        print(address(listener), flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error", http="h11")).run([listener])


def overload(seconds: float, times: float = 2.0) -> None:
    with server() as served:
        warm = read_load(start_load(served.port, 64, 10.0))
        capacity = warm.statuses["200"] / warm.seconds
        print(f"overload: capacity {capacity:.1f}/s, {times:g} times that load for {seconds:g} s")
        before = served.metrics()
        memory: list[float] = []
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(read_load, start_load(served.port, 400, seconds, times * capacity))
            while not pending.done():
                time.sleep(min(2.0, seconds / 10))
                memory.append(served.metrics()["process_resident_memory_bytes"] / 2**20)
        load, after = pending.result(), served.metrics()
        code, _, err = served.terminate()
    name = "allmlp_requests_accepted_total"
    accepted = int(after[name] - before[name])
    completed = sum(load.statuses[status] for status in COMPLETED)
    good, rejected = (load.latencies.get(status, []) for status in ("200", "503"))
    tenth = max(len(memory) // 10, 1)
    print(f"  statuses {dict(load.statuses)}, closed {load.closed}, not sent {load.skipped}")
    print(f"  accepted {accepted}, completed {completed}, lost {accepted - completed}")
    print(f"  200: p50 {quantile(good, 0.5)} ms, p99 {quantile(good, 0.99)} ms")
    print(f"  503: p50 {quantile(rejected, 0.5)} ms, p99 {quantile(rejected, 0.99)} ms")
    first, last = statistics.mean(memory[tenth : 3 * tenth]), statistics.mean(memory[-2 * tenth :])
    print(f"  memory {first:.0f} MiB after 10 % of the time, {last:.0f} MiB at the end, peak {max(memory):.0f} MiB")
    print(f"  exit code {code}, stderr {err[-300:]!r}\n")


def sigterm(rounds: int = 5, clients: int = 150) -> None:
    print(f"sigterm: {rounds} servers, each with {clients} clients")
    for _ in range(rounds):
        with server() as served:
            process = start_load(served.port, clients, 60.0)
            time.sleep(3 + random.random())
            start = time.perf_counter()
            code, out, err = served.terminate()
            took = time.perf_counter() - start
            load = read_load(process)
        accepted = int(re.search(r"([\d,]+) inputs accepted", out)[1].replace(",", ""))
        completed = sum(load.statuses[status] for status in COMPLETED)
        print(
            f"  accepted {accepted}, completed {completed}, lost {accepted - completed}; {load.statuses['503']} 503s, "
            f"{load.closed} connections closed, {load.refused} refused; "
            f"exit code {code} after {took:.1f} s, stderr {err[-200:]!r}",
            flush=True,
        )
    print()


# --- malformed requests ----------------------------------------------------------------------------------------------


def malformed_request(rng: random.Random) -> tuple[str, bytes]:
    """A kind of fault and a request with it."""
    good = SAMPLE.read_bytes()
    kind = rng.choice(
        ["flipped", "cut", "noise", "bomb", "empty", "type", "form", "query", "method", "path", "head", "huge head",
         "length", "no http", "chunks", "too large"]
    )  # fmt: skip

    def post(body: bytes, path: str = "/predict", *headers: str) -> bytes:
        lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *headers, "", ""]
        return "\r\n".join(lines).encode("latin-1") + body

    noise = rng.randbytes(rng.randrange(1, 3000))
    if kind == "flipped":
        body = bytearray(good)
        for _ in range(rng.randrange(1, 60)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        body[rng.randrange(8)] ^= 0xFF  # the signature too, or it might still be a valid image
        return kind, post(bytes(body))
    if kind == "cut":
        return kind, post(good[: rng.randrange(1, len(good) // 2)], "/importance")
    if kind == "bomb":
        header = bytearray(good[:33])
        header[16:24] = rng.randrange(50_000, 2**31).to_bytes(4, "big") * 2
        return kind, post(bytes(header) + good[33:])
    if kind == "form":
        return kind, post(
            noise, "/predict", "content-type: multipart/form-data; boundary=" + rng.choice(["x", "", '"'])
        )
    if kind == "query":
        return kind, post(good, f"/predict?top_k={rng.choice(['0', '-1', 'x', '1e9', '%00', '101'])}")
    if kind == "head":
        return kind, b"POST /predict HTTP/1.1\r\nhost: localhost\r\n" + noise.replace(b"\r\n\r\n", b"") + b"\r\n\r\n"
    return kind, {
        "noise": post(noise),
        "empty": post(b""),
        "type": post(good, "/predict", "content-type: " + rng.choice(["application/json", "text/plain", "x/y"])),
        "method": rng.choice([b"PUT", b"DELETE", b"PATCH", b"GET"]) + b" /predict HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "path": post(good, "/" + rng.choice(["..%2f..%2fetc/passwd", "samples/../../x", "predict/", "fill", "%ff%fe"])),
        "huge head": b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
        "length": b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\nxx",
        "no http": noise + b"\r\n\r\n",
        "chunks": b"POST /predict HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        "too large": b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\nxx",
    }[kind]


async def send_malformed(port: int, count: int, concurrency: int) -> dict[str, Counter[str]]:
    rng, seen = random.Random(0), {}
    gate = asyncio.Semaphore(concurrency)

    async def go(kind: str, request: bytes) -> None:
        async with gate:
            status = "closed"
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request)
                line = await asyncio.wait_for(reader.readline(), 30)
                status = line[9:12].decode("latin-1") or "closed"
                writer.close()
            except OSError:
                pass
            except TimeoutError:
                status = "no response"
            seen.setdefault(kind, Counter())[status] += 1

    await asyncio.gather(*(go(*malformed_request(rng)) for _ in range(count)))
    return seen


async def slow_clients(port: int, clients: int) -> Counter[str]:
    """Clients that send one byte per second, half of them in the headers, half in the body."""
    head = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\ncontent-length: 2000\r\n\r\n"

    async def go(number: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        response = asyncio.ensure_future(reader.readline())
        if number % 2:
            writer.write(head)
        for place in range(100):
            if response.done() or writer.is_closing():
                break
            writer.write(head[place : place + 1])
            await asyncio.sleep(1.0)
        try:
            return (await response)[9:12].decode() or "closed"
        except OSError:
            return "closed"

    return Counter(await asyncio.gather(*(go(number) for number in range(clients))))


def malformed(count: int) -> None:
    print(f"malformed: {count} requests, 32 at a time; then 100 clients that send one byte per second")
    with server() as served:
        seen = asyncio.run(send_malformed(served.port, count, 32))
        for kind, statuses in sorted(seen.items()):
            print(f"  {kind:<10} {dict(statuses)}")
        good = read_load(start_load(served.port, 4, 3.0))
        print(f"  valid requests afterwards: {dict(good.statuses)}", flush=True)
        print(f"  slow clients: {dict(asyncio.run(slow_clients(served.port, 100)))}")
        good = read_load(start_load(served.port, 4, 3.0))
        print(f"  valid requests afterwards: {dict(good.statuses)}")
        memory = served.metrics()["process_resident_memory_bytes"] / 2**20
        code, _, err = served.terminate()
    print(f"  memory {memory:.0f} MiB, exit code {code}, tracebacks {err.count('Traceback')}, stderr {err[-300:]!r}\n")


def openapi(examples: int, folder: str) -> None:
    """Send valid and invalid requests generated by schemathesis from the OpenAPI schema.

    positive_data_acceptance is excluded: a schema cannot express that a body is an image or contains a [MASK].
    """
    command = shutil.which("schemathesis")
    if command is None:
        print("openapi: skipped, schemathesis is not installed\n")
        return
    with server(folder) as served, tempfile.TemporaryDirectory() as place:
        url = f"http://127.0.0.1:{served.port}/openapi.json"
        options = ["--no-color", "--continue-on-failure", "--phases", "examples,coverage,fuzzing", "--warnings", "off"]
        excluded = ["--exclude-checks", "positive_data_acceptance"]
        done = subprocess.run(
            [command, "run", url, "-n", str(examples), *options, *excluded],
            capture_output=True, text=True, cwd=place, check=False,
        )  # fmt: skip
        counts: Counter[str] = Counter()
        for name, value in served.metrics().items():
            if found := re.match(r'http_requests_total\{path="[^"]*",status="(\d+)"\}', name):
                counts[found[1]] += int(value)
        code, _, err = served.terminate()
    print(f"openapi: {sum(counts.values())} requests, statuses {dict(sorted(counts.items()))}")
    print(f"  schemathesis {'finds no failures' if done.returncode == 0 else done.stdout[-3000:]}")
    print(f"  exit code {code}, tracebacks {err.count('Traceback')}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="?", default="all", choices=["all", "batching", "overload", "sigterm", "malformed", "openapi"]
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a batching round")
    parser.add_argument("--minutes", type=float, default=1.0, help="length of the overload test")
    parser.add_argument("--count", type=int, default=10_000, help="number of malformed requests")
    parser.add_argument("--examples", type=int, default=500, help="schemathesis examples per path")
    parser.add_argument("--folder", default=str(ROOT / "weights" / "cifar10"), help="model folder for the openapi test")
    options = parser.parse_args()
    tasks = {
        "batching": lambda: batching(options.seconds),
        "overload": lambda: overload(60 * options.minutes),
        "sigterm": sigterm,
        "malformed": lambda: malformed(options.count),
        "openapi": lambda: openapi(options.examples, options.folder),
    }
    print(f"{os.cpu_count()} cores, initial load average {os.getloadavg()[0]:.1f}")
    for name, task in tasks.items():
        if options.what in ("all", name):
            task()


if __name__ == "__main__":
    if sys.argv[1:] == ["plain"]:
        serve_plain()
    elif sys.argv[1:2] == ["load"]:
        port, clients, seconds, rate = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])
        loop = open_loop(port, clients, seconds, rate) if rate else closed_loop(port, clients, seconds)
        print(json.dumps(vars(asyncio.run(loop))))
    else:
        main()
