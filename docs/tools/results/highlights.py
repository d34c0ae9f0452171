"""What the README says of speed and time series, from the same records as the tables."""

from __future__ import annotations

from statistics import mean, median

from results import series, speed
from results.records import LOGS


def highlights() -> str:
    return "\n".join(f"- {line}" for line in (inference(), forecasts()))


def inference() -> str:
    """Against the fastest measured mode of timm, in the same rounds; the smaller ratio of a model in two records."""
    found = [cell for name in speed.INFERENCE for cell in speed.cells(LOGS / f"{name}.json") if cell.peer is not None]
    times: dict[str, float] = {}
    for cell in found:
        ratio = median(b / a for a, b in zip(cell.ours["calls_s"], cell.peer["calls_s"]))  # type: ignore[index]
        times[cell.model] = min(ratio, times.get(cell.model, ratio))
    shown = ", ".join(f"{model} {value:.2f}x" for model, value in sorted(times.items()))
    about = "Inference throughput of `allmlp.fast` over timm's fastest measured mode, H200, bfloat16, batch 256"
    return f"{about}: {shown}"


def forecasts() -> str:
    """The mean MSE over datasets and horizons, of models with all seeds."""
    values = {
        title: [series.over_horizons(name, dataset) for dataset in series.DATASETS]
        for name, title in series.MODELS.items()
    }
    complete = {
        title: mean(map(mean, found)) for title, found in values.items() if min(map(len, found)) >= series.SEEDS
    }
    shown = ", ".join(f"{title} {value:.3f}" for title, value in complete.items())
    return f"Test MSE of ETT forecasts, mean of three datasets, four horizons and three seeds: {shown}"


BLOCKS = {"highlights": highlights}
