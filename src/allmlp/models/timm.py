"""Any model of timm as `timm:NAME`, with new weights; `allmlp.from_pretrained` loads the published ones."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor

from allmlp.errors import UserError, lookup, one_line, require
from allmlp.models.external import External, ExternalModel, PretrainedExternal, flatten
from allmlp.models.preset import Preset
from allmlp.models.torchvision import define_missing_operators
from allmlp.spec import Rate

PREFIX = "timm:"


def package() -> ModuleType:
    define_missing_operators()
    return require("timm", "timm")


def names() -> list[str]:
    return [PREFIX + name for name in package().list_models()]


def preset(name: str) -> Preset:
    """The timm model after the prefix, at its default image size."""
    spec = Timm(name.removeprefix(PREFIX))
    return Preset(spec.replace(img_size=spec.default_size), "timm")


class Timm(External):
    """An image classifier of timm. The name may include the tag of a set of weights, which sets the image size."""

    drop_path: Rate = 0.0

    @property
    def defaults(self) -> Any:
        """timm's pretrained configuration: the image size, and whether it is fixed."""
        timm = package()
        lookup(self.name.partition(".")[0], dict.fromkeys(timm.list_models()), "model of timm")
        try:
            return timm.get_pretrained_cfg(self.name)
        except RuntimeError as reason:
            raise UserError(f"timm has no {self.name}: {one_line(reason)}") from None

    @property
    def default_size(self) -> tuple[int, int]:
        config = self.defaults
        return tuple(config.input_size[-2:]) if config else (224, 224)

    def build(self) -> TimmModel:
        return TimmModel(self, self.network())

    def pretrained(self) -> PretrainedExternal:
        config = self.defaults
        # With another number of classes timm would not load the published head.
        spec = self if config is None else self.replace(num_classes=config.num_classes or self.num_classes)
        network = spec.network(pretrained=True)
        loaded = network.pretrained_cfg
        return PretrainedExternal(
            TimmModel(spec, network), tuple(loaded["mean"]), tuple(loaded["std"]), loaded["crop_pct"]
        )

    def network(self, pretrained: bool = False) -> Any:
        options: dict[str, Any] = {"num_classes": self.num_classes, "in_chans": self.in_chans, "pretrained": pretrained}
        config = self.defaults
        if config is not None and config.fixed_input_size:
            height, width = self.input_size
            options["img_size"] = height if height == width else self.input_size  # some accept only one number
        if self.drop_path:
            options["drop_path_rate"] = self.drop_path
        try:
            return construct(self.name, options)
        except Exception as reason:
            what = "these options and its weights" if pretrained else "these options"
            offline = "; without a network, name a file of its weights instead" if pretrained else ""
            raise UserError(f"timm cannot build {self.name} with {what}: {one_line(reason)}{offline}") from reason


def construct(name: str, options: dict[str, Any]) -> Any:
    """Create a timm model; where the meta device fails because a constructor reads tensor values, by way of the CPU."""
    create = package().create_model
    try:
        return create(name, **options)
    except RuntimeError:
        if torch.get_default_device().type != "meta":
            raise
        with torch.device("cpu"):
            return create(name, **options).to("meta")


@cache
def layout(spec: Timm) -> tuple[int, ...]:
    """The shape of the features, b c h w, b h w c or b s c, at the image size of the spec."""
    with torch.device("meta"), torch.no_grad():
        images = torch.empty(1, spec.in_chans, *spec.input_size)
        return tuple(spec.network().eval().forward_features(images).shape)


class TimmModel(ExternalModel[Timm]):
    def parts(self) -> dict[str, str]:
        path = self.network.pretrained_cfg.get("classifier") or ""
        classifier = (path if isinstance(path, str) else path[0]).partition(".")[0]
        labels = {"head": "body", classifier: "head"}  # SelecSLS has a `head` before its classifier
        return {labels.get(name, name): f"network.{name}" for name, _ in self.network.named_children()}

    @property
    def channels_last(self) -> bool:
        return getattr(self.network, "output_fmt", "NCHW") == "NHWC"

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        features = self.network.forward_features(x)
        if not isinstance(features, Tensor):
            raise UserError(f"the features of timm's {self.spec.name} are not a single feature map")
        return flatten(features, self.channels_last)

    def forward_head(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Reshape the tokens to the feature map that timm pools; at other image sizes a single column is equivalent."""
        shape = layout(self.spec)
        if len(shape) == 4:
            grid = shape[1:3] if self.channels_last else shape[2:4]
            if grid[0] * grid[1] != features.shape[1]:
                grid = (features.shape[1], 1)
            features = features.unflatten(1, grid)
            features = features if self.channels_last else features.permute(0, 3, 1, 2)
        return self.network.forward_head(features)

    def reset_classifier(self, num_classes: int) -> Self:
        """Replace the classifier by a new one."""
        self.spec = self.spec.replace(num_classes=num_classes)
        self.forget_class_names()
        device, dtype = self.device, self.dtype
        with device:
            self.network.reset_classifier(num_classes)
        self.network.to(dtype)
        return self

    def set_grad_checkpointing(self, enable: bool = True) -> Self:
        try:
            self.network.set_grad_checkpointing(enable)
        except (AttributeError, AssertionError) as reason:
            raise UserError(f"timm's {self.spec.name} does not support gradient checkpointing") from reason
        return self
