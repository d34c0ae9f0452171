"""What the language datasets give without a model: majority classes, word overlap, copied sources, word frequencies.

PYTHONPATH=docs/tools python -m results.floors FOLDER      # a folder with the files named below; minutes on one core

Writes docs/logs/floors.json.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from allmlp.data.corpus import Corpus
from allmlp.data.dataset import Data
from allmlp.data.labeled_text import LabeledText
from allmlp.data.parallel_corpus import ParallelCorpus
from allmlp.data.squad import Squad
from allmlp.data.tokenizer import TokenizerConfig
from allmlp.files import write_json_atomically
from allmlp.provenance import environment
from allmlp.tasks.classify_text import ClassifyText
from allmlp.tasks.masked_lm import MaskedLM
from allmlp.tasks.question_answering import QuestionAnswering
from allmlp.tasks.task import Task
from allmlp.tasks.translate import Translation
from results.records import LOGS


def datasets(folder: str) -> Iterator[tuple[str, Task, Data]]:
    nlp, vocabulary = f"{folder}/nlp", TokenizerConfig(path=f"{folder}/nlp/bert-base-uncased-vocab.txt")
    for split in ("dev", "test"):
        sst2 = LabeledText(f"{nlp}/sst2-train.tsv.xz", f"{nlp}/sst2-{split}.tsv.xz", tokenizer=vocabulary)
        yield f"SST-2 {split}", ClassifyText(tfidf=True), sst2
    rte = LabeledText(f"{nlp}/rte-train.tsv.xz", f"{nlp}/rte-dev.tsv.xz", tokenizer=vocabulary)
    yield "RTE dev", ClassifyText(), rte
    sick = LabeledText(f"{nlp}/sick.tsv.xz", label_column="entailment", tokenizer=vocabulary)
    yield "SICK, split by sentence", ClassifyText(), sick
    xquad, squad = f"{nlp}/squad1.1-xquad-en.json.xz", f"{nlp}/squad1.1-dev.json.xz"
    yield "XQuAD, English", QuestionAnswering(), Squad(xquad, xquad, vocabulary)
    yield "SQuAD 1.1 dev", QuestionAnswering(), Squad(xquad, squad, vocabulary)
    yield "SQuAD 2.0 dev", QuestionAnswering(), Squad(xquad, f"{nlp}/squad2-dev.json.xz", vocabulary)
    for test in ("2016_flickr", "2017_flickr", "2018_flickr"):
        for source, target in (("de", "en"), ("en", "de")):
            files = (f"{folder}/translation/multi30k-{name}.tsv.xz" for name in ("train", f"test_{test}"))
            tokenizer = TokenizerConfig("bpe", 4096, lowercase=False)
            yield f"Multi30k {test} {source}-{target}", Translation(), ParallelCorpus(*files, source, target, tokenizer)
    wiki = Corpus(f"{folder}/text/wiki-train-0.txt.xz", f"{folder}/text/wiki-valid.txt.xz", vocabulary)
    yield "Wikipedia, 198 articles", MaskedLM(), wiki


def main(folder: str) -> None:
    rows: list[dict[str, Any]] = []
    for name, task, data in datasets(folder):
        dataset = data.load()
        about = {"data": name, "examples": len(dataset.test), "sha256": dataset.checksum()}
        rows.append(about | task.floors(dataset, dataset.test))
        print(rows[-1], flush=True)
    found = {"environment": environment(torch.device("cpu")), "rows": rows}
    found["environment"]["command"] = ["python", "-m", "results.floors", Path(folder).name]
    write_json_atomically(LOGS / "floors.json", found)


if __name__ == "__main__":
    main(sys.argv[1])
