"""Attention maps of a model for an input, and statistics of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from allmlp.analysis.module_path import branch, module_path
from allmlp.analysis.toeplitz import Grid
from allmlp.analysis.token_filters import distances
from allmlp.data.parallel_corpus import source_ids
from allmlp.data.tokenizer import Tokenizer
from allmlp.layers.pool import FirstTokenPool
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoderModel
from allmlp.models.external import ExternalModel
from allmlp.models.model import Model, ModelSpec
from allmlp.tasks.translate import translate


class AttentionMap(NamedTuple):
    """Attention weights of one layer."""

    name: str
    stack: str
    block: int | None
    branch: str
    """token for self-attention, cross for attention to the encoder, channel for the tiny attention of aMLP, pool for
    class attention."""
    weights: Tensor
    """b h s t, rows sum to 1; of class attention b h 1 (1 + t), the class token first."""


class TextInput(NamedTuple):
    """A text as the model reads it."""

    inputs: tuple[Tensor, ...]
    """Token ids, 1 s; for an encoder-decoder those of the source and of the target."""
    read: list[str]
    """The tokens of the text."""
    predicted: list[str]
    """The tokens that a decoder predicts at each position; empty for an encoder."""


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers with a method `attention_weights`, of the arguments of `forward`, from the first to the last."""
    if isinstance(model, ExternalModel):
        return {}
    return {name: module for name, module in model.named_modules() if hasattr(module, "attention_weights")}


def attention_maps(model: Model, *inputs: Tensor, **named: Tensor) -> list[AttentionMap]:
    """The maps of every attention layer, in the order of computation."""
    maps: list[AttentionMap] = []

    def hook_for(name: str) -> Any:
        def hook(module: Any, given: tuple[Any, ...]) -> None:
            weights = module.attention_weights(*given).cpu()
            maps.append(AttentionMap(name, *module_path(name), branch(name), weights))

        return hook

    with ExitStack() as stack, torch.inference_mode():
        for name, module in attention_layers(model).items():
            stack.enter_context(module.register_forward_pre_hook(hook_for(name)))
        model(*inputs, **named)
    return maps


def text_input(model: Model, tokenizer: Tokenizer, text: str) -> TextInput:
    """A text with its special tokens, cut to the model's length; a translation model reads its own translation too."""

    def rows(*several: list[int]) -> tuple[Tensor, ...]:
        return tuple(torch.tensor([ids], device=model.device) for ids in several)

    def names(ids: list[int]) -> list[str]:
        return [tokenizer.token_text(number) for number in ids]

    (ids,), start, end = tokenizer.encode([text]), tokenizer.cls_token_id, tokenizer.sep_token_id
    if isinstance(model, EncoderDecoderModel):
        source = source_ids(ids, tokenizer, model.spec.encoder.stem.tokens)
        (translated,) = tokenizer.encode(translate(model, tokenizer, [text]))
        target = [start, *translated][: model.spec.decoder.stem.tokens]
        return TextInput(rows(source, target), names(source), names([*target[1:], end]))
    assert isinstance(model.spec, Encoder), "a network of another package has no tokenizer"
    length = model.spec.stem.tokens
    ids = [start, *ids][:length] if model.spec.block.causal else [start, *ids[: length - 2], end]
    return TextInput(rows(ids), names(ids), [])


def entropy(weights: Tensor) -> Tensor:
    """The mean entropy of the rows in nats, per head: from b h s t to h.

    entropy = -sum_j a[i, j] log a[i, j], mean over i
    """
    return torch.special.entr(weights).sum(-1).mean((0, 2))


def largest_entropy(weights: Tensor) -> float:
    """The entropy if every query attended equally to all tokens visible to it."""
    return float((weights > 0).sum(-1).double().log().mean())


def mean_distance(weights: Tensor, grid: Grid | None) -> Tensor:
    """The mean distance of attention, in tokens or patches, per head: from b h s s to h (ViT, figure 7).

        distance = sum_j a[i, j] |i - j| / sum_j a[i, j], mean over i

    Class tokens, which have no position, are left out on both sides.
    """
    if grid is not None:
        weights = weights[..., -grid[0] * grid[1] :, -grid[0] * grid[1] :]
    weights = weights.double()
    reached = (weights * distances(weights.shape[-1], grid).to(weights.device)).sum(-1)
    return (reached / weights.sum(-1).clamp(min=1e-12)).mean((0, 2))


def rollout(layers: list[Tensor], class_layers: Sequence[Tensor] = ()) -> Tensor:
    """Attention rollout, the contribution of each input token to each output token: from b h s s to b s s.

        R_l = (mean_h A_l + I) / 2 R_{l-1},   R_0 = I

    Source: Abnar and Zuidema, 2020. The identity stands for the skip connection; values and MLPs are left out. With
    layers of class attention after them, b h 1 (1 + s), the contribution to the class token: b 1 s.
    """
    identity = torch.eye(layers[0].shape[-1], dtype=layers[0].dtype, device=layers[0].device)
    total = identity.expand(layers[0].shape[0], -1, -1)
    for weights in layers:
        total = (weights.mean(1) + identity) / 2 @ total
    if not class_layers:
        return total
    row = torch.zeros_like(total[:, :1])
    for weights in class_layers:
        kept, read = weights.mean(1).tensor_split([1], dim=-1)
        row = ((kept + 1) * row + read @ total) / 2
    return row


def read_by_output(maps: Tensor, spec: ModelSpec) -> Tensor:
    """The row of the maps (... s t) that the output is computed from: ... t.

    The class token's if the output is pooled from it, the last token's of a causal model, otherwise the mean row.
    """
    if isinstance(spec, Encoder) and isinstance(spec.pool, FirstTokenPool):
        return maps[..., 0, :]
    return maps[..., -1, :] if isinstance(spec, Encoder) and spec.block.causal else maps.mean(-2)


def alignment(maps: list[AttentionMap]) -> Tensor:
    """The attention of the decoder to the source, mean over blocks and heads: b s m."""
    return torch.stack([one.weights.mean(1) for one in maps if one.branch == "cross"]).mean(0)
