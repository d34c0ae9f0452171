"""Hugging Face's format of BERT, ViT, GPT-2, Llama and PatchTSMixer: folders with config.json.

transformers has three linear layers for queries, keys and values, this library has one. The head is inferred from the
weights; the number of attention heads, the activation and eps come from the configuration. Without a configuration,
heads have 64 channels, GELU is exact and eps is 1e-12.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from allmlp.data.preprocessing import ImagePreprocessing, TextPreprocessing
from allmlp.errors import UserError, one_line
from allmlp.files import write_text_atomically
from allmlp.layers.act import Act
from allmlp.layers.block import Block
from allmlp.layers.channel import ChannelMlp
from allmlp.layers.head import ClassifierHead, LMHead, PooledHead, QAHead
from allmlp.layers.mixers.attention import Attention
from allmlp.layers.norm import LayerNorm
from allmlp.layers.pool import FirstTokenPool
from allmlp.layers.stem import LearnedPositions, PatchEmbed, TokenEmbed
from allmlp.models.bert import TEXT_INIT, TRUNCATED
from allmlp.models.encoder import Encoder
from allmlp.models.series_encoder import SeriesEncoder
from allmlp.models.vit import vit
from allmlp.weights.formats import huggingface_causal as causal
from allmlp.weights.formats import huggingface_series as series
from allmlp.weights.formats.format import (
    HALF,
    Format,
    NativeName,
    Shape,
    Shapes,
    Signatures,
    check_sizes,
    classifier,
    count_blocks,
    infer_img_size,
    patch_kernel,
    rename_keys,
)
from allmlp.weights.formats.timm import heads
from allmlp.weights.tensors import read, write_safetensors

MODEL_TYPES = ("bert", "vit", "gpt2", "llama", "patchtsmixer")
CONFIG, IMAGE_PROCESSOR = "config.json", "preprocessor_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEXES = tuple(f"{name}.index.json" for name in WEIGHTS)
"""Index files of a model in several parts."""
MULTI_LABEL, REGRESSION = "multi_label_classification", "regression"
"""transformers' names for problems with any number of classes per example, and of values."""
MAX_TEXT_BYTES = 2**26
"""The largest configuration or tokenizer that is read."""

WORD_EMBEDDINGS = "embeddings.word_embeddings"
OUTER: dict[str, dict[str, str]] = {
    "BERT": {
        "stem.embedding": WORD_EMBEDDINGS,
        "stem.positions": "embeddings.position_embeddings",
        "stem.segments": "embeddings.token_type_embeddings",
        "stem.norm": "embeddings.LayerNorm",
        "head": "cls.predictions",
        "head.transform": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
        "head.pooler": "pooler.dense",
    },
    "ViT": {"stem.proj": "embeddings.patch_embeddings.projection", "norm": "layernorm"},
}
"""Native module -> its name in transformers."""
OUTPUT = {PooledHead: "classifier", ClassifierHead: "classifier", QAHead: "qa_outputs"}
"""Head -> the name of its output layer; LMHead shares the word embedding."""
MLP = {"channel.mix.up": "intermediate.dense", "channel.mix.down": "output.dense"}
BLOCK: dict[str, dict[str, str]] = {
    "BERT": MLP
    | {
        "token.mix.qkv": "attention.self",
        "token.mix.out": "attention.output.dense",
        "token.norm": "attention.output.LayerNorm",
        "channel.norm": "output.LayerNorm",
    },
    "ViT": MLP
    | {
        "token.mix.qkv": "attention.attention",
        "token.mix.out": "attention.output.dense",
        "token.norm": "layernorm_before",
        "channel.norm": "layernorm_after",
    },
}
"""Native module, relative to its block -> its name in transformers."""
STACKED = ("query", "key", "value")
PLAIN_PARAMETERS = {"stem.token": "embeddings.cls_token", "stem.positions.weight": "embeddings.position_embeddings"}
"""Embeddings that are plain parameters in transformers' ViT."""

