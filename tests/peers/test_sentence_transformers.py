"""A text encoder inside sentence-transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import allmlp
from folders import text_folder
from peers.installed import example, peer

sentence_transformers = peer("sentence_transformers")

import allmlp.hf  # noqa: E402

TEXTS = ["the cat sat on the mat", "a dog jumped"]


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return text_folder(tmp_path / "ours", "text")


def test_embeddings_are_ours(encoder: Path, tmp_path: Path) -> None:
    """An encoder as a module with mean pooling, also after saving and loading."""
    allmlp.hf.wrap(encoder).save_pretrained(tmp_path / "saved")
    allmlp.hf.processor(encoder).save_pretrained(tmp_path / "saved")
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert type(model[0].auto_model) is allmlp.hf.AllMlpModel and model[1].pooling_mode == "mean"
    expected = allmlp.embed(encoder, TEXTS)
    np.testing.assert_allclose(model.encode(TEXTS), expected, atol=1e-6)
    model.save(str(tmp_path / "again"))
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "again"), device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), expected, atol=1e-6)


def test_fine_tuning(encoder: Path, tmp_path: Path) -> None:
    """The script of the guide: pairs become more alike than others, and the encoder can be loaded by both libraries."""
    main = example("sentence_embeddings")
    left, right = (list(side) for side in zip(*main.__globals__["PAIRS"]))
    model = main(encoder, tmp_path / "out", 20)
    likeness = model.similarity(model.encode(left), model.encode(right))
    before = sentence_transformers.SentenceTransformer(str(tmp_path / "out" / "encoder"), device="cpu")
    first = before.similarity(before.encode(left), before.encode(right))
    others = likeness.sum() - likeness.trace()
    assert likeness.trace() / 3 - others / 6 > first.trace() / 3 - (first.sum() - first.trace()) / 6
    np.testing.assert_allclose(allmlp.embed(tmp_path / "out" / "embeddings", left), model.encode(left), atol=1e-6)
