"""The part of `auto` about time series: horizon, look-back and model for a table."""

from __future__ import annotations

from collections.abc import Iterator

from allmlp.data.dataset import Data
from allmlp.data.series import SeriesDataset, eval_stride
from allmlp.data.series_table import SeriesTable
from allmlp.models.forecasting import patchtsmixer
from allmlp.models.series_encoder import SeriesEncoder

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


def data_settings(dataset: SeriesDataset, data: Data, size: int | None) -> Iterator[tuple[str, int, str]]:
    """Unset fields of the data, with values and reasons; `size` is the requested look-back."""
    if not isinstance(data, SeriesTable):
        return
    season, step = dataset.frequency.season, dataset.frequency
    if data.horizon is None:
        what = f"a season of {season} steps of {step}" if dataset.horizon == season else f"steps of {step}"
        yield "data.horizon", dataset.horizon, f"{what}; --horizon changes it"
    if data.seq_len is None or size:
        why = "as given" if size else "three horizons and two seasons, at most half of the longest series"
        yield "data.seq_len", size or dataset.seq_len, why
    forecasts = len(dataset.test if dataset.validation is None else dataset.validation)
    stride = eval_stride(forecasts)
    if data.eval_stride == 1 and stride > 1:
        yield "data.eval_stride", stride, f"{forecasts:,} forecasts are more than an evaluation needs"


def series_model(dataset: SeriesDataset, few: bool) -> tuple[SeriesEncoder, str, str]:
    """The model, the reason, and its name. A patch is a season, if the look-back covers several."""
    season, seq_len = dataset.frequency.season, dataset.seq_len
    patch = season if 4 <= season <= 24 and 4 * season <= seq_len else max(seq_len // 12, 1)
    width, dropout = (32, 0.3) if few else (64, 0.2)
    sizes = {"seq_len": seq_len, "in_chans": len(dataset.columns), "horizon": dataset.horizon}
    # Quantiles would also fit the noise of dropout, above all in the head, and become far too wide.
    model = patchtsmixer(3, width, 2, dropout, 0.0, patch_size=patch, stride=patch, **sizes)
    return model, f"patches of {patch} step{'s' * (patch > 1)}, one column at a time", "PatchTSMixer, 3 blocks"
