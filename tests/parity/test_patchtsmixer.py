"""PatchTSMixer against transformers: outputs, gradients, and checkpoints in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import allmlp
from allmlp.models.series_encoder import SeriesEncoderModel
from allmlp.weights.convert import convert
from tiny import randomize

transformers = pytest.importorskip("transformers")

SMALL = {
    "context_length": 21,
    "patch_length": 4,
    "patch_stride": 3,
    "num_input_channels": 3,
    "d_model": 8,
    "num_layers": 2,
    "expansion_factor": 2,
    "prediction_length": 5,
    "dropout": 0.0,
    "head_dropout": 0.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixing": {"mode": "mix_channel"},
    "without-gates": {"gated_attn": False, "mode": "mix_channel"},
    "positions": {"use_positional_encoding": True},
    "unscaled": {"scaling": None},
}


def peer(kind: str = "Prediction", **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.PatchTSMixerConfig(**SMALL | options)
    model = getattr(transformers, f"PatchTSMixerFor{kind}")(config).eval()
    for parameter in model.parameters():  # positions are fixed
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def converted(model: Any, folder: Path) -> SeriesEncoderModel:
    model.save_pretrained(folder / "theirs")
    convert(str(folder / "theirs"), str(folder / "ours"))
    ours = allmlp.load(folder / "ours", dtype=torch.float64)
    assert isinstance(ours, SeriesEncoderModel)
    return ours


def series(batch: int = 4) -> Tensor:
    return torch.randn(batch, 21, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3 + 7


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_and_gradients(variant: str, tmp_path: Path) -> None:
    theirs = peer(**VARIANTS[variant])
    ours, theirs, x = converted(theirs, tmp_path), theirs.double(), series()
    output, expected = ours(x), theirs(x).prediction_outputs
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    assert ours.describe().parameters == sum(weight.numel() for weight in theirs.parameters())
    output.square().sum().backward()
    expected.square().sum().backward()
    slopes = {key: weight.grad for key, weight in theirs.named_parameters() if weight.grad is not None}
    found = {key: weight.grad for key, weight in ours.named_parameters()}
    pairs = {
        "stem.proj.weight": "model.encoder.patcher.weight",
        "head.proj.weight": "head.base_forecast_block.weight",
        "blocks.1.token.norm.weight": "model.encoder.mlp_mixer_encoder.mixers.1.patch_mixer.norm.norm.weight",
        "blocks.0.token.mix.mix.up.weight": "model.encoder.mlp_mixer_encoder.mixers.0.patch_mixer.mlp.fc1.weight",
        "blocks.0.token.mix.up.weight": "model.encoder.mlp_mixer_encoder.mixers.0.patch_mixer.mlp.fc1.weight",
        "blocks.1.channel.mix.gate.weight": (
            "model.encoder.mlp_mixer_encoder.mixers.1.feature_mixer.gating_block.attn_layer.weight"
        ),
        "blocks.0.variate.mix.down.bias": "model.encoder.mlp_mixer_encoder.mixers.0.channel_feature_mixer.mlp.fc2.bias",
        "blocks.0.variate.mix.gate.bias": (
            "model.encoder.mlp_mixer_encoder.mixers.0.channel_feature_mixer.gating_block.attn_layer.bias"
        ),
    }
    compared = {ours_key: key for ours_key, key in pairs.items() if ours_key in found}
    assert len(compared) >= 4
    for key, theirs_key in compared.items():
        torch.testing.assert_close(found[key], slopes[theirs_key], rtol=1e-8, atol=1e-8)
    # The sum of squares of all gradients: no parameter is left out.
    total = sum(float(slope.square().sum()) for slope in slopes.values())
    fixed = sum(float(found[key].square().sum()) for key in found if key == "stem.positions.weight")
    assert sum(float(slope.square().sum()) for slope in found.values()) - fixed == pytest.approx(total, rel=1e-8)


def test_level_with_missing_values(tmp_path: Path) -> None:
    """Mean and scale are those of the observed values; ours does not read the others either."""
    theirs = peer()
    ours, theirs, x = converted(theirs, tmp_path), theirs.double(), series()
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(2)) > 0.3
    _, level = ours.normalize(x, mask)
    expected = theirs(torch.where(mask, x, 0), observed_mask=mask.double())
    torch.testing.assert_close(level.shift, expected.loc)
    torch.testing.assert_close(level.scale, expected.scale)
    assert torch.equal(ours(x, mask), ours(torch.where(mask, x, torch.nan), mask))


def test_reconstruction(tmp_path: Path) -> None:
    theirs = peer("Pretraining", mode="mix_channel")
    ours, theirs, x = converted(theirs, tmp_path), theirs.double(), series()
    torch.manual_seed(3)
    expected = theirs(x)
    torch.manual_seed(3)
    hidden = theirs.model(x).mask
    output = ours(x, hidden=hidden)
    torch.testing.assert_close(output, expected.prediction_outputs, rtol=1e-10, atol=1e-10)
    target = ours.stem.split_patches(ours.normalize(x)[0])
    loss = ((output - target).square().mean(-1) * hidden).sum() / hidden.sum()
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-9)


@pytest.mark.parametrize("name", ["patchtsmixer", "patchtsmixer_mix"])
def test_ours_in_transformers(name: str, tmp_path: Path) -> None:
    sizes = {"width": 8, "depth": 2, "block.channel.mix.hidden": 24}
    model = allmlp.create(name, seq_len=40, in_chans=3, horizon=6, overrides=sizes, dtype=torch.float64).eval()
    randomize(model)
    allmlp.save(model, tmp_path / "ours")
    convert(str(tmp_path / "ours"), str(tmp_path / "theirs"), to="hf")
    theirs = transformers.PatchTSMixerForPrediction.from_pretrained(tmp_path / "theirs", dtype=torch.float64).eval()
    x = torch.randn(2, 40, 3, dtype=torch.float64)
    torch.testing.assert_close(theirs(x).prediction_outputs, model(x), rtol=1e-10, atol=1e-10)
    convert(str(tmp_path / "theirs"), str(tmp_path / "again"))
    again = allmlp.load(tmp_path / "again", dtype=None)
    assert again.spec == model.spec and torch.equal(again(x), model(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_mlp": "BatchNorm"}, "norm_mlp 'BatchNorm'; only 'LayerNorm'"),
        ({"self_attn": True}, "self_attn True; only False"),
        ({"scaling": "mean"}, "scaling 'mean'; only 'std' and none"),
    ],
)
def test_unsupported_settings(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    peer(**options).save_pretrained(tmp_path / "theirs")
    with pytest.raises(allmlp.UserError, match=message):
        convert(str(tmp_path / "theirs"), str(tmp_path / "ours"))


@pytest.mark.parametrize("name", ["hf:patchtsmixer", "hf:patchtst"])
def test_adapters(name: str) -> None:
    model = allmlp.create(name, seq_len=64, in_chans=2, horizon=5).eval()
    (x,) = model.dummy_inputs(3)
    assert model(x).shape == (3, 5, 2)
    mask = torch.ones_like(x, dtype=torch.bool)
    torch.testing.assert_close(model(x, mask), model(x))
    torch.testing.assert_close(model(10 * x + 3), 10 * model(x) + 3, rtol=1e-3, atol=1e-3)


def test_the_preset_is_the_baseline() -> None:
    """The same sizes, so that the two are compared fairly."""
    ours, theirs = allmlp.preset("patchtsmixer").spec, allmlp.preset("hf:patchtsmixer").spec
    assert allmlp.measure(ours).parameters == allmlp.measure(theirs).parameters


def test_patchtst_has_the_head_of_its_paper() -> None:
    """One linear map from all patches; the default of transformers is one from their mean."""
    model = allmlp.create("hf:patchtst", seq_len=512, horizon=96)
    (head,) = (module for module in model.network.head.modules() if isinstance(module, torch.nn.Linear))
    assert (head.in_features, head.out_features) == (63 * 16, 96)
