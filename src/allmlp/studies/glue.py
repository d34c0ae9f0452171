"""gMLP, aMLP and BERT at equal tokens, then fine-tuned on sentences and sentence pairs."""

from __future__ import annotations

from allmlp.study.definition import Overrides, Row, Study, Tuning, grid

FAMILIES = ("gmlp", "amlp", "bert")
PRETRAINING: Overrides = {"budget.minutes": "none", "budget.steps": "6000"}
"""Of 256 sequences of 128 tokens: 0.20 B tokens."""
FAST: Overrides = {"batch_size": "64", "budget.epochs": "3", "compile": "true"}
TASKS: dict[str, Overrides] = {
    "sst2": {"compile": "true"},
    "mnli": FAST,
    "rte": {},
    "sick": {},
    "qnli": {},
    "mrpc": {},
    "cola": {},
}
"""Changes to the recipes; the first two are tuned, the others have the rate of mnli."""
RATES = grid({"optim.lr": ("5e-5", "1e-4", "2e-4")})


def glue() -> Study:
    """gMLP, aMLP and BERT of 44 M parameters: 0.2 B tokens of text each, then SST-2, MNLI, RTE, SICK, QNLI, MRPC, CoLA.

    allmlp study glue --minutes 9 --jobs 4
    allmlp study glue --minutes 9 --jobs 4 --rows 'gmlp*'      # one family: only its model is needed

    The question of gMLP's section 4: better than BERT on SST-2, worse on MNLI, and does tiny attention close the gap?
    One pretraining each and three fine-tunings; the rate is chosen on 3,000 held-out pairs of SST-2 and of MNLI, after
    one epoch. 84 runs. Published, base size: SST-2 93.8 (BERT), 94.2 (gMLP), 93.4 (aMLP); MNLI-m 85.6, 83.7, 85.9.
    """
    rows = {family: Row(f"wiki_{family}", PRETRAINING, metric="perplexity", seeds=1) for family in FAMILIES}
    for family in FAMILIES:
        for task, changes in TASKS.items():
            start: Overrides = {**changes, "init_from": f"study:{family}@0"}
            tuned = task in ("sst2", "mnli")
            like = "" if tuned else f"{family}_mnli"
            rows[f"{family}_{task}"] = Row(task, start, RATES if tuned else {}, like=like)
    return Study(
        "glue",
        rows,
        compared="tokens",
        metric="accuracy",
        also=("dev_mismatched_accuracy",),
        tuning=Tuning(val_size=3000, overrides={"budget.epochs": "1"}),
    )


def glue_bert() -> Study:
    """A gMLP of 18 blocks on SST-2 and MNLI: from scratch, and pretrained with a BERT's help, without and with split.

    allmlp study glue_bert --minutes 9 --jobs 3

    The rows of one lecture on gMLP: plain 80.4 and 65.1, "+ BERT" 88.1 and 74.6, "split + BERT" 88.6 and 75.2 %; what
    the help was is not said there. Here a small BERT, whose Hugging Face folder is ./minilm, gives token embeddings to
    start from and features as targets, over 0.2 B tokens. 20 runs.
    """
    rows = {
        "bert": Row("wiki_gmlp_distilled/both_unsplit", PRETRAINING, metric="perplexity", seeds=1),
        "split_bert": Row("wiki_gmlp_distilled/both", PRETRAINING, metric="perplexity", seeds=1),
    }
    published = {"plain": (80.4, 65.1), "bert": (88.1, 74.6), "split_bert": (88.6, 75.2)}
    for place, task in enumerate(("sst2", "mnli")):
        for row, anchors in published.items():
            recipe = f"scratch_gmlp_l18/{task}" if row == "plain" else task
            start: Overrides = {} if row == "plain" else {**FAST, "init_from": f"study:{row}@0"}
            rows[f"{row}_{task}"] = Row(recipe, start, anchor=anchors[place], source="lecture on gMLP")
    return Study("glue_bert", rows, compared="tokens", metric="accuracy", also=("dev_mismatched_accuracy",))
