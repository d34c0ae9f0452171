"""Knowledge distillation of models that answer questions."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from allmlp.data.dataset import Dataset
from allmlp.data.squad import SquadDataset
from allmlp.models.cost import measure
from allmlp.models.model import Model
from allmlp.spec import Rate
from allmlp.tasks.distill import distillation_loss
from allmlp.tasks.distill_masked_lm import FrozenTeacher, load_text_teacher
from allmlp.tasks.question_answering import QuestionAnswering, QuestionAnsweringModule, span_logits, span_loss
from allmlp.tasks.task import DistillationTask, Losses, TaskModule, Temperature

PADDING = -1e4
"""Logit of padding: its probability is 0, and so is its contribution to the divergence."""


class DistillQuestionAnswering(DistillationTask):
    """The loss of `answer`, mixed with the KL divergence from a teacher's distributions of start and end tokens.

        L = (1 - alpha) L_answer + alpha T^2 (KL(start' || start) + KL(end' || end)) / 2

    start, end are softmax(logits / T) of the student, start', end' of the teacher, both over the tokens of a window.
    `teacher` is the folder of a model that answers questions, with the tokenizer of the data. Source: Sanh et al.,
    DistilBERT, 2019, section 4.
    """

    dataset_type: ClassVar[type[Dataset]] = SquadDataset
    teacher: str
    answer: QuestionAnswering = QuestionAnswering()
    alpha: Rate = 0.7
    temperature: Temperature = 2.0

    def build(self, model: Model, dataset: SquadDataset) -> TaskModule:
        teacher = load_text_teacher(self.teacher, dataset, model.device)
        return DistillQuestionAnsweringModule(self, model, dataset, teacher)


class DistillQuestionAnsweringModule(QuestionAnsweringModule):
    def __init__(
        self, spec: DistillQuestionAnswering, model: Model, dataset: SquadDataset, teacher: FrozenTeacher
    ) -> None:
        super().__init__(spec.answer, model, dataset)
        self.distill, self.teacher = spec, teacher

    @property
    def flops(self) -> int:
        return super().flops + 2 * measure(self.teacher.model.spec).macs

    def compute_loss(self, *inputs: Tensor) -> Losses:
        ids, segments, first, last = inputs
        logits = self.logits(self.model, ids, segments)
        with torch.no_grad():
            targets = span_logits(self.teacher.model, ids, segments, self.tokenizer, self.teacher.mask_padding)
        temperature = self.distill.temperature
        divergence = [
            distillation_loss(student.clamp(min=PADDING), teacher.clamp(min=PADDING), "soft", temperature)
            for student, teacher in zip(logits, targets, strict=True)
        ]
        losses = span_loss(*logits, first, last)
        agree = [student.argmax(1) == teacher.argmax(1) for student, teacher in zip(logits, targets, strict=True)]
        total = torch.lerp(losses.total, torch.stack(divergence).mean(), self.distill.alpha)
        return Losses(total, {**losses.metrics, "agreement": (agree[0] & agree[1]).float().mean()})
