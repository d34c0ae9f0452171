"""Forecasting service of a time-series model."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from fastapi import APIRouter

from allmlp.data.clocks import local_days
from allmlp.data.frequency import DAY, read_times
from allmlp.errors import UserError
from allmlp.prediction.forecast import Forecaster
from allmlp.serve.batching import Batcher, identity
from allmlp.serve.engine import BatchFunction
from allmlp.serve.schema import ColumnForecast, Endpoint, ForecastRequest, ForecastResponse, error_responses, timing


class Past(NamedTuple):
    """Input of a forecast."""

    id: str
    rows: np.ndarray
    """steps x columns, NaN where missing; as many steps as the model reads, or fewer."""
    following: list[str]
    """Times of the forecast, if the last time before it is known."""


class SeriesService:
    endpoint: Endpoint = "forecast"
    class_names: tuple[str, ...] = ()

    def __init__(self, predictor: Forecaster) -> None:
        self.predictor, self.model = predictor, predictor.model

    def warm_up(self) -> tuple[BatchFunction, Any]:
        return self.forecast, Past("", np.zeros((1, len(self.predictor.preprocessing.columns))), [])

    def forecast(self, items: list[Past]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """One batch."""
        return self.predictor.predict([one.rows for one in items], [one.id for one in items])

    def decode(self, request: ForecastRequest) -> Past:
        """Check the values of a request before they join a batch."""
        columns = self.predictor.preprocessing.columns
        if sorted(request.columns) != sorted(columns):
            raise UserError(f"columns must be {', '.join(columns)}")
        values = [request.columns[name] for name in columns]
        if len(set(map(len, values))) > 1:
            raise UserError("all columns must have the same number of values; null where one is missing")
        rows = np.array(values, dtype=float).T[-self.predictor.seq_len :]
        following = self.following(request.last_time) if request.last_time else []
        return Past(request.id, rows, following)

    def following(self, text: str) -> list[str]:
        """Times of the forecast, in the notation of the last time before it."""
        trained = self.predictor.preprocessing.frequency
        try:
            (time,), counted, notation, midnight = read_times([text], "last_time")
        except (OverflowError, ValueError):
            time, counted, notation, midnight = np.iinfo(np.int64).min, False, "local", False
        if time == np.iinfo(np.int64).min or counted != (trained.unit == "row"):
            expected = "the number of a row" if trained.unit == "row" else "a time in ISO 8601"
            raise UserError(f"last_time must be {expected}")
        if midnight and (trained.unit == "month" or trained.step % DAY == 0):
            time, notation = local_days(np.array(time)), "local"
        frequency = trained.replace(notation=notation)
        return [frequency.text(int(one)) for one in frequency.following(int(time), self.predictor.horizon)]

    def routes(self, batcher: Batcher) -> APIRouter:
        router = APIRouter(responses=error_responses(400, 403, 408, 413, 422, 503, 504))
        names, levels = self.predictor.preprocessing.columns, self.predictor.levels

        @router.post("/forecast", response_model=ForecastResponse)
        async def forecast(request: ForecastRequest) -> Any:
            """Forecast the steps after the given ones."""
            past = self.decode(request)
            result = await batcher.submit(identity, past, self.forecast)
            values, quantiles = result.value
            if not np.isfinite(values).all():
                raise UserError("the forecast is not finite: the values are too far from the training values")
            columns = {
                name: ColumnForecast(
                    forecast=values[:, column].tolist(),
                    quantiles={}
                    if quantiles is None
                    else {f"{level:g}": quantiles[:, column, place].tolist() for place, level in enumerate(levels)},
                )
                for column, name in enumerate(names)
            }
            return ForecastResponse(times=past.following, columns=columns, timing=timing(result))

        return router
