"""The same model in other packages is theirs, has our weights, and answers and learns as ours."""

from __future__ import annotations

import pytest
import torch

from allmlp.bench import sides, step
from allmlp.bench.agree import error
from allmlp.bench.peers import subject, timm_network
from allmlp.errors import UserError
from allmlp.layers import Vocabulary
from allmlp.models.encoder import Encoder
from allmlp.models.model import ModelSpec
from allmlp.models.zoo import resolve

CPU = torch.device("cpu")
MEMBERS = {
    "mixer_s32": "mixer_s32_224",
    "mixer_b16": "mixer_b16_224",
    "resmlp_s12": "resmlp_12_224",
    "resmlp_b24_8": "resmlp_big_24_224",
    "gmlp_s16": "gmlp_s16_224",
    "vit_ti16": "vit_tiny_patch16_224",
    "vit_b32": "vit_base_patch32_224",
}


@pytest.mark.parametrize("name", MEMBERS)
def test_timm_is_as_timm_builds_it(name: str) -> None:
    """Layer by layer, with every option that a layer shows, and the shape of every weight."""
    timm = pytest.importorskip("timm")
    spec = resolve(name)
    assert isinstance(spec, Encoder)
    with torch.device("meta"):
        mine, theirs = timm_network(spec), timm.create_model(MEMBERS[name], num_classes=1000)
    assert repr(mine) == repr(theirs)
    shapes = [{key: value.shape for key, value in network.state_dict().items()} for network in (mine, theirs)]
    assert shapes[0] == shapes[1]


def bert() -> ModelSpec:
    """BERT with the head that Hugging Face's has."""
    return resolve("bert_tiny").replace(head=Vocabulary(bias=True, transform=True))


PAIRS = {
    "mixer_nano": ["timm"],
    "resmlp_nano": ["timm"],
    "gmlp_nano": ["timm"],
    "vit_nano": ["timm", "hf"],
    "bert": ["hf"],
}


@pytest.mark.parametrize("name", PAIRS)
def test_same_answers_and_gradients(name: str) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    one = subject(name, bert() if name == "bert" else resolve(name), CPU)
    assert list(one.models) == ["ours", *PAIRS[name]]
    inputs = sides.example(one.first, 3)
    reference = sides.exact(one, "ours", inputs)
    examples = step.examples(one, 3)
    gradients = step.exact(one, "ours", examples)
    for package in PAIRS[name]:
        assert error(sides.exact(one, package, inputs), reference) < 1e-6
        assert error(step.exact(one, package, examples), gradients) < 1e-6
        single = sides.inference(one, f"{package} eager", inputs, torch.float32).build().answer()
        assert 0 < error(single, reference) < 1e-5


def test_a_step_in_pieces_is_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    one = subject("mixer_nano", resolve("mixer_nano"), CPU)
    examples = step.examples(one, 5)
    whole = step.exact(one, "ours", examples)
    monkeypatch.setattr(step, "CHUNK", 2)
    assert error(step.exact(one, "ours", examples), whole) < 1e-6


def test_a_step_is_timed_with_its_optimiser_and_changes_nothing() -> None:
    one = subject("gmlp_nano", resolve("gmlp_nano"), CPU)
    entry = step.training(one, "ours eager", step.examples(one, 2), torch.float32).build()
    first = entry.answer()[0]
    losses = [entry.call() for _ in range(2)]
    assert losses[0] == losses[1] and losses[0] > 0
    assert torch.equal(entry.answer()[0], first)


def test_why_there_is_no_peer() -> None:
    pytest.importorskip("timm")
    assert "timm has no BERT" in subject("bert_tiny", resolve("bert_tiny"), CPU).missing["timm"]
    assert "no place for" in subject("amlp_nano", resolve("amlp_nano"), CPU).missing["timm"]
    small = resolve("resmlp_s12_ln").configure(image=32).replace(depth=1, width=32)
    assert "other weights" in subject("resmlp_s12_ln", small, CPU).missing["timm"]
    assert "no peer" in subject("resmlp_seq2seq_tiny", resolve("resmlp_seq2seq_tiny"), CPU).missing["hf"]


def test_answers_differ_between_examples() -> None:
    """On noise alone a mean over tokens is the same for all, and a wrong row could not be told from a right one."""
    one = subject("mixer_nano", resolve("mixer_nano"), CPU)
    answers = torch.stack(list(sides.exact(one, "ours", sides.example(one.first, 4))))
    assert answers.std(0).mean() > 0.2 * answers.std()


def test_other_tasks_are_not_trained_here() -> None:
    one = subject("resmlp_seq2seq_tiny", resolve("resmlp_seq2seq_tiny"), CPU)
    with pytest.raises(UserError, match="only image classifiers"):
        step.examples(one, 2)
