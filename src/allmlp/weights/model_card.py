"""The model card: a README.md that describes a model, its usage, training and results, as the Hub shows it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from allmlp import __version__
from allmlp.data.preprocessing import ImagePreprocessing, Preprocessing, SeriesPreprocessing, TextPreprocessing
from allmlp.errors import plural
from allmlp.files import RUN
from allmlp.layers.stem import PatchEmbed
from allmlp.models.cost import measure
from allmlp.models.encoder import Encoder
from allmlp.models.model import ModelSpec
from allmlp.models.series_encoder import SeriesEncoder
from allmlp.spec import format_spec

README = "README.md"
TASKS = {
    "text": "fill-mask",
    "classes": "text-classification",
    "span": "question-answering",
    "translation": "translation",
}
"""The task of a text model -> the Hub's name for it."""
SHOWN = ("data", "task", "batch_size", "budget", "optim", "schedule", "ema_decay", "seed", "precision", "init_from")
"""Fields of a run that the card shows."""


def card(
    spec: ModelSpec,
    title: str,
    inputs: Preprocessing | None = None,
    run: Path | None = None,
    license: str | None = None,
) -> str:
    """The card of a model called `title`, with training and results from the run in the folder `run`."""
    cost = measure(spec)
    sections = [
        front_matter(spec, inputs, license),
        f"# {title}",
        f"{summary(spec, inputs)} {cost.parameters / 1e6:,.2f} M parameters, {cost.macs / 1e9:,.3f} G "
        f"multiply-adds per example. Saved by allmlp {__version__}.",
        "## Architecture",
        code(format_spec(spec), "python"),
        "## Usage",
        code(usage(title, spec), "python"),
        *preprocessing(inputs),
        *training(run),
        "## License",
        license or "Not stated.",
    ]
    return "\n\n".join(sections) + "\n"


def front_matter(spec: ModelSpec, inputs: Preprocessing | None, license: str | None) -> str:
    """The metadata that the Hub reads."""
    lines = ["---", "library_name: allmlp", "tags:", "- allmlp", *(f"- {tag}" for tag in tags(spec))]
    kind = pipeline(spec, inputs)
    lines += [f"pipeline_tag: {kind}"] if kind else []
    lines += [f"license: {license.lower()}"] if license else []
    return "\n".join([*lines, "---"])


def tags(spec: ModelSpec) -> list[str]:
    """Tags for the model's kinds of token mixing."""
    kinds = {type(part).__name__ for part in spec.children()}
    names = {"TokenMlp": "mlp-mixer", "TokenLinear": "resmlp", "SpatialGatingUnit": "gmlp", "Attention": "transformer"}
    return [tag for kind, tag in names.items() if kind in kinds]


def pipeline(spec: ModelSpec, inputs: Preprocessing | None) -> str | None:
    if isinstance(inputs, TextPreprocessing):
        causal = isinstance(spec, Encoder) and spec.block.causal
        return "text-generation" if inputs.task == "text" and causal else TASKS[inputs.task]
    if isinstance(spec, SeriesEncoder):
        return "time-series-forecasting"
    return "image-classification" if spec.input_size and getattr(spec, "head", True) else None


def summary(spec: ModelSpec, inputs: Preprocessing | None) -> str:
    text = f"Input: {spec.input_spec}."
    if inputs is None or not inputs.class_names:
        return text
    shown = ", ".join(inputs.class_names[:20]) + (", ..." if len(inputs.class_names) > 20 else "")
    return f"{text} {plural(len(inputs.class_names), 'class', 'classes')}: {shown}."


def usage(title: str, spec: ModelSpec) -> str:
    lines = ["import allmlp, torch", "", f'model = allmlp.from_pretrained("{title}").float()']
    if isinstance(spec, Encoder):
        stem = spec.stem
        if isinstance(stem, PatchEmbed):
            shape = (1, stem.in_chans, *stem.img_size)
            lines.append(f"logits = model(torch.randn({', '.join(map(str, shape))}))")
        else:
            lines.append(f"logits = model(torch.randint({stem.vocab_size}, (1, {stem.tokens})))")  # type: ignore[attr-defined]
    if isinstance(spec, SeriesEncoder):
        lines.append(f"forecast = model(torch.randn(1, {spec.stem.seq_len}, {spec.stem.in_chans}))")
    return "\n".join(lines)


def preprocessing(inputs: Preprocessing | None) -> list[str]:
    if isinstance(inputs, ImagePreprocessing):
        return [
            f"Preprocessing: a center crop of {inputs.crop_pct:.1%} of the short side, pixels divided by 255, mean "
            f"{list(inputs.mean)}, standard deviation {list(inputs.std)}, as in `allmlp predict FOLDER image.jpg`."
        ]
    if isinstance(inputs, SeriesPreprocessing):
        return [
            f"Preprocessing: values {inputs.frequency} apart, minus the mean of their series and column, divided by "
            f"its standard deviation (preprocessing.json). Columns: {', '.join(inputs.columns)}."
        ]
    return ['Preprocessing: the tokenizer in this folder, as in `allmlp predict FOLDER "a text"`.'] if inputs else []


def code(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```"


# --- the run -----------------------------------------------------------------------------------------------


def training(run: Path | None) -> list[str]:
    """Training and results of the model, as recorded in the folder of the run."""
    if run is None:
        return []
    record = read_record(run / RUN)
    sections = []
    if record:
        rows = [f"| {name} | {shown} |" for name in SHOWN if (shown := show(record.get("run", {}).get(name)))]
        about = {**record.get("environment", {}), "processes": record.get("processes", 1)}
        rows += [f"| {name} | {about[name]} |" for name in ("allmlp", "torch", "device", "processes") if name in about]
        command = about.get("command")
        text = f"allmlp {shlex.join(map(str, command[1:]))}" if isinstance(command, list) else ""
        sections += ["## Training", "\n".join(["| | |", "|---|---|", *rows])]
        sections += [code(without_folders(text), "")] if text else []
    sections += results(record.get("result"))
    return sections


def results(result: Any) -> list[str]:
    """A table of the metrics of the saved model, with a column for each split it was evaluated on."""
    result = result if isinstance(result, dict) else {}
    splits = {split: result[split] for split in ("validation", "test") if isinstance(result.get(split), dict)}
    table = {
        name: [f"{v[name]:.4g}" if isinstance(v.get(name), (int, float)) else "" for v in splits.values()]
        for values in splits.values()
        for name in values
    }
    if not table:
        return []
    rows = [["", *splits], ["---"] * (1 + len(splits)), *([name, *shown] for name, shown in table.items())]
    steps = f"The saved weights are those after {plural(result.get('best_step', result.get('steps')), 'step')}."
    return ["## Results", "\n".join(f"| {' | '.join(row)} |" for row in rows), steps]


def read_record(file: Path) -> dict[str, Any]:
    try:
        record = json.loads(file.read_text(encoding="utf8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def show(value: Any) -> str:
    """Format a field of a run; a spec by its kind and its plain fields."""
    if not isinstance(value, dict):
        return "" if value is None else without_folders(str(value))
    fields = [f"{name} {show(part)}" for name, part in value.items() if name != "kind" and plain(part)]
    return f"{value.get('kind', '')} ({', '.join(fields)})" if fields else str(value.get("kind", ""))


def plain(value: Any) -> bool:
    return isinstance(value, (int, float, str)) and not isinstance(value, bool) and value != ""


def without_folders(text: str) -> str:
    """Remove the folders of absolute paths, which only exist on the machine that trained the model."""
    return re.sub(r"(?<![\w.:/])~?/(?:[^/\s='\"]+/)+", "", text)
