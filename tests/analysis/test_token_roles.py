"""`token_roles`: the layers' declarations against the shapes of their parameters, and mixers that nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from allmlp.analysis import output_folder
from allmlp.analysis.analysis import analyze
from allmlp.analysis.sparsity import sparsity
from allmlp.analysis.target import AnalysisTarget
from allmlp.analysis.token_filters import token_weights, undescribed_mixers
from allmlp.layers.context import Context
from allmlp.layers.token_roles import TokenRole, token_parameters
from allmlp.models.encoder import EncoderModel
from allmlp.models.model import Model
from allmlp.weights.pruning import prune
from tiny import IMAGES, TEXTS, TINY_SPECS, tiny_model

BY_TOKENS = {"square", "square parameters", "into hidden", "out of hidden", "in", "out"}


@pytest.mark.parametrize("name", [*IMAGES, *TEXTS])
def test_every_parameter_whose_shape_depends_on_the_tokens_has_a_role(name: str) -> None:
    spec = TINY_SPECS[name]
    larger = spec.configure(**({"img_size": (6, 16)} if name in IMAGES else {"seq_len": 17}))
    with torch.device("meta"):
        model, other = spec.build(), larger.build()
    roles = {found.full_name: found.role for found in token_parameters(model)}
    shapes = {key: weight.shape for key, weight in other.named_parameters()}
    assert roles.keys() <= shapes.keys()
    depends = {key for key, weight in model.named_parameters() if weight.shape != shapes[key]}
    missing = [key for key in depends if roles.get(key) not in {*BY_TOKENS, "hidden"}]
    assert not missing, f"{missing} have no role: declare them in the token_roles of their layer"
    assert {key for key, role in roles.items() if role in BY_TOKENS} <= depends


@pytest.mark.parametrize("name", TINY_SPECS)
def test_every_mixer_is_described(name: str) -> None:
    assert undescribed_mixers(tiny_model(name)) == []


class Shift(nn.Module):
    """Every token reads the one before it."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return x.roll(1, dims=1)


class LearnedShift(Shift):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.eye(tokens).roll(n, 0) + 0.01) for n in (1, 2))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.first @ x + self.second @ x


class DescribedShift(LearnedShift):
    token_roles: dict[str, TokenRole] = {"first": "square", "second": "square"}  # noqa: RUF012


def with_mixer(mixer: nn.Module, blocks: int = 2) -> Model:
    model = tiny_model("resmlp_s12", torch.float32).requires_grad_(False)
    assert isinstance(model, EncoderModel)
    for block in model.blocks[:blocks]:
        block.token.mix = mixer
    return model


@pytest.fixture(autouse=True)
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering the figures takes most of the time; test_figures.py does it."""
    monkeypatch.setattr(output_folder, "save", lambda figure, file, kind: file.write_text(kind))


def sections(model: Model, out: Path) -> dict[str, str]:
    return {section.name: section.text for section in analyze(AnalysisTarget("new", model, True), out).sections}


@pytest.mark.parametrize("mixer", [Shift(), LearnedShift(12)])
def test_an_undescribed_mixer_is_named(mixer: nn.Module, tmp_path: Path) -> None:
    name = type(mixer).__name__
    assert sections(with_mixer(mixer), tmp_path)["token mixing"] == (
        f"not known for {name}, which declares no token_roles"
    )
    mixed = sections(with_mixer(mixer, blocks=1), tmp_path)["filters"]
    assert mixed == f"token mixing by 1 x matrix; not known for {name}, which declares no token_roles"


def test_a_described_mixer_is_analyzed_and_pruned() -> None:
    mixer = DescribedShift(12)
    model = with_mixer(mixer)
    first, second = list(token_weights(model))[:2]
    assert (first.name, second.name) == ("blocks.0.token.mix.first", "blocks.0.token.mix.second")
    assert torch.equal(first.weight, mixer.first) and second.kind == "matrix" and second.grid == (3, 4)
    kinds = {one.name: (one.kind, one.fraction) for one in sparsity(model)}
    assert kinds["blocks.0.token.mix.first"] == ("token", pytest.approx(11 / 12))
    prune(model, 11 / 12)
    assert torch.equal(mixer.first != 0, torch.eye(12).roll(1, 0) != 0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit_ti16", "attention stores no weights over tokens"),
        ("resmlp_s12_none", "no parameter of the model acts on tokens"),
    ],
)
def test_why_there_are_no_weights(name: str, reason: str, tmp_path: Path) -> None:
    model = tiny_model(name, torch.float32).requires_grad_(False)
    assert sections(model, tmp_path)["token mixing"] == reason
