"""What `allmlp serve` stands: the load comes from a second process on the same machine, over real sockets.

    python benchmarks/serve.py                        # everything, about four minutes
    python benchmarks/serve.py batching --seconds 10
    python benchmarks/serve.py overload --minutes 10
    python benchmarks/serve.py sigterm
    python benchmarks/serve.py malformed --count 10000
    python benchmarks/serve.py described              # what its own description allows and forbids, by schemathesis
    python benchmarks/serve.py described --folder runs/mlm

Only the standard library is used on this side, so that the load costs little of what is measured.
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
ANSWERED = ("200", "422", "504")
"""What a request that was taken on can get."""


# --- the server ------------------------------------------------------------------------------------------------------


class Served:
    """A server process and what it printed."""

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
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        user, system = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def end(self) -> tuple[int, str, str]:
        """Exit code, standard output and error after SIGTERM."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@contextmanager
def server(*options: str) -> Iterator[Served]:
    served = Served(*options)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.process.communicate()


# --- the load, in a process of its own -------------------------------------------------------------------------------


@dataclass
class Load:
    """What clients saw: answers by status, seconds by status, and what found no server or no answer."""

    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, list[float]] = field(default_factory=dict)
    refused: int = 0
    """Connections that were not made."""
    unanswered: int = 0
    """Requests whose connection was closed before an answer came."""
    skipped: int = 0
    """Requests that were due while every client was still waiting."""

    def note(self, status: str, seconds: float) -> None:
        self.statuses[status] += 1
        self.latencies.setdefault(status, []).append(seconds)


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int, request: bytes, load: Load) -> None:
        self.port, self.request, self.load = port, request, load
        self.writer: asyncio.StreamWriter | None = None
        self.told = 0.0
        """Seconds to wait before the next request."""

    async def ask(self) -> bool:
        """One request and its answer; False where there is no server any more."""
        began = time.perf_counter()
        try:
            if self.writer is not None and self.reader.at_eof():
                self.close()  # the server ended the connection while nothing was asked
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
            self.load.unanswered += 1
            self.close()
            return True
        self.load.note(head[9:12].decode(), time.perf_counter() - began)
        after = re.search(rb"retry-after: (\d+)", head)
        self.told = random.uniform(0.8, 1.2) * int(after[1]) if after else 0.0
        if b"connection: close" in head:
            self.close()
        return True

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.writer = None


def picture_request() -> bytes:
    data = SAMPLE.read_bytes()
    return (
        b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\n"
        b"content-length: %d\r\n\r\n" % len(data)
    ) + data


async def closed_loop(port: int, clients: int, seconds: float) -> Load:
    """Every client asks again as soon as it has an answer; after a 503 it waits as it is told."""
    load, began = Load(), time.perf_counter()

    async def go() -> None:
        client = Client(port, picture_request(), load)
        while time.perf_counter() < began + seconds:
            if not await client.ask():
                break
            await asyncio.sleep(client.told)
        client.close()

    await asyncio.gather(*(go() for _ in range(clients)))
    load.seconds = time.perf_counter() - began  # the last ones are waited for
    return load


async def open_loop(port: int, clients: int, seconds: float, rate: float) -> Load:
    """`rate` requests a second, whatever becomes of them."""
    load, started = Load(), time.perf_counter()
    free: asyncio.Queue[Client] = asyncio.Queue()
    for _ in range(clients):
        free.put_nowait(Client(port, picture_request(), load))
    tasks: set[asyncio.Task[None]] = set()

    async def go(client: Client) -> None:
        await client.ask()
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


def quantile(values: list[float], share: float) -> str:
    return f"{1e3 * sorted(values)[min(int(share * len(values)), len(values) - 1)]:.0f}" if values else "-"


# --- what is measured ------------------------------------------------------------------------------------------------


