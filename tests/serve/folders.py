"""Small model folders of every kind that can be served, made on the spot, and a server for them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import allmlp
from allmlp.data.inputs import Inputs, TextInputs, write_inputs
from allmlp.data.tokenizer import FILE, Tokenize, Tokenizer
from allmlp.layers import Block, ChannelMlp, Classes, Mean, Patches, SpatialGate, TokenMlp
from allmlp.layers.head import Span
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp_text
from allmlp.models.model import ModelSpec
from allmlp.models.seq2seq import resmlp_seq2seq
from allmlp.serve.app import application, open_service
from allmlp.serve.batching import Batcher
from allmlp.serve.limits import Allowed
from allmlp.serve.server import Server, listen
from tiny import randomise

TEXT = ["the cat sat on the red mat", "a dog jumped over the blue fence", "one two three four five six seven"] * 10
CLASSES = ("cat", "dog", "ship")
GIVES = ("text", "causal", "classes", "span", "translation")


def picture_folder(folder: Path, channels: int = 3, mixer: bool = False) -> Path:
    gated = Block(channel=ChannelMlp(32, inner=SpatialGate("split")))
    block = Block(TokenMlp(10), channel=ChannelMlp(32)) if mixer else gated
    stem = Patches((8, 12), (4, 4), in_channels=channels)
    spec = Encoder(width=16, depth=2, block=block, stem=stem, pool=Mean(), head=Classes(len(CLASSES)))
    model = allmlp.create(spec, seed=0)
    randomise(model)
    allmlp.save(model, folder)
    write_inputs(folder, Inputs((0.4,) * channels, (0.2,) * channels, CLASSES, crop=0.9))
    return folder


def tokenizer() -> Tokenizer:
    return Tokenize(vocabulary=70).build(TEXT)


def text_folder(folder: Path, gives: str) -> Path:
    words = tokenizer()
    specs: dict[str, ModelSpec] = {
        "text": gmlp_text(2, 16, 32, length=24, vocabulary=len(words)),
        "causal": gmlp_text(2, 16, 32, length=24, vocabulary=len(words), causal=True),
        "translation": resmlp_seq2seq(1, 16, 2, length=12, vocabulary=len(words)),
    }
    if gives in ("classes", "span"):
        spec = gmlp_text(2, 16, 32, length=48, vocabulary=len(words))
        specs["classes"] = spec.replace(pool=Mean(), head=Classes(3))
        specs["span"] = spec.replace(head=Span())
    model = allmlp.create(specs[gives], seed=0)
    randomise(model, spread=0.1)
    allmlp.save(model, folder)
    told = "text" if gives == "causal" else gives
    write_inputs(folder, TextInputs(told, 24, CLASSES if gives == "classes" else ()))  # type: ignore[arg-type]
    (folder / FILE).write_text(words.to_json(), encoding="utf8")
    return folder


@contextmanager
def running(folder: Path, batcher: Batcher | None = None, allowed: Allowed = Allowed()) -> Iterator[int]:
    """The port of a server in a thread."""
    batcher = batcher or Batcher()
    server = Server(application(open_service(folder), folder.name, batcher, allowed), batcher)
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.handle_exit(signal.SIGTERM, None)
            thread.join(20)
    assert not thread.is_alive()
