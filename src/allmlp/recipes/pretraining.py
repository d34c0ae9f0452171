"""Masked language models: gMLP's experiments as published, and small ones that take minutes on one GPU.

The papers' corpora are two configurations of C4: RealNews-like and English. `hf download allenai/c4 --repo-type dataset
--include 'realnewslike/*' --local-dir data/c4` (or 'en/*') puts them where the recipes read them;
--set data.path='hf://datasets/allenai/c4/en/c4-train.*.json.gz' reads them from the Hub, and any other text will do.
"""

from __future__ import annotations

from allmlp.data.corpus import Corpus, Passages
from allmlp.data.tokenizer import TokenizerConfig
from allmlp.layers import Attention, Dense, LayerNorm, RelativePositionBias, TinyAttention
from allmlp.models.bert import bert
from allmlp.models.encoder import Encoder
from allmlp.models.gmlp import gmlp_text
from allmlp.models.mixer import mixer_text
from allmlp.models.model import ModelSpec
from allmlp.models.zoo import preset
from allmlp.optim import AdamW, Muon
from allmlp.run import Budget, Run
from allmlp.schedule import LinearSchedule
from allmlp.spec import override
from allmlp.tasks.distill_masked_lm import DistillMaskedLM
from allmlp.tasks.masked_lm import MaskedLM, Masking
from allmlp.tasks.span_selection import SpanSelection

TABLE6 = ("bert_base", "gmlp_base", "amlp_base", "bert_large", "gmlp_large", "amlp_large", "gmlp_xlarge")
CASED = TokenizerConfig("unigram", 32_000, lowercase=False)
TEXT = ("data/text/train*", "data/text/valid*", TokenizerConfig(path="data/bert-base-uncased-vocab.txt"))
"""Files for training and testing, and the tokenizer, of the small experiments."""


def _published(model: str, full: bool = False) -> Run:
    """gMLP, table 8: the ablations of tables 3 and 4, or the full setup of tables 5 and 6.

    Files as `allenai/c4` on the Hugging Face Hub has them: realnewslike (15 GB) for the ablations, en (305 GB).
    """
    subset = "en" if full else "realnewslike"
    steps = 1_000_000 if full else 125_000
    return Run(
        model=preset(model).spec,
        task=MaskedLM(mask_padding=False),
        data=Corpus(
            f"data/c4/{subset}/c4-train.*.json.gz",
            f"data/c4/{subset}/c4-validation.*.json.gz",
            CASED,
            512 if full else 128,
        ),
        batch_size=256 if full else 2048,
        budget=Budget(steps=steps),
        optim=AdamW(lr=1e-4 if full else 7e-4, weight_decay=0.01, eps=1e-6),
        schedule=LinearSchedule(warmup_fraction=10_000 / steps),
        compile=True,
        log_every=100,
        eval_every=5000,
        save_every=2500,
    )


def mlm_table3() -> dict[str, Run]:
    """gMLP's table 3 as published: eight token mixers, 32.8 billion tokens each.

    torchrun --nproc-per-node 8 -m allmlp train mlm_table3 --set data.path='corpus/*.txt.xz'
    Not run here: about 17 hours of one H200 a row. Published perplexity: BERT 4.37, relative positions 4.26, without
    content scores 5.64, Mixer 5.34, gMLP linear 5.14, additive 4.97, multiplicative 4.53, split 4.35.
    """
    models = {
        "bert": "bert_base",
        "relative": "bert_base_rel",
        "noattention": "bert_base_rel_noattn",
        "mixer": "mixer_mlm",
        "linear": "gmlp_l36_linear",
        "additive": "gmlp_l36_additive",
        "multiplicative": "gmlp_l36_multiplicative",
        "split": "gmlp_l36",
    }
    return {row: _published(model) for row, model in models.items()}


def mlm_table4() -> dict[str, Run]:
    """gMLP's table 4 as published: gMLPs of 18 to 144 blocks and Transformers of similar size.

    torchrun --nproc-per-node 8 -m allmlp train mlm_table4/gmlp_l72 --set data.path='corpus/*.txt.xz'
    Not run here. Published perplexity of Transformers of 6, 12, 24 and 48 layers: 4.91, 4.26, 3.83, 3.47; of gMLPs of
    18, 36, 72 and 144 blocks: 5.25, 4.35, 3.79, 3.43.
    """
    models = [f"transformer_l{depth}" for depth in (6, 12, 24, 48)] + [f"gmlp_l{depth}" for depth in (18, 36, 72, 144)]
    return {model: _published(model) for model in models}


def mlm_table6() -> dict[str, Run]:
    """gMLP's table 6 as published: BERT, gMLP and aMLP in the full BERT setup, 131 billion tokens each.

    torchrun --nproc-per-node 8 -m allmlp train mlm_table6/amlp_large --set data.path='corpus/*.txt.xz'
    Not run here. Published perplexity: base 4.17 (BERT), 4.28 (gMLP), 3.95 (aMLP); large 3.35, 3.32, 3.19; xlarge 2.89
    (gMLP). `sst2_table6`, `mnli_table6`, `squad1_table6` and `squad2_table6` fine-tune them.
    """
    return {model: _published(model, full=True) for model in TABLE6}


def _wiki(model: ModelSpec) -> Run:
    return Run(
        model=model,
        task=MaskedLM(Masking(0.25)),
        data=Corpus(*TEXT),
        batch_size=256,
        budget=Budget(minutes=20),
        optim=Muon(lr=5e-3, weight_decay=0.05),
        schedule=LinearSchedule(warmup_fraction=0.05),
        max_grad_norm=1.0,
        compile=True,
        log_every=100,
        eval_every=2000,
        save_every=5000,
    )


