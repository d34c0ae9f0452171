"""Self-supervised learning: DINO, with small crops that are really smaller also for models of one image size."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from allmlp.data.images import MultiCrop
from allmlp.data.order import Step
from allmlp.data.source import Batch, Dataset
from allmlp.errors import UserError
from allmlp.models.cost import measure
from allmlp.models.encoder import Encoder
from allmlp.models.grid import Resized
from allmlp.models.model import Model, ModelSpec
from allmlp.models.zoo import create
from allmlp.spec import Count, NonNegative, Rate
from allmlp.tasks.probe import Neighbours, judge_neighbours, spread
from allmlp.tasks.task import Losses, Moment, Pixels, Task, TaskModule


class Dino(Task):
    """A student learns to give every crop of a picture the answer its teacher gives to another, large crop.

        p_g = softmax((teacher(x_g) - centre) / T_t)          large crops g, no gradient
        q_v = softmax(student(x_v) / T_s)                     all crops v
        L   = mean over g, v != g of - sum_k p_g[k] log q_v[k]
        teacher <- m teacher + (1 - m) student,  m from `momentum` to 1 by a cosine
        centre  <- 0.9 centre + 0.1 mean teacher(x_g)

    Both are the model, pooled and without its head, under a projection head of their own. What is kept, judged (by its
    nearest neighbours) and saved is the teacher. A small crop goes through the student with its token weights resized
    to the crop's grid, at every step anew, so that these learn from small crops too. Source: Caron et al., 2021; the
    resizing is our own, as no published code passes small crops through an MLP over tokens.
    """

    crops: MultiCrop = MultiCrop()
    outputs: Count = 65_536
    hidden: Count = 2048
    bottleneck: Count = 256
    momentum: Rate = 0.996
    student_temperature: NonNegative = 0.1
    teacher_temperature: NonNegative = 0.04
    first_temperature: NonNegative = 0.04
    """The teacher's at the beginning; it reaches the other after a tenth of the run."""
    frozen: Rate = 0.01
    """The share of the run in which the last layer of the projection head does not learn."""
    neighbours: Neighbours = Neighbours()

    def fit(self, model: ModelSpec, dataset: Dataset) -> ModelSpec:
        if not isinstance(model, Encoder) or model.pool is None:
            raise UserError("DINO needs one of this library's image encoders, with a pool")
        return model.replace(head=None).configure(image=self.crops.global_size)

    def build(self, model: Model, dataset: Dataset) -> TaskModule:
        return DinoModule(self, model, dataset)

    def judge(self, model: Model, dataset: Dataset) -> TaskModule:
        return self.neighbours.judge(model, dataset)


