"""The command line: output, help and one-line errors."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import allmlp
from allmlp.cli import COMMANDS, main
from allmlp.cli.app import next_command, print_json
from allmlp.models.zoo import presets
from allmlp.plan.estimate import expected_seconds
from allmlp.plan.hardware import speeds
from allmlp.plan.jobs import from_run
from allmlp.recipes import recipes, runs
from allmlp.spec import from_dict
from command import run
from tiny import tiny_model


@pytest.mark.parametrize(
    "arguments",
    [[], ["--help"], ["list"], ["list", "--json"], ["list", "recipes"], ["list", "--help"], ["study", "--list"]],
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


@pytest.mark.slow
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
    model(*model.dummy_inputs())
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


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("what", ["*", "weights", "recipes"])
def test_nothing_is_cut_off_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = run(capsys, "list", what)
    assert max(map(len, out.splitlines())) <= columns and "…" not in out and "..." not in out


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
    for heading in ("Config", "Equations", "Cost of one example", "State dict", "Files"):
        assert heading in out
    assert f"{allmlp.measure(presets()[name].spec).parameters:,}" in out


def test_show_of_a_huge_model_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """gMLP-xlarge has 941 M weights; its costs are counted on one block on the meta device."""
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
    summary = json.loads(out)
    assert summary["parameters"] == 59_880_472 and summary["published"]["parameters"] == "59"
    assert sum(part["macs"] for part in summary["parts"]) == summary["macs"]
    assert summary["state_dict"]["blocks.{0..11}.token.mix.up.weight"] == [384, 196]
    assert "layers/mixers/mlp.py" in summary["files"] and summary["equations"]["TokenMlp"]
    assert summary["input_spec"] == "224x224 image" and summary["python"].startswith("Encoder(")


def test_show_with_changes(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(
        capsys, "show", "resmlp_s12", "--num-classes", "10", "--img-size", "160x256", "--set", "depth=3", "--json"
    )
    config = json.loads(out)["config"]
    assert config["stem"]["img_size"] == [160, 256] and config["head"]["num_classes"] == 10 and config["depth"] == 3
    assert json.loads(out)["published"] is None


def test_show_of_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    allmlp.save(tiny_model("gmlp_l18", torch.float32), tmp_path)
    code, out, _ = run(capsys, "show", str(tmp_path))
    assert code == 0 and "SpatialGatingUnit" in out


@pytest.mark.slow
def test_show_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "digits_mixer", "--set", "model=mixer_nano", "--set", "optim.lr=0.5")
    assert code == 0 and recipes()["digits_mixer"].text in out and "data=Digits()" in out
    assert "lr=0.5" in out and "patch_size=(4, 4)" in out
    _, out, _ = run(capsys, "show", "digits_mixer", "--set", "model=mixer_nano", "--json")
    assert from_dict(json.loads(out)["runs"]["digits_mixer"]).model == presets()["mixer_nano"].spec
    _, out, _ = run(capsys, "show", "cifar10_ablations")
    assert "cifar10_ablations/conv" in out and "Config" not in out
    _, out, _ = run(capsys, "show", "cifar10_ablations/conv")
    assert "TokenConv(" in out and "cifar10_ablations/mlp" not in out


def test_list_of_recipes_is_searched_and_wrapped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, "list", "recipes")
    lines = out.splitlines()
    assert code == 0 and max(map(len, lines)) <= 100 and "..." not in out
    assert [line.split()[0] for line in lines if line[0] != " "] == list(recipes())
    _, out, _ = run(capsys, "list", "recipes", "digits")
    listed = {line.split()[0] for line in out.splitlines() if line[0] != " "}
    assert listed == {name for name, one in recipes().items() if "digits" in name or "digits" in one.text.lower()}
    _, out, err = run(capsys, "list", "recipes", "Treebank", "film")
    assert out.split()[0] == "sst2" and "treebank" in recipes()["sst2"].text and err == "next: allmlp show sst2\n"
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run(capsys, "list", "recipes")
    assert max(map(len, out.splitlines())) <= 60 and "..." not in out
    monkeypatch.delenv("COLUMNS")
    _, out, err = run(capsys, "list", "studies", "corrupted")
    assert out.startswith("robust  ") and err == "next: allmlp study robust\n"
    _, out, _ = run(capsys, "list", "recipes", "digits_*", "--json")
    assert json.loads(out)["digits_mixer"] == recipes()["digits_mixer"].text
    _, out, _ = run(capsys, "list", "weights", "mixer_b32")
    assert all("mixer_b32" in line for line in out.splitlines()[1:] if "." in line.split()[0])


def test_show_tells_all_about_a_recipe_before_it_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    _, out, err = run(capsys, "show", "cifar10_gmlp", "--set", "batch_size=256")
    facts = out.partition("\nConfig\n")[0]
    assert max(map(len, facts.splitlines())) <= 70 or "allmlp train" in max(facts.splitlines(), key=len)
    said = " ".join(facts.split())
    parameters = allmlp.measure(runs("cifar10_gmlp")["cifar10_gmlp"].model).parameters
    assert f"gMLP 12 x 256, input 32x32 image, about {parameters / 1e6:.2f} M parameters" in said
    assert "data Cifar10()" in said and "budget 300 epochs, batches of 256" in said
    assert "optimizer Muon(lr=0.002, weight_decay=0.1), CosineSchedule(" in said
    assert re.search(r"time about \d+:\d\d on one H200, from the speed of cifar10_gmlp", said)
    assert err == "next: allmlp train cifar10_gmlp --set batch_size=256\n"
    _, out, _ = run(capsys, "show", "cifar10_gmlp", "--set", "budget.minutes=1")
    assert "time       1 minute, less than all of its steps take on one H200" in out
    _, out, err = run(capsys, "show", "sst2", "--json")
    assert json.loads(out)["summaries"]["sst2"]["budget"] == "3 epochs, batches of 64" and not err
    _, out, err = run(capsys, "show", "sst2")
    assert "model      none: --set init_from=FOLDER" in out
    assert err == "next: allmlp train sst2 --set init_from=FOLDER\n"


def test_expected_time_is_that_of_the_measured_speed() -> None:
    """300 epochs of 50,000 images at the recorded images per second."""
    (speed,) = [one for one in speeds() if one.model == "cifar10_gmlp" and one.task == "training"]
    run_of = runs("cifar10_gmlp")["cifar10_gmlp"]
    seconds, source = expected_seconds(from_run("cifar10_gmlp", run_of, None, None, {"gpus": 1}))
    assert source == speed.description
    assert seconds == pytest.approx(300 * 50_000 / speed.throughput, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "mixer_b61"], "unknown model or recipe 'mixer_b61'; did you mean 'mixer_b16'"),
        (["show", "digits_miksr"], "did you mean 'digits_mixer'"),
        (["show", "digits_mixer/row"], "recipe digits_mixer is one run: it has no row 'row'"),
        (["show", "digits_mixer", "--img-size", "32"], "--img-size is for models"),
        (["show", "digits_mixer", "--set", "optim.decay=1"], "did you mean 'weight_decay'?"),
        (["show", "mixer_b16", "--img-size", "225"], "a 16x16 patch does not divide a 225x225 image"),
        (["show", "mixer_b16", "--img-size", "inf"], "--img-size"),
        (["show", "mixer_b16", "--img-size", "0"], "PatchEmbed.img_size[0] must be a whole number"),
        (["show", "mixer_b16", "--num-classes", "-1"], "ClassifierHead.num_classes must be a whole number"),
        (["show", "mixer_b16", "--set", "block.tokn=1"], "unknown Block field 'tokn'; did you mean 'token'?"),
        (["show", "mixer_b16", "--set", "block"], "--set takes FIELD=VALUE"),
        (
            ["show", "gmlp_l18", "--img-size", "32"],
            "the model has no 'img_size' (input: 128 tokens); it has vocab_size, seq_len",
        ),
        (["show", "."], "is not a model folder: it has no config.json"),
        (["show", __file__], "test_cli.py is a file, not a model folder: if it holds weights, convert it"),
        (["show"], "Missing argument"),
        (["plan"], "Missing argument 'TARGET'; for examples: allmlp plan --help"),
        (["show", "mlp"], "unknown model or recipe 'mlp'; did you mean 'mlp_b6_512'"),
        (["show", "mixer_b16", "--imge", "3"], "No such option: --imge"),
        (["shwo"], "No such command 'shwo'"),
        (["train", "digits_mixer", "--steps", "3"], "--steps; did you mean --set budget.steps=VALUE?"),
        (["train", "digits_mixer", "--batch-size", "3"], "did you mean --set batch_size=VALUE?"),
        (["train", "digits_mixer", "--sweep", "seed=0,1"], "No such option: --sweep; allmlp study has it"),
        (["study", "digits", "--model", "mixer_nano"], "No such option: --model; did you mean --set model=VALUE?"),
        (["train", "digits_mixer", "--set", "model=mixer_nanno"], "did you mean 'mixer_nano'"),
        (["train", "digits_mixer", "--set"], "Option '--set' requires an argument"),
        (["list", "--json=yes"], "Option '--json' does not take a value"),
        (["--import"], "Option '--import' requires an argument"),
        (["train", "digits_mixer", "--epoch", "3"], "No such option: --epoch; did you mean --epochs?"),
        (["report", "runs/a", "--epochs", "3"], "No such option: --epochs; allmlp train and allmlp plan have it"),
        (["shards", "photos", "--top-k", "3"], "--top-k; allmlp predict, allmlp generate and allmlp embed have it"),
        (["prune", "runs/a", "--out", "b"], "--out; it is an argument: allmlp prune [OPTIONS] FOLDER [TARGET]"),
        (["predict", "--model", "runs/a"], "--model; it is an argument: allmlp predict"),
        (["finetune", "photos"], "No such command 'finetune'; did you mean allmlp train?"),
        (["digits_mixr"], "No such command 'digits_mixr'; did you mean allmlp show digits_mixer?"),
        (["zzzz"], "No such command 'zzzz'; see allmlp --help"),
        (["analyze", "mixer_nano", "."], ". is a folder: name the image files in it, such as ./*.jpg"),
        (["tables", "--paper", "000"], "unknown paper '000': choose one of mixer, gmlp, resmlp, transformer"),
        (["list", "recipes", "no such recipe"], "no recipe matches 'no such recipe'"),
        (["list", "zebra"], "no model matches 'zebra' (recipes, studies and weights: `allmlp list recipes`, `list"),
        (["list", "study"], "no model matches 'study'; did you mean 'studies'"),
        (["list", "weights", "zebra"], "no weights match 'zebra'"),
        (["list", "studies", "zebra"], "no study matches 'zebra'"),
        (["list", "recipes", "digits_mixr"], "no recipe matches 'digits_mixr'; did you mean 'digits_mixer'"),
        (["list", "mixer", "gmlp"], "more words are only for"),
        (["serve", "--timeout", "inf"], "'--timeout': Input should be less than or equal to 86400"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and message in err and err.count("\n") == 1 and err.startswith("error: ") and not out


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["list", "--help"], ["show", "--help"]):
        code, out, err = run(capsys, *arguments)
        assert code == 0 and "Examples:" in out and not err and "bool" not in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_complete(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """No text is truncated at a width of 80 columns."""
    _, out, _ = run(capsys, "--help")
    section = out.partition("Commands:")[2]
    assert re.search(rf"^  {command} ", section, re.MULTILINE) and "..." not in section
    code, out, _ = run(capsys, command, "--help")
    assert code == 0 and "..." not in out.partition("Options:")[2].partition("Examples:")[0]
    assert "......" not in out


def test_usage_says_once_that_there_may_be_several(capsys: pytest.CaptureFixture[str]) -> None:
    first = {name: run(capsys, name, "--help")[1].partition("\n")[0] for name in ("predict", "serve", "launch")}
    assert first["predict"] == "Usage: allmlp predict [OPTIONS] [MODEL] INPUTS..."
    assert first["serve"] == "Usage: allmlp serve [OPTIONS] [MODEL...]"
    assert first["launch"] == "Usage: allmlp launch [OPTIONS] ARGUMENTS..."


def test_a_reader_that_stops_is_no_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("allmlp.cli.list.list_models", stop)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1, raising=False)
    assert run(capsys, "list")[0] == 141, "128 + SIGPIPE; 1 means that inputs could not be used"


def test_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdout", "stderr"):  # as after >&- in a shell
        monkeypatch.setattr(sys, stream, None)
    with pytest.raises(SystemExit) as end:
        main(["list", "mixer_nano"])
    with sys.stdout, sys.stderr:
        assert end.value.code == 0 and sys.stdout.name == sys.stderr.name == os.devnull


@pytest.mark.slow
def test_values_have_conventional_names(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        _, out, _ = run(capsys, command, "--help")
        assert "{" not in out.partition("\n")[0] and not re.search(r"<\w+", out), command
    _, out, _ = run(capsys, "plan", "--help")
    assert out.startswith("Usage: allmlp plan [OPTIONS] TARGET...\n") and re.search(r"^  --gpus INT +Number", out, re.M)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("allmlp rep", ["report"]),
        ("allmlp show digits_mi", ["digits_mixer"]),
        ("allmlp show mixer_h", ["mixer_h14"]),
        ("allmlp train stdlib_g", [name for name in recipes() if name.startswith("stdlib_g")]),
        ("allmlp report --sus", ["--suspect-labels"]),
    ],
)
def test_the_shell_completes(words: str, found: list[str]) -> None:
    """As bash asks for it, without loading torch."""
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_ALLMLP_COMPLETE": "complete_bash"}
    code = "import sys\nfrom allmlp.cli import main\ntry: main([])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | asked,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == found, done.stderr


def test_next_command_is_quoted_and_printed_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    next_command("predict", Path("my runs/a"), "IMAGE")
    assert capsys.readouterr() == ("", "next: allmlp predict 'my runs/a' IMAGE\n")
    monkeypatch.setenv("RANK", "1")
    next_command("list")
    assert capsys.readouterr() == ("", "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """With the commit of this checkout, with a + if it is changed, and the installed torch."""
    printed = run(capsys, "--version")[1]
    versions = [re.escape(version) for version in (allmlp.__version__, metadata.version("torch"))]
    pattern = r"allmlp {} \(commit ([0-9a-f]{{12}}\+?|unknown), torch {}\)\n".format(*versions)
    assert re.fullmatch(pattern, printed), printed


def test_public_names() -> None:
    assert set(allmlp.__all__) == {*allmlp._MODULES, "__version__"} == set(dir(allmlp))
    assert all(getattr(allmlp, name) is not None for name in allmlp.__all__)
    with pytest.raises(AttributeError, match="no attribute 'creat'"):
        allmlp.creat  # noqa: B018


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"accuracy": math.nan, "rows": [{"limits": (0.5, math.inf)}], "folder": Path("runs/a")})
    assert json.loads(capsys.readouterr().out) == {
        "accuracy": None,
        "rows": [{"limits": [0.5, None]}],
        "folder": "runs/a",
    }


def test_commands_print_json_in_one_way() -> None:
    """By print_json, which leaves NaN out; the catalog of `list` has none."""
    files = Path(allmlp.__file__).parent.joinpath("cli").glob("*.py")
    assert {file.stem for file in files if "print(json.dumps" in file.read_text(encoding="utf8")} == {"app", "list"}
