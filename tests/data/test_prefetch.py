"""Reading ahead: in order, so many at a time, errors where they belong."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from allmlp.data.dataset import LabeledImages
from allmlp.data.prefetch import Transfer, copy_alone, read_ahead


def test_order_and_errors() -> None:
    def read(number: int) -> int:
        time.sleep(0.002 * (number % 3 == 0))
        if number == 8:
            raise ValueError("the ninth")
        return number

    source = read_ahead(read, range(100), 4)
    assert [next(source) for _ in range(8)] == list(range(8))
    with pytest.raises(ValueError, match="the ninth"):
        next(source)
    assert list(read_ahead(read, [], 4)) == []


def test_no_more_is_held_than_was_asked_for() -> None:
    begun, lock = [], threading.Lock()

    def read(number: int) -> int:
        with lock:
            begun.append(number)
        return number

    source = read_ahead(read, range(1000), ahead=6, workers=2)
    for number in range(50):
        assert next(source) == number
        assert len(begun) <= number + 6, "more batches than the reader and the queue hold"
    source.close()
    done = len(begun)
    time.sleep(0.02)
    assert len(begun) == done, "nothing is read for a reader that has gone"


def test_a_transfer_on_a_cpu() -> None:
    examples = LabeledImages(torch.ones(2, 1, 3, 3, dtype=torch.uint8), torch.arange(2))
    transfer = Transfer(torch.device("cpu"))
    found = transfer.receive(transfer.send(examples))
    assert isinstance(found, LabeledImages) and torch.equal(found.labels, examples.labels)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3, 5)])
def test_copies_by_one_thread(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = torch.randint(2, shape).to(dtype).permute([*reversed(range(len(shape)))])
    target = torch.empty(source.shape, dtype=dtype)
    copy_alone(source, target)
    assert torch.equal(target, source)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_transfer_to_a_gpu_while_it_computes() -> None:
    device = torch.device("cuda")
    transfer, wanted = Transfer(device), [torch.randint(255, (64, 3, 224, 224), dtype=torch.uint8) for _ in range(8)]
    labels = torch.arange(64)
    sums = []
    for moving in read_ahead(lambda number: transfer.send(LabeledImages(wanted[number], labels)), range(8)):
        torch.cuda._sleep(10_000_000)
        sums.append(transfer.receive(moving).images.long().sum())
    assert torch.stack(sums).tolist() == [int(images.long().sum()) for images in wanted]
