"""Translation without attention in the encoder and decoder, and with it."""

from __future__ import annotations

from allmlp.study.definition import Overrides, Row, Study, Tuning

TESTS = ",".join(f"data/multi30k/test_{year}_flickr.tsv" for year in (2016, 2017, 2018))


def translate() -> Study:
    """ResMLP and Transformer on Multi30k, German to English and back, equally tuned: BLEU on tests 2016, 2017, 2018.

    allmlp study translate --minutes 9 --jobs 3

    Dropout and word dropout are chosen for each model on 1,000 held-out training pairs, German to English; 40 epochs.
    24 runs. Floor: the source sentence, copied. Published for a Transformer, English to German, test 2016: 41.02,
    tokenized (LividWo/Revisit-MMT).
    """
    candidates: dict[str, Overrides] = {
        f"dropout {dropout}, words {words}": {
            "model.encoder.block.dropout": dropout,
            "model.decoder.block.dropout": dropout,
            "task.word_dropout": words,
        }
        for dropout in ("0.2", "0.3", "0.4")
        for words in ("0.1", "0.2")
    }
    rows: dict[str, Row] = {}
    for model in ("resmlp", "transformer"):
        rows[f"{model}_de_en"] = Row(f"multi30k_{model}", candidates=candidates)
        rows[f"{model}_en_de"] = Row(f"multi30k_{model}_en_de", like=f"{model}_de_en")
    return Study(
        "translate",
        rows,
        compared="epochs",
        metric="bleu",
        also=("test_2017_flickr_bleu", "test_2018_flickr_bleu", "chrf"),
        overrides={"data.test": TESTS},
        tuning=Tuning(val_size=1000),
        floor="copy_bleu",
    )
