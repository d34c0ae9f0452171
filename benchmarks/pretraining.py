"""Speed of masked-language-model training: gMLP, aMLP and BERT here, BERT of transformers, on one GPU in one run.

python benchmarks/pretraining.py                 models of the wiki_* recipes and one of transformers of their size
python benchmarks/pretraining.py --size base     gmlp_l36, bert_base and transformers' BERT-base
python benchmarks/pretraining.py --batch 2 --device cpu --rounds 1 --steps 1     a trial

Each model is a process of its own: they compile side by side, then are timed alone, in turn, several rounds long, with
the card's matrix rate measured in between. A step is masking, forward, backward and optimizer in bfloat16 (float32 on a
CPU), on random tokens. Ours are trained by Muon and transformers' by fused AdamW. transformers' output layer runs over
every token; `masked` is the same model with the output layer on the hidden tokens alone, as here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from allmlp import create
from allmlp.compilation import compile_task
from allmlp.data.tokenizer import SPECIAL_TOKENS
from allmlp.files import write_json_atomically
from allmlp.meter import peak_flops
from allmlp.models.cost import measure
from allmlp.models.zoo import preset
from allmlp.optim import Muon
from allmlp.parallel import World
from allmlp.provenance import environment
from allmlp.recipes import runs
from allmlp.tasks.masked_lm import MaskedLM, Masking
from allmlp.train_step import RecordedStep, TrainStep

VOCABULARY, MASK = 30_522, 4
SIZES = {
    "small": {"gMLP": "wiki_gmlp", "aMLP": "wiki_amlp", "BERT": "wiki_bert"},
    "base": {"gMLP": "gmlp_l36", "BERT": "bert_base"},
}
SHAPES = {"small": (9, 512, 8), "base": (12, 768, 12)}
"""Layers, width and heads of transformers' BERT."""
Step = Callable[[Tensor], object]


def ours(name: str, device: torch.device, length: int) -> tuple[Step, int, int]:
    """One step of our own training, as `allmlp train` does it; its floating-point operations per row; parameters."""
    spec = runs(name)[name].model if name.startswith("wiki") else preset(name).spec
    assert spec is not None
    special = torch.zeros(VOCABULARY, dtype=torch.bool)
    special[: len(SPECIAL_TOKENS)] = True
    masks = {"special_tokens_mask": special, "continuation_mask": torch.zeros_like(special)}
    tokenizer = SimpleNamespace(pad_token_id=0, mask_token_id=MASK, **masks)
    dataset: Any = SimpleNamespace(tokenizer=tokenizer, seq_len=length)
    task = MaskedLM(Masking(0.15)).build(create(spec, vocab_size=VOCABULARY, seq_len=length, device=device), dataset)
    compile_task(task.train())
    optimizer = Muon(lr=1e-3).build(task)
    world = World(0, 1, device)
    cuda = device.type == "cuda"
    train_step = TrainStep(task, optimizer, world, torch.bfloat16 if cuda else torch.float32, max_grad_norm=1.0)
    step = RecordedStep(train_step) if cuda else train_step
    numbers = task.spec.masking.num_uniforms(length)
    return (
        lambda ids: step([(ids, torch.rand(len(ids), numbers, device=device))]),
        task.flops,
        measure(task.model.spec).parameters,
    )


