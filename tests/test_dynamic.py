"""Models with dynamic image size: outputs, gradients and memory are those of a resized model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import allmlp
from allmlp.layers.context import BuildContext
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.layers.token_roles import TokenRole
from allmlp.lora import Lora, merge
from allmlp.models import grid
from allmlp.models.grid import DynamicEncoderModel, GridResize, interpolation_matrix
from allmlp.quantization import Quantization, round_weights
from allmlp.weights.resize import resize_model
from tiny import randomize

FAMILIES = ["mixer_nano", "resmlp_nano", "gmlp_nano", "amlp_nano", "vit_nano", "convmixer_nano"]


def dynamic_model(name: str = "gmlp_nano", **options: object) -> DynamicEncoderModel:
    small = {"depth": 2, "width": 16} if name == "convmixer_nano" else {"depth": 2}
    model = allmlp.create(name, dynamic=True, seed=0, overrides=small, **options)  # type: ignore[arg-type]
    randomize(model, spread=0.05)
    assert isinstance(model, DynamicEncoderModel)
    return model


@pytest.mark.parametrize("img_size", [(16, 16), (24, 40), (48, 48)])
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_equal_those_of_the_resized_model(name: str, img_size: tuple[int, int]) -> None:
    model = dynamic_model(name).eval()
    other = resize_model(allmlp.create(model.spec), img_size)
    other.load_state_dict(GridResize(model.spec, other.spec)(model.state_dict()))
    other.eval()
    images = torch.randn(2, 3, *img_size)
    with torch.no_grad():
        for _ in range(2):  # the second pass uses the cache
            assert torch.equal(model(images), other(images))
            assert torch.equal(model.forward_features(images), other.forward_features(images))
        inside = model.forward_activations(images, ["blocks.0", "norm"])
        assert torch.equal(inside["norm"], other.forward_features(images))


def test_all_sizes_share_the_statistics_of_batch_norm() -> None:
    model = dynamic_model("convmixer_nano").train()
    model(torch.randn(2, 3, 48, 48))
    assert model.stem.norm.num_batches_tracked == 1 and model.stem.norm.running_mean.abs().sum() > 0
    other = resize_model(allmlp.create(model.spec), 48).eval()
    other.load_state_dict(model.state_dict())
    images = torch.randn(1, 3, 48, 48)
    assert torch.equal(model.eval()(images), other(images))


def test_its_own_size_needs_no_resizing(tmp_path: Path) -> None:
    model = dynamic_model().eval()
    plain = allmlp.create("gmlp_nano", overrides={"depth": 2}).eval()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(*(x := plain.dummy_inputs(2))), plain(*x)) and not model.variants
    allmlp.save(model, tmp_path)
    assert type(allmlp.load(tmp_path)) is type(plain)
    again = allmlp.load(tmp_path, dynamic=True)
    images = torch.randn(1, 3, 48, 24)
    assert isinstance(again, DynamicEncoderModel) and torch.equal(again(images), model(images))


def test_gradients_follow_the_chain_rule() -> None:
    """dL/dW = U^T (dL/dW') D^T, with dL/dW' from a model that was resized beforehand."""
    model = dynamic_model("resmlp_nano").double()
    other = resize_model(allmlp.create(model.spec, dtype=torch.float64), 48)
    other.load_state_dict(GridResize(model.spec, other.spec)(model.state_dict()))
    images = torch.randn(2, 3, 48, 48, dtype=torch.float64)
    for each in (model, other):
        each(images).square().sum().backward()
    up, down = (interpolation_matrix(*sizes).float().double() for sizes in (((8, 8), (12, 12)), ((12, 12), (8, 8))))
    for (name, weight), (_, far) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        expected = far.grad
        if name.endswith("token.mix.weight"):
            expected = up.T @ far.grad @ down.T
        elif name.endswith("token.mix.bias"):
            expected = up.T @ far.grad
        torch.testing.assert_close(weight.grad, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture
def resize_count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of weights resized so far."""
    count = [0]
    resize = GridResize.resize

    def counting(self: GridResize, weight: Tensor, role: TokenRole, *matrices: Tensor) -> Tensor:
        count[0] += 1
        return resize(self, weight, role, *matrices)

    monkeypatch.setattr(GridResize, "resize", counting)
    return count


def training_step(model: DynamicEncoderModel) -> None:
    model(torch.randn(2, 3, 24, 24)).square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


CHANGES: dict[str, Callable[[DynamicEncoderModel], object]] = {
    "a training step": training_step,
    "loaded weights": lambda model: model.load_state_dict(dynamic_model(num_classes=10).state_dict()),
    "assigned weights": lambda model: model.load_state_dict(
        {name: weight + 1 for name, weight in model.state_dict().items()}, assign=True
    ),
    "an in-place change": lambda model: model.blocks[0].channel.mix.inner.proj.weight.detach().mul_(2),
    "another precision": lambda model: model.double().float().bfloat16().float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_invalidates_the_cache(change: str, resize_count: list[int]) -> None:
    model = dynamic_model().eval()
    images = torch.randn(1, 3, 24, 24)
    with torch.no_grad():
        model(images)
        first = resize_count[0]
        model(images)
        assert resize_count[0] == first > 0
    CHANGES[change](model)
    with torch.no_grad():
        assert torch.equal(model(images), resize_model(model, 24)(images))


def test_nothing_is_cached_with_gradients(resize_count: list[int]) -> None:
    model, images = dynamic_model(), torch.randn(1, 3, 24, 24)
    model(images)
    first = resize_count[0]
    model(images)
    assert resize_count[0] == 2 * first
    with torch.inference_mode():
        model.eval()(images)
    model.train()(images).sum().backward()
    gradient = model.blocks[0].channel.mix.inner.proj.weight.grad
    assert gradient is not None and gradient.abs().sum() > 0


def test_only_the_last_sizes_are_cached() -> None:
    model = dynamic_model().eval()
    with torch.no_grad():
        for side in (*range(4, 60, 4), 4, 56):
            if side != 32:
                model(torch.randn(1, 3, side, side))
    sizes = [img_size[0] for _, img_size, _ in model.variants]
    assert len(sizes) == grid.MAX_CACHED_SIZES and sizes[-2:] == [4, 56]
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_a_new_head_is_used_at_every_size() -> None:
    model = dynamic_model().eval()
    images = torch.randn(1, 3, 24, 24)
    assert model(images).shape == (1, 10)
    assert model.reset_classifier(4)(images).shape == (1, 4) and model(torch.randn(1, 3, 32, 32)).shape == (1, 4)


def test_drop_path_and_checkpointing_apply_at_every_size() -> None:
    model = dynamic_model(drop_path=0.5).set_grad_checkpointing()
    images = torch.randn(8, 3, 24, 24)
    outputs = [model(images) for _ in range(4)]
    assert not all(torch.equal(outputs[0], output) for output in outputs)
    model.eval()
    assert torch.equal(model(images), model(images))


@pytest.mark.parametrize("name", ["gmlp_nano", "convmixer_nano", "cyclemlp_nano"])
def test_gradients_with_checkpointing_at_another_size(name: str) -> None:
    model, images, gradients = dynamic_model(name), torch.randn(2, 3, 48, 32), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable).zero_grad()
        model(images).square().sum().backward()
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_frozen_blocks_stay_frozen_at_every_size() -> None:
    model = dynamic_model(drop_path=0.9).train()
    model.blocks.eval()
    images = torch.randn(16, 3, 24, 24)
    assert torch.equal(model(images), model(images))


def test_a_new_own_size_is_the_source_of_all_sizes() -> None:
    model, images = dynamic_model("mixer_nano").eval(), torch.randn(1, 3, 24, 24)
    model(images)
    model.set_input_size(48)
    assert torch.equal(model(images), resize_model(model, 24)(images))


def test_it_takes_over_what_is_frozen() -> None:
    model = allmlp.create("gmlp_nano", overrides={"depth": 2}).train().set_grad_checkpointing()
    model.stem.requires_grad_(False).eval()
    dynamic = grid.make_dynamic(model)
    for one in (model, dynamic):
        assert not one.stem.proj.weight.requires_grad and one.head.proj.weight.requires_grad
        assert not one.stem.training and one.blocks.training and one.checkpointing
    assert dynamic.stem.proj.weight is model.stem.proj.weight


def test_adapters_and_rounded_weights_count_at_every_size() -> None:
    images = torch.randn(1, 3, 24, 24)
    model, adapted = dynamic_model("mixer_nano").eval(), dynamic_model("mixer_nano").eval()
    adapted.load_state_dict(model.state_dict())
    Lora(2).apply(adapted)
    torch.testing.assert_close(adapted(images), model(images))  # the adapters start at zero
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if name.endswith("lora_b"):
                weight.fill_(0.1)
    before = adapted(images)
    before.sum().backward()
    assert all(weight.grad is not None for weight in adapted.parameters() if weight.requires_grad)
    merge(adapted)
    torch.testing.assert_close(adapted(images), before)
    Quantization(bits=2).apply(model)
    before = model(images)
    round_weights(model)
    torch.testing.assert_close(model(images), before)


class TokenScale(TokenMixer, abstract=True):  # not registered
    """A mixer from outside the package with a weight per token, whose role is declared or not."""

    declared: bool = True

    def build(self, ctx: BuildContext) -> nn.Module:
        return TokenScaleLayer(ctx.tokens, self.declared)


class TokenScaleLayer(nn.Module):
    def __init__(self, tokens: int, declared: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0, 1, tokens))
        if declared:
            self.token_roles = {"gain": "out"}

    def forward(self, x: Tensor, context: object) -> Tensor:
        return x * self.gain[:, None]


def test_a_new_mixer_declares_its_token_weights() -> None:
    options = {"depth": 2, "block.token": TokenScale()}
    model = allmlp.create("resmlp_nano", dynamic=True, overrides=options)
    assert model(torch.randn(1, 3, 48, 48)).shape == (1, 10)
    model = allmlp.create("resmlp_nano", dynamic=True, overrides=options | {"block.token": TokenScale(declared=False)})
    with pytest.raises(allmlp.UserError, match=r"blocks\.0\.token\.mix\.gain .* TokenScaleLayer does not declare"):
        model(torch.randn(1, 3, 48, 48))


def test_mistakes() -> None:
    model = dynamic_model()
    with pytest.raises(allmlp.UserError, match="48x32"):
        model(torch.randn(1, 3, 50, 33))
    with pytest.raises(allmlp.UserError, match="expected float images"):
        model(torch.zeros(3, 32, 32))
    with pytest.raises(allmlp.UserError, match="3 channels, got 1"):
        model(torch.randn(1, 1, 48, 48))
    for name in ("gmlp_mlm_tiny", "resmlp_seq2seq_tiny"):
        with pytest.raises(allmlp.UserError, match="only this library's image models"):
            allmlp.create(name, dynamic=True)
