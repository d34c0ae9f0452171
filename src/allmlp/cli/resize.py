"""allmlp resize."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from allmlp.cli.app import app, examples, next_for_head
from allmlp.errors import UserError


@app.command(
    epilog=examples(
        "allmlp resize mixer/ bigger/ --img-size 448",
        "allmlp resize mixer/ bigger/ --img-size 448 --rule tile",
        "allmlp resize gmlp/ wide/ --img-size 160x256",
        "allmlp resize bert/ longer/ --seq-len 512",
        "allmlp resize runs/sales longer/ --seq-len 168",
    )
)
def resize(
    source: Annotated[Path, typer.Argument(help="A model folder.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    img_size: Annotated[str | None, typer.Option(help="New image size: 448 or 160x256 (height x width).")] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="New length of texts in tokens, or look-back of series in steps.", min=1)
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(help="interpolate (any size), or tile (multiples of the size, as in the MLP-Mixer paper)."),
    ] = None,
) -> None:
    """Resize a trained model to another image size, sequence length or look-back."""
    from allmlp.models.grid import RULES
    from allmlp.models.series_encoder import SeriesEncoder
    from allmlp.spec import parse
    from allmlp.weights.folder import load, read_spec, save

    if (img_size is None) == (seq_len is None):
        raise UserError("give one new size: --img-size 448 or --seq-len 512")
    if rule is not None and rule not in RULES:
        raise UserError(f"--rule must be {' or '.join(RULES)}, not {rule!r}")
    how: Any = rule
    size = None if img_size is None else parse(img_size, tuple[int, int], "--img-size")
    model = load(source, img_size=size, seq_len=seq_len, rule=how, dtype=None)
    save(model, target, like=source)
    print(f"{target}: {read_spec(source).input_spec} -> {model.spec.input_spec}")
    series = isinstance(model.spec, SeriesEncoder)
    next_for_head(
        target, *(("predict", target, "TABLE", "--out", "forecast.csv") if series else ("eval", target, "DATA"))
    )
