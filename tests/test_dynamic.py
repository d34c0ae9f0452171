"""Models that read pictures of any size: the answers, gradients and memory of a resized one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import allmlp
from allmlp.models import grid
from allmlp.models.grid import AnySize, Resize, interpolation
from allmlp.weights.resize import resized
from tiny import randomise

FAMILIES = ["mixer_nano", "resmlp_nano", "gmlp_nano", "amlp_nano", "vit_nano"]


def any_size(name: str = "gmlp_nano", **changes: object) -> AnySize:
    model = allmlp.create(name, dynamic=True, seed=0, overrides={"depth": 2}, **changes)
    randomise(model, spread=0.05)
    assert isinstance(model, AnySize)
    return model


@pytest.mark.parametrize("image", [(16, 16), (24, 40), (48, 48)])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_answers_as_the_resized_model(name: str, image: tuple[int, int]) -> None:
    model = any_size(name).eval()
    other = resized(allmlp.create(model.spec), image)
    other.load_state_dict(Resize(model.spec, other.spec)(model.state_dict()))
    other.eval()
    images = torch.randn(2, 3, *image)
    with torch.no_grad():
        for _ in range(2):  # the second time from what was kept
            assert torch.equal(model(images), other(images))
            assert torch.equal(model.forward_features(images), other.forward_features(images))
        inside = model.forward_intermediates(images, ["blocks.0", "norm"])
        assert torch.equal(inside["norm"], other.forward_features(images))


def test_at_its_own_size_it_is_itself(tmp_path: Path) -> None:
    model = any_size().eval()
    plain = allmlp.create("gmlp_nano", overrides={"depth": 2}).eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(*(x := plain.example(2))), plain(*x)) and not model.sizes
    allmlp.save(model, tmp_path)
    assert type(allmlp.load(tmp_path)) is type(plain)
    again = allmlp.load(tmp_path, dynamic=True)
    images = torch.randn(1, 3, 48, 24)
    assert isinstance(again, AnySize) and torch.equal(again(images), model(images))


def test_gradients_are_those_of_the_chain_rule() -> None:
    """dL/dW = U^T (dL/dW') D^T, with dL/dW' from a model that was resized beforehand."""
    model = any_size("resmlp_nano").double()
    other = resized(allmlp.create(model.spec, dtype=torch.float64), 48)
    other.load_state_dict(Resize(model.spec, other.spec)(model.state_dict()))
    images = torch.randn(2, 3, 48, 48, dtype=torch.float64)
    for each in (model, other):
        each(images).square().sum().backward()
    up, down = (part.float().double() for part in (interpolation((8, 8), (12, 12)), interpolation((12, 12), (8, 8))))
    for (name, weight), (_, far) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        expected = far.grad
        if name.endswith("token.mix.weight"):
            expected = up.T @ far.grad @ down.T
        elif name.endswith("token.mix.bias"):
            expected = up.T @ far.grad
        torch.testing.assert_close(weight.grad, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights were resized so far."""
    made = [0]
    resample = Resize.resample

    def counting(self: Resize, weight: Tensor, role: grid.Role) -> Tensor:
        made[0] += 1
        return resample(self, weight, role)

    monkeypatch.setattr(Resize, "resample", counting)
    return made


def step(model: AnySize) -> None:
    model(torch.randn(2, 3, 24, 24)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


CHANGES: dict[str, Callable[[AnySize], object]] = {
    "a training step": step,
    "other weights": lambda model: model.load_state_dict(any_size(classes=10).state_dict()),
    "assigned weights": lambda model: model.load_state_dict(
        {name: weight + 1 for name, weight in model.state_dict().items()}, assign=True
    ),
    "a write": lambda model: model.blocks[0].channel.mix.inner.proj.weight.detach().mul_(2),
    "another precision": lambda model: model.double().float().bfloat16().float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_kept_is_made_anew_when_a_weight_changes(change: str, counted: list[int]) -> None:
    model = any_size().eval()
    images = torch.randn(1, 3, 24, 24)
    with torch.no_grad():
        model(images)
        first = counted[0]
        model(images)
        assert counted[0] == first > 0
    CHANGES[change](model)
    with torch.no_grad():
        answer = model(images)
        assert torch.equal(answer, resized(model, 24)(images))


def test_nothing_is_kept_where_gradients_are_asked_for(counted: list[int]) -> None:
    model, images = any_size(), torch.randn(1, 3, 24, 24)
    model(images)
    first = counted[0]
    model(images)
    assert counted[0] == 2 * first
    with torch.inference_mode():
        model.eval()(images)
    model.train()(images).sum().backward()
    gradient = model.blocks[0].channel.mix.inner.proj.weight.grad
    assert gradient is not None and gradient.abs().sum() > 0


def test_only_the_last_sizes_are_kept() -> None:
    model = any_size().eval()
    with torch.no_grad():
        for side in (*range(4, 60, 4), 4, 56):
            if side != 32:
                model(torch.randn(1, 3, side, side))
    sizes = [spec.stem.image[0] for spec, _ in model.sizes]
    assert (
        len(sizes) == grid.KEPT
        and sizes[-2:] == [4, 56]
        and set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    )


def test_a_new_head_is_seen_at_every_size() -> None:
    model = any_size().eval()
    images = torch.randn(1, 3, 24, 24)
    assert model(images).shape == (1, 10)
    assert model.reset_head(4)(images).shape == (1, 4) and model(torch.randn(1, 3, 32, 32)).shape == (1, 4)


def test_drop_path_and_checkpointing_hold_at_every_size() -> None:
    model = any_size(drop_path=0.5).set_grad_checkpointing()
    images = torch.randn(8, 3, 24, 24)
    answers = [model(images) for _ in range(4)]
    assert not all(torch.equal(answers[0], answer) for answer in answers)
    model.eval()
    assert torch.equal(model(images), model(images))


def test_mistakes() -> None:
    model = any_size()
    with pytest.raises(allmlp.UserError, match="nearest size that works is 48x32"):
        model(torch.randn(1, 3, 50, 33))
    with pytest.raises(allmlp.UserError, match="expected float images"):
        model(torch.zeros(3, 32, 32))
    with pytest.raises(allmlp.UserError, match="1 channels"):
        model(torch.randn(1, 1, 48, 48))
    for name in ("gmlp_mlm_tiny", "resmlp_seq2seq_tiny"):
        with pytest.raises(allmlp.UserError, match="only this library's image models"):
            allmlp.create(name, dynamic=True)
