"""Forecasts of the ETT datasets: tables of runs by dataset and horizon, called etth1_96, ..., ettm1_720.

Another model is `--model NAME`, of the same protocol: `allmlp train ett_patchtsmixer/etth1_96 --model gmlp_series`, or
`hf:patchtsmixer` and `hf:patchtst` of transformers. The weights that are best on the validation part are tested.
"""

from __future__ import annotations

from allmlp.data.ett import ETT
from allmlp.models.forecasting import patchtsmixer
from allmlp.models.model import ModelSpec
from allmlp.models.zoo import preset
from allmlp.optim import AdamW
from allmlp.run import Budget, Run
from allmlp.tasks.forecast import Forecast
from allmlp.tasks.masked_patches import MaskedPatches

HORIZONS = (96, 192, 336, 720)


def _ett(model: ModelSpec, seq_len: int, lr: float) -> dict[str, Run]:
    return {
        f"{name.lower()}_{horizon}": _run(model, ETT(name, seq_len, horizon), lr)
        for name in ("ETTh1", "ETTh2", "ETTm1")
        for horizon in HORIZONS
    }


def _run(model: ModelSpec, data: ETT, lr: float) -> Run:
    """Evaluated once in about an epoch; ETTm1 has four times as many windows."""
    quarters = data.name.startswith("ETTm")
    return Run(
        model=model.configure(seq_len=data.seq_len, horizon=data.horizon),
        task=Forecast(),
        data=data,
        batch_size=128,
        budget=Budget(epochs=10 if quarters else 20),
        optim=AdamW(lr=lr, weight_decay=0.01),
        max_grad_norm=1.0,
        precision="float32",
        keep_best=True,
        log_every=50,
        eval_every=260 if quarters else 63,
        save_every=10_000,
    )


def ett_patchtsmixer() -> dict[str, Run]:
    """PatchTSMixer on ETTh1, ETTh2 and ETTm1, looking back 512 steps.

    allmlp train ett_patchtsmixer/etth1_96
    Published: MSE 0.368 on ETTh1 at horizon 96.
    """
    return _ett(preset("patchtsmixer").spec, 512, 1e-3)


def ett_patchtsmixer_96() -> dict[str, Run]:
    """PatchTSMixer on ETTh1, ETTh2 and ETTm1, looking back 96 steps.

    allmlp train ett_patchtsmixer_96/etth1_96
    """
    return _ett(preset("patchtsmixer").spec, 96, 1e-3)


def ett_dlinear() -> dict[str, Run]:
    """DLinear, the linear baseline, on ETTh1, ETTh2 and ETTm1, looking back 512 steps.

    allmlp train ett_dlinear/etth1_96
    Published: MSE 0.375 on ETTh1 at horizon 96, looking back 336 steps.
    """
    return _ett(preset("dlinear").spec, 512, 1e-3)


def ett_pretraining() -> Run:
    """PatchTSMixer learns to restore hidden patches of ETTh1.

    allmlp train ett_pretraining
    """
    run = _run(patchtsmixer(dropout=0.2, head_dropout=0.2), ETT("ETTh1"), 1e-3)
    return run.replace(task=MaskedPatches(), budget=Budget(epochs=40))


def ett_finetuning() -> Run:
    """The model of ett_pretraining learns to forecast ETTh1.

    allmlp train ett_finetuning
    """
    run = _run(patchtsmixer(dropout=0.2), ETT("ETTh1"), 5e-4)
    return run.replace(init_from="runs/ett_pretraining", freeze_fraction=0.2)
