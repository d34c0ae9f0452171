"""This library's models inside Hugging Face transformers. Importing this module registers them with the Auto classes.

>>> import allmlp.hf
>>> model = allmlp.hf.wrap("runs/photos")
>>> model.save_pretrained("photos"), allmlp.hf.processor("runs/photos").save_pretrained("photos")
>>> classify = transformers.pipeline("image-classification", "photos")
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from allmlp.data.preprocessing import ImagePreprocessing, TextPreprocessing
from allmlp.data.tokenizer import MASK_TOKEN, load_tokenizer
from allmlp.errors import UserError, lookup, require
from allmlp.layers.head import ClassifierHead, LMHead, PooledHead, QAHead
from allmlp.layers.stem import PatchEmbed, TokenEmbed
from allmlp.models.encoder import Encoder, EncoderModel
from allmlp.models.encoder_decoder import EncoderDecoder, EncoderDecoderModel
from allmlp.models.model import Model
from allmlp.models.torchvision import define_missing_operators
from allmlp.spec import to_dict
from allmlp.weights.pretrained import from_pretrained

define_missing_operators()
transformers: Any = require("transformers", "hf")

from allmlp.hf.code import export_code  # noqa: E402
from allmlp.hf.config import AUTO_CLASSES, READ_PADDING, AllMlpConfig  # noqa: E402
from allmlp.hf.image_processor import AllMlpImageProcessor  # noqa: E402
from allmlp.hf.modeling import (  # noqa: E402
    AllMlpForCausalLM,
    AllMlpForImageClassification,
    AllMlpForMaskedLM,
    AllMlpForQuestionAnswering,
    AllMlpForSeq2SeqLM,
    AllMlpForSequenceClassification,
    AllMlpModel,
    AllMlpPreTrainedModel,
)

__all__ = [
    "TASKS",
    "AllMlpConfig",
    "AllMlpForCausalLM",
    "AllMlpForImageClassification",
    "AllMlpForMaskedLM",
    "AllMlpForQuestionAnswering",
    "AllMlpForSeq2SeqLM",
    "AllMlpForSequenceClassification",
    "AllMlpImageProcessor",
    "AllMlpModel",
    "export_code",
    "processor",
    "wrap",
]

TASKS: dict[str, type[AllMlpPreTrainedModel]] = {
    "image-classification": AllMlpForImageClassification,
    "text-classification": AllMlpForSequenceClassification,
    "fill-mask": AllMlpForMaskedLM,
    "text-generation": AllMlpForCausalLM,
    "question-answering": AllMlpForQuestionAnswering,
    "translation": AllMlpForSeq2SeqLM,
    "feature-extraction": AllMlpModel,
}
"""Tasks as transformers calls them -> classes."""


def register() -> None:
    """Register the model type "allmlp" with the Auto classes."""
    transformers.AutoConfig.register(AllMlpConfig.model_type, AllMlpConfig, exist_ok=True)
    for auto, name in AUTO_CLASSES.items():
        if auto.startswith("AutoModel"):
            getattr(transformers, auto).register(AllMlpConfig, globals()[name], exist_ok=True)
    transformers.AutoImageProcessor.register(
        AllMlpConfig,
        image_processor_classes={"pil": AllMlpImageProcessor, "torchvision": AllMlpImageProcessor},
        exist_ok=True,
    )
    transformers.AutoTokenizer.register(
        AllMlpConfig, fast_tokenizer_class=transformers.PreTrainedTokenizerFast, exist_ok=True
    )


register()


def wrap(model: Model | str | os.PathLike[str], task: str | None = None, **options: Any) -> Any:
    """A model of this library, or its folder or name, as a model of transformers.

    >>> allmlp.hf.wrap(allmlp.create("gmlp_s16", num_classes=10))
    >>> allmlp.hf.wrap("runs/wiki_gmlp", "text-classification", num_labels=3)

    Without a `task` (a key of `TASKS`) it is that of the model's head; for another task the head is new. `options` are
    fields of the configuration, such as num_labels, id2label and problem_type. With the same head, the weights are
    those of `model` itself, not copies.
    """
    source: Any = model if isinstance(model, Model) else from_pretrained(model)
    path = None if isinstance(model, Model) or source.folder is None else Path(source.folder)
    if not isinstance(source, (EncoderModel, EncoderDecoderModel)):
        kind = type(source.spec).__name__
        raise UserError(f"only this library's models of images and texts can be wrapped, not {kind}")
    wrapper = lookup(task or head_task(source.spec), TASKS, "task")
    config = make_config(source, path, options)
    same = wrapper.adapt(source.spec, config) == source.spec
    with torch.device("meta" if same else source.device):
        wrapped: Any = wrapper(config)
    if same:
        wrapped.model = source
    else:
        parts = wrapped.to(source.dtype).model.state_dict()
        state = {name: value for name, value in source.state_dict().items() if name in parts}
        wrapped.model.load_state_dict({n: v for n, v in state.items() if not n.startswith("head.")}, strict=False)
    if wrapped.can_generate() and path is not None:
        # [SEP], which ends the text, is the only special token that may be generated; as in `continue_text`.
        tokens = load_tokenizer(path)
        unused = range(len(tokens), wrapped.config.vocab_size)  # of a vocabulary padded to a round size
        wrapped.generation_config.suppress_tokens = [*sorted(tokens.special_ids - {config.eos_token_id}), *unused]
        if len(tokens.stop_token_ids) > 1:
            wrapped.generation_config.eos_token_id = sorted(tokens.stop_token_ids)
    if isinstance(source, EncoderDecoderModel):
        # Training shifts the target by one, so the decoder's last position is never trained.
        wrapped.generation_config.max_length = source.spec.decoder.stem.tokens - 1
    return wrapped.train(source.training)


def head_task(spec: Any) -> str:
    """The task of the model's head."""
    if isinstance(spec, EncoderDecoder):
        return "translation"
    if isinstance(spec.head, (ClassifierHead, PooledHead)):
        return "image-classification" if isinstance(spec.stem, PatchEmbed) else "text-classification"
    if isinstance(spec.head, LMHead):
        return "text-generation" if spec.block.causal else "fill-mask"
    return "question-answering" if isinstance(spec.head, QAHead) else "feature-extraction"


