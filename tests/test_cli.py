"""The command as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import allmlp
from allmlp.cli import main
from allmlp.models.catalog import count_all, rows, write
from allmlp.models.zoo import presets
from tiny import tiny_model


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    output = capsys.readouterr()
    return int(caught.value.code or 0), output.out, output.err


def test_list_is_the_zoo() -> None:
    """zoo.json is what the models are: after a change, run `make zoo`."""
    if os.environ.get("ALLMLP_WRITE_ZOO"):
        write()
    assert rows() == count_all()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["list"], ["list", "--json"], ["list", "--help"], ["show", "--help"]]
)
def test_quick_commands_do_not_load_torch(arguments: list[str]) -> None:
    code = f"""
import sys
from allmlp.cli import main
try: main({arguments!r})
except SystemExit as end: assert not end.code, end.code
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_does_not_load_torch() -> None:
    code = "import sys, allmlp; allmlp.UserError; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_library_needs_torch_numpy_and_safetensors_only() -> None:
    """Every model builds, runs and is saved with nothing else importable."""
    code = """
import sys, tempfile
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"rich", "typer", "click", "timm", "transformers", "einops", "PIL", "matplotlib"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
import allmlp
for name in ("mixer_nano", "resmlp_nano", "gmlp_nano", "amlp_nano", "vit_nano", "bert_tiny", "resmlp_seq2seq_tiny"):
    model = allmlp.create(name).eval()
    model(*model.example())
    model.describe()
allmlp.load(allmlp.save(model, tempfile.mkdtemp()))
try: allmlp.create("hf:resnet50")
except allmlp.UserError as reason: assert "pip install 'allmlp[baselines]'" in str(reason), reason
else: raise SystemExit("transformers was imported")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0 and max(map(len, out.splitlines())) <= 100
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(presets())
    assert "mixer_b16" in out and "59.88 M" in out and "59 M, 12.7 G" in out


def test_list_pattern_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "list", "resmlp_s12_*", "--json")
    table = json.loads(out)
    assert {row["name"] for row in table} == set(allmlp.list_models("resmlp_s12_*")) and len(table) == 9
    assert next(row for row in table if row["name"] == "resmlp_s12_dw")["parameters"] == 14_933_608
    assert len(allmlp.list_models("seq2seq")) == 5


@pytest.mark.parametrize("name", ["mixer_h14", "gmlp_xlarge", "amlp_base", "resmlp_s12_class", "resmlp_seq2seq_6"])
def test_show_fits_a_terminal(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, _ = run(capsys, "show", name)
    assert code == 0 and max(map(len, out.splitlines())) <= 100
    for heading in ("Sentence", "Equations", "Cost of one example", "State dict", "Files"):
        assert heading in out
    assert f"{allmlp.measure(presets()[name].spec).parameters:,}" in out


def test_show_of_a_huge_model_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """gMLP-xlarge has 941 M weights; its page is made of one block on the meta device."""
    sizes = []
    empty = torch.empty

    def watched(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        sizes.append(0 if tensor.is_meta else tensor.numel())
        return tensor

    monkeypatch.setattr(torch, "empty", watched)
    assert allmlp.measure(presets()["gmlp_xlarge"].spec).parameters == 940_582_768
    assert sum(sizes) == 0 and len(sizes) < 100


def test_show_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "show", "mixer_b16", "--json")
    page = json.loads(out)
    assert page["parameters"] == 59_880_472 and page["published"]["parameters"] == "59"
    assert sum(part["macs"] for part in page["parts"]) == page["macs"]
    assert page["state_dict"]["blocks.{0..11}.token.mix.up.weight"] == [384, 196]
    assert "layers/mixers/mlp.py" in page["files"] and page["equations"]["TokenMlp"]


def test_show_with_changes(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "show", "resmlp_s12", "--classes", "10", "--image", "160x256", "--set", "depth=3", "--json")
    config = json.loads(out)["config"]
    assert config["stem"]["image"] == [160, 256] and config["head"]["classes"] == 10 and config["depth"] == 3
    assert json.loads(out)["published"] is None


def test_show_of_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    allmlp.save(tiny_model("gmlp_l18", torch.float32), tmp_path)
    code, out, _ = run(capsys, "show", str(tmp_path))
    assert code == 0 and "SpatialGate" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "mixer_b61"], "unknown model 'mixer_b61'; did you mean 'mixer_b16'"),
        (["show", "mixer_b16", "--image", "225"], "a 16x16 patch does not divide a 225x225 image"),
        (["show", "mixer_b16", "--image", "inf"], "--image"),
        (["show", "mixer_b16", "--image", "0"], "Patches.image[0] must be a whole number"),
        (["show", "mixer_b16", "--classes", "-1"], "Classes.classes must be a whole number"),
        (["show", "mixer_b16", "--set", "block.tokn=1"], "unknown Block field 'tokn'; did you mean 'token'?"),
        (["show", "mixer_b16", "--set", "block"], "--set takes FIELD=VALUE"),
        (["show", "gmlp_l18", "--image", "32"], "it takes no 'image'"),
        (["show", "."], "is not a model folder: it has no config.json"),
        (["show"], "Missing argument"),
        (["show", "mixer_b16", "--imge", "3"], "No such option: --imge"),
        (["shwo"], "No such command 'shwo'"),
        (["list", "zebra"], "no model matches 'zebra'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and message in err and err.count("\n") == 1 and err.startswith("error: ") and not out


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["list", "--help"], ["show", "--help"]):
        code, out, _ = run(capsys, *arguments)
        assert code == 0 and "Examples:" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[1] == f"allmlp {allmlp.__version__}\n"


def test_public_names() -> None:
    assert set(allmlp.__all__) == {*allmlp._PLACES, "__version__"} == set(dir(allmlp))
    assert all(getattr(allmlp, name) is not None for name in allmlp.__all__)
    with pytest.raises(AttributeError, match="no attribute 'creat'"):
        allmlp.creat  # noqa: B018
