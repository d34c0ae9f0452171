"""The same model in other packages is theirs, has our weights, and answers and learns as ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from allmlp.bench import backends, training
from allmlp.bench.parity import error
from allmlp.bench.peers import peer_group, timm_network
from allmlp.errors import UserError
from allmlp.layers import LMHead
from allmlp.layers.block import BlockLayer
from allmlp.models.encoder import Encoder
from allmlp.models.model import ModelSpec
from allmlp.models.preset import preset

CPU = torch.device("cpu")
MEMBERS = {
    "mixer_s32": "mixer_s32_224",
    "mixer_b16": "mixer_b16_224",
    "resmlp_s12": "resmlp_12_224",
    "resmlp_b24_8": "resmlp_big_24_224",
    "gmlp_s16": "gmlp_s16_224",
    "vit_ti16": "vit_tiny_patch16_224",
    "vit_b32": "vit_base_patch32_224",
    "cait_s24": "cait_s24_224",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMBERS)
def test_timm_is_as_timm_builds_it(name: str) -> None:
    """Layer by layer, with every option that a layer shows, and the shape of every weight."""
    timm = pytest.importorskip("timm")
    spec = preset(name).spec
    assert isinstance(spec, Encoder)
    with torch.device("meta"):
        mine, theirs = timm_network(spec), timm.create_model(MEMBERS[name], num_classes=1000)
    assert repr(mine) == repr(theirs)
    shapes = [{key: value.shape for key, value in network.state_dict().items()} for network in (mine, theirs)]
    assert shapes[0] == shapes[1]


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["mixer_s32", "resmlp_s12", "gmlp_s16"])
def test_timm_runs_what_it_runs_for_others(name: str) -> None:
    """Operator by operator: torch.matmul, for one, chooses its way by more than the shapes."""
    timm = pytest.importorskip("timm")
    spec = preset(name).spec.replace(depth=1)
    mine = backends.plain(peer_group(name, spec, CPU, ["timm"]).models["timm"], torch.float32)
    theirs = timm.create_model(MEMBERS[name]).eval()
    theirs.blocks = theirs.blocks[:1]
    seen = []
    for network in (mine, theirs):
        with torch.no_grad(), Ops() as ops:  # in inference mode, linear is one operator
            network(torch.randn(1, 3, 224, 224))
        seen.append(ops.names)
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_a_copy_of_the_inputs_is_not_compiled_again() -> None:
    """A CUDA graph has its own copy, and while it is captured nothing can be compiled."""
    pytest.importorskip("timm")
    compilations = []

    def count(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compilations.append(module)
        return module.forward

    group = peer_group("mixer_nano", preset("mixer_nano").spec, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            backends, "compiled", lambda model, dtype: torch.compile(backends.plain(model, dtype), backend=count)
        )
        patch.setitem(backends.MODES, "cuda-graph", lambda model, dtype: Copying(backends.compiled(model, dtype)))
        entry = backends.inference(
            group, "timm cuda-graph", backends.random_inputs(group.first, 2), torch.float32
        ).build()
        entry.output()
        assert len(compilations) > 0
        found = len(compilations)
        entry.output()
    assert len(compilations) == found


class Copying:
    """Calls with the inputs first, then with copies, as RecordedStep does."""

    def __init__(self, forward: Any) -> None:
        self.forward, self.calls = forward, 0

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.forward(*(inputs if self.calls == 1 else map(torch.clone, inputs)))


def bert() -> ModelSpec:
    """BERT with the head that Hugging Face's has."""
    return preset("bert_tiny").spec.replace(head=LMHead(bias=True, transform=True))


PAIRS = {
    "mixer_nano": ["timm"],
    "resmlp_nano": ["timm"],
    "gmlp_nano": ["timm"],
    "vit_nano": ["timm", "hf"],
    "bert": ["hf"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_same_answers_and_gradients(name: str) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    one = peer_group(name, bert() if name == "bert" else preset(name).spec, CPU)
    assert list(one.models) == ["ours", *PAIRS[name]]
    inputs = backends.random_inputs(one.first, 3)
    reference = backends.exact(one, "ours", inputs)
    examples = training.examples(one, 3)
    gradients = training.exact(one, "ours", examples)
    for package in PAIRS[name]:
        assert error(backends.exact(one, package, inputs), reference) < 1e-6
        assert error(training.exact(one, package, examples), gradients) < 1e-6
        single = backends.inference(one, f"{package} eager", inputs, torch.float32).build().output()
        assert 0 < error(single, reference) < 1e-5


def test_a_step_in_pieces_is_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    one = peer_group("mixer_nano", preset("mixer_nano").spec, CPU)
    examples = training.examples(one, 5)
    whole = training.exact(one, "ours", examples)
    monkeypatch.setattr(training, "CHUNK", 2)
    assert error(training.exact(one, "ours", examples), whole) < 1e-6


def test_the_reference_of_training_keeps_the_input_of_each_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 the activations of a deep model are four times those in bfloat16; every block is computed twice."""
    calls: list[object] = []
    forward = BlockLayer.forward
    monkeypatch.setattr(BlockLayer, "forward", lambda self, *given: calls.append(self) or forward(self, *given))
    one = peer_group("gmlp_nano", preset("gmlp_nano").spec, CPU, ())
    examples = training.examples(one, 2)
    calls.clear()
    training.exact(one, "ours", examples)
    # Once to count the outputs, then forward and again backward.
    assert len(calls) == 3 * one.spec.depth  # type: ignore[attr-defined]


def test_a_step_is_timed_with_its_optimizer_and_changes_nothing() -> None:
    one = peer_group("gmlp_nano", preset("gmlp_nano").spec, CPU)
    entry = training.training(one, "ours eager", training.examples(one, 2), torch.float32).build()
    first = entry.output()[0]
    losses = [entry.call().total for _ in range(2)]
    assert losses[0] == losses[1] and losses[0] > 0
    assert torch.equal(entry.output()[0], first)


def test_why_there_is_no_peer() -> None:
    pytest.importorskip("timm")
    assert "timm has no BERT" in peer_group("bert_tiny", preset("bert_tiny").spec, CPU).missing["timm"]
    assert "has no weight for" in peer_group("amlp_nano", preset("amlp_nano").spec, CPU).missing["timm"]
    small = preset("resmlp_s12_ln").spec.configure(img_size=32).replace(depth=1, width=32)
    assert "other weights" in peer_group("resmlp_s12_ln", small, CPU).missing["timm"]
    assert "no equivalent" in peer_group("resmlp_seq2seq_tiny", preset("resmlp_seq2seq_tiny").spec, CPU).missing["hf"]


def test_answers_differ_between_examples() -> None:
    """On noise alone a mean over tokens is the same for all, and a wrong row could not be told from a right one."""
    one = peer_group("mixer_nano", preset("mixer_nano").spec, CPU)
    answers = torch.stack(list(backends.exact(one, "ours", backends.random_inputs(one.first, 4))))
    assert answers.std(0).mean() > 0.2 * answers.std()


def test_other_tasks_are_not_trained_here() -> None:
    one = peer_group("resmlp_seq2seq_tiny", preset("resmlp_seq2seq_tiny").spec, CPU)
    with pytest.raises(UserError, match="training steps are for image classifiers"):
        training.examples(one, 2)
