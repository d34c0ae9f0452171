"""The Mixer of its paper's listing, run by Flax and saved as .npz: equal outputs, and a lossless round trip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_flax import MlpMixer, jax, jnp

import allmlp
from allmlp.data.preprocessing import image_preprocessing
from allmlp.weights.convert import convert

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
DEPTH, PATCH = 2, 4


def flat(tree: Any) -> dict[str, np.ndarray]:
    """A parameter tree as a flat dictionary, as Google saves it: without the prefix `params`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(key.key for key in path[1:]): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "params/"], ids=["google", "tree"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("classes", [5, 21843], ids=["small", "in21k"])
def test_mixer_file(classes: int, dtype: str, prefix: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    images = random.normal(size=(3, 3, 16, 16)).astype(dtype)
    peer = MlpMixer(
        num_classes=classes, num_blocks=DEPTH, patch_size=PATCH, hidden_dim=12, tokens_mlp_dim=6, channels_mlp_dim=48
    )
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        channels_last = jnp.asarray(images.transpose(0, 2, 3, 1))
        shapes = jax.eval_shape(peer.init, jax.random.PRNGKey(0), channels_last)
        tree = jax.tree.map(lambda leaf: jnp.asarray(random.normal(0.1, 0.3, leaf.shape).astype(dtype)), shapes)
        expected = torch.tensor(np.asarray(peer.apply(tree, channels_last)))
    arrays = flat(tree)
    np.savez(tmp_path / "mixer.npz", **{prefix + name: array for name, array in arrays.items()})

    folder = convert(str(tmp_path / "mixer.npz"), str(tmp_path / "ours"))
    ours = allmlp.load(folder, dtype=None)
    assert ours.dtype == expected.dtype == getattr(torch, dtype) and image_preprocessing(folder).mean == (0.5, 0.5, 0.5)
    with torch.no_grad():
        torch.testing.assert_close(ours(torch.tensor(images)), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert expected.abs().max() > 0.1
    back = np.load(convert(str(folder), str(tmp_path / "back.npz"), to="google"), allow_pickle=False)
    assert set(back.files) == arrays.keys()
    assert all(back[name].dtype == arrays[name].dtype and (back[name] == arrays[name]).all() for name in arrays)
