"""Attention maps of the server where tokens or patches are not those of the input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("fastapi")
import allmlp
from allmlp.analysis.attention_maps import text_input
from allmlp.data.preprocessing import ImagePreprocessing, write_preprocessing
from allmlp.layers import Attention, Block, ChannelMlp, ClassifierHead, MeanPool, PatchEmbed, TokenEmbed
from allmlp.layers.stage import PatchMerge, Stage
from allmlp.models.cait import cait
from allmlp.models.encoder import Encoder
from allmlp.models.seq2seq import transformer_seq2seq
from allmlp.serve.app import load_service
from allmlp.serve.attention import AttentionInput, attend_to_images, attend_to_texts
from allmlp.serve.images import ImageService
from allmlp.serve.maps import layers
from allmlp.serve.texts import TextService
from folders import CLASSES, text_folder, tokenizer


@pytest.mark.parametrize("text", ["the", "the cat sat", "the cat sat on the red mat"])
def test_attention_inside_a_decoder(tmp_path: Path, text: str) -> None:
    """A token attends to those that the decoder reads: the beginning, then its own translation."""
    folder = text_folder(tmp_path, "translation")
    model = allmlp.create(transformer_seq2seq(1, 16, 2, seq_len=12, vocab_size=len(tokenizer())), seed=0)
    allmlp.save(model, folder)
    service = load_service(folder)
    assert isinstance(service, TextService)
    items = [AttentionInput(text, f"decoder.blocks.0.{branch}.mix") for branch in ("token", "cross")]
    own, cross = attend_to_texts(service, items)
    known = text_input(service.model, service.tokenizer, text)
    assert own.row_tokens == cross.row_tokens == known.predicted
    assert own.column_tokens == ["[CLS]", *known.predicted[:-1]]
    assert cross.column_tokens == known.read
    for found in (own, cross):
        assert (found.height, found.width) == (len(found.row_tokens), len(found.column_tokens))


def test_attention_of_a_pair_of_texts(tmp_path: Path) -> None:
    """It was that of the first text alone, next to the classes of the pair."""
    block = Block(Attention(2), channel=ChannelMlp(16))
    stem = TokenEmbed(len(tokenizer()), 12, segments=2)
    spec = Encoder(width=8, depth=1, block=block, stem=stem, pool=MeanPool(), head=ClassifierHead(len(CLASSES)))
    allmlp.save(allmlp.create(spec, seed=0), text_folder(tmp_path, "classes"))
    service = load_service(tmp_path)
    assert isinstance(service, TextService)
    (found,) = attend_to_texts(service, [AttentionInput("the cat", "blocks.0.token.mix", "a red mat")])
    assert found.row_tokens == found.column_tokens
    assert found.row_tokens == ["[CLS]", "the", "cat", "[SEP]", "a", "red", "mat", "[SEP]"]
    assert (found.count, found.height, found.width) == (2, 8, 8)


def test_attention_after_a_merge_of_patches(tmp_path: Path) -> None:
    """The maps of a later stage are over its own, larger patches."""
    block = Block(Attention(2), channel=ChannelMlp(16))
    stages = (Stage(16, 1, block, PatchMerge()),)
    options = {"stem": PatchEmbed((16, 24), (4, 4)), "pool": MeanPool(), "head": ClassifierHead(3)}
    allmlp.save(allmlp.create(Encoder(width=8, depth=1, block=block, stages=stages, **options), seed=0), tmp_path)
    write_preprocessing(tmp_path, ImagePreprocessing((0.5,) * 3, (0.5,) * 3, CLASSES))
    service = load_service(tmp_path)
    assert isinstance(service, ImageService)
    pixels = torch.randint(256, (3, 16, 24), dtype=torch.uint8)
    items = [AttentionInput(pixels, f"blocks.{block}.token.mix") for block in (0, 1)]
    assert [(one.height, one.width) for one in attend_to_images(service, items)] == [(4, 6), (2, 3)]


def test_class_attention_to_an_image(tmp_path: Path) -> None:
    """The maps are over the patches, without the class token."""
    allmlp.save(allmlp.create(cait(1, 12, 0.1, 16, 4, 3, num_heads=2), seed=0), tmp_path)
    write_preprocessing(tmp_path, ImagePreprocessing((0.5,) * 3, (0.5,) * 3, CLASSES))
    service = load_service(tmp_path)
    assert isinstance(service, ImageService)
    known = [(one.name, one.kind, one.count) for one in layers(service.model)]
    names = ["blocks.0.token.mix", "pool.gathers.0", "pool.gathers.1"]
    assert known == [(name, "attention", 2) for name in names]
    pixels = torch.randint(256, (3, 16, 16), dtype=torch.uint8)
    found = attend_to_images(service, [AttentionInput(pixels, name) for name in names])
    assert [(one.height, one.width) for one in found] == [(4, 4)] * 3
