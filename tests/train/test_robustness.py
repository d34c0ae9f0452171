"""Classification of permuted and of corrupted images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allmlp
from allmlp.data.corruptions import CORRUPTIONS, corrupt
from allmlp.data.dataset import LabeledImages
from allmlp.data.sampler import eval_batches
from allmlp.errors import UserError
from allmlp.models.resmlp import resmlp
from allmlp.tasks import classify_corrupted
from allmlp.tasks.classify import Classify
from allmlp.tasks.classify_corrupted import ClassifyCorrupted
from allmlp.tasks.classify_permuted import ClassifyPermuted, pixel_order
from allmlp.training import train
from tiny import randomize
from train.runs import Blobs, small


def test_patches_and_the_pixels_within_them_are_permuted() -> None:
    order = pixel_order((8, 12), (4, 4), seed=3)
    assert sorted(order.tolist()) == list(range(96)) and order.tolist() != list(range(96))
    rows, columns = order.view(8, 12) // 12, order.view(8, 12) % 12
    inside = set()
    for top in (0, 4):
        for left in (0, 4, 8):
            y, x = rows[top : top + 4, left : left + 4], columns[top : top + 4, left : left + 4]
            assert len({(int(a) // 4, int(b) // 4) for a, b in zip(y.flatten(), x.flatten())}) == 1, "one patch"
            inside.add(tuple((y % 4 * 4 + x % 4).flatten().tolist()))
    assert len(inside) == 1, "every patch in the same way"
    everywhere = pixel_order((8, 12), (8, 12), seed=3)
    assert sorted(everywhere.tolist()) == list(range(96)) and not torch.equal(order, everywhere)
    assert not torch.equal(order, pixel_order((8, 12), (4, 4), seed=4))


def test_an_mlp_over_patches_can_undo_permuted_patches() -> None:
    """With its own weights permuted it computes from permuted patches what it did before: nothing is lost."""
    dataset = Blobs().load()
    spec = Classify().configure_model(resmlp(2, 16, 0.1, patch_size=4, img_size=8).configure(in_chans=1), dataset)
    model = allmlp.create(spec, seed=0).eval()
    randomize(model)
    images = dataset.train.fetch(torch.arange(8)).images
    task = ClassifyPermuted(permuted_patch=(4, 4)).build(model, dataset)
    order = task.normalize.order
    with torch.no_grad():
        expected = model(Classify().build(model, dataset).normalize(images))
        assert (model(task.normalize(images)) - expected).abs().max() > 0.01
        places = order.view(2, 4, 2, 4).transpose(1, 2).flatten(2).flatten(0, 1)  # patches pixels
        patches = (places[:, 0] // 8 // 4) * 2 + places[:, 0] % 8 // 4
        pixels = places[0] // 8 % 4 * 4 + places[0] % 8 % 4
        weight = model.get_parameter("stem.proj.weight")
        weight.copy_(weight.flatten(-2)[..., pixels].view_as(weight) if weight.dim() == 4 else weight[:, pixels])
        for name, parameter in model.named_parameters():
            if ".token." in name and name.endswith("weight") and parameter.shape == (4, 4):
                parameter.copy_(parameter[patches][:, patches])
            elif ".token." in name and name.endswith("bias") and parameter.shape == (4,):
                parameter.copy_(parameter[patches])
        torch.testing.assert_close(model(task.normalize(images)), expected)


def test_permuted_patches_must_fit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no whole patches"):
        train(small(task=ClassifyPermuted(permuted_patch=(3, 3))), tmp_path, "cpu")


def test_evaluation_adds_every_corruption() -> None:
    dataset = Blobs().load()
    task = ClassifyCorrupted(severities=(5,))
    model = allmlp.create(task.configure_model(small().model, dataset), seed=0).eval()
    randomize(model)
    module = task.build(model, dataset)
    batches = [LabeledImages(*dataset.test.fetch(torch.arange(start, start + 16))) for start in (0, 16)]
    with torch.no_grad():
        sums = module.evaluate(model, batches)
        again = module.evaluate(model, batches)
        plain = Classify().build(model, dataset).evaluate(model, batches)
    values = module.summary({name: (total / count).item() for name, (total, count) in sums.items()})
    assert values["accuracy"] == (plain["accuracy"][0] / 32).item() and sums == again
    kinds = [values[f"accuracy_{kind}"] for kind in CORRUPTIONS]
    assert values["corrupted_accuracy"] == pytest.approx(sum(kinds) / len(kinds)) and len({*kinds}) > 1
    with pytest.raises(UserError, match="unknown corruption 'fogg'; did you mean 'fog'"):
        ClassifyCorrupted(corruptions=("fogg",))


def test_corruption_of_an_image_does_not_depend_on_the_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on the other corruptions, nor on how many processes there are."""
    dataset = Blobs().load()
    task = ClassifyCorrupted(corruptions=("gaussian_noise", "fog"), severities=(5,))
    model = allmlp.create(task.configure_model(small().model, dataset), seed=0).eval()

    def noisy(batch_size: int, task: ClassifyCorrupted, rank: int = 0, size: int = 1) -> torch.Tensor:
        seen: list[torch.Tensor] = []

        def spy(*given: Any) -> torch.Tensor:
            seen.append(corrupt(*given))
            return seen[-1]

        monkeypatch.setattr(classify_corrupted, "corrupt", spy)
        monkeypatch.setattr(dist, "is_initialized", lambda: size > 1)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: size)
        batches = eval_batches(dataset.test, batch_size, model.device, rank, size)
        with torch.no_grad():
            task.build(model, dataset).evaluate(model, batches)
        return torch.cat(seen[len(task.corruptions) - 1 :: len(task.corruptions)])

    whole = noisy(32, task)
    assert torch.equal(noisy(10, task), whole)
    assert torch.equal(noisy(32, task.replace(corruptions=("fog",))), whole)
    shares = [noisy(7, task, rank, size=3) for rank in range(3)]
    assert all(torch.equal(share, whole[rank::3]) for rank, share in enumerate(shares))
