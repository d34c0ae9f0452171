"""Analysis of time-series models: periods of their filters over time, and mixing of variates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from allmlp.analysis import figures
from allmlp.analysis.output_folder import OutputFolder, Section
from allmlp.analysis.target import AnalysisTarget
from allmlp.analysis.token_filters import token_weights
from allmlp.errors import plural
from allmlp.layers.channel import ChannelMlpLayer
from allmlp.layers.series import ForecastHeadLayer, SeriesPatches, SeriesPatchesLayer
from allmlp.layers.variate import VariateMlpLayer
from allmlp.models.series_encoder import SeriesEncoderModel


class TimeFilters(NamedTuple):
    """Rows of weights over time, and the steps between two of their entries."""

    name: str
    rows: Tensor
    stride: int


class Period(NamedTuple):
    steps: float
    """The period with the most power."""
    share: float
    """Fraction of the power of all periods, without the mean."""


def time_filters(model: SeriesEncoderModel) -> Iterator[TimeFilters]:
    """Filters within a patch, between the tokens of each block, and from all steps to the forecast."""
    stem = model.spec.stem
    stride = stem.stride if isinstance(stem, SeriesPatches) else 1
    if isinstance(model.stem, SeriesPatchesLayer):
        yield TimeFilters("stem", model.stem.proj.weight.detach().cpu(), 1)
    for weights in token_weights(model):
        if weights.kind in ("matrix", "units"):
            yield TimeFilters(weights.name, weights.weight, stride)
    if isinstance(model.head, ForecastHeadLayer):
        weight = model.head.proj.weight.detach().cpu().unflatten(1, (stem.tokens, -1))
        yield TimeFilters("head", weight.transpose(1, 2).flatten(0, 1), stride)


def spectrum(filters: TimeFilters) -> tuple[Tensor, Tensor]:
    """Periods in steps, the longest first, and the power of each: the sum of |DFT|^2 over the rows without their mean.

    P(k) = sum_r |sum_t (w_rt - mean_t w_rt) exp(-2 pi i k t / n)|^2,   period n / k entries
    """
    rows = filters.rows.double()
    power = torch.fft.rfft(rows - rows.mean(1, keepdim=True)).abs().square().sum(0)[1:]
    entries = rows.shape[1] / torch.arange(1, len(power) + 1, dtype=torch.float64)
    return filters.stride * entries, power


def strongest(filters: TimeFilters) -> Period | None:
    """The strongest period; None for filters with a single entry or constant ones."""
    periods, power = spectrum(filters)
    if not len(power) or not power.sum() > 0:
        return None
    best = int(power.argmax())
    return Period(periods[best].item(), (power[best] / power.sum()).item())


def variate_maps(model: SeriesEncoderModel) -> dict[str, Tensor]:
    """How much each variate (row) reads of every other (column), by layer: |W2| |W1|, V x V. If the variates are the
    channels, as in TSMixer, these layers are the channel MLPs.
    """
    kinds = (VariateMlpLayer, ChannelMlpLayer) if model.spec.stem.mixes_variates else (VariateMlpLayer,)
    return {
        name: (layer.down.weight.abs() @ layer.up.weight.abs()).detach().cpu()
        for name, layer in model.named_modules()
        if isinstance(layer, kinds) and layer.down.weight.shape[1] == layer.up.weight.shape[0]
    }


def series_sections(target: AnalysisTarget, output: OutputFolder) -> list[Section]:
    """The sections for a time-series model; empty for others."""
    model = target.model
    if not isinstance(model, SeriesEncoderModel):
        return []
    rows, strongest_periods = [], []
    for filters in time_filters(model):
        periods, power = spectrum(filters)
        share = power / power.sum().clamp(min=torch.finfo(power.dtype).tiny)
        rows += [(filters.name, period.item(), part.item()) for period, part in zip(periods, share)]
        best = strongest(filters)
        strongest_periods += [f"{filters.name} {best.steps:.3g} steps ({best.share:.0%})"] if best else []
    output.table("periods", ("layer", "period", "share"), rows, "The power of each period, in steps, in the filters.")
    shown = strongest_periods if len(strongest_periods) <= 3 else [strongest_periods[0], "...", strongest_periods[-1]]
    sections = [output.section("periods", f"strongest: {', '.join(shown) or 'none'}")]
    maps = variate_maps(model)
    if maps:
        columns = target.columns or tuple(map(str, range(model.spec.stem.in_chans)))
        panels = [figures.Panel(name, weight) for name, weight in maps.items()]
        named = [f"{number} {name}" for number, name in enumerate(target.columns[:12])]
        note = f"|W2| |W1|; {', '.join(named)}" if named else "|W2| |W1|"
        text = figures.FigureText("Mixing of variates", note, "variate that is read", "variate")
        cells = [
            (name, to, source, value)
            for name, weight in maps.items()
            for to, row in zip(columns, weight.tolist())
            for source, value in zip(columns, row)
        ]
        output.table("variates", ("layer", "to", "from", "weight"), cells, "|W2| |W1| over the variates.")
        output.figure("variates", figures.heatmaps(panels, text))
        count = plural(model.spec.stem.in_chans, "variate")
        sections.append(output.section("variates", f"{plural(len(maps), 'layer mixes', 'layers mix')} {count}"))
    return sections
