"""Step time, communication and MFU: by hand, and against the logs they come from."""

from __future__ import annotations

import json

import pytest

from allmlp import UserError
from allmlp.models.cost import measure
from allmlp.models.zoo import family, preset, presets
from allmlp.optim import Lamb
from allmlp.plan.estimate import estimate
from allmlp.plan.hardware import GPUS, expected_flops, speeds, training_speed
from allmlp.plan.jobs import from_run, job
from allmlp.plan.memory import Sharding
from allmlp.plan.time import StepTime, step_time, training_flops
from allmlp.recipes import runs
from allmlp.spec import override_all
from allmlp.tasks.classify_any_size import ClassifyAnySize


def test_flops_by_hand() -> None:
    """Six per multiply-add of the forward pass; eight in blocks with gradient checkpointing."""
    cost = measure(preset("mixer_b16").spec)
    blocks = sum(part.macs for part in cost.parts if part.name.startswith("blocks"))
    assert training_flops(preset("mixer_b16").spec) == 6 * cost.macs
    assert training_flops(preset("mixer_b16").spec, grad_checkpointing=True) == 6 * cost.macs + 2 * blocks


def test_masked_language_model_head_runs_for_masked_tokens() -> None:
    """19 of 128 tokens; a causal model predicts at every token."""
    spec = preset("gmlp_l18").spec
    cost, head = measure(spec), 128 * 512 * 32_000
    assert training_flops(spec) == pytest.approx(6 * (cost.macs - head + head * 19 / 128))
    causal = preset("gmlp_causal_l18").spec
    assert training_flops(causal) == 6 * measure(causal).macs


def test_step_time_by_hand() -> None:
    """Sixteen GPUs at a quarter of 989.4 TFLOP/s; gradients of 432 M float32 weights at 50 GB/s."""
    spec, gpu = preset("mixer_h14").spec, GPUS["h200"]
    found = step_time(spec, 1024, 16, gpu, 0.25, "ddp", grad_checkpointing=False)
    assert found.compute == pytest.approx(1024 * 6 * measure(spec).macs / (16 * 0.25 * 989.4e12))
    assert found.bytes_sent == pytest.approx(2 * 15 / 16 * 4 * 432_350_952)
    assert found.communication == pytest.approx(found.bytes_sent / 50e9)
    assert found.exposed == 0 and found.seconds == found.compute
    slow = step_time(spec, 1024, 16, gpu, 0.25, "ddp", grad_checkpointing=False, bandwidth=1e9)
    assert step_time(spec, 1024, 16, gpu, 0.25, "ddp", False, bandwidth=slow.hiding_bandwidth).exposed == pytest.approx(
        0, abs=1e-9
    )
    assert slow.hiding_bandwidth == pytest.approx(slow.bytes_sent / (slow.compute * 2 / 3))
    assert slow.seconds == pytest.approx(slow.compute / 3 + slow.communication), (
        "communication overlaps with two thirds of the compute"
    )
    assert step_time(spec, 1024, 16, gpu, 0.25, "fsdp", False).bytes_sent == pytest.approx(1.5 * found.bytes_sent)
    half = step_time(spec, 1024, 16, gpu, 0.25, "fsdp", False, gathered=2)
    assert half.bytes_sent == pytest.approx(found.bytes_sent), "weights twice in bfloat16, gradients once in float32"
    assert step_time(spec, 1024, 8, gpu, 0.25, "ddp", False).communication < found.communication, "NVLink within a node"
    assert step_time(spec, 1024, 1, gpu, 0.25, "ddp", False).bytes_sent == 0


def test_communication_of_micro_batches() -> None:
    """FSDP2 gathers the weights for each of four; DDP reduces the gradients in the last backward pass only."""
    spec, gpu = preset("mixer_h14").spec, GPUS["h200"]

    def step(sharding: Sharding, count: int) -> StepTime:
        return step_time(spec, 1024, 16, gpu, 0.25, sharding, False, bandwidth=1e9, grad_accum_steps=count)

    weights = 15 / 16 * 4 * 432_350_952
    assert step("fsdp", 1).bytes_sent == pytest.approx(3 * weights)
    assert step("fsdp", 4).bytes_sent == pytest.approx(9 * weights)
    assert step("ddp", 4).bytes_sent == pytest.approx(2 * weights)
    assert step("ddp", 4).seconds == pytest.approx(step("ddp", 4).compute * (1 - 2 / 3 / 4) + 2 * weights / 1e9)
    options = {"samples": 1e6, "epochs": 1, "gpus": 16, "batch_size": 1024, "sharding": "fsdp"}
    once, several = (estimate(job("mixer_nano", **options, grad_accum_steps=count), runs=2) for count in (1, 4))
    assert several.chosen.step.bytes_sent == pytest.approx(5 / 2 * once.chosen.step.bytes_sent), "gathered in bfloat16"


