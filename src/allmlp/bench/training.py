"""Training steps to benchmark: the `TrainStep` of `allmlp train`, for the models of every package."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from allmlp.bench.backends import CHUNK, Backend, PreparedBackend, memory_format
from allmlp.bench.parity import Outputs
from allmlp.bench.peers import Peer, PeerGroup
from allmlp.compilation import compile_task
from allmlp.data.dataset import LabeledImages
from allmlp.data.sampler import Batch
from allmlp.errors import UserError, lookup
from allmlp.layers.head import LMHead
from allmlp.models.encoder import Encoder, EncoderModel
from allmlp.models.huggingface import HuggingFaceText
from allmlp.models.model import Model, ModelSpec
from allmlp.optim import AdamW
from allmlp.parallel import World
from allmlp.tasks.classify import Classify
from allmlp.tasks.masked_lm import MaskedLM
from allmlp.tasks.task import StepContext, TaskModule
from allmlp.train_step import RecordedStep, TrainStep

SPECIAL = 5
"""Number of special tokens; the last of them is [MASK]."""

OPTIMIZER = AdamW(lr=0.0)
"""A learning rate of 0 does not change the time of a step, and the weights stay the same however often it is timed."""

MODES: dict[str, Callable[[TaskModule], object]] = {
    "eager": lambda task: None,
    "compiled": compile_task,
    "channels-last": compile_task,
    "cuda-graph": compile_task,  # the whole step is recorded, as in `allmlp train`
}


def is_masked_lm(spec: ModelSpec) -> bool:
    if isinstance(spec, Encoder):
        return isinstance(spec.head, LMHead) and not spec.block.causal
    return isinstance(spec, HuggingFaceText)


def num_outputs(peer_group: PeerGroup) -> int:
    """The number of classes, or of tokens in the vocabulary."""
    with torch.no_grad():
        return peer_group.first.eval()(*peer_group.first.dummy_inputs(1)).shape[-1]


def build_task(model: Model, peer_group: PeerGroup) -> TaskModule:
    """Classification for image models, masked language modeling for text models."""
    spec, given, outputs = peer_group.spec, peer_group.first.dummy_inputs(1)[0], num_outputs(peer_group)
    if spec.input_size is not None:
        colors = given.shape[1]
        images: Any = SimpleNamespace(class_names=range(outputs), mean=(0.5,) * colors, std=(0.25,) * colors)
        return Classify().build(model, images).to(model.device)
    if not is_masked_lm(spec):
        raise UserError(
            f"training steps are for image classifiers and masked language models, not for inputs of {spec.input_spec}"
        )
    special = torch.arange(outputs) < SPECIAL
    tokenizer = SimpleNamespace(
        pad_token_id=0,
        mask_token_id=SPECIAL - 1,
        special_tokens_mask=special,
        continuation_mask=torch.zeros_like(special),
    )
    texts: Any = SimpleNamespace(tokenizer=tokenizer, seq_len=given.shape[1], separate_documents=False)
    return MaskedLM(mask_padding=False).build(model, texts)  # rows are full, as in pretraining


def examples(peer_group: PeerGroup, batch: int) -> tuple[Tensor, ...]:
    """Random inputs of the step, the same for every backend."""
    model = peer_group.first
    task = build_task(model, peer_group)
    generator = torch.Generator(model.device).manual_seed(0)
    given = model.dummy_inputs(1)[0]
    options: dict[str, Any] = {"generator": generator, "device": model.device}
    if peer_group.spec.input_size is not None:
        images = torch.randint(256, (batch, *given.shape[1:]), dtype=torch.uint8, **options)
        batch_examples: Any = LabeledImages(images, torch.randint(num_outputs(peer_group), (batch,), **options))
    else:
        batch_examples = (torch.randint(SPECIAL, num_outputs(peer_group), (batch, given.shape[1]), **options),)
    return task.prepare_batch(Batch(0, 0.0, torch.arange(batch), batch_examples), StepContext(0.0, generator))


def training(peer_group: PeerGroup, name: str, inputs: tuple[Tensor, ...], precision: torch.dtype) -> Backend:
    """Weights are float32; autocast computes matrix products in `precision`."""
    package, _, mode = name.partition(" ")

    def build() -> PreparedBackend:
        layout = memory_format(package, mode)
        model = copy.deepcopy(peer_group.models[package]).to(memory_format=layout)  # type: ignore[call-overload]
        given = tuple(x.to(memory_format=layout) if x.dim() == 4 else x for x in inputs)
        task = build_task(model, peer_group).train()
        lookup(mode, MODES, "training mode")(task)
        optimizer = OPTIMIZER.build(task)
        device = inputs[0].device

        step = TrainStep(task, optimizer, World(0, 1, device), precision)
        recorded = mode == "cuda-graph" and device.type == "cuda" and precision != torch.float16
        call = partial(step, [given])

        def output() -> Outputs:
            step.backward([given])
            step.scaler.unscale_(optimizer)
            found = gradients(model)
            step.update_scale()
            optimizer.zero_grad(set_to_none=True)
            return found

        return PreparedBackend(RecordedStep(call) if recorded else call, output)

    return Backend(name, build)


def exact(peer_group: PeerGroup, package: str, inputs: tuple[Tensor, ...]) -> Outputs:
    """Gradients in float64, a few examples at a time unless BatchNorm needs the whole batch.

    Blocks are computed again in the backward pass: in float64 the activations of 96 of them do not fit into a GPU.
    """
    model = copy.deepcopy(peer_group.models[package])
    if isinstance(model, EncoderModel):
        model.set_grad_checkpointing()
    task = build_task(model, peer_group).double().train()
    batch = max(len(tensor) for tensor in inputs if tensor.dim())
    whole = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    rows = batch if whole else CHUNK
    for start in range(0, batch, rows):
        piece = [tensor[start : start + rows] if tensor.dim() else tensor for tensor in inputs]
        (task.compute_loss(*piece).total * (min(rows, batch - start) / batch)).backward()
    return gradients(model)


def gradients(model: Model) -> Outputs:
    """All gradients as one vector, ordered by our names: those of some biases alone are nothing but rounding."""
    by_name = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    by_name = model.to_native(by_name) if isinstance(model, Peer) else by_name
    return [torch.cat([by_name[name].detach().flatten().float() for name in sorted(by_name)])]
