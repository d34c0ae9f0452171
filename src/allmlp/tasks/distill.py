"""Knowledge distillation of image classifiers into a single head."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.dataset import ImageDataset, Split
from allmlp.errors import UserError
from allmlp.models.cost import measure
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import NonNegative, Rate
from allmlp.tasks.classify import Classify, ClassifyModule, cross_entropy
from allmlp.tasks.task import Losses, Normalize, Task, TaskModule
from allmlp.weights.pretrained import pretrained


class Distill(Task):
    """The loss of `classify`, mixed with that of a teacher, which reads the same augmented images.

        L = (1 - alpha) L_classify(z, t) + alpha L_teacher(z, y),    z logits of the student, y of the teacher
        hard:  L_teacher = - log softmax(z)_k,  k = argmax y
        soft:  L_teacher = T^2 KL(softmax(y / T) || softmax(z / T))

    Source: DeiT, section 4, with one head instead of two; ResMLP's distilled models. `teacher` is a model folder, or
    timm:NAME or hf:NAME for published weights.
    """

    teacher: str
    classify: Classify = Classify()
    distillation_type: Literal["hard", "soft"] = "hard"
    alpha: Rate = 0.5
    temperature: NonNegative = 1.0

    def check(self) -> None:
        if not self.temperature:
            raise UserError("Distill.temperature must be positive")

    def configure_model(self, model: ModelSpec, dataset: ImageDataset) -> ModelSpec:
        return self.classify.configure_model(model, dataset)

    def build(self, model: Model, dataset: ImageDataset) -> TaskModule:
        return DistillModule(self, model, dataset, Teacher(self.teacher, dataset, model.device))

    def build_evaluator(self, model: Model, dataset: ImageDataset) -> TaskModule:
        return self.classify.build_evaluator(model, dataset)

    def floors(self, dataset: ImageDataset, split: Split) -> dict[str, float]:
        return self.classify.floors(dataset, split)


class Teacher:
    """A frozen model; not a module, so that optimizer and checkpoint do not see it."""

    def __init__(self, name: str, dataset: ImageDataset, device: torch.device) -> None:
        self.model, preprocessing = pretrained(name, device=device)
        self.model.requires_grad_(False)
        self.normalize = Normalize(preprocessing.mean, preprocessing.std, self.model.spec.input_size).to(device)
        (example,) = self.model.dummy_inputs()
        if example.shape[1] != len(dataset.mean):
            raise UserError(f"the teacher {name} reads {example.shape[1]} channels, the data have {len(dataset.mean)}")
        with torch.no_grad():
            num_classes = self.model(example).shape[-1]
        if num_classes != len(dataset.class_names):
            raise UserError(f"the teacher {name} has {num_classes} classes, the data have {len(dataset.class_names)}")
        if preprocessing.class_names not in ((), dataset.class_names):
            raise UserError(f"the teacher {name} has other classes than the data, or in another order")

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits for images in [0, 1]."""
        return self.model(self.normalize(images)).float()


class DistillModule(ClassifyModule):
    def __init__(self, spec: Distill, model: Model, dataset: ImageDataset, teacher: Teacher) -> None:
        super().__init__(spec.classify, model, dataset)
        self.distill, self.teacher = spec, teacher

    @property
    def flops(self) -> int:
        return super().flops + 2 * measure(self.teacher.model.spec).macs

    def compute_loss(self, *inputs: Tensor) -> Losses:
        images, targets = self.augment(*inputs)
        logits, teacher_logits = self.model(self.normalize(images)), self.teacher(images)
        loss = torch.lerp(
            cross_entropy(logits, targets, self.spec.loss),
            distillation_loss(logits.float(), teacher_logits, self.distill.distillation_type, self.distill.temperature),
            self.distill.alpha,
        )
        predicted = logits.argmax(1)
        metrics = {
            "accuracy": (predicted == targets.argmax(1)).float().mean(),
            "agreement": (predicted == teacher_logits.argmax(1)).float().mean(),
        }
        return Losses(loss, metrics)


def distillation_loss(logits: Tensor, teacher_logits: Tensor, distillation_type: str, temperature: float) -> Tensor:
    if distillation_type == "hard":
        return F.cross_entropy(logits, teacher_logits.argmax(1))
    student, teacher = ((scores / temperature).log_softmax(1) for scores in (logits, teacher_logits))
    return temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)
