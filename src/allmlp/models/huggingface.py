"""Baselines from Hugging Face transformers, built from their configurations without weights or network access."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from allmlp.errors import UserError, lookup, one_line, require
from allmlp.models.external import External, ExternalModel, PretrainedExternal, flatten
from allmlp.models.model import ModelSpec, S
from allmlp.models.preset import Preset, Published
from allmlp.models.torchvision import define_missing_operators
from allmlp.spec import Count


class Architecture(NamedTuple):
    """The family in the class names `{family}Config` and `{family}For...` of transformers, and the config's options."""

    family: str
    options: dict[str, Any]
    img_size: int = 224
    hub: str | None = None
    """The repository of its weights on the Hub."""


def resnet(*depths: int) -> Architecture:
    layers = 3 * sum(depths) + 2
    return Architecture("ResNet", {"depths": depths}, hub=f"microsoft/resnet-{layers}")


def regnet_y(size: str, depths: list[int], channels: list[int], group: int) -> Architecture:
    options = {"depths": depths, "hidden_sizes": channels, "groups_width": group, "layer_type": "y"}
    return Architecture("RegNet", options, hub=f"facebook/regnet-y-{size}")


def bit(factor: int, *depths: int) -> Architecture:
    """The configuration's `width_factor` would not widen the stem and the last norm."""
    channels = [256 * factor, 512 * factor, 1024 * factor, 2048 * factor]
    return Architecture("Bit", {"depths": depths, "hidden_sizes": channels, "embedding_size": 64 * factor})


def deit(size: str, width: int, num_heads: int) -> Architecture:
    sizes = {"hidden_size": width, "num_attention_heads": num_heads, "intermediate_size": 4 * width}
    return Architecture("DeiT", sizes, hub=f"facebook/deit-{size}-patch16-224")


def efficientnet(size: str, width: float, depth: float, img_size: int, dropout: float, hidden: int) -> Architecture:
    options = {
        "width_coefficient": width,
        "depth_coefficient": depth,
        "hidden_dim": hidden,
        "dropout_rate": dropout,
        "batch_norm_momentum": 0.01,  # TensorFlow's 0.99: torch's momentum weights the new value
    }
    return Architecture("EfficientNet", options, img_size, f"google/efficientnet-{size}")


def bert(depth: int, width: int, num_heads: int) -> Architecture:
    sizes = {"num_hidden_layers": depth, "hidden_size": width, "num_attention_heads": num_heads}
    return Architecture("Bert", sizes | {"intermediate_size": 4 * width})


IMAGES = {
    "resnet50": resnet(3, 4, 6, 3),
    "resnet152": resnet(3, 8, 36, 3),
    "regnety_040": regnet_y("040", [2, 6, 12, 2], [128, 192, 512, 1088], 64),
    "regnety_080": regnet_y("080", [2, 4, 10, 1], [168, 448, 896, 2016], 56),
    "regnety_160": regnet_y("160", [2, 4, 11, 1], [224, 448, 1232, 3024], 112),
    "efficientnet_b0": efficientnet("b0", 1.0, 1.0, 224, 0.2, 1280),
    "efficientnet_b1": efficientnet("b1", 1.0, 1.1, 240, 0.2, 1280),
    "efficientnet_b2": efficientnet("b2", 1.1, 1.2, 260, 0.3, 1408),
    "efficientnet_b3": efficientnet("b3", 1.2, 1.4, 300, 0.3, 1536),
    "efficientnet_b4": efficientnet("b4", 1.4, 1.8, 380, 0.4, 1792),
    "efficientnet_b5": efficientnet("b5", 1.6, 2.2, 456, 0.4, 2048),
    "efficientnet_b6": efficientnet("b6", 1.8, 2.6, 528, 0.5, 2304),
    "efficientnet_b7": efficientnet("b7", 2.0, 3.1, 600, 0.5, 2560),
    "bit_r152x4": bit(4, 3, 8, 36, 3),
    "deit_ti16": deit("tiny", 192, 3),
    "deit_s16": deit("small", 384, 6),
    "deit_b16": deit("base", 768, 12),
}
TEXTS = {"bert_base": bert(12, 768, 12), "bert_large": bert(24, 1024, 16)}
SERIES = {
    "patchtst": Architecture(
        "PatchTST",
        {
            "patch_length": 16,
            "patch_stride": 8,
            "d_model": 16,
            "num_attention_heads": 4,
            "ffn_dim": 128,
            "ff_dropout": 0.3,
            "attention_dropout": 0.3,
            "positional_dropout": 0.3,
            "pooling_type": None,  # the head reads all patches, as in the paper; transformers averages them by default
        },
    ),
    "patchtsmixer": Architecture(
        "PatchTSMixer",
        {
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 48,
            "num_layers": 3,
            "expansion_factor": 3,
            "dropout": 0.5,
            "head_dropout": 0.7,
        },
    ),
}
"""Sizes for the ETT datasets: PatchTST as in its paper, PatchTSMixer as in its authors' example."""


