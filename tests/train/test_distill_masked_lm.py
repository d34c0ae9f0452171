"""Masked language modeling with a teacher: the loss against its equation, and a frozen teacher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import allmlp
from allmlp import parallel
from allmlp import training as loop
from allmlp.data.corpus import Corpus, TextDataset
from allmlp.data.sampler import Batch
from allmlp.data.tokenizer import TokenizerConfig
from allmlp.layers import ClassifierHead, MeanPool
from allmlp.models.cost import measure
from allmlp.models.gmlp import gmlp_text
from allmlp.models.model import Model
from allmlp.optim import AdamW, Sgd
from allmlp.run import Budget, Run
from allmlp.tasks.distill_masked_lm import DistillMaskedLM, DistillMaskedLMModule, cosine_distance
from allmlp.tasks.masked_lm import MaskedBatch, MaskedLM, Masking, MaskingVocab
from allmlp.tasks.task import StepContext
from allmlp.train_step import TrainStep
from allmlp.weights.huggingface_bert import load_bert, word_embeddings
from train.runs import small
from train.test_train import losses, same_weights, train_interrupted

pytest.importorskip("tokenizers")
LENGTH, STUDENT = 12, gmlp_text(2, 16, 32)
MASKED = MaskedLM(Masking(0.3))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Rows of one document each, so that some are padded."""
    folder = tmp_path_factory.mktemp("corpus")
    paragraphs = [f"sheep number {number} jumps over the fence" + " again" * (number % 7) for number in range(60)]
    (folder / "train.txt").write_text("\n\n".join(paragraphs))
    (folder / "test.txt").write_text("sheep jumps again\n\nover the fence")
    return Corpus(
        str(folder / "train.txt"),
        str(folder / "test.txt"),
        TokenizerConfig(vocab_size=100),
        LENGTH,
        packing=False,
        cache=str(folder / "cache"),
    )


@pytest.fixture(scope="module")
def texts(data: Corpus) -> TextDataset:
    return data.load()


