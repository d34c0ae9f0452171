"""The sections on example images: which patches a prediction depends on, and nearest neighbors."""

from __future__ import annotations

import torch

from allmlp.analysis import figures
from allmlp.analysis.figures import FigureText
from allmlp.analysis.neighbors import MIN_COSINE, agreement, features, nearest_neighbors
from allmlp.analysis.output_folder import OutputFolder, Section, cells
from allmlp.analysis.saliency import SQUARES, occlusion_squares, patch_grid, saliency
from allmlp.analysis.target import AnalysisTarget, NamedImages, affordable_images
from allmlp.errors import UserError, plural

EXAMPLES = 8
"""The largest number of images that are explained, and of queries."""


def first(images: NamedImages, count: int) -> NamedImages:
    labels = None if images.labels is None else images.labels[:count]
    return NamedImages(images.names[:count], images.pixels[:count], labels)


def saliency_section(
    target: AnalysisTarget, output: OutputFolder, images: NamedImages | None, available: int
) -> Section:
    """Saliency maps of `images`, the first of the `available` ones."""
    if target.model.spec.input_size is None:
        return Section("saliency", "the model does not read images")
    if target.output != "classes":
        return Section("saliency", f"the model outputs {target.output}, not classes: there is no prediction to explain")
    if images is None:
        return Section("saliency", "no images: give image files as arguments")
    try:
        squares = affordable_images(target.model, SQUARES, least=16)
        explained = saliency(target.model, target.normalize(images.pixels), squares)
    except UserError as reason:
        return Section("saliency", str(reason))
    rows = []
    for name, one in zip(images.names, explained):
        for method, values in (("occlusion", one.occlusion), ("gradient", one.gradient), ("class map", one.class_map)):
            if values is not None:
                start = name, target.class_name(one.label), one.probability, method
                rows += [(*start, *cell) for cell in cells(values)]
    columns = ("image", "class", "probability", "method", "row", "column", "value")
    about = "occlusion: log-probability lost, in nats; gradient: logit per standard deviation; class map: logits."
    output.table("saliency", columns, rows, about)
    predictions = [f"{target.class_name(one.label)} {one.probability:.0%}" for one in explained]
    titles = [f"{name}\npredicted: {prediction}" for name, prediction in zip(images.names, predictions)]
    side = int((occlusion_squares(patch_grid(target.model.spec), squares)[0] == 0).sum())
    output.figure("saliency", figures.saliency_maps(images.pixels, explained, titles, side))
    mapped = explained[0].class_map is not None
    text = f"occlusion, gradient{', class map' if mapped else ''} of {plural(len(explained), 'image')}"
    text += f" (the first of {available})" if available > len(explained) else ""
    return output.section("saliency", text if mapped else f"{text}; class maps need mean pooling and a linear head")


def neighbor_section(
    target: AnalysisTarget, output: OutputFolder, given: NamedImages | None, bank: NamedImages | None, k: int
) -> Section:
    """The nearest neighbors of the first given images in the bank, or among each other."""
    if target.model.spec.input_size is None:
        return Section("neighbors", "the model does not read images")
    searched = bank or given
    if searched is None or len(searched.names) < 2:
        return Section("neighbors", "give two or more image files, or a run whose dataset is available")
    queries = first(given or searched, EXAMPLES)
    table = features(target.model, target.normalize(searched.pixels))
    same = given is None or bank is None
    query_features = table[: len(queries.names)] if same else features(target.model, target.normalize(queries.pixels))
    query_indices = torch.arange(len(queries.names)) if same else None
    neighbors = nearest_neighbors(query_features, table, k, query_indices, MIN_COSINE)
    if not any(neighbors):
        return Section("neighbors", f"no two of the images have a cosine similarity of {MIN_COSINE} or more")

    def caption(images: NamedImages, index: int) -> str:
        return images.names[index] + ("" if images.labels is None else f": {target.label_text(images.labels[index])}")

    rows = [
        (caption(queries, query), rank, caption(searched, near.index), near.cosine)
        for query, row in enumerate(neighbors)
        for rank, near in enumerate(row, start=1)
    ]
    about = f"Cosine similarity of the pooled features; images below {MIN_COSINE} are left out."
    output.table("neighbors", ("query", "rank", "neighbor", "cosine"), rows, about)
    drawn = [
        [(queries.pixels[query], caption(queries, query))]
        + [(searched.pixels[near.index], f"{caption(searched, near.index)}\n{near.cosine:.2f}") for near in row]
        for query, row in enumerate(neighbors)
    ]
    text = f"{plural(len(queries.names), 'query', 'queries')} in {plural(len(searched.names), 'image')}"
    alone = sum(not row for row in neighbors)
    if alone:
        text += f", {alone} without a neighbor"
    if searched.labels is not None and target.has_class_labels(searched.labels) and len(searched.names) > 2:
        text += f"; nearest neighbor has the same class for {agreement(table, searched.labels):.1%} of the images"
    note = f"{text}; numbers are cosine similarities of the pooled features, none below {MIN_COSINE} is shown"
    words = FigureText(
        "Nearest neighbors in feature space", note, "query, then its neighbors, nearest first", "queries"
    )
    output.figure("neighbors", figures.image_rows(drawn, words))
    return output.section("neighbors", text)