class HuggingFaceImages(External):
    """An image classifier of transformers."""

    def check(self) -> None:
        lookup(self.name, IMAGES, "image model of transformers")

    @property
    def default_size(self) -> tuple[int, int]:
        return (IMAGES[self.name].img_size,) * 2

    def build(self) -> HuggingFaceImagesModel:
        architecture = IMAGES[self.name]
        options = architecture.options | {"num_labels": self.num_classes, "num_channels": self.in_chans}
        if architecture.family == "DeiT":
            options["image_size"] = self.input_size
        if architecture.family == "EfficientNet":
            options["depthwise_padding"] = odd_blocks(self.input_size[0], options["depth_coefficient"])
        network = construct(architecture.family, "ForImageClassification", options)
        for module in network.modules():
            # transformers initializes those of EfficientNet around zero, which blocks the signal.
            if isinstance(module, nn.BatchNorm2d):
                nn.init.ones_(module.weight)
        return HuggingFaceImagesModel(self, network)

    def pretrained(self) -> PretrainedExternal:
        hub = IMAGES[self.name].hub
        if hub is None:
            raise UserError(f"no weights of hf:{self.name} are published")
        transformers = require("transformers", "baselines")
        model = self.build()
        try:
            trained = type(model.network).from_pretrained(hub)
            pixels = transformers.AutoImageProcessor.from_pretrained(hub)
        except (OSError, ValueError) as reason:
            raise UserError(f"cannot load {hub} from the cache or the Hub: {one_line(reason)}") from None
        model.network.load_state_dict(trained.state_dict())
        return PretrainedExternal(model, tuple(pixels.image_mean), tuple(pixels.image_std), crop_fraction(pixels))


class HuggingFaceText(ModelSpec):
    """A masked language model of transformers."""

    name: str
    vocab_size: Count = 30_522
    seq_len: Count = 512

    def check(self) -> None:
        lookup(self.name, TEXTS, "language model of transformers")

    @property
    def input_spec(self) -> str:
        return f"{self.seq_len} tokens"

    def build(self) -> HuggingFaceTextModel:
        architecture = TEXTS[self.name]
        sizes = {"vocab_size": self.vocab_size, "max_position_embeddings": self.seq_len}
        return HuggingFaceTextModel(self, construct(architecture.family, "ForMaskedLM", architecture.options | sizes))


class HuggingFaceSeries(ModelSpec):
    """A forecasting model of transformers."""

    name: str
    seq_len: Count = 512
    in_chans: Count = 7
    horizon: Count = 96

    def check(self) -> None:
        lookup(self.name, SERIES, "forecasting model of transformers")

    @property
    def input_spec(self) -> str:
        return f"{self.seq_len}x{self.in_chans} series"

    def build(self) -> HuggingFaceSeriesModel:
        architecture = SERIES[self.name]
        sizes = {"context_length": self.seq_len, "num_input_channels": self.in_chans, "prediction_length": self.horizon}
        network = construct(architecture.family, "ForPrediction", architecture.options | sizes)
        return HuggingFaceSeriesModel(self, network)