class DinoModule(TaskModule):
    def __init__(self, spec: Dino, model: Model, dataset: Dataset) -> None:
        super().__init__()
        self.spec, self.classes = spec, len(dataset.classes)
        self.student, self.student_head = model, ProjectionHead(spec, model.spec.width)
        self.model = create(model.spec.configure(drop_path=0.0), device=model.device)
        self.head = ProjectionHead(spec, model.spec.width)
        for taught, learner in ((self.model, self.student), (self.head, self.student_head)):
            taught.load_state_dict(learner.state_dict())
            taught.requires_grad_(False)
        self.pixels = Pixels(dataset.mean, dataset.std)
        self.whole = Pixels(dataset.mean, dataset.std, model.spec.image_size)
        self.known = spread(dataset.train, spec.neighbours.bank)
        self.small = Resized(model, spec.crops.local_size) if spec.crops.local else None
        self.register_buffer("centre", torch.zeros(spec.outputs))
        # Mean outputs of the teacher, summed over the passes since the last step.
        self.answers, self.passes = torch.zeros(spec.outputs, device=model.device), 0

    @property
    def flops(self) -> int:
        large, crops = measure(self.student.spec).macs, self.spec.crops
        small = measure(self.student.spec.configure(image=crops.local_size)).macs if crops.local else 0
        return crops.globals * (6 + 2) * large + crops.local * 6 * small

    def prepare(self, step: Step, moment: Moment) -> tuple[Tensor, ...]:
        images, spec = step.batch.images, self.spec
        if isinstance(next(self.student.parameters()), DTensor):
            raise UserError("DINO resizes whole token matrices, which sharding=fsdp has cut up; use sharding=ddp")
        self.passes += 1
        rise = min(10 * moment.progress, 1.0)
        temperature = spec.first_temperature + rise * (spec.teacher_temperature - spec.first_temperature)
        numbers = torch.tensor([temperature, float(moment.progress >= spec.frozen)], device=images.device)
        return images, moment.uniform(len(images), spec.crops.numbers()), numbers[0], numbers[1]

    def learn(self, *inputs: Tensor) -> Losses:
        images, draws, temperature, learns = inputs
        large, *small = (self.pixels(views) for views in self.spec.crops.transform(images, draws))
        with torch.no_grad():
            answers = self.head(self.model(large)).float()
            p = ((answers - self.centre) / temperature).softmax(1)
            self.answers.add_(answers.mean(0))
        features = [self.student(large)] + [self.small(views) for views in small if self.small]
        q = (self.student_head(torch.cat(features), learns).float() / self.spec.student_temperature).log_softmax(1)
        loss = between_views(p.unflatten(0, (-1, len(images))), q.unflatten(0, (-1, len(images))))
        return Losses(loss, {"entropy": -(p * p.clamp(min=1e-12).log()).sum(1).mean()})

    @torch.no_grad()
    def after_step(self, progress: float) -> None:
        mean = self.answers / self.passes
        self.answers.zero_()
        self.passes = 0
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.centre.lerp_(mean, 0.1)
        keep = 1 - (1 - self.spec.momentum) * (1 + math.cos(math.pi * progress)) / 2
        for taught, learner in ((self.model, self.student), (self.head, self.student_head)):
            follow: list[Tensor] = list(taught.parameters())
            lead: list[Tensor] = list(learner.parameters())
            torch._foreach_lerp_(follow, lead, 1 - keep)

    def evaluate(self, model: Model, batches: Iterable[Batch]) -> dict[str, tuple[Tensor, Tensor]]:
        return judge_neighbours(self.spec.neighbours, model, self.whole, self.known, batches, self.classes)


def between_views(p: Tensor, q: Tensor) -> Tensor:
    """Mean cross-entropy of all pairs of different views; p: g b k, the teacher's; q: v b k, the student's logarithms.

    The sum over all pairs is the product of two sums, from which the pairs of a view with itself are taken.
    """
    pairs = len(p) * (len(q) - 1)
    same = (p * q[: len(p)]).sum()
    return (same - (p.sum(0) * q.sum(0)).sum()) / (pairs * p.shape[1])


class ProjectionHead(nn.Module):
    """Three layers, a bottleneck of length one, and as many directions as outputs.

    h(x) = V u / |u|,   u = W3 gelu(W2 gelu(W1 x)),   rows of V of length one
    """

    def __init__(self, spec: Dino, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(channels, spec.hidden),
            nn.GELU(),
            nn.Linear(spec.hidden, spec.hidden),
            nn.GELU(),
            nn.Linear(spec.hidden, spec.bottleneck),
        )
        self.directions = nn.Parameter(torch.empty(spec.outputs, spec.bottleneck))
        for name, weight in self.named_parameters():
            nn.init.zeros_(weight) if name.endswith("bias") else nn.init.trunc_normal_(weight, std=0.02)

    def forward(self, x: Tensor, learns: Tensor | None = None) -> Tensor:
        """`learns` is 0 while the directions are to stay as they are, else 1."""
        rows = self.directions
        if learns is not None:
            rows = torch.lerp(rows.detach(), rows, learns)
        return F.linear(F.normalize(self.layers(x), dim=1), F.normalize(rows, dim=1))
