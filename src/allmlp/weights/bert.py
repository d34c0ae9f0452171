"""A BERT as Hugging Face publishes it, read into our own encoder; its table of words as a start for another model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from allmlp.errors import UserError, one_line
from allmlp.layers.act import Act
from allmlp.layers.block import Block
from allmlp.layers.channel import ChannelMlp
from allmlp.layers.head import Vocabulary
from allmlp.layers.mixers.attention import Attention
from allmlp.layers.norm import LayerNorm
from allmlp.layers.stem import Learned, Tokens
from allmlp.models.bert import TEXT_INIT, TRUNCATED
from allmlp.models.encoder import Encoder, EncoderModel
from allmlp.models.model import Model
from allmlp.weights.folder import CONFIG, WEIGHTS, compare

ACTS: dict[str, Act] = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
DEFAULTS = {"type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu"}
"""What the oldest configurations leave out."""

WORDS = "embeddings.word_embeddings"
AROUND = {
    "stem.embedding": WORDS,
    "stem.positions": "embeddings.position_embeddings",
    "stem.segments": "embeddings.token_type_embeddings",
    "stem.norm": "embeddings.LayerNorm",
    "head": "cls.predictions",
    "head.transform": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
}
"""Our module -> its name there."""
BLOCK = {
    "token.mix.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "token.mix.out": ("attention.output.dense",),
    "token.norm": ("attention.output.LayerNorm",),
    "channel.mix.up": ("intermediate.dense",),
    "channel.mix.down": ("output.dense",),
    "channel.norm": ("output.LayerNorm",),
}
"""Our module in a block -> the modules there that are stacked in it."""
UNUSED = ("embeddings.position_ids", "pooler.", "cls.seq_relationship.", "cls.predictions.decoder.")
"""Numbers from 0 to the length, the head for pairs of sentences, and the tied copy of the table."""


def load_bert(folder: str | os.PathLike[str], device: str | torch.device = "cpu") -> Model:
    """The BERT in `folder` (config.json and model.safetensors), in evaluation mode and single precision.

    It has a head where the file holds the one for masked words; the pooler and the head for pairs are left out.
    """
    path = Path(folder).expanduser()
    config = read_bert(path)
    with open_weights(path, device) as source:
        names = plain_names(source)
        found = {name: tuple(source.get_slice(full).get_shape()) for name, full in names.items()}
        spec = describe(path / CONFIG, config, head=any(name.startswith("cls.predictions.") for name in names))
        with torch.device("meta"):
            model = spec.build()
        own = model.state_dict()
        compare(path / WEIGHTS, {part: shape for name in own for part, shape in parts(name, own[name])}, found)
        state = {
            name: torch.cat([source.get_tensor(names[part]) for part, _ in parts(name, tensor)]).float()
            for name, tensor in own.items()
        }
    model.load_state_dict(state, assign=True)
    return model.eval()


def word_embeddings(folder: str | os.PathLike[str]) -> Tensor:
    """The table of words of the BERT in `folder`, v c; nothing else is read."""
    path = Path(folder).expanduser()
    read_bert(path)
    with open_weights(path) as source:
        name = plain_names(source).get(f"{WORDS}.weight")
        if name is None:
            raise UserError(f"{path / WEIGHTS} has no {WORDS}.weight")
        return source.get_tensor(name).float()


@torch.no_grad()
def start_embeddings(model: Model, folder: str | os.PathLike[str]) -> None:
    """Start the table of words of `model` from that of the BERT in `folder`, which must have as many words.

        E = T                       where the widths are equal
        E = s (T - mean(T)) V       otherwise

    V holds the first principal components of T, and s gives E the standard deviation that the model's own table has.
    A model that is wider than T has zeros in the channels left over.
    """
    table = model.table if isinstance(model, EncoderModel) else None
    if table is None:
        raise UserError("only an encoder of text has a table of words to start")
    source = word_embeddings(folder)
    if len(source) != len(table):
        raise UserError(f"the BERT in {folder} has {len(source)} words, the model {len(table)}: use its tokenizer")
    if source.shape != table.shape:
        source = principal(source, table.shape[1])
        source *= table.std().cpu() / source.std()
    table.copy_(source)


def principal(table: Tensor, width: int) -> Tensor:
    """The rows along their principal components, the largest first and each with its largest weight positive."""
    centred = table.double() - table.double().mean(0)
    components = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :width]
    largest = components.gather(0, components.abs().argmax(0, keepdim=True))
    rows = centred @ (components * largest.sign())
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1])).to(table.dtype)


# --- what is in the folder --------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, whoever wrote it."""
    file = folder / CONFIG
    if not file.is_file():
        raise UserError(f"{folder} is not a model folder: it has no {CONFIG}")
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as reason:
        raise UserError(f"cannot read {file}: {one_line(reason)}") from None
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a model's configuration")
    return config


