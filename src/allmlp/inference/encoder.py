"""The device-independent part of fast inference: stem, one fused module per residual branch, norm, pool and head.

    z = X - deferred_bias,   deferred_bias (c): biases not yet added

The last product of a channel MLP accumulates into z, so adding its bias would take another pass over z. The bias is
deferred instead: the next op that reads z adds it, at no cost. Affine and LayerScale are folded into adjacent matrices.
The last bias of a token MLP is the same for all channels of a token, so it cancels in a following LayerNorm and is
omitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.inference.model import FastModel, check_tensor, copy_frozen
from allmlp.kernels import ACTIVATIONS
from allmlp.kernels.activation.reference import ActivationName
from allmlp.kernels.launch import naming_errors
from allmlp.layers.block import Block, BlockLayer, Residual
from allmlp.layers.channel import ChannelMlp, ChannelMlpLayer
from allmlp.layers.context import Context
from allmlp.layers.mixers.linear import TokenLinear
from allmlp.layers.mixers.mlp import TokenMlp
from allmlp.layers.norm import Affine, AffineLayer, LayerNorm, Norm
from allmlp.layers.scale import LayerScaleLayer
from allmlp.layers.stem import TokenEmbed
from allmlp.models.encoder import Encoder, EncoderModel

NORMS = (LayerNorm, Affine)


def is_supported(spec: Encoder, attention: bool = False) -> bool:
    """Whether the blocks of a model, of all its stages, can be fused; with `attention`, also aMLP's."""
    return all(is_fusible(stage.block, attention) for stage in spec.all_stages)


def is_fusible(block: Block, attention: bool = False) -> bool:
    channel = block.channel
    if not isinstance(channel, ChannelMlp) or not isinstance(block.token, (TokenMlp, TokenLinear, type(None))):
        return False
    if block.scale is not None and block.scale.shift:
        return False
    if block.variate is not None or (isinstance(block.token, TokenLinear) and block.token.act):
        return False
    acts = {channel.act, getattr(block.token, "act", None) or "none"}
    if channel.glu or not channel.linear_bias or not acts.issubset(ACTIVATIONS):
        return False
    norms = [block.norm, channel.inner.norm] if channel.inner else [block.norm]
    is_pre_norm = block.order == "pre" and block.residual == "all" and all(isinstance(n, NORMS) for n in norms)
    has_attention = channel.inner is not None and channel.inner.attention is not None
    return is_pre_norm and block.cross is None and (attention or not has_attention)


def norms_after(spec: Encoder, stage: int) -> list[Norm | None]:
    """Norms that read the outputs of a stage's blocks, up to the next merge."""
    norms = [spec.all_stages[stage].block.norm]
    for later in spec.all_stages[stage + 1 :]:
        if later.merge is not None:
            return [*norms, later.merge.norm]
        norms.append(later.block.norm)
    return [*norms, spec.norm]


@dataclass
class Conversion:
    """The conversion of a stage in progress: context for building a branch besides its own weights."""

    block: Block
    norms: list[Norm | None]
    """All norms that read the output of a branch."""
    dtype: torch.dtype
    deferred_bias: Tensor

    def cast(self, weight: Tensor) -> Tensor:
        """A copy, so that later changes to the original have no effect."""
        return weight.to(self.dtype, copy=True).contiguous()

    def act(self, slot: str) -> ActivationName:
        mixer: Any = getattr(self.block, slot)
        return mixer.act

    def fold(self, norm: AffineLayer, mix: ChannelMlpLayer) -> tuple[Tensor, Tensor]:
        """Weight and bias, in float64, of a channel MLP's first product after Affine and the deferred bias."""
        alpha, beta = norm.alpha.double(), norm.beta.double()
        weight, bias = mix.up.weight.double(), mix.up.bias.double()
        return weight * alpha, bias + weight @ (beta + alpha * self.deferred_bias.double())

    def token_bias_cancels(self, layer_scale: Tensor | None) -> bool:
        """Whether only LayerNorm reads the output of a token branch, so that its last bias has no effect."""
        return layer_scale is None and all(isinstance(norm, LayerNorm) for norm in self.norms)

    def defer_bias(self, bias: Tensor, layer_scale: Tensor | None) -> None:
        bias = bias if layer_scale is None else layer_scale * bias
        self.deferred_bias = self.deferred_bias + bias.to(self.deferred_bias.dtype)


