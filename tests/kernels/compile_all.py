"""Compile every kernel for an H100 without one, and print registers, spills and shared memory per configuration.

Runs in its own process, since the one of pytest uses Triton's interpreter: `python tests/kernels/compile_all.py [N]`,
where N limits the configurations that are compiled of each kernel.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
BATCH, TOKENS = 4, 196


class NoDevice:
    """The part of a Triton driver that compilation needs."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


MAX_CONFIGS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
compiled: list[tuple[str, str, Any]] = []
launch = JITFunction.run


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
    compiled.append((self.fn.__module__.removeprefix("allmlp.kernels.") + "." + self.__name__, "", kernel))


def compile_configs(self: Autotuner, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
    for config in self.configs[-MAX_CONFIGS:]:
        if config.pre_hook:
            config.pre_hook({**dict(zip(self.arg_names, args)), **kwargs, **config.all_kwargs()})
        self.fn.run(*args, grid=grid, warmup=True, **kwargs, **config.all_kwargs())
        name, _, kernel = compiled.pop()
        compiled.append((name, str(config), kernel))


def resources(kernel: Any) -> tuple[int, int]:
    """Registers per thread, and bytes of stack (spills)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(kernel.asm["cubin"])
        usage = subprocess.check_output([knobs.nvidia.cuobjdump.path, "-res-usage", file], text=True)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
    return int(registers), int(stack)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def compile_activation() -> None:
    from allmlp.kernels.activation import triton as activation

    x, bias = randn(BATCH, 384, 768), randn(384)
    for act in ("gelu", "gelu_tanh", "relu"):
        activation.forward(x, bias, act)
        activation.backward(x, None, x, act)
    activation.backward(x, bias, x, "gelu")
    activation.forward(x.float(), None, "gelu")


def compile_layer_norm() -> None:
    from allmlp.kernels.layer_norm import triton as layer_norm

    x, weight = randn(BATCH, TOKENS, 768), randn(768, dtype=torch.float32)
    layer_norm.layer_norm_stats(x, 1e-6, weight)
    layer_norm.layer_norm(x, weight, weight, 1e-6, weight)
    layer_norm.layer_norm(x, weight, None, 1e-6, weight, torch.float8_e4m3fn)
    layer_norm.layer_norm_transposed(x, weight, weight, 1e-6, weight, 200)


def compile_gated_mlp() -> None:
    from allmlp.kernels.gated_mlp import triton as gated

    h, f, b, weight = randn(BATCH, TOKENS, 1536), randn(BATCH, TOKENS, 768), randn(TOKENS), randn(768)
    mask = randn(BATCH, TOKENS)
    _, mean, rstd = gated.norm(h, mask, weight, weight, 1e-6, "gelu")
    gated.gate(h, f, b, "gelu")
    sums = gated.empty_partial_sums(h)
    gated.gate_backward(h, f, b, f, torch.empty_like(h), sums, "gelu")
    gated.norm_backward(h, mask, weight, weight, mean, rstd, f, torch.empty_like(h), sums, "gelu")


def compile_token_mix() -> None:
    from allmlp.kernels.token_mix import hopper
    from allmlp.kernels.token_mix import triton as mix
    from allmlp.kernels.token_mix.reference import TokenMixEpilogue

    vector, bias = randn(768, dtype=torch.float32), randn(TOKENS, dtype=torch.float32)
    hidden, matrix = randn(BATCH, TOKENS, 1536), mix.PackedMatrix.pack(randn(TOKENS, TOKENS))
    u, v = hidden.chunk(2, 2)
    stats = {name: randn(BATCH, TOKENS, dtype=torch.float32) for name in ("mean", "rstd")}
    gate = TokenMixEpilogue(bias, vector, vector, **stats, other=u)
    residual = TokenMixEpilogue(bias, vector, vector, deferred_bias=vector, layer_scale=vector, other=u)
    for module in (mix, hopper):
        module.token_mix(v, matrix, gate, combine="multiply")
        module.token_mix(v, matrix, residual, combine="add")
    mix.token_mix(v.contiguous()[:, :, :767], matrix, TokenMixEpilogue(bias), act="gelu")  # rows not aligned for TMA


def compile_linear() -> None:
    from allmlp.kernels.linear import triton as linear
    from allmlp.kernels.linear.reference import LinearEpilogue

    vector = randn(1536, dtype=torch.float32)
    x, weight, z = randn(BATCH * TOKENS, 256), randn(1536, 256), randn(BATCH * TOKENS, 1536)
    linear.linear_stats(x, weight, LinearEpilogue(bias=vector), "gelu", 1e-6)
    linear.linear(x, weight, LinearEpilogue(bias=vector), "gelu")
    x, weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    linear.linear(x, weight, LinearEpilogue(vector, vector, vector), "gelu")
    linear.linear(x, weight, LinearEpilogue(vector, residual=z))


def main() -> Iterator[str]:
    driver.set_active(NoDevice())
    JITFunction.run, Autotuner.run = compile_only, compile_configs  # type: ignore[method-assign]
    for compile_room in (compile_activation, compile_layer_norm, compile_gated_mlp, compile_token_mix, compile_linear):
        compile_room()
    for name, config, kernel in compiled:
        registers, spilled = resources(kernel)
        usage = f"{registers:>4} registers {spilled:>5} bytes spilled {kernel.metadata.shared:>7} shared"
        yield f"{name:<42} {usage}  {config}"


if __name__ == "__main__":
    assert not knobs.runtime.interpret, "unset TRITON_INTERPRET: the interpreter does not compile"
    for line in main():
        print(line)
