"""Knowledge distillation of text classifiers."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.dataset import Dataset
from allmlp.data.labeled_text import UNLABELED, LabeledTextDataset
from allmlp.data.sampler import Batch
from allmlp.errors import UserError
from allmlp.models.cost import measure
from allmlp.models.model import Model
from allmlp.spec import Rate
from allmlp.tasks.classify_text import ClassifyText, ClassifyTextModule, class_logits
from allmlp.tasks.distill import distillation_loss
from allmlp.tasks.distill_masked_lm import FrozenTeacher, load_text_teacher
from allmlp.tasks.task import DistillationTask, Losses, StepContext, TaskModule, Temperature


class DistillClassifyText(DistillationTask):
    """The loss of `classify`, mixed with that of a teacher.

        L = (1 - alpha) L_classify(z, t) + alpha L_teacher(z, y),    z logits of the student, y of the teacher
        hard:  L_teacher = - log softmax(z)_k,  k = argmax y
        soft:  L_teacher = T^2 KL(softmax(y / T) || softmax(z / T))

    Sentences without a label (`data.unlabeled`) have the teacher's term only. `teacher` is the folder of a model with
    the same classes and tokenizer. Source: Tang et al., Distilling Task-Specific Knowledge from BERT into Simple Neural
    Networks, 2019.
    """

    dataset_type: ClassVar[type[Dataset]] = LabeledTextDataset
    teacher: str
    classify: ClassifyText = ClassifyText()
    distillation_type: Literal["hard", "soft"] = "soft"
    alpha: Rate = 0.8
    temperature: Temperature = 2.0

    def check(self) -> None:
        if self.classify.class_balance:
            raise UserError("DistillClassifyText.classify.class_balance must be 0: the teacher knows the rare classes")

    def build(self, model: Model, dataset: LabeledTextDataset) -> TaskModule:
        return DistillClassifyTextModule(self, model, dataset, load_text_teacher(self.teacher, dataset, model.device))

    def build_evaluator(self, model: Model, dataset: LabeledTextDataset) -> TaskModule:
        return ClassifyTextModule(self.classify, model, dataset)  # `build` refuses texts without a label


class DistillClassifyTextModule(ClassifyTextModule):
    def __init__(
        self, spec: DistillClassifyText, model: Model, dataset: LabeledTextDataset, teacher: FrozenTeacher
    ) -> None:
        super().__init__(spec.classify, model, dataset)
        self.distill, self.teacher = spec, teacher

    @property
    def flops(self) -> int:
        return super().flops + 2 * measure(self.teacher.model.spec).macs

    def prepare_batches(self, parts: list[Batch], context: StepContext) -> list[tuple[Tensor, ...]]:
        """Add the fraction of labeled sentences in the whole batch, which differs between micro-batches and processes,
        so that all labels of a step have equal weights.
        """
        prepared = super().prepare_batches(parts, context)
        labeled = torch.cat([labels != UNLABELED for _, _, labels in prepared]).float().mean()
        if dist.is_initialized():
            dist.all_reduce(labeled)
            labeled /= context.world_size
        return [(*inputs, labeled) for inputs in prepared]

    def compute_loss(self, *inputs: Tensor) -> Losses:
        ids, segments, labels, *fraction = inputs
        logits = self.logits(self.model, ids, segments)
        with torch.no_grad():
            mask = ~self.tokenizer.padding(ids) if self.teacher.mask_padding else None
            teacher_logits = class_logits(self.teacher.model, ids, segments, mask)
        labeled = len(labels) * (fraction[0] if fraction else (labels != UNLABELED).float().mean()).clamp(min=1e-9)
        smoothing = self.spec.label_smoothing
        loss = torch.lerp(
            F.cross_entropy(logits, labels, ignore_index=UNLABELED, reduction="sum", label_smoothing=smoothing)
            / labeled,
            distillation_loss(logits, teacher_logits, self.distill.distillation_type, self.distill.temperature),
            self.distill.alpha,
        )
        predicted = logits.argmax(1)
        metrics = {
            "accuracy": (predicted == labels).sum() / labeled,
            "agreement": (predicted == teacher_logits.argmax(1)).float().mean(),
        }
        return Losses(loss, metrics)
