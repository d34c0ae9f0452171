"""What a rewritten model is on any device: the stem, a list of steps for the blocks, norm, pool and head.

    z = X - lift,   lift (c): biases that wait

A channel MLP's last product adds straight into z, so its bias is not added there: it may wait in `lift`, and what reads
z adds it, where it costs nothing. Affine and LayerScale are folded into the matrices beside them. A token MLP's last
bias is the same for all channels of a token: where LayerNorm reads it next it has no effect and is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.kernels.token_mix.reference import Act
from allmlp.layers.block import BlockLayer, Residual
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.layers.context import Context
from allmlp.layers.mixers.linear import TokenLinear
from allmlp.layers.mixers.mlp import TokenMlp, TokenMlpLayer
from allmlp.layers.mixers.projection import TokenProjection
from allmlp.layers.norm import LayerNorm
from allmlp.layers.scale import LayerScaleLayer
from allmlp.layers.stem import Tokens
from allmlp.models.encoder import Encoder, EncoderModel

Step = Callable[[Tensor], Tensor]
"""From z to z; it may write over its input."""


def can_lower(spec: Encoder) -> bool:
    """Whether the blocks are of a kind that is rewritten here."""
    block, channel = spec.block, spec.block.channel
    token = block.token is None or isinstance(block.token, (TokenMlp, TokenLinear))
    inner = channel is not None and (channel.inner is None or channel.inner.side is None)
    return block.order == "pre" and block.cross is None and token and inner


@torch.no_grad()
def duplicate(model: EncoderModel, dtype: torch.dtype) -> EncoderModel:
    with torch.device("meta"):
        copy = model.spec.build()
    copy.load_state_dict({name: value.to(dtype) for name, value in model.state_dict().items()}, assign=True)
    assert isinstance(copy, EncoderModel)
    return copy.eval().requires_grad_(False)


class Lowered(nn.Module):
    @torch.no_grad()
    def __init__(self, model: EncoderModel, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.dtype = model.spec, dtype
        self.ends = duplicate(model, dtype)
        self.lift = torch.zeros(model.spec.width, device=model.device, dtype=torch.promote_types(dtype, torch.float32))
        self.steps: list[Step] = []
        for block in model.blocks:
            assert isinstance(block, BlockLayer)
            for _, residual in block.residuals():
                self.add(residual)
        self.ends.blocks = nn.ModuleList()

    def add(self, residual: Residual) -> None:
        """The step of one residual branch."""
        mix, gain = residual.mix, None
        if isinstance(residual.scale, LayerScaleLayer):
            if residual.scale.beta is not None:
                raise UserError("fast() does not know LayerScale with a shift")
            gain = residual.scale.gamma.double()
        if isinstance(mix, TokenProjection):
            self.steps.append(self.token_linear(residual.norm, mix, gain))
        elif isinstance(mix, TokenMlpLayer):
            self.steps.append(self.token_mlp(residual.norm, mix, gain))
        else:
            assert isinstance(mix, ChannelMlpLayer)
            self.steps.append(self.channel_mlp(residual.norm, mix, gain))

    def token_linear(self, norm: nn.Module, mix: TokenProjection, gain: Tensor | None) -> Step:
        """z + gain * (A norm(z + lift) + b 1^T)."""
        raise NotImplementedError

    def token_mlp(self, norm: nn.Module, mix: TokenMlpLayer, gain: Tensor | None) -> Step:
        """z + gain * (W2 act(W1 norm(z + lift) + b1 1^T) + b2 1^T)."""
        raise NotImplementedError

    def channel_mlp(self, norm: nn.Module, mix: ChannelMlpLayer, gain: Tensor | None) -> Step:
        """z + gain * V inner(act(U norm(z + lift) + a)); its last bias is added or goes into `lift`."""
        raise NotImplementedError

    # --- what devices share ------------------------------------------------------------------------------------

    def cast(self, weight: Tensor) -> Tensor:
        return weight.to(self.dtype).contiguous()

    def act(self, slot: str) -> Act:
        mixer: Any = getattr(self.spec.block, slot)
        return mixer.act

    def forgets(self, gain: Tensor | None) -> bool:
        """Whether LayerNorm reads what a token branch has written, so that its last bias has no effect."""
        return gain is None and isinstance(self.spec.block.norm, LayerNorm) and isinstance(self.spec.norm, LayerNorm)

    def wait(self, bias: Tensor, gain: Tensor | None) -> None:
        self.lift = self.lift + (bias if gain is None else gain * bias).to(self.lift.dtype)

    def forward(self, x: Tensor, *more: Tensor, **named: Tensor) -> Tensor:
        stem = self.spec.stem
        if isinstance(stem, Tokens) and (more or named or x.shape[1:] != (stem.length,)):
            raise UserError(
                f"a fast text model reads rows of {stem.length} tokens, without a mask; use the model itself for others"
            )
        with torch.autocast(x.device.type, enabled=False):  # the types are chosen
            return self.compute(x if isinstance(self.spec.stem, Tokens) else x.to(self.dtype))

    @torch.inference_mode()
    def compute(self, x: Tensor) -> Tensor:
        # The stem's output may be a view of its input's buffer elsewhere: z is written over, so it must be ours.
        z = self.ends.embed(x, None, Context(), None).contiguous()
        for step in self.steps if len(z) else []:
            z = step(z)
        return self.ends.forward_head(self.ends.norm((z + self.lift).to(z.dtype)))
