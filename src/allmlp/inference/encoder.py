"""The device-independent part of fast inference: stem, one fused function per residual branch, norm, pool and head.

    z = X - deferred_bias,   deferred_bias (c): biases not yet added

The last product of a channel MLP accumulates into z, so adding its bias would take another pass over z. The bias is
deferred instead: the next op that reads z adds it, at no cost. Affine and LayerScale are folded into adjacent matrices.
The last bias of a token MLP is the same for all channels of a token, so it cancels in a following LayerNorm and is
omitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.kernels.activation.reference import ActivationName
from allmlp.layers.block import BlockLayer, Residual
from allmlp.layers.channel import ChannelMlp, ChannelMlpLayer
from allmlp.layers.context import Context
from allmlp.layers.mixers.linear import TokenLinear
from allmlp.layers.mixers.mlp import TokenMlp, TokenMlpLayer
from allmlp.layers.mixers.projection import TokenProjection
from allmlp.layers.norm import Affine, LayerNorm
from allmlp.layers.scale import LayerScaleLayer
from allmlp.layers.stem import TokenEmbed
from allmlp.models.encoder import Encoder, EncoderModel

TensorFn = Callable[[Tensor], Tensor]
"""A function of z, or of the features in a branch; it may overwrite its input."""
NORMS = (LayerNorm, Affine)


def is_supported(spec: Encoder) -> bool:
    """Whether the blocks of a model can be fused."""
    block, channel = spec.block, spec.block.channel
    if not isinstance(channel, ChannelMlp) or not isinstance(block.token, (TokenMlp, TokenLinear, type(None))):
        return False
    norms = [block.norm, channel.inner.norm] if channel.inner else [block.norm]
    is_pre_norm = block.order == "pre" and block.residual == "all" and all(isinstance(n, NORMS) for n in norms)
    return is_pre_norm and block.cross is None and (channel.inner is None or channel.inner.attention is None)


@torch.no_grad()
def copy_frozen(model: EncoderModel, dtype: torch.dtype) -> EncoderModel:
    """A copy of the model in `dtype`, in eval mode and without gradients."""
    with torch.device("meta"):
        copy = model.spec.build()
    state = model.state_dict().items()
    cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state}
    copy.load_state_dict(cast, assign=True)
    assert isinstance(copy, EncoderModel)
    return copy.eval().requires_grad_(False)


class FastEncoder(nn.Module):
    @torch.no_grad()
    def __init__(self, model: EncoderModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.dtype = model.spec, dtype
        self.stem_and_head = copy_frozen(model, dtype)
        self.stem_and_head.blocks = nn.ModuleList()
        wide = torch.promote_types(dtype, torch.float32)
        self.deferred_bias = torch.zeros(model.spec.width, device=model.device, dtype=wide)
        self.branches: list[TensorFn] = []
        for block in model.blocks:
            assert isinstance(block, BlockLayer)
            for _, residual in block.residuals():
                self.branches.append(self.branch(residual))

    def branch(self, residual: Residual) -> TensorFn:
        """The fused function z -> z of a residual branch."""
        mix, layer_scale = residual.mix, None
        if isinstance(residual.scale, LayerScaleLayer):
            if residual.scale.beta is not None:
                raise UserError("fast() does not support LayerScale with a shift")
            layer_scale = residual.scale.gamma.double()
        if isinstance(mix, TokenProjection):
            return self.token_linear(residual.norm, mix, layer_scale)
        if isinstance(mix, TokenMlpLayer):
            return self.token_mlp(residual.norm, mix, layer_scale)
        assert isinstance(mix, ChannelMlpLayer)
        return self.channel_mlp(residual.norm, mix, layer_scale)

    def token_linear(self, norm: nn.Module, mix: TokenProjection, layer_scale: Tensor | None) -> TensorFn:
        """z + layer_scale * (A norm(z + deferred_bias) + b 1^T)."""
        raise NotImplementedError

    def token_mlp(self, norm: nn.Module, mix: TokenMlpLayer, layer_scale: Tensor | None) -> TensorFn:
        """z + layer_scale * (W2 act(W1 norm(z + deferred_bias) + b1 1^T) + b2 1^T)."""
        raise NotImplementedError

    def channel_mlp(self, norm: nn.Module, mix: ChannelMlpLayer, layer_scale: Tensor | None) -> TensorFn:
        """z + layer_scale * V inner(act(U norm(z + deferred_bias) + a)); the last bias is added or deferred."""
        raise NotImplementedError

    # --- shared by devices ------------------------------------------------------------------------------------

    def cast(self, weight: Tensor) -> Tensor:
        return weight.to(self.dtype).contiguous()

    def act(self, slot: str) -> ActivationName:
        mixer: Any = getattr(self.spec.block, slot)
        return mixer.act

    def token_bias_cancels(self, layer_scale: Tensor | None) -> bool:
        """Whether only LayerNorm reads the output of a token branch, so that its last bias has no effect."""
        norms = self.spec.block.norm, self.spec.norm
        return layer_scale is None and all(isinstance(norm, LayerNorm) for norm in norms)

    def defer_bias(self, bias: Tensor, layer_scale: Tensor | None) -> None:
        bias = bias if layer_scale is None else layer_scale * bias
        self.deferred_bias = self.deferred_bias + bias.to(self.deferred_bias.dtype)

    def forward(self, x: Tensor, *args: Tensor, **kwargs: Tensor) -> Tensor:
        stem = self.spec.stem
        if isinstance(stem, TokenEmbed):
            if args or kwargs or x.shape[1:] != (stem.seq_len,):
                raise UserError(
                    f"fast() text models take sequences of {stem.seq_len} tokens without a mask; "
                    "call the original model for others"
                )
        else:
            x = x.to(self.dtype)
        with torch.autocast(x.device.type, enabled=False):  # dtypes are fixed at construction
            return self.compute(x)

    @torch.inference_mode()
    def compute(self, x: Tensor) -> Tensor:
        # Branches overwrite z, which must therefore own its memory.
        z = self.stem_and_head.embed(x, None, Context(), None).contiguous()
        for branch in self.branches if len(z) else []:
            z = branch(z)
        return self.stem_and_head.forward_head(self.stem_and_head.norm((z + self.deferred_bias).to(z.dtype)))
