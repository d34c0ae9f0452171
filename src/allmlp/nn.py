"""The layers as plain modules, for use in your own networks. They are built from sizes and called with a tensor.

>>> from torch import nn
>>> import allmlp
>>> network = nn.Sequential(
...     allmlp.nn.PatchEmbed(img_size=32, patch_size=4, channels=128),       # [B, 3, 32, 32] -> [B, 64, 128]
...     *(allmlp.nn.GMlpBlock(tokens=64, channels=128) for _ in range(6)),   # [B, 64, 128] -> [B, 64, 128]
...     nn.LayerNorm(128),
... )

`allmlp.nn.X` is the module of the spec `allmlp.layers.X`, whose docstring has the equation. Default sizes and the
initialization are those of the papers. Inputs are [B, tokens, channels]; layers that mix tokens also accept inputs with
fewer tokens (except those over a grid), and a `mask` [B, S] that is True at real tokens. Parameters have the same names
as inside the models, so weights can be exchanged: `block.load_state_dict(model.blocks[0].state_dict())`.
"""

from __future__ import annotations

from torch import Tensor

from allmlp import layers
from allmlp.layers.act import Act
from allmlp.layers.block import BlockLayer
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.layers.context import BuildContext, Context, check_mask
from allmlp.layers.init import Init
from allmlp.layers.mixers.attention import AttentionLayer
from allmlp.layers.mixers.conv import TokenConvLayer
from allmlp.layers.mixers.cycle import TokenCycleLayer
from allmlp.layers.mixers.gate import SpatialGatingUnitLayer
from allmlp.layers.mixers.lstm import TokenLstmLayer
from allmlp.layers.mixers.mlp import TokenMlpLayer
from allmlp.layers.mixers.projection import TokenProjection
from allmlp.layers.norm import AffineLayer
from allmlp.layers.scale import LayerScaleLayer
from allmlp.layers.stem import PatchEmbedLayer, TokenEmbedLayer
from allmlp.models.bert import TEXT_INIT
from allmlp.models.cyclemlp import cyclemlp
from allmlp.models.gmlp import GATE_INIT, GateVariant, gmlp
from allmlp.models.mixer import mixer
from allmlp.models.resmlp import resmlp
from allmlp.models.vit import vit

MIXER_INIT, RESMLP_INIT, GMLP_INIT, VIT_INIT, CYCLE_INIT = (
    spec.init for spec in (mixer(1, 16, 16), resmlp(1, 16, 0.1), gmlp(1, 16), vit(1, 16, 1, 16), cyclemlp((1,) * 4))
)

__all__ = [
    "Affine",
    "Attention",
    "Block",
    "ChannelMlp",
    "GMlpBlock",
    "LayerScale",
    "MixerBlock",
    "PatchEmbed",
    "ResMlpBlock",
    "SpatialGatingUnit",
    "TokenConv",
    "TokenCycle",
    "TokenEmbed",
    "TokenLinear",
    "TokenLstm",
    "TokenMlp",
    "TransformerBlock",
]


class PlainForward:
    """Lets a layer be called with its input and a token mask instead of a context."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        check_mask(mask, x)
        return super().forward(x, Context(mask))  # type: ignore[misc]


# --- token mixing -----------------------------------------------------------------------------------------


class TokenMlp(PlainForward, TokenMlpLayer):  # type: ignore[inconsistent-inheritance]
    """MLP-Mixer's token mixing, an MLP over tokens: [B, S, C] -> [B, S, C]."""

    def __init__(self, tokens: int, hidden: int, *, act: Act = "gelu_tanh", init: Init = MIXER_INIT) -> None:
        super().__init__(layers.TokenMlp(hidden, act=act), BuildContext(tokens, 1, init))


class TokenLinear(PlainForward, TokenProjection):  # type: ignore[inconsistent-inheritance]
    """ResMLP's token mixing, one matrix over tokens: [B, S, C] -> [B, S, C]."""

    def __init__(self, tokens: int, *, causal: bool = False, toeplitz: bool = False, init: Init = RESMLP_INIT) -> None:
        super().__init__(layers.Toeplitz() if toeplitz else layers.Dense(), tokens, causal, init)


