"""The batching engine without a server."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch
from torch import Tensor

from allmlp.prediction import open_predictor
from allmlp.serve.engine import BatchingEngine
from serve.folders import image_folder


def test_results_are_those_of_the_predictor(tmp_path: Path) -> None:
    predictor = open_predictor(image_folder(tmp_path), device="cpu")
    images = list(torch.randint(0, 256, (40, 3, 8, 12), dtype=torch.uint8))
    expected = predictor.probabilities(images)  # type: ignore[arg-type]
    with BatchingEngine(max_batch_size=8) as engine:
        futures = [engine.submit(predictor.probabilities, image) for image in images]
        found = [future.result(30) for future in futures]
    assert torch.stack([one.value for one in found]) == pytest.approx(expected.numpy(), abs=1e-5)
    assert max(one.batch_size for one in found) == 8


def test_models_take_turns_and_stopping_completes_the_queue() -> None:
    batches: list[tuple[str, int]] = []
    go = threading.Event()

    def first(items: list[Tensor]) -> Tensor:
        go.wait(10)
        batches.append(("first", len(items)))
        return torch.stack(items)

    def second(items: list[int]) -> list[int]:
        batches.append(("second", len(items)))
        return [item + 1 for item in items]

    engine = BatchingEngine(max_batch_size=3)
    engine.start()
    head = engine.submit(first, torch.tensor(0))
    while engine.queue:
        time.sleep(0.005)
    tensors = [engine.submit(first, torch.tensor(number)) for number in range(1, 5)]
    numbers = [engine.submit(second, number) for number in range(2)]
    cancelled = engine.submit(second, 9)
    assert cancelled.cancel()
    go.set()
    engine.stop()
    assert [int(one.result().value) for one in (head, *tensors)] == [0, 1, 2, 3, 4]
    assert [one.result().value for one in numbers] == [1, 2]
    assert batches == [("first", 1), ("first", 3), ("first", 1), ("second", 2)]
    with pytest.raises(CancelledError):
        cancelled.result()


def test_batches_of_another_size_begin_with_the_number_of_threads_that_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("allmlp.threads.limit", lambda: 4)

    def function(items: list[int]) -> list[int]:
        return items

    engine = BatchingEngine()
    single = engine.thread_count(function, 1)
    assert single.is_measuring and single.count == 4
    single.plan, single.is_measuring = [(0, 2)], False
    several = engine.thread_count(function, 9)
    assert several is engine.thread_count(function, 15) is not single
    assert several.count == 2 and not several.is_measuring
    assert BatchingEngine(fixed_threads=1).thread_count(function, 1).active is False
