"""Masked pretraining on time series: the model reconstructs masked patches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from allmlp.data.dataset import Dataset
from allmlp.data.sampler import Batch
from allmlp.data.series import SeriesBatch, SeriesDataset
from allmlp.device import sum_dtype
from allmlp.errors import UserError
from allmlp.layers.series import ReconstructionHead, SeriesPatches, SeriesPatchesLayer
from allmlp.models.model import Model, ModelSpec
from allmlp.models.series_encoder import SeriesEncoder, SeriesEncoderModel
from allmlp.spec import Range
from allmlp.tasks.masked_lm import fixed_uniforms
from allmlp.tasks.task import Losses, StepContext, Sums, Task, TaskModule


class MaskedPatches(Task):
    """Mean squared error of the masked patches, in units of the normalized window.

        L = mean over hidden patches of (head(X) - z)^2

    A fraction `mask_ratio` of the patches of each window is masked, the same ones in all columns. To forecast, start a
    run from the result with `init_from`: the head is new, all other weights are kept. Source: PatchTST, PatchTSMixer.
    """

    dataset_type: ClassVar[type[Dataset]] = SeriesDataset
    mask_ratio: Annotated[float, Range(0.01, 0.99)] = 0.4

    def configure_model(self, model: ModelSpec, dataset: SeriesDataset) -> ModelSpec:
        if not isinstance(model, SeriesEncoder) or not isinstance(model.stem, SeriesPatches):
            raise UserError("masked pretraining needs a model of patches, such as patchtsmixer")
        head = ReconstructionHead(getattr(model.head, "dropout", 0.0))
        return model.configure(seq_len=dataset.seq_len, in_chans=len(dataset.columns)).replace(head=head)

    def build(self, model: Model, dataset: SeriesDataset) -> TaskModule:
        return MaskedPatchesModule(self, model, dataset)


class MaskedPatchesModule(TaskModule):
    unit = ("windows", 1)

    def __init__(self, spec: MaskedPatches, model: Model, dataset: SeriesDataset) -> None:
        super().__init__()
        assert isinstance(model, SeriesEncoderModel)
        self.spec, self.model, self.has_gaps = spec, model, dataset.has_gaps
        self.tokens = model.spec.stem.tokens
        self.count = min(max(round(spec.mask_ratio * self.tokens), 1), self.tokens - 1)
        if self.tokens < 2:
            raise UserError("a model of one patch has none left to see: choose a smaller patch_size")

    def prepare_batch(self, batch: Batch, context: StepContext) -> tuple[Tensor, ...]:
        return batch.examples.past, context.uniform(len(batch.examples.past), self.tokens)

    def compute_loss(self, *inputs: Tensor) -> Losses:
        loss, count = self.errors(self.model, *inputs)
        return Losses(loss / count.clamp(min=1), {})

    def loss_weight(self, *inputs: Tensor) -> int | Tensor:
        past, uniforms = inputs
        return self.counted(past, self.hidden(uniforms)).sum() if self.has_gaps else len(past)

    def hidden(self, uniforms: Tensor) -> Tensor:
        """Whether each patch is masked, b s."""
        return uniforms.argsort(1).argsort(1) < self.count

    def counted(self, past: Tensor, hidden: Tensor) -> Tensor:
        """Whether each value of a patch is masked and was observed, b v s p."""
        assert isinstance(self.model.stem, SeriesPatchesLayer)
        return hidden[:, None, :, None] & self.model.stem.split_patches(past.isfinite())

    def errors(self, model: Model, past: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of squared errors over the masked values that were observed, and their number."""
        assert isinstance(model, SeriesEncoderModel) and isinstance(model.stem, SeriesPatchesLayer)
        mask, hidden = past.isfinite() if self.has_gaps else None, self.hidden(uniforms)
        output = model(past, mask, hidden[:, None].expand(-1, past.shape[2], -1)).float()
        target = model.stem.split_patches(model.normalize(past, mask)[0])
        counted = self.counted(past, hidden)
        return torch.where(counted, output - target, 0).square().sum(), counted.sum()

    def evaluate(self, model: Model, batches: Iterable[SeriesBatch]) -> Sums:
        """Evaluate with masks that depend on the window alone, not on its batch."""
        sums = torch.zeros(2, dtype=sum_dtype(model.device), device=model.device)
        for past, _, _ in batches:
            rounded = (256 * past.nan_to_num()).round().long()  # the same on every device
            uniforms = fixed_uniforms(rounded.flatten(1), self.tokens)
            sums += torch.stack([part.to(sums.dtype) for part in self.errors(model, past, uniforms)])
        return {"mse": (sums[0], sums[1])}
