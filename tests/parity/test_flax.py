"""Mixer against the listing in its paper, run by Flax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from agree import Weights, assert_same, assert_same_gradients, gradients, relabel, shaped

import allmlp
from allmlp.models.mixer import mixer

jax = pytest.importorskip("jax")
einops = pytest.importorskip("einops")
nn = pytest.importorskip("flax.linen")
jnp = jax.numpy

DEPTH = 2


class MlpBlock(nn.Module):
    mlp_dim: int

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(self.mlp_dim)(x)
        y = nn.gelu(y)
        return nn.Dense(x.shape[-1])(y)


class MixerBlock(nn.Module):
    tokens_mlp_dim: int
    channels_mlp_dim: int

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        y = jnp.swapaxes(y, 1, 2)
        y = MlpBlock(self.tokens_mlp_dim, name="token_mixing")(y)
        y = jnp.swapaxes(y, 1, 2)
        x = x + y
        y = nn.LayerNorm()(x)
        return x + MlpBlock(self.channels_mlp_dim, name="channel_mixing")(y)


class MlpMixer(nn.Module):
    num_classes: int
    num_blocks: int
    patch_size: int
    hidden_dim: int
    tokens_mlp_dim: int
    channels_mlp_dim: int

    @nn.compact
    def __call__(self, x):
        s = self.patch_size
        x = nn.Conv(self.hidden_dim, (s, s), strides=(s, s), name="stem")(x)
        x = einops.rearrange(x, "n h w c -> n (h w) c")
        for _ in range(self.num_blocks):
            x = MixerBlock(self.tokens_mlp_dim, self.channels_mlp_dim)(x)
        x = nn.LayerNorm(name="pre_head_layer_norm")(x)
        x = jnp.mean(x, axis=1)
        return nn.Dense(self.num_classes, name="head", kernel_init=nn.initializers.zeros)(x)


def rename(tree: Any) -> Weights:
    """Flax keeps a linear map as inputs x outputs, a convolution as height x width x inputs x outputs."""
    order = {1: (0,), 2: (1, 0), 4: (3, 2, 0, 1)}
    flat = {
        "/".join(key.key for key in path[1:]): torch.tensor(np.asarray(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    return relabel(
        {name: tensor.permute(order[tensor.dim()]) for name, tensor in flat.items()},
        {
            r"/(kernel|scale)$": ".weight",
            r"/bias$": ".bias",
            r"^stem\.": "stem.proj.",
            r"^head\.": "head.proj.",
            r"^pre_head_layer_norm\.": "norm.",
            r"^MixerBlock_": "blocks.",
            r"/LayerNorm_0\.": ".token.norm.",
            r"/LayerNorm_1\.": ".channel.norm.",
            r"/(token|channel)_mixing/Dense_0\.": r".\1.mix.up.",
            r"/(token|channel)_mixing/Dense_1\.": r".\1.mix.down.",
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("image", [(16, 16), (8, 20)], ids=["square", "wide"])
def test_mixer(image):
    random = np.random.default_rng(0)
    images, probe = random.normal(size=(3, 3, *image)), random.normal(size=(3, 5))
    ours = allmlp.create(mixer(DEPTH, 12, 4), img_size=image, num_classes=5).double()
    peer = MlpMixer(num_classes=5, num_blocks=DEPTH, patch_size=4, hidden_dim=12, tokens_mlp_dim=6, channels_mlp_dim=48)

    def score(logits):
        return (logits * probe).sum(), logits

    with jax.enable_x64(True):
        channels_last = jnp.asarray(images.transpose(0, 2, 3, 1))
        shapes = jax.eval_shape(peer.init, jax.random.PRNGKey(0), channels_last)
        tree = jax.tree.map(lambda leaf: jnp.asarray(random.normal(0.2, 0.5, leaf.shape)), shapes)
        loss = jax.jit(jax.value_and_grad(lambda tree: score(peer.apply(tree, channels_last)), has_aux=True))
        (_, expected), slopes = loss(tree)

    ours.load_state_dict(shaped(rename(tree), ours))
    actual = ours(torch.tensor(images))
    actual.backward(torch.tensor(probe))
    assert_same(actual, torch.tensor(np.asarray(expected)), "the output")
    assert_same_gradients(gradients(ours), shaped(rename(slopes), ours))
