"""Encoders: one forward pass, its intermediates, and the parts of the cost table."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

import allmlp
from allmlp.models.encoder import EncoderModel
from allmlp.models.preset import own_presets
from allmlp.models.zoo import presets
from tiny import randomize, tiny_model

ENCODERS = ["mixer_nano", "gmlp_nano", "vit_nano", "bert_tiny", "resmlp_s12_class"]


def small(name: str) -> EncoderModel:
    img_size = 32 if presets()[name].spec.input_size else None
    model = allmlp.create(name, overrides={"depth": 2}, img_size=img_size, seed=0)
    randomize(model, spread=0.05)
    assert isinstance(model, EncoderModel)
    return model


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, "a", 1.5])
def test_a_seed_that_is_none(seed: object) -> None:
    with pytest.raises(allmlp.UserError, match=r"seed must be a whole number from 0 to 2\*\*63 - 1, not"):
        allmlp.create("gmlp_nano", seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_intermediates_are_those_of_the_forward_pass(name: str, checkpointing: bool) -> None:
    """Hooks on the modules see the same tensors in a plain forward pass."""
    model = small(name).eval().set_grad_checkpointing(checkpointing)
    seen: dict[str, Tensor] = {}

    def watch(path: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda _module, _inputs, output: seen.update({path: output}))

    paths = ["stem", "norm", "pool", "head"]
    for number, block in enumerate(model.blocks):
        paths += [f"blocks.{number}", *(f"blocks.{number}.{slot}" for slot, _ in block.residuals())]
    for path in paths:
        if path in ("stem", "norm") or getattr(model, path, nn.Module) is not None:
            watch(path, model.get_submodule(path))
    inputs = model.dummy_inputs(2)
    output = model(*inputs)
    expected = dict(seen)
    found = model.forward_activations(*inputs)
    assert set(found) == set(expected)
    for path, value in expected.items():
        assert torch.equal(found[path], value), path
    last = "head" if model.head is not None else "norm"
    assert torch.equal(found[last], output) and torch.equal(found["norm"], model.forward_features(*inputs))
    assert list(model.forward_activations(*inputs, names=["norm", "stem"])) == ["norm", "stem"]
    with pytest.raises(allmlp.UserError, match=r"unknown intermediate 'blocks\.2'; did you mean 'blocks\.1'"):
        model.forward_activations(*inputs, names=["blocks.2"])


@pytest.mark.parametrize("name", ["mixer_nano", "amlp_nano", "bert_base_rel", "resmlp_seq2seq_tiny", "cyclemlp_nano"])
def test_parts_cover_every_parameter_once(name: str) -> None:
    """The cost table has no row `other`, and a shallow model times its depth is the whole."""
    with torch.device("meta"):
        model = allmlp.create(name)
    paths = model.parts().values()
    for parameter, _ in model.named_parameters():
        assert sum(parameter.startswith(f"{path}.") for path in paths) == 1, parameter
    assert "other" not in [part.name for part in model.describe().parts]
    shallow, depths = model.spec.shallow()
    with torch.device("meta"):
        single = {key: value.numel() for key, value in shallow.build().named_parameters()}
    count = sum(
        size * next((len(numbers) for part, numbers in depths.items() if key.startswith(f"{part}.")), 1)
        for key, size in single.items()
    )
    assert count == sum(weight.numel() for weight in model.parameters())


def test_two_presets_cannot_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from allmlp.models import mixer, resmlp

    monkeypatch.setitem(resmlp.PRESETS, "mixer_nano", mixer.PRESETS["mixer_nano"])
    with pytest.raises(TypeError, match="two presets are called mixer_nano"):
        own_presets.__wrapped__()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_device_is_named() -> None:
    for device, reason in (("cuda", "torch sees no cuda device here"), ("cpu0", "cpu0")):
        with pytest.raises(allmlp.UserError, match=f"cannot use the device {device}: .*{reason}"):
            allmlp.create("mixer_nano", device=device)


def test_what_is_not_a_model_name_is_named() -> None:
    for wrong in (allmlp.preset("mixer_nano"), tiny_model("mixer_s32")):
        with pytest.raises(allmlp.UserError, match=f"not {type(wrong).__name__}: pass its `spec`"):
            allmlp.create(wrong)  # type: ignore[arg-type]


def test_every_attribute_of_a_text_model_can_be_read() -> None:
    """As torch.jit.trace does; an image config is not among them."""
    model = tiny_model("gmlp_causal_tiny", torch.float32)
    assert "pretrained_cfg" not in dict(inspect.getmembers(model))