class TokenConv(PlainForward, TokenConvLayer):  # type: ignore[inconsistent-inheritance]
    """A convolution over the grid of tokens (height, width): [B, S, C] -> [B, S, C]."""

    def __init__(
        self,
        grid: tuple[int, int],
        channels: int,
        kernel: int = 3,
        *,
        depthwise: bool = True,
        act: Act | None = None,
        init: Init = RESMLP_INIT,
    ) -> None:
        spec = layers.TokenConv("depthwise" if depthwise else "full", kernel, act)
        super().__init__(spec, BuildContext(grid[0] * grid[1], channels, init, grid), grid)


class TokenCycle(PlainForward, TokenCycleLayer):  # type: ignore[inconsistent-inheritance]
    """CycleMLP's token mixing over the grid of tokens (height, width): [B, S, C] -> [B, S, C]."""

    def __init__(
        self,
        grid: tuple[int, int],
        channels: int,
        kernel: int = 3,
        *,
        reduction: int = 4,
        init: Init = CYCLE_INIT,
    ) -> None:
        spec = layers.TokenCycle(kernel, reduction)
        super().__init__(spec, BuildContext(grid[0] * grid[1], channels, init, grid), grid)


class TokenLstm(PlainForward, TokenLstmLayer):  # type: ignore[inconsistent-inheritance]
    """A long short-term memory over tokens, causal: [B, S, C] -> [B, S, C]."""

    def __init__(self, channels: int) -> None:
        super().__init__(BuildContext(1, channels, Init()))


class Attention(PlainForward, AttentionLayer):  # type: ignore[inconsistent-inheritance]
    """Multi-head self-attention: [B, S, C] -> [B, S, C]; `rope_theta` adds rotary positions (Llama 3: 500,000)."""

    def __init__(
        self,
        channels: int,
        num_heads: int,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        num_kv_heads: int | None = None,
        rope_theta: float | None = None,
        bias: bool = True,
        init: Init = VIT_INIT,
    ) -> None:
        rotary = layers.RotaryPositions(rope_theta) if rope_theta else None
        spec = layers.Attention(
            num_heads, causal, dropout=dropout, num_kv_heads=num_kv_heads, rotary=rotary, linear_bias=bias
        )
        spec.check_channels(channels)
        super().__init__(spec, BuildContext(1, channels, init))


class SpatialGatingUnit(SpatialGatingUnitLayer):
    """gMLP's spatial gating unit: [B, S, channels] -> [B, S, channels / 2], or all channels for variants other than
    "split". `toeplitz` uses Toeplitz weights, as gMLP's language models do.
    """

    def __init__(
        self,
        tokens: int,
        channels: int,
        *,
        variant: GateVariant = "split",
        causal: bool = False,
        toeplitz: bool = False,
        init: Init | None = None,
    ) -> None:
        super().__init__(gate(variant, causal, toeplitz, init), BuildContext(tokens, channels, GMLP_INIT), channels)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        check_mask(mask, x)
        return super().forward(x, x, Context(mask))


def gate(
    variant: GateVariant, causal: bool, toeplitz: bool, init: Init | None = None, attention: int | None = None
) -> layers.SpatialGatingUnit:
    return layers.SpatialGatingUnit(
        variant,
        layers.Toeplitz() if toeplitz else layers.Dense(),
        causal,
        norm=layers.LayerNorm() if toeplitz else layers.LayerNorm(1e-5),
        attention=layers.TinyAttention(attention, bias=toeplitz) if attention else None,
        init=init or GATE_INIT[variant],
    )


# --- channel mixing, norm, scale --------------------------------------------------------------------------


class ChannelMlp(PlainForward, ChannelMlpLayer):  # type: ignore[inconsistent-inheritance]
    """The MLP over channels of all these models: [B, S, C] -> [B, S, C]; `hidden` is 4 C by default.

    MLP-Mixer uses act="gelu_tanh". `glu` adds a gate: SwiGLU with act="silu".
    """

    def __init__(
        self,
        channels: int,
        hidden: int | None = None,
        *,
        act: Act = "gelu",
        dropout: float = 0.0,
        glu: bool = False,
        bias: bool = True,
        init: Init = MIXER_INIT,
    ) -> None:
        spec = layers.ChannelMlp(hidden or 4 * channels, act, dropout=dropout, glu=glu, linear_bias=bias)
        super().__init__(spec, BuildContext(1, channels, init))


class Affine(AffineLayer):
    """ResMLP's replacement for normalization, alpha * x + beta per channel."""


class LayerScale(LayerScaleLayer):
    """A learned factor per channel."""

    def __init__(self, channels: int, init_value: float = 0.1, *, shift: bool = False) -> None:
        super().__init__(layers.LayerScale(init_value, shift), channels)


