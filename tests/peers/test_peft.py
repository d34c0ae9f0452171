"""Adapters of PEFT on models that `allmlp.hf` wraps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import allmlp
from peers.installed import peer

peft = peer("peft")

import allmlp.hf  # noqa: E402


def wrapped(name: str) -> allmlp.hf.AllMlpForImageClassification:
    model = allmlp.hf.wrap(allmlp.create(name, num_classes=3, seed=0))
    torch.nn.init.normal_(model.model.head.proj.weight, generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("mixer_nano", []), ("gmlp_nano", ["inner.proj.weight"]), ("resmlp_nano", ["token.mix.weight"])],
    ids=["mixer", "gmlp", "resmlp"],
)
def test_every_adapter_learns(name: str, parameters: list[str], tmp_path: Path) -> None:
    """Those of token matrices too; reloaded and merged, the model computes the same."""
    config = peft.LoraConfig(
        r=2,
        target_modules="all-linear",
        target_parameters=parameters,
        modules_to_save=["head"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(wrapped(name), config)
    x = torch.randn(2, 3, 32, 32)
    model(pixel_values=x, labels=torch.tensor([0, 1])).loss.backward()
    trained = {key: weight for key, weight in model.named_parameters() if weight.requires_grad}
    over_tokens = "inner.proj" if name == "gmlp_nano" else "token.mix"
    assert all(any(path in key for key in trained) for path in (over_tokens, "channel.mix.up", "head."))
    assert not [key for key, weight in trained.items() if weight.grad is None or not weight.grad.abs().sum() > 0]

    expected = model.eval()(pixel_values=x).logits
    model.save_pretrained(tmp_path / "adapters")
    again = peft.PeftModel.from_pretrained(wrapped(name), tmp_path / "adapters").eval()
    assert torch.allclose(again(pixel_values=x).logits, expected, atol=1e-5)
    with pytest.raises(allmlp.errors.UserError, match="merge_and_unload"):
        allmlp.save(again.get_base_model().model, tmp_path / "unmerged")
    again.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert torch.allclose(allmlp.load(tmp_path / "merged")(x), expected, atol=1e-5)
