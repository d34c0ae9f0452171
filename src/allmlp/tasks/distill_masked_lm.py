"""Masked language modeling with a teacher's features as additional targets."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.corpus import TextDataset
from allmlp.data.dataset import Dataset
from allmlp.data.labeled_text import LabeledTextDataset
from allmlp.data.preprocessing import TextPreprocessing, read_preprocessing
from allmlp.data.sampler import Batch
from allmlp.data.squad import SquadDataset
from allmlp.data.tokenizer import Tokenizer, load_tokenizer
from allmlp.errors import UserError
from allmlp.files import expand_user
from allmlp.layers.init import Init
from allmlp.layers.linear import Linear
from allmlp.layers.stem import TokenEmbed
from allmlp.models.cost import measure
from allmlp.models.encoder import Encoder
from allmlp.models.model import Model
from allmlp.spec import Rate
from allmlp.tasks.masked_lm import MaskedBatch, MaskedLM, MaskedLMModule, token_losses
from allmlp.tasks.task import DistillationTask, Losses, StepContext, TaskModule
from allmlp.weights import folder
from allmlp.weights.convert import is_model_folder
from allmlp.weights.huggingface_bert import init_embeddings, load_bert


class DistillMaskedLM(DistillationTask):
    """The loss of `masked_lm`, mixed with the cosine distance from the teacher's features.

        L = (1 - alpha) L_masked_lm + alpha mean over real positions i of (1 - cos(P X[i], T[i]))

    X are the student's features of the masked row, T the frozen teacher's features of the unmasked row. P is a learned
    projection from the student's width to the teacher's; it is not saved with the model. `teacher` is the folder of a
    Hugging Face BERT or of one of this library's language models; it may be empty if alpha=0. With `embeddings_from`, a
    BERT folder, the token embedding starts from that model's. Both must have the data's tokenizer.
    """

    dataset_type: ClassVar[type[Dataset]] = TextDataset
    teacher: str
    masked_lm: MaskedLM = MaskedLM()
    alpha: Rate = 0.5
    embeddings_from: str = ""

    def check(self) -> None:
        if self.alpha and not self.teacher:
            raise UserError("DistillMaskedLM.teacher is empty: set it to a model folder, or set alpha=0")

    def build(self, model: Model, dataset: TextDataset) -> TaskModule:
        if self.embeddings_from:
            check_tokenizer(Path(self.embeddings_from), dataset.tokenizer)
            init_embeddings(model, self.embeddings_from)
        if not self.alpha:
            return self.masked_lm.build(model, dataset)
        if dataset.separate_documents:
            raise UserError("the teacher reads whole rows: set data.separate_documents=false")
        return DistillMaskedLMModule(self, model, dataset, TextTeacher(self.teacher, dataset, model.device))


class TextTeacher:
    """A frozen text encoder; not a module, so that it is not part of optimizer and checkpoint."""

    def __init__(self, name: str, dataset: TextDataset, device: torch.device) -> None:
        path = expand_user(name)
        model = folder.load(path, device=device) if is_model_folder(path) else load_bert(path, device)
        self.model, spec = model.requires_grad_(False), model.spec
        if not isinstance(spec, Encoder) or not isinstance(spec.stem, TokenEmbed) or spec.pool is not None:
            raise UserError(f"the teacher {name} is not a language model: it needs features at every token")
        check_tokenizer(path, dataset.tokenizer)
        if spec.stem.vocab_size < len(dataset.tokenizer):
            raise UserError(
                f"the teacher {name} embeds {spec.stem.vocab_size} tokens, its tokenizer has {len(dataset.tokenizer)}"
            )
        if spec.stem.seq_len < dataset.seq_len:
            raise UserError(
                f"the teacher {name} reads {spec.stem.seq_len} tokens, the rows have {dataset.seq_len}: "
                f"set data.seq_len={spec.stem.seq_len} or less"
            )
        self.features_spec = spec.replace(head=None).configure(seq_len=dataset.seq_len)
        """Spec of the part that is run, for its width and cost."""

    @torch.no_grad()
    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Features, b s c."""
        return self.model.forward_features(ids, mask).float()


def check_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    """Raise unless the tokenizer in a model folder maps the same tokens to the same ids."""
    other = load_tokenizer(path)
    tokens, expected = ([side.id_to_token(index) for index in range(len(side))] for side in (other, tokenizer))
    if tokens != expected:
        raise UserError(f"{path} has another vocabulary than the data: set data.tokenizer.path={path}")


