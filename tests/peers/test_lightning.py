"""A model inside a LightningModule."""

from __future__ import annotations

from pathlib import Path

import torch

import allmlp
from peers.installed import example, peer

peer("lightning")
peer("sklearn")


def test_training_checkpoint_and_reload(tmp_path: Path) -> None:
    """The script of the guide: two epochs; the best checkpoint is loaded again and saved as a folder of ours."""
    main = example("lightning_training")
    accuracy = main(tmp_path / "digits")
    assert accuracy > 0.5
    (checkpoint,) = (tmp_path / "digits" / "checkpoints").glob("*.ckpt")
    module = main.__globals__["Classifier"].load_from_checkpoint(checkpoint)
    images = torch.rand(2, 1, 8, 8)
    model = allmlp.load(tmp_path / "digits")
    assert torch.equal(model.eval()(images), module.eval().cpu()(images))
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert all(torch.equal(weights[f"model.{name}"].cpu(), value) for name, value in model.state_dict().items())
