"""The same model in timm and transformers: built to our spec, loaded with our weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allmlp.bench.parity import randomize
from allmlp.errors import UserError, one_line, require
from allmlp.layers.channel import ChannelMlp
from allmlp.layers.head import ClassifierHead
from allmlp.layers.mixers.attention import Attention
from allmlp.layers.mixers.mlp import TokenMlp
from allmlp.layers.pool import ClassAttention
from allmlp.layers.stem import PatchEmbed
from allmlp.models import timm as timm_models
from allmlp.models.encoder import Encoder
from allmlp.models.external import ExternalModel
from allmlp.models.model import Model, ModelSpec
from allmlp.models.torchvision import define_missing_operators
from allmlp.models.zoo import create
from allmlp.spec import override_all
from allmlp.weights.convert import FORMATS, ConvertedModel, family_of, import_state, source_pieces, write_format
from allmlp.weights.folder import CONFIG, expected_shapes

Named = Mapping[str, Tensor]
TIMM, HUGGING_FACE = FORMATS["timm"], FORMATS["hf"]


class Peer(Model[Encoder]):
    """Another package's network with our weights. `spec` is ours, so that the same tasks can train it."""

    network: Any

    def __init__(self, spec: Encoder, network: nn.Module) -> None:
        super().__init__()
        self.spec, self.network = spec, network

    def to_native(self, tensors: Named) -> dict[str, Tensor]:
        """Rename tensors such as gradients from the package's parameter names to ours."""
        raise NotImplementedError


