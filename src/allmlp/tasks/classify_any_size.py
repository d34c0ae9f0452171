"""Image classification with one model for every image size."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean
from typing import cast

import torch
from torch import Tensor, nn

from allmlp.data.dataset import ImageDataset, LabeledImages
from allmlp.data.sampler import Batch, Stream, mix_seed
from allmlp.device import sum_dtype
from allmlp.errors import UserError
from allmlp.models.cost import measure
from allmlp.models.grid import ForwardAtSize, with_img_size
from allmlp.models.model import Model
from allmlp.spec import Count
from allmlp.tasks.classify import Classify, ClassifyModule, evaluate_classifier
from allmlp.tasks.task import Losses, Normalize, StepContext, Sums, TaskModule


class ClassifyAnySize(Classify):
    """Every step trains at one of `train_sizes`: images are resized to it, and the weights over tokens to its grid.

        L_s = L(model with W_s = U_s W D_s),   s drawn for every step          (`models.grid.GridResize`)

    Gradients reach W, which is thus trained to be resampled. The model is evaluated at its own size and, without
    fine-tuning, at all `eval_sizes`: accuracy_SIZE, and worst_accuracy over the sizes from its own up. Without
    `train_sizes` it is trained at its own size only. Sizes are square, in pixels, and multiples of the patch size.
    """

    train_sizes: tuple[Count, ...] = ()
    eval_sizes: tuple[Count, ...] = ()

    @property
    def against_fsdp(self) -> str:
        return "train_sizes resizes whole token matrices, which FSDP splits" if self.train_sizes else ""

    @property
    def against_plan(self) -> str:
        return "its steps have several image sizes" if self.train_sizes else ""

    def build(self, model: Model, dataset: ImageDataset) -> TaskModule:
        return ClassifyAnySizeModule(self, model, dataset)


class ClassifyAnySizeModule(ClassifyModule):
    def __init__(self, spec: ClassifyAnySize, model: Model, dataset: ImageDataset) -> None:
        super().__init__(spec, model, dataset)
        model_size = model.spec.input_size
        if model_size is None or model_size[0] != model_size[1]:
            raise UserError("ClassifyAnySize needs a model of square images")
        self.own_size, self.eval_sizes = model_size[0], spec.eval_sizes
        self.train_sizes = spec.train_sizes or (self.own_size,)
        sizes = dict.fromkeys((*self.train_sizes, *self.eval_sizes))
        self.normalize_at = nn.ModuleDict({str(s): Normalize(dataset.mean, dataset.std, (s, s)) for s in sizes})
        for size in self.eval_sizes:
            with_img_size(model.spec, size)  # an error before training
        self.forward_at = {s: ForwardAtSize(model, (s, s)) for s in self.train_sizes if s != self.own_size}

    @property
    def networks(self) -> list[nn.Module]:
        return [forward.network for forward in self.forward_at.values()]

    @property
    def flops(self) -> int:
        return round(mean(6 * measure(with_img_size(self.model.spec, size)).macs for size in self.train_sizes))

    def prepare_batch(self, batch: Batch, context: StepContext) -> tuple[Tensor, ...]:
        size = self.train_sizes[mix_seed(Stream.IMAGE_SIZE, batch.step) % len(self.train_sizes)]
        if size in self.forward_at:
            self.forward_at[size].follow_mode()
        # The size is passed as the shape of an empty tensor, since compiled and recorded steps depend on shapes.
        return *super().prepare_batch(batch, context), batch.examples.images.new_empty(size, 0)

    def compute_loss(self, *inputs: Tensor) -> Losses:
        *rest, shape = inputs
        images, targets = self.augment(*rest)
        size = shape.shape[0]
        return self.losses(self.forward_at.get(size, self.model)(self.normalize_at[str(size)](images)), targets)

    def evaluate(self, model: Model, batches: Iterable[LabeledImages]) -> Sums:
        forward_at = {size: ForwardAtSize(model, (size, size)) for size in self.eval_sizes if size != self.own_size}
        zero = torch.zeros((), dtype=sum_dtype(model.device), device=model.device)
        sums = dict.fromkeys(("accuracy", "loss"), (zero, zero))
        sums |= {f"accuracy_{size}": (zero, zero) for size in self.eval_sizes}
        for batch in batches:
            metrics = evaluate_classifier(model, self.normalize, [batch], self.keep)
            for size in self.eval_sizes:
                normalize = cast(Normalize, self.normalize_at[str(size)])
                at_size = evaluate_classifier(forward_at.get(size, model), normalize, [batch])
                metrics[f"accuracy_{size}"] = at_size["accuracy"]
            sums = {name: (total + metrics[name][0], count + metrics[name][1]) for name, (total, count) in sums.items()}
        return sums

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        sizes = [size for size in self.eval_sizes if size >= self.own_size]
        worst = min((means[f"accuracy_{size}"] for size in sizes), default=means["accuracy"])
        return {**means, "worst_accuracy": min(worst, means["accuracy"])}