def test_published_peaks() -> None:
    """NVIDIA's data sheets, dense."""
    assert {name: (gpu.peak / 1e12, gpu.memory / 1e9) for name, gpu in GPUS.items()} == {
        "h200": (989.4, 141),
        "h100": (989.4, 80),
        "a100": (312, 80),
    }


def test_mfu_by_hand() -> None:
    """cifar10_mixer: images/s of 453,773,824 multiply-adds, H200. wiki_gmlp: 25.2 % of 750.3 TFLOP/s."""
    found = {speed.model: speed for speed in speeds()}
    rate = found["cifar10_mixer"].throughput
    assert found["cifar10_mixer"].flops == pytest.approx(rate * 6 * 453_773_824) and 10_000 < rate < 100_000
    assert found["cifar10_mixer"].mfu == pytest.approx(rate * 6 * 453_773_824 / 989.4e12)
    assert found["wiki_gmlp"].flops == pytest.approx(0.252117 * 750.267e12, rel=1e-5)
    assert found["wiki_gmlp"].memory == pytest.approx(8.0958 * 2**30, rel=1e-5)


def test_unmeasured_family_takes_a_related_one() -> None:
    macs = 10**9
    assert training_speed("aMLP", "image", macs).family == training_speed("Mixer", "text", macs).family == "gMLP"
    assert {training_speed(name, "text", macs).family for name in ("Transformer", "GPT-2", "Llama")} == {"BERT"}
    with pytest.raises(UserError, match="--mfu"):
        training_speed("Mixer", "sound", macs)


def test_expected_flops_of_a_device() -> None:
    assert expected_flops("NVIDIA H200", "Mixer", "image", 1, 0.5) == (0.5 * 989.4e12, "given MFU of 50.0% on H200")
    flops, basis = expected_flops("NVIDIA A100-SXM4-80GB", "BERT", "text", 1, None)
    assert flops == pytest.approx(0.359002 * 752.9927e12 / 989.4e12 * 312e12, rel=1e-5) and "A100" in basis
    assert expected_flops("GeForce GT 710", "BERT", "text", 1, None)[0] is None


def test_forecast_of_mixer_h14() -> None:
    """Mixer-H/14, 300 million images, 14 epochs, 1,024 GPUs."""
    found = estimate(job("mixer_h14", samples=300e6, epochs=14, gpus=1024, mfu=0.4))
    assert found.job.batch_size == 4096 and found.job.local_batch_size == 4 and found.job.steps == 1_025_391
    useful = 6 * measure(preset("mixer_h14").spec).macs * 300e6 * 14
    assert found.chosen.step.flops * found.job.steps == pytest.approx(useful, rel=1e-5)
    assert found.checkpoint_bytes == 3 * 4 * 432_350_952
    assert found.read_bandwidth == pytest.approx(115_000 * 4096 / found.chosen.step.seconds)
    assert found.ideal_seconds == pytest.approx(found.job.steps * found.chosen.step.seconds)
    assert found.expected_seconds == pytest.approx(found.simulation.seconds, abs=3 * found.simulation.error)
    assert found.gpu_days == pytest.approx(1024 * found.expected_seconds / 86_400)
    assert 0.95 < found.goodput < 1 and found.nodes == 128
    assert found.host_memory == 40 * 300e6 and found.save_every == round(found.interval / found.chosen.step.seconds)
    assert json.loads(json.dumps(found.as_json()))["chosen"] == "FSDP2"


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("imagenet_resmlp_s12_dino", "several crops of every image"),
        ("imagenet_resmlp_s12_distilled", "its teacher reads every example too"),
        ("cifar10_probe", "trains the head alone"),
    ],
)
def test_recipes_that_cost_more_or_less_than_their_model(recipe: str, reason: str) -> None:
    """Their hours would be those of supervised training."""
    with pytest.raises(UserError, match=f"the cost of {recipe} is not known: .*{reason}"):
        job(recipe, gpus=8)


