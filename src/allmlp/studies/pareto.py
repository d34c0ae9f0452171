"""What an all-MLP model buys: accuracy by seconds of training, size, multiply-adds, memory and inference rate."""

from __future__ import annotations

from allmlp.study.definition import Row, Study, Tuning, grid

SECONDS = (30, 100, 300)
RATES = ("1e-3", "2e-3", "4e-3")
FAMILIES = {
    "gmlp": RATES,
    "amlp": RATES,
    "resmlp": RATES,
    "mixer": RATES,
    "vit": RATES,
    "resnet18": ("0.1", "0.2", "0.4"),
}
"""With the learning rates to choose from."""


def pareto() -> Study:
    """All families on CIFAR-10 after 30, 100 and 300 seconds of training alone, with a learning rate each.

    allmlp study pareto --minutes 9

    Rates are chosen on 5,000 held-out images after 30 seconds. 18 tuning runs of about 1.5 minutes and 54 final runs of
    1.5 to 6 minutes on one H200: 220 minutes. The inference rate of every model is measured after its first final run,
    at batch 512. Seconds to 94 % are those of a whole training, interpolated between the three durations.
    """
    return _pareto("pareto", "cifar10", 3, 94.0)


def pareto_cifar100() -> Study:
    """All families on CIFAR-100 after 30, 100 and 300 seconds of training alone, with a learning rate each.

    allmlp study pareto_cifar100 --minutes 9
    As `pareto`, with two seeds and seconds to 73 %: 54 runs, 160 minutes.
    """
    return _pareto("pareto_cifar100", "cifar100", 2, 73.0)


def _pareto(name: str, data: str, seeds: int, target: float) -> Study:
    rows = {}
    for family, rates in FAMILIES.items():
        first = f"{family}_{SECONDS[0]}"
        for seconds in SECONDS:
            budget = {"budget.epochs": "none", "budget.minutes": str(seconds / 60)}
            candidates, like = (grid({"optim.lr": rates}), "") if seconds == SECONDS[0] else ({}, first)
            rows[f"{family}_{seconds}"] = Row(
                f"{data}_{family}", budget, candidates, like=like, curve=(family, seconds)
            )
    return Study(
        name,
        rows,
        compared="seconds",
        metric="accuracy",
        seeds=seeds,
        tuning=Tuning(val_size=5000),
        axis="seconds of training",
        target=target,
        inference_batch=512,
    )
