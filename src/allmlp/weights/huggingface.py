"""Hugging Face's layout of BERT and ViT: its names for our weights, its config.json, and its folders.

Queries, keys and values are three maps there and one here. Which head a model has is seen from its weights; the number
of attention heads, the activation and eps stand in its configuration. In a file without one, heads are 64 channels
wide, GELU is exact and eps 1e-12.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allmlp.data.inputs import Inputs, TextInputs
from allmlp.errors import UserError, one_line
from allmlp.files import write_atomically
from allmlp.layers.act import Act
from allmlp.layers.block import Block
from allmlp.layers.channel import ChannelMlp
from allmlp.layers.head import Classes, Pair, Span, Vocabulary
from allmlp.layers.mixers.attention import Attention
from allmlp.layers.norm import LayerNorm
from allmlp.layers.pool import First
from allmlp.layers.stem import Learned, Patches, Tokens
from allmlp.models.bert import TEXT_INIT, TRUNCATED
from allmlp.models.encoder import Encoder
from allmlp.models.vit import vit
from allmlp.weights.tensors import write_safetensors
from allmlp.weights.timm import HALF, Shape, Shapes, blocks, classifier, convolution, heads, square_image

TITLE: str = "Hugging Face's"

SIGNATURES: dict[str, dict[str, int]] = {
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
}
"""The weights by which a family is known, with their number of axes."""
SPARE: tuple[str, ...] = ("pooler.", "cls.seq_relationship.")
"""What a model here has no place for, unless its head uses it: the layer and the head for pairs of sentences."""
UNTOLD: dict[str, str] = {}

CONFIG, PIXELS = "config.json", "preprocessor_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
LARGEST = 2**26
"""Bytes of a text beside the weights."""

WORDS = "embeddings.word_embeddings"
AROUND: dict[str, dict[str, str]] = {
    "BERT": {
        "stem.embedding": WORDS,
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
"""Our module -> its name there."""
OUTPUT = {Pair: "classifier", Classes: "classifier", Span: "qa_outputs"}
"""Our head -> the name of its last map; that of words is the table they come from."""
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
"""Our module in a block -> its name there."""
STACKED = ("query", "key", "value")
TABLES = {"stem.token": "embeddings.cls_token", "stem.positions.weight": "embeddings.position_embeddings"}
"""Tables of ViT that are no modules there."""

OTHER_NAMES = {
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
"""In front of a body that has a head; of the first published models; of a ViT in the memory of transformers 5."""

ACTS: dict[str, Act] = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
ACT_NAMES: dict[Act, str] = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}


# --- names and shapes --------------------------------------------------------------------------------------


def tidy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names that published files have, without counted positions and copies of a tied table."""
    if not any(re.match(r"(bert\.|vit\.)?embeddings\.", name) for name in tensors):
        return dict(tensors)
    found: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        name = full
        for pattern, replacement in OTHER_NAMES.items():
            name = re.sub(pattern, replacement, name)
        if name in found:
            raise UserError(f"it has {name} twice")
        found[name] = tensor
    found.pop("embeddings.position_ids", None)
    for name, copied in (("decoder.weight", f"{WORDS}.weight"), ("decoder.bias", "cls.predictions.bias")):
        copy, first = found.get(f"cls.predictions.{name}"), found.get(copied)
        if copy is not None and first is not None and copy.dtype == first.dtype and torch.equal(copy, first):
            del found[f"cls.predictions.{name}"]
    return found


def keys(family: str, name: str, spec: Encoder) -> tuple[str, ...]:
    """The published names of what is stacked in one of our weights; KeyError where there are none."""
    if family == "ViT" and name in TABLES:
        return (TABLES[name],)
    block = re.match(r"blocks\.(\d+)\.", name)
    module, _, kind = (name[block.end() :] if block else name).rpartition(".")
    if block:
        place = f"encoder.layer.{block.group(1)}.{BLOCK[family][module]}"
        return tuple(f"{place}.{part}.{kind}" for part in STACKED) if module.endswith("qkv") else (f"{place}.{kind}",)
    place = OUTPUT[type(spec.head)] if module == "head.proj" else AROUND[family][module]  # type: ignore[index]
    return (f"{place}.{kind}",)


def outward(family: str, name: str, tensor: Tensor, spec: Encoder) -> Tensor:
    """One of our weights in its shape there."""
    if family == "ViT" and name == "stem.proj.weight":
        return convolution(tensor, spec)
    return tensor.reshape(1, -1, tensor.shape[-1]) if family == "ViT" and name in TABLES else tensor


def inward(family: str, name: str, tensor: Tensor, shape: Shape) -> Tensor:
    """The way back: the same numbers in the same order."""
    return tensor.reshape(shape)


# --- the spec ----------------------------------------------------------------------------------------------


