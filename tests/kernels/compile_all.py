"""Compile every kernel for a GPU without one, and print per configuration registers, spills, shared memory and
asynchronous copies.

Runs in its own process, since the one of pytest uses Triton's interpreter: `python tests/kernels/compile_all.py N 80`.
N limits the configurations that are compiled of each kernel; 90 (an H100, the default), 80 (an A100) or 89 (Ada) is the
compute capability, below 90 without the kernels that need tensor descriptors.
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
from every_kernel import Calls
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from allmlp.kernels.token_mix import triton as token_mix

CAPABILITY = int(sys.argv[2]) if len(sys.argv) > 2 else 90
TARGET = GPUTarget("cuda", CAPABILITY, 32)


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
    assert kernel.metadata.enable_fp_fusion, f"{self.__name__} depends on Triton's default"
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


def main() -> Iterator[str]:
    knobs.language.default_fp_fusion = False
    driver.set_active(NoDevice())
    JITFunction.run, Autotuner.run = compile_only, compile_configs  # type: ignore[method-assign]
    if CAPABILITY < 90:
        token_mix.has_tma = lambda device: False
    hopper = CAPABILITY == 90
    list(Calls("cpu", torch.bfloat16, batch=4, hopper=hopper).all())
    count, known = len(compiled), {id(kernel) for *_, kernel in compiled}
    for batch in (1, 5):
        list(Calls("cpu", torch.bfloat16, batch, hopper=hopper).all())
    again = {name for name, _, kernel in compiled[count:] if id(kernel) not in known}
    assert not again, f"compiled anew for another batch size: {', '.join(sorted(again))}"
    del compiled[count:]
    for name, config, kernel in compiled:
        registers, spilled = resources(kernel)
        usage = f"{registers:>4} registers {spilled:>5} bytes spilled {kernel.metadata.shared:>7} shared"
        usage += f" {len(re.findall('cp.async.c[ag]', kernel.asm['ptx'])):>4} copies"
        yield f"{name:<42} {usage}  {config}"


if __name__ == "__main__":
    assert not knobs.runtime.interpret, "unset TRITON_INTERPRET: the interpreter does not compile"
    for line in main():
        print(line)
