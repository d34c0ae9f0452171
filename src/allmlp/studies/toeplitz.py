"""Toeplitz or dense spatial weights, by the amount of text."""

from __future__ import annotations

from allmlp.study.definition import Overrides, Row, Study

STEPS = 4000
"""Of 256 sequences of 128 tokens: 0.13 B tokens."""
FRACTIONS = {"6": "0.06", "25": "0.25", "100": "1.0"}


def toeplitz() -> Study:
    """gMLP with Toeplitz weights, dense ones, and dense ones started from Toeplitz, on 6, 25 and 100 % of the text.

    allmlp study toeplitz --minutes 9 --jobs 3

    0.13 B tokens each, so that the smallest part of a corpus of 66 M tokens is read 33 times. `grown` is Toeplitz for
    the first half of the run (the rows `start`) and dense for the second. 36 runs. `allmlp analyze
    studies/toeplitz/models/start_100-0` draws the filters with their directions.
    """
    whole: Overrides = {"budget.steps": str(STEPS)}
    half: Overrides = {"budget.steps": str(STEPS // 2)}
    rows: dict[str, Row] = {}
    for percent, fraction in FRACTIONS.items():
        part: Overrides = {"train_fraction": fraction}
        at = float(percent)
        rows[f"toeplitz_{percent}"] = Row("wiki_table3/split", {**part, **whole}, curve=("Toeplitz", at))
        rows[f"dense_{percent}"] = Row("wiki_table3/dense", {**part, **whole}, curve=("dense", at))
        rows[f"start_{percent}"] = Row("wiki_table3/split", {**part, **half})
        grown: Overrides = {**part, **half, "init_from": f"study:start_{percent}"}
        rows[f"grown_{percent}"] = Row("wiki_table3/dense", grown, curve=("dense, started from Toeplitz", at))
    return Study(
        "toeplitz",
        rows,
        compared="tokens",
        metric="loss",
        also=("perplexity", "unigram_perplexity"),
        axis="training text, %",
    )
