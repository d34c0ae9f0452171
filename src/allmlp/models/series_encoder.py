"""Models of time series: reversible normalization, stem, blocks, norm, head."""

from __future__ import annotations

from typing import Annotated, Any, Self

import torch
from torch import Tensor, nn

from allmlp.errors import UserError
from allmlp.layers.block import Block
from allmlp.layers.context import BuildContext, Context
from allmlp.layers.init import Init, TorchDefault
from allmlp.layers.mixers.attention import RelativePositionBias
from allmlp.layers.norm import LayerNorm, Norm, build_norm
from allmlp.layers.scale import DropPath
from allmlp.layers.series import ForecastHead, Level, RevIN, SeriesHead, SeriesNorm, SeriesPatchesLayer, SeriesStem
from allmlp.layers.stem import refuse_double
from allmlp.models.encoder import part_paths
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Count, Range

TORCH_INIT = Init(TorchDefault(), TorchDefault())


class SeriesEncoder(ModelSpec):
    """A stack of identical blocks between the stem and the head of a time-series model.

        z, level = series_norm(x),   X0 = stem(z),   Xl = block_l(Xl-1),   y = series_norm^-1(head(norm(XL)), level)

    With depth 0, the head alone, it is a linear model (DLinear, NLinear).
    """

    width: Count
    depth: Annotated[int, Range(0, 10_000)]
    block: Block
    stem: SeriesStem
    head: SeriesHead = ForecastHead()
    series_norm: SeriesNorm | None = RevIN()
    norm: Norm | None = LayerNorm()
    drop_path: DropPath = DropPath()
    init: Init = TORCH_INIT

    def check(self) -> None:
        width = self.stem.width
        if width is not None and width != self.width:
            raise UserError(f"tokens of {type(self.stem).__name__} have {width} channels: set width to {width}")
        if self.block.variate is not None and self.stem.mixes_variates:
            raise UserError(f"the variates are already the channels of {type(self.stem).__name__}: set variate=None")
        if self.block.cross is not None:
            raise UserError("a model of series has no cross-attention")
        if any(isinstance(part, RelativePositionBias) for part in self.children()):
            raise UserError("RelativePositionBias is for models of images and texts: use RotaryPositions")

    def build(self) -> SeriesEncoderModel:
        return SeriesEncoderModel(self)

    @property
    def build_context(self) -> BuildContext:
        return BuildContext(self.stem.tokens, self.width, self.init, variates=self.stem.in_chans)

    @property
    def input_spec(self) -> str:
        return f"{self.stem.seq_len}x{self.stem.in_chans} series"

    def configure(self, **options: Any) -> Self:
        changes: dict[str, Any] = {}
        if "drop_path" in options:
            changes["drop_path"] = self.drop_path.replace(rate=options.pop("drop_path"))
        ahead = {name: options.pop(name) for name in ("horizon", "quantiles") if name in options}
        if ahead:
            head = self.head if isinstance(self.head, ForecastHead) else ForecastHead()
            changes["head"] = head.replace(**ahead)
        fields = ("seq_len", "in_chans")
        for name in options:
            if name not in fields:
                names = ", ".join((*fields, "horizon", "quantiles"))
                raise UserError(f"the model has no {name!r} (input: {self.input_spec}); it has {names}")
        stem = self.stem.replace(**options)
        return self.replace(stem=stem, width=stem.width or self.width, **changes)

    def shallow(self) -> tuple[SeriesEncoder, dict[str, range]]:
        blocks = {"blocks.0": range(self.depth)} if self.depth else {}
        return self.replace(depth=min(self.depth, 1)), blocks


class SeriesEncoderModel(Model[SeriesEncoder]):
    """`forward_head(forward_features(x))` is the output before the inverse of the normalization."""

    def __init__(self, spec: SeriesEncoder) -> None:
        super().__init__()
        self.spec = spec
        ctx = spec.build_context
        self.series_norm = spec.series_norm.build(spec.stem.in_chans) if spec.series_norm else None
        self.stem = spec.stem.build(ctx)
        self.blocks = nn.ModuleList(spec.block.build(ctx, spec.drop_path.at(i, spec.depth)) for i in range(spec.depth))
        self.norm = build_norm(spec.norm, spec.width)
        self.head = spec.head.build(ctx, spec.stem)

    def forward(self, x: Tensor, mask: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """The next values of series [B, L, V], as [B, H, V], or [B, H, V, Q] for a head of quantiles.

        mask [B, L, V] is True at observed values; the others are not read. With a `ReconstructionHead` the output is
        the normalized patches [B, V, S, P]; `hidden` [B, V, S] is True at patches that are masked.
        """
        z, level = self.normalize(x, mask)
        output = self.forward_head(self.encode(z, hidden))
        if self.series_norm is None or not isinstance(self.spec.head, ForecastHead):
            return output
        return self.series_norm.inverse(output, level)

    def normalize(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Level]:
        """The normalized series, 0 where values are missing, and its level."""
        self.validate(x, mask)
        x = x if mask is None else torch.where(mask, x, 0)
        if self.series_norm is None:
            return x, Level(torch.zeros_like(x[:, :1]), torch.ones_like(x[:, :1]))
        return self.series_norm(x, mask)

    def encode(self, z: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Tokens of a normalized series after the last norm."""
        if hidden is not None and not isinstance(self.stem, SeriesPatchesLayer):
            raise UserError("only a series in patches has patches to hide")
        x = self.stem(z) if hidden is None else self.stem(z, hidden)
        for block in self.blocks:
            x = self.run_block(block, x, Context())
        return self.norm(x)

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens after the last norm: [(B V), S, C], or [B, S, C] where the variates are the channels."""
        return self.encode(self.normalize(x, mask)[0])

    def forward_head(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(features)

    def validate(self, x: Tensor, mask: Tensor | None) -> None:
        expected = (self.spec.stem.seq_len, self.spec.stem.in_chans)
        if x.dim() != 3 or not x.is_floating_point() or tuple(x.shape[1:]) != expected:
            raise UserError(
                f"expected a float series of shape [B, {expected[0]}, {expected[1]}], got "
                f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
            )
        refuse_double(x, self)
        if mask is not None and (mask.shape != x.shape or mask.dtype != torch.bool):
            raise UserError(f"expected a bool mask of the shape {list(x.shape)} of the series, got {list(mask.shape)}")

    def parts(self) -> dict[str, str]:
        return {path.replace(".0", ""): path for path in part_paths(self)}

    def dummy_inputs(self, batch_size: int = 1) -> tuple[Tensor, ...]:
        stem = self.spec.stem
        return (torch.randn(batch_size, stem.seq_len, stem.in_chans, device=self.device, dtype=self.dtype),)
