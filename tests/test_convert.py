"""Published image weights: outputs equal to the source's, lossless round trips, and safe reading of hostile files."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

import allmlp
from allmlp.cli import main
from allmlp.data.preprocessing import ImagePreprocessing, image_preprocessing
from allmlp.layers import LayerNorm, LMHead, PooledHead, TinyAttention, TokenLinear
from allmlp.models.bert import bert
from allmlp.models.external import PretrainedExternal
from allmlp.models.gmlp import gmlp, gmlp_text
from allmlp.models.mixer import mixer
from allmlp.models.resmlp import resmlp
from allmlp.models.timm import Timm, TimmModel
from allmlp.models.vit import vit
from allmlp.spec import override_all
from allmlp.weights import convert as conversion
from allmlp.weights.convert import convert, open_path
from allmlp.weights.tensors import read

FAMILIES = ("mixer", "resmlp", "gmlp", "vit", "cait", "vit_scaled", "vit_gap")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
Tensors = dict[str, Tensor]


def randomize(model: nn.Module) -> nn.Module:
    """Draw all weights, also those initialized to zero or one, so that each affects the output."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (0.3 if weight.squeeze().dim() < 2 else 0.0))
    return model.eval()


def peer(family: str, num_classes: int = 5, img_size: int | tuple[int, int] = 12) -> Any:
    """A small model of timm's own classes, two blocks deep."""
    pytest.importorskip("timm")
    from timm.layers import GatedMlp
    from timm.models import cait, mlp_mixer, vision_transformer

    sizes: dict[str, Any] = {"img_size": img_size, "patch_size": 4, "num_classes": num_classes}
    if family == "cait":
        return randomize(cait.Cait(**sizes, embed_dim=24, depth=2, num_heads=3, depth_token_only=3))
    if family.startswith("vit"):
        options = {"vit": {}, "vit_scaled": {"init_values": 0.1}}.get(
            family, {"class_token": False, "global_pool": "avg", "fc_norm": False}
        )
        return randomize(vision_transformer.VisionTransformer(**sizes, embed_dim=128, depth=2, num_heads=2, **options))
    options = {
        "mixer": {},
        "resmlp": {"block_layer": mlp_mixer.ResBlock, "norm_layer": mlp_mixer.Affine, "mlp_ratio": 4},
        "gmlp": {"block_layer": mlp_mixer.SpatialGatingBlock, "mlp_layer": GatedMlp, "mlp_ratio": 6},
    }[family]
    return randomize(mlp_mixer.MlpMixer(**sizes, embed_dim=16, num_blocks=2, **options))


