"""ResNet (He et al., 2016), the convolutional baseline; parameter names are those of timm's `resnet18`.

With the usual stem for CIFAR: a 3 x 3 convolution instead of the 7 x 7 convolution and the pooling after it.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import torch
from torch import Tensor, nn

from allmlp.models.model import Model, ModelSpec
from allmlp.models.preset import Preset
from allmlp.spec import MAX_COUNT, Count, Range, Size


class ResNet(ModelSpec):
    """Stages of basic blocks. The first block of every stage but the first halves height and width.

        block(x) = relu(shortcut(x) + norm(conv3x3(relu(norm(conv3x3(x))))))

    shortcut is norm(conv1x1(x)) where the shape changes, else x; norm is BatchNorm. Convolutions are initialized by
    Kaiming's rule for fan-out, the last norm of a block to zero.
    """

    widths: tuple[Count, ...] = (64, 128, 256, 512)
    depths: tuple[Count, ...] = (2, 2, 2, 2)
    img_size: Size = (32, 32)
    in_chans: Count = 3
    num_classes: Annotated[int, Range(0, MAX_COUNT)] = 10
    """0 for none: the model returns pooled features."""
    stem: Literal["small", "large"] = "small"
    """small: a 3 x 3 convolution. large, as for ImageNet: a 7 x 7 one and max pooling, which divide both sides by 4."""

    @property
    def input_size(self) -> tuple[int, int]:
        return self.img_size

    @property
    def has_head(self) -> bool:
        return self.num_classes > 0

    @property
    def num_features(self) -> int:
        """Channels of the last stage."""
        return self.widths[-1]

    def build(self) -> ResNetModel:
        return ResNetModel(self)


class ResNetModel(Model[ResNet]):
    def __init__(self, spec: ResNet) -> None:
        super().__init__()
        self.spec, width = spec, spec.widths[0]
        small = spec.stem == "small"
        self.conv1 = nn.Conv2d(spec.in_chans, width, *((3, 1, 1) if small else (7, 2, 3)), bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        self.stages: list[str] = []
        for number, (channels, depth) in enumerate(zip(spec.widths, spec.depths, strict=True), 1):
            strides = [1 if number == 1 else 2, *[1] * (depth - 1)]
            blocks = [BasicBlock(channels if k else width, channels, stride) for k, stride in enumerate(strides)]
            self.stages.append(f"layer{number}")
            self.add_module(self.stages[-1], nn.Sequential(*blocks))
            width = channels
        self.fc = self.build_head()
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(layer, BasicBlock):
                nn.init.zeros_(layer.bn2.weight)

    def build_head(self) -> nn.Module:
        return nn.Linear(self.spec.num_features, self.spec.num_classes) if self.spec.has_head else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        for stage in self.stages:
            for block in self.get_submodule(stage).children():
                x = self.run_block(block, x)
        return x.flatten(2).transpose(1, 2)

    def forward_head(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.fc(features.mean(1))

    def dummy_inputs(self, batch_size: int = 1) -> tuple[Tensor, ...]:
        size = (batch_size, self.spec.in_chans, *self.spec.img_size)
        return (torch.randn(size, device=self.device, dtype=self.dtype),)

    def parts(self) -> dict[str, str]:
        parts = {"stem": "conv1", "stem.norm": "bn1", **{stage: stage for stage in self.stages}}
        return parts | {"head": "fc"} if self.spec.has_head else parts

    def reset_classifier(self, num_classes: int) -> Self:
        """Replace the classifier by a new one; 0 classes for none."""
        self.spec = self.spec.replace(num_classes=num_classes)
        self.forget_class_names()
        with self.device:
            self.fc = self.build_head().to(self.dtype)
        return self


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if (inputs, stride) != (channels, 1):
            projection = nn.Conv2d(inputs, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return (shortcut + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))).relu()


PRESETS = {"resnet18_cifar": Preset(ResNet(), "ResNet", about="3x3 stem for 32 px")}
