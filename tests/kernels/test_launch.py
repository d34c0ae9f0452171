"""Every launch runs under the guard of its tensors' device, and a CUDA error names the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from allmlp.kernels import launch
from allmlp.kernels.launch import launching, naming_errors, synchronous
from kernels import every_kernel
from kernels.compare import DEVICE, randn

triton = pytest.importorskip("triton", minversion="3.6")


@pytest.mark.skipif(DEVICE == "cuda", reason="patches the interpreter")
def test_every_kernel_is_launched_under_the_device_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    current: list[torch.device] = []
    launched: set[str] = set()

    @contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        assert current == [torch.device("cpu")], self.__name__
        launched.add(f"{self.fn.__module__.removeprefix('allmlp.kernels.')}.{self.__name__}")

    monkeypatch.setattr(launch, "device_guard", guard)
    monkeypatch.setattr(InterpretedFunction, "run", run)
    list(every_kernel.Calls("cpu", torch.float16, batch=2, interpreted=True).all())
    assert launched == every_kernel.defined_kernels("triton") and not current


@pytest.mark.skipif(DEVICE == "cuda", reason="patches the interpreter")
def test_no_batch_is_too_large_for_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA has at most 2^16 - 1 programs along the second axis and the third."""
    from triton.runtime.interpreter import InterpretedFunction

    class Shapes(every_kernel.Calls):
        def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype or self.dtype, device="meta")

    grids: dict[str, tuple[int, ...]] = {}

    def run(self: Any, *args: Any, grid: Any, **kwargs: Any) -> None:
        name = f"{self.fn.__module__.removeprefix('allmlp.kernels.')}.{self.__name__}"
        grids[name] = grid(kwargs) if callable(grid) else grid

    monkeypatch.setattr(InterpretedFunction, "run", run)
    list(Shapes("meta", torch.float16, batch=2**17, interpreted=True).all())
    assert set(grids) == every_kernel.defined_kernels("triton")
    assert {name: grid for name, grid in grids.items() if grid[0] >= 2**31 or max(grid[1:], default=1) >= 2**16} == {}


def test_an_error_names_the_kernel() -> None:
    x = torch.zeros(1)
    message = r"^blocks.0.token: kernel linear: Triton Error \[CUDA\]: misaligned"
    with pytest.raises(RuntimeError, match=message), naming_errors("blocks.0.token"), launching("linear", x):
        raise RuntimeError("Triton Error [CUDA]: misaligned address")
    for error in (torch.OutOfMemoryError("full"), ValueError("else")):
        with pytest.raises(type(error), match=f"^{error}$"), launching("linear", x):
            raise error


def test_an_error_that_comes_late_names_the_kernel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    x = torch.zeros(1)
    with launching("linear", x):
        pass
    with (
        pytest.raises(RuntimeError, match=r"^kernel linear: CUDA error: an illegal"),
        synchronous(),
        launching("linear", x),
    ):
        pass
    with launching("linear", x):  # the lock is released and waiting is over
        pass


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_every_configuration_of_token_mix_and_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests use the default configuration only."""
    from allmlp.kernels.linear import reference as reference_linear
    from allmlp.kernels.linear import triton as linear
    from allmlp.kernels.linear.reference import LinearEpilogue
    from allmlp.kernels.token_mix import reference as reference_mix
    from allmlp.kernels.token_mix import triton as mix
    from allmlp.kernels.token_mix.reference import TokenMixEpilogue

    matrix, x, bias = (randn(*shape).to("cuda", torch.bfloat16) for shape in ((70, 56), (3, 56, 136), (70,)))
    expected = reference_mix.token_mix(x, matrix / 8, TokenMixEpilogue(bias), "gelu").float()
    for config in mix.CONFIGS:
        monkeypatch.setattr(mix.kernel, "configs", [config])
        actual = mix.token_mix(x, matrix / 8, TokenMixEpilogue(bias), "gelu").float()
        torch.testing.assert_close(actual, expected, rtol=2**-6, atol=2e-2, msg=str(config))
    rows, weight, bias = randn(300, 64).to(x), randn(272, 64).to(x) / 8, randn(272).float().cuda()
    expected = reference_linear.linear(rows, weight, LinearEpilogue(bias=bias), "gelu").float()
    for config in linear.CONFIGS:
        monkeypatch.setattr(linear.kernel, "configs", [config])
        actual = linear.linear(rows, weight, LinearEpilogue(bias=bias), "gelu").float()
        torch.testing.assert_close(actual, expected, rtol=2**-6, atol=2e-2, msg=str(config))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per class of batch sizes: few examples and many."""
    from allmlp.kernels.layer_norm import triton as layer_norm

    kernel = layer_norm.transposed_kernel
    monkeypatch.setattr(kernel, "configs", layer_norm.TRANSPOSED_CONFIGS)
    monkeypatch.setattr(kernel, "cache", {})
    for batch, tunings in ((1, 1), (2, 1), (64, 2), (70, 2)):
        layer_norm.layer_norm_transposed(torch.randn(batch, 196, 48, device="cuda"), None, None, 1e-6, None, 200)
        assert len(kernel.cache) == tunings
