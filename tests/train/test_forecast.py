"""Forecasting: loss and metrics against plain formulas, naive floors, missing values, quantiles, pretraining."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import allmlp
from allmlp.data.dataset import Data
from allmlp.data.frequency import DAY, Frequency
from allmlp.data.sampler import Batch, eval_batches
from allmlp.data.series import SeriesBatch, SeriesDataset, SplitEnds, build_dataset
from allmlp.models.forecasting import patchtsmixer
from allmlp.models.series_encoder import SeriesEncoder
from allmlp.optim import AdamW
from allmlp.run import Budget, Run
from allmlp.tasks.forecast import (
    Forecast,
    ForecastModule,
    batches,
    last_value,
    quantile_loss,
    seasonal_naive,
    total,
)
from allmlp.tasks.masked_patches import MaskedPatches, MaskedPatchesModule
from allmlp.tasks.task import StepContext
from allmlp.training import evaluate_checkpoint, train


class Waves(Data):
    """Two series of two columns that repeat every week, with a little noise; the second has gaps."""

    gaps: bool = True
    seq_len: int = 28
    horizon: int = 7

    def load(self) -> SeriesDataset:
        rng, steps = np.random.default_rng(0), np.arange(200)
        series = [
            np.stack([np.sin(2 * np.pi * (steps + shift) / 7), np.cos(2 * np.pi * steps / 7) * 3 + 10], 1)
            for shift in (0, 2)
        ]
        values = np.concatenate(series) + 0.1 * rng.normal(size=(400, 2))
        if self.gaps:
            values[250:256, 0], values[310, 1] = np.nan, np.nan
        parts, options = [SplitEnds(130, 160, 200)] * 2, {"ids": ("a", "b")}
        return build_dataset(
            values, [200, 200], parts, ("x", "y"), Frequency(DAY), self.seq_len, self.horizon, **options
        )


def small(in_chans: int = 2) -> SeriesEncoder:
    return patchtsmixer(2, 16, 2, 0.0, 0.0, seq_len=28, in_chans=in_chans, horizon=7, patch_size=7, stride=7)


def run(**changes: object) -> Run:
    made = Run(
        model=small(),
        task=Forecast(),
        data=Waves(),
        batch_size=32,
        budget=Budget(steps=60),
        optim=AdamW(lr=5e-3),
        keep_best=True,
        eval_every=30,
    )
    return made.replace(**changes)


@pytest.mark.slow
def test_a_model_beats_the_naive_forecasts(tmp_path: Path) -> None:
    found = train(run(), tmp_path, "cpu")
    assert found["mse"] < 0.5 * found["last_value_mse"] and found["mse"] < found["seasonal_naive_mse"]
    assert found["mae"] < found["seasonal_naive_mae"] and found["mase"] < found["seasonal_naive_mase"] < 1.3
    assert evaluate_checkpoint(tmp_path, "cpu") == pytest.approx(found)
    preprocessing = allmlp.load(tmp_path).preprocessing
    assert preprocessing.columns == ("x", "y") and preprocessing.ids == ("a", "b")
    assert preprocessing.mean[1][1] == pytest.approx(10, abs=0.3) and str(preprocessing.frequency) == "1 day"


def test_metrics_are_those_of_plain_formulas() -> None:
    dataset = Waves().load()
    torch.manual_seed(0)
    module = ForecastModule(Forecast(), small().build(), dataset).eval()
    with torch.no_grad():
        found = total(module.evaluate(module.model, eval_batches(dataset.test, 16, torch.device("cpu"))))
        squared, absolute, scaled = [], [], []
        for past, future, series in (dataset.test.fetch(torch.tensor([n])) for n in range(len(dataset.test))):
            output = module.model(past, past.isfinite())
            for step in range(7):
                for column in range(2):
                    error = float(output[0, step, column] - future[0, step, column])
                    if not math.isnan(error):
                        squared.append(error**2)
                        absolute.append(abs(error))
                        scaled.append(abs(error) / float(dataset.seasonal_error[series[0], column]))
    assert found == pytest.approx(
        {"mse": np.mean(squared), "mae": np.mean(absolute), "mase": np.mean(scaled)}, rel=1e-5
    )


def test_missing_targets_do_not_count() -> None:
    dataset = Waves().load()
    module = ForecastModule(Forecast(), small().build(), dataset)
    past, future, _ = dataset.train.fetch(torch.arange(8))
    expected = module.compute_loss(past, future).total
    worse = torch.cat([future, torch.full_like(future, math.nan)])
    assert module.compute_loss(torch.cat([past, past]), worse).total.item() == pytest.approx(expected.item())
    nothing = module.compute_loss(past, torch.full_like(future, math.nan)).total
    nothing.backward()
    assert nothing == 0 and all(w.grad is None or w.grad.isfinite().all() for w in module.parameters())


@pytest.mark.parametrize("loss", ["mse", "mae", "huber"])
def test_losses(loss: str) -> None:
    dataset = Waves(gaps=False).load()
    module = ForecastModule(Forecast(loss=loss), small().build().eval(), dataset)
    past, future, _ = dataset.train.fetch(torch.arange(8))
    error = (module.model(past) - future).abs()
    expected = {
        "mse": error.square(),
        "mae": error,
        "huber": torch.where(error < 1, error.square() / 2, error - 0.5),
    }[loss].mean()
    assert not dataset.has_gaps and module.compute_loss(past, future).total.item() == pytest.approx(expected.item())


def test_naive_forecasts() -> None:
    dataset = Waves().load()
    past = torch.arange(28.0).view(1, 28, 1).repeat(1, 1, 2)
    past[0, -1, 0], past[0, -3, 1] = math.nan, math.nan
    future = torch.zeros(1, 10, 2)
    assert last_value(past, future)[0, 5].tolist() == [26.0, 27.0]
    seasonal = seasonal_naive(dataset)(past, future)
    assert seasonal[0, :, 0].tolist() == [21, 22, 23, 24, 25, 26, 26, 21, 22, 23]
    assert seasonal[0, :, 1].tolist() == [21, 22, 23, 24, 27, 26, 27, 21, 22, 23]
    empty = torch.full_like(past, math.nan)
    assert (seasonal_naive(dataset)(empty, future) == 0).all()


@pytest.mark.slow
def test_quantiles(tmp_path: Path) -> None:
    levels = (0.1, 0.5, 0.9)
    found = train(run(task=Forecast(quantiles=levels), budget=Budget(steps=120)), tmp_path, "cpu")
    assert list(found)[:4] == ["quantile_loss", "mse", "mae", "mase"] and 0.5 < found["coverage"] < 0.99
    model = allmlp.load(tmp_path)
    output = model(torch.randn(2, 28, 2))
    assert output.shape == (2, 7, 2, 3) and model.spec.head.quantiles == levels
    target, forecast = torch.randn(4, 7, 2), torch.randn(4, 7, 2)
    losses = quantile_loss(forecast.unsqueeze(-1), target, torch.tensor([0.5]))
    torch.testing.assert_close(losses, (target - forecast).abs())
    above = quantile_loss(torch.full((1, 1, 1, 1), 3.0), torch.tensor([[[1.0]]]), torch.tensor([0.9]))
    assert above.item() == pytest.approx(2 * 0.1 * 2)
    with pytest.raises(allmlp.UserError, match="forecast no quantiles"):
        Forecast(quantiles=levels).configure_model(allmlp.preset("hf:patchtst").spec, Waves().load())
    for other in ((0.9, 0.5, 0.1), (0.5, 0.5)):
        with pytest.raises(allmlp.UserError, match=r"task\.quantiles is to increase, such as 0\.1,0\.5,0\.9, not \(0"):
            Forecast(quantiles=other).configure_model(model.spec, Waves().load())


@pytest.mark.parametrize("levels", [(0.1, 0.9), (0.9,)])
def test_quantiles_without_the_median_are_refused(levels: tuple[float, ...]) -> None:
    """The forecast and its errors would be those of the lowest quantile."""
    with pytest.raises(allmlp.UserError, match=r"task\.quantiles is to include 0\.5"):
        Forecast(quantiles=levels).configure_model(small(), Waves().load())


def test_quantiles_that_cross_are_evaluated_as_they_are_predicted() -> None:
    dataset = Waves().load()
    task = Forecast(quantiles=(0.1, 0.5, 0.9))
    model = allmlp.create(task.configure_model(small(), dataset), seed=0)
    module = task.build(model, dataset)
    batch = next(iter(batches(dataset.test)))
    ordered = total(module.evaluate(model, [batch]))
    straight = model.forward
    model.forward = lambda *inputs: straight(*inputs).flip(-1)  # type: ignore[method-assign]
    assert total(module.evaluate(model, [batch])) == ordered


@pytest.mark.slow
def test_pretraining_then_forecasting(tmp_path: Path) -> None:
    start = train(run(task=MaskedPatches(0.5)), tmp_path / "start", "cpu")
    assert start["mse"] < 1, "hidden patches of a wave can be restored"
    changes = {"model": None, "init_from": str(tmp_path / "start"), "freeze_fraction": 0.5}
    found = train(run(**changes), tmp_path / "end", "cpu")
    assert found["mse"] < found["seasonal_naive_mse"]
    start_model, end = allmlp.load(tmp_path / "start"), allmlp.load(tmp_path / "end")
    assert type(end.spec.head).__name__ == "ForecastHead" and end.spec.block == start_model.spec.block


def test_hidden_patches() -> None:
    dataset = Waves().load()
    model = MaskedPatches(0.5).configure_model(small(), dataset).build()
    module = MaskedPatchesModule(MaskedPatches(0.5), model, dataset)
    batch = Batch(0, 0.0, torch.arange(8), dataset.train.fetch(torch.arange(8)))
    past, uniforms = module.prepare_batch(batch, StepContext(0.0, torch.Generator().manual_seed(0)))
    loss, count = module.errors(model, past, uniforms)
    assert uniforms.shape == (8, 4) and count == 8 * 2 * 2 * 7 and loss > 0  # two of four patches of two columns
    windows = dataset.test.fetch(torch.arange(12))
    sums = [
        module.evaluate(model, [SeriesBatch(*(part[i : i + size] for part in windows)) for i in range(0, 12, size)])
        for size in (12, 5)
    ]
    # Masks do not depend on the batch; float32 products of other sizes may round differently.
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-6, atol=0)
    with pytest.raises(allmlp.UserError, match="needs a model of patches"):
        MaskedPatches().configure_model(allmlp.preset("dlinear").spec, dataset)


def test_wrong_data(tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match="the task Classify needs labeled images, not time series"):
        train(run(task="Classify"), tmp_path, "cpu")
    with pytest.raises(allmlp.UserError, match=r"split by time, not by val_size"):
        train(run(val_size=5), tmp_path, "cpu")
