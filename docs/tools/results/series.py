"""Tables about time series, from the records of `benchmarks/forecasting.py`."""

from __future__ import annotations

import json
from itertools import product
from statistics import mean, median

from allmlp.study.statistics import interval
from results.markdown import NOTHING, over_seeds, table
from results.records import BENCHMARKS, Record, document

DATASETS, HORIZONS, SEEDS, SEQ_LEN = ("ETTh1", "ETTh2", "ETTm1"), (96, 192, 336, 720), 3, 512
MODELS = {
    "patchtsmixer": "PatchTSMixer",
    "hf:patchtsmixer": "PatchTSMixer of transformers",
    "hf:patchtst": "PatchTST of transformers",
    "gmlp_series": "gMLP",
    "resmlp_series": "ResMLP",
    "tsmixer": "TSMixer",
    "dlinear": "DLinear",
    "nlinear": "NLinear",
}
FLOORS = {"last_value": "last value", "seasonal_naive": "last day repeated"}
PUBLISHED = {("patchtsmixer", "ETTh1", 96): "0.368"}
"""Of the papers, with the same look-back."""
SIDES = (("ours", "fast"), ("transformers", "compiled"))


def rows() -> list[Record]:
    """The cells that have ended."""
    found = document("forecasting")["rows"]
    return [row for row in found if "error" not in row and row["seq_len"] == SEQ_LEN]


def by_seed(model: str, dataset: str, horizon: int) -> dict[int, float]:
    """Test MSE; the last, if a cell was repeated."""
    wanted = (model, dataset, horizon)
    return {
        row["seed"]: row["test"]["mse"] for row in rows() if (row["model"], row["dataset"], row["horizon"]) == wanted
    }


def over_horizons(model: str, dataset: str) -> list[float]:
    """The mean MSE over all horizons, of each seed that has them all."""
    found = [by_seed(model, dataset, horizon) for horizon in HORIZONS]
    return [mean(own[seed] for own in found) for seed in sorted(set.intersection(*map(set, found)))]


def floor(name: str, dataset: str) -> list[str]:
    """The MSE of a naive forecast at every horizon, and their mean."""
    found = [
        next(
            (row["test"][f"{name}_mse"] for row in rows() if (row["dataset"], row["horizon"]) == (dataset, horizon)),
            None,
        )
        for horizon in HORIZONS
    ]
    known = [value for value in found if value is not None]
    average = f"{mean(known):.4f}" if len(known) == len(HORIZONS) else NOTHING
    return [*(NOTHING if value is None else f"{value:.4f}" for value in found), average]


def measured_models() -> list[str]:
    return [name for name in MODELS if any(row["model"] == name for row in rows())]


def forecasting() -> str:
    """The mean over horizons, and differences."""
    lines = [
        (MODELS[name], *(over_seeds(over_horizons(name, dataset), 4, SEEDS) for dataset in DATASETS))
        for name in measured_models()
    ]
    lines += [(title, *(floor(name, dataset)[-1] for dataset in DATASETS)) for name, title in FLOORS.items()]
    return table(("mean over horizons", *DATASETS), lines) + ahead()


def by_horizon() -> str:
    names, lines = measured_models(), []
    for dataset in DATASETS:
        for name in names:
            cells = [over_seeds(list(by_seed(name, dataset, horizon).values()), 4, SEEDS) for horizon in HORIZONS]
            lines.append((dataset, MODELS[name], *cells))
            published = [PUBLISHED.get((name, dataset, horizon), "") for horizon in HORIZONS]
            if any(published):
                lines.append((dataset, f"{MODELS[name]}, published", *published))
        lines += [(dataset, title, *floor(name, dataset)[:-1]) for name, title in FLOORS.items()]
    cells = list(product(names, DATASETS, HORIZONS))
    count = sum(len(by_seed(*cell)) for cell in cells)
    note = f"\n\n{count} of {SEEDS * len(cells)} runs ({SEEDS} seeds of each cell) were measured."
    return table(("data", "model", *map(str, HORIZONS)), lines) + note


def ahead() -> str:
    """The difference of our PatchTSMixer to each baseline, where both have all seeds: the mean over horizons."""
    lines = []
    for other in ("dlinear", "hf:patchtsmixer", "hf:patchtst"):
        cells = []
        for dataset in DATASETS:
            pairs = list(zip(over_horizons("patchtsmixer", dataset), over_horizons(other, dataset)))
            found = interval([ours - theirs for ours, theirs in pairs]) if len(pairs) == SEEDS else None
            cells.append(NOTHING if found is None else f"{found.mean:+.4f} ± {found.half:.4f}")
        if set(cells) != {NOTHING}:
            lines.append((MODELS[other], *cells))
    return "\n\n" + table(("mean MSE over horizons: our PatchTSMixer minus", *DATASETS), lines) if lines else ""


def speed() -> str:
    """Windows per second of both sides in turns, and how many times as many the faster of ours in float32 gives."""
    found = json.loads((BENCHMARKS / "series_cpu.json").read_text(encoding="utf8"))
    names = list(dict.fromkeys(name for row in found["rows"] for name in row["rates"]))
    lines = []
    for row in found["rows"]:
        rates = row["rates"]
        cells = [f"{median(rates[name]):.0f}" if name in rates else NOTHING for name in names]
        ours, theirs = (fastest(rates, (own, f"{own}, {best}")) for own, best in SIDES)
        ratios = [one / other for one, other in zip(ours, theirs)]
        lines.append(
            (
                f"{row['mode']}, batch {row['batch_size']}",
                *cells,
                f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            )
        )
    return table(("windows/s", *names, "times, float32"), lines)


def fastest(rates: dict[str, list[float]], names: tuple[str, ...]) -> list[float]:
    return max((rates[name] for name in names if name in rates), key=median)


BLOCKS = {"forecasting": forecasting, "forecasting-horizons": by_horizon, "bench-series": speed}