# --- blocks -----------------------------------------------------------------------------------------------


class Block(PlainForward, BlockLayer):  # type: ignore[inconsistent-inheritance]
    """The block of any spec `allmlp.layers.Block(...)`: [B, S, C] -> [B, S, C]. `grid` is for convolutions."""

    def __init__(
        self,
        spec: layers.Block,
        tokens: int,
        channels: int,
        *,
        grid: tuple[int, int] | None = None,
        drop_path: float = 0.0,
        init: Init = Init(),
    ) -> None:
        super().__init__(spec, BuildContext(tokens, channels, init, grid), drop_path)


class MixerBlock(Block):
    """MLP-Mixer's block. The default hidden sizes are C/2 for the token MLP and 4 C for the channel MLP."""

    def __init__(
        self,
        tokens: int,
        channels: int,
        token_hidden: int | None = None,
        channel_hidden: int | None = None,
        *,
        act: Act = "gelu_tanh",
        drop_path: float = 0.0,
    ) -> None:
        spec = layers.Block(
            token=layers.TokenMlp(token_hidden or max(channels // 2, 1), act=act),
            channel=layers.ChannelMlp(channel_hidden or 4 * channels, act),
        )
        super().__init__(spec, tokens, channels, drop_path=drop_path, init=MIXER_INIT)


class ResMlpBlock(Block):
    """ResMLP's block: Affine instead of normalization, LayerScale with `init_value`; the default hidden size is 4 C."""

    def __init__(
        self,
        tokens: int,
        channels: int,
        hidden: int | None = None,
        *,
        init_value: float = 0.1,
        causal: bool = False,
        drop_path: float = 0.0,
    ) -> None:
        spec = layers.Block(
            token=layers.TokenLinear(causal=causal),
            channel=layers.ChannelMlp(hidden or 4 * channels),
            norm=layers.Affine(),
            scale=layers.LayerScale(init_value),
        )
        super().__init__(spec, tokens, channels, drop_path=drop_path, init=RESMLP_INIT)


class GMlpBlock(Block):
    """gMLP's block, or with a tiny attention of `attention` channels aMLP's; the default hidden size is 6 C.

    `toeplitz` and `causal` are for language models.
    """

    def __init__(
        self,
        tokens: int,
        channels: int,
        hidden: int | None = None,
        *,
        attention: int | None = None,
        variant: GateVariant = "split",
        causal: bool = False,
        toeplitz: bool = False,
        drop_path: float = 0.0,
    ) -> None:
        inner = gate(variant, causal, toeplitz, attention=attention)
        spec = layers.Block(channel=layers.ChannelMlp(hidden or 6 * channels, inner=inner))
        super().__init__(spec, tokens, channels, drop_path=drop_path, init=TEXT_INIT if toeplitz else GMLP_INIT)


class TransformerBlock(Block):
    """ViT's pre-norm Transformer block; the default hidden size is 4 C."""

    def __init__(
        self,
        channels: int,
        num_heads: int,
        hidden: int | None = None,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        spec = layers.Block(
            token=layers.Attention(num_heads, causal),
            channel=layers.ChannelMlp(hidden or 4 * channels),
            dropout=dropout,
        )
        super().__init__(spec, 1, channels, drop_path=drop_path, init=VIT_INIT)


# --- stems ------------------------------------------------------------------------------------------------


class PatchEmbed(PatchEmbedLayer):
    """Non-overlapping patches, each embedded by one linear layer: [B, in_chans, H, W] -> [B, S, channels]."""

    def __init__(
        self,
        img_size: int | tuple[int, int],
        patch_size: int | tuple[int, int],
        channels: int,
        in_chans: int = 3,
        *,
        init: Init = MIXER_INIT,
    ) -> None:
        spec = layers.PatchEmbed(pair(img_size), pair(patch_size), in_chans)
        super().__init__(spec, BuildContext(spec.tokens, channels, init, spec.grid))


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


class TokenEmbed(TokenEmbedLayer):
    """Token embedding without positions, which gMLP does not need: [B, S] -> [B, S, channels]."""

    def __init__(self, vocab_size: int, seq_len: int, channels: int) -> None:
        spec = layers.TokenEmbed(vocab_size, seq_len)
        super().__init__(spec, BuildContext(seq_len, channels, TEXT_INIT), embedding=True)

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, None, 0, None)
