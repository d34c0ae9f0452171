"""One call of every kernel, in the ways models use it: to compile, to interpret, or to run them all.

As a script it runs them on the GPU: `python tests/kernels/every_kernel.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

TOKENS, CHANNELS = 196, 768


def defined_kernels(*stems: str) -> set[str]:
    """Names such as linear.triton.kernel, of the kernels in files of these names."""
    folder = Path(__file__).parents[2] / "src" / "allmlp" / "kernels"
    return {
        f"{file.parent.name}.{file.stem}.{name}"
        for stem in stems
        for file in folder.glob(f"*/{stem}.py")
        for name in re.findall(r"^def (\w*kernel)\(", file.read_text(encoding="utf8"), re.MULTILINE)
    }


class Calls:
    """The calls for a device and a dtype. Gluon and fp8 products are left out where the interpreter stands in for a
    GPU; without `hopper`, fp8 and the products too that are cuBLAS' there.
    """

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        batch: int,
        hopper_batch: int | None = None,
        interpreted: bool = False,
        hopper: bool = True,
    ) -> None:
        self.device, self.dtype, self.batch, self.interpreted = device, dtype, batch, interpreted
        self.hopper = hopper
        self.hopper_batch = hopper_batch or batch

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape).to(self.device, dtype or self.dtype)

    def activation(self) -> None:
        from allmlp.kernels.activation import triton as activation

        x, bias = self.randn(self.batch, TOKENS, CHANNELS), self.randn(TOKENS)
        for act in ("gelu", "gelu_tanh", "relu"):
            activation.forward(x, bias, act)
            activation.backward(x, None, x, act)
        activation.backward(x, bias, x, "gelu")
        activation.forward(x.float(), None, "gelu")

    def row_sum(self) -> None:
        from allmlp.kernels.row_sum import triton as row_sum

        for columns in (CHANNELS, 4 * CHANNELS, TOKENS * TOKENS):
            row_sum.sum_rows(self.randn(self.batch, columns), torch.float32)
            row_sum.sum_rows(self.randn(self.batch, columns, dtype=torch.float32), self.dtype)

    def layer_norm(self) -> None:
        from allmlp.kernels.layer_norm import triton as layer_norm

        x, weight = self.randn(self.batch, TOKENS, CHANNELS), self.randn(CHANNELS, dtype=torch.float32)
        layer_norm.layer_norm_stats(x, 1e-6, weight)
        layer_norm.layer_norm(x, weight, weight, 1e-6, weight)
        layer_norm.layer_norm_transposed(x, weight, weight, 1e-6, weight, 200)
        layer_norm.layer_norm_mean(x, weight, weight, 1e-6, weight)
        if not self.interpreted and self.hopper:
            layer_norm.layer_norm(x, weight, None, 1e-6, weight, torch.float8_e4m3fn)

    def gated_mlp(self) -> None:
        from allmlp.kernels.gated_mlp import triton as gated

        h, f = self.randn(self.batch, TOKENS, 2 * CHANNELS), self.randn(self.batch, TOKENS, CHANNELS)
        b, weight, mask = self.randn(TOKENS), self.randn(CHANNELS), self.randn(self.batch, TOKENS)
        _, mean, rstd = gated.norm(h, mask, weight, weight, 1e-6, "gelu")
        gated.gate(h, f, b, "gelu")
        sums = gated.empty_partial_sums(h)
        gated.gate_backward(h, f, b, f, torch.empty_like(h), sums, "gelu")
        gated.norm_backward(h, mask, weight, weight, mean, rstd, f, torch.empty_like(h), sums, "gelu")

    def token_mix(self) -> None:
        from allmlp.kernels.token_mix import triton as mix
        from allmlp.kernels.token_mix.reference import PackedMatrix, TokenMixEpilogue

        modules = [(mix, self.batch)]
        if not self.interpreted and self.hopper:
            from allmlp.kernels.token_mix import hopper

            modules.append((hopper, self.hopper_batch))
        vector, bias = (self.randn(size, dtype=torch.float32) for size in (CHANNELS, TOKENS))
        matrix = PackedMatrix.pack(self.randn(TOKENS, TOKENS))
        for module, batch in modules:
            u, v = self.randn(batch, TOKENS, 2 * CHANNELS).chunk(2, 2)
            mean, rstd = (self.randn(batch, TOKENS, dtype=torch.float32) for _ in range(2))
            gate = TokenMixEpilogue(bias, vector, vector, mean, rstd, other=u)
            residual = TokenMixEpilogue(bias, vector, vector, deferred_bias=vector, layer_scale=vector, other=u)
            module.token_mix(v, matrix, gate, combine="multiply")
            module.token_mix(v, matrix, residual, combine="add")
            if not self.interpreted and self.hopper:
                u = self.randn(batch, TOKENS, CHANNELS).to(torch.float8_e4m3fn)
                module.token_mix(v, matrix, gate._replace(layer_scale=vector, other=u), combine="multiply")
        unaligned = self.randn(self.batch, TOKENS, CHANNELS)[:, :, : CHANNELS - 1]
        unaligned = unaligned.contiguous()  # rows that TMA cannot load
        mix.token_mix(unaligned, matrix, TokenMixEpilogue(bias), act="gelu")

    def linear(self) -> None:
        from allmlp.kernels.linear import triton as linear
        from allmlp.kernels.linear.reference import LinearEpilogue

        rows, width = self.batch * TOKENS, 2 * CHANNELS
        vector = self.randn(width, dtype=torch.float32)
        x, weight, z = self.randn(rows, 256), self.randn(width, 256), self.randn(rows, width)
        linear.linear_stats(x, weight, LinearEpilogue(bias=vector), "gelu", 1e-6, CHANNELS)
        linear.linear(x, weight, LinearEpilogue(bias=vector), "gelu")
        linear.linear(x, weight, LinearEpilogue(bias=vector, residual=z, gate=z))
        if not self.interpreted:
            x, weight = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
            linear.linear(x, weight, LinearEpilogue(vector, vector, vector), "gelu")
            linear.linear(x, weight, LinearEpilogue(vector, residual=z))
            gate = z.to(torch.float8_e4m3fn)
            linear.linear(*(t.to(self.dtype) for t in (x, weight)), LinearEpilogue(bias=vector, residual=z, gate=gate))
            row_scale = self.randn(rows, dtype=torch.float32)
            linear.linear(x, weight, LinearEpilogue(vector, vector, vector, row_scale=row_scale), "gelu")
            linear.linear(x, weight, LinearEpilogue(vector, residual=z, row_scale=row_scale))
            linear.linear_stats(x, weight, LinearEpilogue(vector, vector), "gelu", 1e-6, 0, self.dtype)

    def unit_rows(self) -> None:
        from allmlp.kernels.unit_rows import triton as unit_rows

        x, vector = self.randn(self.batch * TOKENS, CHANNELS), self.randn(CHANNELS, dtype=torch.float32)
        unit_rows.unit_rows(x, vector, vector, vector)

    def channel_mlp(self) -> None:
        from allmlp.kernels.channel_mlp import triton as channel_mlp

        rows, hidden = self.batch * TOKENS, 2 * CHANNELS
        x, up, down = (self.randn(*shape) for shape in ((rows, 256), (hidden, 256), (256, hidden)))
        for act in ("gelu", "gelu_tanh", "relu"):
            h, _ = channel_mlp.hidden(x, up, self.randn(hidden), act)
            channel_mlp.hidden_backward(x, down, h, act)

    def all(self) -> Iterator[str]:
        calls = (self.activation, self.row_sum, self.layer_norm, self.gated_mlp, self.token_mix)
        for call in (*calls, self.unit_rows, self.linear, self.channel_mlp) if self.hopper else calls:
            call()
            yield call.__name__


if __name__ == "__main__":
    # The persistent kernel of Hopper is used where there are as many tiles as multiprocessors.
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    for name in Calls("cuda", torch.bfloat16, batch=2, hopper_batch=-(-sms * 128 // CHANNELS)).all():
        torch.cuda.synchronize()
        print(name, flush=True)
