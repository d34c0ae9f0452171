"""Knowledge distillation of image classifiers into a single head."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.class_names import match_classes, model_class_names
from allmlp.data.dataset import ImageDataset
from allmlp.errors import UserError
from allmlp.layers.init import Init
from allmlp.layers.linear import Linear
from allmlp.models.cost import measure
from allmlp.models.external import External
from allmlp.models.model import Model
from allmlp.spec import NonNegative, Rate
from allmlp.tasks.classify import Classify, ClassifyModule
from allmlp.tasks.probe import pool_features
from allmlp.tasks.task import DistillationTask, Losses, Normalize, TaskModule, Temperature
from allmlp.weights.pretrained import pretrained

IMAGENET_CLASSES = 1000


class Distill(DistillationTask):
    """The loss of `classify`, mixed with that of a teacher, which reads the same augmented images.

        L = (1 - alpha) L_classify(z, t) + alpha L_teacher(z, y) + beta (1 - cos(P f, g))
        hard:  L_teacher = - log softmax(z)_k,  k = argmax y
        soft:  L_teacher = T^2 KL(softmax(y / T) || softmax(z / T))

    z, y are the logits and f, g the pooled features of student and teacher; beta is `feature_weight`, and P a learned
    projection to the teacher's width, which is not saved with the model. `teacher` is a model folder, or timm:NAME or
    hf:NAME for published weights; if the teacher has more classes, for example ImageNet's, those with the names of the
    data's classes are used. Source: DeiT, section 4, with one head instead of two; ResMLP's distilled models. With
    alpha=1 labels are not used: Beyer et al., Knowledge distillation: A good teacher is patient and consistent, 2022.
    """

    teacher: str
    classify: Classify = Classify()
    distillation_type: Literal["hard", "soft"] = "hard"
    alpha: Rate = 0.5
    temperature: Temperature = 1.0
    feature_weight: NonNegative = 0.0

    def build(self, model: Model, dataset: ImageDataset) -> TaskModule:
        return DistillModule(self, model, dataset, Teacher(self.teacher, dataset, model.device))


class TeacherOutput(NamedTuple):
    logits: Tensor
    features: Tensor
    """Pooled, b c."""


class Teacher:
    """A frozen model; not a module, so that it is not part of optimizer and checkpoint."""

    def __init__(self, name: str, dataset: ImageDataset, device: torch.device) -> None:
        self.model, preprocessing = pretrained(name, device=device)
        self.model.requires_grad_(False)
        self.normalize = Normalize(preprocessing.mean, preprocessing.std, self.model.spec.input_size).to(device)
        (example,) = self.model.dummy_inputs()
        if example.shape[1] != len(dataset.mean):
            raise UserError(f"the teacher {name} reads {example.shape[1]} channels, the data have {len(dataset.mean)}")
        if isinstance(self.model.spec, External):
            # Convolutions are faster with channels last, and compiling them takes longer than a short run gains.
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.run = torch.compiler.disable(self.run)  # type: ignore[method-assign]
        self.columns: Tensor | None = None
        output = self(torch.zeros_like(example))
        self.width = output.features.shape[1]
        columns = class_columns(name, preprocessing.class_names, output.logits.shape[1], dataset.class_names)
        self.columns = None if columns is None else columns.to(device)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> TeacherOutput:
        """Outputs for images in [0, 1]."""
        return self.run(self.normalize(images))

    def run(self, x: Tensor) -> TeacherOutput:
        features = self.model.forward_features(x)
        logits = self.model.forward_head(features).float()
        logits = logits if self.columns is None else logits[:, self.columns]
        return TeacherOutput(logits, pool_features(self.model, features).float())


def class_columns(
    teacher: str, teacher_classes: tuple[str, ...], num_classes: int, classes: tuple[str, ...]
) -> Tensor | None:
    """Indices of the teacher's outputs for the classes of the data, in order; None if they are the same classes."""
    if num_classes == len(classes):
        if teacher_classes not in ((), classes):
            raise UserError(f"the teacher {teacher} has other classes than the data, or in another order")
        return None
    if not teacher_classes and num_classes != IMAGENET_CLASSES:
        raise UserError(f"the teacher {teacher} has {num_classes} classes, the data have {len(classes)}")
    try:
        match = match_classes(classes, model_class_names(teacher_classes, num_classes))
    except UserError as reason:
        raise UserError(f"the teacher {teacher} does not have the classes of the data: {reason}") from None
    return torch.tensor([match.columns.index(label) for label in match.labels])


class DistillModule(ClassifyModule):
    def __init__(self, spec: Distill, model: Model, dataset: ImageDataset, teacher: Teacher) -> None:
        super().__init__(spec.classify, model, dataset)
        self.distill, self.teacher = spec, teacher
        if spec.feature_weight:
            model.eval()  # the statistics of BatchNorm must not include this input
            with torch.no_grad():
                width = pool_features(model, model.forward_features(*model.dummy_inputs())).shape[1]
            model.train()
            self.proj = Linear(width, teacher.width, Init(), bias=False)

    @property
    def flops(self) -> int:
        return super().flops + 2 * measure(self.teacher.model.spec).macs

    def compute_loss(self, *inputs: Tensor) -> Losses:
        images, targets = self.augment(*inputs)
        features = self.model.forward_features(self.normalize(images))
        logits, teacher = self.model.forward_head(features), self.teacher(images)
        loss = torch.lerp(
            self.cross_entropy(logits, targets),
            distillation_loss(logits.float(), teacher.logits, self.distill.distillation_type, self.distill.temperature),
            self.distill.alpha,
        )
        predicted = logits.argmax(1)
        metrics = {
            "accuracy": (predicted == targets.argmax(1)).float().mean(),
            "agreement": (predicted == teacher.logits.argmax(1)).float().mean(),
        }
        if self.distill.feature_weight:
            pooled = self.proj(pool_features(self.model, features)).float()
            metrics["similarity"] = F.cosine_similarity(pooled, teacher.features).mean()
            loss = loss + self.distill.feature_weight * (1 - metrics["similarity"])
        return Losses(loss, metrics)


def distillation_loss(logits: Tensor, teacher_logits: Tensor, distillation_type: str, temperature: float) -> Tensor:
    if distillation_type == "hard":
        return F.cross_entropy(logits, teacher_logits.argmax(1))
    student, teacher = ((scores / temperature).log_softmax(1) for scores in (logits, teacher_logits))
    return temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)
