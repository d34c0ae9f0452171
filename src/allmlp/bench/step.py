"""The training step: forward, backward, optimiser, made of what `allmlp train` is made of, for every package alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from allmlp.bench.agree import Parts
from allmlp.bench.peers import Peer, Subject
from allmlp.bench.sides import CHUNK, Entry, Side
from allmlp.data.order import Step
from allmlp.data.source import Batch
from allmlp.errors import UserError, lookup
from allmlp.graph import Recorded
from allmlp.layers.head import Vocabulary
from allmlp.models.encoder import Encoder
from allmlp.models.huggingface import HuggingFaceText
from allmlp.models.model import Model, ModelSpec
from allmlp.optim import AdamW
from allmlp.tasks.classify import Classify
from allmlp.tasks.mlm import MaskedLm
from allmlp.tasks.task import Moment, TaskModule

SPECIAL = 5
"""Tokens that stand for no word; the last of them hides one."""

OPTIMISER = AdamW(lr=0.0)
"""With a rate of 0 a step takes as long, and the weights stay where they are, however often it is timed."""

MODES: dict[str, Callable[[TaskModule], object]] = {
    "eager": lambda task: None,
    "compiled": lambda task: task.quicken(graphs=False),
    "graphs": lambda task: task.quicken(graphs=False),  # and the whole step is recorded, as `allmlp train` does
}


def is_masked_lm(spec: ModelSpec) -> bool:
    if isinstance(spec, Encoder):
        return isinstance(spec.head, Vocabulary) and not spec.block.causal
    return isinstance(spec, HuggingFaceText)


def answers(subject: Subject) -> int:
    """Classes, or words."""
    with torch.no_grad():
        return subject.first.eval()(*subject.first.example(1)).shape[-1]


def build_task(model: Model, subject: Subject) -> TaskModule:
    """Classification for what reads pictures, masked language modelling for what reads text."""
    spec, given, outputs = subject.spec, subject.first.example(1)[0], answers(subject)
    if spec.image_size is not None:
        colours = given.shape[1]
        pictures: Any = SimpleNamespace(classes=range(outputs), mean=(0.5,) * colours, std=(0.25,) * colours)
        return Classify().build(model, pictures).to(model.device)
    if not is_masked_lm(spec):
        raise UserError(
            f"only image classifiers and masked language models are trained here, not what reads {spec.reads}"
        )
    special = torch.arange(outputs) < SPECIAL
    tokenizer = SimpleNamespace(pad=0, mask=SPECIAL - 1, special=special, continues=torch.zeros_like(special))
    texts: Any = SimpleNamespace(tokenizer=tokenizer, length=given.shape[1])
    return MaskedLm(mask_padding=False).build(model, texts)  # rows are full, as in pretraining


def examples(subject: Subject, batch: int) -> tuple[Tensor, ...]:
    """What the step computes from, random and the same for every side."""
    model = subject.first
    task = build_task(model, subject)
    generator = torch.Generator(model.device).manual_seed(0)
    given = model.example(1)[0]
    place: dict[str, Any] = {"generator": generator, "device": model.device}
    if subject.spec.image_size is not None:
        images = torch.randint(256, (batch, *given.shape[1:]), dtype=torch.uint8, **place)
        found: Any = Batch(images, torch.randint(answers(subject), (batch,), **place))
    else:
        found = (torch.randint(SPECIAL, answers(subject), (batch, given.shape[1]), **place),)
    return task.prepare(Step(0, 0.0, torch.arange(batch), found), Moment(0.0, generator))


def training(subject: Subject, name: str, inputs: tuple[Tensor, ...], precision: torch.dtype) -> Side:
    """Weights in float32; where `precision` is another, the products are computed in that by autocast."""
    package, _, mode = name.partition(" ")

    def build() -> Entry:
        model = copy.deepcopy(subject.models[package])
        task = build_task(model, subject).train()
        lookup(mode, MODES, "mode of training")(task)
        optimizer = OPTIMISER.build(task)
        device = inputs[0].device

        def descend() -> Tensor:
            with torch.autocast(device.type, precision, enabled=precision != torch.float32):
                losses = task.learn(*inputs)
            losses.total.backward()
            return losses.total.detach()

        def step() -> Tensor:
            loss = descend()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        def answer() -> Parts:
            descend()
            found = gradients(model)
            optimizer.zero_grad(set_to_none=True)
            return found

        recorded = mode == "graphs" and device.type == "cuda"
        return Entry(Recorded(step) if recorded else step, answer)

    return Side(name, build)


def exact(subject: Subject, package: str, inputs: tuple[Tensor, ...]) -> Parts:
    """The gradients in float64, of a few examples at a time unless a batch norm sees all."""
    model = copy.deepcopy(subject.models[package])
    task = build_task(model, subject).double().train()
    batch = max(len(tensor) for tensor in inputs if tensor.dim())
    whole = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    rows = batch if whole else CHUNK
    for start in range(0, batch, rows):
        piece = [tensor[start : start + rows] if tensor.dim() else tensor for tensor in inputs]
        (task.learn(*piece).total * (min(rows, batch - start) / batch)).backward()
    return gradients(model)


def gradients(model: Model) -> Parts:
    """All of them as one part, in the order of our names: alone, those of some biases are nothing but rounding."""
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    found = model.home(found) if isinstance(model, Peer) else found
    return [torch.cat([found[name].detach().flatten().float() for name in sorted(found)])]
