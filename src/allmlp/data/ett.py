"""ETT: two years of electricity transformer temperatures, the usual benchmark of forecasting (Zhou et al., 2021)."""

from __future__ import annotations

from typing import Literal

import numpy as np

from allmlp.data.dataset import Data
from allmlp.data.frequency import HOUR, Frequency, read_times
from allmlp.data.paths import join_paths, search_paths
from allmlp.data.series import SeriesDataset, SplitEnds, build_dataset
from allmlp.data.tables import read_table
from allmlp.errors import UserError
from allmlp.spec import Count

MONTH = 30 * 24
"""Hours of a month in the benchmark, which uses 12 months of training, 4 of validation and 4 of test."""


class ETT(Data):
    """Seven columns of a transformer, hourly (ETTh1, ETTh2) or every 15 minutes (ETTm1, ETTm2).

    Reads NAME.csv, which may be compressed, in `path`, or in $ALLMLP_DATA/timeseries or $ALLMLP_DATA (./data).
    """

    name: Literal["ETTh1", "ETTh2", "ETTm1", "ETTm2"] = "ETTh1"
    seq_len: Count = 512
    horizon: Count = 96
    path: str = ""

    def load(self) -> SeriesDataset:
        folders = search_paths(self.path, "timeseries")
        names = (f"{self.name}.csv", f"{self.name}.csv.xz", f"{self.name}.csv.gz")
        file = next((folder / name for folder in folders for name in names if (folder / name).is_file()), None)
        if file is None:
            raise UserError(
                f"there is no {self.name}.csv in {join_paths(folders)}: download it from "
                "https://github.com/zhouhaoyi/ETDataset and set data.path"
            )
        table = read_table(file)
        columns = table.columns[1:]
        try:
            values = np.array([[float(row[name]) for name in columns] for row in table])
        except ValueError as reason:
            raise UserError(f"{file}: {reason}") from None
        hourly = 1 if self.name.startswith("ETTh") else 4
        parts = SplitEnds(*(months * MONTH * hourly for months in (12, 16, 20)))
        if len(values) < parts.test:
            raise UserError(f"{file} has {len(values):,} rows, not the {parts.test:,} of the benchmark: get it again")
        values, frequency = values[: parts.test], Frequency(HOUR // hourly)
        return build_dataset(
            values,
            [len(values)],
            [parts],
            columns,
            frequency,
            self.seq_len,
            self.horizon,
            ids=("",),
            time_column=table.columns[0],
            starts=(int(read_times([next(iter(table))[table.columns[0]]], str(file))[0][0]),),
        )
