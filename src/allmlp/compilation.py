"""Compilation of a training step: one graph for all blocks of a stage, or the whole step as one graph.

The blocks of a stage run the same code with different weights, so "blocks" compiles one of them and uses it for all:
the time to the first step hardly depends on depth. Augmentation before the model, and head and loss after its features,
are separate graphs, compiled if they are large; stem and final norm stay eager. "step" compiles everything as one
graph, which fuses across blocks and takes longer.

Compiled graphs and kernels are cached on disk by PyTorch, by default in a temporary folder of the user, so that the
same run compiles faster the next time. Set TORCHINDUCTOR_CACHE_DIR (and TRITON_CACHE_DIR, which is inside it unless
set) to a folder that persists to keep the cache between containers or machines of one kind;
TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 turns it off.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule

from allmlp.device import has_cpp_compiler
from allmlp.errors import UserError
from allmlp.kernels import HAS_TRITON
from allmlp.layers.block import BlockLayer
from allmlp.layers.scale import DropPathLayer
from allmlp.models.encoder import EncoderModel
from allmlp.tasks.task import TaskModule

Region = Literal["blocks", "step"]
BACKEND: Any = "inductor"
GRAPHS_PER_STAGE = 8
"""Limit per stage, for training and evaluation with several batch sizes; torch's own limit for a function."""
SMALL_GRAPH, SMALL_BYTES = 16, 2**20
"""Graphs beside the blocks with at most so many operations and bytes of results are not compiled: it would take a
second and save microseconds per step.
"""


@contextmanager
def compiler_loading(enabled: bool) -> Iterator[None]:
    """Load torch.compile in a thread while the `with` block runs: the imports take seconds, during which reading data
    mostly decodes and waits for files. Nothing may be compiled inside the block: two threads would import the same
    modules.
    """
    thread = threading.Thread(target=load_compiler, daemon=True)
    if enabled and BACKEND == "inductor":
        thread.start()
    try:
        yield
    finally:  # also after an error: a process that ends during an import may crash
        if thread.ident is not None:
            thread.join()


def load_compiler() -> None:
    """Import Inductor, and start the processes in which it compiles kernels for a GPU."""
    importlib.import_module("torch._inductor.compile_fx")
    workers = importlib.import_module("torch._inductor.async_compile")
    getattr(workers, "maybe_warm_pool", lambda: None)()  # torch 2.8 starts them when the module is imported


def check_compilers(device: torch.device) -> None:
    needed = None
    if device.type == "cpu" and not has_cpp_compiler():
        needed = "a C++ compiler (g++) on a CPU"
    elif device.type == "cuda" and not HAS_TRITON:
        needed = "Triton and a C compiler (gcc) on a GPU"
    if needed:
        raise UserError(f"torch.compile needs {needed}: install what is missing, or add --set compile=false")


def compile_task(task: TaskModule, region: Region = "blocks", cuda_graphs: bool = False) -> None:
    """Compile the loss of `task`; with `cuda_graphs` PyTorch replays the compiled parts as CUDA graphs.

    Models without a stack of equal blocks, such as those of other packages, are compiled as a whole.
    """
    device = next(task.parameters()).device
    if BACKEND == "inductor":
        check_compilers(device)
    options: dict[str, Any] = {"backend": BACKEND, "dynamic": False}
    if BACKEND == "inductor" and cuda_graphs:
        options["mode"] = "reduce-overhead"
    modules = [module for root in (task, *task.networks) for module in root.modules()]
    stages = max((len(module.spec.all_stages) for module in modules if isinstance(module, EncoderModel)), default=1)
    limits = torch._dynamo.config
    # Every stage has its own graphs; beyond the limit for a function, further ones would run uncompiled.
    limits.recompile_limit = max(limits.recompile_limit, GRAPHS_PER_STAGE * stages)
    for layer in modules:
        if isinstance(layer, DropPathLayer):
            layer.rate_as_tensor(device)
    # Compile the function of the class, not the methods of the instances, so that all blocks share one graph cache.
    block_forward = torch.compile(BlockLayer.forward, **options)
    for stack in modules:
        if region == "blocks" and isinstance(stack, EncoderModel) and len(stack.blocks) > 1:
            # Not traced into the surrounding graph, where each block would be compiled again. Stem and final norm are
            # only a few kernels, not worth a graph each.
            stack.forward_features = torch.compiler.disable(stack.forward_features)  # type: ignore[method-assign]
            for block in stack.blocks:
                block.forward = partial(block_forward, block)  # type: ignore[arg-type]
    if BACKEND == "inductor" and region == "blocks" and not cuda_graphs:
        options["backend"] = compile_if_large
    task.compute_loss = torch.compile(task.compute_loss, **options)  # type: ignore[method-assign]


def compile_if_large(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A backend of torch.compile that compiles all graphs but small ones, which stay eager."""
    nodes = [node for node in graph.graph.nodes if node.op.startswith("call_")]
    results = (node.meta.get("example_value") for node in nodes)
    size = sum(result.nbytes for result in results if isinstance(result, Tensor))
    if len(nodes) <= SMALL_GRAPH and size <= SMALL_BYTES:
        return graph.forward
    return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)