def describe(family: str, shapes: Shapes, config: Mapping[str, Any]) -> Encoder:
    """The model behind these shapes, without dropout."""
    hidden, width = shapes["encoder.layer.0.intermediate.dense.weight"]
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": blocks(shapes, r"encoder\.layer\.(\d+)\."),
        "intermediate_size": hidden,
    }
    act = ACTS.get(str(config.get("hidden_act", "gelu")))
    if act is None:
        raise UserError(f"the hidden_act {config['hidden_act']!r} is not known; {', '.join(ACTS)} are")
    attention = Attention(config.get("num_attention_heads") or heads(width))
    block = Block(attention, channel=ChannelMlp(hidden, act), norm=LayerNorm(config.get("layer_norm_eps", 1e-12)))
    model = bert if family == "BERT" else picture
    return model(shapes, config, sizes, block)


def bert(shapes: Shapes, config: Mapping[str, Any], sizes: dict[str, int], block: Block) -> Encoder:
    if config.get("position_embedding_type", "absolute") != "absolute" or config.get("is_decoder"):
        raise UserError("only a bidirectional BERT with absolute positions can be read")
    segments = rows(shapes.get("embeddings.token_type_embeddings.weight"))
    sizes |= {
        "vocab_size": shapes[f"{WORDS}.weight"][0],
        "max_position_embeddings": shapes["embeddings.position_embeddings.weight"][0],
    }
    agree(config, sizes | ({"type_vocab_size": segments} if segments else {}))
    head = bert_head(shapes, block)
    if isinstance(head, Vocabulary) and not config.get("tie_word_embeddings", True):
        raise UserError("a head with a table of its own cannot be read; save the model without its head")
    return Encoder(
        width=sizes["hidden_size"],
        depth=sizes["num_hidden_layers"],
        stem=Tokens(
            vocabulary=sizes["vocab_size"],
            length=sizes["max_position_embeddings"],
            positions=Learned(TRUNCATED),
            segments=segments or None,
            norm=block.norm,
            init=TRUNCATED,
        ),
        block=block.replace(order="post"),
        norm=None,
        pool=First() if isinstance(head, Pair) else None,
        head=head,
        init=TEXT_INIT,
    )


def bert_head(shapes: Shapes, block: Block) -> Vocabulary | Pair | Span | None:
    assert block.channel is not None
    if any(name.startswith("cls.predictions.") for name in shapes):
        return Vocabulary(bias=True, transform=True, act=block.channel.act, norm=block.norm)
    if "qa_outputs.weight" in shapes:
        return Span()
    if "classifier.weight" in shapes and "pooler.dense.weight" in shapes:
        return Pair(rows(shapes["classifier.weight"]))
    return None


def picture(shapes: Shapes, config: Mapping[str, Any], sizes: dict[str, int], block: Block) -> Encoder:
    width, colours, *patch = shapes["embeddings.patch_embeddings.projection.weight"]
    agree(config, sizes | {"num_channels": colours})
    tokens, image = shapes["embeddings.position_embeddings"][1] - 1, config.get("image_size")
    spec = vit(sizes["num_hidden_layers"], width, block.token.heads, 1, 1)  # type: ignore[union-attr]
    stem = spec.stem.replace(
        image=square_image(tokens, patch) if image is None else image, patch=tuple(patch), in_channels=colours
    )
    return spec.replace(block=block, norm=block.norm, stem=stem, head=classifier(spec, shapes.get("classifier.weight")))


def rows(shape: Shape | None) -> int:
    return shape[0] if shape else 0