def throughput(name: str, served: Served, clients: int, seconds: float) -> float:
    """Answers a second; prints a row."""
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
    """The server with and without batches, and a plain endpoint, in turns: other work on the machine hits them all."""
    print(f"batching: {clients} clients, {rounds} rounds of {seconds:g} s each")
    sides = {"plain": ("plain",), "batch 1": ("--batch", "1"), "batch 16": ("--batch", "16")}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(server(*options)) for name, options in sides.items()}
        for served in servers.values():
            read_load(start_load(served.port, clients, 1.0))
        for _ in range(rounds):
            for name, served in servers.items():
                rates[name].append(throughput(name, served, clients, seconds))
    for name in ("batch 1", "plain"):
        ratios = sorted(many / one for many, one in zip(rates["batch 16"], rates[name], strict=True))
        print(f"  batch 16 against {name}: {statistics.median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    print()


def serve_plainly() -> None:
    """What one writes without thinking of batches: an endpoint that calls the model, in FastAPI's pool of threads."""
    import uvicorn
    from fastapi import Body, FastAPI

    from allmlp.predict import best
    from allmlp.serve.pictures import PictureService
    from allmlp.serve.server import address, listen
    from allmlp.weights.pretrained import shipped

    service, app = PictureService(shipped()), FastAPI()

    @app.post("/predict")
    def predict(data: bytes = Body(media_type="image/png")) -> list[tuple[str, float | None]]:
        (row,) = best(service.classify([service.read(data)])[0][None], service.classes, 5)
        return [tuple(answer) for answer in row]

    with listen("127.0.0.1", 0) as listener:
        print(address(listener), flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error", http="h11")).run([listener])


def overload(seconds: float, times: float = 2.0) -> None:
    with server() as served:
        warm = read_load(start_load(served.port, 64, 10.0))
        capacity = warm.statuses["200"] / warm.seconds
        print(f"overload: capacity {capacity:.1f}/s, {times:g} times that for {seconds:g} s")
        before = served.metrics()
        memory: list[float] = []
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(read_load, start_load(served.port, 400, seconds, times * capacity))
            while not coming.done():
                time.sleep(min(2.0, seconds / 10))
                memory.append(served.metrics()["process_resident_memory_bytes"] / 2**20)
        load, after = coming.result(), served.metrics()
        code, _, err = served.end()
    taken = int(after["allmlp_accepted_total"] - before["allmlp_accepted_total"])
    answered = sum(load.statuses[status] for status in ANSWERED)
    good, refusals = (load.latencies.get(status, []) for status in ("200", "503"))
    tenth = max(len(memory) // 10, 1)
    print(f"  statuses {dict(load.statuses)}, unanswered {load.unanswered}, not sent {load.skipped}")
    print(f"  taken on {taken}, answered {answered}, lost {taken - answered}")
    print(f"  200: p50 {quantile(good, 0.5)} ms, p99 {quantile(good, 0.99)} ms")
    print(f"  503: p50 {quantile(refusals, 0.5)} ms, p99 {quantile(refusals, 0.99)} ms")
    first, last = statistics.mean(memory[tenth : 3 * tenth]), statistics.mean(memory[-2 * tenth :])
    print(f"  memory {first:.0f} MiB after a tenth, {last:.0f} MiB at the end, most {max(memory):.0f} MiB")
    print(f"  exit code {code}, {'nothing' if not err else repr(err[-300:])} on stderr\n")


def sigterm(rounds: int = 5, clients: int = 150) -> None:
    print(f"sigterm: {rounds} servers, {clients} clients each, the signal comes under load")
    for _ in range(rounds):
        with server() as served:
            process = start_load(served.port, clients, 60.0)
            time.sleep(3 + random.random())
            began = time.perf_counter()
            code, out, err = served.end()
            took = time.perf_counter() - began
            load = read_load(process)
        taken = int(re.search(r"([\d,]+) requests were taken on", out)[1].replace(",", ""))
        answered = sum(load.statuses[status] for status in ANSWERED)
        print(
            f"  taken on {taken}, answered {answered}, lost {taken - answered}; {load.statuses['503']} got 503, "
            f"{load.unanswered} found a closed connection, {load.refused} no server; "
            f"ended after {took:.1f} s with {code}{'' if not err else ', stderr ' + repr(err[-200:])}",
            flush=True,
        )
    print()


# --- what no client should send --------------------------------------------------------------------------------------


def spoilt(rng: random.Random) -> tuple[str, bytes]:
    """A request that cannot be answered with a result, by its kind."""
    good = SAMPLE.read_bytes()
    kind = rng.choice(
        ["flipped", "cut", "noise", "bomb", "empty", "type", "form", "query", "method", "path", "head", "huge head",
         "length", "no http", "chunks", "too large"]
    )  # fmt: skip

    def post(body: bytes, path: str = "/predict", *headers: str) -> bytes:
        lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers, "", ""]
        return "\r\n".join(lines).encode("latin-1") + body

    noise = rng.randbytes(rng.randrange(1, 3000))
    if kind == "flipped":
        body = bytearray(good)
        for _ in range(rng.randrange(1, 60)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        body[rng.randrange(8)] ^= 0xFF  # the signature too, or it might still be a picture
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
        return kind, post(good, f"/predict?top={rng.choice(['0', '-1', 'x', '1e9', '%00', '101'])}")
    if kind == "head":
        return kind, b"POST /predict HTTP/1.1\r\nhost: x\r\n" + noise.replace(b"\r\n\r\n", b"") + b"\r\n\r\n"
    return kind, {
        "noise": post(noise),
        "empty": post(b""),
        "type": post(good, "/predict", "content-type: " + rng.choice(["application/json", "text/plain", "x/y"])),
        "method": rng.choice([b"PUT", b"DELETE", b"PATCH", b"GET"]) + b" /predict HTTP/1.1\r\nhost: x\r\n\r\n",
        "path": post(good, "/" + rng.choice(["..%2f..%2fetc/passwd", "samples/../../x", "predict/", "fill", "%ff%fe"])),
        "huge head": b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
        "length": b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\nxx",
        "no http": noise + b"\r\n\r\n",
        "chunks": b"POST /predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        "too large": b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\nxx",
    }[kind]


async def send_spoilt(port: int, count: int, together: int) -> dict[str, Counter[str]]:
    rng, seen = random.Random(0), {}
    gate = asyncio.Semaphore(together)

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
                status = "no answer"
            seen.setdefault(kind, Counter())[status] += 1

    await asyncio.gather(*(go(*spoilt(rng)) for _ in range(count)))
    return seen


async def dawdle(port: int, clients: int) -> Counter[str]:
    """Clients that send a byte a second: half of them the head of a request, half a body."""
    head = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: image/png\r\ncontent-length: 2000\r\n\r\n"

    async def go(number: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = asyncio.ensure_future(reader.readline())
        if number % 2:
            writer.write(head)
        for place in range(100):
            if answer.done() or writer.is_closing():
                break
            writer.write(head[place : place + 1])
            await asyncio.sleep(1.0)
        try:
            return (await answer)[9:12].decode() or "closed"
        except OSError:
            return "closed"

    return Counter(await asyncio.gather(*(go(number) for number in range(clients))))


def malformed(count: int) -> None:
    print(f"malformed: {count} requests, 32 at a time; then 100 clients that send a byte a second")
    with server() as served:
        seen = asyncio.run(send_spoilt(served.port, count, 32))
        for kind, statuses in sorted(seen.items()):
            print(f"  {kind:<10} {dict(statuses)}")
        good = read_load(start_load(served.port, 4, 3.0))
        print(f"  good requests after that: {dict(good.statuses)}", flush=True)
        print(f"  slow clients: {dict(asyncio.run(dawdle(served.port, 100)))}")
        good = read_load(start_load(served.port, 4, 3.0))
        print(f"  good requests after that: {dict(good.statuses)}")
        memory = served.metrics()["process_resident_memory_bytes"] / 2**20
        code, _, err = served.end()
    print(f"  memory {memory:.0f} MiB, exit code {code}, tracebacks {err.count('Traceback')}, stderr {err[-300:]!r}\n")


def described(examples: int, folder: str) -> None:
    """Requests that schemathesis makes from the server's OpenAPI: good ones, and ones that break it in one place.

    That any bytes are a picture and any sentence has a [MASK] is more than a schema can deny: that check is left out.
    """
    command = shutil.which("schemathesis")
    if command is None:
        print("described: not run, there is no schemathesis: pip install schemathesis\n")
        return
    with server(folder) as served, tempfile.TemporaryDirectory() as place:
        url = f"http://127.0.0.1:{served.port}/openapi.json"
        options = ["--no-color", "--continue-on-failure", "--phases", "examples,coverage,fuzzing", "--warnings", "off"]
        leave_out = ["--exclude-checks", "positive_data_acceptance"]
        done = subprocess.run(
            [command, "run", url, "-n", str(examples), *options, *leave_out],
            capture_output=True, text=True, cwd=place, check=False,
        )  # fmt: skip
        counts: Counter[str] = Counter()
        for name, value in served.metrics().items():
            if found := re.match(r'allmlp_responses_total\{path="[^"]*",status="(\d+)"\}', name):
                counts[found[1]] += int(value)
        code, _, err = served.end()
    print(f"described: {sum(counts.values())} requests, answered {dict(sorted(counts.items()))}")
    print(f"  schemathesis {'finds nothing wrong' if done.returncode == 0 else done.stdout[-3000:]}")
    print(f"  exit code {code}, tracebacks {err.count('Traceback')}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="?", default="all", choices=["all", "batching", "overload", "sigterm", "malformed", "described"]
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of one round of batching")
    parser.add_argument("--minutes", type=float, default=1.0, help="of the overload")
    parser.add_argument("--count", type=int, default=10_000, help="of malformed requests")
    parser.add_argument("--examples", type=int, default=500, help="of schemathesis for each path")
    parser.add_argument("--folder", default=str(ROOT / "weights" / "cifar10"), help="the model that schemathesis asks")
    options = parser.parse_args()
    tasks = {
        "batching": lambda: batching(options.seconds),
        "overload": lambda: overload(60 * options.minutes),
        "sigterm": sigterm,
        "malformed": lambda: malformed(options.count),
        "described": lambda: described(options.examples, options.folder),
    }
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before the start")
    for name, task in tasks.items():
        if options.what in ("all", name):
            task()


if __name__ == "__main__":
    if sys.argv[1:] == ["plain"]:
        serve_plainly()
    elif sys.argv[1:2] == ["load"]:
        port, clients, seconds, rate = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])
        loop = open_loop(port, clients, seconds, rate) if rate else closed_loop(port, clients, seconds)
        print(json.dumps(vars(asyncio.run(loop))))
    else:
        main()
