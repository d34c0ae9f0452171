"""Questions about paragraphs: SQuAD v1.1."""

from __future__ import annotations

from allmlp.study.definition import Overrides, Row, Study

LONG: Overrides = {"data.seq_len": "384", "batch_size": "86", "budget.minutes": "none"}
"""Steps of 33,000 tokens."""
SEGMENTS: Overrides = {"model.stem.segments": "2"}
FAMILIES: dict[str, Overrides] = {"gmlp": SEGMENTS, "amlp": SEGMENTS, "bert": {}}
ANSWERING: Overrides = {"budget.steps": "4000", "optim.lr": "1e-4", "compile": "true"}


def squad() -> Study:
    """gMLP, aMLP and BERT pretrained on 0.2 B tokens at length 384, then on all questions of SQuAD v1.1: F1.

    allmlp study squad --minutes 9 --jobs 2
    allmlp study squad --minutes 9 --jobs 2 --rows 'amlp*'

    Pretrained as masked language models, or for the second half of the tokens by span selection (`spans`): words that
    occur twice in a passage, once as the question and once as the answer. `taught`: with MiniLM's fine-tuned scores as
    further targets. Floor: the answer with most words in common with the question. Anchor: MiniLM, a pretrained BERT of
    22 M parameters, fine-tuned alike from its Hugging Face folder ./minilm. 39 runs. Published F1, base size: BERT
    90.2, gMLP 86.7, aMLP 90.7.
    """
    rows = {"minilm_squad": Row("squad1", {**ANSWERING, "init_from": "minilm"})}
    for family, changes in FAMILIES.items():
        whole, half = ({**LONG, **changes, "budget.steps": steps} for steps in ("6000", "3000"))
        rows[family] = Row(f"wiki_{family}", whole, metric="perplexity", seeds=1)
        rows[f"{family}_half"] = Row(f"wiki_{family}", half, metric="perplexity", seeds=1)
        rows[f"{family}_spans"] = Row(
            "wiki_spans", {"init_from": f"study:{family}_half@0", "budget.steps": "3000"}, metric="accuracy", seeds=1
        )
        rows[f"{family}_squad"] = Row("squad1", {**ANSWERING, "init_from": f"study:{family}@0"})
        rows[f"{family}_spans_squad"] = Row("squad1", {**ANSWERING, "init_from": f"study:{family}_spans@0"})
        taught: Overrides = {"init_from": f"study:{family}_spans@0", "task.teacher": "study:minilm_squad@0"}
        rows[f"{family}_spans_taught"] = Row("squad1_distilled", {**ANSWERING, **taught})
    return Study("squad", rows, compared="tokens", metric="f1", also=("exact_match",), floor="overlap_f1")
