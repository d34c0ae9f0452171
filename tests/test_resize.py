"""Token weights at another image size: resample, mix, resample back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import allmlp
from allmlp.layers import ClassMlp, SpatialGate, Toeplitz
from allmlp.models.encoder import Encoder
from allmlp.models.resmlp import resmlp
from allmlp.weights.folder import transfer
from allmlp.weights.resize import Resize, Resized, interpolation

FAMILIES = ["mixer_nano", "resmlp_nano", "gmlp_nano", "amlp_nano", "vit_nano", "class"]


def spec(name: str, image: int | tuple[int, int] = 32) -> Encoder:
    found = resmlp(2, 24, 0.1, 4, 32, 10, pool=ClassMlp()) if name == "class" else allmlp.create(name).spec
    return found.configure(image=image).replace(depth=2)


def bring(x: Tensor, source: tuple[int, int], target: tuple[int, int]) -> Tensor:
    """b s c on one grid -> on another."""
    maps = x.transpose(1, 2).unflatten(2, source)
    return F.interpolate(maps, target, mode="bilinear", antialias=True).flatten(2).transpose(1, 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_to_the_same_size_nothing_changes(name: str) -> None:
    state = allmlp.create(spec(name), seed=0).state_dict()
    assert all(torch.equal(state[key], new) for key, new in Resize(spec(name), spec(name))(state).items())


@pytest.mark.parametrize("image", [16, 48, 64, (24, 40)])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_resized_weights_fit(name: str, image: int | tuple[int, int]) -> None:
    model = allmlp.create(spec(name), seed=0)
    other = allmlp.create(spec(name, image))
    other.load_state_dict(Resize(model.spec, other.spec)(model.state_dict()))  # type: ignore[arg-type]
    assert torch.isfinite(other(*other.example(2))).all()


@pytest.mark.parametrize("target", [(4, 4), (8, 8), (12, 6), (16, 16)])
def test_mixing_is_resample_mix_resample(target: tuple[int, int]) -> None:
    source = (8, 8)
    generator = torch.Generator().manual_seed(0)
    model = allmlp.create(spec("resmlp_nano"), seed=0, dtype=torch.float64)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(generator=generator)
    resize = Resize(model.spec, model.spec.configure(image=(4 * target[0], 4 * target[1])))  # type: ignore[arg-type]
    state = model.state_dict()
    new = resize(state)
    x = torch.randn(2, target[0] * target[1], 3, dtype=torch.float64, generator=generator)
    name = "blocks.0.token.mix"
    mixed = state[f"{name}.weight"] @ bring(x, target, source) + state[f"{name}.bias"][:, None]
    ours = new[f"{name}.weight"] @ x + new[f"{name}.bias"][:, None]
    torch.testing.assert_close(ours, bring(mixed, source, target), atol=1e-5, rtol=1e-5)


def test_mixer_s_two_matrices() -> None:
    model = allmlp.create(spec("mixer_nano"), seed=0)
    new = Resize(model.spec, spec("mixer_nano", 16))(model.state_dict())  # type: ignore[arg-type]
    x, mix = torch.randn(2, 16, 5), model.blocks[0].token.mix
    hidden = new["blocks.0.token.mix.up.weight"] @ x
    torch.testing.assert_close(hidden, mix.up.weight.detach() @ bring(x, (4, 4), (8, 8)), atol=1e-5, rtol=1e-4)
    down = new["blocks.0.token.mix.down.weight"] @ hidden
    torch.testing.assert_close(down, bring(mix.down.weight.detach() @ hidden, (8, 8), (4, 4)), atol=1e-5, rtol=1e-4)


def test_rows_sum_to_one_and_class_tokens_stay() -> None:
    assert torch.allclose(interpolation((7, 5), (4, 9)).sum(1), torch.ones(36, dtype=torch.float64))
    model = allmlp.create(spec("vit_nano"), seed=0)
    new = Resize(model.spec, spec("vit_nano", 48))(model.state_dict())  # type: ignore[arg-type]
    positions = model.state_dict()["stem.positions.weight"]
    assert new["stem.positions.weight"].shape[0] == 1 + 144
    assert torch.equal(new["stem.positions.weight"][0], positions[0])
    pooled = allmlp.create(spec("class"), seed=0)
    row = pooled.state_dict()["pool.gathers.0.mix.weight"]
    wide = Resize(pooled.spec, spec("class", 48))(pooled.state_dict())["pool.gathers.0.mix.weight"]  # type: ignore[arg-type]
    assert torch.equal(wide[:, 0], row[:, 0])
    torch.testing.assert_close(wide.sum(), row.sum(), atol=1e-4, rtol=1e-4)


def test_half_precision_stays_half() -> None:
    model = allmlp.create(spec("gmlp_nano"), seed=0).half()
    new = Resize(model.spec, spec("gmlp_nano", 48))(model.state_dict())  # type: ignore[arg-type]
    assert {weight.dtype for weight in new.values()} == {torch.float16}


def test_gradients_reach_the_weights_through_a_smaller_picture() -> None:
    model = allmlp.create(spec("gmlp_nano").replace(head=None), seed=0)
    small = Resized(model, (16, 16))
    images = torch.randn(2, 3, 16, 16)
    small(images).square().sum().backward()
    gradient = model.blocks[0].channel.mix.inner.proj.weight.grad
    assert gradient is not None and gradient.shape == (64, 64) and gradient.abs().sum() > 0
    other = allmlp.create(model.spec.configure(image=16))
    other.load_state_dict(Resize(model.spec, other.spec)(model.state_dict()))  # type: ignore[arg-type]
    torch.testing.assert_close(small(images), other(images))


def test_start_from_a_model_of_another_size(tmp_path: Path) -> None:
    model = allmlp.create(spec("resmlp_nano"), seed=0)
    allmlp.save(model, tmp_path)
    larger = allmlp.create(spec("resmlp_nano", 48).configure(classes=7), seed=1)
    assert transfer(larger, tmp_path) == ["head.proj.weight", "head.proj.bias"]
    expected = Resize(model.spec, larger.spec)(model.state_dict())  # type: ignore[arg-type]
    own = larger.state_dict()
    assert all(torch.equal(own[key], expected[key]) for key in own if not key.startswith("head."))
    coarser = allmlp.create(spec("resmlp_nano").configure(patch=8))
    with pytest.raises(allmlp.UserError, match="does not hold the weights of this model"):
        transfer(coarser, tmp_path)


def test_what_cannot_be_resized() -> None:
    striped = spec("gmlp_nano")
    gate = striped.block.channel.inner
    assert isinstance(gate, SpatialGate)
    striped = striped.replace(
        block=striped.block.replace(channel=striped.block.channel.replace(inner=gate.replace(project=Toeplitz())))
    )
    with pytest.raises(allmlp.UserError, match="only dense token weights"):
        Resize(striped, striped.configure(image=64))
    text = allmlp.create("gmlp_mlm_tiny")
    with pytest.raises(allmlp.UserError, match="only image models have a grid"):
        Resize(text.spec, text.spec)  # type: ignore[arg-type]
    with pytest.raises(allmlp.UserError, match="only the image encoders"):
        Resized(allmlp.create("resmlp_seq2seq_tiny"), (16, 16))


# --- text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [16, 48])
@pytest.mark.parametrize("name", ["gmlp_mlm_tiny", "gmlp_causal_tiny", "mixer_mlm_tiny", "bert_tiny", "amlp_mlm_tiny"])
def test_another_length_of_text_mixes_the_first_tokens_as_before(name: str, length: int, tmp_path: Path) -> None:
    old = allmlp.create(name, length=32, seed=0, overrides={"depth": 2}).eval()
    with torch.no_grad():
        for weight in old.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    allmlp.save(old, tmp_path)
    new = allmlp.create(name, length=length, overrides={"depth": 2}).eval()
    transfer(new, tmp_path)
    ids = torch.randint(0, 8192, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(new(ids), old(ids), atol=1e-4, rtol=1e-4)
    assert torch.isfinite(new(torch.randint(0, 8192, (1, length)))).all()


def test_distances_never_seen_start_at_zero() -> None:
    weight = torch.arange(1.0, 8.0)  # four tokens: 4 on the diagonal
    assert Toeplitz().crop(weight, 5, False).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert Toeplitz().crop(weight, 2, False).tolist() == [3, 4, 5]
    assert Toeplitz().crop(weight[:4], 6, True).tolist() == [0, 0, 1, 2, 3, 4]
    long, short = (Toeplitz().matrix(Toeplitz().crop(weight, n, False), 0, n, False) for n in (6, 3))
    assert torch.equal(long[:3, :3], short)
