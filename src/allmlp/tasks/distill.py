"""Distillation: the student, with its single head, learns from the labels and from a teacher's answers."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.source import Dataset
from allmlp.errors import UserError
from allmlp.models.cost import measure
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import NonNegative, Rate
from allmlp.tasks.classify import Classify, ClassifyModule, cross_entropy
from allmlp.tasks.task import Losses, Pixels, Task, TaskModule
from allmlp.weights.pretrained import pretrained


class Distill(Task):
    """The loss of `labels`, and with weight `share` the teacher's, which sees the same augmented, mixed pictures.

        L = (1 - a) L_labels(z, t) + a L_teacher(z, y),    z the student's scores, y the teacher's
        hard:  L_teacher = - log softmax(z)_k,  k = argmax y
        soft:  L_teacher = T^2 KL(softmax(y / T) || softmax(z / T))

    Source: DeiT, section 4, on one head instead of two; ResMLP's distilled models. `teacher` is a model's folder, or
    timm:NAME or hf:NAME with its published weights.
    """

    teacher: str
    labels: Classify = Classify()
    form: Literal["hard", "soft"] = "hard"
    share: Rate = 0.5
    temperature: NonNegative = 1.0

    def check(self) -> None:
        if not self.temperature:
            raise UserError("Distill.temperature must be above zero")

    def fit(self, model: ModelSpec, dataset: Dataset) -> ModelSpec:
        return self.labels.fit(model, dataset)

    def build(self, model: Model, dataset: Dataset) -> TaskModule:
        return DistillModule(self, model, dataset, Teacher(self.teacher, dataset, model.device))

    def judge(self, model: Model, dataset: Dataset) -> TaskModule:
        return self.labels.judge(model, dataset)


class Teacher:
    """A frozen model. It is no module, so that neither optimiser nor checkpoint ever sees it."""

    def __init__(self, name: str, dataset: Dataset, device: torch.device) -> None:
        self.model, inputs = pretrained(name, device)
        self.model.requires_grad_(False)
        self.pixels = Pixels(inputs.mean, inputs.std, self.model.spec.image_size).to(device)
        (example,) = self.model.example()
        if example.shape[1] != len(dataset.mean):
            raise UserError(f"the teacher {name} reads {example.shape[1]} colours, the data have {len(dataset.mean)}")
        with torch.no_grad():
            answers = self.model(example).shape[-1]
        if answers != len(dataset.classes) or inputs.classes not in ((), dataset.classes):
            raise UserError(f"the teacher {name} knows {answers} other classes than the {len(dataset.classes)} here")

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Scores for pictures in [0, 1]."""
        return self.model(self.pixels(images)).float()


class DistillModule(ClassifyModule):
    def __init__(self, spec: Distill, model: Model, dataset: Dataset, teacher: Teacher) -> None:
        super().__init__(spec.labels, model, dataset)
        self.distill, self.teacher = spec, teacher

    @property
    def flops(self) -> int:
        return super().flops + 2 * measure(self.teacher.model.spec).macs

    def learn(self, *inputs: Tensor) -> Losses:
        images, targets = self.augmented(*inputs)
        logits, answers = self.model(self.pixels(images)), self.teacher(images)
        labelled = cross_entropy(logits, targets, self.spec.loss)
        taught = imitation(logits.float(), answers, self.distill.form, self.distill.temperature)
        shown = {
            "accuracy": (logits.argmax(1) == targets.argmax(1)).float().mean(),
            "agreement": (logits.argmax(1) == answers.argmax(1)).float().mean(),
        }
        return Losses(torch.lerp(labelled, taught, self.distill.share), shown)


def imitation(logits: Tensor, answers: Tensor, form: str, temperature: float) -> Tensor:
    if form == "hard":
        return F.cross_entropy(logits, answers.argmax(1))
    student, teacher = ((scores / temperature).log_softmax(1) for scores in (logits, answers))
    return temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)
