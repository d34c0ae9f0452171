"""While torch.compile traces a model, its kernels are compiled in the background."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from allmlp.kernels import HAS_C_COMPILER, ahead
from allmlp.kernels.channel_mlp import op as channel_mlp
from allmlp.kernels.channel_mlp import reference as channel_mlp_reference
from allmlp.kernels.gated_mlp import op as gated_mlp
from allmlp.kernels.gated_mlp.reference import GatedMlpWeights
from allmlp.kernels.token_matmul import op as token_matmul
from kernels.compare import DEVICE

triton = pytest.importorskip("triton", minversion="3.6")
BATCH, TOKENS, CHANNELS, HIDDEN = 4, 20, 64, 96


def rand(*shape: int, device: str) -> Tensor:
    return torch.rand(shape, device=device, dtype=torch.bfloat16)


def token_mixing(device: str) -> None:
    matrix, x, bias = (rand(*shape, device=device) for shape in ((TOKENS, TOKENS), (BATCH, TOKENS, HIDDEN), (TOKENS,)))
    y = token_matmul.forward_op(matrix, x, bias, "gelu")
    token_matmul.backward_op(matrix, x, bias, "gelu", y)


def channel_mixing(device: str, rows: int = 20) -> None:
    x, up, down = (rand(*shape, device=device) for shape in ((rows, 64), (HIDDEN, 64), (64, HIDDEN)))
    y, h = channel_mlp.forward_op(x, up, rand(HIDDEN, device=device), down, rand(64, device=device), "gelu")
    channel_mlp.backward_op(x, h, up, down, "gelu", y)


def gated_mixing(device: str, masked: bool = True) -> None:
    shapes = {
        "up": (2 * HIDDEN, CHANNELS), "up_bias": (2 * HIDDEN,), "matrix": (TOKENS, TOKENS), "token_bias": (TOKENS,),
        "norm_weight": (HIDDEN,), "norm_bias": (HIDDEN,), "down": (CHANNELS, HIDDEN), "down_bias": (CHANNELS,),
    }  # fmt: skip
    weights = GatedMlpWeights(**{name: rand(*shape, device=device) for name, shape in shapes.items()})
    x, mask = rand(BATCH, TOKENS, CHANNELS, device=device), rand(BATCH, TOKENS, 1, device=device) if masked else None
    y, *saved = gated_mlp.forward_op(x, list(weights), mask, "gelu", 1e-5)
    gated_mlp.backward_op(x, list(weights), mask, *saved, "gelu", y)


def large_channel_mixing(device: str) -> None:
    channel_mixing(device, channel_mlp_reference.MIN_ROWS)


ACTIVATION, SUM = {"activation.forward_kernel", "activation.backward_kernel"}, {"row_sum.kernel"}
GATED = {f"gated_mlp.{name}_kernel" for name in ("norm", "gate", "gate_backward", "norm_backward")}
HIDDEN_LAYER = {"channel_mlp.forward_kernel", "channel_mlp.backward_kernel"}
OPS = [
    (token_mixing, ACTIVATION | SUM),
    (channel_mixing, ACTIVATION | SUM),
    (large_channel_mixing, HIDDEN_LAYER | SUM),
    (gated_mixing, GATED | SUM),
]


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__.removeprefix('allmlp.kernels.').removesuffix('.triton')}.{kernel.fn.__name__}"


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that were handed to the background; fake tensors on the CPU stand for those on a GPU."""
    from allmlp.kernels.activation import triton as activation
    from allmlp.kernels.channel_mlp import triton as hidden_layer
    from allmlp.kernels.row_sum import triton as row_sum

    def dispatch(x: Tensor, weight: Tensor) -> Any:
        return hidden_layer if len(x) >= channel_mlp_reference.MIN_ROWS else channel_mlp_reference

    kernels: list[Any] = []
    monkeypatch.setattr(token_matmul, "dispatch", lambda x: activation)
    monkeypatch.setattr(channel_mlp, "dispatch", dispatch)
    monkeypatch.setattr(channel_mlp_reference, "dispatch_activation", lambda x: activation)
    monkeypatch.setattr(token_matmul, "dispatch_row_sum", lambda x: row_sum)
    monkeypatch.setattr(ahead, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(ahead, "SEEN", set())
    monkeypatch.setattr(ahead, "compile_for", lambda device, kernel, types, options: kernels.append(kernel))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return kernels


def trace(op: Callable[..., None], device: str = "cpu", **arguments: Any) -> None:
    with FakeTensorMode():
        op(device, **arguments)
    ahead.wait_for_kernels()


@pytest.mark.parametrize(("op", "kernels"), OPS)
def test_kernels_of_an_op_are_compiled_once(op: Callable[..., None], kernels: set[str], handed_over: list[Any]) -> None:
    trace(op)
    assert {name_of(kernel) for kernel in handed_over} == kernels
    count = len(handed_over)
    trace(op)
    assert len(handed_over) == count and not ahead.RECORDING.active


def test_other_arguments_are_other_kernels(handed_over: list[Any]) -> None:
    trace(gated_mixing)
    count = len(handed_over)
    trace(gated_mixing, masked=False)
    assert len(handed_over) == 2 * count


@pytest.mark.parametrize("op", [op for op, _ in OPS])
def test_nothing_is_compiled_without_a_gpu(
    op: Callable[..., None], handed_over: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace(op, device="meta")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    trace(op)
    assert not handed_over


def test_a_failure_is_left_to_the_launch(handed_over: list[Any]) -> None:
    def fails(x: Tensor) -> None:
        raise ValueError("wrong")

    with FakeTensorMode():
        ahead.compile_launches(fails, (rand(2, device="cpu"),))
    assert not ahead.RECORDING.active and not handed_over


def test_dynamic_shapes_are_left_to_the_launch(handed_over: list[Any]) -> None:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(4, 20), source=ConstantSource("x"))
    assert isinstance(x.shape[0], torch.SymInt)
    ahead.compile_launches(torch.relu, (x,))
    assert not ahead.SEEN


MODULE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_NOARGS, NULL}}, {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "launcher", NULL, -1, methods}};
PyMODINIT_FUNC PyInit_launcher(void) {{ return PyModule_Create(&definition); }}
"""
"""Built as Triton builds its launchers."""


@pytest.mark.skipif(not HAS_C_COMPILER, reason="no C compiler")
def test_a_launcher_that_is_loaded_again_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import build

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_load_module_from_path", build._load_module_from_path)
    ahead.separate_launchers.cache_clear()
    ahead.separate_launchers()
    sources = [MODULE.format(number=number) for number in range(2)]
    first, second, again = (build.compile_module_from_src(sources[i], "launcher") for i in (0, 1, 0))
    assert (first.launch(), second.launch(), again.launch()) == (0, 1, 0)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="no GPU")
@pytest.mark.parametrize(("op", "kernels"), OPS)
def test_the_launch_finds_what_was_compiled(
    op: Callable[..., None], kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[str, bool]] = []
    compile_kernel = triton.JITFunction._do_compile

    def recorded(self: Any, *args: Any) -> Any:
        compiled.append((name_of(self), args[-1]))
        return compile_kernel(self, *args)

    monkeypatch.setattr(triton.JITFunction, "_do_compile", recorded)
    monkeypatch.setattr(ahead, "SEEN", set())
    torch.cuda.init()
    trace(op, DEVICE)
    op(DEVICE)
    assert all(warmup for _, warmup in compiled)