@pytest.mark.parametrize(
    ("changes", "samples", "epochs"),
    [
        ({}, 50_000, 300),
        ({"train_fraction": "0.1"}, 5_000, 300),
        ({"val_size": "5000"}, 45_000, 300),
        ({"aug_repeats": "4"}, 50_000, 1200),
        ({"budget.steps": "1000"}, 50_000, 1000 * 512 / 50_000),
        ({"budget.steps": "1000000"}, 50_000, 300),
        ({"budget.epochs": "none", "budget.steps": "1000", "batch_growth": "GrowingBatch"}, 50_000, 1000 * 32 / 50_000),
    ],
)
def test_examples_of_a_recipe(changes: dict[str, str], samples: int, epochs: float) -> None:
    run = override_all(runs("cifar10_mixer")["cifar10_mixer"], changes)
    found = from_run("cifar10_mixer", run, None, None, {"gpus": 1})
    assert found.samples == samples and found.epochs == pytest.approx(epochs)
    if "budget.epochs" not in changes and epochs < 300:
        assert found.steps == 1000


def test_examples_that_are_not_known() -> None:
    for change in ({"train_per_class": 10}, {"freeze_fraction": 0.5}):
        run = runs("cifar10_mixer")["cifar10_mixer"].replace(**change)
        with pytest.raises(UserError, match=r"training set of cifar10_mixer is unknown|its model is frozen at first"):
            from_run("cifar10_mixer", run, None, None, {"gpus": 1})


def test_host_memory_of_a_budget_in_steps() -> None:
    """400 epochs of ImageNet, whose order and index are of 1.28 million images."""
    found = job("imagenet_resmlp_s12", gpus=8)
    assert found.samples == 1_281_167 and found.steps == 400 * 1_281_167 // 2048


@pytest.mark.parametrize("task", [ClassifyAnySize(), ClassifyAnySize(train_sizes=(32, 48))])
def test_a_task_of_several_image_sizes_cannot_be_planned(task: ClassifyAnySize) -> None:
    run = runs("cifar10_mixer")["cifar10_mixer"].replace(task=task)
    if not task.train_sizes:
        assert from_run("any", run, None, None, {"gpus": 1}).samples == 50_000
    else:
        with pytest.raises(UserError, match="several image sizes"):
            from_run("any", run, None, None, {"gpus": 1})


@pytest.mark.slow
def test_recipe_settings() -> None:
    found = job("imagenet_resmlp_s12", gpus=8)
    assert found.batch_size == 2048 and isinstance(found.optim, Lamb) and found.family == "ResMLP"
    assert found.samples * found.epochs == pytest.approx(400 * 1_281_167, rel=1e-5)
    assert found.card.peak == 989.4e12 / 2, "the recipe is in float32, which runs as TF32"
    mixer = job("imagenet21k_mixer_l16", gpus=8)
    assert mixer.samples == 14_197_122 and mixer.epochs == 300 and mixer.batch_size == 4096
    text = job("mlm_table6/gmlp_base", gpus=8)
    assert text.samples * text.epochs == 1_000_000 * 256 and estimate(text).sample_bytes == 2 * 512
    series = estimate(job("patchtsmixer", 1e5, gpus=8, mfu=0.1))
    assert series.sample_bytes == 4 * 512 * 7 and series.job.batch_size == 64
    assert job("mlm_table3/mixer", gpus=8).family == "Mixer" and job("mlm_table6/bert_base", gpus=8).family == "BERT"


@pytest.mark.slow
def test_choice_of_a_strategy_that_fits() -> None:
    """941 M weights and 512 tokens: gradient checkpointing where the activations do not fit."""
    wide = estimate(job("gmlp_xlarge", samples=1e6, gpus=8, batch_size=1024, mfu=0.3, gpu="h100"))
    assert not wide.strategies[0].fits and wide.chosen.grad_checkpointing and wide.chosen.fits
    forced = estimate(job("gmlp_xlarge", samples=1e6, gpus=8, batch_size=64, mfu=0.3, sharding="fsdp"))
    assert forced.chosen.sharding == "fsdp"
    with pytest.raises(UserError, match="does not fit"):
        estimate(job("gmlp_xlarge", samples=1e6, gpus=1, batch_size=2048))


@pytest.mark.slow
def test_external_models_are_planned_from_a_given_mfu() -> None:
    with pytest.raises(UserError, match="no measured MFU for training ResNet on image: pass --mfu"):
        estimate(job("hf:resnet50", samples=1e6, gpus=8))
    found = estimate(job("hf:resnet50", samples=1e6, gpus=8, mfu=0.3, compiled=False, batch_size=1024))
    assert found.sample_bytes == 115_000 and found.chosen.name == "DDP"


@pytest.mark.slow
def test_every_preset_belongs_to_its_family() -> None:
    assert {name: family(entry.spec) for name, entry in presets().items()} == {
        name: entry.family for name, entry in presets().items()
    }
    assert {speed.model: speed.family for speed in speeds()}["cifar10_vit"] == "ViT"
