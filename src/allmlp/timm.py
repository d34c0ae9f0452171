"""This library's image models inside timm: importing this module registers them as `allmlp_NAME`.

>>> import timm, allmlp.timm
>>> model = timm.create_model("allmlp_gmlp_s16", num_classes=10, img_size=160)
>>> maps = timm.create_model("allmlp_resmlp_s12", features_only=True, out_indices=(3, 7, 11), dynamic_img_size=True)

Names are those of `allmlp list`; a tag as in `allmlp_mixer_b16.google_in1k` names published weights, which
`pretrained=True` loads. The models are those of `allmlp.create`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from allmlp.errors import UserError
from allmlp.layers.stem import PatchEmbed
from allmlp.models.encoder import Encoder
from allmlp.models.grid import make_dynamic
from allmlp.models.model import Model
from allmlp.models.preset import presets
from allmlp.models.timm import package
from allmlp.models.zoo import create
from allmlp.weights.pretrained import from_pretrained
from allmlp.weights.published import published_weights

PREFIX = "allmlp_"


def create_timm(
    preset: str,
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: Any = None,
    cache_dir: str | None = None,
    *,
    num_classes: int | None = None,
    in_chans: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    drop_path_rate: float = 0.0,
    drop_rate: float = 0.0,
    global_pool: str | None = None,
    dynamic_img_size: bool = False,
    device: Any = None,
    dtype: Any = None,
    features_only: bool = False,
    feature_cls: str = "getter",
    **features: Any,
) -> nn.Module:
    """The model `preset` with timm's options. `pretrained_cfg` is the tag after its name, if there is one."""
    if feature_cls != "getter":
        raise UserError(f"feature_cls {feature_cls!r} is not for these models: features_only takes 'getter'")
    if pretrained_cfg_overlay or not isinstance(pretrained_cfg, (str, type(None))):
        raise UserError("models of allmlp take published weights by their tag, not a pretrained_cfg")
    if features and not features_only:
        raise UserError(f"unknown option {next(iter(features))!r} of the timm model {PREFIX}{preset}")
    model: Any = (
        load_tag(preset, pretrained_cfg, img_size, cache_dir) if pretrained else create(preset, img_size=img_size)
    )
    spec = model.spec
    if in_chans not in (None, spec.stem.in_chans):
        if pretrained:
            raise UserError(f"the published weights have {spec.stem.in_chans} channels, not {in_chans}")
        model = create(spec.configure(in_chans=in_chans))
    model.check_global_pool(global_pool, spec.head if num_classes else None)
    if global_pool == "" or num_classes not in (None, model.num_classes):
        model.reset_classifier(num_classes or 0, global_pool)
    model = set_rates(model, drop_path_rate, drop_rate).train()
    if dynamic_img_size:
        model = make_dynamic(model)
    model = model.to(device, dtype)
    if not features_only:
        return model
    getter = package().models._features.FeatureGetterNet
    indices = features.pop("out_indices", min(4, len(model.feature_blocks)))
    network = getter(model, out_indices=indices, **features)
    network.pretrained_cfg = network.default_cfg = model.pretrained_cfg | {"num_classes": 0, "classifier": None}
    return network


def load_tag(preset: str, tag: str | None, img_size: Any, cache_dir: str | None) -> Model:
    """Published weights of a model: those with this tag, or the most accurate ones."""
    weights = {name: found for name, found in published_weights().items() if name.partition(".")[0] == preset}
    if not weights:
        raise UserError(f"no weights of {preset} are published: use pretrained=False")
    if tag is not None and f"{preset}.{tag}" not in weights:
        raise UserError(f"no weights {preset}.{tag} are published, only {', '.join(weights)}")
    best = max(weights, key=lambda name: weights[name].top1 or 0.0)
    return from_pretrained(f"{preset}.{tag}" if tag else best, img_size=img_size, cache_dir=cache_dir)


def set_rates(model: Any, drop_path: float, dropout: float) -> Any:
    """Set stochastic depth, and dropout before the classifier."""
    spec = model.spec
    changed = spec.configure(drop_path=drop_path) if drop_path else spec
    if dropout and changed.head is not None:
        changed = changed.replace(head=changed.head.replace(dropout=dropout))
    if changed == spec:
        return model
    rebuilt = create(changed)
    rebuilt.load_state_dict(model.state_dict())
    rebuilt.preprocessing = model.preprocessing
    return rebuilt


def entry_point(preset: str) -> Callable[..., nn.Module]:
    def build(pretrained: bool = False, **options: Any) -> nn.Module:
        return create_timm(preset, pretrained, **options)

    build.__name__ = build.__qualname__ = f"{PREFIX}{preset}"
    build.__module__ = __name__
    return build


def register() -> list[str]:
    """Add every image model to timm's registry; returns their names."""
    add = package().models.register_model
    names = []
    for name, preset in presets().items():
        if isinstance(preset.spec, Encoder) and isinstance(preset.spec.stem, PatchEmbed):
            function = entry_point(name)
            setattr(sys.modules[__name__], function.__name__, function)
            add(function)
            names.append(function.__name__)
    return names


__all__: list[str] = []  # extended by timm with the names it registers
NAMES = register()
