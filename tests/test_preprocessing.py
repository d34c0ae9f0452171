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


def test_token_ids_of_other_integer_types() -> None:
    model = tiny_model("gmlp_l18")
    ids = torch.randint(31, (2, 5))
    assert torch.equal(model(ids.int()), model(ids))
