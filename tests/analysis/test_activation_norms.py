"""Activation norms against the model's intermediates; LayerScale against its parameters."""

from __future__ import annotations

import pytest
import torch

from allmlp.analysis.activation_norms import activation_norms, layer_scale_sizes
from allmlp.models.encoder import EncoderModel
from allmlp.models.zoo import create
from tiny import TINY_SPECS, tiny_model


class Constant(torch.nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.value

    def forward_with_hooks(self, images: torch.Tensor) -> torch.Tensor:
        return self(images)


@pytest.mark.parametrize("name", ["mixer_s32", "resmlp_s12", "gmlp_l18", "vit_ti16", "bert_base"])
def test_norms_are_those_of_the_intermediates(name: str) -> None:
    model = tiny_model(name)
    assert isinstance(model, EncoderModel)
    inputs = model.dummy_inputs(3)
    kept = model.forward_activations(*inputs)
    before = "stem"
    for one in activation_norms(model, *inputs):
        assert one.norm == pytest.approx(kept[one.name].norm(dim=-1).mean().item(), rel=1e-5)
        if one.branch in ("token", "channel"):
            added = (kept[one.name] - kept[before]).norm(dim=-1).mean().item()
            assert one.added is None if name == "bert_base" else one.added == pytest.approx(added, rel=1e-5)
        before = one.name


@pytest.mark.parametrize("name", TINY_SPECS)
def test_every_model_is_measured_from_stem_to_norm_without_leftover_hooks(name: str) -> None:
    model = tiny_model(name)
    inputs = model.dummy_inputs()
    found = activation_norms(model, *inputs)
    assert found[0].branch == "stem" and {one.block for one in found} >= {0, 1}
    assert not any(module._forward_hooks for module in model.modules())
    if name == "resmlp_seq2seq_6":
        assert {(one.stack, one.branch) for one in found if one.block == 0} == {
            ("encoder", "token"),
            ("encoder", "channel"),
            ("decoder", "token"),
            ("decoder", "cross"),
            ("decoder", "channel"),
        }


def test_layer_scale_by_depth() -> None:
    model = tiny_model("resmlp_s12")
    with torch.no_grad():
        for depth, block in enumerate(model.blocks):
            block.token.scale.gamma.fill_(-0.5 * (depth + 1))
            block.channel.scale.gamma.copy_(torch.linspace(0, 1, 16))
    found = layer_scale_sizes(model)
    assert [(one.block, one.branch) for one in found] == [(0, "token"), (0, "channel"), (1, "token"), (1, "channel")]
    assert [one.mean for one in found] == pytest.approx([0.5, 0.5, 1.0, 0.5])
    assert (found[1].smallest, found[1].largest) == (0.0, 1.0)
    assert layer_scale_sizes(tiny_model("mixer_s32")) == []


def test_norms_of_channels_last_networks_are_over_channels() -> None:
    pytest.importorskip("timm")
    model = create("timm:test_vit.r160_in1k", seed=0).eval()
    images = torch.rand(1, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    features = torch.rand(1, 2, 3, 5, generator=torch.Generator().manual_seed(1))
    model.network.norm = Constant(features)  # b h w c, as of Swin
    model.network.forward = model.network.norm.forward_with_hooks
    for layout, axis in (("NCHW", 1), ("NHWC", 3)):
        model.network.output_fmt = layout
        (found,) = activation_norms(model, images)
        assert found.norm == pytest.approx(features.norm(dim=axis).mean().item())
