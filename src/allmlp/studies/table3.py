"""gMLP's table 3 at a small scale."""

from __future__ import annotations

from allmlp.recipes.pretraining import wiki_table3
from allmlp.study.definition import Row, Study, Tuning, grid

STEPS = 9200
"""Of 256 sequences of 128 tokens: 0.30 B tokens."""
RATES = ("3e-3", "6e-3", "1.2e-2")


def table3() -> Study:
    """The ten rows of gMLP's table 3, 256 wide, at 0.3 B tokens of text with a learning rate each: masked-LM loss.

    allmlp study table3 --minutes 9 --jobs 3 --set data.path='text/wiki-train-*' --set data.test='text/wiki-valid*'

    Rates are chosen by the loss on 2,000 held-out training sequences after 1,500 steps. Differences are in nats, over
    equal seeds, which share the order of the data and the masks. 60 runs.
    """
    return Study(
        "table3",
        rows={name: Row(f"wiki_table3/{name}", candidates=grid({"optim.lr": RATES})) for name in wiki_table3()},
        compared="tokens",
        metric="loss",
        also=("perplexity", "unigram_perplexity"),
        overrides={"budget.steps": str(STEPS)},
        tuning=Tuning(val_size=2000, overrides={"budget.steps": "1500"}),
        reference="split",
    )
