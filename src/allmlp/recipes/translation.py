"""Translation with ResMLP, which has no self-attention, and with a Transformer in the same setup."""

from __future__ import annotations

from allmlp.data.parallel_corpus import ParallelCorpus
from allmlp.data.tokenizer import TokenizerConfig
from allmlp.models.encoder_decoder import EncoderDecoder
from allmlp.models.model import ModelSpec
from allmlp.models.seq2seq import resmlp_seq2seq, transformer_seq2seq
from allmlp.models.zoo import preset
from allmlp.optim import Adagrad, AdamW
from allmlp.run import Budget, Run
from allmlp.schedule import CosineSchedule, InverseSqrtSchedule, LinearSchedule
from allmlp.spec import override
from allmlp.tasks.translate import Translation


def _captions(source: str, target: str) -> ParallelCorpus:
    tokenizer = TokenizerConfig("bpe", 4096, lowercase=False)
    folder = "data/multi30k"
    files = {"path": f"{folder}/train.tsv", "val": f"{folder}/val.tsv", "test": f"{folder}/test_2016_flickr.tsv"}
    return ParallelCorpus(source_lang=source, target_lang=target, tokenizer=tokenizer, **files)


def _multi30k(model: ModelSpec) -> Run:
    return Run(
        model=model,
        task=Translation(word_dropout=0.2),
        data=_captions("de", "en"),
        batch_size=256,
        budget=Budget(epochs=40),
        optim=AdamW(lr=2e-3, weight_decay=0.05, betas=(0.9, 0.98)),
        schedule=CosineSchedule(warmup_fraction=0.1),
        max_grad_norm=1.0,
        ema_decay=0.999,
        compile=True,
        log_every=100,
        eval_every=2000,
        save_every=2000,
    )


def _dropout(model: EncoderDecoder, rate: float) -> EncoderDecoder:
    for side in ("encoder", "decoder"):
        model = override(model, f"{side}.block.dropout", rate)
    return model


def multi30k_resmlp() -> Run:
    """ResMLP on Multi30k: image captions, German to English.

    allmlp train multi30k_resmlp
    allmlp predict runs/multi30k_resmlp "ein Mann fährt Fahrrad"
    Three minutes on one H200. Settings are chosen on the validation file (`data.val`); test 2016, or another file given
    as `data.test`, is evaluated at the end. Published on WMT14: 0.5 to 0.9 BLEU below the Transformer for English to
    German, 2.2 to 2.5 above it for English to French.
    """
    return _multi30k(_dropout(resmlp_seq2seq(6, 256, 4, seq_len=64, vocab_size=4096), 0.4))


def multi30k_transformer() -> Run:
    """Transformer, the baseline, on Multi30k: image captions, German to English.

    allmlp train multi30k_transformer
    Three minutes on one H200.
    """
    return _multi30k(_dropout(transformer_seq2seq(4, 256, 4, seq_len=64, vocab_size=4096), 0.3))


def multi30k_resmlp_en_de() -> Run:
    """ResMLP on Multi30k: image captions, English to German.

    allmlp train multi30k_resmlp_en_de
    Three minutes on one H200.
    """
    return multi30k_resmlp().replace(data=_captions("en", "de"))


def multi30k_transformer_en_de() -> Run:
    """Transformer, the baseline, on Multi30k: image captions, English to German.

    allmlp train multi30k_transformer_en_de
    Three minutes on one H200. Published: 41.02 BLEU, tokenized (LividWo/Revisit-MMT).
    """
    return multi30k_transformer().replace(data=_captions("en", "de"))


def _wmt14(model: str, target: str, dropout: float) -> Run:
    """ResMLP's setup: Adagrad, lr 0.2, 32,000 warm-up steps; the total number of steps is not published."""
    spec = preset(model).spec
    assert isinstance(spec, EncoderDecoder)
    steps = 300_000
    return Run(
        model=_dropout(spec, dropout),
        task=Translation(num_beams=4, length_penalty=0.6),
        data=ParallelCorpus(
            f"data/wmt14/train.en+data/wmt14/train.{target}",
            f"data/wmt14/newstest2014.en+data/wmt14/newstest2014.{target}",
            tokenizer=TokenizerConfig("bpe", 32_768, lowercase=False),
            seq_len=256,
            max_length_ratio=1.5,
        ),
        batch_size=1024,
        budget=Budget(steps=steps),
        optim=Adagrad(lr=0.2, weight_decay=0.0),
        schedule=LinearSchedule(warmup_fraction=32_000 / steps),
        compile=True,
        log_every=100,
        eval_every=10_000,
        save_every=5000,
    )


def _wmt14_table(target: str, dropout: float) -> dict[str, Run]:
    """ResMLPs of 6 and 12 blocks, and the Transformer with the settings of Vaswani et al. (2017): 100,000 steps."""
    steps, warmup, width = 100_000, 4000, 512
    transformer = _wmt14("transformer_seq2seq_base", target, 0.1).replace(
        budget=Budget(steps=steps),
        optim=AdamW(lr=(width * warmup) ** -0.5, weight_decay=0.0, betas=(0.9, 0.98), eps=1e-9),
        schedule=InverseSqrtSchedule(warmup_fraction=warmup / steps),
    )
    resmlps = {f"resmlp_{depth}": _wmt14(f"resmlp_seq2seq_{depth}", target, dropout) for depth in (6, 12)}
    return {"transformer": transformer, **resmlps}


def wmt14_en_de() -> dict[str, Run]:
    """WMT14 English to German: Transformer base, and ResMLPs of 6 and 12 blocks.

    torchrun --nproc-per-node 8 -m allmlp train wmt14_en_de/resmlp_12 --set data.path=train.en+train.de
    Not run here. Published BLEU: Transformer 27.3, ResMLP 26.4 and 26.8.
    """
    return _wmt14_table("de", 0.15)


def wmt14_en_fr() -> dict[str, Run]:
    """WMT14 English to French: Transformer base, and ResMLPs of 6 and 12 blocks.

    torchrun --nproc-per-node 8 -m allmlp train wmt14_en_fr/resmlp_12 --set data.path=train.en+train.fr
    Not run here. Published BLEU: Transformer 38.1, ResMLP 40.3 and 40.6.
    """
    return _wmt14_table("fr", 0.1)