def same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def assert_outputs(folder: Path, expected: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    ours = allmlp.load(folder, dtype=None)
    assert ours.dtype == dtype
    images = torch.randn(3, 3, *ours.spec.stem.img_size, dtype=dtype)  # type: ignore[attr-defined]
    with torch.no_grad():
        wanted = expected(images)
        torch.testing.assert_close(ours(images), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert wanted.abs().max() > 0.1


# --- timm --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_timm(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = peer(family).to(dtype)
    save_file(model.state_dict(), tmp_path / "file")  # recognized by its keys, not by its name
    folder = convert(str(tmp_path / "file"), str(tmp_path / "ours"))
    assert_outputs(folder, model, dtype)
    back = convert(str(folder), str(tmp_path / "deeper" / "back.safetensors"), to="timm")
    pickled = torch.load(convert(str(folder), str(tmp_path / "back.pth"), to="timm"), weights_only=True)
    assert same(load_file(back), model.state_dict()) and same(pickled, model.state_dict())


def test_cait_as_its_authors_published_it(tmp_path: Path) -> None:
    """Their files hold the state dict of a DistributedDataParallel model."""
    model = peer("cait")
    published = {"model": {f"module.{name}": tensor for name, tensor in model.state_dict().items()}, "epoch": 399}
    from timm.models.cait import checkpoint_filter_fn

    assert same(checkpoint_filter_fn(published), dict(model.state_dict())), "timm reads these files alike"
    torch.save(published, tmp_path / "S24_224.pth")
    folder = convert(str(tmp_path / "S24_224.pth"), str(tmp_path / "ours"))
    assert_outputs(folder, model, torch.float32)
    assert image_preprocessing(folder).crop_pct == 1.0


def test_what_the_file_does_not_state_is_set(tmp_path: Path) -> None:
    """The weights of a compiled model, on images that are not square."""
    model = peer("vit", img_size=(8, 12))
    torch.save({f"module._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "a.pth")
    refused(tmp_path / "a.pth", "6 tokens are not a square grid of patches, and the file does not state another")
    overrides = {"stem.img_size": (8, 12)}
    assert_outputs(convert(str(tmp_path / "a.pth"), str(tmp_path / "ours"), overrides=overrides), model, torch.float32)


def test_heads_that_the_configuration_states(tmp_path: Path) -> None:
    save_file(peer("vit").state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_args": {"num_heads": 4}}))
    assert open_path(tmp_path).spec.block.token.num_heads == 4  # type: ignore[union-attr]


@pytest.mark.parametrize("family", FAMILIES[:5])
def test_timm_without_a_head(family: str, tmp_path: Path) -> None:
    model = peer(family, num_classes=0)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    folder = convert(str(tmp_path / "weights.pth"), str(tmp_path / "ours"))
    assert allmlp.load(folder).spec.head is None  # type: ignore[attr-defined]
    assert_outputs(folder, model, torch.float32)


def test_timm_preprocessing(tmp_path: Path) -> None:
    for family, mean, crop in (
        ("mixer", 0.5, 0.875),
        ("resmlp", 0.485, 0.875),
        ("gmlp", 0.5, 0.875),
        ("vit", 0.5, 0.9),
    ):
        save_file(peer(family).state_dict(), tmp_path / "file")
        inputs = image_preprocessing(convert(str(tmp_path / "file"), str(tmp_path / family)))
        assert (inputs.mean[0], inputs.crop_pct, inputs.class_names) == (mean, crop, ())


@pytest.mark.parametrize("classes", [5, 0])
def test_published_weights(classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = peer("resmlp")
    network.pretrained_cfg = {"crop_pct": 0.95}
    asked = []

    def trained(spec: Timm) -> PretrainedExternal:
        asked.append(spec.num_classes)
        return PretrainedExternal(TimmModel(spec, network), (0.1,) * 3, (0.2,) * 3)

    monkeypatch.setattr(Timm, "pretrained", trained)
    monkeypatch.setattr(Timm, "defaults", SimpleNamespace(input_size=(3, 12, 12), num_classes=classes))
    folder = convert("timm:resmlp_12_224", str(tmp_path / "ours"))
    assert asked == [classes or 1000]
    assert_outputs(folder, network if classes else lambda x: network.forward_features(x).mean(1), torch.float32)
    assert image_preprocessing(folder) == ImagePreprocessing((0.1,) * 3, (0.2,) * 3, crop_pct=0.95)
    network.blocks[0].mlp_channels.act = nn.ReLU()
    with pytest.raises(allmlp.UserError, match="its outputs differ from those of the model inferred from its weights"):
        convert("timm:resmlp_12_224", str(tmp_path / "ours"))


# --- Google ------------------------------------------------------------------------------------------------

WIDTH, TOKENS, TOKEN_HIDDEN, HIDDEN, PATCH = 8, 4, 6, 20, 2


def mixer_arrays(classes: int = 5, pre_logits: bool = False, dtype: str = "float32") -> dict[str, np.ndarray]:
    """A Mixer of two blocks with the keys of Google's files."""
    shapes: dict[str, tuple[int, ...]] = {"stem/kernel": (PATCH, PATCH, 3, WIDTH), "stem/bias": (WIDTH,)}
    norms = ["pre_head_layer_norm"]
    dense = {"head": (WIDTH, classes)} if classes else {}
    dense |= {"pre_logits": (WIDTH, WIDTH)} if pre_logits else {}
    for i in range(2):
        norms += [f"MixerBlock_{i}/LayerNorm_0", f"MixerBlock_{i}/LayerNorm_1"]
        dense |= {
            f"MixerBlock_{i}/token_mixing/Dense_0": (TOKENS, TOKEN_HIDDEN),
            f"MixerBlock_{i}/token_mixing/Dense_1": (TOKEN_HIDDEN, TOKENS),
            f"MixerBlock_{i}/channel_mixing/Dense_0": (WIDTH, HIDDEN),
            f"MixerBlock_{i}/channel_mixing/Dense_1": (HIDDEN, WIDTH),
        }
    for name, shape in dense.items():
        shapes |= {f"{name}/kernel": shape, f"{name}/bias": shape[1:]}
    for name in norms:
        shapes |= {f"{name}/scale": (WIDTH,), f"{name}/bias": (WIDTH,)}
    random = np.random.default_rng(0)
    return {name: random.normal(0.1, 0.4, shape).astype(dtype) for name, shape in shapes.items()}


def flax_mixer(arrays: dict[str, np.ndarray]) -> Callable[[Tensor], Tensor]:
    """Google's equations in numpy, in float64."""
    weights = {name: array.astype("float64") for name, array in arrays.items()}

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * weights[f"{name}/scale"] + weights[f"{name}/bias"]

    def mlp(x: np.ndarray, name: str) -> np.ndarray:
        h = dense(x, f"{name}/Dense_0")
        h = h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        return dense(h, f"{name}/Dense_1")

    def forward(images: Tensor) -> Tensor:
        pixels = images.double().numpy().transpose(0, 2, 3, 1)
        rows, columns = pixels.shape[1] // PATCH, pixels.shape[2] // PATCH
        patches = pixels.reshape(-1, rows, PATCH, columns, PATCH, 3)
        x = np.einsum("nrhcwk,hwkd->nrcd", patches, weights["stem/kernel"]) + weights["stem/bias"]
        x = x.reshape(len(x), rows * columns, -1)
        for i in range(2):
            y = norm(x, f"MixerBlock_{i}/LayerNorm_0").swapaxes(1, 2)
            x = x + mlp(y, f"MixerBlock_{i}/token_mixing").swapaxes(1, 2)
            x = x + mlp(norm(x, f"MixerBlock_{i}/LayerNorm_1"), f"MixerBlock_{i}/channel_mixing")
        x = norm(x, "pre_head_layer_norm").mean(1)
        x = np.tanh(dense(x, "pre_logits")) if "pre_logits/kernel" in weights else x
        return torch.from_numpy(dense(x, "head") if "head/kernel" in weights else x).to(images.dtype)

    return forward


def older(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with the keys used before Flax linen, with dimensions of size one."""
    renamed = {}
    for name, array in arrays.items():
        top, _, rest = name.partition("/")
        if top == "stem":
            name = f"embedding/{rest}"  # noqa: PLW2901
        elif top == "pre_head_layer_norm":
            name = f"Mixer/encoder_norm/{rest}"  # noqa: PLW2901
        elif top.startswith("MixerBlock_"):
            name = f"Mixer/encoderblock_{top[-1]}/{rest}"  # noqa: PLW2901
            for i in range(2):
                for kind in ("kernel", "bias"):
                    name = name.replace(f"_mixing/Dense_{i}/{kind}", f"_mixing_phase_0/{kind}{i + 1}")  # noqa: PLW2901
        renamed[name] = array[None] if "_phase_0" in name else array
    return renamed


@pytest.mark.parametrize(("classes", "pre_logits"), [(5, False), (0, False), (7, True)], ids=["head", "none", "two"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("version", ["current", "older"])
def test_google(classes: int, pre_logits: bool, dtype: str, version: str, tmp_path: Path) -> None:
    arrays = mixer_arrays(classes, pre_logits, dtype)
    np.savez(tmp_path / "file.npz", **(arrays if version == "current" else older(arrays)))
    folder = convert(str(tmp_path / "file.npz"), str(tmp_path / "ours"))
    assert_outputs(folder, flax_mixer(arrays), getattr(torch, dtype))
    spec: Any = allmlp.load(folder).spec
    assert isinstance(spec.head, PooledHead) == pre_logits and (spec.head is None) == (classes == 0)
    assert image_preprocessing(folder).mean == (0.5, 0.5, 0.5) == image_preprocessing(folder).std
    back = np.load(convert(str(folder), str(tmp_path / "back.npz"), to="google"), allow_pickle=False)
    assert set(back.files) == arrays.keys()
    assert all(back[name].dtype == arrays[name].dtype and (back[name] == arrays[name]).all() for name in arrays)


def test_google_dtypes_and_memory_layouts(tmp_path: Path) -> None:
    """Compressed, float16, big-endian and Fortran-order arrays can be read."""
    arrays = mixer_arrays()
    np.savez_compressed(tmp_path / "half.npz", **{name: array.astype("float16") for name, array in arrays.items()})
    assert allmlp.load(convert(str(tmp_path / "half.npz"), str(tmp_path / "half")), dtype=None).dtype == torch.float16
    np.savez(tmp_path / "big.npz", **{n: np.asfortranarray(array.astype(">f4")) for n, array in arrays.items()})
    assert_outputs(convert(str(tmp_path / "big.npz"), str(tmp_path / "big")), flax_mixer(arrays), torch.float32)
    assert allmlp.load(tmp_path / "half").state_dict().keys() == allmlp.load(tmp_path / "big").state_dict().keys()


def test_google_to_timm(tmp_path: Path) -> None:
    """The same weights for timm, which uses the exact GELU."""
    np.savez(tmp_path / "file.npz", **mixer_arrays())
    path = convert(str(tmp_path / "file.npz"), str(tmp_path / "file.safetensors"), to="timm")
    back = convert(str(path), str(tmp_path / "back.npz"), to="google")
    assert all((np.load(back)[name] == array).all() for name, array in mixer_arrays().items())


# --- FAIR --------------------------------------------------------------------------------------------------


def fair_names(tensors: Tensors) -> Tensors:
    """timm's ResMLP with FAIR's keys."""
    names = {"stem.": "patch_embed.", ".linear_tokens.": ".attn.", ".mlp_channels.": ".mlp.", ".ls": ".gamma_"}
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)  # noqa: PLW2901
        renamed[name] = tensor.flatten().clone() if name.endswith(("alpha", "beta")) else tensor
    return renamed


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"model": state, "epoch": 3}], ids=["", "model"])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_fair(wrap: Callable[[Tensors], Any], zipped: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = peer("resmlp").to(dtype)
    state = fair_names(model.state_dict())
    torch.save(wrap(state), tmp_path / "weights.pth", _use_new_zipfile_serialization=zipped)
    folder = convert(str(tmp_path / "weights.pth"), str(tmp_path / "ours"))
    assert_outputs(folder, model, dtype)
    assert image_preprocessing(folder).crop_pct == 0.9 and image_preprocessing(folder).mean == (0.485, 0.456, 0.406)
    back = convert(str(folder), str(tmp_path / "back.pth"), to="fair")
    assert same(torch.load(back, weights_only=True), state)


# --- models that a format cannot represent -----------------------------------------------------------------

SMALL: dict[str, Any] = {"patch_size": 4, "img_size": 8, "num_classes": 3}


@pytest.mark.parametrize(
    ("spec", "to", "message"),
    [
        (resmlp(1, 8, 0.1, **SMALL), "google", "Google's format has no ResMLP; it supports Mixer"),
        (mixer(1, 8, **SMALL), "fair", "FAIR's format has no Mixer; it supports ResMLP"),
        (resmlp(1, 8, 0.1, norm=LayerNorm(), **SMALL), "fair", "block.norm is LayerNorm"),
        (
            gmlp(1, 8, attention=TinyAttention(4), **SMALL),
            "timm",
            "no weight for blocks.0.channel.mix.inner.attention.qkv.weight",
        ),
        (vit(1, 12, 3, **SMALL), "timm", "the file does not state how many heads its ViT of width 12 has"),
        (vit(1, 128, 4, **SMALL), "timm", "block.token.num_heads is 4, but the format implies 2"),
        (gmlp(1, 8, **SMALL).configure(img_size=(8, 12)), "timm", "6 tokens are not a square grid of patches"),
        (gmlp(1, 8, **SMALL).replace(norm=LayerNorm(1e-3)), "timm", "norm.eps is 0.001, but the format implies 1e-06"),
        (gmlp_text(1, 8, 16, vocab_size=9), "timm", "timm's format has no gMLP for text; it supports Mixer"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 9 else "",
)
def test_unsupported_models(spec: Any, to: str, message: str, tmp_path: Path) -> None:
    allmlp.save(spec.build(), tmp_path / "ours")
    refused(tmp_path / "ours", message, to=to)


def test_wrong_arguments(tmp_path: Path) -> None:
    allmlp.save(mixer(1, 8, **SMALL).build(), tmp_path / "ours")
    refused(tmp_path / "ours", "is already a model folder; choose a format with to=")
    refused(tmp_path / "ours", "unknown format 'tim'; did you mean 'timm'", to="tim")
    with pytest.raises(allmlp.UserError, match="ours would overwrite itself; name another folder"):
        convert(str(tmp_path / "ours"), str(tmp_path / "ours"), to="google")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    with pytest.raises(allmlp.UserError, match="run holds a run, whose model would be overwritten"):
        convert(str(tmp_path / "ours"), str(tmp_path / "run"), to="hf")
    refused(tmp_path / "nowhere", "nowhere was not found; name a weights file")
    (tmp_path / "file").write_text("x")
    with pytest.raises(allmlp.UserError, match="cannot write"):
        convert(str(tmp_path / "ours"), str(tmp_path / "file" / "below.npz"), to="google")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--set gives what a file does not state; the path is printed, dropped weights are listed on stderr."""
    model = allmlp.create(bert(1, 128, 4, seq_len=4, vocab_size=9, head=LMHead(bias=True, transform=True)))
    allmlp.save(model, tmp_path / "ours")
    steps = [["ours", "theirs", "--to", "hf"], ["theirs/model.safetensors", "b"], ["alone", "c"]]
    steps += [["alone", "d", "--set", "block.token.num_heads=4"]]
    for step in steps:
        if step[0] == "alone":
            tensors = load_file(tmp_path / "theirs" / "model.safetensors")
            save_file(tensors | {"bert.pooler.dense.bias": torch.zeros(128)}, tmp_path / "alone")
        source, target, *rest = step
        with pytest.raises(SystemExit) as caught:
            main(["convert", str(tmp_path / source), str(tmp_path / target), *rest])
        output = capsys.readouterr()
        assert not caught.value.code and output.out == f"{tmp_path / target}\n"
        assert ("dropped, since the model does not use them: pooler.dense.bias" in output.err) == (source == "alone")
    heads = [allmlp.load(tmp_path / name).spec.block.token.num_heads for name in "bcd"]  # type: ignore[attr-defined]
    assert heads == [4, 2, 4]
    heads_of = {"block.token.num_heads": 8}
    convert(str(tmp_path / "ours"), str(tmp_path / "eight"), to="hf", overrides=heads_of)
    assert json.loads((tmp_path / "eight" / "config.json").read_text())["num_attention_heads"] == 8
    refused(tmp_path / "ours", "unknown Encoder field 'blok'", to="hf", overrides={"blok": 1})
    refused(tmp_path / "alone", "unknown Encoder field 'blok'", overrides={"blok": 1})
    refused(tmp_path / "alone", "has no weight for blocks.0.token.mix.weight", overrides={"block.token": TokenLinear()})


@pytest.mark.parametrize(
    ("act", "to", "message"),
    [
        ("gelu_tanh", "timm", "warning: timm's format cannot say that the model computes GELU by tanh: a reader that"),
        ("gelu", "timm", ""),
        ("gelu", "google", "warning: Google's format cannot say that the model computes the exact GELU: a reader that"),
        ("gelu_tanh", "google", ""),
    ],
)
def test_an_activation_that_a_format_cannot_say(
    act: str, to: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = mixer(1, 8, **SMALL)
    spec = override_all(spec, {"block.token.act": act, "block.channel.act": act})
    allmlp.save(spec.build(), tmp_path / "ours")
    with pytest.raises(SystemExit) as caught:
        main(["convert", str(tmp_path / "ours"), str(tmp_path / "out"), "--to", to])
    error = capsys.readouterr().err
    assert not caught.value.code and error.startswith(message) and error.count("\n") == bool(message)


def test_heads_of_any_width_are_stated(tmp_path: Path) -> None:
    """timm's files do not hold them; without a published width they are asked for."""
    pytest.importorskip("timm")
    from timm.models import vision_transformer

    network = vision_transformer.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=48, depth=1, num_heads=3, num_classes=3
    )
    randomize(network).eval()
    save_file(network.state_dict(), tmp_path / "theirs.safetensors")
    refused(tmp_path / "theirs.safetensors", "how many heads its ViT of width 48 has: set block.token.num_heads")
    file, image = str(tmp_path / "theirs.safetensors"), torch.randn(2, 3, 8, 8)
    with pytest.raises(SystemExit) as caught:
        main(["convert", file, str(tmp_path / "ours"), "--set", "block.token.num_heads=3"])
    assert not caught.value.code
    for model in (
        allmlp.load(tmp_path / "ours"),
        allmlp.from_pretrained(file, overrides={"block.token.num_heads": 3}),
    ):
        assert model.spec.block.token.num_heads == 3  # type: ignore[attr-defined]
        torch.testing.assert_close(model(image), network(image), atol=1e-5, rtol=1e-5)
    refused(tmp_path / "theirs.safetensors", "5", overrides={"block.token.num_heads": 5})


# --- damaged and hostile files -----------------------------------------------------------------------------


def refused(source: Path, message: str, to: str | None = None, overrides: Any = None) -> None:
    """Converting raises a UserError of one line and writes nothing."""
    target = source.parent / "target"
    with pytest.raises(allmlp.UserError) as caught:
        convert(str(source), str(target), to=to, overrides=overrides)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not target.exists()


def change(tensors: Tensors, **changes: Any) -> Tensors:
    """Weights with some of them replaced, or removed (None)."""
    return {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}


def test_wrong_weights_are_named(tmp_path: Path) -> None:
    file, state = tmp_path / "file.safetensors", peer("mixer").state_dict()
    invalid = {"blocks.1.norm1.bias": None, "norm.bias": torch.zeros(3), "adapter.weight": torch.zeros(2)}
    save_file(change(state, **invalid), file)
    for words in ("1 missing (blocks.1.norm1.bias)", "1 unexpected (adapter.weight)", "of another shape (norm.bias)"):
        refused(file, words)
    names = [name for name in state if ".norm1." in name]
    save_file(change(state, **dict.fromkeys(names), **{f"block.{i}.x": torch.zeros(1) for i in (0, 2, 3)}), file)
    refused(file, "4 missing (blocks.{0..1}.norm1.bias, blocks.{0..1}.norm1.weight); 3 unexpected (block.{0,2..3}.x)")
    for name, tensor, words in (
        ("blocks.0.mlp_tokens.fc1.weight", None, "but lacks blocks.0.mlp_tokens.fc1.weight"),
        ("stem.proj.weight", torch.zeros(3), "stem.proj.weight has the shape [3], but 4 dimensions are expected"),
        ("head.weight", torch.zeros(0), "ClassifierHead.num_classes must be"),
        ("norm.bias", torch.full((16,), torch.nan), "norm.bias contains NaN or infinite values"),
        ("norm.bias", torch.full((16,), -torch.inf), "norm.bias contains NaN or infinite values"),
        ("norm.bias", torch.zeros(16, dtype=torch.int8), "norm.bias holds int8 numbers, not floating-point weights"),
    ):
        save_file(change(state, **{name: tensor}), file)
        refused(file, words)
    for name in ("two\nlines", "\x1b[2J", "x" * 1000):
        save_file(state | {name: torch.zeros(1)}, file)
        refused(file, "is not a valid weight name")
    save_file({"conv1.weight": torch.zeros(2)}, file)
    refused(file, "the format is not recognized; supported are Google's Mixer")


def test_dtype_is_kept(tmp_path: Path) -> None:
    state = peer("gmlp").state_dict()
    for dtype in (torch.float16, torch.bfloat16):
        save_file({name: tensor.to(dtype) for name, tensor in state.items()}, tmp_path / "file")
        folder = convert(str(tmp_path / "file"), str(tmp_path / "ours"))
        assert allmlp.load(folder, dtype=None).dtype == dtype and allmlp.load(folder).dtype == torch.float32
    save_file(change(state, **{"norm.bias": state["norm.bias"].double()}), tmp_path / "file")
    folder = convert(str(tmp_path / "file"), str(tmp_path / "ours"))
    assert allmlp.load(folder, dtype=None).dtype == torch.float64


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x02", b"model: mixer\nwidth: 8\n", b"PK\x03\x04" + bytes(99)])
def test_files_that_are_something_else(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "weights.npz").write_bytes(content)
    refused(tmp_path / "weights.npz", "weights.npz is ")


class Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    harm = Harm(tmp_path / "harm")
    torch.save({"model": harm}, tmp_path / "zip.pth")
    torch.save({"model": harm}, tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(harm))
    np.savez(tmp_path / "object.npz", **{"stem/kernel": np.array([harm], dtype=object)})
    for name in ("zip.pth", "legacy.pth", "plain.pth"):
        refused(tmp_path / name, "loading it could run code, so it was rejected")
    refused(tmp_path / "object.npz", "stem/kernel has dtype object; only float16")
    assert not (tmp_path / "harm").exists()


def npz(file: Path, header: bytes, zeros: int, version: bytes = b"\x01\x00") -> None:
    """One array with a handwritten header, followed by compressed zeros."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("stem/kernel.npy", "w") as stream:
        length = len(header).to_bytes(2 if version == b"\x01\x00" else 4, "little")
        stream.write(b"\x93NUMPY" + version + length + header)
        for _ in range(zeros // 2**20):
            stream.write(bytes(2**20))


def test_archives_that_claim_too_much(tmp_path: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d,)}\n"
    npz(tmp_path / "bomb.npz", header % 2**24, zeros=2**26)
    refused(tmp_path / "bomb.npz", "declares far more data than a file of its size can hold")
    npz(tmp_path / "claim.npz", header % 2**29, zeros=0)
    refused(tmp_path / "claim.npz", "stem/kernel declares the shape [536870912], but has 0 bytes")
    npz(tmp_path / "negative.npz", b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}\n", zeros=0)
    refused(tmp_path / "negative.npz", "stem/kernel declares the shape [-1]")
    npz(tmp_path / "header.npz", header % 1, zeros=2**20, version=b"\x02\x00")
    refused(tmp_path / "header.npz", "stem/kernel is not an array in version 1.0 of the .npy format")
    with zipfile.ZipFile(tmp_path / "method.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("stem/kernel.npy", bytes(99))
    refused(tmp_path / "method.npz", "has a compression that numpy does not use")
    for dtype in ("int32", "complex64", "bool", "S4"):
        np.savez(tmp_path / "kind.npz", **{"stem/kernel": np.zeros(2, dtype)})
        refused(tmp_path / "kind.npz", "only float16, float32 and float64 are supported")


def test_pickles_that_claim_too_much(tmp_path: Path) -> None:
    torch.save({"stem.proj.weight": torch.zeros(1).expand(2**20, 2**20)}, tmp_path / "view.pth")
    refused(tmp_path / "view.pth", "its tensors declare more elements than the file holds")
    torch.save({"stem.proj.weight": torch.eye(2).to_sparse()}, tmp_path / "sparse.pth")
    refused(tmp_path / "sparse.pth", "contains more than plain tensors (torch._utils._rebuild_sparse_tensor)")
    torch.save({"epoch": 3}, tmp_path / "number.pth")
    refused(tmp_path / "number.pth", "'epoch' is not a tensor")
    torch.save({"two\nlines": 3}, tmp_path / "name.pth")
    refused(tmp_path / "name.pth", "is not a tensor")
    torch.save([1, 2], tmp_path / "list.pth")
    refused(tmp_path / "list.pth", "contains no state dict")
    torch.save({"a": torch.zeros(2**16)}, tmp_path / "whole.pth")
    with zipfile.ZipFile(tmp_path / "whole.pth") as whole, zipfile.ZipFile(tmp_path / "small.pth", "w") as small:
        for name in whole.namelist():
            small.writestr(name, whole.read(name), zipfile.ZIP_DEFLATED)
    refused(tmp_path / "small.pth", "is compressed, which torch.save never does")


def good_files() -> dict[str, tuple[bytes, Tensors]]:
    """Valid files by type, with their weights."""
    torch.manual_seed(0)
    arrays = {name: torch.from_numpy(array) for name, array in mixer_arrays().items()}
    stream, pickled, legacy = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.savez(stream, **{name: array.numpy() for name, array in arrays.items()})
    model = randomize(resmlp(1, 8, 0.1, **SMALL).build())
    state = conversion.to_format(conversion.FORMATS["fair"], conversion.ConvertedModel(model.spec, model.state_dict()))  # type: ignore[arg-type]
    torch.save(state, pickled)
    torch.save(state, legacy, _use_new_zipfile_serialization=False)
    return {
        "npz": (stream.getvalue(), arrays),
        "pth": (pickled.getvalue(), state),
        "legacy": (legacy.getvalue(), state),
        "safetensors": (save(state), state),
    }


GOOD = good_files()
CHECKSUMS = ("npz", "pth")
"""The kinds of file in which every changed number is seen."""


@pytest.mark.parametrize("kind", GOOD)
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damage_is_seen(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    """Flipped or missing bytes give the same weights or a one-line error; without a checksum, finite weights."""
    content, weights = bytearray(GOOD[kind][0]), GOOD[kind][1]
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    file = tmp_path / "weights"
    file.write_bytes(content)
    try:
        found = read(file)
        state = conversion.import_state(file, dict(found), {}).state
    except allmlp.UserError as reason:
        assert "\n" not in str(reason)
    else:
        assert same(found, weights) or kind not in CHECKSUMS
        assert all(tensor.isfinite().all() for tensor in state.values())
