"""Compiles every kernel for a H100 without one, and prints what it takes: name, configuration, registers, spills.

In a process of its own, because pytest's has Triton's interpreter: `python tests/kernels/compile_all.py [MOST]`, where
MOST is how many configurations of each kernel are compiled.
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
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


MOST = int(sys.argv[1]) if len(sys.argv) > 1 else 100
compiled: list[tuple[str, str, Any]] = []
launch = JITFunction.run


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
    compiled.append((self.fn.__module__.removeprefix("allmlp.kernels.") + "." + self.__name__, "", kernel))


def every_configuration(self: Autotuner, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
    for config in self.configs[-MOST:]:
        if config.pre_hook:
            config.pre_hook({**dict(zip(self.arg_names, args)), **kwargs, **config.all_kwargs()})
        self.fn.run(*args, grid=grid, warmup=True, **kwargs, **config.all_kwargs())
        name, _, kernel = compiled.pop()
        compiled.append((name, str(config), kernel))


def resources(kernel: Any) -> tuple[int, int]:
    """Registers of a thread, and bytes that did not fit into them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(kernel.asm["cubin"])
        said = subprocess.check_output([knobs.nvidia.cuobjdump.path, "-res-usage", file], text=True)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", said)[-1]
    return int(registers), int(stack)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


def activations() -> None:
    from allmlp.kernels.activation import triton as activation

    x, bias = draw(BATCH, 384, 768), draw(384)
    for act in ("gelu", "gelu_tanh", "relu"):
        activation.forward(x, bias, act)
        activation.backward(x, None, x, act)
    activation.backward(x, bias, x, "gelu")
    activation.forward(x.float(), None, "gelu")


def norms() -> None:
    from allmlp.kernels.row_norm import triton as row_norm

    x, weight = draw(BATCH, TOKENS, 768), draw(768, dtype=torch.float32)
    row_norm.row_stats(x, 1e-6, weight)
    row_norm.row_norm(x, weight, weight, 1e-6, weight)
    row_norm.row_norm(x, weight, None, 1e-6, weight, torch.float8_e4m3fn)
    row_norm.row_norm_turned(x, weight, weight, 1e-6, weight, 200)


def gates() -> None:
    from allmlp.kernels.gated_mlp import triton as gated

    h, f, b, weight = draw(BATCH, TOKENS, 1536), draw(BATCH, TOKENS, 768), draw(TOKENS), draw(768)
    mask = draw(BATCH, TOKENS)
    _, mean, rstd = gated.norm(h, mask, weight, weight, 1e-6, "gelu")
    gated.gate(h, f, b, "gelu")
    sums = gated.stripes(h)
    gated.gate_backward(h, f, b, f, torch.empty_like(h), sums, "gelu")
    gated.norm_backward(h, mask, weight, weight, mean, rstd, f, torch.empty_like(h), sums, "gelu")


def token_mixing() -> None:
    from allmlp.kernels.token_mix import hopper
    from allmlp.kernels.token_mix import triton as mix
    from allmlp.kernels.token_mix.reference import Around

    vector, bias = draw(768, dtype=torch.float32), draw(TOKENS, dtype=torch.float32)
    hidden, matrix = draw(BATCH, TOKENS, 1536), mix.Matrix.of(draw(TOKENS, TOKENS))
    u, v = hidden.chunk(2, 2)
    statistics = {name: draw(BATCH, TOKENS, dtype=torch.float32) for name in ("mean", "rstd")}
    for kind in (mix, hopper):
        kind.token_mix(v, matrix, Around(bias, vector, vector, **statistics, other=u), combine="multiply")
        kind.token_mix(v, matrix, Around(bias, vector, vector, lift=vector, gain=vector, other=u), combine="add")
    mix.token_mix(v.contiguous()[:, :, :767], matrix, Around(bias), act="gelu")  # rows that the copy engine cannot move


def linear_maps() -> None:
    from allmlp.kernels.linear import triton as linear
    from allmlp.kernels.linear.reference import Beside

    vector = draw(1536, dtype=torch.float32)
    x, weight, z = draw(BATCH * TOKENS, 256), draw(1536, 256), draw(BATCH * TOKENS, 1536)
    linear.linear_stats(x, weight, Beside(bias=vector), "gelu", 1e-6)
    linear.linear(x, weight, Beside(bias=vector), "gelu")
    x, weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    linear.linear(x, weight, Beside(vector, vector, vector), "gelu")
    linear.linear(x, weight, Beside(vector, other=z))


def main() -> Iterator[str]:
    driver.set_active(NoDevice())
    JITFunction.run, Autotuner.run = compile_only, every_configuration  # type: ignore[method-assign]
    for make in (activations, norms, gates, token_mixing, linear_maps):
        make()
    for name, config, kernel in compiled:
        registers, spilt = resources(kernel)
        yield f"{name:<42} {registers:>4} registers {spilt:>5} bytes spilt {kernel.metadata.shared:>7} shared  {config}"


if __name__ == "__main__":
    assert not knobs.runtime.interpret, "the interpreter does not compile"
    for line in main():
        print(line)
