"""Runs small enough to repeat many times: 64 random images, a model with a few thousand weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from allmlp.data.augment import Augment, HorizontalFlip, Mixup, MultiCrop, Translate
from allmlp.data.corpus import TextDataset, TokenBatch
from allmlp.data.dataset import Data, ImageDataset, InMemory
from allmlp.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from allmlp.layers import BatchNorm
from allmlp.lora import Lora
from allmlp.models.gmlp import gmlp_text
from allmlp.models.resmlp import resmlp
from allmlp.optim import AdamW, Muon
from allmlp.run import Budget, Run
from allmlp.schedule import CosineSchedule
from allmlp.spec import override
from allmlp.tasks.classify import Classify
from allmlp.tasks.dino import Dino
from allmlp.tasks.masked_lm import MaskedLM


class Blobs(Data):
    """Images whose brightest quarter is their class."""

    examples: int = 64
    spoiled: bool = False
    """With NaN in one image."""

    def load(self) -> ImageDataset:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 60, (self.examples + 32, 1, 8, 8), generator=generator, dtype=torch.uint8)
        labels = torch.arange(self.examples + 32) % 4
        for image, label in zip(images, labels.tolist()):
            row, column = divmod(label, 2)
            image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 150
        pixels = images.float() / 255 if self.spoiled else images
        if self.spoiled:
            pixels[5] = float("nan")
        train, test = (
            InMemory(pixels[: self.examples], labels[: self.examples]),
            InMemory(images[self.examples :], labels[self.examples :]),
        )
        return ImageDataset(train, test, ("a", "b", "c", "d"), (0.3,), (0.25,))


def small(**changes: Any) -> Run:
    """Twelve steps with augmentation, mixing, stochastic depth and EMA."""
    run = Run(
        model=resmlp(2, 16, 0.1, patch_size=4, img_size=8).configure(in_chans=1, drop_path=0.2),
        task=Classify(label_smoothing=0.1, augment=Augment((HorizontalFlip(), Translate(1))), mix=Mixup()),
        data=Blobs(),
        batch_size=24,
        budget=Budget(steps=12),
        optim=AdamW(lr=1e-2),
        schedule=CosineSchedule(warmup_fraction=0.1),
        max_grad_norm=1.0,
        ema_decay=0.9,
        log_every=1,
        eval_every=6,
        save_every=4,
    )
    return run.replace(**changes)


def quiet() -> Run:
    """Without what depends on the number of processes: mixing, and torch's global random numbers."""
    run = small()
    return run.replace(model=run.model.configure(drop_path=0.0), task=run.task.replace(mix=None))


def normalized() -> Run:
    """BatchNorm, whose running statistics are buffers."""
    return override(quiet(), "model.block.norm", BatchNorm())


def orthogonalized() -> Run:
    """Muon, which needs whole matrices, where FSDP has parts of them."""
    return quiet().replace(optim=Muon(lr=1e-2, weight_decay=0.1))


def adapted() -> Run:
    """Low-rank adapters on the model in the folder $START."""
    return quiet().replace(init_from=os.environ["START"], lora=Lora(rank=2))


def selfsupervised() -> Run:
    """DINO on the blobs, with small crops of a quarter of the size."""
    run = small()
    sizes = {"global_size": (8, 8), "local_size": (4, 4)}
    crops = MultiCrop(num_local=3, global_scale=(0.5, 1.0), local_scale=(0.2, 0.5), **sizes)
    task = Dino(crops, out_dim=32, hidden_dim=16, bottleneck_dim=8)
    model = run.model.configure(drop_path=0.0, patch_size=2)
    return run.replace(task=task, model=model, ema_decay=None, optim=AdamW(lr=3e-3))


class Counting(Data):
    """Rows of consecutive digits, with a fixed vocabulary: the same in every process."""

    def load(self) -> TextDataset:
        tokenizers = pytest.importorskip("tokenizers")
        words = {word: number for number, word in enumerate((*SPECIAL_TOKENS, *"0123456789"))}
        plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
        plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        plain.add_special_tokens(list(SPECIAL_TOKENS))
        tokenizer = Tokenizer(plain)
        rows = [
            [tokenizer.cls_token_id, *(5 + (start + i) % 10 for i in range(10)), tokenizer.sep_token_id]
            for start in range(48)
        ]
        ids = torch.tensor(rows, dtype=torch.int32)
        return TextDataset(
            InMemory(ids, batch_type=TokenBatch), InMemory(ids[:16], batch_type=TokenBatch), tokenizer, 12
        )


def language() -> Run:
    """A masked language model on the digits."""
    run = small()
    return run.replace(model=gmlp_text(2, 16, 32), task=MaskedLM(), data=Counting(), ema_decay=None)


def one_special_token(text: str, file: Path) -> None:
    """Write a tokenizer as GPT-2 has it: one token begins, ends, separates and pads."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    words.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet, "show_progress": False}
    words.train_from_iterator([text] * 4, tokenizers.trainers.BpeTrainer(vocab_size=300, **options))
    words.save(str(file))
