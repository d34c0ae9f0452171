"""Activation memory: tensors that a training step saves for its backward pass, traced from the model itself.

The model runs on fake tensors, which have shapes and dtypes but no memory, so no GPU is needed. The saved tensors
depend on how the step runs:

    eager       the tensors that autograd saves, each storage counted once
    compiled    the tensors that the min-cut partitioner of torch.compile passes from the forward to the backward graph
                of the whole step, or of every block and of the rest

All blocks of a stack are equal: each further block adds as much as the second one. Saved bytes are linear in the batch
size; the constant part are copies of weights (made by autocast, or matrices expanded from fewer weights).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from operator import sub
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from allmlp import kernels
from allmlp.compilation import Region
from allmlp.errors import UserError
from allmlp.layers import LMHead
from allmlp.models.encoder import Encoder, EncoderModel
from allmlp.models.model import Model, ModelSpec
from allmlp.models.series_encoder import SeriesEncoderModel
from allmlp.spec import override
from allmlp.tasks.task import Losses, TaskModule

FLOAT32, BFLOAT16 = 4, 2
"""Bytes."""
MASKED = 0.15
"""Fraction of the tokens that a masked language model predicts; its head runs for these only."""
BATCH_SIZE = 64
"""Examples in a trace. The partitioner compares tensors by size, so a typical batch is traced and scaled."""
FLOAT32_OPS = """
    __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cdist cosh
    cosine_embedding_loss cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 group_norm
    hinge_embedding_loss kl_div l1_loss layer_norm log log10 log1p log2 log_softmax margin_ranking_loss mse_loss
    multi_margin_loss multilabel_margin_loss nll_loss norm normalize pdist poisson_nll_loss pow prod reciprocal renorm
    rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softmax softmin softplus sum tan triplet_margin_loss
