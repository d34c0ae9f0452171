"""Questions about paragraphs: SQuAD v1.1."""

from __future__ import annotations

from allmlp.study.definition import Overrides, Row, Study


def squad() -> Study:
    """gMLP, aMLP and BERT pretrained on 0.2 B tokens at length 384, then on all questions of SQuAD v1.1: F1.

    allmlp study squad --minutes 9 --jobs 2
    allmlp study squad --minutes 9 --jobs 2 --rows 'amlp*'

    Floor: the answer with most words in common with the question. Anchor: MiniLM, a pretrained BERT of 22 M parameters,
    fine-tuned alike from its Hugging Face folder ./minilm. 15 runs. Published F1, base size: BERT 90.2, gMLP 86.7, aMLP
    90.7.
    """
    long: Overrides = {"data.seq_len": "384", "batch_size": "86", "budget.minutes": "none", "budget.steps": "6000"}
    segments: Overrides = {"model.stem.segments": "2"}
    answering: Overrides = {"budget.steps": "4000", "optim.lr": "1e-4", "compile": "true"}
    families: dict[str, Overrides] = {"gmlp": segments, "amlp": segments, "bert": {}}
    rows = {
        family: Row(f"wiki_{family}", {**long, **changes}, metric="perplexity", seeds=1)
        for family, changes in families.items()
    }
    rows |= {f"{family}_squad": Row("squad1", {**answering, "init_from": f"study:{family}@0"}) for family in families}
    rows["minilm_squad"] = Row("squad1", {**answering, "init_from": "minilm"})
    return Study("squad", rows, compared="tokens", metric="f1", also=("exact_match",), floor="overlap_f1")
