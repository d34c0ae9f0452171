"""The sections on pictures: which patches a prediction rests on, which pictures are alike."""

from __future__ import annotations

import torch

from allmlp.analysis import plots
from allmlp.analysis.neighbours import agreement, features, neighbours
from allmlp.analysis.record import Record
from allmlp.analysis.saliency import SQUARES, hidden_squares, patch_grid, saliency
from allmlp.analysis.section import Answer, Section
from allmlp.analysis.subject import Pictures, Subject, affordable
from allmlp.errors import UserError

SHOWN = 8
"""So many pictures are explained, and so many are queries, at most."""


def first(pictures: Pictures, count: int) -> Pictures:
    labels = None if pictures.labels is None else pictures.labels[:count]
    return Pictures(pictures.names[:count], pictures.pixels[:count], labels)


def explain(subject: Subject, record: Record, pictures: Pictures | None, given: int) -> Section:
    """Saliency of `pictures`, which are the first of those that were given."""
    if pictures is None:
        looks = subject.model.spec.image_size is not None
        return Section("saliency", "name pictures to explain" if looks else "the model reads no pictures")
    answer = Answer(record, "saliency")
    try:
        squares = affordable(subject.model, SQUARES, least=16)
        found = saliency(subject.model, subject.read(pictures.pixels), squares)
    except UserError as reason:
        return Section("saliency", str(reason))
    rows = []
    for name, one in zip(pictures.names, found):
        for method in ("occlusion", "gradient", "classes"):
            values = getattr(one, method)
            if values is not None:
                rows += [
                    (name, subject.class_name(one.label), one.probability, method, row, column, float(value))
                    for row, line in enumerate(values)
                    for column, value in enumerate(line)
                ]
    columns = ("picture", "class", "probability", "method", "row", "column", "value")
    about = "occlusion in nats of log-probability lost, gradient in score per standard deviation, classes in scores."
    record.table("saliency", columns, rows, about)
    says = [f"says {subject.class_name(one.label)}, {one.probability:.0%}" for one in found]
    titles = [f"{name}\n{said}" for name, said in zip(pictures.names, says)]
    side = int((hidden_squares(patch_grid(subject.model.spec), squares)[0] == 0).sum())
    record.figure("saliency", plots.saliency_maps(pictures.pixels, found, titles, side))
    maps = "occlusion, gradient" + ("" if found[0].classes is None else ", class map")
    left = "" if found[0].classes is not None else "; no class map: the scores are no mean over patches"
    more = f" (the first of {given})" if given > len(found) else ""
    return answer.section(f"{maps} of {len(found)} pictures{more}{left}")


def alike(subject: Subject, record: Record, given: Pictures | None, bank: Pictures | None, k: int) -> Section:
    if subject.model.spec.image_size is None:
        return Section("neighbours", "the model reads no pictures")
    known = bank or given
    if known is None or len(known.names) < 2:
        return Section("neighbours", "name two pictures or more, or a run whose data are there")
    answer = Answer(record, "neighbours")
    queries = first(given or known, SHOWN)
    table = features(subject.model, subject.read(known.pixels))
    among = given is None or bank is None
    looked = table[: len(queries.names)] if among else features(subject.model, subject.read(queries.pixels))
    found = neighbours(looked, table, k, torch.arange(len(queries.names)) if among else None)

    def caption(pictures: Pictures, index: int) -> str:
        named = "" if pictures.labels is None else f": {subject.class_name(int(pictures.labels[index]))}"
        return pictures.names[index] + named

    rows = [
        (caption(queries, query), rank, caption(known, near.index), near.cosine)
        for query, row in enumerate(found)
        for rank, near in enumerate(row, start=1)
    ]
    record.table("neighbours", ("query", "rank", "neighbour", "cosine"), rows, "Cosine of the pooled features.")
    drawn = [
        [(queries.pixels[query], caption(queries, query))]
        + [(known.pixels[n.index], f"{caption(known, n.index)}\n{n.cosine:.2f}") for n in row]
        for query, row in enumerate(found)
    ]
    text = f"{len(queries.names)} queries among {len(known.names)} pictures"
    if known.labels is not None and len(known.names) > 2:
        text += f"; the nearest one has the same class for {agreement(table, known.labels):.1%} of them"
    record.figure("neighbours", plots.neighbour_rows(drawn, f"{text}; numbers are cosines of the pooled features"))
    return answer.section(text)
