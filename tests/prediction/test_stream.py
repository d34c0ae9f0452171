"""Any number of inputs in bounded memory, decoded in threads, broken ones left out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from allmlp import UserError
from allmlp.prediction import open_predictor
from allmlp.prediction.inputs import Inputs, Item
from allmlp.prediction.stream import Results, answers, features, predictions

BATCH = 16
MOST = 5 * BATCH + 1
"""One batch that is answered, one that is computed, three that are decoded, and the next input."""


class Decoded:
    """Counts how many of its kind are in memory."""

    alive = most = 0
    lock = threading.Lock()

    def __init__(self, number: int) -> None:
        self.number = number
        with Decoded.lock:
            Decoded.alive += 1
            Decoded.most = max(Decoded.most, Decoded.alive)

    def __del__(self) -> None:
        with Decoded.lock:
            Decoded.alive -= 1


def decode(number: int) -> Decoded:
    assert threading.current_thread().name.startswith("decode")
    if number % 7 == 3:
        raise UserError("broken")
    return Decoded(number)


def compute(batch: list[Decoded]) -> Results:
    assert threading.current_thread() is threading.main_thread() and 0 < len(batch) <= BATCH
    assert len({one.number // BATCH for one in batch}) == 1, "consecutive inputs are one batch, without the broken ones"
    squares = [one.number**2 for one in batch]
    return lambda: squares


def test_ten_thousand_inputs_in_flat_memory() -> None:
    listed = 0

    def items() -> Iterator[Item]:
        nonlocal listed
        for number in range(10_000):
            listed += 1
            yield Item(str(number), number)

    Decoded.alive = Decoded.most = 0
    count = 0
    for number, answer in enumerate(answers(items(), decode, compute, BATCH)):
        assert answer.item.name == str(number) and listed - number <= MOST
        assert answer.error == "broken" if number % 7 == 3 else answer.value == number**2
        count += 1
    assert count == 10_000 and BATCH // 2 < Decoded.most <= MOST


def test_a_gpu_computes_the_next_batch_while_answers_are_made() -> None:
    events = []

    def start(batch: list[int]) -> Results:
        events.append(f"start {batch[0]}")

        def results() -> list[int]:
            events.append(f"wait {batch[0]}")
            return batch

        return results

    items = [Item(str(number), number) for number in range(7)]
    found = answers(items, lambda number: number, start, 3, torch.device("meta"))
    assert [answer.value for answer in found] == [*range(7)]
    assert events == ["start 0", "start 3", "wait 0", "start 6", "wait 3", "wait 6"]


def test_stopping_early_ends_the_threads() -> None:
    before = {*threading.enumerate()}
    found = answers((Item(str(number), number) for number in range(1000)), decode, compute, BATCH)
    next(found)
    assert {*threading.enumerate()} - before
    found.close()
    assert not {*threading.enumerate()} - before  # threads of other tests may end meanwhile


def test_errors_that_are_no_fault_of_an_input_end_it() -> None:
    items = [Item(str(number), number) for number in range(50)]
    before = {*threading.enumerate()}

    def crash(batch: list[Any]) -> list[Any]:
        raise RuntimeError("bug")

    def exhaust(batch: list[Any]) -> list[Any]:
        raise torch.OutOfMemoryError

    with pytest.raises(RuntimeError, match="bug"):
        list(answers(items, decode, crash, BATCH))
    with pytest.raises(RuntimeError, match="bug"):
        list(answers(items, crash, compute, BATCH))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="batches of 16 do not fit into memory: use a smaller --batch-size"):
        list(answers(items, decode, exhaust, BATCH))
    with pytest.raises(UserError, match="batches of 16 do not fit into memory"):
        list(answers(items, exhaust, compute, BATCH))  # type: ignore[arg-type]  # as a copy to a GPU may
    assert not {*threading.enumerate()} - before
    assert [answer.error for answer in answers([Item("3", 3)] * 40, decode, compute, BATCH)] == ["broken"] * 40


def test_a_broken_image_leaves_the_answers_of_others_as_they_are(images: Path, photos: Path) -> None:
    predictor, threads = open_predictor(images, device="cpu"), torch.get_num_threads()
    whole = {one.item.name: one.value for one in predictions(predictor, Inputs([str(photos)], "images"), 3, 4)}
    (photos / "2.png").write_bytes(b"not an image")
    found = list(predictions(predictor, Inputs([str(photos)], "images"), 3, 4))
    assert [one.item.name for one in found] == [*whole] and torch.get_num_threads() == threads
    for one in found:
        if one.item.name.endswith("2.png"):
            assert one.value is None and one.error.startswith("not an image, or not one of the formats")
        else:
            expected = [(p.label, pytest.approx(p.probability, rel=1e-5), None) for p in whole[one.item.name][0]]
            assert [tuple(p) for p in one.value[0]] == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_answers_as_a_cpu(images: Path, photos: Path) -> None:
    (photos / "2.png").write_bytes(b"not an image")
    found, embedded = {}, {}
    for device in ("cpu", "cuda"):
        predictor = open_predictor(images, device=device)
        inputs = Inputs([str(photos)] * 50, "images")
        found[device] = list(predictions(predictor, inputs, 3, 3))
        embedded[device] = list(features(predictor, inputs, 3))
    for one, other in zip(found["cpu"], found["cuda"], strict=True):
        assert one.item == other.item and one.error == other.error and bool(one.error) == (other.value is None)
        if one.value:
            assert [p.probability for p in other.value[0]] == pytest.approx([p.probability for p in one.value[0]], 0.01)
    for one, other in zip(embedded["cpu"], embedded["cuda"], strict=True):
        assert one.error == other.error and (one.error or other.value == pytest.approx(one.value, 0.01, 0.01))