def crop_fraction(pixels: Any) -> float:
    """The fraction of the short side that an image processor keeps."""
    side = short_side(pixels.size)
    if getattr(pixels, "crop_pct", None):  # ConvNeXt only crops smaller images
        return pixels.crop_pct if side < 384 else 1.0
    return min(short_side(pixels.crop_size) / side, 1.0) if getattr(pixels, "do_center_crop", False) else 1.0


def short_side(size: Any) -> int:
    sides = size if isinstance(size, dict) else vars(size)
    return sides.get("shortest_edge") or min(sides["height"], sides["width"])


def construct(family: str, task: str, options: dict[str, Any]) -> nn.Module:
    define_missing_operators()
    folder = f"transformers.models.{family.lower()}"
    configuration = require(f"{folder}.configuration_{family.lower()}", "baselines")
    modeling = require(f"{folder}.modeling_{family.lower()}", "baselines")
    return getattr(modeling, family + task)(getattr(configuration, f"{family}Config")(**options))


def odd_blocks(size: int, depth: float) -> list[int]:
    """EfficientNet's strided blocks on a feature map of odd size, which TensorFlow pads on all four sides."""
    odd, block, size = [], 0, size // 2
    for repeats, stride in zip((1, 2, 2, 3, 3, 4, 1), (1, 2, 2, 2, 1, 2, 1)):
        if stride == 2:
            odd += [block] * (size % 2)
            size = math.ceil(size / 2)
        block += math.ceil(depth * repeats)
    return odd


class HuggingFaceModel(ExternalModel[S]):
    head_name: str
    """Attribute name of the head in transformers."""

    def parts(self) -> dict[str, str]:
        body = self.network.base_model_prefix
        inner = {name: f"network.{body}.{name}" for name, _ in self.network.base_model.named_children()}
        return inner | {"head": f"network.{self.head_name}"}

    def blocks(self) -> list[nn.Module]:
        """The layers of all stages, or of a single stack."""
        stack = next(module for module in self.network.modules() if isinstance(module, nn.ModuleList))
        return [block for stage in stack for block in getattr(stage, "layers", [stage])]

    def set_grad_checkpointing(self, enable: bool = True) -> Self:
        """Implemented here, as transformers supports it for few models. BatchNorm then counts each batch twice."""
        for block in self.blocks():
            vars(block).pop("forward", None)
            if enable:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return self


