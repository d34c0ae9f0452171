"""Self-supervised learning with DINO, for models with a fixed number of tokens too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from allmlp.data.augment import MultiCrop
from allmlp.data.dataset import Dataset, ImageDataset, LabeledImages
from allmlp.data.preprocessing import PREPROCESSING_FILE
from allmlp.data.sampler import Batch
from allmlp.device import upload
from allmlp.errors import UserError
from allmlp.layers.init import truncated_normal
from allmlp.models.cost import measure
from allmlp.models.encoder import Encoder
from allmlp.models.grid import ForwardAtSize
from allmlp.models.model import Model, ModelSpec
from allmlp.models.resnet import ResNet
from allmlp.models.zoo import create
from allmlp.spec import Count, Rate, from_json, to_json
from allmlp.tasks.probe import KnnEval, evaluate_knn, subsample
from allmlp.tasks.task import Losses, Normalize, StepContext, Sums, Task, TaskModule, Temperature


class Dino(Task):
    """A student predicts, from every crop of an image, the teacher's output for another, global crop.

        p_g = softmax((teacher(x_g) - center) / T_t)          global crops g, no gradient
        q_v = softmax(student(x_v) / T_s)                     all crops v
        L   = mean over g, v != g of - sum_k p_g[k] log q_v[k]
        teacher <- m teacher + (1 - m) student,  m from `momentum` to 1 by a cosine
        center  <- 0.9 center + 0.1 mean teacher(x_g)

    Student and teacher are the pooled model without its head, each followed by its own projection head. The teacher is
    evaluated (by k-NN) and saved. For local crops the student's token weights are resized to the smaller grid at every
    step, and gradients pass through the resizing. Source: Caron et al., 2021; the resizing is new here, as no published
    code passes small crops through an MLP over tokens.
    """

    saves_trained: ClassVar[bool] = False
    crops: MultiCrop = MultiCrop()
    out_dim: Count = 65_536
    hidden_dim: Count = 2048
    bottleneck_dim: Count = 256
    momentum: Rate = 0.996
    student_temperature: Temperature = 0.1
    teacher_temperature: Temperature = 0.04
    warmup_teacher_temperature: Temperature = 0.04
    """Initial value; it moves linearly to `teacher_temperature` in the first tenth of the run."""
    freeze_last_layer: Rate = 0.01
    """Fraction of the run during which the last layer of the projection head is frozen."""
    knn: KnnEval = KnnEval()

    @property
    def against_fsdp(self) -> str:
        return "it resizes whole token matrices, which FSDP splits"

    @property
    def against_plan(self) -> str:
        return "it reads several crops of every image, some of them with a teacher too"

    def sized_for(self, model: ModelSpec) -> dict[str, Any]:
        """The fields of `crops` for images of the model's size, in the proportions of the defaults for 224 pixels."""
        size, defaults = model.input_size, MultiCrop()
        if size is None:
            return {}
        grid = model.build_contexts[-1].grid if isinstance(model, Encoder) else None
        patches = grid or size
        ratios = (local / whole for local, whole in zip(defaults.local_size, defaults.global_size))
        local = (max(round(ratio * count), 1) * side // count for ratio, count, side in zip(ratios, patches, size))
        low, high = defaults.blur_sigma
        blur = (low, max(low, round(high * min(size) / min(defaults.global_size), 2)))
        return {"global_size": size, "local_size": tuple(local), "blur_sigma": blur}

    def configure_model(self, model: ModelSpec, dataset: ImageDataset) -> ModelSpec:
        model = model.with_channels(len(dataset.mean))
        if isinstance(model, ResNet):
            return model.configure(img_size=self.crops.global_size, num_classes=0)
        if not isinstance(model, Encoder) or model.pool is None:
            raise UserError("DINO needs one of this library's image encoders, with a pool")
        return model.replace(head=None).configure(img_size=self.crops.global_size)

    def build(self, model: Model, dataset: ImageDataset) -> TaskModule:
        return DinoModule(self, model, dataset)

    def files(self, dataset: Dataset) -> dict[str, str]:
        files = dataset.files()
        features = from_json(files[PREPROCESSING_FILE]).replace(class_names=())
        return files | {PREPROCESSING_FILE: to_json(features)}

    def build_evaluator(self, model: Model, dataset: ImageDataset) -> TaskModule:
        return self.knn.build_evaluator(model, dataset)


class DinoModule(TaskModule):
    def __init__(self, spec: Dino, model: Model, dataset: ImageDataset) -> None:
        super().__init__()
        self.spec, self.num_classes = spec, len(dataset.class_names)
        convolutional = isinstance(model.spec, ResNet)
        width = model.spec.num_features  # the output of a model without a head
        self.student, self.student_head = model, ProjectionHead(spec, width)
        self.model = create(model.spec if convolutional else model.spec.configure(drop_path=0.0), device=model.device)
        self.head = ProjectionHead(spec, width)
        for teacher, student in self.pairs():
            teacher.load_state_dict(student.state_dict())
            teacher.requires_grad_(False)
        self.normalize = Normalize(dataset.mean, dataset.std)
        self.eval_normalize = Normalize(dataset.mean, dataset.std, model.spec.input_size)
        self.bank = subsample(dataset.train, spec.knn.bank_size)
        self.local_student: Callable[[Tensor], Tensor] | None = None
        if spec.crops.num_local:
            self.local_student = model.forward if convolutional else ForwardAtSize(model, spec.crops.local_size)
        self.register_buffer("center", torch.zeros(spec.out_dim))
        # Teacher outputs, summed over the global crops since the last optimizer step.
        self.output_sum, self.num_outputs = torch.zeros(spec.out_dim, device=model.device), 0

    def pairs(self) -> tuple[tuple[nn.Module, nn.Module], ...]:
        """Teacher and student of the model and of the projection head."""
        return (self.model, self.student), (self.head, self.student_head)

    @property
    def flops(self) -> int:
        large, crops = measure(self.student.spec).macs, self.spec.crops
        small = measure(self.student.spec.configure(img_size=crops.local_size)).macs if crops.num_local else 0
        return crops.num_global * (6 + 2) * large + crops.num_local * 6 * small

    def prepare_batch(self, batch: Batch, context: StepContext) -> tuple[Tensor, ...]:
        images, spec = batch.examples.images, self.spec
        self.num_outputs += spec.crops.num_global * len(images)
        start, end = spec.warmup_teacher_temperature, spec.teacher_temperature
        temperature = start + min(10 * context.progress, 1.0) * (end - start)
        scalars = torch.tensor([temperature, float(context.progress >= spec.freeze_last_layer)])
        scalars = upload(scalars, images.device)
        return images, context.uniform(len(images), spec.crops.num_uniforms()), scalars[0], scalars[1]

    def compute_loss(self, *inputs: Tensor) -> Losses:
        images, uniforms, temperature, train_last_layer = inputs
        global_crops, *local_crops = (self.normalize(views) for views in self.spec.crops.apply(images, uniforms))
        with torch.no_grad():
            outputs = self.head(self.model(global_crops)).float()
            p = ((outputs - self.center) / temperature).softmax(1)
            self.output_sum.add_(outputs.sum(0))
        features = [self.student(global_crops)]
        features += [self.local_student(views) for views in local_crops if self.local_student]
        logits = self.student_head(torch.cat(features), train_last_layer).float()
        log_q = (logits / self.spec.student_temperature).log_softmax(1)
        loss = dino_loss(p.unflatten(0, (-1, len(images))), log_q.unflatten(0, (-1, len(images))))
        return Losses(loss, {"entropy": -(p * p.clamp(min=1e-12).log()).sum(1).mean()})

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        mean = self.output_sum / self.num_outputs
        self.output_sum.zero_()
        self.num_outputs = 0
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        # A step skipped by nan=skip must not change the center, which all later losses depend on.
        self.center.lerp_(torch.where(mean.isfinite(), mean, self.center), 0.1)
        momentum = 1 - (1 - self.spec.momentum) * (1 + math.cos(math.pi * progress)) / 2
        for teacher, student in self.pairs():
            averages: list[Tensor] = list(teacher.parameters())
            weights: list[Tensor] = list(student.parameters())
            torch._foreach_lerp_(averages, weights, 1 - momentum)

    def evaluate(self, model: Model, batches: Iterable[LabeledImages]) -> Sums:
        return evaluate_knn(self.spec.knn, model, self.eval_normalize, self.bank, batches, self.num_classes)


def dino_loss(p: Tensor, log_q: Tensor) -> Tensor:
    """Mean cross-entropy over all pairs of different views: p, g b k, of the teacher; log_q, v b k, of the student.

    The sum over all pairs is a product of two sums; the pairs of a view with itself are subtracted.
    """
    pairs = len(p) * (len(log_q) - 1)
    same_view = (p * log_q[: len(p)]).sum()
    return (same_view - (p.sum(0) * log_q.sum(0)).sum()) / (pairs * p.shape[1])


class ProjectionHead(nn.Module):
    """A three-layer MLP, L2 normalization, and a weight-normalized linear layer.

        h(x) = V u / |u|,   u = W3 gelu(W2 gelu(W1 x))

    The rows of V have norm 1; the biases of the MLP are not written.
    """

    def __init__(self, spec: Dino, channels: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(channels, spec.hidden_dim),
            nn.GELU(),
            nn.Linear(spec.hidden_dim, spec.hidden_dim),
            nn.GELU(),
            nn.Linear(spec.hidden_dim, spec.bottleneck_dim),
        )
        self.last_layer = nn.Parameter(torch.empty(spec.out_dim, spec.bottleneck_dim))
        for name, weight in self.named_parameters():
            nn.init.zeros_(weight) if name.endswith("bias") else truncated_normal(weight, std=0.02, limit=2.0)

    def forward(self, x: Tensor, train_last_layer: Tensor | None = None) -> Tensor:
        """`train_last_layer` is 1, or 0 while the last layer is frozen."""
        weight = self.last_layer
        if train_last_layer is not None:
            weight = torch.lerp(weight.detach(), weight, train_last_layer)
        return F.linear(F.normalize(self.mlp(x), dim=1), F.normalize(weight, dim=1))
