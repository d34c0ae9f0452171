"""Sentence embeddings: a text encoder of allmlp, fine-tuned by sentence-transformers on pairs that mean the same.

python examples/sentence_embeddings.py runs/wiki_gmlp out
"""

from __future__ import annotations

import sys
from pathlib import Path

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss

import allmlp.hf

PAIRS = [
    ("a dog jumped over the fence", "the dog jumped the fence"),
    ("the cat sat on the mat", "a cat sat on a mat"),
    ("one two three", "three two one"),
]


def main(encoder: Path, out: Path, steps: int = 10) -> SentenceTransformer:
    allmlp.hf.wrap(encoder).save_pretrained(out / "encoder")
    allmlp.hf.processor(encoder).save_pretrained(out / "encoder")
    model = SentenceTransformer(str(out / "encoder"))  # with mean pooling
    arguments = SentenceTransformerTrainingArguments(str(out / "training"), max_steps=steps, report_to="none")
    anchors, positives = zip(*PAIRS)
    pairs = Dataset.from_dict({"anchor": anchors, "positive": positives})
    SentenceTransformerTrainer(model, arguments, pairs, loss=MultipleNegativesRankingLoss(model)).train()
    model.save(str(out / "embeddings"))
    return model


if __name__ == "__main__":
    trained = main(Path(sys.argv[1]), Path(sys.argv[2]))
    print(trained.similarity(*(trained.encode(list(side)) for side in zip(*PAIRS))))
