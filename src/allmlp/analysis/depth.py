"""The sections by depth: sparsity, activation norms, LayerScale."""

from __future__ import annotations

from collections.abc import Sequence

from allmlp.analysis import figures
from allmlp.analysis.activation_norms import ActivationNorm, LayerScaleSize, activation_norms, layer_scale_sizes
from allmlp.analysis.figures import Chart, Series
from allmlp.analysis.module_path import branch
from allmlp.analysis.output_folder import OutputFolder, Section
from allmlp.analysis.sparsity import Sparsity, sparsity
from allmlp.analysis.target import AnalysisTarget, NamedImages


def sparsity_section(target: AnalysisTarget, output: OutputFolder) -> Section:
    matrices = sparsity(target.model)
    about = "fraction: weights whose absolute value is below 5 % of the largest one in their matrix."
    output.table("sparsity", Sparsity._fields, matrices, about)
    inside = [matrix for matrix in matrices if matrix.block is not None]
    if inside:
        lines: dict[str, list[Sparsity]] = {}
        for matrix in inside:
            lines.setdefault(matrix_name(matrix), []).append(matrix)
        series = [Series(name, blocks(line), [matrix.fraction for matrix in line]) for name, line in lines.items()]
    else:
        series = [Series("", list(range(len(matrices))), [matrix.fraction for matrix in matrices])]
    chart = Chart("Weights below 5 % of the largest one in their matrix", "fraction of the weights", series)
    xlabel = "block" if inside else "weight matrix, in network order"
    output.figure("sparsity", figures.by_depth([chart], f"Near-zero weights of {target.name} by depth", xlabel))
    kinds = "token", "channel", "attention"
    groups = {kind: [matrix.fraction for matrix in inside if matrix.kind == kind] for kind in kinds}
    means = {kind: sum(fractions) / len(fractions) for kind, fractions in groups.items() if fractions}
    means = means or {"mean over matrices": sum(matrix.fraction for matrix in matrices) / len(matrices)}
    listed = ", ".join(f"{kind} {fraction:.1%}" for kind, fraction in means.items())
    return output.section("sparsity", f"weights below 5 % of the largest: {listed}")


def blocks(line: Sequence[Sparsity] | Sequence[ActivationNorm] | Sequence[LayerScaleSize]) -> list[int]:
    return [one.block for one in line if one.block is not None]


def matrix_name(one: Sparsity) -> str:
    """blocks.3.channel.mix.up.weight -> channel mixing, up."""
    last = one.name.removesuffix(".weight").rpartition(".")[2]
    kind = "attention" if one.kind == "attention" else f"{one.kind} mixing"
    cross = "cross" if branch(one.name) == "cross" else ""
    name = " ".join(filter(None, (one.stack, cross, kind)))
    return name if last in ("mix", "proj") else f"{name}, {last}"


def activation_section(target: AnalysisTarget, output: OutputFolder, images: NamedImages | None) -> Section:
    inputs, read = target.example_inputs(images)
    norms = activation_norms(target.model, *inputs)
    about = f"Mean L2 norm of the tokens after each part, and of what a residual branch adds; input: {read}."
    output.table("activations", ActivationNorm._fields, norms, about)
    lines: dict[str, list[ActivationNorm]] = {}
    for one in norms:
        if one.block is not None:
            lines.setdefault(f"{one.stack} {one.branch}".strip(), []).append(one)
    if lines:
        xlabel, title = "block", "Tokens after each residual branch"
        stream = [Series(name, blocks(line), [one.norm for one in line]) for name, line in lines.items()]
    else:
        xlabel, title = "part, in network order", "Output of each part"
        stream = [Series("", list(range(len(norms))), [one.norm for one in norms])]
    charts = [Chart(title, "mean L2 norm of a token", stream, log=True)]
    added = [
        Series(name, blocks(line), [one.added or 0.0 for one in line])
        for name, line in lines.items()
        if line[0].added is not None
    ]
    if added:
        charts.append(Chart("What each residual branch adds", "mean L2 norm of the addition", added, log=True))
    output.figure("activations", figures.by_depth(charts, f"Activation norms by depth ({read})", xlabel))
    return output.section("activations", f"{norm_range(norms)} ({read})")


def norm_range(norms: list[ActivationNorm]) -> str:
    """The first and the last point of the figure in words, for each stack."""
    if all(one.block is None for one in norms):
        return f"token norm {norms[0].norm:.3g} after {norms[0].name}, {norms[-1].norm:.3g} after {norms[-1].name}"
    ranges = []
    for stack in dict.fromkeys(one.stack for one in norms if one.block is not None):
        # The last branch of a block is the block's output.
        outputs = {one.block: one.norm for one in norms if one.stack == stack and one.block is not None}
        first, last = min(outputs), max(outputs)
        text = f"token norm {outputs[first]:.3g} after block {first}, {outputs[last]:.3g} after block {last}"
        ranges.append(f"{stack} {text}".strip())
    return "; ".join(ranges)


def layer_scale_section(target: AnalysisTarget, output: OutputFolder) -> Section:
    sizes = layer_scale_sizes(target.model)
    if not sizes:
        return Section("layer scale", "the model has no LayerScale")
    output.table("layerscale", LayerScaleSize._fields, sizes, "|gamma| over the channels of each LayerScale.")
    series = []
    for stack, kind in dict.fromkeys((one.stack, one.branch) for one in sizes if one.block is not None):
        line = [one for one in sizes if (one.stack, one.branch) == (stack, kind)]
        band = [one.smallest for one in line], [one.largest for one in line]
        series.append(Series(f"{stack} {kind}".strip(), blocks(line), [one.mean for one in line], band))
    chart = Chart("Mean over the channels, shaded from smallest to largest", "|gamma|", series)
    output.figure("layerscale", figures.by_depth([chart], "LayerScale by depth", "block"))
    means = [one.mean for one in sizes]
    return output.section("layer scale", f"mean |gamma| {min(means):.3g} to {max(means):.3g}")
