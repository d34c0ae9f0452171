"""Small model folders of every task."""

from __future__ import annotations

from pathlib import Path

import allmlp
from allmlp.data.frequency import Frequency
from allmlp.data.preprocessing import ImagePreprocessing, SeriesPreprocessing, TextPreprocessing, write_preprocessing
from allmlp.data.tokenizer import TOKENIZER_FILE, Tokenizer, TokenizerConfig
from allmlp.layers import Block, ChannelMlp, ClassifierHead, MeanPool, PatchEmbed, SpatialGatingUnit, TokenMlp
from allmlp.layers.head import QAHead
from allmlp.layers.mixers.mixer import TokenMixer
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp_text
from allmlp.models.model import ModelSpec
from allmlp.models.seq2seq import resmlp_seq2seq
from tiny import randomize, tiny

TEXT = ["the cat sat on the red mat", "a dog jumped over the blue fence", "one two three four five six seven"] * 10
CLASSES = ("cat", "dog", "ship")
TASKS = ("text", "causal", "classes", "span", "translation")


def image_folder(folder: Path, channels: int = 3, mixer: bool = False, token: TokenMixer | None = None) -> Path:
    gated = Block(channel=ChannelMlp(32, inner=SpatialGatingUnit("split")))
    token = TokenMlp(10) if mixer else token
    block = Block(token, channel=ChannelMlp(32)) if token else gated
    stem = PatchEmbed((8, 12), (4, 4), in_chans=channels)
    spec = Encoder(width=16, depth=2, block=block, stem=stem, pool=MeanPool(), head=ClassifierHead(len(CLASSES)))
    model = allmlp.create(spec, seed=0)
    randomize(model)
    allmlp.save(model, folder)
    write_preprocessing(folder, ImagePreprocessing((0.4,) * channels, (0.2,) * channels, CLASSES, crop_pct=0.9))
    return folder


def tokenizer() -> Tokenizer:
    return TokenizerConfig(vocab_size=70).build(TEXT)


def text_folder(folder: Path, task: str) -> Path:
    words = tokenizer()
    specs: dict[str, ModelSpec] = {
        "text": gmlp_text(2, 16, 32, seq_len=24, vocab_size=len(words)),
        "causal": gmlp_text(2, 16, 32, seq_len=24, vocab_size=len(words), causal=True),
        "translation": resmlp_seq2seq(1, 16, 2, seq_len=12, vocab_size=len(words)),
    }
    if task in ("classes", "span"):
        spec = gmlp_text(2, 16, 32, seq_len=48, vocab_size=len(words))
        specs["classes"] = spec.replace(pool=MeanPool(), head=ClassifierHead(3))
        specs["span"] = spec.replace(head=QAHead())
    model = allmlp.create(specs[task], seed=0)
    randomize(model, spread=0.1)
    allmlp.save(model, folder)
    name = "text" if task == "causal" else task
    write_preprocessing(folder, TextPreprocessing(name, 24, CLASSES if task == "classes" else ()))  # type: ignore[arg-type]
    (folder / TOKENIZER_FILE).write_text(words.to_json(), encoding="utf8")
    return folder


def series_folder(folder: Path, quantiles: tuple[float, ...] = (0.1, 0.5, 0.9)) -> Path:
    """Of two columns, in steps of a day."""
    spec = tiny(allmlp.preset("patchtsmixer").spec).configure(in_chans=2, horizon=4, quantiles=quantiles)
    model = allmlp.create(spec, seed=0)
    randomize(model, spread=0.1)
    allmlp.save(model, folder)
    known = SeriesPreprocessing(("heat", "load"), Frequency(86_400_000), ("",), ((5.0, 1.0),), ((2.0, 0.5),), "day")
    write_preprocessing(folder, known)
    return folder