def scale_rows(weight: Tensor, layer_scale: Tensor | None) -> Tensor:
    return weight.double() if layer_scale is None else layer_scale[:, None] * weight.double()


class FastEncoder(FastModel):
    @torch.no_grad()
    def __init__(self, model: EncoderModel, dtype: torch.dtype) -> None:
        super().__init__(dtype, model.device)
        self.spec = model.spec
        self.stem_and_head = copy_frozen(model, dtype)
        self.stem_and_head.blocks = nn.ModuleList()
        wide = torch.promote_types(dtype, torch.float32)
        stages, self.starts = self.spec.all_stages, [blocks[0] for blocks in self.spec.blocks_by_stage[1:]]
        self.blocks, deferred = nn.ModuleList(), torch.zeros(self.spec.width, device=model.device, dtype=wide)
        for index, (stage, numbers) in enumerate(zip(stages, self.spec.blocks_by_stage, strict=True)):
            if index:  # a merge reads all of X, as other blocks may
                self.register_buffer(f"deferred_bias_{numbers[0]}", deferred)
                deferred = torch.zeros(stage.width, device=model.device, dtype=wide)
            conversion = Conversion(stage.block, norms_after(self.spec, index), dtype, deferred)
            for number in numbers:
                block = model.blocks[number]
                assert isinstance(block, BlockLayer)
                self.blocks.append(
                    nn.ModuleDict({slot: self.branch(conversion, residual) for slot, residual in block.residuals()})
                )
            deferred = conversion.deferred_bias
        self.deferred_bias = nn.Buffer(deferred)
        self.eval()

    def branch(self, conversion: Conversion, residual: Residual) -> nn.Module:
        layer_scale = None
        if isinstance(residual.scale, LayerScaleLayer):
            assert residual.scale.beta is None
            layer_scale = residual.scale.gamma.double()
        return self.fuse(conversion, residual.norm, residual.mix, layer_scale)

    def fuse(self, conversion: Conversion, norm: nn.Module, mix: nn.Module, layer_scale: Tensor | None) -> nn.Module:
        """The fused module z -> z (b s c) of a residual branch, which may overwrite its input; `mix` is one of

        TokenProjection  z + layer_scale * (A norm(z + deferred_bias) + b 1^T)
        TokenMlpLayer    z + layer_scale * (W2 act(W1 norm(z + deferred_bias) + b1 1^T) + b2 1^T)
        ChannelMlpLayer  z + layer_scale * V inner(act(U norm(z + deferred_bias) + a))

        The last bias of a ChannelMlpLayer is added or deferred.
        """
        raise NotImplementedError

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Like `forward` of the original, for images, or for texts of full length, without further arguments."""
        check_tensor(x)
        stem = self.spec.stem
        others = any(value is not None and value is not False for value in (*args, *kwargs.values()))
        if isinstance(stem, TokenEmbed) and (others or x.shape[1:] != (stem.seq_len,)):
            raise UserError(
                f"fast() text models take sequences of {stem.seq_len} tokens without a mask; "
                "call the original model for others"
            )
        if others:
            raise UserError(
                "fast() image models take images alone: call the original model, or, for pooled features, "
                "convert it without a head (num_classes=0)"
            )
        return self.run(self.compute, (self.view(x),))

    def view(self, x: Tensor) -> Tensor:
        """The inputs in the form that `embed` reads."""
        return x

    def embed(self, x: Tensor) -> Tensor:
        return self.stem_and_head.embed(x, None, Context(), None)

    def compute(self, x: Tensor) -> Tensor:
        model = self.stem_and_head
        with naming_errors("stem"):
            # Branches overwrite z, which must therefore own its memory.
            z = self.embed(x).contiguous()
        for number, block in enumerate(self.blocks):
            assert isinstance(block, nn.ModuleDict)
            if number in self.starts:
                with naming_errors(f"merges.{number}"):
                    z = (z + self.get_buffer(f"deferred_bias_{number}")).to(z.dtype)
                    z = model.merges[str(number)](z).contiguous() if str(number) in model.merges else z
            if not len(z):
                continue
            for slot, branch in block.items():
                with naming_errors(f"blocks.{number}.{slot}"):
                    z = branch(z)
        with naming_errors("head"):
            return self.finish(z)

    def finish(self, z: Tensor) -> Tensor:
        """Norm, pool and head."""
        model = self.stem_and_head
        features = (z + self.deferred_bias).to(z.dtype)
        return model.forward_head(model.norm(model.pool.prepare(features, Context()) if model.pool else features))
