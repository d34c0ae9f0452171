"""The models that come with the package: a text encoder with a sentiment head, and an image encoder."""

from __future__ import annotations

from allmlp.data.augment import Augment, ColorJitter, HorizontalFlip, Mixup, RandomResizedCrop
from allmlp.data.corpus import Corpus
from allmlp.data.decode import Decode
from allmlp.data.decoded import Decoded
from allmlp.data.labeled_text import LabeledText
from allmlp.data.shards import Shards
from allmlp.data.tokenizer import TokenizerConfig
from allmlp.layers import TinyAttention
from allmlp.models.gmlp import gmlp, gmlp_text
from allmlp.optim import AdamW, Muon
from allmlp.run import Budget, Run
from allmlp.schedule import CosineSchedule, LinearSchedule
from allmlp.tasks.classify import Classify
from allmlp.tasks.classify_text import ClassifyText
from allmlp.tasks.distill import Distill
from allmlp.tasks.masked_lm import MaskedLM, Masking

VOCABULARY = 8192


def text_encoder() -> Run:
    """aMLP of 10 blocks and 5.7 M parameters, masked language model on Wikipedia and film reviews, lowercase.

    allmlp train text_encoder --set data.path='text/wiki-train-*,text/imdb-*' --set data.test=text/wiki-valid.txt.xz
    Four and a half minutes on one H200. A vocabulary of 8,192 leaves most of a small model to its blocks.
    """
    return Run(
        model=gmlp_text(10, 192, 1152, vocab_size=VOCABULARY, attention=TinyAttention(64)),
        task=MaskedLM(Masking(0.25, whole_word_mask=True)),
        data=Corpus(
            "data/text/wiki-train-*,data/text/imdb-*",
            "data/text/wiki-valid*",
            TokenizerConfig("wordpiece", VOCABULARY, limit_alphabet=128),
        ),
        batch_size=512,
        budget=Budget(minutes=4.5),
        optim=Muon(lr=8e-3, weight_decay=0.05),
        schedule=LinearSchedule(warmup_fraction=0.05),
        max_grad_norm=1.0,
        compile=True,
        log_every=200,
        eval_every=5000,
        save_every=20_000,
    )


def text_encoder_sst2() -> Run:
    """The bundled text model: text_encoder fine-tuned on SST-2.

    allmlp train text_encoder_sst2 --set init_from=runs/text_encoder
    Half a minute on one H200. The learning rate was chosen on the 872 sentences of the dev file.
    Published for a BERT of 4.4 M parameters (two layers, 128 wide): 83.2 %.
    """
    return Run(
        model=None,
        task=ClassifyText(),
        data=LabeledText("data/sst2/train.tsv", "data/sst2/test.tsv", val="data/sst2/dev.tsv"),
        batch_size=256,
        budget=Budget(epochs=3),
        optim=AdamW(lr=8e-4, weight_decay=0.01, eps=1e-6, layer_decay=0.9),
        schedule=LinearSchedule(warmup_fraction=0.1),
        max_grad_norm=1.0,
        compile=True,
        log_every=100,
        eval_every=500,
        save_every=10_000,
        init_from="runs/text_encoder",
    )


def image_encoder() -> Run:
    """The bundled image encoder: a gMLP of 10.0 M parameters at 128 pixels, distilled from an ImageNet convnet.

    allmlp train image_encoder --set data.source.path=shards/ --set task.teacher=efficientnet_lite0/
    Six and a half minutes on one H200. The student matches class scores and features of the teacher on random crops
    that are mixed with each other (function matching); it sees no labels. `task.teacher` is a model folder of an
    ImageNet classifier with class names, `class_names_file` has the same thousand names.
    """
    mean = std = (0.5, 0.5, 0.5)
    views = Augment((RandomResizedCrop((0.25, 1.0)), HorizontalFlip(), ColorJitter(0.2, 0.2, 0.2)))
    return Run(
        model=gmlp(16, 256, 16, img_size=128),
        task=Distill(
            "runs/efficientnet_lite0",
            Classify(augment=views, mix=Mixup(mixup_alpha=1.0, cutmix_alpha=0.0, prob=0.7)),
            "soft",
            alpha=1.0,
            temperature=2.0,
            feature_weight=4.0,
        ),
        data=Decoded(
            Shards(
                "data/images",
                img_size=(128, 128),
                class_names_file="data/images/classes.txt",
                decode=Decode(crop_pct=1.0, mean=mean, std=std),
            )
        ),
        batch_size=512,
        budget=Budget(minutes=6.5),
        optim=Muon(lr=3e-3, weight_decay=0.05),
        schedule=CosineSchedule(warmup_fraction=0.03),
        max_grad_norm=1.0,
        ema_decay=0.999,
        compile=True,
        log_every=100,
        eval_every=1000,
        save_every=5000,
    )