class TimmPeer(Peer):
    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def to_native(self, tensors: Named) -> dict[str, Tensor]:
        family, shapes = str(family_of(self.spec)), expected_shapes(self.spec)
        native = {}
        for name, (rows, *rest) in shapes.items():
            parts = [
                TIMM.from_source(family, name, tensors[f"network.{key}"], (part, *rest))
                for key, part in source_pieces(TIMM, family, name, rows, self.spec).items()
            ]
            native[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return native


class HuggingFacePeer(Peer):
    def __init__(self, spec: Encoder, network: nn.Module, config: Mapping[str, Any]) -> None:
        super().__init__(spec, network)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).logits

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.network.base_model(x, attention_mask=mask).last_hidden_state

    def forward_head(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.network.cls(features)

    def to_native(self, tensors: Named) -> dict[str, Tensor]:
        there = {name.removeprefix("network."): tensor for name, tensor in tensors.items()}
        return import_state(Path("transformers"), there, self.config).state


@dataclass(frozen=True)
class PeerGroup:
    """One model in several packages, in float32, with equal weights."""

    name: str
    spec: ModelSpec
    models: dict[str, Model]
    """Package -> model; the first is the reference."""
    missing: dict[str, str]
    """Package -> why it has no such model."""

    @property
    def first(self) -> Model:
        return next(iter(self.models.values()))


def peer_group(name: str, spec: ModelSpec, device: torch.device, packages: Iterable[str] = ("timm", "hf")) -> PeerGroup:
    """`spec` with random weights, and its equivalents in timm and transformers where they exist."""
    spec = comparable_spec(spec)
    model = create(spec, device=device)
    randomize(model)
    if isinstance(model, ExternalModel):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # random dropout would make outputs incomparable
        return PeerGroup(name, spec, {name.partition(":")[0]: model}, {})
    models: dict[str, Model] = {"ours": model}
    missing = {}
    for package in packages:
        try:
            models[package] = PACKAGES[package](model).to(device)
        except UserError as reason:
            missing[package] = str(reason)
    return PeerGroup(name, spec, models, missing)


def comparable_spec(spec: ModelSpec) -> ModelSpec:
    """The variant that timm implements (exact GELU in a Mixer), without dropout and drop path."""
    if not isinstance(spec, Encoder):
        return spec
    changes: dict[str, Any] = {"drop_path.rate": 0.0, "block.dropout": 0.0}
    if family_of(spec) == "Mixer":
        changes |= {"block.token.act": "gelu", "block.channel.act": "gelu"}
    return override_all(spec, changes)


# --- timm --------------------------------------------------------------------------------------------------


def timm_peer(model: Model) -> Peer:
    spec = require_encoder(model)
    family = family_of(spec)
    if family not in TIMM.SIGNATURES:
        raise UserError(f"timm has no {family or 'such model'}")
    tensors = {}
    for name, tensor in model.state_dict().items():
        pieces = source_pieces(TIMM, family, name, len(tensor), spec)
        for key, piece in zip(pieces, tensor.split([*pieces.values()]), strict=True):
            tensors[key] = TIMM.to_source(family, name, piece, spec)
    network = timm_network(spec)
    try:
        network.load_state_dict(tensors)
    except RuntimeError as reason:
        raise UserError(f"timm's {family} has other weights: {one_line(reason)}") from None
    return TimmPeer(spec, network)


def timm_network(spec: Encoder) -> nn.Module:
    """timm's class with our sizes; for published sizes this is the network that timm itself builds."""
    timm_models.package()
    mixers = require("timm.models.mlp_mixer", "timm")
    stem, channel, token, head = spec.stem, spec.block.channel, spec.block.token, spec.head
    assert isinstance(stem, PatchEmbed) and isinstance(channel, ChannelMlp) and isinstance(head, ClassifierHead | None)
    options: dict[str, Any] = {
        "img_size": stem.img_size,
        "patch_size": stem.patch_size,
        "in_chans": stem.in_chans,
        "embed_dim": spec.width,
        "num_classes": head.num_classes if head else 0,
    }
    ratio = channel.hidden / spec.width
    if isinstance(token, Attention) and token.talking_heads:
        assert isinstance(spec.pool, ClassAttention) and spec.block.scale is not None
        build = require("timm.models.cait", "timm").Cait
        scale = {"init_values": spec.block.scale.init_value, "depth_token_only": spec.pool.layers}
        return build(depth=spec.depth, num_heads=token.num_heads, mlp_ratio=ratio, **scale, **options)
    if isinstance(token, Attention):
        build = require("timm.models.vision_transformer", "timm").VisionTransformer
        scale = {"init_values": spec.block.scale.init_value} if spec.block.scale else {}
        pool = {"class_token": stem.class_token, "global_pool": "token" if stem.class_token else "avg", **scale}
        return build(depth=spec.depth, num_heads=token.num_heads, mlp_ratio=ratio, **pool, **options)
    family: dict[str, Any] = {"mlp_ratio": ratio}
    if isinstance(token, TokenMlp):
        family = {"mlp_ratio": (token.width(stem.tokens) / spec.width, ratio)}
    elif token is None:
        family |= {"block_layer": mixers.SpatialGatingBlock, "mlp_layer": require("timm.layers", "timm").GatedMlp}
    else:
        value = spec.block.scale.init_value if spec.block.scale else 1.0
        family |= {"block_layer": partial(mixers.ResBlock, init_values=value), "norm_layer": mixers.Affine}
    return mixers.MlpMixer(num_blocks=spec.depth, **family, **options)


# --- transformers ------------------------------------------------------------------------------------------


def huggingface_peer(model: Model) -> Peer:
    spec = require_encoder(model)
    converted = ConvertedModel(spec, {name: tensor.cpu() for name, tensor in model.state_dict().items()})
    config = HUGGING_FACE.config_files(spec, None)[CONFIG] if family_of(spec) in HUGGING_FACE.SIGNATURES else {}
    with tempfile.TemporaryDirectory() as folder:
        write_format(Path(folder) / "model", HUGGING_FACE, converted)
        define_missing_operators()
        transformers = require("transformers", "baselines")
        transformers.logging.disable_progress_bar()
        kind = getattr(transformers, config["architectures"][0])
        network = kind.from_pretrained(Path(folder) / "model", attn_implementation="sdpa")
    return HuggingFacePeer(spec, network, config)


PACKAGES: dict[str, Callable[[Model], Peer]] = {"timm": timm_peer, "hf": huggingface_peer}


def require_encoder(model: Model) -> Encoder:
    if not isinstance(model.spec, Encoder):
        raise UserError(f"a {type(model.spec).__name__} has no equivalent in other packages")
    if model.spec.stages:
        raise UserError("a model with stages has no equivalent in other packages")
    return model.spec
