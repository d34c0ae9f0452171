"""Tiny trained-looking models of every kind as folders, for what is exported."""

from __future__ import annotations

from pathlib import Path

import torch

import allmlp
from allmlp.data.inputs import Inputs, TextInputs, write_inputs
from allmlp.data.tokenizer import FILE, Tokenize, train
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.zoo import presets
from tiny import IMAGES, SENTENCES, randomise

WORDS = ["the cat sat on the mat", "a dog ran over the hill", "cats and dogs do not like the rain"]


def kind(name: str) -> str:
    spec = SENTENCES[name]
    if isinstance(spec, EncoderDecoder):
        return "translation"
    return "images" if name in IMAGES else "causal" if spec.block.causal else "text"


KINDS = {(presets()[name].family, kind(name)): name for name in reversed(SENTENCES)}
"""One sentence of the grammar for every family and what it reads."""
REPRESENTATIVES = list(KINDS.values())


def shallow(name: str, **changes: int) -> Encoder | EncoderDecoder:
    spec = SENTENCES[name].configure(**changes)
    if isinstance(spec, EncoderDecoder):
        return spec.replace(encoder=spec.encoder.replace(depth=1), decoder=spec.decoder.replace(depth=1))
    return spec.replace(depth=1)


def make(folder: Path, name: str) -> allmlp.Model:
    """A folder with everything that lies beside a trained model."""
    if kind(name) == "images":
        model, inputs = shallow(name).build(), Inputs((0.4, 0.5, 0.6), (0.2, 0.3, 0.4), tuple("abcde"), 0.9)
    else:
        tokenizer = train(Tokenize(vocabulary=60), WORDS)
        model = shallow(name, vocabulary=len(tokenizer)).build()
        inputs = TextInputs("translation" if kind(name) == "translation" else "text", 12)
    model.eval()
    randomise(model)
    allmlp.save(model, folder)
    write_inputs(folder, inputs)
    if isinstance(inputs, TextInputs):
        (folder / FILE).write_text(tokenizer.to_json(), encoding="utf8")
    with torch.no_grad():
        return allmlp.load(folder)