class HuggingFaceImagesModel(HuggingFaceModel[HuggingFaceImages]):
    head_name = "classifier"

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return flatten(self.network.base_model(x).last_hidden_state)

    def forward_head(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """DeiT uses the class token, a convolutional network the mean; EfficientNet has dropout."""
        pooled = features[:, 0] if IMAGES[self.spec.name].family == "DeiT" else features.mean(1)
        dropout = getattr(self.network, "dropout", nn.Identity())
        return self.network.classifier(dropout(pooled))

    def reset_classifier(self, num_classes: int) -> Self:
        """Replace the classifier by a new one."""
        self.spec = self.spec.replace(num_classes=num_classes)
        self.forget_class_names()
        classifier = self.network.classifier
        old = classifier if isinstance(classifier, nn.Linear) else classifier[-1]
        fresh = nn.Linear(old.in_features, num_classes, device=self.device, dtype=self.dtype)
        self.network._init_weights(fresh)
        if classifier is old:
            self.network.classifier = fresh
        else:
            classifier[-1] = fresh
        self.network.num_labels = self.network.config.num_labels = num_classes
        return self


class HuggingFaceTextModel(HuggingFaceModel[HuggingFaceText]):
    head_name = "cls"

    def forward(self, ids: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Logits of every token; mask [B, S] is True at real tokens."""
        return self.forward_head(self.forward_features(ids, mask, segments))

    def forward_features(self, x: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        return self.network.base_model(x, attention_mask=mask, token_type_ids=segments).last_hidden_state

    def forward_head(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.network.cls(features)

    def reset_classifier(self, num_classes: int) -> Self:
        raise UserError(f"transformers' {self.spec.name} has an output per token; use bert_base for another head")

    def dummy_inputs(self, batch_size: int = 1) -> tuple[Tensor, ...]:
        return (torch.randint(self.spec.vocab_size, (batch_size, self.spec.seq_len), device=self.device),)


class HuggingFaceSeriesModel(HuggingFaceModel[HuggingFaceSeries]):
    head_name = "head"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The next values of series [B, L, V], as [B, H, V]; mask [B, L, V] is True at observed values."""
        return self.network(**self.inputs(x, mask)).prediction_outputs

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[(B V), S, C]."""
        return self.network.base_model(**self.inputs(x, mask)).last_hidden_state.flatten(0, 1)

    def inputs(self, x: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        observed = torch.ones_like(x) if mask is None else mask.to(x.dtype)
        name = "past_observed_mask" if self.spec.name == "patchtst" else "observed_mask"
        return {"past_values": x if mask is None else torch.where(mask, x, 0), name: observed}

    def dummy_inputs(self, batch_size: int = 1) -> tuple[Tensor, ...]:
        size = (batch_size, self.spec.seq_len, self.spec.in_chans)
        return (torch.randn(size, device=self.device, dtype=self.dtype),)


def table(parameters: str, macs: str, note: str = "", source: str = "ResMLP, table 1") -> Published:
    return Published(parameters, source, macs, note=note)


SCALED, GMLP = "EfficientNet, table 2", "gMLP, table 2"
PUBLISHED = {
    "resnet50": table("25", "4.1", "25.56 M is truncated, not rounded, to 25", "ResMLP, DINO table"),
    "resnet152": table(
        "60",
        "11.3",
        "the original ResNet has its stride in a 1x1 convolution, transformers in the 3x3 one: 11.5 G",
        GMLP,
    ),
    "regnety_040": table("21", "4.0"),
    "regnety_080": table("39", "8.0"),
    "regnety_160": table("84", "16.0", "16 G is the name of this size; it has 15.9 G"),
    "efficientnet_b0": table("5.3", "0.39", source=SCALED),
    "efficientnet_b1": table("7.8", "0.70", "0.69 G here", SCALED),
    "efficientnet_b2": table("9.2", "1.0", "9.11 M here; 9.18 M with the running averages of BatchNorm", SCALED),
    "efficientnet_b3": table("12", "1.8"),
    "efficientnet_b4": table("19", "4.2", "4.4 G here, at 380 pixels"),
    "efficientnet_b5": table("30", "9.9", "10.3 G here, at 456 pixels"),
    "efficientnet_b6": table("43", "19", source=SCALED),
    "efficientnet_b7": table("66", "37.0", "37.7 G here, at 600 pixels", GMLP),
    "deit_ti16": Published("5.7", "DeiT, table 1"),
    "deit_s16": table("22", "4.6"),
    "deit_b16": table(
        "86", "17.5", "86.57 M and 17.56 G are truncated, not rounded; the distillation token adds 0.08 G"
    ),
    "bert_base": Published("110", "BERT, section 3"),
    "bert_large": Published("340", "BERT, section 3", note="the released sizes give 335.2 M"),
}
NAMES = {"Bit": "BiT", "Bert": "BERT"}
ABOUT = {
    "Bit": "group norm and standardized weights",
    "DeiT": "with the distillation token, which transformers always has",
    "Bert": "Google's released model with its masked-language head",
}


def entry(name: str, spec: ModelSpec, family: str) -> Preset:
    return Preset(spec, NAMES.get(family, family), PUBLISHED.get(name), ABOUT.get(family, ""))


PRESETS = {
    f"hf:{name}": entry(name, HuggingFaceImages(name, img_size=(known.img_size, known.img_size)), known.family)
    for name, known in IMAGES.items()
}
PRESETS |= {f"hf:{name}": entry(name, HuggingFaceText(name), known.family) for name, known in TEXTS.items()}
PRESETS |= {f"hf:{name}": entry(name, HuggingFaceSeries(name), known.family) for name, known in SERIES.items()}
