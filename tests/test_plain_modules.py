"""Models are ordinary PyTorch modules: options of loading, compile, copies, workers, DDP, functional calls."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import allmlp
from allmlp.models.model import Model
from folders import image_folder, text_folder
from tiny import IMAGES, TEXTS, text_model, tiny_model
from train.launcher import Launcher
from train.test_distributed import launch

OPENERS = {"load": allmlp.load, "from_pretrained": allmlp.from_pretrained}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images"))


# --- loading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opener", OPENERS)
def test_options_of_loading(opener: str, images: Path, tmp_path: Path) -> None:
    load: Any = OPENERS[opener]
    model = load(images)
    assert model.dtype == torch.float32 and model.device.type == "cpu" and not model.training
    assert load(images, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert load(images, dtype="float16").dtype == torch.float16
    with pytest.raises(allmlp.UserError, match="float32, float16, bfloat16 or float64, not in int8"):
        load(images, dtype="int8")
    assert load(images, device="meta").device.type == "meta"
    with pytest.raises(allmlp.UserError, match=r"^cannot use the device xpu: torch sees no xpu device here$"):
        load(images, device="xpu")
    with pytest.raises(allmlp.UserError, match="cannot use the device gpu: Expected one of cpu, cuda"):
        load(images, device="gpu")
    assert load(images, img_size=(16, 24))(torch.zeros(2, 3, 16, 24)).shape == (2, 3)
    other = load(images, num_classes=7)
    assert other(torch.zeros(2, 3, 8, 12)).shape == (2, 7) and other.spec.head.num_classes == 7
    for name, weight in model.state_dict().items():
        assert name.startswith("head.") or torch.equal(other.state_dict()[name], weight)
    assert torch.equal(load(images, num_classes=3).head.proj.weight, model.head.proj.weight), "as many as it has"
    features = load(images, num_classes=0)
    assert features(torch.zeros(2, 3, 8, 12)).shape == (2, 16) and features.head is None
    allmlp.save(model, tmp_path / "half", dtype=torch.float16)
    half = load(tmp_path / "half")
    assert half.dtype == torch.float32 and half(torch.zeros(1, 3, 8, 12)).dtype == torch.float32
    assert load(tmp_path / "half", dtype=None).dtype == torch.float16


@pytest.mark.parametrize("name", IMAGES)
def test_features_of_image_models(name: str) -> None:
    """num_classes=0, pre_logits of `forward` and of `forward_head` are the same features."""
    model = tiny_model(name)
    x = model.dummy_inputs(2)
    expected = model.forward_head(model.forward_features(*x), pre_logits=True)
    assert torch.equal(model(*x, pre_logits=True), expected) and expected.shape == (2, model.num_features)
    bare = allmlp.create(model.spec, num_classes=0, dtype=model.dtype).eval()
    bare.load_state_dict({key: value for key, value in model.state_dict().items() if not key.startswith("head.")})
    assert torch.equal(bare(*x), expected) and torch.equal(bare(*x, pre_logits=True), expected)


@pytest.mark.parametrize("name", TEXTS)
def test_features_of_text_models(name: str) -> None:
    model = text_model(name)
    x = model.dummy_inputs(2)
    assert torch.equal(model(*x, pre_logits=True), model.forward_head(model.forward_features(*x), pre_logits=True))
    assert model(*x, pre_logits=True).shape[-1] == model.spec.width


# --- what PyTorch does with modules ---------------------------------------------------------------------------


def loss(model: Any, x: Tensor) -> Tensor:
    return model(x).square().sum()


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.slow
def test_compiled_models_train_and_predict(images: Path) -> None:
    model, twin, x = allmlp.load(images), allmlp.load(images), torch.randn(2, 3, 8, 12)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss(compiled, x).backward()
    loss(twin, x).backward()
    for name, gradient in gradients(twin).items():
        torch.testing.assert_close(gradients(model)[name], gradient)
    pixels = np.zeros((20, 30, 3), np.uint8)
    assert compiled.predict(pixels) == twin.predict(pixels)


@pytest.mark.parametrize("change", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("kind", ["images", "text"])
def test_copies_are_independent(change: Any, kind: str, images: Path, tmp_path: Path) -> None:
    model: Any = allmlp.load(images) if kind == "images" else allmlp.load(text_folder(tmp_path, "classes"))
    x = model.dummy_inputs(2)
    twin = change(model)
    assert torch.equal(twin(*x), model(*x)) and twin.spec == model.spec and not twin.training
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
    assert not torch.equal(twin(*x), model(*x))


def test_functional_calls(images: Path) -> None:
    """Other weights without changing the model; per-example gradients by vmap add up to those of the batch."""
    model, x = allmlp.load(images), torch.randn(3, 3, 8, 12)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    doubled = {name: 2 * weight for name, weight in weights.items()}
    assert not torch.equal(torch.func.functional_call(model, doubled, (x,)), model(x))

    def example_loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(example_loss), in_dims=(None, 0))(weights, x)
    loss(model, x).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(each[name].sum(0), gradient, atol=1e-4, rtol=1e-4)


class Transformed(Dataset[Tensor]):
    """Holds a model: its transform, or its features."""

    def __init__(self, model: Model, features: bool) -> None:
        self.model, self.features = model, features

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        batch = self.model.transform(np.full((20, 30, 3), 40 * index, np.uint8))
        with torch.no_grad():
            return self.model(batch)[0] if self.features else batch[0]


@pytest.mark.parametrize(
    ("start", "features"), [("fork", False), ("fork", True), pytest.param("spawn", True, marks=pytest.mark.slow)]
)
def test_workers(start: str, features: bool, images: Path) -> None:
    dataset = Transformed(allmlp.load(images).requires_grad_(False), features)
    expected = torch.stack([dataset[index] for index in range(len(dataset))])
    loader = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context=start)
    (batch,) = loader
    torch.testing.assert_close(batch, expected)


IN_PARALLEL = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import allmlp
from test_plain_modules import gradients, loss
out, folder = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
wrapped = DistributedDataParallel(allmlp.load(folder).train())
x = torch.randn(4, 3, 8, 12, generator=torch.Generator().manual_seed(0))
(loss(wrapped, x[rank::2]) / 2).backward()
torch.save(gradients(wrapped.module), f"{out}/{rank}.pt")
del wrapped  # freed after its group is destroyed, it can wait forever for a thread of gloo that waits for Python's lock
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_raw_model_in_two_processes(images: Path, launcher: Launcher, tmp_path: Path) -> None:
    """The gradients of both are those of one process with the whole batch."""
    launch(launcher, IN_PARALLEL, tmp_path, str(images))
    model = allmlp.load(images).train()
    x = torch.randn(4, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    (loss(model, x) / 4).backward()
    expected = gradients(model)
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
