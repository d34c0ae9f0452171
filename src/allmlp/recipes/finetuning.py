"""A pretrained language model put to use: sentences, pairs of sentences, questions.

Each starts from a folder (`--set init_from=runs/wiki_gmlp`), whose model and tokenizer it takes. Files are GLUE's and
SQuAD's own, or others in their layout.
"""

from __future__ import annotations

from allmlp.data.sentences import Sentences
from allmlp.data.squad import Squad
from allmlp.optim import AdamW
from allmlp.run import Budget, Cadence, Run
from allmlp.schedule import Linear
from allmlp.tasks.distill_sentences import DistillSentences
from allmlp.tasks.glue import ClassifyText
from allmlp.tasks.squad import AnswerSpan


def _sentences(name: str, test: str, epochs: float = 5, label: str = "", length: int = 128) -> Run:
    """gMLP, table 9: length 128, batch 32, five epochs, a tenth of them rising; the rate is for small models."""
    return Run(
        model=None,
        task=ClassifyText(),
        data=Sentences(f"data/{name}/train.tsv", test, length=length, label=label),
        batch=32,
        budget=Budget(epochs=epochs),
        optim=AdamW(lr=1e-4, decay=0.01, eps=1e-6, layer_decay=0.9),
        schedule=Linear(warmup=0.1),
        clip=1.0,
        cadence=Cadence(log=100, evaluate=1000, save=2000),
    )


def sst2() -> Run:
    """Film reviews, good or bad (SST-2), by a pretrained model.

    allmlp train sst2 --set init_from=runs/wiki_gmlp --set data.path=sst2/train.tsv --set data.test=sst2/dev.tsv
    From wiki_gmlp of four minutes: 87.3 % (one seed). Published: gMLP of 18 blocks 91.2 %; one from scratch on a single
    GPU 80.4 %.
    """
    return _sentences("sst2", "data/sst2/dev.tsv", 3, length=64).replace(batch=64)


def sst2_taught() -> Run:
    """The same with a teacher: a BERT that was taught SST-2 before, by the recipe sst2.

    allmlp train sst2_taught --set init_from=runs/wiki_gmlp_taught/both --set task.teacher=runs/sst2_bert
    allmlp train sst2_taught ... --set data.unlabelled=reviews.txt          # more sentences, which the teacher labels
    From 7,000 steps of wiki_gmlp_taught/both (one seed): 89.7 %; with 300,000 unlabelled sentences of film reviews
    (batch=256, optim.lr=2e-4, budget.epochs=5) 91.1 %. Published for a gMLP of one GPU with BERT's help: 88.6 %.
    """
    return sst2().replace(task=DistillSentences("runs/sst2_bert"), budget=Budget(epochs=4))


def mnli() -> Run:
    """Whether one sentence follows from another (MNLI, matched and mismatched), by a pretrained model.

    allmlp train mnli --set init_from=runs/wiki_gmlp --set data.path=MNLI/train.tsv
    Not yet run. Published: gMLP of 18 blocks 77.7 % (matched).
    """
    return _sentences("mnli", "data/mnli/dev_matched.tsv,data/mnli/dev_mismatched.tsv")


def rte() -> Run:
    """Whether one sentence follows from another (RTE, 2,490 pairs), by a pretrained model.

    allmlp train rte --set init_from=runs/wiki_gmlp --set data.path=rte/train.tsv --set data.test=rte/dev.tsv
    From wiki_gmlp of four minutes: 54.2 % (one seed; two classes). Published for gMLP: none.
    """
    return _sentences("rte", "data/rte/dev.tsv", 10)


def sick() -> Run:
    """Whether one sentence follows from, contradicts or has nothing to do with another (SICK).

    allmlp train sick --set init_from=runs/wiki_gmlp --set data.path=sick-train.tsv --set data.test=sick-test.tsv
    From wiki_gmlp of four minutes: 69.3 % (one seed; three classes). Published for gMLP: none.
    """
    return _sentences("sick", "data/sick/test.tsv", 10, label="entailment")


def _questions(train: str, test: str) -> Run:
    return Run(
        model=None,
        task=AnswerSpan(),
        data=Squad(train, test),
        batch=32,
        budget=Budget(steps=8000),
        optim=AdamW(lr=5e-5, decay=0.01, eps=1e-6),
        schedule=Linear(warmup=1 / 8),
        clip=1.0,
        cadence=Cadence(log=100, evaluate=2000, save=2000),
    )


def squad1() -> Run:
    """Answers that stand in a text (SQuAD v1.1), by a pretrained model.

    allmlp train squad1 --set init_from=runs/wiki_gmlp --set data.train=train-v1.1.json --set data.test=dev-v1.1.json
    Not yet run. Published F1: gMLP large 89.5, aMLP large 92.2.
    """
    return _questions("data/squad/train-v1.1.json", "data/squad/dev-v1.1.json")


def squad2() -> Run:
    """Answers that stand in a text, or do not (SQuAD v2.0), by a pretrained model.

    allmlp train squad2 --set init_from=runs/wiki_gmlp --set data.train=train-v2.0.json --set data.test=dev-v2.0.json
    Not yet run. Published F1: gMLP large 78.3, aMLP large 85.4.
    """
    return _questions("data/squad/train-v2.0.json", "data/squad/dev-v2.0.json")
