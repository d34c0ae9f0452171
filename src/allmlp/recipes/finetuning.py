"""Fine-tuning of language models on sentences, sentence pairs and questions.

`--set init_from=runs/wiki_gmlp` names the folder of the pretrained model and its tokenizer. Data files have the format
of GLUE and SQuAD. Settings are chosen on a validation file (`data.val`) or, where the data have none, on training
examples that are held out (`val_size`); the test file is evaluated at the end of a run and, without a validation file,
during it, but nothing depends on it. Every evaluation also gives what is reached without a model: the majority class,
or word overlap for questions.
"""

from __future__ import annotations

from allmlp.data.labeled_text import LabeledText
from allmlp.data.squad import Squad
from allmlp.layers import Attention
from allmlp.models.gmlp import gmlp_text
from allmlp.models.zoo import preset
from allmlp.optim import AdamW
from allmlp.recipes.pretraining import TABLE6
from allmlp.run import Budget, Run
from allmlp.schedule import LinearSchedule
from allmlp.spec import override
from allmlp.tasks.classify_text import ClassifyText
from allmlp.tasks.distill_classify_text import DistillClassifyText
from allmlp.tasks.distill_question_answering import DistillQuestionAnswering
from allmlp.tasks.question_answering import QuestionAnswering


def _sentences(data: LabeledText, epochs: float = 5) -> Run:
    """gMLP, table 9: length 128, batch size 32, five epochs, 10 % warm-up; the learning rate is for small models."""
    return Run(
        model=None,
        task=ClassifyText(),
        data=data,
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

    allmlp train sst2 --set init_from=runs/wiki_gmlp
    Validation: the 872 sentences of GLUE's dev file. Test: the 1,821 labeled sentences of the Stanford treebank's test
    split (GLUE's own test file has no labels). Published on the dev file: gMLP of 18 blocks 91.2 %.
    """
    data = LabeledText("data/sst2/train.tsv", "data/sst2/test.tsv", val="data/sst2/dev.tsv", seq_len=64)
    return _sentences(data, 3).replace(batch_size=64)


def sst2_distilled() -> Run:
    """Fine-tune on SST-2 with a teacher: a BERT that the recipe sst2 fine-tuned before.

    allmlp train sst2_distilled --set init_from=runs/wiki_gmlp_distilled/both --set task.teacher=runs/sst2_bert
    allmlp train sst2_distilled ... --set data.unlabeled=reviews.txt     # more sentences, labeled by the teacher
    """
    return sst2().replace(task=DistillClassifyText("runs/sst2_bert"), budget=Budget(epochs=4))


def mnli() -> Run:
    """Fine-tune on MNLI: entailment, matched and mismatched.

    allmlp train mnli --set init_from=runs/wiki_gmlp      # train.tsv and both dev files of GLUE, from data/mnli
    Published: gMLP of 18 blocks 77.7 % (matched).
    """
    return _sentences(LabeledText("data/mnli/train.tsv", "data/mnli/dev_matched.tsv,data/mnli/dev_mismatched.tsv"))


def rte() -> Run:
    """Fine-tune on RTE: entailment, 2,490 pairs.

    allmlp train rte --set init_from=runs/wiki_gmlp --set data.path=rte/train.tsv --set data.test=rte/dev.tsv
    """
    return _sentences(LabeledText("data/rte/train.tsv", "data/rte/dev.tsv"), 10)


def qnli() -> Run:
    """Fine-tune on QNLI: does the sentence answer the question?

    allmlp train qnli --set init_from=runs/wiki_gmlp --set data.path=QNLI/train.tsv --set data.test=QNLI/dev.tsv
    """
    return _sentences(LabeledText("data/qnli/train.tsv", "data/qnli/dev.tsv"))


def mrpc() -> Run:
    """Fine-tune on MRPC: do two sentences mean the same? 3,668 pairs.

    allmlp train mrpc --set init_from=runs/wiki_gmlp --set data.path=MRPC/train.tsv --set data.test=MRPC/test.tsv
    Validation: the dev file. Accuracy; GLUE also reports F1.
    """
    return _sentences(LabeledText("data/mrpc/train.tsv", "data/mrpc/test.tsv", val="data/mrpc/dev.tsv"), 10)


def cola() -> Run:
    """Fine-tune on CoLA: is a sentence grammatical? 8,551 sentences.

    allmlp train cola --set init_from=runs/wiki_gmlp --set data.path=CoLA/train.tsv --set data.test=CoLA/dev.tsv
    Accuracy; GLUE reports Matthews' correlation.
    """
    return _sentences(LabeledText("data/cola/train.tsv", "data/cola/dev.tsv", seq_len=64), 10)


def scratch_gmlp_l18() -> dict[str, Run]:
    """gMLP of 18 blocks on SST-2 and MNLI without pretraining.

    allmlp train scratch_gmlp_l18/sst2
    Published by others: SST-2 80.4, MNLI 65.1 %.
    """
    model = gmlp_text(18, 384, 1536, variant="multiplicative")
    optim = AdamW(lr=5e-4, weight_decay=0.05, eps=1e-6)
    return {
        name: run.replace(model=model, optim=optim, batch_size=64, budget=Budget(epochs=5), compile=True)
        for name, run in {"sst2": sst2(), "mnli": mnli()}.items()
    }


def sick() -> Run:
    """Fine-tune on SICK: entailment, contradiction or neither.

    allmlp train sick --set init_from=runs/wiki_gmlp --set data.path=sick.tsv
    One file with all pairs. Its sentences occur in many pairs, in the official splits too: here training and test pairs
    have no sentence in common (`LabeledText` without a test file).
    """
    return _sentences(LabeledText("data/sick/sick.tsv", label_column="entailment"), 10)


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
    Published F1: gMLP large 89.5, aMLP large 92.2.
    """
    return _questions("data/squad/train-v1.1.json", "data/squad/dev-v1.1.json")


def squad1_distilled() -> Run:
    """SQuAD v1.1 with a teacher that answers the same questions.

    allmlp train squad1_distilled --set init_from=runs/wiki_amlp --set task.teacher=runs/squad1
    The teacher has the same tokenizer, for example a BERT fine-tuned by squad1. Not yet run.
    """
    return squad1().replace(task=DistillQuestionAnswering("runs/squad1"))


def squad2() -> Run:
    """Fine-tune on SQuAD v2.0: some questions have no answer.

    allmlp train squad2 --set init_from=runs/wiki_gmlp --set data.train=train-v2.0.json --set data.test=dev-v2.0.json
    Published F1: gMLP large 78.3, aMLP large 85.4.
    """
    return _questions("data/squad/train-v2.0.json", "data/squad/dev-v2.0.json")


# --- gMLP, table 6 ------------------------------------------------------------------------------------------------


def _table6(run: Run) -> dict[str, Run]:
    """The seven models of `mlm_table6` with dropout 0.1, and no decay of the learning rate over the layers."""
    run = run.replace(optim=run.optim.replace(layer_decay=1.0), max_grad_norm=None, compile=True)
    table = {}
    for name in TABLE6:
        spec = override(preset(name).spec, "block.dropout", 0.1)
        if isinstance(spec.block.token, Attention):
            spec = override(spec, "block.token.dropout", 0.1)
        table[name] = run.replace(model=spec, init_from=f"runs/mlm_table6/{name}")
    return table


def _glue_table6(data: LabeledText) -> dict[str, Run]:
    """Table 9: batch 16 or 32, lr 1e-5, 2e-5 or 3e-5, five epochs."""
    run = _sentences(data)
    return _table6(run.replace(optim=run.optim.replace(lr=2e-5)))


def sst2_table6() -> dict[str, Run]:
    """SST-2 with the models and settings of gMLP's table 6.

    allmlp train sst2_table6/amlp_base
    Not run here. Published (dev file), base: BERT 93.8, gMLP 94.2, aMLP 93.4; large: 94.3, 94.8, 94.8; xlarge 95.6.
    """
    return _glue_table6(LabeledText("data/sst2/train.tsv", "data/sst2/dev.tsv"))


def mnli_table6() -> dict[str, Run]:
    """MNLI, matched and mismatched, with the models and settings of gMLP's table 6.

    allmlp train mnli_table6/amlp_base
    Not run here. Published (matched), base: BERT 85.6, gMLP 83.7, aMLP 85.9; large: 87.0, 86.2, 88.4; xlarge 87.7.
    """
    return _glue_table6(LabeledText("data/mnli/train.tsv", "data/mnli/dev_matched.tsv,data/mnli/dev_mismatched.tsv"))


def squad1_table6() -> dict[str, Run]:
    """SQuAD v1.1 with the models and settings of gMLP's table 6.

    allmlp train squad1_table6/amlp_base
    Not run here. Published F1, base: BERT 90.2, gMLP 86.7, aMLP 90.7; large: 92.0, 89.5, 92.2; xlarge 90.9.
    """
    return _table6(override(squad1(), "data.seq_len", 512))


def squad2_table6() -> dict[str, Run]:
    """SQuAD v2.0 with the models and settings of gMLP's table 6.

    allmlp train squad2_table6/amlp_base
    Not run here. Published F1, base: BERT 78.6, gMLP 70.1, aMLP 80.9; large: 81.0, 78.3, 85.4; xlarge 82.1.
    """
    return _table6(override(squad2(), "data.seq_len", 512))
