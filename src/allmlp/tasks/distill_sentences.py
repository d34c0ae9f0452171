"""Classification of sentences with a teacher that was taught the same classes."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.inputs import TextInputs, read_inputs
from allmlp.data.sentences import UNLABELLED, LabelledSentences
from allmlp.data.source import Splits
from allmlp.errors import UserError
from allmlp.models.cost import measure
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import NonNegative, Rate
from allmlp.tasks.distill import imitation
from allmlp.tasks.distill_text import same_words
from allmlp.tasks.glue import ClassifyText, ClassifyTextModule, classify
from allmlp.tasks.task import Losses, Task, TaskModule
from allmlp.weights import folder


class DistillSentences(Task):
    """The loss of `labels`, and with weight `share` the teacher's.

        L = (1 - a) L_labels(z, t) + a L_teacher(z, y),    z the student's scores, y the teacher's
        hard:  L_teacher = - log softmax(z)_k,  k = argmax y
        soft:  L_teacher = T^2 KL(softmax(y / T) || softmax(z / T))

    Of sentences without a label (`data.unlabelled`) only the teacher's is learnt. Source: Tang et al., Distilling
    Task-Specific Knowledge from BERT into Simple Neural Networks, 2019. `teacher` is the folder of a model that
    classifies the same sentences, with the same tokenizer.
    """

    reads: ClassVar[type[Splits]] = LabelledSentences
    teacher: str
    labels: ClassifyText = ClassifyText()
    form: Literal["hard", "soft"] = "soft"
    share: Rate = 0.8
    temperature: NonNegative = 2.0

    def check(self) -> None:
        if not self.temperature:
            raise UserError("DistillSentences.temperature must be above zero")

    def fit(self, model: ModelSpec, dataset: LabelledSentences) -> ModelSpec:
        return self.labels.fit(model, dataset)

    def build(self, model: Model, dataset: LabelledSentences) -> TaskModule:
        return DistillSentencesModule(self, model, dataset, open_teacher(self.teacher, dataset, model.device))

    def judge(self, model: Model, dataset: LabelledSentences) -> TaskModule:
        return self.labels.judge(model, dataset)


def open_teacher(name: str, dataset: LabelledSentences, device: torch.device) -> Model:
    """A frozen classifier of the data's own classes."""
    place = Path(name).expanduser()
    inputs = read_inputs(place)
    if not isinstance(inputs, TextInputs) or inputs.gives != "classes":
        raise UserError(f"the teacher {name} does not classify text: train one first, allmlp train sst2 for instance")
    if inputs.classes != dataset.classes:
        raise UserError(
            f"the teacher {name} knows the classes {', '.join(inputs.classes)}, the data have "
            f"{', '.join(dataset.classes)}"
        )
    same_words(place, dataset.tokenizer)
    if inputs.length < dataset.length:
        raise UserError(
            f"the teacher {name} reads {inputs.length} tokens, the rows have {dataset.length}; "
            f"set data.length={inputs.length} or less"
        )
    return folder.load(place, device).float().requires_grad_(False)


class DistillSentencesModule(ClassifyTextModule):
    def __init__(self, spec: DistillSentences, model: Model, dataset: LabelledSentences, teacher: Model) -> None:
        super().__init__(spec.labels, model, dataset)
        # A tuple hides the teacher from the module: neither optimiser nor checkpoint sees it.
        self.distill, self.teacher = spec, (teacher,)

    @property
    def flops(self) -> int:
        return super().flops + 2 * measure(self.teacher[0].spec).macs

    def learn(self, *inputs: Tensor) -> Losses:
        ids, segments, labels = inputs
        logits = self.scores(self.model, ids, segments)
        with torch.no_grad():
            answers = classify(self.teacher[0], ids, segments, ids != self.pad)
        known = (labels != UNLABELLED).sum().clamp(min=1)
        smoothing = self.spec.smoothing
        labelled = F.cross_entropy(logits, labels, ignore_index=UNLABELLED, reduction="sum", label_smoothing=smoothing)
        taught = imitation(logits, answers, self.distill.form, self.distill.temperature)
        shown = {
            "accuracy": (logits.argmax(1) == labels).sum() / known,
            "agreement": (logits.argmax(1) == answers.argmax(1)).float().mean(),
        }
        return Losses(torch.lerp(labelled / known, taught, self.distill.share), shown)