def read_bert(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    if config.get("model_type") != "bert":
        kind = config.get("model_type")
        raise UserError(f"{folder / CONFIG} has the model_type {kind!r}: only Hugging Face's 'bert' can be read")
    return DEFAULTS | config


def describe(file: Path, config: dict[str, Any], head: bool) -> Encoder:
    """The spec of a published configuration, without dropout."""
    if config.get("position_embedding_type", "absolute") != "absolute" or config.get("is_decoder"):
        raise UserError(f"{file}: only a bidirectional BERT with absolute positions can be read")
    if head and not config.get("tie_word_embeddings", True):
        raise UserError(f"{file}: a head with a table of its own cannot be read; save the model without its head")
    act = ACTS.get(str(config["hidden_act"]))
    if act is None:
        raise UserError(f"{file}: the hidden_act {config['hidden_act']!r} is not known; {', '.join(ACTS)} are")
    try:
        norm = LayerNorm(config["layer_norm_eps"])
        return Encoder(
            width=config["hidden_size"],
            depth=config["num_hidden_layers"],
            stem=Tokens(
                vocabulary=config["vocab_size"],
                length=config["max_position_embeddings"],
                positions=Learned(TRUNCATED),
                segments=config["type_vocab_size"],
                norm=norm,
                init=TRUNCATED,
            ),
            block=Block(
                token=Attention(config["num_attention_heads"]),
                channel=ChannelMlp(config["intermediate_size"], act),
                norm=norm,
                order="post",
            ),
            norm=None,
            head=Vocabulary(bias=True, transform=True, act=act, norm=norm) if head else None,
            init=TEXT_INIT,
        )
    except KeyError as missing:
        raise UserError(f"{file} has no {missing.args[0]}") from None
    except UserError as reason:
        raise UserError(f"{file}: {reason}") from None


@contextmanager
def open_weights(folder: Path, device: str | torch.device = "cpu") -> Iterator[Any]:
    file = folder / WEIGHTS
    if not file.is_file():
        raise UserError(f"{folder} has no {WEIGHTS}; other formats are not read, save the model again as safetensors")
    try:
        with safe_open(file, framework="pt", device=str(device)) as source:
            yield source
    except (SafetensorError, OSError) as reason:
        raise UserError(f"{file} is damaged or not a safetensors file: {one_line(reason)}") from None


def plain_names(source: Any) -> dict[str, str]:
    """Name -> full name of every tensor that is used.

    Models with a head put `bert.` in front; the first ones call a norm's weight and bias gamma and beta.
    """
    names = {}
    for full in source.keys():  # noqa: SIM118
        name = full.removeprefix("bert.").replace(".gamma", ".weight").replace(".beta", ".bias")
        if not name.startswith(UNUSED):
            names[name] = full
    return names


def parts(name: str, tensor: Tensor) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the published tensors that one of ours is stacked from."""
    module, _, kind = name.rpartition(".")
    if module.startswith("blocks."):
        _, number, place = module.split(".", 2)
        sources = [f"encoder.layer.{number}.{source}.{kind}" for source in BLOCK[place]]
    else:
        sources = [f"{AROUND[module]}.{kind}"]
    return [(source, (tensor.shape[0] // len(sources), *tensor.shape[1:])) for source in sources]
