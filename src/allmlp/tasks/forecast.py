"""Forecasting of time series: points or quantiles, with naive forecasts as baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.dataset import Dataset
from allmlp.data.sampler import Batch, eval_batches
from allmlp.data.series import SeriesBatch, SeriesDataset, Windows
from allmlp.device import sum_dtype
from allmlp.errors import UserError
from allmlp.models.model import Model, ModelSpec
from allmlp.models.series_encoder import SeriesEncoder
from allmlp.spec import Rate
from allmlp.tasks.task import Losses, StepContext, Sums, Task, TaskModule

EVAL_BATCH = 512


class Forecast(Task):
    """Error of the next values of each series, in units of its standard deviation; missing values are ignored.

        mse:       L = mean (y - x)^2             mae: mean |y - x|             huber: mean huber(y - x), delta 1
        quantile:  L = mean over q of 2 max(q (x - y_q), (q - 1) (x - y_q))

    With `quantiles`, in increasing order, the quantile loss is used, regardless of `loss`. In evaluation, as in
    predictions, quantiles that cross are sorted.
    """

    dataset_type: ClassVar[type[Dataset]] = SeriesDataset
    loss: Literal["mse", "mae", "huber"] = "mse"
    quantiles: tuple[Rate, ...] = ()

    def configure_model(self, model: ModelSpec, dataset: SeriesDataset) -> ModelSpec:
        if list(self.quantiles) != sorted(set(self.quantiles)):
            raise UserError(f"task.quantiles is to increase, such as 0.1,0.5,0.9, not {self.quantiles}")
        if self.quantiles and 0.5 not in self.quantiles:
            raise UserError(f"task.quantiles is to include 0.5, the forecast itself: {self.quantiles} has no median")
        sizes = {"seq_len": dataset.seq_len, "in_chans": len(dataset.columns), "horizon": dataset.horizon}
        if isinstance(model, SeriesEncoder):
            return model.configure(**sizes, quantiles=self.quantiles)
        if self.quantiles:
            raise UserError(f"{type(model).__name__} models forecast no quantiles: set task.quantiles to none")
        return model.configure(**sizes)

    def build(self, model: Model, dataset: SeriesDataset) -> TaskModule:
        return ForecastModule(self, model, dataset)

    def floors(self, dataset: SeriesDataset, split: Windows) -> dict[str, float]:
        baselines = {}
        for name, forecast in (("last_value", last_value), ("seasonal_naive", seasonal_naive(dataset))):
            sums = total(errors(forecast, batches(split), dataset.seasonal_error))
            baselines |= {f"{name}_{metric}": value for metric, value in sums.items()}
        return baselines


class ForecastModule(TaskModule):
    unit = ("windows", 1)
    levels: Tensor
    seasonal_error: Tensor

    def __init__(self, spec: Forecast, model: Model, dataset: SeriesDataset) -> None:
        super().__init__()
        self.spec, self.model, self.has_gaps = spec, model, dataset.has_gaps
        self.register_buffer("levels", torch.tensor(spec.quantiles), persistent=False)
        self.register_buffer("seasonal_error", dataset.seasonal_error, persistent=False)

    def prepare_batch(self, batch: Batch, context: StepContext) -> tuple[Tensor, ...]:
        past, future, _ = batch.examples
        return past, future

    def compute_loss(self, *inputs: Tensor) -> Losses:
        past, future = inputs
        output = self.predict(self.model, past)
        seen = future.isfinite()
        target = torch.where(seen, future, 0)
        count = seen.sum().clamp(min=1)
        error = torch.where(seen, self.point(output) - target, 0)
        metrics = {"mse": error.square().sum() / count, "mae": error.abs().sum() / count}
        return Losses(self.loss(output, error, target, seen) / count, metrics)

    def loss_weight(self, *inputs: Tensor) -> Tensor:
        return inputs[1].isfinite().sum()

    def loss(self, output: Tensor, error: Tensor, target: Tensor, seen: Tensor) -> Tensor:
        """Loss summed over all values."""
        if self.spec.quantiles:
            return torch.where(seen, quantile_loss(output, target, self.levels), 0).sum()
        if self.spec.loss == "mse":
            return error.square().sum()
        if self.spec.loss == "mae":
            return error.abs().sum()
        return F.huber_loss(error, torch.zeros_like(error), reduction="sum")

    def predict(self, model: Model, past: Tensor) -> Tensor:
        if not self.has_gaps:
            return model(past).float()
        return model(past, past.isfinite()).float()

    def point(self, output: Tensor) -> Tensor:
        """Point forecast: the forecast itself, or the quantile nearest to the median."""
        return output[..., median(self.spec.quantiles)] if self.spec.quantiles else output

    def evaluate(self, model: Model, batches: Iterable[SeriesBatch]) -> Sums:
        wide = sum_dtype(model.device)
        quantiles = torch.zeros(3, dtype=wide, device=model.device)

        def forecast(past: Tensor, future: Tensor) -> Tensor:
            output = self.predict(model, past)
            if self.spec.quantiles:
                output, seen = output.sort(-1).values, future.isfinite()
                losses = torch.where(seen, quantile_loss(output, future, self.levels), 0).sum(dtype=wide)
                inside = (output[..., 0] <= future) & (future <= output[..., -1])
                quantiles.add_(torch.stack([losses, inside.sum().to(wide), seen.sum().to(wide)]))
            return self.point(output)

        sums = errors(forecast, batches, self.seasonal_error)
        if not self.spec.quantiles:
            return sums
        loss, inside, count = quantiles
        return {"quantile_loss": (loss, count), **sums, "coverage": (inside, count)}


def median(quantiles: tuple[float, ...]) -> int:
    """Index of the quantile nearest to the median."""
    return min(range(len(quantiles)), key=lambda i: abs(quantiles[i] - 0.5))


def quantile_loss(output: Tensor, target: Tensor, levels: Tensor) -> Tensor:
    """Twice the pinball loss, which equals the absolute error for the median, averaged over the quantiles: b h v."""
    under = target.unsqueeze(-1) - output
    return 2 * torch.maximum(levels * under, (levels - 1) * under).mean(-1)


def errors(
    forecast: Callable[[Tensor, Tensor], Tensor], batches: Iterable[SeriesBatch], seasonal_error: Tensor
) -> Sums:
    """Sums and counts of squared, absolute and scaled errors; `forecast` also gets the future, for other metrics."""
    wide = sum_dtype(seasonal_error.device)
    sums = torch.zeros(5, dtype=wide, device=seasonal_error.device)
    for past, future, series in batches:
        seen = future.isfinite()
        error = torch.where(seen, forecast(past, future) - future, 0).to(wide)
        unit = seasonal_error[series].unsqueeze(1).to(wide)  # b 1 v
        scaled = torch.where(unit.isfinite(), error.abs() / unit, 0).sum()
        parts = (error.square().sum(), error.abs().sum(), seen.sum(), scaled, (seen & unit.isfinite()).sum())
        sums += torch.stack([part.to(wide) for part in parts])
    squared, absolute, count, scaled, num_scaled = sums
    return {"mse": (squared, count), "mae": (absolute, count), "mase": (scaled, num_scaled)}


# --- forecasts without a model ------------------------------------------------------------------------------


def last_value(past: Tensor, future: Tensor) -> Tensor:
    """Last observed value of each column, repeated; 0, the mean, if there is none."""
    steps = torch.arange(past.shape[1], device=past.device)[:, None]
    newest = torch.where(past.isfinite(), steps, -1).amax(1, keepdim=True)  # b 1 v
    last = torch.where(newest < 0, 0, past.gather(1, newest.clamp(min=0)))
    return last.expand_as(future)


def seasonal_naive(dataset: SeriesDataset) -> Callable[[Tensor, Tensor], Tensor]:
    """Values of the last season, repeated; the last value where the look-back is shorter than a season or has a gap."""
    season = dataset.frequency.season

    def forecast(past: Tensor, future: Tensor) -> Tensor:
        last = last_value(past, future)
        if season > past.shape[1]:
            return last
        steps = torch.arange(future.shape[1], device=past.device) % season
        repeated = past[:, past.shape[1] - season + steps]
        return torch.where(repeated.isfinite(), repeated, last)

    return forecast


def batches(split: Windows) -> Iterable[SeriesBatch]:
    return eval_batches(split, EVAL_BATCH, split.values.device)


def total(sums: Sums) -> dict[str, float]:
    return {name: (value / count).item() for name, (value, count) in sums.items() if count}
