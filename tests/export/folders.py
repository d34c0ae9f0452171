"""Folders of tiny models of every kind, to export."""

from __future__ import annotations

from pathlib import Path

import torch

import allmlp
from allmlp.data.preprocessing import ImagePreprocessing, TextPreprocessing, write_preprocessing
from allmlp.data.tokenizer import TOKENIZER_FILE, TokenizerConfig, train_tokenizer
from allmlp.models.encoder import Encoder
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.zoo import presets
from tiny import IMAGES, TINY_SPECS, randomize

WORDS = ["the cat sat on the mat", "a dog ran over the hill", "cats and dogs do not like the rain"]


def kind(name: str) -> str:
    spec = TINY_SPECS[name]
    if isinstance(spec, EncoderDecoder):
        return "translation"
    return "images" if name in IMAGES else "causal" if spec.block.causal else "text"


KINDS = {(presets()[name].family, kind(name)): name for name in reversed(TINY_SPECS)}
"""One preset for every family and kind of input."""
REPRESENTATIVES = list(KINDS.values())


def shallow(name: str, **changes: int) -> Encoder | EncoderDecoder:
    spec = TINY_SPECS[name].configure(**changes)
    if isinstance(spec, EncoderDecoder):
        return spec.replace(encoder=spec.encoder.replace(depth=1), decoder=spec.decoder.replace(depth=1))
    return spec.replace(depth=1, stages=spec.stages[:1])


def make(folder: Path, name: str) -> allmlp.Model:
    """Save a model with the files that a trained one has next to it."""
    if kind(name) == "images":
        model, inputs = shallow(name).build(), ImagePreprocessing((0.4, 0.5, 0.6), (0.2, 0.3, 0.4), tuple("abcde"), 0.9)
    else:
        tokenizer = train_tokenizer(TokenizerConfig(vocab_size=60), WORDS)
        model = shallow(name, vocab_size=len(tokenizer)).build()
        inputs = TextPreprocessing("translation" if kind(name) == "translation" else "text", 12)
    model.eval()
    randomize(model)
    allmlp.save(model, folder)
    write_preprocessing(folder, inputs)
    if isinstance(inputs, TextPreprocessing):
        (folder / TOKENIZER_FILE).write_text(tokenizer.to_json(), encoding="utf8")
    with torch.no_grad():
        return allmlp.load(folder)