KEY_VARIANTS = {
    r"^(bert|vit)\.": "",
    r"LayerNorm\.gamma$": "LayerNorm.weight",
    r"LayerNorm\.beta$": "LayerNorm.bias",
    r"^layers\.(\d+)\.attention\.(q|k|v)_proj\.": r"encoder.layer.\1.attention.attention.\2_proj.",
    r"\.attention\.q_proj\.": ".attention.query.",
    r"\.attention\.k_proj\.": ".attention.key.",
    r"\.attention\.v_proj\.": ".attention.value.",
    r"^layers\.(\d+)\.attention\.o_proj\.": r"encoder.layer.\1.attention.output.dense.",
    r"^layers\.(\d+)\.mlp\.fc1\.": r"encoder.layer.\1.intermediate.dense.",
    r"^layers\.(\d+)\.mlp\.fc2\.": r"encoder.layer.\1.output.dense.",
    r"^layers\.(\d+)\.layernorm_": r"encoder.layer.\1.layernorm_",
}
"""The prefix of a model with a head, the names of the first published models, and those of ViT in transformers 5."""

ACTS: dict[str, Act] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "sigmoid": "sigmoid",
}
ACT_NAMES: dict[Act, str] = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
    "silu": "silu",
    "sigmoid": "sigmoid",
}