""".split()  # noqa: SIM905
"""Ops that autocast runs in float32 on a GPU; torch.amp documents them as "CUDA ops that can autocast to float32"."""
IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class Execution(NamedTuple):
    """Execution of a training step, as far as it affects the saved tensors."""

    device: Literal["cuda", "cpu"] = "cuda"
    bfloat16: bool = True
    """Autocast to bfloat16."""
    compiled: Region | None = None
    """The part compiled as one graph; None for eager mode."""
    fused_kernels: bool = True
    """On a GPU: train with the fused ops of `allmlp.kernels`."""
    bfloat16_weights: bool = False
    """Weights are in bfloat16, as FSDP2 gathers them, so that autocast makes no copies."""


class Activations(NamedTuple):
    """Bytes per example that are saved for the backward pass."""

    saved: int
    """At the end of the forward pass."""
    checkpointed: int
    """The same with gradient checkpointing, which saves only the input of each block."""
    head: int
    """The part of `saved` that comes after the last block."""
    block: int
    """Saved by one block; the largest if there are several stacks."""
    largest: int
    """The largest single tensor up to the last block."""
    logits: int
    """Logits in float32."""
    weight_copies: int
    """Bytes per batch: weights in bfloat16, or expanded to a matrix."""


class Trace(NamedTuple):
    """Bytes per batch of `BATCH_SIZE` examples."""

    saved: int
    constant: int
    """Saved at any batch size; not part of `saved`."""
    stem: int
    """Saved before the first block."""
    largest: int
    block_inputs: int
    logits: int


@cache
def activations(spec: ModelSpec, execution: Execution = Execution()) -> Activations:
    """Activations saved by a training step, for examples of full size."""
    shallow, parts = spec.shallow()
    stacks = {path: numbers for path, numbers in parts.items() if "blocks." in path}
    specs = [shallow, *(deepen(shallow, path) for path in stacks)]
    try:
        base, *deeper = (trace(each, execution) for each in specs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserError(f"cannot trace {type(spec).__name__}: its forward pass depends on values ({error})") from None
    blocks, depths = [Trace(*map(sub, each, base)) for each in deeper], list(map(len, stacks.values()))

    def outside_blocks(field: str) -> int:
        return getattr(base, field) - sum(getattr(block, field) for block in blocks)

    def in_blocks(field: str) -> int:
        return sum(depth * getattr(block, field) for depth, block in zip(depths, blocks, strict=True))

    outside, inputs = outside_blocks("saved"), outside_blocks("block_inputs") + in_blocks("block_inputs")
    return Activations(
        saved=(outside + in_blocks("saved")) // BATCH_SIZE,
        checkpointed=(outside + inputs) // BATCH_SIZE,
        head=max(outside - base.stem, 0) // BATCH_SIZE,
        block=max((block.saved for block in blocks), default=0) // BATCH_SIZE,
        largest=max(each.largest for each in (base, *deeper)) // BATCH_SIZE,
        logits=base.logits // BATCH_SIZE,
        weight_copies=outside_blocks("constant") + in_blocks("constant"),
    )


def deepen(shallow: ModelSpec, path: str) -> ModelSpec:
    """Add a second block to the stack or stage of the block at `path`."""
    stack, stage = path.split("blocks.")
    return override(shallow, f"{stack}depth" if stage == "0" else f"{stack}stages.{int(stage) - 1}.depth", 2)


def trace(spec: ModelSpec, execution: Execution) -> Trace:
    """Trace one step of `spec` on fake tensors."""
    with torch.device("meta"):
        model = spec.build().train()
        inputs, twice = model.dummy_inputs(BATCH_SIZE), model.dummy_inputs(2 * BATCH_SIZE)
    step = MeasuredLoss(model)
    blocks = [
        block
        for stack in model.modules()
        if isinstance(stack, (EncoderModel, SeriesEncoderModel))
        for block in stack.blocks
    ]
    with FakeTensorMode(allow_non_fake_inputs=True):
        dtype = torch.bfloat16 if execution.bfloat16_weights else None
        state = {name: fake(weight, dtype) for name, weight in step.named_parameters()}
        state |= {name: fake(buffer) for name, buffer in step.named_buffers()}
        batch = [fake(each) for each in inputs]
        small, calls = saved_by_autograd(step, state, batch, execution, blocks)
        if execution.compiled:
            graphs = calls if execution.compiled == "blocks" else []
            saved, constant = saved_by_compiler(step, state, batch, execution, graphs)
        else:
            large, _ = saved_by_autograd(step, state, [fake(each) for each in twice], execution, blocks)
            saved, constant = sum(large) - sum(small), 2 * sum(small) - sum(large)
    logits = FLOAT32 * step.sizes[0]
    stem, body = (calls[0].saved_before, calls[-1].saved_after) if calls else (0, len(small))
    block_inputs = sum(call.inputs[0].nbytes for call in calls)
    return Trace(saved, constant, sum(small[:stem]), max(small[:body]), block_inputs, logits)


def fake(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="cpu", requires_grad=tensor.requires_grad)


class TrainingLoss(TaskModule):
    """The cross-entropy of a model's outputs, computed as in training; every target is class 0."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def compute_loss(self, *inputs: Tensor) -> Losses:
        logits = self.logits(*inputs).float().flatten(0, -2)
        targets = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        return Losses(F.cross_entropy(logits, targets), {})

    def logits(self, *inputs: Tensor) -> Tensor:
        """Logits; the head of a masked language model runs on the masked tokens only."""
        if not isinstance(self.model, EncoderModel):
            return self.model(*inputs)
        features, count = self.model.forward_features(*inputs), head_tokens(self.model.spec)
        if self.model.pool is None and count < features.shape[1]:
            positions = torch.arange(count, device=features.device).view(1, -1, 1)
            features = features.gather(1, positions.expand(len(features), -1, features.shape[2]).contiguous())
        return self.model.forward_head(features)


