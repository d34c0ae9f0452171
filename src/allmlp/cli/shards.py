"""allmlp shards."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from allmlp.cli.app import app, examples, next_command, say
from allmlp.errors import UserError, plural


class Stored(StrEnum):
    """How pixels are stored."""

    RAW = "raw"
    JPEG = "jpeg"
    WEBP = "webp"


@app.command(
    epilog=examples(
        "allmlp shards photos/ photos_256/                          # raw pixels, which need no decoding",
        "allmlp shards photos/ photos_256/ --format jpeg            # a fourth of the space",
        "allmlp shards photos/ small/ --size 128 --format webp",
    )
)
def shards(
    source: Annotated[str, typer.Argument(help="Labeled images: a folder per class, a table, shards, a dataset.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    size: Annotated[int, typer.Option(help="Resize larger images to this short side.", min=1, max=65535)] = 256,
    form: Annotated[Stored, typer.Option("--format", help="Raw pixels, JPEG or WebP: raw, jpeg or webp.")] = Stored.RAW,
    quality: Annotated[int, typer.Option(help="Quality of jpeg and webp.", min=1, max=100)] = 95,
    per_shard: Annotated[int, typer.Option(help="Images per shard.", min=1)] = 5000,
) -> None:
    """Decode and resize images once, into tar shards that train, eval and predict read much faster.

    After an interruption, the same command continues.
    """
    from allmlp.data.detect import detect_data
    from allmlp.data.shard_writer import ShardFormat, write_shards

    dataset = detect_data(source).load()
    for note in dataset.notes:
        say(note)
    try:
        written = write_shards(
            dataset,
            out,
            ShardFormat(size, form.value, quality, per_shard),
            lambda name, images: say(f"{out / name}: {plural(images, 'image')} so far"),
        )
    except BlockingIOError:
        raise UserError(f"another process is writing shards to {out}") from None
    gigabytes = sum(file.stat().st_size for file in out.glob("*.tar")) / 1e9
    rest = f", {written.left_out:,} left out" if written.left_out else ""
    print(f"{out}: {plural(written.images, 'image')}{rest}, {gigabytes:.3g} GB")
    next_command("train", f"{out}{os.sep}")
