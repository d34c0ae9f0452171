"""Callbacks of a run: TensorBoard, Weights & Biases, MLflow, or your own code."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from allmlp.errors import MissingExtra, UserError, lookup, one_line, require
from allmlp.files import write_text_atomically

log = logging.getLogger("allmlp.callbacks")


class Callback:
    """Base class of callbacks. `allmlp.train(..., callbacks=[MyCallback()])` calls its methods in the main process.

    A callback that raises is disabled with a warning; the run continues.
    """

    def on_start(self, out: Path, config: Mapping[str, Any], step: int) -> None:
        """Called before the first step; `config` is the run as in run.json, `step` is above 0 for a resumed run."""

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Called every `log_every` steps with the means since the last call."""

    def on_eval(self, step: int, values: Mapping[str, float]) -> None:
        """Called after an evaluation."""

    def on_save(self, step: int, folder: Path) -> None:
        """Called after a checkpoint was written to `folder`."""

    def on_end(self, result: Mapping[str, Any]) -> None:
        """Called at the end with the `result` of run.json, which is empty if the run was stopped."""


class Tracker(Callback):
    """Sends all values of a run, those of training and of evaluations under different names."""

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        self.send(step, {f"train/{name}": value for name, value in values.items()})

    def on_eval(self, step: int, values: Mapping[str, float]) -> None:
        self.send(step, {f"eval/{name}": value for name, value in values.items()})

    def send(self, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError


def known_id(file: Path) -> str | None:
    """The id, in a file of the run's folder, under which a resumed run continues."""
    return file.read_text(encoding="utf8").strip() if file.is_file() else None


class TensorBoard(Tracker):
    """Event files in the folder `tensorboard` of the run."""

    def on_start(self, out: Path, config: Mapping[str, Any], step: int) -> None:
        require("tensorboard", "train")
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(out / "tensorboard")

    def send(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def on_end(self, result: Mapping[str, Any]) -> None:
        self.writer.close()


class WandB(Tracker):
    """Weights & Biases, set up by its own variables: WANDB_MODE=offline, WANDB_PROJECT, WANDB_ENTITY."""

    def on_start(self, out: Path, config: Mapping[str, Any], step: int) -> None:
        wandb, file = require("wandb", "trackers"), out / "wandb.txt"
        run_id = known_id(file) if step else None
        self.run: Any = wandb.init(name=out.name, dir=str(out), config=dict(config), id=run_id, resume="allow")
        write_text_atomically(file, self.run.id)

    def send(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def on_end(self, result: Mapping[str, Any]) -> None:
        self.run.summary.update(dict(result))
        self.run.finish()


class MLflow(Tracker):
    """MLflow, set up by its own variables: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

    def on_start(self, out: Path, config: Mapping[str, Any], step: int) -> None:
        self.mlflow: Any = require("mlflow", "trackers")
        file = out / "mlflow.txt"
        run_id = known_id(file) if step else None
        # Nested: a run that is already open in this process, such as one of a notebook, becomes its parent.
        self.run: str = self.mlflow.start_run(run_id, run_name=None if run_id else out.name, nested=True).info.run_id
        write_text_atomically(file, self.run)
        if not run_id:
            self.mlflow.log_dict(dict(config), "run.json")

    def send(self, step: int, values: dict[str, float]) -> None:
        self.mlflow.log_metrics(values, step=step, run_id=self.run)

    def on_end(self, result: Mapping[str, Any]) -> None:
        self.mlflow.end_run("FINISHED" if result else "KILLED")


TRACKERS: dict[str, type[Callback]] = {"wandb": WandB, "mlflow": MLflow}
"""Trackers besides TensorBoard, which is always used if installed."""


class Callbacks:
    """Calls every callback; one that raises is removed."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.active = list(callbacks)

    def call(self, event: str, *arguments: Any) -> None:
        for callback in list(self.active):
            try:
                getattr(callback, event)(*arguments)
            except Exception as reason:  # third-party code, or an unreachable server
                self.active.remove(callback)
                if event == "on_start" and isinstance(reason, UserError):
                    raise
                name = type(callback).__name__
                log.warning(
                    "%s.%s failed and is disabled: %s: %s", name, event, type(reason).__name__, one_line(reason)
                )


def trackers(names: str) -> list[Callback]:
    """The trackers named by `--track a,b`."""
    return [lookup(name.strip(), TRACKERS, "tracker")() for name in names.split(",") if name.strip()]


def tensorboard() -> list[Callback]:
    """TensorBoard, if it is installed."""
    try:
        require("tensorboard", "train")
    except MissingExtra:
        return []
    return [TensorBoard()]