def transformers(shape: tuple[int, int, int], device: torch.device, length: int, masked: bool) -> tuple[Step, int, int]:
    """The same for BertForMaskedLM; with `masked` its output layer runs for the hidden tokens alone."""
    from transformers import BertConfig, BertForMaskedLM

    layers, width, heads = shape
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        attn_implementation="sdpa",
    )
    model = BertForMaskedLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    cuda, count = device.type == "cuda", round(0.15 * length)

    def loss(ids: Tensor, uniforms: Tensor) -> Tensor:
        places = uniforms.topk(count, dim=1).indices
        asked = ids.gather(1, places)
        inputs = ids.scatter(1, places, MASK)
        if not masked:
            labels = torch.full_like(ids, -100).scatter(1, places, asked)
            return model(inputs, labels=labels).loss
        features = model.bert(inputs).last_hidden_state
        chosen = features.gather(1, places.unsqueeze(2).expand(-1, -1, width))
        return torch.nn.functional.cross_entropy(model.cls(chosen).flatten(0, 1).float(), asked.flatten())

    compiled = torch.compile(loss)

    def step(ids: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            total = compiled(ids, torch.rand(ids.shape, device=device))
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    body = layers * (12 * width * width * length + 2 * length * length * width)
    head = (width * width + width * VOCABULARY) * (count if masked else length)
    return step, 6 * (body + head), sum(weight.numel() for weight in model.parameters())


@contextmanager
def turn(number: int, whose: Any, everyone: int) -> Iterator[None]:
    """Wait for one's turn, and hand it on."""
    while whose.value != number:
        time.sleep(0.005)
    yield
    whose.value = (number + 1) % everyone


def worker(number: int, name: str, options: argparse.Namespace, ready: Any, whose: Any, results: Any) -> None:
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    if name in SIZES[options.size]:
        step, flops, parameters = ours(SIZES[options.size][name], device, options.seq_len)
    else:
        step, flops, parameters = transformers(
            SHAPES[options.size], device, options.seq_len, masked=name.endswith("masked")
        )
    ids = torch.randint(len(SPECIAL_TOKENS), VOCABULARY, (options.batch, options.seq_len), device=device)
    for _ in range(6 if device.type == "cuda" else 1):
        step(ids)
    wait(device)
    ready.wait()
    rates, peaks = [], []
    for _ in range(options.rounds):
        with turn(number, whose, ready.parties):
            peaks.append(peak_flops(device))
            step(ids)
            wait(device)
            start = time.perf_counter()
            for _ in range(options.steps):
                step(ids)
            wait(device)
            rates.append(options.steps * options.batch / (time.perf_counter() - start))
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    middle, peak = statistics.median(rates), statistics.median(peaks)
    results.put(
        {
            "model": name,
            "parameters": parameters,
            "tokens/s": middle * options.seq_len,
            "spread": (max(rates) - min(rates)) / middle,
            "share of peak": middle * flops / peak,
            "peak TFLOP/s": peak / 1e12,
            "GiB": memory,
        }
    )


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def collect(results: Any, processes: list[Any]) -> list[dict[str, Any]]:
    """One row from each process; if one fails, all end."""
    rows: list[dict[str, Any]] = []
    while len(rows) < len(processes):
        try:
            rows.append(results.get(timeout=1))
        except queue.Empty:
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.kill()
                raise SystemExit("a model failed: see above") from None
    for process in processes:
        process.join()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="write the numbers here too")
    options = parser.parse_args()
    names = [*SIZES[options.size], "transformers", "transformers masked"]
    context = multiprocessing.get_context("spawn")
    ready, whose, results = context.Barrier(len(names)), context.Value("i", 0), context.Queue()
    processes = [
        context.Process(target=worker, args=(number, name, options, ready, whose, results))
        for number, name in enumerate(names)
    ]
    for process in processes:
        process.start()
    rows = sorted(collect(results, processes), key=lambda row: names.index(row["model"]))
    print(f"{'model':<20} {'parameters':>10} {'tokens/s':>10} {'spread':>7} {'of peak':>8} {'GiB':>6}")
    for row in rows:
        print(
            f"{row['model']:<20} {row['parameters'] / 1e6:>8.1f} M {row['tokens/s']:>10,.0f} {row['spread']:>7.1%} "
            f"{row['share of peak']:>8.1%} {row['GiB']:>6.1f}"
        )
    if options.json:
        about = environment(torch.device(options.device))
        write_json_atomically(Path(options.json), {"environment": about, "options": vars(options), "rows": rows})


if __name__ == "__main__":
    main()