class FrozenTeacher(NamedTuple):
    """A tuple, so that the model is not registered as a submodule and not part of optimizer and checkpoint."""

    model: Model
    mask_padding: bool
    """Whether the teacher was trained with masked padding."""


def load_text_teacher(name: str, dataset: LabeledTextDataset | SquadDataset, device: torch.device) -> FrozenTeacher:
    """Load a frozen teacher of the same task, and check that its classes, tokenizer and rows are those of the data."""
    classes = dataset.class_names if isinstance(dataset, LabeledTextDataset) else ()
    task, rows = ("classes", "rows") if classes else ("span", "windows")
    path = expand_user(name)
    preprocessing = read_preprocessing(path)
    if not isinstance(preprocessing, TextPreprocessing) or preprocessing.task != task:
        what, recipe = ("is not a text classifier", "sst2") if classes else ("does not answer questions", "squad1")
        raise UserError(f"the teacher {name} {what}: train one first, for example allmlp train {recipe}")
    if classes and preprocessing.class_names != classes:
        theirs, ours = ", ".join(preprocessing.class_names), ", ".join(classes)
        raise UserError(f"the teacher {name} has the classes {theirs}, the data have {ours}")
    check_tokenizer(path, dataset.tokenizer)
    seq_len, masks = preprocessing.seq_len, preprocessing.mask_padding
    if seq_len < dataset.seq_len or (seq_len > dataset.seq_len and not masks):
        raise UserError(
            f"the teacher {path} reads {seq_len} tokens{'' if masks else ', padding included'}, the {rows} have "
            f"{dataset.seq_len}: set data.seq_len={seq_len}{' or less' if masks else ''}"
        )
    return FrozenTeacher(folder.load(path, device=device).requires_grad_(False), masks)


class DistillMaskedLMModule(MaskedLMModule):
    def __init__(self, spec: DistillMaskedLM, model: Model, dataset: TextDataset, teacher: TextTeacher) -> None:
        super().__init__(spec.masked_lm, model, dataset)
        self.distill, self.teacher = spec, teacher
        self.proj = Linear(model.spec.width, teacher.features_spec.width, Init(), bias=False)

    @property
    def flops(self) -> int:
        teacher = measure(self.teacher.features_spec).macs
        return super().flops + 2 * teacher + 6 * self.seq_len * self.proj.weight.numel()

    def prepare_batches(self, parts: list[Batch], context: StepContext) -> list[tuple[Tensor, ...]]:
        """Also the number of real positions per selected token in the whole batch: micro-batches and processes count by
        their selected tokens, and all real positions of a step have equal weights.
        """
        prepared = super().prepare_batches(parts, context)
        real = torch.stack([(ids != self.pad_token_id).sum() for ids, *_ in prepared]).sum()
        selected = torch.stack([self.loss_weight(*inputs) for inputs in prepared]).sum()
        counts = torch.stack([real, selected])
        if dist.is_initialized():
            dist.all_reduce(counts)
        return [(*inputs, counts[0] / counts[1].clamp(min=1)) for inputs in prepared]

    def loss_weight(self, *inputs: Tensor) -> Tensor:
        return MaskedBatch(*inputs[1:5]).weights.sum()

    def compute_loss(self, *inputs: Tensor) -> Losses:
        ids, masked, real_per_selected = inputs[0], inputs[1:5], inputs[5:]
        batch, real = MaskedBatch(*masked), ids != self.pad_token_id
        features = self.encode(self.model, batch, ids)
        mlm_loss, metrics = token_losses(self.model, features, batch).losses()
        distance = cosine_distance(self.proj(features).float(), self.teacher(ids, real), real)
        if real_per_selected:
            distance = distance * real.sum() / (real_per_selected[0] * batch.weights.sum().clamp(min=1))
        metrics |= {"mlm_loss": mlm_loss, "agreement": 1 - distance}
        return Losses(torch.lerp(mlm_loss, distance, self.distill.alpha), metrics)


def cosine_distance(x: Tensor, y: Tensor, real: Tensor) -> Tensor:
    """1 - cos(x, y), averaged over the real positions; b s c, b s c, b s."""
    distance = 1 - F.cosine_similarity(x, y, dim=2)  # b s
    return torch.where(real, distance, 0.0).sum() / real.sum()
