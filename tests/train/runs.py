"""A run small enough to repeat many times: 64 random pictures, a model of a few thousand weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allmlp.data.corpus import Text, Texts
from allmlp.data.images import Augment, Flip, Mix, MultiCrop, Translate
from allmlp.data.source import Data, Dataset, Resident
from allmlp.data.tokenizer import SPECIAL, Tokenizer
from allmlp.models.gmlp import gmlp_text
from allmlp.models.resmlp import resmlp
from allmlp.optim import AdamW
from allmlp.run import Budget, Cadence, Run
from allmlp.schedule import Cosine
from allmlp.tasks.classify import Classify
from allmlp.tasks.dino import Dino
from allmlp.tasks.mlm import MaskedLm


class Blobs(Data):
    """Pictures whose brightest quarter is their class."""

    examples: int = 64
    spoiled: bool = False
    """With one picture that is not a number."""

    def open(self) -> Dataset:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 60, (self.examples + 32, 1, 8, 8), generator=generator, dtype=torch.uint8)
        labels = torch.arange(self.examples + 32) % 4
        for image, label in zip(images, labels.tolist()):
            row, column = divmod(label, 2)
            image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 150
        pictures = images.float() / 255 if self.spoiled else images
        if self.spoiled:
            pictures[5] = float("nan")
        train, test = (
            Resident(pictures[: self.examples], labels[: self.examples]),
            Resident(images[self.examples :], labels[self.examples :]),
        )
        return Dataset(train, test, ("a", "b", "c", "d"), (0.3,), (0.25,))


def small(**changes: Any) -> Run:
    """Twelve steps with everything random switched on: augmentation, mixing, stochastic depth, an average."""
    run = Run(
        model=resmlp(2, 16, 0.1, patch=4, image=8).configure(in_channels=1, drop_path=0.2),
        task=Classify(smoothing=0.1, augment=Augment((Flip(), Translate(1))), mix=Mix()),
        data=Blobs(),
        batch=24,
        budget=Budget(steps=12),
        optim=AdamW(lr=1e-2),
        schedule=Cosine(warmup=0.1),
        clip=1.0,
        ema=0.9,
        cadence=Cadence(log=1, evaluate=6, save=4),
    )
    return run.replace(**changes)


def quiet() -> Run:
    """Without what depends on the other examples of a process's share: mixing, and torch's own random numbers."""
    run = small()
    return run.replace(model=run.model.configure(drop_path=0.0), task=run.task.replace(mix=None))


def selfsupervised() -> Run:
    """DINO on the blobs, with small crops of a quarter of the size."""
    run = small()
    crops = MultiCrop(local=3, global_size=(8, 8), local_size=(4, 4), global_scale=(0.5, 1.0), local_scale=(0.2, 0.5))
    task = Dino(crops, outputs=32, hidden=16, bottleneck=8)
    model = run.model.configure(drop_path=0.0, patch=2)
    return run.replace(task=task, model=model, ema=None, optim=AdamW(lr=3e-3))


class Counting(Data):
    """Rows of digits that count on, with a vocabulary written down: the same in every process."""

    def open(self) -> Texts:
        tokenizers = pytest.importorskip("tokenizers")
        words = {word: number for number, word in enumerate((*SPECIAL, *"0123456789"))}
        plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
        plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        plain.add_special_tokens(list(SPECIAL))
        tokenizer = Tokenizer(plain)
        rows = [[tokenizer.first, *(5 + (start + i) % 10 for i in range(10)), tokenizer.last] for start in range(48)]
        ids = torch.tensor(rows, dtype=torch.int32)
        return Texts(Resident(ids, kind=Text), Resident(ids[:16], kind=Text), tokenizer, 12)


def language() -> Run:
    """A masked language model on the digits."""
    run = small()
    return run.replace(model=gmlp_text(2, 16, 32), task=MaskedLm(), data=Counting(), ema=None)
