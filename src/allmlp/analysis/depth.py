"""The sections that go through a model from the first block to the last: sparsity, activations, LayerScale."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from allmlp.analysis import plots
from allmlp.analysis.activations import Activation, Scale, activations, layer_scales
from allmlp.analysis.place import slot
from allmlp.analysis.plots import Chart, Series
from allmlp.analysis.record import Record
from allmlp.analysis.section import Answer, Section
from allmlp.analysis.sparsity import Sparsity, sparsity
from allmlp.analysis.subject import Pictures, Subject


def weights(subject: Subject, record: Record) -> Section:
    answer, found = Answer(record, "sparsity"), sparsity(subject.model)
    about = "share: weights whose absolute value is under 5 % of the largest one of their matrix."
    record.table("sparsity", Sparsity._fields, found, about)
    inside = [one for one in found if one.block is not None]
    if inside:
        lines: dict[str, list[Sparsity]] = {}
        for one in inside:
            lines.setdefault(matrix_name(one), []).append(one)
        series = [Series(name, depths(line), [one.share for one in line]) for name, line in lines.items()]
    else:
        series = [Series("", list(range(len(found))), [one.share for one in found])]
    chart = Chart("share of weights under 5 % of their matrix's largest", "share of the weights", series)
    where = "block, from 0" if inside else "weight matrix, in the order of the network"
    record.figure("sparsity", plots.by_depth([chart], f"Small weights of {subject.name} by depth", where))
    groups = {role: [one.share for one in inside if one.role == role] for role in ("token", "channel", "attention")}
    means = {role: sum(shares) / len(shares) for role, shares in groups.items() if shares}
    means = means or {"mean over matrices": sum(one.share for one in found) / len(found)}
    said = ", ".join(f"{role} {share:.1%}" for role, share in means.items())
    return answer.section(f"under 5 % of the largest: {said}")


def depths(line: Sequence[Sparsity] | Sequence[Activation] | Sequence[Scale]) -> list[int]:
    return [one.block for one in line if one.block is not None]


def matrix_name(one: Sparsity) -> str:
    """blocks.3.channel.mix.up.weight -> channel mixing, up."""
    last = one.name.removesuffix(".weight").rpartition(".")[2]
    what = "attention" if one.role == "attention" else f"{one.role} mixing"
    crossing = "cross" if slot(one.name) == "cross" else ""
    words = " ".join(filter(None, (one.stack, crossing, what)))
    return words if last in ("mix", "proj") else f"{words}, {last}"


def norms(subject: Subject, record: Record, shown: Pictures | None) -> Section:
    answer, model = Answer(record, "activations"), subject.model
    if shown is not None:
        inputs, what = (subject.read(shown.pixels),), f"{len(shown.pixels)} pictures"
    else:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            inputs = model.example()
        what = "one random input"
    found = activations(model, *inputs)
    about = f"Mean length of the tokens that leave each part, and of what a residual branch adds; read: {what}."
    record.table("activations", Activation._fields, found, about)
    lines: dict[str, list[Activation]] = {}
    for one in found:
        if one.block is not None:
            lines.setdefault(f"{one.stack} {one.slot}".strip(), []).append(one)
    if lines:
        where, title = "block, from 0", "the stream of tokens after each branch"
        stream = [Series(name, depths(line), [one.norm for one in line]) for name, line in lines.items()]
    else:
        where, title = "part, in the order of the network", "what leaves each part"
        stream = [Series("", list(range(len(found))), [one.norm for one in found])]
    charts = [Chart(title, "mean length of a token", stream, log=True)]
    added = [
        Series(name, depths(line), [one.added or 0.0 for one in line])
        for name, line in lines.items()
        if line[0].added is not None
    ]
    if added:
        charts.append(Chart("what each branch adds", "mean length of what is added", added, log=True))
    record.figure("activations", plots.by_depth(charts, f"Activations by depth, {what}", where))
    sizes = [one.norm for one in found]
    return answer.section(f"token length {sizes[0]:.3g} at the start, {sizes[-1]:.3g} at the end ({what})")


def scales(subject: Subject, record: Record) -> Section:
    answer, found = Answer(record, "layer scale"), layer_scales(subject.model)
    if not found:
        return Section("layer scale", "the model has none")
    record.table("layerscale", Scale._fields, found, "|gamma| over the channels of each LayerScale.")
    series = []
    for stack, kind in dict.fromkeys((one.stack, one.slot) for one in found if one.block is not None):
        line = [one for one in found if (one.stack, one.slot) == (stack, kind)]
        band = [one.smallest for one in line], [one.largest for one in line]
        series.append(Series(f"{stack} {kind}".strip(), depths(line), [one.mean for one in line], band))
    chart = Chart("mean over the channels; the shade is smallest to largest", "|gamma|", series)
    record.figure("layerscale", plots.by_depth([chart], "LayerScale by depth", "block, from 0"))
    return answer.section(f"mean |gamma| {min(o.mean for o in found):.3g} to {max(o.mean for o in found):.3g}")