class HuggingFace(Format):
    """Hugging Face's format of five families."""

    TITLE = "Hugging Face's"
    SIGNATURES: ClassVar[Signatures] = {
        "BERT": {
            "embeddings.word_embeddings.weight": 2,
            "embeddings.position_embeddings.weight": 2,
            "encoder.layer.0.attention.self.query.weight": 2,
            "encoder.layer.0.intermediate.dense.weight": 2,
        },
        "ViT": {
            "embeddings.patch_embeddings.projection.weight": 4,
            "embeddings.position_embeddings": 3,
            "encoder.layer.0.attention.attention.query.weight": 2,
            "encoder.layer.0.intermediate.dense.weight": 2,
        },
        **causal.SIGNATURES,
        **series.SIGNATURES,
    }
    OPTIONAL = ("pooler.", "cls.seq_relationship.")
    """The pooler, unless the head uses it, and the head of next-sentence prediction."""

    def normalize_keys(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename variants to the published keys; drop position ids and copies of tied weights."""
        if any(name.endswith("encoder.patcher.weight") for name in tensors):
            return series.normalize_keys(tensors)
        if not any(re.match(r"(bert\.|vit\.)?embeddings\.", name) for name in tensors):
            return causal.normalize_keys(tensors)
        renamed = rename_keys(tensors, KEY_VARIANTS)
        renamed.pop("embeddings.position_ids", None)
        for name, copied in (("decoder.weight", f"{WORD_EMBEDDINGS}.weight"), ("decoder.bias", "cls.predictions.bias")):
            copy, first = renamed.get(f"cls.predictions.{name}"), renamed.get(copied)
            if copy is not None and first is not None and copy.dtype == first.dtype and torch.equal(copy, first):
                del renamed[f"cls.predictions.{name}"]
        return renamed

    def preprocessing(
        self, family: str, spec: Encoder | SeriesEncoder, config: Mapping[str, Any]
    ) -> ImagePreprocessing | TextPreprocessing | None:
        if isinstance(spec, SeriesEncoder):
            return None
        problem = config.get("problem_type")
        if problem == MULTI_LABEL:
            return None  # its outputs are not scores of exclusive classes
        outputs = getattr(spec.head, "num_classes", 0)
        names, has_values = class_names(config, outputs), problem == REGRESSION or outputs == 1
        if family == "ViT":
            pixels = config.get(IMAGE_PROCESSOR, {})
            mean, std = pixels.get("image_mean", HALF), pixels.get("image_std", HALF)
            if pixels.get("do_normalize") is False:
                mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
            return ImagePreprocessing(mean, std, names, task="values" if has_values else "classes")
        assert isinstance(spec.stem, TokenEmbed)
        if spec.head is None or has_values:  # a text has no values here
            return None
        task = "classes" if isinstance(spec.head, PooledHead) else "span" if isinstance(spec.head, QAHead) else "text"
        return TextPreprocessing(task, spec.stem.seq_len, names)

    def keys(self, family: str, name: str, spec: Encoder | SeriesEncoder) -> tuple[str, ...]:
        if isinstance(spec, SeriesEncoder):
            return series.keys(name, spec)
        if family in causal.SIGNATURES:
            return causal.keys(family, name)
        if family == "ViT" and name in PLAIN_PARAMETERS:
            return (PLAIN_PARAMETERS[name],)
        block, module, parameter = NativeName.of(name)
        if block:
            path = f"encoder.layer.{block}.{BLOCK[family][module]}"
            parts = [f"{path}.{part}" for part in STACKED] if module.endswith("qkv") else [path]
            return tuple(f"{part}.{parameter}" for part in parts)
        path = OUTPUT[type(spec.head)] if module == "head.proj" else OUTER[family][module]  # type: ignore[index]
        return (f"{path}.{parameter}",)

    def to_source(self, family: str, name: str, tensor: Tensor, spec: Encoder) -> Tensor:
        if family == "ViT" and name == "stem.proj.weight":
            return patch_kernel(tensor, spec)
        if causal.is_transposed(family, name):
            return tensor.T
        return tensor.reshape(1, -1, tensor.shape[-1]) if family == "ViT" and name in PLAIN_PARAMETERS else tensor

    def from_source(self, family: str, name: str, tensor: Tensor, shape: Shape) -> Tensor:
        return (tensor.T if causal.is_transposed(family, name) else tensor).reshape(shape)

    def infer_spec(self, family: str, shapes: Shapes, config: Mapping[str, Any]) -> Encoder | SeriesEncoder:
        """Infer the spec from these shapes, without dropout except for series."""
        if family in series.SIGNATURES:
            return series.infer_spec(shapes, config)
        act = infer_act(config, "gelu_new" if family == "GPT-2" else "silu" if family == "Llama" else "gelu")
        if family in causal.SIGNATURES:
            return causal.infer_spec(family, shapes, config, act)
        hidden, width = shapes["encoder.layer.0.intermediate.dense.weight"]
        sizes = {
            "hidden_size": width,
            "num_hidden_layers": count_blocks(shapes, r"encoder\.layer\.(\d+)\."),
            "intermediate_size": hidden,
        }
        attention = Attention(config.get("num_attention_heads") or heads(width, config))
        block = Block(attention, channel=ChannelMlp(hidden, act), norm=LayerNorm(config.get("layer_norm_eps", 1e-12)))
        model = infer_bert if family == "BERT" else infer_vit
        return model(shapes, config, sizes, block)

    def config_files(
        self, spec: Encoder | SeriesEncoder, preprocessing: ImagePreprocessing | TextPreprocessing | None
    ) -> dict[str, Any]:
        if isinstance(spec, SeriesEncoder):
            return {CONFIG: series.configuration(spec)}
        files = {CONFIG: configuration(spec, preprocessing)}
        if isinstance(preprocessing, ImagePreprocessing) and isinstance(spec.stem, PatchEmbed):
            size = dict(zip(("height", "width"), spec.stem.img_size))
            pixels = {"image_mean": preprocessing.mean, "image_std": preprocessing.std, "size": size}
            files[IMAGE_PROCESSOR] = {"image_processor_type": "ViTImageProcessor", **pixels}
        return files

    def write(self, path: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
        """Write a folder for from_pretrained of transformers. With a head, the keys of the body have a prefix."""
        head = ("cls.", "classifier.", "qa_outputs.", "lm_head.", "head.")
        config = json.loads(files[CONFIG])
        if config["architectures"][0] in causal.PREFIXES:
            config |= causal.token_ids(files.get("tokenizer.json", ""))
            files = {**files, CONFIG: json.dumps(config, indent=2)}
        prefix = f"{config['model_type']}." if any(name.startswith(head) for name in tensors) else ""
        prefix = (causal.PREFIXES | series.PREFIXES).get(config["architectures"][0], prefix)
        path.mkdir(parents=True, exist_ok=True)
        named = {name if name.startswith(head) else prefix + name: tensor for name, tensor in tensors.items()}
        write_safetensors(path / WEIGHTS[0], named)
        for name, content in files.items():
            write_text_atomically(path / name, content)


# --- the spec ----------------------------------------------------------------------------------------------


def infer_act(config: Mapping[str, Any], default: str) -> Act:
    name = config.get("hidden_act", config.get("activation_function", default))
    act = ACTS.get(str(name))
    if act is None:
        raise UserError(f"the hidden_act {name!r} is not supported; use one of {', '.join(ACTS)}")
    return act


def infer_bert(shapes: Shapes, config: Mapping[str, Any], sizes: dict[str, int], block: Block) -> Encoder:
    if config.get("position_embedding_type", "absolute") != "absolute" or config.get("is_decoder"):
        raise UserError("only bidirectional BERT models with absolute positions are supported")
    segments = rows(shapes.get("embeddings.token_type_embeddings.weight"))
    sizes |= {
        "vocab_size": shapes[f"{WORD_EMBEDDINGS}.weight"][0],
        "max_position_embeddings": shapes["embeddings.position_embeddings.weight"][0],
    }
    check_sizes(config, sizes | ({"type_vocab_size": segments} if segments else {}))
    head = bert_head(shapes, block)
    if isinstance(head, LMHead) and not config.get("tie_word_embeddings", True):
        raise UserError(
            "a language-model head whose embedding is not tied is not supported; save the model without its head"
        )
    return Encoder(
        width=sizes["hidden_size"],
        depth=sizes["num_hidden_layers"],
        stem=TokenEmbed(
            vocab_size=sizes["vocab_size"],
            seq_len=sizes["max_position_embeddings"],
            positions=LearnedPositions(TRUNCATED),
            segments=segments or None,
            norm=block.norm,
            init=TRUNCATED,
        ),
        block=block.replace(order="post"),
        norm=None,
        pool=FirstTokenPool() if isinstance(head, PooledHead) else None,
        head=head,
        init=TEXT_INIT,
    )


def bert_head(shapes: Shapes, block: Block) -> LMHead | PooledHead | QAHead | None:
    assert isinstance(block.channel, ChannelMlp) and block.norm is not None
    if any(name.startswith("cls.predictions.") for name in shapes):
        return LMHead(bias=True, transform=True, act=block.channel.act, norm=block.norm)
    if "qa_outputs.weight" in shapes:
        return QAHead()
    if "classifier.weight" in shapes and "pooler.dense.weight" in shapes:
        return PooledHead(rows(shapes["classifier.weight"]))
    return None


def infer_vit(shapes: Shapes, config: Mapping[str, Any], sizes: dict[str, int], block: Block) -> Encoder:
    width, colors, *patch_size = shapes["embeddings.patch_embeddings.projection.weight"]
    check_sizes(config, sizes | {"num_channels": colors})
    tokens, img_size = shapes["embeddings.position_embeddings"][1] - 1, config.get("image_size")
    spec = vit(sizes["num_hidden_layers"], width, block.token.num_heads, 1, 1)  # type: ignore[union-attr]
    stem = spec.stem.replace(
        img_size=infer_img_size(tokens, patch_size, config) if img_size is None else img_size,
        patch_size=tuple(patch_size),
        in_chans=colors,
    )
    return spec.replace(block=block, norm=block.norm, stem=stem, head=classifier(spec, shapes.get("classifier.weight")))


def rows(shape: Shape | None) -> int:
    return shape[0] if shape else 0


def class_names(config: Mapping[str, Any], classes: int) -> tuple[str, ...]:
    """The class names of a configuration; empty if the classes are only numbered."""
    labels = config.get("id2label")
    names = [labels.get(str(number)) for number in range(classes)] if isinstance(labels, dict) else []
    plain = [name for name in names if isinstance(name, str) and not re.fullmatch(r"LABEL_\d+", name)]
    return tuple(plain) if len(plain) == classes else ()


# --- folders -----------------------------------------------------------------------------------------------


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder, which may be in several files."""
    file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if file is not None:
        return read(file)
    index = next((folder / name for name in INDEXES if (folder / name).is_file()), None)
    if index is None:
        raise UserError(f"{folder} has neither {' nor '.join(WEIGHTS)}")
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise UserError(f"{index} names no files of weights")
    tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys(files.values()):
        if Path(name).name != name:
            raise UserError(f"{index} names {name!r}, which is not a file of its folder")
        tensors |= read(folder / name)
    if missing := [name for name in files if name not in tensors]:
        raise UserError(f"{folder} has no {missing[0]}, which {index.name} names")
    return tensors


def read_text(file: Path) -> str:
    """The content of a file; empty if it does not exist."""
    try:
        if not file.is_file():
            return ""
        if file.stat().st_size > MAX_TEXT_BYTES:
            raise UserError(f"{file} is larger than {MAX_TEXT_BYTES:,} bytes; it is not read")
        return file.read_text(encoding="utf8")
    except (OSError, UnicodeError) as reason:
        raise UserError(f"cannot read {file}: {one_line(reason)}") from None


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist."""
    written = read_text(file)
    try:
        content = json.loads(written, parse_int=whole_number) if written else {}
    except (ValueError, RecursionError) as reason:
        raise UserError(f"cannot read {file}: {one_line(reason)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a JSON object")
    return content


def whole_number(digits: str) -> float:
    """Parse an integer; as a float if it is too large to be a size, since counts refuse floats."""
    return int(digits) if len(digits) < 20 else float(digits)


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a folder, with that of its image processor."""
    config = read_json(folder / CONFIG)
    if "kind" in config:
        return {}
    kind = config.get("model_type")
    if kind not in (None, *MODEL_TYPES):
        supported = ", ".join(map(repr, MODEL_TYPES))
        raise UserError(f"{folder / CONFIG} has the model_type {kind!r}: only {supported} are supported")
    return config | {IMAGE_PROCESSOR: read_json(folder / IMAGE_PROCESSOR)}


def configuration(spec: Encoder, preprocessing: ImagePreprocessing | TextPreprocessing | None) -> dict[str, Any]:
    """The config.json of a Transformer."""
    if isinstance(spec.stem, TokenEmbed) and isinstance(spec.block.token, Attention) and spec.block.causal:
        act = ACT_NAMES[getattr(spec.block.channel, "act", "gelu")]
        return causal.configuration("Llama" if spec.block.token.rotary else "GPT-2", spec, act)
    block, stem, head = spec.block, spec.stem, spec.head
    channel, norm = block.channel, block.norm
    if not (isinstance(block.token, Attention) and isinstance(channel, ChannelMlp) and isinstance(norm, LayerNorm)):
        raise UserError("its blocks are not attention and a channel MLP with LayerNorm")
    config = {
        "architectures": [architecture(spec)],
        "hidden_size": spec.width,
        "num_hidden_layers": spec.depth,
        "num_attention_heads": block.token.num_heads,
        "intermediate_size": channel.hidden,
        "hidden_act": ACT_NAMES[channel.act],
        "hidden_dropout_prob": block.dropout,
        "attention_probs_dropout_prob": block.token.dropout,
        "layer_norm_eps": norm.eps,
    }
    if isinstance(stem, PatchEmbed):
        size = {"image_size": list(stem.img_size), "patch_size": list(stem.patch_size)}
        size = {name: pair[0] if pair[0] == pair[1] else pair for name, pair in size.items()}
        config |= {"model_type": "vit", "num_channels": stem.in_chans, "qkv_bias": True, **size}
    elif isinstance(stem, TokenEmbed):
        config |= {"model_type": "bert", "vocab_size": stem.vocab_size, "max_position_embeddings": stem.seq_len}
        config |= {"type_vocab_size": stem.segments or 0, "tie_word_embeddings": True}
    if isinstance(head, (ClassifierHead, PooledHead)):
        names = preprocessing.class_names if preprocessing else ()
        if len(names) != head.num_classes:
            names = tuple(f"LABEL_{number}" for number in range(head.num_classes))
        config |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    if preprocessing is not None and preprocessing.task == "values":
        config["problem_type"] = REGRESSION
    return config


def architecture(spec: Encoder) -> str:
    if isinstance(spec.stem, PatchEmbed):
        return "ViTForImageClassification" if spec.head else "ViTModel"
    kinds = {LMHead: "ForMaskedLM", PooledHead: "ForSequenceClassification", QAHead: "ForQuestionAnswering"}
    return f"Bert{kinds.get(type(spec.head), 'Model')}"  # type: ignore[call-overload]
