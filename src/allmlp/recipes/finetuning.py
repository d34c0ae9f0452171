"""Fine-tuning of language models on sentences, sentence pairs and questions.

`--set init_from=runs/wiki_gmlp` names the folder of the pretrained model and its tokenizer. Data files have the format
of GLUE and SQuAD.
"""

from __future__ import annotations

from allmlp.data.labeled_text import LabeledText
from allmlp.data.squad import Squad
from allmlp.optim import AdamW
from allmlp.run import Budget, Run
from allmlp.schedule import LinearSchedule
from allmlp.tasks.classify_text import ClassifyText
from allmlp.tasks.distill_classify_text import DistillClassifyText
from allmlp.tasks.question_answering import QuestionAnswering


def _sentences(name: str, test: str, epochs: float = 5, label: str = "", seq_len: int = 128) -> Run:
    """gMLP, table 9: length 128, batch size 32, five epochs, 10 % warm-up; the learning rate is for small models."""
    return Run(
        model=None,
        task=ClassifyText(),
        data=LabeledText(f"data/{name}/train.tsv", test, seq_len=seq_len, label_column=label),
        batch_size=32,
        budget=Budget(epochs=epochs),
        optim=AdamW(lr=1e-4, weight_decay=0.01, eps=1e-6, layer_decay=0.9),
        schedule=LinearSchedule(warmup_fraction=0.1),
        max_grad_norm=1.0,
        log_every=100,
        eval_every=1000,
        save_every=2000,
    )


def sst2() -> Run:
    """Fine-tune on SST-2: sentiment of film reviews.

    allmlp train sst2 --set init_from=runs/wiki_gmlp --set data.path=sst2/train.tsv --set data.test=sst2/dev.tsv
    From wiki_gmlp of four minutes: 87.3 % (one seed). Published: gMLP of 18 blocks 91.2 %; a gMLP
    without pretraining 80.4 %.
    """
    return _sentences("sst2", "data/sst2/dev.tsv", 3, seq_len=64).replace(batch_size=64)


def sst2_distilled() -> Run:
    """Fine-tune on SST-2 with a teacher: a BERT that the recipe sst2 fine-tuned before.

    allmlp train sst2_distilled --set init_from=runs/wiki_gmlp_distilled/both --set task.teacher=runs/sst2_bert
    allmlp train sst2_distilled ... --set data.unlabeled=reviews.txt     # more sentences, labeled by the teacher
    From 7,000 steps of wiki_gmlp_distilled/both (one seed): 89.7 %; with 300,000 unlabeled sentences of film reviews
    (batch_size=256, optim.lr=2e-4, budget.epochs=5) 91.1 %. Published for a gMLP with BERT's help: 88.6 %.
    """
    return sst2().replace(task=DistillClassifyText("runs/sst2_bert"), budget=Budget(epochs=4))


def mnli() -> Run:
    """Fine-tune on MNLI: entailment, matched and mismatched.

    allmlp train mnli --set init_from=runs/wiki_gmlp --set data.path=MNLI/train.tsv
    Not yet run. Published: gMLP of 18 blocks 77.7 % (matched).
    """
    return _sentences("mnli", "data/mnli/dev_matched.tsv,data/mnli/dev_mismatched.tsv")


def rte() -> Run:
    """Fine-tune on RTE: entailment, 2,490 pairs.

    allmlp train rte --set init_from=runs/wiki_gmlp --set data.path=rte/train.tsv --set data.test=rte/dev.tsv
    From wiki_gmlp of four minutes: 54.2 % (one seed; two classes).
    """
    return _sentences("rte", "data/rte/dev.tsv", 10)


def sick() -> Run:
    """Fine-tune on SICK: entailment, contradiction or neither.

    allmlp train sick --set init_from=runs/wiki_gmlp --set data.path=sick-train.tsv --set data.test=sick-test.tsv
    From wiki_gmlp of four minutes: 69.3 % (one seed; three classes).
    """
    return _sentences("sick", "data/sick/test.tsv", 10, label="entailment")


def _questions(train: str, test: str) -> Run:
    return Run(
        model=None,
        task=QuestionAnswering(),
        data=Squad(train, test),
        batch_size=32,
        budget=Budget(steps=8000),
        optim=AdamW(lr=5e-5, weight_decay=0.01, eps=1e-6),
        schedule=LinearSchedule(warmup_fraction=1 / 8),
        max_grad_norm=1.0,
        log_every=100,
        eval_every=2000,
        save_every=2000,
    )


def squad1() -> Run:
    """Fine-tune on SQuAD v1.1: answers are spans of the context.

    allmlp train squad1 --set init_from=runs/wiki_gmlp --set data.train=train-v1.1.json --set data.test=dev-v1.1.json
    From wiki_gmlp of four minutes, 8,172 training questions, 1,200 steps at lr 2e-4 and length 256: exact match 7.2, F1
    12.6 on 1,190 questions of XQuAD (one seed). Published F1: gMLP large 89.5, aMLP large 92.2.
    """
    return _questions("data/squad/train-v1.1.json", "data/squad/dev-v1.1.json")


def squad2() -> Run:
    """Fine-tune on SQuAD v2.0: some questions have no answer.

    allmlp train squad2 --set init_from=runs/wiki_gmlp --set data.train=train-v2.0.json --set data.test=dev-v2.0.json
    From wiki_gmlp of four minutes, 4,715 questions of half the dev set, 1,000 steps at lr 2e-4: F1 41.4 on 1,363 of the
    other half (one seed; 47.3 without any answer). Published F1: gMLP large 78.3, aMLP large 85.4.
    """
    return _questions("data/squad/train-v2.0.json", "data/squad/dev-v2.0.json")