def make_config(model: EncoderModel | EncoderDecoderModel, path: Path | None, options: dict[str, Any]) -> AllMlpConfig:
    fields: dict[str, Any] = {"spec": to_dict(model.spec)}
    names = model.preprocessing.class_names if model.preprocessing is not None else ()
    if names and "id2label" not in options:
        fields["id2label"] = dict(enumerate(names))
        fields["label2id"] = {name: number for number, name in enumerate(names)}
    if isinstance(model, EncoderModel) and isinstance(model.spec.stem, PatchEmbed):
        fields |= image_fields(model)
    elif path is not None:
        fields |= text_fields(model, path)
    return AllMlpConfig(**fields | options)


def image_fields(model: EncoderModel) -> dict[str, Any]:
    """The fields of the configuration that describe the preprocessing of images."""
    config, preprocessing = model.pretrained_cfg, model.preprocessing
    fields = {"image_mean": list(config["mean"]), "image_std": list(config["std"]), "crop_pct": config["crop_pct"]}
    if isinstance(preprocessing, ImagePreprocessing):
        fields |= {"image_column": preprocessing.image_column, "label_column": preprocessing.label_column}
        if preprocessing.task == "values":
            fields["problem_type"] = "regression"
    return fields


def text_fields(model: EncoderModel | EncoderDecoderModel, path: Path) -> dict[str, Any]:
    """The fields of the configuration that describe the tokenizer in `path` and the preprocessing of texts."""
    tokenizer, preprocessing = load_tokenizer(path), model.preprocessing
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        "decoder_start_token_id": tokenizer.cls_token_id,
    }
    if isinstance(preprocessing, TextPreprocessing):
        fields |= {"whole_files": preprocessing.whole_files, "text_columns": preprocessing.text_columns}
        fields |= {"label_column": preprocessing.label_column}
        if preprocessing.task in READ_PADDING:
            fields["mask_padding"] = preprocessing.mask_padding
    return fields


def processor(model: Model | str | os.PathLike[str]) -> Any:
    """The processor for the inputs of a model or model folder: an image processor or a tokenizer of transformers."""
    source: Any = model if isinstance(model, Model) else from_pretrained(model)
    spec = source.spec
    if isinstance(spec, Encoder) and isinstance(spec.stem, PatchEmbed):
        height, width = spec.stem.img_size
        config = source.pretrained_cfg
        return AllMlpImageProcessor(
            {"height": height, "width": width}, list(config["mean"]), list(config["std"]), config["crop_pct"]
        )
    if isinstance(model, Model):
        raise UserError("the tokenizer of a text model is in its folder: pass the folder")
    return make_tokenizer(Path(source.folder or model), spec)


def make_tokenizer(path: Path, spec: Any) -> Any:
    """The tokenizer in a model's folder, with the special tokens that the model was trained with."""
    tokenizer, encoder = load_tokenizer(path), spec.encoder if isinstance(spec, EncoderDecoder) else spec
    if not isinstance(encoder, Encoder) or not isinstance(encoder.stem, TokenEmbed):
        raise UserError(f"the model in {path} reads {spec.input_spec}, not text")
    tokenizers = require("tokenizers", "text")
    continues = head_task(spec) == "text-generation"  # a causal model may also classify or answer questions
    # Tokens of Llama and GPT-2 have other names, and there is no mask token.
    start, end, unknown, pad = map(
        tokenizer.id_to_token,
        (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id),
    )
    single = f"$A {end}" if isinstance(spec, EncoderDecoder) else f"{start} $A {end}"
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{start} $A" if continues else single,
        pair=f"{start} $A {end} $B:1 {end}:1",
        special_tokens=[*{start: tokenizer.cls_token_id, end: tokenizer.sep_token_id}.items()],
    )
    segments = ["token_type_ids"] if (encoder.stem.segments or 0) > 1 else []
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=encoder.stem.tokens,
        padding_side="left" if continues else "right",
        model_input_names=["input_ids", *segments, "attention_mask"],
        bos_token=start,
        eos_token=end,
        unk_token=unknown,
        sep_token=end,
        pad_token=pad,
        cls_token=start,
        mask_token=None if tokenizer.first_id([MASK_TOKEN]) is None else MASK_TOKEN,
    )
