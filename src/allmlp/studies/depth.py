"""How the loss of masked language models falls with compute."""

from __future__ import annotations

from allmlp.recipes.pretraining import wiki_sizes
from allmlp.study.definition import Row, Study

STEPS = (1000, 3000, 9000)
TOKENS = 256 * 128
"""Of a step."""


def depth() -> Study:
    """gMLP, aMLP and Transformer in four widths at 33, 98 and 295 million tokens: masked-LM loss, to fit its decline.

    allmlp study depth --minutes 9 --jobs 3

    gMLP's table 4 and figure 8 at a small scale. `make results` fits L = E + A C^-alpha to the twelve runs of a family,
    with intervals by resampling, so that one seed each is enough; `--seeds 3` runs more. 36 runs.
    """
    return Study(
        "depth",
        rows={
            f"{model}_{steps}": Row(
                f"wiki_sizes/{model}", {"budget.steps": str(steps)}, curve=(model, steps * TOKENS / 1e6)
            )
            for model in wiki_sizes()
            for steps in STEPS
        },
        compared="tokens",
        metric="loss",
        also=("perplexity", "unigram_perplexity"),
        seeds=1,
        axis="million tokens",
    )