@pytest.fixture(scope="module")
def teacher(texts: TextDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT as transformers saves it, of another width and length."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("teacher")
    config = transformers.BertConfig(
        vocab_size=len(texts.tokenizer),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=40,
        max_position_embeddings=20,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(texts.tokenizer.to_json())
    return folder


def run(data: Corpus, task: Any, **changes: Any) -> Run:
    plain = Run(
        model=STUDENT,
        task=task,
        data=data,
        batch_size=8,
        budget=Budget(steps=8),
        optim=AdamW(lr=1e-2),
        max_grad_norm=1.0,
        ema_decay=0.9,
        log_every=1,
        eval_every=8,
        save_every=3,
    )
    return plain.replace(**changes)


def student(texts: TextDataset) -> Model:
    return allmlp.create(MASKED.configure_model(STUDENT, texts), seed=0)


def module(task: DistillMaskedLM, texts: TextDataset) -> DistillMaskedLMModule:
    torch.manual_seed(1)
    built = task.build(student(texts), texts)
    assert isinstance(built, DistillMaskedLMModule)
    return built


def batch(texts: TextDataset) -> tuple[Tensor, ...]:
    """Original ids, then masked rows."""
    ids = texts.train.fetch(torch.arange(12)).ids.long()
    assert (ids == texts.tokenizer.pad_token_id).any()
    uniforms = torch.rand(12, MASKED.masking.num_uniforms(LENGTH), generator=torch.Generator().manual_seed(0))
    return ids, *MASKED.masking.apply(ids, uniforms, MaskingVocab(texts.tokenizer))


def test_loss_matches_its_equation(texts: TextDataset, teacher: Path) -> None:
    task, (ids, *masked) = module(DistillMaskedLM(str(teacher), MASKED, alpha=0.3), texts), batch(texts)
    found = task.compute_loss(ids, *masked)
    labeled = MASKED.build(task.model, texts).compute_loss(ids, *masked)
    inputs = MaskedBatch(*masked).input_ids
    bert, cosines = load_bert(teacher), []
    for row, masked in zip(ids, inputs):
        length = int((row != texts.tokenizer.pad_token_id).sum())
        features = task.model.forward_features(masked[None, :length])[0]
        for x, t in zip(features @ task.proj.weight.T, bert.forward_features(row[None, :length])[0]):
            cosines.append(x @ t / (x.norm() * t.norm()))
    expected = 0.7 * labeled.total + 0.3 * (1 - torch.stack(cosines)).mean()
    torch.testing.assert_close(found.total, expected)
    torch.testing.assert_close(found.metrics["mlm_loss"], labeled.total)
    torch.testing.assert_close(found.metrics["accuracy"], labeled.metrics["accuracy"])
    torch.testing.assert_close(found.metrics["agreement"], torch.stack(cosines).mean())


def test_positions_of_micro_batches_and_processes_have_equal_weights(
    texts: TextDataset, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of them are selected for prediction: rounding gives short rows a larger share."""
    task = module(DistillMaskedLM(str(teacher), MaskedLM(Masking(0.1)), alpha=0.8), texts).train()

    def prepare(rows: list[int], parts: int, rank: int = 0, size: int = 1) -> list[tuple[Tensor, ...]]:
        indices = torch.tensor(rows)
        context = StepContext(0.5, torch.Generator().manual_seed(0), rank, size)
        return task.prepare_batches(Batch(0, 0.0, indices, texts.train.fetch(indices)).split(parts), context)

    def gradient(batches: list[tuple[Tensor, ...]], rank: int = 0, size: int = 1) -> tuple[Tensor, Tensor]:
        task.zero_grad()
        step = TrainStep(task, Sgd().build(task), parallel.World(rank, size, torch.device("cpu")))
        losses = step.backward(batches)
        gradients = torch.cat([weight.grad.flatten() for weight in task.parameters() if weight.grad is not None])
        return gradients, torch.stack([losses.total, *losses.metrics.values()])

    rows = [0, 1, 2, 3, 4, 5, 6, 12, 13, 20]
    (inputs,) = prepare(rows, 1)
    whole = gradient([inputs])
    for found, expected in zip(gradient(prepare(rows, 4)), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    selected = task.loss_weight(*inputs)
    sums = torch.stack([(inputs[0] != texts.tokenizer.pad_token_id).sum(), selected])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda values: values.copy_(sums if values.dim() else selected))
    halves = [gradient(prepare(rows[rank::2], 2, rank, 2), rank, 2) for rank in range(2)]
    for found, expected in zip(map(torch.stack, zip(*halves)), whole, strict=True):
        torch.testing.assert_close(found.mean(0), expected, rtol=1e-4, atol=1e-6)


def test_cosine_distance_ignores_padding() -> None:
    x, real = torch.randn(2, 3, 4), torch.tensor([[True, True, False], [True, False, False]])
    noise = torch.where(real[..., None], 0.0, torch.randn(2, 3, 4))
    assert cosine_distance(2 * x, x + noise, real).item() == pytest.approx(0.0, abs=1e-6)
    assert cosine_distance(-x, x + noise, real).item() == pytest.approx(2.0, abs=1e-6)


def test_alpha_0_is_masked_language_modeling(texts: TextDataset, teacher: Path) -> None:
    inputs = batch(texts)
    expected = MASKED.build(student(texts), texts).compute_loss(*inputs)
    for name in ("", str(teacher)):
        found = DistillMaskedLM(name, MASKED, alpha=0.0).build(student(texts), texts).compute_loss(*inputs)
        assert torch.equal(found.total, expected.total) and torch.equal(
            *(x.metrics["accuracy"] for x in (found, expected))
        )


def test_only_student_and_projection_are_trained(texts: TextDataset, teacher: Path) -> None:
    task = module(DistillMaskedLM(str(teacher), MASKED, alpha=1.0), texts)
    task.train().compute_loss(*batch(texts)).total.backward()
    idle = [name for name, weight in task.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not idle, idle
    frozen = list(task.teacher.model.parameters())
    assert not any(weight.requires_grad or weight.grad is not None for weight in frozen)
    assert {name.partition(".")[0] for name in task.state_dict()} == {"model", "proj"}
    assert not task.teacher.model.training


def test_flops_include_the_teacher(texts: TextDataset, teacher: Path) -> None:
    task = module(DistillMaskedLM(str(teacher), MASKED), texts)
    alone = MASKED.build(task.model, texts).flops
    reading = load_bert(teacher).spec.replace(head=None).configure(seq_len=LENGTH)
    assert task.flops == alone + 2 * measure(reading).macs + 6 * LENGTH * 16 * 24


@pytest.mark.slow
def test_compiles_as_one_graph(texts: TextDataset, teacher: Path) -> None:
    task = module(DistillMaskedLM(str(teacher), MASKED), texts)
    inputs = batch(texts)
    compiled = torch.compile(task.compute_loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs).total, task.compute_loss(*inputs).total)


def test_resume_is_exact_and_evaluation_needs_no_teacher(
    data: Corpus, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = run(data, DistillMaskedLM(str(teacher), MASKED, embeddings_from=str(teacher)))
    loop.train(plan, tmp_path / "whole", "cpu")
    before = train_interrupted(plan, tmp_path / "cut", monkeypatch, step=4)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "cut", tmp_path / "whole")
    monkeypatch.setattr("allmlp.tasks.distill_masked_lm.TextTeacher", None)
    monkeypatch.setattr("allmlp.tasks.distill_masked_lm.init_embeddings", None)
    assert loop.evaluate_checkpoint(tmp_path / "cut", "cpu") == before


def test_student_approaches_a_teacher_of_this_library(data: Corpus, tmp_path: Path) -> None:
    wide = gmlp_text(2, 24, 32)
    loop.train(run(data, MASKED, model=wide), tmp_path / "teacher", "cpu")
    task = DistillMaskedLM(str(tmp_path / "teacher"), MASKED, alpha=1.0)
    loop.train(run(data, task, budget=Budget(steps=40), ema_decay=None), tmp_path / "student", "cpu")
    found = losses(tmp_path / "student")
    assert found[40] < 0.5 * found[1]


def test_embeddings_without_a_teacher(texts: TextDataset, teacher: Path) -> None:
    model = allmlp.create(MASKED.configure_model(gmlp_text(1, 24, 16), texts), seed=0)
    DistillMaskedLM("", MASKED, alpha=0.0, embeddings_from=str(teacher)).build(model, texts)
    assert torch.equal(model.embedding, word_embeddings(teacher))


# --- errors ---------------------------------------------------------------------------------------------------


def test_unsuitable_teachers_are_refused(texts: TextDataset, teacher: Path, tmp_path: Path) -> None:
    def learn_from(place: Path, message: str, rows: TextDataset = texts) -> None:
        with pytest.raises(allmlp.UserError, match=message) as caught:
            DistillMaskedLM(str(place)).build(student(texts), rows)
        assert "\n" not in str(caught.value)

    def keep(name: str, model: Any) -> Path:
        allmlp.save(allmlp.create(model), tmp_path / name)
        return tmp_path / name

    learn_from(tmp_path / "nowhere", r"nowhere is not a model folder: it has no config.json")
    pooled = gmlp_text(1, 8, 8).replace(pool=MeanPool(), head=ClassifierHead(3))
    learn_from(keep("classes", pooled), "classes is not a language model")
    learn_from(keep("images", small().model), "images is not a language model")
    bare = keep("bare", MASKED.configure_model(STUDENT, texts))
    learn_from(bare, r"bare has neither tokenizer.json nor vocab.txt")
    other = TokenizerConfig(vocab_size=60).build(["other words stand here"])
    (bare / "tokenizer.json").write_text(other.to_json())
    learn_from(bare, r"bare has another vocabulary than the data: set data.tokenizer.path=.*bare")
    few = keep("few", gmlp_text(1, 8, 8, vocab_size=9))
    (few / "tokenizer.json").write_text(texts.tokenizer.to_json())
    learn_from(few, "few embeds 9 tokens, its tokenizer has")
    longer = TextDataset(texts.train, texts.test, texts.tokenizer, 21)
    learn_from(teacher, "reads 20 tokens, the rows have 21: set data.seq_len=20 or less", longer)


def test_vocabulary_in_another_order_is_refused(texts: TextDataset, teacher: Path, tmp_path: Path) -> None:
    """A vocabulary of the same size, kept as BERT's own vocab.txt."""
    words = [texts.tokenizer.id_to_token(number) for number in range(len(texts.tokenizer))]
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((teacher / file).read_bytes())
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    both = DistillMaskedLM(str(tmp_path), embeddings_from=str(tmp_path))
    assert isinstance(both.build(student(texts), texts), DistillMaskedLMModule)
    (tmp_path / "vocab.txt").write_text("\n".join([*words[:-2], words[-1], words[-2]]) + "\n")
    for task in (both, both.replace(embeddings_from=""), both.replace(alpha=0.0)):
        with pytest.raises(allmlp.UserError, match="has another vocabulary than the data"):
            task.build(student(texts), texts)


def test_damaged_and_unknown_teachers_are_refused(texts: TextDataset, teacher: Path, tmp_path: Path) -> None:
    for file in teacher.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(weights.read_bytes()[:-50])
    with pytest.raises(allmlp.UserError, match="is damaged or not a safetensors file"):
        DistillMaskedLM(str(tmp_path)).build(student(texts), texts)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "roberta"}))
    with pytest.raises(allmlp.UserError, match="has the model_type 'roberta'"):
        DistillMaskedLM(str(tmp_path)).build(student(texts), texts)


def test_teacher_is_required_unless_alpha_is_0() -> None:
    with pytest.raises(
        allmlp.UserError, match=r"DistillMaskedLM.teacher is empty: set it to a model folder, or set alpha=0"
    ):
        DistillMaskedLM("")
