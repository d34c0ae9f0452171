"""Masked language modelling with help: a teacher that reads the whole row, a table of words to start from."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from allmlp.data.corpus import Texts
from allmlp.data.source import Splits
from allmlp.data.tokenizer import Tokenizer, load
from allmlp.errors import UserError
from allmlp.layers.init import Init
from allmlp.layers.linear import Linear
from allmlp.layers.stem import Tokens
from allmlp.models.cost import measure
from allmlp.models.encoder import Encoder
from allmlp.models.model import Model, ModelSpec
from allmlp.spec import Rate
from allmlp.tasks.mlm import MaskedLm, MaskedLmModule, mean_answer
from allmlp.tasks.task import Losses, Task, TaskModule
from allmlp.weights import folder
from allmlp.weights.bert import load_bert, read_config, start_embeddings


class DistillText(Task):
    """The loss of `masking`, and with weight `share` the distance from the teacher's features.

        L = (1 - a) L_masked + a mean over real positions i of (1 - cos(P X[i], T[i]))

    X are the student's features of the masked row and T the frozen teacher's of the row itself. P is a learned linear
    map from the student's width to the teacher's; it belongs to the task and is not saved with the model. `teacher` is
    a Hugging Face BERT's folder, or one of ours with a language model; with share=0 none is needed. With `embeddings`,
    a BERT's folder, the table of words starts from that model's. Both must have the tokenizer of the data.
    """

    reads: ClassVar[type[Splits]] = Texts
    teacher: str
    masking: MaskedLm = MaskedLm()
    share: Rate = 0.5
    embeddings: str = ""

    def check(self) -> None:
        if self.share and not self.teacher:
            raise UserError("DistillText.teacher is empty: name a model's folder, or set share=0 to learn without one")

    def fit(self, model: ModelSpec, dataset: Texts) -> ModelSpec:
        return self.masking.fit(model, dataset)

    def build(self, model: Model, dataset: Texts) -> TaskModule:
        if self.embeddings:
            same_words(Path(self.embeddings), dataset.tokenizer)
            start_embeddings(model, self.embeddings)
        if not self.share:
            return self.masking.build(model, dataset)
        return DistillTextModule(self, model, dataset, TextTeacher(self.teacher, dataset, model.device))

    def judge(self, model: Model, dataset: Texts) -> TaskModule:
        return self.masking.judge(model, dataset)


class TextTeacher:
    """A frozen encoder of text. It is no module, so that neither optimiser nor checkpoint ever sees it."""

    def __init__(self, name: str, dataset: Texts, device: torch.device) -> None:
        place = Path(name).expanduser()
        self.model = open_teacher(place, device).requires_grad_(False)
        spec = self.model.spec
        if not isinstance(spec, Encoder) or not isinstance(spec.stem, Tokens) or spec.pool is not None:
            raise UserError(f"the teacher {name} is not a language model; name one that answers at every token")
        same_words(place, dataset.tokenizer)
        if spec.stem.vocabulary < len(dataset.tokenizer):
            raise UserError(f"the teacher {name} knows {spec.stem.vocabulary} words, its tokenizer has more")
        if spec.stem.length < dataset.length:
            raise UserError(
                f"the teacher {name} reads {spec.stem.length} tokens, the rows have {dataset.length}; "
                f"set data.length={spec.stem.length} or less"
            )
        self.features = spec.replace(head=None).configure(length=dataset.length)
        """What runs here, for the cost of it."""

    @torch.no_grad()
    def __call__(self, ids: Tensor, real: Tensor) -> Tensor:
        """Features of rows whose real tokens are marked, b s c."""
        return self.model.forward_features(ids, real).float()


def open_teacher(place: Path, device: torch.device) -> Model:
    """One of our own folders, which name a kind, or Hugging Face's."""
    return folder.load(place, device).float() if "kind" in read_config(place) else load_bert(place, device)


def same_words(place: Path, tokenizer: Tokenizer) -> None:
    """The tokenizer beside a model must have the same words at the same numbers."""
    other = load(place)
    if len(other) != len(tokenizer) or any(other.word(n) != tokenizer.word(n) for n in range(len(tokenizer))):
        raise UserError(f"{place} has other words than the data; set data.tokenize.path={place}")


class DistillTextModule(MaskedLmModule):
    def __init__(self, spec: DistillText, model: Model, dataset: Texts, teacher: TextTeacher) -> None:
        super().__init__(spec.masking, model, dataset)
        self.distill, self.teacher = spec, teacher
        self.project = Linear(model.spec.width, teacher.features.width, Init(), bias=False)

    @property
    def flops(self) -> int:
        return super().flops + 2 * measure(self.teacher.features).macs + 6 * self.length * self.project.weight.numel()

    def learn(self, *inputs: Tensor) -> Losses:
        ids, draws = inputs
        real = ids != self.pad
        asked = self.spec.masking.apply(ids, draws, self.tables)
        features = self.read(self.model, asked, ids)
        masked, accuracy = mean_answer(self.model, features, asked)
        taught = distance(self.project(features).float(), self.teacher(ids, real), real)
        shown = {"accuracy": accuracy, "masked": masked, "agreement": 1 - taught}
        return Losses(torch.lerp(masked, taught, self.distill.share), shown)


def distance(mapped: Tensor, known: Tensor, real: Tensor) -> Tensor:
    """1 - cos, averaged over the real positions; b s c, b s c, b s."""
    apart = 1 - F.cosine_similarity(mapped, known, dim=2)  # b s
    return torch.where(real, apart, 0.0).sum() / real.sum()