def agree(config: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    for name, found in sizes.items():
        if config.get(name, found) != found:
            raise UserError(f"its configuration says {name} {config[name]!r}, its weights say {found}")


def inputs(family: str, spec: Encoder, config: Mapping[str, Any]) -> Inputs | TextInputs | None:
    names = class_names(config, getattr(spec.head, "classes", 0))
    if family == "ViT":
        pixels = config.get(PIXELS, {})
        if pixels.get("do_normalize") is False:
            return Inputs((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), names)
        return Inputs(pixels.get("image_mean", HALF), pixels.get("image_std", HALF), names)
    assert isinstance(spec.stem, Tokens)
    if spec.head is None:
        return None
    gives = "classes" if isinstance(spec.head, Pair) else "span" if isinstance(spec.head, Span) else "text"
    return TextInputs(gives, spec.stem.length, names)


def class_names(config: Mapping[str, Any], classes: int) -> tuple[str, ...]:
    """What the classes are called; nothing where they are only numbered."""
    labels = config.get("id2label")
    names = [labels.get(str(number)) for number in range(classes)] if isinstance(labels, dict) else []
    plain = [name for name in names if isinstance(name, str) and not re.fullmatch(r"LABEL_\d+", name)]
    return tuple(plain) if len(plain) == classes else ()


# --- folders -----------------------------------------------------------------------------------------------


def weights_file(folder: Path) -> Path:
    found = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if found is None:
        raise UserError(f"{folder} has neither {' nor '.join(WEIGHTS)}")
    return found


def text(file: Path) -> str:
    """A text that lies beside the weights, empty where it does not."""
    try:
        if not file.is_file():
            return ""
        if file.stat().st_size > LARGEST:
            raise UserError(f"{file} is longer than such a file ever is; it is refused")
        return file.read_text(encoding="utf8")
    except (OSError, UnicodeError) as reason:
        raise UserError(f"cannot read {file}: {one_line(reason)}") from None


def read_json(file: Path) -> dict[str, Any]:
    """The settings in a file; none where it is not there."""
    written = text(file)
    try:
        found = json.loads(written, parse_int=whole_number) if written else {}
    except (ValueError, RecursionError) as reason:
        raise UserError(f"cannot read {file}: {one_line(reason)}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} is not a model's configuration")
    return found


def whole_number(digits: str) -> float:
    """An int; one that no size can have becomes a float, which no count may be."""
    return int(digits) if len(digits) < 20 else float(digits)


def read_beside(folder: Path) -> dict[str, Any]:
    """What a folder says about the weights in it: config.json, and how pictures are prepared."""
    config = read_json(folder / CONFIG)
    if "kind" in config:
        return {}
    kind = config.get("model_type")
    if kind not in (None, "bert", "vit"):
        raise UserError(f"{folder / CONFIG} has the model_type {kind!r}: only 'bert' and 'vit' can be read")
    return config | {PIXELS: read_json(folder / PIXELS)}


def files(spec: Encoder, inputs: Inputs | TextInputs | None) -> dict[str, Any]:
    """Name -> content of what lies beside the weights there."""
    found = {CONFIG: configuration(spec, inputs)}
    if isinstance(inputs, Inputs) and isinstance(spec.stem, Patches):
        size = dict(zip(("height", "width"), spec.stem.image))
        pixels = {"image_mean": inputs.mean, "image_std": inputs.std, "size": size}
        found[PIXELS] = {"image_processor_type": "ViTImageProcessor", **pixels}
    return found


def configuration(spec: Encoder, inputs: Inputs | TextInputs | None) -> dict[str, Any]:
    """The config.json of a Transformer."""
    block, stem, head = spec.block, spec.stem, spec.head
    if not isinstance(block.token, Attention) or block.channel is None or not isinstance(block.norm, LayerNorm):
        raise UserError("it has other blocks than attention and a channel MLP behind LayerNorm")
    config = {
        "architectures": [architecture(spec)],
        "hidden_size": spec.width,
        "num_hidden_layers": spec.depth,
        "num_attention_heads": block.token.heads,
        "intermediate_size": block.channel.hidden,
        "hidden_act": ACT_NAMES[block.channel.act],
        "hidden_dropout_prob": block.dropout,
        "attention_probs_dropout_prob": block.token.dropout,
        "layer_norm_eps": block.norm.eps,
    }
    if isinstance(stem, Patches):
        size = {"image_size": list(stem.image), "patch_size": list(stem.patch)}
        size = {name: pair[0] if pair[0] == pair[1] else pair for name, pair in size.items()}
        config |= {"model_type": "vit", "num_channels": stem.in_channels, "qkv_bias": True, **size}
    elif isinstance(stem, Tokens):
        config |= {"model_type": "bert", "vocab_size": stem.vocabulary, "max_position_embeddings": stem.length}
        config |= {"type_vocab_size": stem.segments or 0, "tie_word_embeddings": True}
    if isinstance(head, (Classes, Pair)):
        names = inputs.classes if inputs and len(inputs.classes) == head.classes else ()
        names = names or tuple(f"LABEL_{number}" for number in range(head.classes))
        config |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    return config


def architecture(spec: Encoder) -> str:
    if isinstance(spec.stem, Patches):
        return "ViTForImageClassification" if spec.head else "ViTModel"
    kinds = {Vocabulary: "ForMaskedLM", Pair: "ForSequenceClassification", Span: "ForQuestionAnswering"}
    return f"Bert{kinds.get(type(spec.head), 'Model')}"  # type: ignore[call-overload]


def write(path: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
    """A folder that transformers reads with from_pretrained. With a head the body's names have a prefix."""
    body = ("embeddings.", "encoder.", "layernorm.", "pooler.")
    kind = json.loads(files[CONFIG])["model_type"]
    prefix = "" if all(name.startswith(body) for name in tensors) else f"{kind}."
    path.mkdir(parents=True, exist_ok=True)
    named = {prefix + name if name.startswith(body) else name: tensor for name, tensor in tensors.items()}
    write_safetensors(path / WEIGHTS[0], named)
    for name, content in files.items():
        write_atomically(path / name, lambda file, content=content: file.write_text(content, encoding="utf8"))
