"""Wrong inputs to a model: one clear line each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import allmlp
from tiny import tiny_model


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.rand(1, 3, 8, 8), "built for 6x8 images, got 8x8"),
        (torch.rand(1, 4, 6, 8), "expected images with 3 channels, got 4"),
        (torch.rand(3, 6, 8), "expected float images of shape"),
        (torch.zeros(1, 3, 6, 8, dtype=torch.uint8), "expected float images"),
        (torch.rand(1, 3, 6, 8, dtype=torch.float64), r"float64 and the model float32: convert the input, x\.float"),
    ],
)
def test_images(images: Tensor, message: str) -> None:
    with pytest.raises(allmlp.UserError, match=message):
        tiny_model("mixer_s32", torch.float32)(images)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([[1, 2, 31]]), "token id 31 is outside the vocabulary of 31"),
        (torch.tensor([[-1, 2]]), "token id -1 is outside"),
        (torch.zeros(1, 13, dtype=torch.long), "13 tokens are longer than the 12"),
        (torch.zeros(1, 3), "expected token ids"),
        (torch.zeros(3, dtype=torch.long), "expected token ids"),
        (torch.zeros(1, 3, dtype=torch.bool), "expected token ids"),
    ],
)
def test_token_ids(ids: Tensor, message: str) -> None:
    with pytest.raises(allmlp.UserError, match=message):
        tiny_model("gmlp_l18", torch.float32)(ids)


def test_mask_that_does_not_fit() -> None:
    ids = torch.zeros(2, 5, dtype=torch.long)
    with pytest.raises(allmlp.UserError, match="mask"):
        tiny_model("gmlp_l18")(ids, torch.ones(2, 4, dtype=torch.bool))


def test_a_mask_of_numbers_is_refused() -> None:
    model, ids = tiny_model("bert_base", torch.float32), torch.randint(31, (2, 5))
    for mask in (torch.ones(2, 5), torch.ones(2, 5, dtype=torch.long)):
        with pytest.raises(allmlp.UserError, match="the mask must be bool"):
            model(ids, mask)
    translator = tiny_model("resmlp_seq2seq_6", torch.float32)
    with pytest.raises(allmlp.UserError, match="the mask must be bool"):
        translator.decode(ids, torch.randn(2, 5, 16), memory_mask=torch.ones(2, 5))


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (torch.full((1, 3), 2), "segment 2 is outside the 2 of the model"),
        (torch.zeros(1, 4, dtype=torch.long), r"the segments \[1, 4\] do not match the tokens \[1, 3\]"),
    ],
)
def test_segments(segments: Tensor, message: str) -> None:
    with pytest.raises(allmlp.UserError, match=message):
        tiny_model("bert_base", torch.float32)(torch.zeros(1, 3, dtype=torch.long), segments=segments)


def test_gradients_per_example_of_texts() -> None:
    model, ids = tiny_model("mixer_mlm"), torch.randint(31, (3, 5))
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (row[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, ids)["stem.embedding.weight"]
    loss(weights, ids[1]).backward()
    assert torch.allclose(found[1], model.stem.embedding.weight.grad)


def test_token_ids_of_other_integer_types() -> None:
    model = tiny_model("mixer_mlm")
    ids = torch.randint(31, (2, 5))
    assert torch.equal(model(ids.int()), model(ids))