class MeasuredLoss(TrainingLoss):
    """Records the number of logits of each pass."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.sizes: list[int] = []

    def logits(self, *inputs: Tensor) -> Tensor:
        output = super().logits(*inputs)
        self.sizes.append(output.numel())
        return output


def head_tokens(spec: Encoder) -> int:
    """Number of tokens per example on which the head runs: one pooled vector, the masked tokens, or all."""
    if spec.pool is not None:
        return 1
    masked = isinstance(spec.head, LMHead) and not spec.block.causal
    return max(round(MASKED * spec.stem.tokens), 1) if masked else spec.stem.tokens


class BlockCall(NamedTuple):
    """A call of a block in the forward pass."""

    block: nn.Module
    inputs: tuple[Any, ...]
    output: Tensor
    saved_before: int
    """Number of tensors that autograd had saved when the block was called."""
    saved_after: int


def saved_by_autograd(
    step: nn.Module, state: dict[str, Tensor], inputs: list[Tensor], execution: Execution, blocks: list[nn.Module]
) -> tuple[list[int], list[BlockCall]]:
    """Bytes of each saved tensor, and the calls of the blocks."""
    weights, saved = {storage(weight) for weight in state.values()}, {}
    before: list[int] = []
    calls: list[BlockCall] = []

    def pack(tensor: Tensor) -> Tensor:
        if storage(tensor) not in weights:
            saved[storage(tensor)] = tensor
        return tensor

    def leave(block: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        calls.append(BlockCall(block, args, output, before[-1], len(saved)))

    hooks = [block.register_forward_pre_hook(lambda *_: before.append(len(saved))) for block in blocks]
    hooks += [block.register_forward_hook(leave) for block in blocks]
    with saved_tensors_hooks(pack, lambda tensor: tensor), simulate(execution):
        functional_call(step, state, tuple(inputs))
    for hook in hooks:
        hook.remove()
    return [tensor.untyped_storage().nbytes() for tensor in saved.values()], calls


def saved_by_compiler(
    step: nn.Module, state: dict[str, Tensor], inputs: list[Tensor], execution: Execution, calls: list[BlockCall]
) -> tuple[int, int]:
    """Bytes that depend on the batch, and bytes that depend on weights only; each of `calls` is a separate graph."""
    paths = {module: path for path, module in step.named_modules()}
    graphs: list[tuple[nn.Module, dict[str, Tensor], tuple[Any, ...]]] = []
    for call in calls:
        start = f"{paths[call.block]}."
        block_weights = {name.removeprefix(start): weight for name, weight in state.items() if name.startswith(start)}
        graphs.append((call.block, block_weights, tree_map_only(Tensor, as_input, call.inputs)))
    with ExitStack() as stack:
        for call in calls:
            skip = partial(convert, dtype=call.output.dtype)
            stack.enter_context(patch.object(call.block, "forward", skip))
        rest = saved_by_graph(step, state, tuple(inputs), execution)
    parts = [rest, *(saved_by_graph(*graph, execution) for graph in graphs)]
    return sum(batch for batch, _ in parts), sum(constant for _, constant in parts)


def as_input(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def convert(x: Tensor, *_: Any, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def saved_by_graph(
    module: nn.Module, state: dict[str, Tensor], inputs: tuple[Any, ...], execution: Execution
) -> tuple[int, int]:
    """Bytes that depend on the batch, and bytes that depend on weights only."""
    # Slow to import, and needed for compiled runs only.
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    activations: dict[int, int] = {}
    copies: dict[int, int] = {}

    def partition(joint: Any, examples: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(
            joint,
            examples,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=list(range(len(state))),  # saving a weight itself is free
        )
        *nodes, output = forward.graph.nodes
        from_weights = set([node for node in nodes if node.op == "placeholder"][: len(state)])
        weights = {storage(node.meta["val"]) for node in from_weights}
        for node in nodes:
            if node.all_input_nodes and from_weights.issuperset(node.all_input_nodes):
                from_weights.add(node)
        for node in output.args[0][num_fwd_outputs:]:
            tensor = node.meta["val"]
            if isinstance(tensor, Tensor) and storage(tensor) not in weights:
                kind = copies if node in from_weights else activations
                kind[storage(tensor)] = tensor.untyped_storage().nbytes()
        return forward, backward

    def run(weights: list[Tensor], *inputs: Any) -> Any:
        with simulate(execution):
            return functional_call(module, dict(zip(state, weights, strict=True)), inputs)

    keep: Callable[..., Any] = lambda graph, _: graph  # noqa: E731
    aot_function(run, keep, partition_fn=partition, decompositions=select_decomp_table())([*state.values()], *inputs)
    return sum(activations.values()), sum(copies.values())


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def simulate(execution: Execution) -> Iterator[None]:
    """Run fake CPU tensors through the code path that real tensors take on the device.

    Fake CUDA tensors would do the same without this, but their autograd aborts in CPU builds of PyTorch.
    """
    cuda = execution.device == "cuda"
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", cuda and execution.bfloat16)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=execution.bfloat16),
            SimulatedCuda(execution.bfloat16) if cuda else nullcontext(),
            patch.object(kernels, "HAS_TRITON", execution.fused_kernels),
            patch.object(kernels, "has_old_triton", lambda: False),  # independent of the packages installed here
            patch.object(torch.compiler, "_is_compiling_flag", True),  # as in torch.export: do not check input values
        ):
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


class SimulatedCuda(TorchFunctionMode):
    """Tensors claim to be on a GPU, and follow its autocast rules and attention kernels."""

    def __init__(self, bfloat16: bool) -> None:
        super().__init__()
        self.bfloat16 = bfloat16

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == IS_CUDA:
            return True
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        if self.bfloat16 and func.__name__ in FLOAT32_OPS:
            args = [widen(arg) for arg in args]
            kwargs = {name: widen(arg) for name, arg in kwargs.items()}
        return func(*args, **kwargs)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """FlashAttention in bfloat16 without a mask, else the memory-efficient kernel."""
        if self.bfloat16:
            q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        ops = torch.ops.aten
        if attn_mask is None and self.bfloat16:
            return ops._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
        mask = None if attn_mask is None else attn_mask.to(q.dtype).expand(*q.shape[:-1], k.shape[-2])
        return ops._scaled_dot_product_efficient_attention(q, k, v, mask, True, dropout_p, is_causal, scale=scale)[0]
