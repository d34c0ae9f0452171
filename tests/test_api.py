"""The public API: training, evaluation and prediction in one call each, typed signatures, docstrings with examples."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import allmlp
from allmlp.recipes import runs
from allmlp.spec import override_all

QUICK = {"budget.epochs": None, "budget.steps": 3, "compile": False}


@pytest.mark.slow
def test_train_evaluate_predict(tmp_path: Path) -> None:
    pil = pytest.importorskip("PIL.Image")
    results = allmlp.train("digits_mixer", tmp_path / "a", device="cpu", overrides=QUICK)
    evaluated = allmlp.evaluate(tmp_path / "a", device="cpu")
    assert {name: evaluated[name] for name in results} == pytest.approx(results)
    assert allmlp.evaluate(str(tmp_path / "a"), device="cpu", knn=3).keys() == {"knn_accuracy", "majority"}
    (run,) = runs("digits_mixer").values()
    assert allmlp.train(override_all(run, QUICK), tmp_path / "b", device="cpu") == pytest.approx(results)
    files = [tmp_path / "gray.png", tmp_path / "white.png"]
    for file, value in zip(files, (100, 255)):
        pil.new("L", (8, 8), value).save(file)
    both = allmlp.predict(tmp_path / "a", files, top_k=3)
    (alone,) = allmlp.predict(str(tmp_path / "a"), str(files[0]), top_k=3)
    assert [len(row) for row in both] == [3, 3] and [one.label for one in alone] == [one.label for one in both[0]]
    assert [one.probability for one in alone] == pytest.approx([one.probability for one in both[0]])
    assert all(row[0].probability >= row[1].probability for row in both)


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(allmlp.UserError, match=r"'digits_mixr' is neither a recipe .* did you mean 'digits_mixer'"):
        allmlp.train("digits_mixr", tmp_path)
    with pytest.raises(
        allmlp.UserError, match=r"cifar10_ablations is a table of 10 runs; .* 'cifar10_ablations/linear'"
    ):
        allmlp.train("cifar10_ablations", tmp_path)
    with pytest.raises(TypeError, match=r"train\(\) has no argument 'num_epochs'; did you mean 'epochs'"):
        allmlp.train("digits_mixer", tmp_path, num_epochs=3)  # type: ignore[call-arg]
    with pytest.raises(allmlp.UserError, match="a Run needs a folder"):
        allmlp.train(runs("digits_mixer")["digits_mixer"])
    with pytest.raises(allmlp.UserError, match=r"did you mean 'optim\.lr'"):
        allmlp.train("digits_mixer", tmp_path, overrides={"learning_rate": 1})
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_names_of_functions_are_no_modules() -> None:
    """Importing the submodules in any order leaves the public names as they are, and takes no compiler along."""
    code = """
import importlib, pkgutil, sys, allmlp
names = {name: getattr(allmlp, name) for name in allmlp.__all__}
for module in pkgutil.iter_modules(allmlp.__path__):
    assert module.name not in names or names[module.name].__name__ == f"allmlp.{module.name}", module.name
for name in ("training", "prediction", "api", "run"):
    importlib.import_module(f"allmlp.{name}")
assert all(getattr(allmlp, name) is value for name, value in names.items())
assert "torch._dynamo" not in sys.modules and "triton" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name in allmlp.__all__ if name != "__version__"])
def test_every_public_name_is_documented_and_typed(name: str) -> None:
    value = getattr(allmlp, name)
    assert inspect.getdoc(value)
    if inspect.isfunction(value):
        assert f"allmlp.{name}(" in (value.__doc__ or ""), "the docstring shows a call"
        signature = inspect.signature(value)
        assert signature.return_annotation is not signature.empty
        assert all(parameter.annotation is not parameter.empty for parameter in signature.parameters.values())


@pytest.mark.parametrize("name", ["create", "load", "from_pretrained", "train", "predict", "evaluate", "fast"])
def test_unknown_keywords_are_refused_with_a_suggestion(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}\(\) has no argument 'sead'"):
        getattr(allmlp, name)("x", sead=1)