def _pre_norm(model: Encoder) -> Encoder:
    """BERT with pre-norm, as gMLP: with post-norm the loss stays at that of unigram frequencies for longer than these
    short runs last.
    """
    return override(model, "block.order", "pre").replace(norm=LayerNorm(1e-12))


def wiki_gmlp() -> Run:
    """gMLP of 12 blocks (44 M) for twenty minutes on English text.

    allmlp train wiki_gmlp --set data.path='text/wiki-train-*.txt.xz' --set data.test=text/wiki-valid.txt.xz
    """
    return _wiki(gmlp_text(12, 512, 3072))


def wiki_amlp() -> Run:
    """aMLP of 11 blocks for twenty minutes on English text.

    allmlp train wiki_amlp --set data.path='text/wiki-train-*.txt.xz' --set data.test=text/wiki-valid.txt.xz
    """
    return _wiki(gmlp_text(11, 512, 3072, attention=TinyAttention(64)))


def wiki_bert() -> Run:
    """BERT of the same size, the baseline, for twenty minutes on English text.

    allmlp train wiki_bert --set data.path='text/wiki-train-*.txt.xz' --set data.test=text/wiki-valid.txt.xz
    """
    return _wiki(_pre_norm(bert(9, 512, 8)))


def wiki_spans() -> Run:
    """Span selection: prepares a masked language model for question answering, on plain text.

    allmlp train wiki_spans --set init_from=runs/wiki_amlp --set data.path=train.txt.xz --set data.test=valid.txt.xz
    The result is a start for squad1 and squad2. Not yet run.
    """
    return wiki_amlp().replace(
        model=None,
        task=SpanSelection(),
        data=Passages(*TEXT),
        batch_size=86,
        budget=Budget(steps=3000),
        optim=Muon(lr=2e-3, weight_decay=0.05),
        init_from="runs/wiki_amlp",
    )


def wiki_gmlp_distilled() -> dict[str, Run]:
    """gMLP with BERT's token embeddings as a start, its features as targets, or both; both also without split.

    allmlp train wiki_gmlp_distilled/both --set data.path='text/train-*.txt.xz' --set data.test=text/valid.txt.xz
    `minilm` is the folder of a Hugging Face BERT (task.teacher, task.embeddings_from, data.tokenizer.path).
    """
    plain = _wiki(gmlp_text(18, 384, 2304))
    plain = plain.replace(data=override(plain.data, "tokenizer.path", "minilm"))
    masked_lm = MaskedLM(Masking(0.25))
    tasks = {
        "embeddings": DistillMaskedLM("", masked_lm, alpha=0.0, embeddings_from="minilm"),
        "features": DistillMaskedLM("minilm", masked_lm),
        "both": DistillMaskedLM("minilm", masked_lm, embeddings_from="minilm"),
    }
    unsplit = gmlp_text(18, 384, 1536, variant="multiplicative")
    table = {row: plain.replace(task=task) for row, task in tasks.items()}
    return table | {"both_unsplit": table["both"].replace(model=unsplit)}


def wiki_table3() -> dict[str, Run]:
    """gMLP's table 3 with small models: equal data, masks and tokens, and about equal parameters, for every mixer.

    allmlp train wiki_table3 --set data.path='text/wiki-train-*.txt.xz' --set data.test=text/wiki-valid.txt.xz
    allmlp train wiki_table3/split --set seed=1

    With aMLP and a dense split gate in addition. Published: see mlm_table3.
    """
    relative = Attention(4, bias=RelativePositionBias())
    models: dict[str, Encoder] = {
        "bert": _pre_norm(bert(9, 256, 4)),
        "relative": _pre_norm(bert(9, 256, 4, relative)),
        "noattention": _pre_norm(bert(11, 256, 4, relative.replace(scores="bias"))),
        "mixer": mixer_text(13, 256, 128, 1024),
        "linear": gmlp_text(13, 256, 1024, variant="linear"),
        "additive": gmlp_text(13, 256, 1024, variant="additive"),
        "multiplicative": gmlp_text(13, 256, 1024, variant="multiplicative"),
        "split": gmlp_text(12, 256, 1536),
        "dense": override(gmlp_text(12, 256, 1536), "block.channel.inner.projection", Dense()),
        "amlp": gmlp_text(11, 256, 1536, attention=TinyAttention(64)),
    }
    short = _wiki(models["split"]).replace(
        task=MaskedLM(), budget=Budget(steps=2500), optim=Muon(lr=6e-3, weight_decay=0.05)
    )
    return {row: short.replace(model=model) for row, model in models.items()}


def wiki_sizes() -> dict[str, Run]:
    """gMLP, aMLP and a Transformer with relative positions in four widths, to fit how the loss falls with compute.

    allmlp train wiki_sizes/gmlp_256 --set budget.steps=3000
    allmlp study depth
    Not yet run. Same data and masks for all. Published: gMLP's figure 8 and table 4, at 18 to 144 blocks.
    """
    table = {}
    for width in (128, 192, 256, 384):
        relative = Attention(width // 64, bias=RelativePositionBias())
        table[f"gmlp_{width}"] = gmlp_text(12, width, 6 * width)
        table[f"amlp_{width}"] = gmlp_text(11, width, 6 * width, attention=TinyAttention(64))
        table[f"transformer_{width}"] = _pre_norm(bert(9, width, width // 64, relative))
    short = wiki_table3()["split"]
    return {row: short.replace(model=model) for row, model in table.items()}
