"""Does the input keep up? Images from JPEG shards to the training step, `eval` and `predict`, and the same on tensors.

python benchmarks/feeding.py --out docs/logs/feeding.json                                  on a GPU, two minutes
python benchmarks/feeding.py --device cpu --model mixer_nano --batch-size 32 --images 64 --seconds 0.3      a trial
python benchmarks/feeding.py --source FOLDER                                               other images

Without --source, images are made: noise with the spectrum of photographs, 500 x 375 pixels, JPEG of quality 90 with
some 120 kB. They are read from the page cache: a disk must deliver what is printed as MB/s. Four sources are compared:
the JPEG files decoded by Pillow, the same by simplejpeg if it is installed, and what `allmlp shards` makes of them:
JPEG and raw pixels with a short side of 256. For each:

- stages: processor time of one thread per image, for reading, decoding, cropping and resizing, and writing into the
  batch; of a batch, the time of its copy to the device
- workers: images per second that 1, 4 and all workers prepare for training; 4 and more are processes (on Linux)
- train, eval, predict: images per second of `Loader` with the training step, of `eval_batches` and of `predict`, each
  beside the same computation on tensors that are on the device already, in turns, and the best of its turns

Text is measured as tokens per second of a tokenizer in all threads, and of rows that were tokenized once.

Cores: the number that would prepare as many images as the computation takes, at the speed per core of the most workers.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tarfile
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import allmlp
from allmlp.compilation import compile_task
from allmlp.data import direct
from allmlp.data.dataset import ImageDataset, LabeledImages
from allmlp.data.decode import random_box, reduction
from allmlp.data.detect import detect_data
from allmlp.data.docstrings import Docstrings, docstrings
from allmlp.data.prefetch import Transfer
from allmlp.data.preprocessing import ImagePreprocessing
from allmlp.data.resample import crop_box
from allmlp.data.sampler import Batch, Loader, Sampler, eval_batches
from allmlp.data.shard_writer import ShardFormat, write_shards
from allmlp.data.shards import ShardImages, Shards
from allmlp.data.workers import PROCESSES_AFTER, Workers
from allmlp.device import default_dtype
from allmlp.errors import UserError
from allmlp.files import write_json_atomically
from allmlp.optim import AdamW
from allmlp.parallel import World
from allmlp.prediction.inputs import Inputs
from allmlp.prediction.predictor import ImagePredictor, open_predictor
from allmlp.prediction.stream import chunks, predictions
from allmlp.provenance import environment
from allmlp.tasks.classify import Classify
from allmlp.tasks.task import StepContext
from allmlp.threads import limit
from allmlp.train_step import RecordedStep, TrainStep

HEIGHT, WIDTH, QUALITY = 375, 500, 90
DISTINCT = 256
"""Images that are made; others are copies of them."""
REPEATS = 16
"""Times that the shards are read in one pass: between two passes nothing is read ahead."""
CLASSES = 10
SHORT_SIDE = 256
TURNS = 2
WARMUP = 5
"""Batches before a measurement: more than are read ahead."""
START_LIMIT = 60.0
"""Seconds until processes must have started."""


# --- images ------------------------------------------------------------------------------------------------


def photograph(seed: int) -> bytes:
    """Noise of amplitude 1 / frequency, mostly gray, as in photographs."""
    noise = np.random.default_rng(seed).standard_normal((3, HEIGHT, WIDTH))
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH))
    frequency[0, 0] = 1.0
    colors = np.fft.irfft2(np.fft.rfft2(noise) / frequency, (HEIGHT, WIDTH))
    mixed = 0.8 * colors[:1] + 0.35 * colors
    pixels = (120 + 55 * (mixed - mixed.mean()) / mixed.std()).clip(0, 255).astype(np.uint8)
    target = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(target, "JPEG", quality=QUALITY)
    return target.getvalue()


def write_photographs(folder: Path, images: int) -> None:
    """Shards of photographs: train-0.tar, and an eighth as many in test-0.tar."""
    with ThreadPoolExecutor(limit()) as pool:
        made = list(pool.map(photograph, range(min(DISTINCT, images))))
    for name, count in (("train", images), ("test", max(images // 8, CLASSES))):
        with tarfile.open(folder / f"{name}-0.tar", "w") as tar:
            for number, data in enumerate(islice(cycle(made), count)):
                for suffix, content in (("jpg", data), ("cls", b"%d" % (number % CLASSES))):
                    info = tarfile.TarInfo(f"{number:06}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


@contextmanager
def without_simplejpeg(active: bool) -> Iterator[None]:
    """Let its import fail, also in the processes that decode: they get the search path of this one."""
    if not active:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "simplejpeg.py").write_text("raise ImportError\n")
        sys.path.insert(0, folder)
        forget_simplejpeg()
        try:
            yield
        finally:
            sys.path.remove(folder)
            forget_simplejpeg()


def forget_simplejpeg() -> None:
    if sys.modules.get("simplejpeg"):
        del sys.modules["simplejpeg"]
    direct.simplejpeg.cache_clear()


# --- timing ------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rate(batches: Iterator[int], seconds: float, device: torch.device) -> float:
    """Images per second of an iterator that computes batches and yields their sizes, after the first ones."""
    for _ in islice(batches, WARMUP):
        pass
    synchronize(device)
    start, images, launched = time.perf_counter(), 0, deque[Any]()
    for size in batches:
        images += size
        if device.type == "cuda":  # launches must not run ahead by seconds of work
            launched.append(torch.cuda.current_stream(device).record_event())
            if len(launched) > 2:
                launched.popleft().synchronize()
        if time.perf_counter() - start > seconds:
            break
    synchronize(device)
    return images / (time.perf_counter() - start)


def processor_time(call: Callable[[int], object], count: int) -> float:
    """Seconds of this thread per call, the least of ten rounds: other processes take caches away."""
    rounds = []
    for _ in range(10):
        start = time.thread_time()
        for number in range(count):
            call(number)
        rounds.append((time.thread_time() - start) / count)
    return min(rounds)


# --- stages ------------------------------------------------------------------------------------------------


def stages(split: ShardImages, device: torch.device, batch_size: int, count: int = 16) -> dict[str, float]:
    """Milliseconds per image: processor time of one thread, and of the copy of a batch to the device."""
    size, decode, count = split.img_size, split.decode, min(count, len(split))
    uniforms = torch.rand(count, 4, generator=torch.Generator().manual_seed(0)).tolist()
    files = [split.read(index) for index in range(count)]

    def pixels(number: int) -> tuple[np.ndarray, tuple[int, int], tuple[int, int, int, int]]:
        opened = direct.open_direct(files[number])
        if opened is not None:
            box = random_box(opened.height, opened.width, decode, uniforms[number])
            found = opened.decode(reduction(opened.height, opened.width, box, size))
            assert found is not None
            return found, (opened.height, opened.width), box
        with Image.open(io.BytesIO(files[number])) as image:
            original = image.height, image.width
            box = random_box(*original, decode, uniforms[number])
            reduced = reduction(*original, box, size)
            image.draft(None, (image.width // reduced, image.height // reduced))
            return np.asarray(image), original, box

    decoded = [pixels(number) for number in range(count)]
    crops = [crop_box(found, original, box, size) for found, original, box in decoded]
    batch = np.empty((count, 3, *size), dtype=np.uint8)

    def store(number: int) -> None:
        batch[number] = crops[number].transpose(2, 0, 1)

    found = {
        "read": processor_time(split.read, count),
        "decode": processor_time(pixels, count),
        "resize": processor_time(lambda number: crop_box(decoded[number][0], *decoded[number][1:], size), count),
        "store": processor_time(store, count),
    }
    transfer = Transfer(device)
    host = LabeledImages(torch.zeros(batch_size, 3, *size, dtype=torch.uint8), torch.zeros(batch_size).long())
    times = []
    for _ in range(5):
        start = time.perf_counter()
        transfer.receive(transfer.send(host))
        synchronize(device)
        times.append((time.perf_counter() - start) / batch_size)
    return {name: 1e3 * seconds for name, seconds in (found | {"transfer": min(times)}).items()}


def wait_for_processes(workers: Callable[[], Workers], prepare: Callable[[], object]) -> None:
    """Call `prepare`, which has images decoded, until processes decode them where there will be processes."""
    end = time.monotonic() + START_LIMIT
    for _ in range(-(-PROCESSES_AFTER // 64)):
        prepare()
    while (started := workers().processes) and not started.is_ready and time.monotonic() < end:
        time.sleep(0.05)


def worker_rates(data: Shards, seconds: float, most: int) -> dict[int, float]:
    """Images per second that so many workers prepare for training, in batches of 64."""
    found = {}
    for workers in sorted({1, min(4, most), most}):
        train = data.replace(num_workers=workers).load().train
        assert isinstance(train, ShardImages)
        wait_for_processes(train.workers, partial(train.fetch, torch.arange(64) % len(train)))
        loader = Loader(train, Sampler(len(train), 64, 0), torch.device("cpu"))
        batches = (len(batch.indices) for batch in loader.steps(0, 10**9))
        found[workers] = rate(batches, seconds, torch.device("cpu"))
    return found


# --- the three uses ----------------------------------------------------------------------------------------


class Training:
    """The training step of `allmlp train`, compiled and recorded on a GPU."""

    def __init__(self, model: str, dataset: ImageDataset, device: torch.device, batch_size: int) -> None:
        self.device, self.batch_size = device, batch_size
        torch.set_float32_matmul_precision("high")
        built = allmlp.create(model, num_classes=len(dataset.class_names), seed=0).to(device)
        self.task = Classify().build(built, dataset).to(device).train()
        if device.type == "cuda":
            compile_task(self.task)
        step = TrainStep(self.task, AdamW(lr=0.0).build(self.task), World(0, 1, device), default_dtype(device))
        self.step = RecordedStep(step) if device.type == "cuda" else step

    def run(self, batches: Iterator[Batch]) -> Iterator[int]:
        for batch in batches:
            context = StepContext(0.0, torch.Generator(self.device).manual_seed(0))
            self.step([self.task.prepare_batch(batch, context)])
            yield len(batch.indices)

    def fed(self, dataset: ImageDataset) -> Iterator[int]:
        sampler = Sampler(len(dataset.train), self.batch_size, 0)
        return self.run(Loader(dataset.train, sampler, self.device).steps(0, 10**9))

    def on_tensors(self, dataset: ImageDataset) -> Iterator[int]:
        batch = Loader(dataset.train, Sampler(len(dataset.train), self.batch_size, 0), self.device).fetch(0)
        return self.run(cycle([batch]))


class Evaluating:
    """Evaluation during training, and of `allmlp eval RUN`: the model as it is, under autocast."""

    def __init__(self, training: Training) -> None:
        self.task, self.device, self.batch_size = training.task, training.device, training.batch_size

    @torch.inference_mode()
    def run(self, batches: Iterator[Any]) -> Iterator[int]:
        self.task.eval()
        dtype = default_dtype(self.device)
        for batch in batches:
            with (
                torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32),
                torch.compiler.set_stance("force_eager"),
            ):
                self.task.model(self.task.normalize(batch.images))
            yield len(batch.labels)

    def fed(self, dataset: ImageDataset) -> Iterator[int]:
        while True:
            yield from self.run(eval_batches(dataset.train, self.batch_size, self.device))

    def on_tensors(self, dataset: ImageDataset) -> Iterator[int]:
        return self.run(cycle([next(iter(eval_batches(dataset.train, self.batch_size, self.device)))]))


class Predicting:
    """`allmlp predict`, with `fast`."""

    def __init__(self, training: Training, dataset: ImageDataset) -> None:
        model = allmlp.create(training.task.model.spec, seed=0).to(training.device).eval()
        model.preprocessing = ImagePreprocessing(dataset.mean, dataset.std, dataset.class_names, dataset.crop_pct)
        self.predictor = open_predictor(model, fast=True)
        self.batch_size = training.batch_size

    def fed(self, dataset: ImageDataset) -> Iterator[int]:
        shards = [str(shard) for shard in dataset.train.shards]  # type: ignore[attr-defined]
        while True:
            found = predictions(self.predictor, Inputs(shards, "images"), 1, self.batch_size)
            yield from map(len, chunks(found, self.batch_size))

    def on_tensors(self, dataset: ImageDataset) -> Iterator[int]:
        predictor = self.predictor
        assert isinstance(predictor, ImagePredictor)
        images = list(dataset.train.fetch(torch.arange(self.batch_size) % len(dataset.train)).images)
        with torch.inference_mode():
            normalized = predictor.collate(images)
            while True:
                predictor.model(normalized)
                yield self.batch_size


# --- nvJPEG, text ------------------------------------------------------------------------------------------


def nvjpeg(split: ShardImages, device: torch.device, batch_size: int, seconds: float) -> dict[str, Any]:
    """Images per second that the GPU decodes alone, by torchvision; the resizing is left out."""
    if device.type != "cuda":
        return {"note": "needs a GPU"}
    try:
        from torchvision.io import decode_jpeg
    except Exception as reason:  # absent, or built for another torch
        return {"note": f"torchvision: {reason}"}
    files = [
        torch.frombuffer(bytearray(split.read(index % len(split))), dtype=torch.uint8) for index in range(batch_size)
    ]

    def batches() -> Iterator[int]:
        while True:
            decode_jpeg(files, device=device)
            yield batch_size

    try:
        return {"images_per_s": rate(batches(), seconds, device)}
    except RuntimeError as reason:
        return {"note": str(reason).splitlines()[0]}


def text(seconds: float, batch_size: int = 256) -> dict[str, float]:
    """Tokens per second: tokenized by all threads, and read from rows that were tokenized once."""
    dataset = Docstrings(seq_len=128).load()
    documents = docstrings()
    tokenizer, device = dataset.tokenizer, torch.device("cpu")

    def tokenized() -> Iterator[int]:
        for start in cycle(range(0, len(documents), batch_size)):
            yield sum(map(len, tokenizer.encode(list(documents[start : start + batch_size]))))

    loader = Loader(dataset.train, Sampler(len(dataset.train), batch_size, 0), device)
    packed = (batch.examples.ids.numel() for batch in loader.steps(0, 10**9))
    return {
        "tokenized_per_s": rate(tokenized(), seconds, device),
        "packed_per_s": rate(packed, seconds, device),
        "threads": limit(),
    }


# --- all ---------------------------------------------------------------------------------------------------


def sources(options: argparse.Namespace, folder: Path) -> dict[str, tuple[str, bool]]:
    """Name -> folder of shards, and whether Pillow decodes them though simplejpeg is installed."""
    given = folder / "jpeg"
    given.mkdir()
    if options.source:
        dataset = detect_data(options.source).load()
        write_shards(dataset, given, ShardFormat(65535, "jpeg"))
    else:
        write_photographs(given, options.images)
    dataset = Shards(str(given)).load()
    found = {"JPEG, Pillow": (str(given), True)}
    if direct.simplejpeg():
        found["JPEG, simplejpeg"] = (str(given), False)
    for form in ("jpeg", "raw"):
        place = folder / f"{form}_{SHORT_SIDE}"
        write_shards(dataset, place, ShardFormat(SHORT_SIDE, form))
        found[f"{form} {SHORT_SIDE}".replace("jpeg", "JPEG")] = (str(place), False)
    return found


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    device, began = torch.device(options.device), time.perf_counter()
    size = allmlp.create(options.model, seed=0, device="meta").spec.input_size
    if size is None:
        raise UserError(f"{options.model} does not read images")
    made = {
        name: (Shards(",".join([place] * REPEATS), img_size=size, num_workers=options.workers), pillow)
        for name, (place, pillow) in sources(options, folder).items()
    }
    print(f"images made after {time.perf_counter() - began:.0f} s", flush=True)
    first = next(iter(made.values()))[0].load()
    training = Training(options.model, first, device, options.batch_size)
    predicting = Predicting(training, first)
    uses: dict[str, Any] = {"train": training, "eval": Evaluating(training), "predict": predicting}
    uses = {name: use for name, use in uses.items() if name in options.uses.split(",")}
    for use in uses.values():
        rate(use.on_tensors(first), 0.0, device)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    most, rows = options.workers or limit(), []
    for name, (shards, pillow) in made.items():
        with without_simplejpeg(pillow):
            dataset = shards.load()
            row: dict[str, Any] = {"source": name, "bytes": float(dataset.train.sizes.mean())}  # type: ignore[attr-defined]
            row["stages_ms"] = stages(dataset.train, device, options.batch_size)  # type: ignore[arg-type]
            row["workers"] = worker_rates(shards, options.seconds, most)
            images = dataset.train
            assert isinstance(images, ShardImages)
            wait_for_processes(images.workers, partial(images.fetch, torch.arange(64) % len(images)))
            if "predict" in uses:
                predictor = predicting.predictor
                assert isinstance(predictor, ImagePredictor)
                vars(predictor).pop("workers", None)  # those of the last source may decode by another library
                first_batch = partial(deque, islice(predicting.fed(dataset), 1), 0)
                wait_for_processes(partial(getattr, predictor, "workers"), first_batch)
            for use, one in uses.items():
                best = {"tensors": 0.0, "fed": 0.0}
                for _ in range(TURNS):
                    best["tensors"] = max(best["tensors"], rate(one.on_tensors(dataset), options.seconds / 2, device))
                    best["fed"] = max(best["fed"], rate(one.fed(dataset), options.seconds, device))
                if use == "train":
                    training.task.train()
                row[use] = best
        print(describe(row, most), flush=True)
        rows.append(row)
    found = {"workers": most, "model": options.model, "batch_size": options.batch_size, "rows": rows}
    jpegs = next(iter(made.values()))[0].load().train
    found["nvjpeg"] = nvjpeg(jpegs, device, options.batch_size, options.seconds)  # type: ignore[arg-type]
    print(f"nvJPEG: {found['nvjpeg']}")
    if "text" in options.uses.split(","):
        found["text"] = text(options.seconds)
        print("text: " + ", ".join(f"{key} {value:,.0f}" for key, value in found["text"].items()))
    print(f"{time.perf_counter() - began:.0f} s in all")
    return found


def describe(row: dict[str, Any], most: int) -> str:
    """A few lines about a source."""
    per_core = row["workers"][most] / most
    parts = ", ".join(f"{name} {value:.3f}" for name, value in row["stages_ms"].items())
    lines = [
        f"{row['source']}: {row['bytes'] / 1e3:.0f} kB per image; ms per image: {parts}",
        "  workers: " + ", ".join(f"{count}: {value:,.0f}/s" for count, value in row["workers"].items()),
    ]
    for use in ("train", "eval", "predict"):
        if use in row:
            tensors, fed = row[use]["tensors"], row[use]["fed"]
            lines.append(
                f"  {use:8}{fed:10,.0f} of {tensors:10,.0f} images/s, {fed / tensors:4.0%}; "
                f"{fed * row['bytes'] / 1e6:,.0f} MB/s; {tensors / per_core:.1f} cores would feed it"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="resmlp_s24")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--source", default="", help="labeled images [default: made for this]")
    parser.add_argument("--images", type=int, default=2048, help="training images that are made")
    parser.add_argument("--workers", type=int, default=0, help="decoding workers [default: the cores of the process]")
    parser.add_argument("--uses", default="train,eval,predict,text", help="what is measured")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a measurement")
    parser.add_argument("--out", type=Path, help="file for the record (JSON)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("ALLMLP_CACHE", str(Path(folder) / "cache"))
        found = measure(options, Path(folder))
    record = {"environment": environment(torch.device(options.device)), **found}
    if options.out:
        write_json_atomically(options.out, record)


if __name__ == "__main__":
    main()
