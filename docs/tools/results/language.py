"""Tables about language."""

from __future__ import annotations

from statistics import mean

from paper_tables.language import TABLES
from results.markdown import log, percent, table
from results.records import document, evaluation, seeds

PRETRAINED = {
    "wiki_gmlp": ("gMLP, 12 blocks, 44.0 M", "sst2_gmlp"),
    "wiki_bert": ("BERT, 9 blocks, 44.1 M", "sst2_bert"),
    "wiki_amlp": ("aMLP, 11 blocks, 43.9 M", "sst2_amlp"),
    "wiki_taught": ("gMLP, 18 blocks, 35.7 M, with MiniLM's features as targets", "sst2_taught_labelled"),
}
FINE_TUNED = {
    "sst2_taught": "the last, SST-2 with 300,000 unlabeled sentences in addition",
    "sst2_minilm": "its teacher, MiniLM of 6 layers, 22.7 M, published weights",
}
MIXERS = {
    "amlp": ("aMLP", ""),
    "relative": ("BERT with relative positions", "BERT base + rel pos"),
    "split": ("gMLP, multiplicative and split, Toeplitz", "Multiplicative, split gMLP"),
    "bert": ("BERT", "BERT base"),
    "additive": ("gMLP, additive", "Additive gMLP"),
    "multiplicative": ("gMLP, multiplicative", "Multiplicative gMLP"),
    "linear": ("gMLP, linear", "Linear gMLP"),
    "dense": ("gMLP, multiplicative and split, dense", ""),
    "noattention": ("BERT without attention scores", "BERT base + rel pos - attn"),
    "mixer": ("MLP-Mixer", "MLP-Mixer"),
}
"""Rows of wiki_table3: name, and the row of gMLP's table 3."""
TRANSLATIONS = (
    ("Transformer, 4 + 4 blocks, 8.42 M", "multi30k_transformer_4096", "multi30k_transformer_en_de"),
    ("the same with word dropout 0.2", "multi30k_transformer_words", "multi30k_transformer_words_en_de"),
    ("ResMLP, 6 + 6 blocks, 9.01 M", "multi30k_resmlp_4096", "multi30k_resmlp_en_de"),
    ("the same with word dropout 0.2", "multi30k_resmlp_words", "multi30k_resmlp_words_en_de"),
)
"""Model, and its logs for De-En and En-De."""


def floors() -> str:
    rows = []
    for row in document("floors")["rows"]:
        found = {name: value for name, value in row.items() if name not in ("data", "examples", "sha256")}
        rows.append((row["data"], f"{row['examples']:,}", ", ".join(floor(*one) for one in found.items())))
    return table(("data", "examples", "without a model"), rows)


def floor(name: str, value: float) -> str:
    texts = {
        "majority": f"most frequent class {percent(value)}",
        "tfidf_accuracy": f"TF-IDF and logistic regression {percent(value)}",
        "overlap_f1": f"word overlap: F1 {percent(value, 1)}",
        "overlap_exact_match": f"exact {percent(value, 1)}",
        "sentence_f1": f"best sentence: F1 {percent(value, 1)}",
        "empty_f1": f"no answer at all: F1 {percent(value, 1)}",
        "copy_bleu": f"source copied: BLEU {value:.1f}",
        "unigram_perplexity": f"word frequencies: perplexity {value:.0f}",
    }
    return texts[name]


def pretrained() -> str:
    rows = []
    for name, (model, sst2) in PRETRAINED.items():
        found, accuracy = evaluation(name), percent(evaluation(sst2)["accuracy"], 1)
        logs = f"{log(name)}, {log(sst2)}"
        rows.append((model, f"{found['step']:,}", f"{found['perplexity']:.2f}", accuracy, logs))
    for name, model in FINE_TUNED.items():
        rows.append((model, "", "", percent(evaluation(name)["accuracy"], 1), log(name)))
    return table(("model", "steps", "perplexity", "SST-2 dev", ""), rows)


def table3() -> str:
    (paper,) = [entry for entry in TABLES if entry.name == "gmlp_table3"]
    published = {row.label: row.cells[0] for row in paper.rows}
    rows = []
    for row, (model, label) in MIXERS.items():
        values = [evaluation("wiki_table3", row, seed)["perplexity"] for seed in seeds("wiki_table3", row)]
        rows.append((mean(values), (model, ", ".join(f"{value:.2f}" for value in values), published.get(label, ""))))
    header = "published, with 400 times the tokens and seven times the parameters"
    return table(("token mixing", "perplexity by seed", header), [cells for _, cells in sorted(rows)])


def toeplitz() -> str:
    found = document("toeplitz_dense")
    before, after = (
        f"{100 * min(part.values()):.0f} to {100 * max(part.values()):.0f} %"
        for part in (found["before"], found["after"])
    )
    return (
        "Dense matrices learn to be Toeplitz matrices: of the energy of each matrix of the dense gMLP,\n"
        f"{before} is in the means of its diagonals before training (chance: 255 of 16,384 numbers) and\n"
        f"{after} after it ([by layer](logs/toeplitz_dense.json))."
    )


def translation() -> str:
    rows = []
    for model, *names in TRANSLATIONS:
        scores = [f"{evaluation(name)['bleu']:.1f}" for name in names]
        rows.append((model, *scores, ", ".join(map(log, names))))
    return table(("model", "De-En BLEU", "En-De BLEU", ""), rows)


BLOCKS = {
    "floors": floors,
    "pretrained": pretrained,
    "table3": table3,
    "toeplitz": toeplitz,
    "translation": translation,
}
