"""What `fast` returns behaves as a module, and its CUDA graphs are bounded in memory and safe in threads."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import allmlp
from allmlp.errors import UserError
from allmlp.inference import FastModel, fast, graphs
from allmlp.inference.cpu import CpuFastEncoder
from allmlp.inference.gpu import GpuFastEncoder
from allmlp.inference.gpu_fp8 import GpuFp8Encoder
from allmlp.inference.graphs import MAX_KINDS, CudaGraphs, batch_bucket
from allmlp.inference.model import UnfusedModel
from allmlp.lora import Lora
from allmlp.models.encoder import EncoderModel
from allmlp.quantization import Quantization

CONVERSIONS: dict[str, tuple[str, Callable[[Any], FastModel]]] = {
    "mixer": ("mixer_nano", partial(fast, batch_size=2)),
    "resmlp": ("resmlp_nano", partial(fast, batch_size=2)),
    "gmlp": ("gmlp_nano", partial(fast, batch_size=2)),
    "vit": ("vit_nano", partial(fast, batch_size=2)),
    "gpu mixer": ("mixer_nano", lambda model: GpuFastEncoder(model, torch.float32)),
    "gpu resmlp": ("resmlp_nano", lambda model: GpuFastEncoder(model, torch.float32)),
    "gpu gmlp": ("gmlp_nano", lambda model: GpuFastEncoder(model, torch.float32)),
    "fp8": ("mixer_nano", lambda model: GpuFp8Encoder(model, torch.float32)),
    "fp8 resmlp": ("resmlp_nano", lambda model: GpuFp8Encoder(model, torch.float32)),
    "fp8 gmlp": ("gmlp_nano", lambda model: GpuFp8Encoder(model, torch.float32)),
    "fp8 amlp": ("amlp_nano", lambda model: GpuFp8Encoder(model, torch.float32)),
}


def create(name: str, seed: int = 0, **options: Any) -> EncoderModel:
    model = allmlp.create(name, overrides={"depth": "2"}, seed=seed, **options).eval()
    assert isinstance(model, EncoderModel)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


@pytest.fixture(params=CONVERSIONS)
def conversion(request: pytest.FixtureRequest) -> tuple[EncoderModel, FastModel, Tensor]:
    name, convert = CONVERSIONS[request.param]
    model = create(name)
    return model, convert(model), model.dummy_inputs(2)[0]


def memory(module: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}


# --- modules ---------------------------------------------------------------------------------------------------


def test_parameters_are_frozen_and_all_tensors_registered(conversion: tuple[EncoderModel, FastModel, Tensor]) -> None:
    model, converted, _ = conversion
    assert not any(weight.requires_grad for weight in converted.parameters())
    assert not any(module.training for module in converted.modules())
    assert not memory(model) & memory(converted)
    state = converted.state_dict()
    assert {name.split(".")[0] for name in state} <= {"stem_and_head", "blocks", "deferred_bias", "model"}
    for module in converted.modules():
        assert not [name for name, value in vars(module).items() if isinstance(value, Tensor)]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(
    conversion: tuple[EncoderModel, FastModel, Tensor], duplicate: Callable[[FastModel], FastModel]
) -> None:
    _, converted, x = conversion
    expected = converted(x)
    twin = duplicate(converted)
    assert torch.equal(twin(x), expected) and not memory(twin) & memory(converted)
    assert twin.graphs is not converted.graphs
    for weight in (*twin.parameters(), *twin.buffers()):
        weight.zero_()
    assert torch.equal(converted(x), expected)


def test_later_changes_to_the_original_have_no_effect(conversion: tuple[EncoderModel, FastModel, Tensor]) -> None:
    model, converted, x = conversion
    expected = converted(x)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert torch.equal(converted(x), expected)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_state_of_another_conversion(name: str) -> None:
    preset, convert = CONVERSIONS[name]
    first, second = (create(preset, seed) for seed in (1, 2))
    (x,) = first.dummy_inputs(2)
    converted, other = convert(first), convert(second)
    assert not torch.equal(converted(x), other(x))
    converted.load_state_dict(other.state_dict())
    assert torch.equal(converted(x), other(x))
    with pytest.raises(allmlp.UserError, match="load them into the original, then convert") as error:
        converted.load_state_dict(first.state_dict())
    assert "\n" not in str(error.value)


def test_it_stays_on_its_device_in_its_dtype(conversion: tuple[EncoderModel, FastModel, Tensor]) -> None:
    _, converted, x = conversion
    expected = converted(x)
    assert torch.equal(converted.to("cpu").to(torch.float32).float().cpu()(x), expected)
    changes: list[Callable[[nn.Module], Any]] = [
        nn.Module.half,
        nn.Module.double,
        lambda model: model.to("meta"),
        lambda model: model.to(torch.bfloat16),
        lambda model: nn.Sequential(model).to(torch.bfloat16),
    ]
    for change in changes:
        with pytest.raises(allmlp.UserError, match="stays on cpu in float32: convert the original again"):
            change(converted)
    assert torch.equal(converted(x), expected)


def test_moving_to_its_own_dtype_keeps_more_precise_weights() -> None:
    converted = GpuFastEncoder(create("gmlp_nano"), torch.bfloat16)
    before = converted.state_dict()
    assert {value.dtype for value in before.values()} == {torch.bfloat16, torch.float32}
    after = converted.to(torch.bfloat16).state_dict()
    assert all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items())


def test_training_is_refused(conversion: tuple[EncoderModel, FastModel, Tensor]) -> None:
    converted = conversion[1]
    with pytest.raises(allmlp.UserError, match="train the original, then convert"):
        converted.train()
    assert converted.eval() is converted and not converted.training


def test_outputs_can_be_inputs_of_a_trained_head(conversion: tuple[EncoderModel, FastModel, Tensor]) -> None:
    _, converted, x = conversion
    head = nn.Linear(converted(x).shape[1], 2)
    head(converted(x)).sum().backward()
    assert head.weight.grad is not None


def test_input_on_another_device(conversion: tuple[EncoderModel, FastModel, Tensor]) -> None:
    _, converted, x = conversion
    with pytest.raises(allmlp.UserError, match=r"the input is on meta and the model on cpu: move it with .to\('cpu'\)"):
        converted(x.to("meta"))


def test_arrays_are_refused(conversion: tuple[EncoderModel, FastModel, Tensor]) -> None:
    _, converted, x = conversion
    for given, kind in ((x.numpy(), "ndarray"), (x.tolist(), "list")):
        with pytest.raises(
            UserError, match=rf"^a fast model takes a tensor, not a {kind}: convert it with torch\.as_t"
        ):
            converted(given)


def test_a_pickle_loads_on_the_same_kind_of_device_only() -> None:
    converted = fast(create("mixer_nano"), batch_size=2)
    converted.device_type = "cuda"  # as if it had been saved on a GPU
    with pytest.raises(allmlp.UserError, match="converted on cuda, not cpu: convert the original again"):
        pickle.loads(pickle.dumps(converted))


def test_memory_is_freed_with_the_last_reference(conversion: tuple[EncoderModel, FastModel, Tensor]) -> None:
    """Not at some later garbage collection, which may come during a capture of someone else's."""
    name = type(conversion[1])
    model = create("gmlp_nano" if name is not UnfusedModel else "vit_nano")
    gc.disable()
    try:
        converted = fast(model, batch_size=2) if name is UnfusedModel else name(model, torch.float32)  # type: ignore[call-arg]
        converted(model.dummy_inputs(1)[0])
        reference = weakref.ref(converted)
        del converted
        assert reference() is None
    finally:
        gc.enable()


def test_masks_and_caches_of_unfused_models() -> None:
    model = create("bert_tiny")
    (ids,) = model.dummy_inputs(2)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 5:] = False
    torch.testing.assert_close(fast(model)(ids, mask), model(ids, mask).detach())
    with pytest.raises(TypeError):
        fast(model)(ids, masks=mask)


@pytest.mark.parametrize("name", ["mixer_nano", "vit_nano"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_arguments_besides_the_images_are_used_or_refused(name: str, dtype: torch.dtype) -> None:
    model = create(name)
    (images,) = model.dummy_inputs(2)
    with torch.no_grad():
        logits, pooled = model(images), model(images, pre_logits=True)
    converted = UnfusedModel(model, dtype) if name == "vit_nano" else CpuFastEncoder(model, dtype)
    torch.testing.assert_close(converted(images, pre_logits=False).float(), logits, atol=0.2, rtol=0.1)
    if name == "mixer_nano":
        with pytest.raises(UserError, match="images alone"):
            converted(images, pre_logits=True)
    else:
        torch.testing.assert_close(converted(images, pre_logits=True).float(), pooled, atol=0.2, rtol=0.1)


@pytest.mark.parametrize("name", ["mixer_nano", "vit_nano"])
def test_a_model_of_any_image_size_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="one image size"):
        fast(create(name, dynamic=True))


# --- models that are not as their config builds them --------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixer_nano", "gmlp_nano", "vit_nano"])
@pytest.mark.parametrize("change", ["lora", "quantization", "parametrization"])
def test_weights_that_are_computed(name: str, change: str) -> None:
    """The conversion has the weights of evaluation, in all of the model, and leaves the original as it is."""
    model = create(name, num_classes=4)
    (x,) = model.dummy_inputs(2)
    plain = model(x).detach()
    if change == "lora":
        Lora(rank=2).apply(model)
        for key, weight in model.named_parameters():
            nn.init.normal_(weight, std=0.1) if "lora_b" in key else None
    elif change == "quantization":
        Quantization(bits=3, noise=0.5).apply(model)
    else:
        for linear in [module for module in model.modules() if isinstance(module, nn.Linear)]:
            nn.utils.parametrize.register_parametrization(linear, "weight", nn.Tanh())
    expected = model(x).detach()
    assert (expected - plain).norm() > 0.01 * plain.norm()
    for mode in (False, True):
        model.train(mode)
        torch.testing.assert_close(fast(model, batch_size=2)(x), expected, rtol=1e-4, atol=1e-4)
        assert all(module.training == mode for module in model.modules())


def replace_head(model: EncoderModel) -> None:
    model.head = nn.Sequential(nn.Dropout(), nn.Linear(model.spec.width, 4))


def replace_linear(model: EncoderModel) -> None:
    model.head.proj = nn.Linear(model.spec.width, 7)


def replace_linear_without_bias(model: EncoderModel) -> None:
    model.head.proj = nn.Linear(model.spec.width, 4, bias=False)


def remove_block(model: EncoderModel) -> None:
    del model.blocks[1]


def prune_with_hooks(model: EncoderModel) -> None:
    prune.l1_unstructured(model.stem.proj, "weight", 0.5)


def add_layer(model: EncoderModel) -> None:
    model.stem.later = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_head, "head is a Sequential, not the ClassifierHeadLayer of the config: fast"),
        (replace_linear, r"head.proj.weight is \[7, 128\], not the \[4, 128\] of the config: fast"),
        (replace_linear_without_bias, r"head.proj.bias is None, not the \[4\] of the config: fast"),
        (remove_block, "blocks.1 is missing, not the BlockLayer of the config: fast"),
        (prune_with_hooks, "stem.proj.weight is set by a hook: make it a parameter first"),
        (add_layer, "stem.later is not in the config: fast"),
    ],
)
def test_a_changed_model_is_refused(change: Callable[[EncoderModel], None], message: str) -> None:
    model = create("mixer_nano", num_classes=4)
    change(model)
    with pytest.raises(UserError, match=message):
        fast(model)


def test_a_linear_layer_of_torch_is_as_good() -> None:
    model = create("mixer_nano", num_classes=4)
    model.head.proj = nn.Linear(model.spec.width, 4)  # type: ignore[union-attr]
    (x,) = model.dummy_inputs(2)
    torch.testing.assert_close(fast(model, batch_size=2)(x), model(x).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e5m2, torch.complex64, "int4"])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(UserError, match="a model computes in float32, float16, bfloat16 or float64, not in"):
        fast(create("mixer_nano"), dtype)


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, "8"])
def test_batch_sizes_are_checked(batch_size: Any) -> None:
    with pytest.raises(UserError, match=f"batch_size is a number of examples from 1 on, not {batch_size!r}"):
        fast(create("mixer_nano"), batch_size=batch_size)


# --- CUDA graphs, with recording and streams replaced by plain calls --------------------------------------------


class FakeStream:
    def __init__(self) -> None:
        self.waits = 0

    def wait_event(self, event: object) -> None:
        self.waits += 1

    def record_event(self, event: object) -> object:
        return event or object()


class FakeGraph:
    def __init__(self, run: Callable[[], Any]) -> None:
        self.replay = run


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    stream = FakeStream()
    monkeypatch.setattr(graphs, "record", lambda run, pool, stream: (run(), FakeGraph(run))[1])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    return stream


def test_buckets() -> None:
    sizes = range(1, 3000)
    buckets = [batch_bucket(size) for size in sizes]
    assert buckets == sorted(buckets) and all(size <= bucket for size, bucket in zip(sizes, buckets, strict=True))
    assert max(bucket / size for size, bucket in zip(sizes, buckets, strict=True)) < 1.125
    assert all(batch_bucket(size) == size for size in (*range(1, 17), 24, 32, 64, 96, 128, 256, 512, 1024))
    assert len({bucket for bucket in buckets if bucket <= 1024}) == 8 + 8 * 7


@pytest.mark.parametrize("encoder", [CpuFastEncoder, GpuFastEncoder])
def test_graphs_give_the_outputs_whatever_was_in_the_padding(encoder: type, no_cuda: FakeStream) -> None:
    model = create("gmlp_nano")
    converted = encoder(model, torch.float32)
    own = CudaGraphs()
    (x,) = model.dummy_inputs(34)
    own.replay(converted.compute, (x * torch.nan,), torch.float32, None)
    for size in (33, 1, 17, 34, 2):
        actual = own.replay(converted.compute, (x[:size].double(),), torch.float32, None)
        torch.testing.assert_close(actual, converted(x[:size]))
        assert not actual.is_inference()
    with torch.inference_mode():
        own.replay(converted.compute, (x[:3],), torch.float32, None)
    own.replay(converted.compute, (x[:3],), torch.float32, None)


def test_memory_is_that_of_the_largest_batch(no_cuda: FakeStream) -> None:
    own = CudaGraphs()
    for size in (*range(1, 100), 250, *range(100, 1, -1)):
        output = own.replay(lambda x: x + 1, (torch.ones(size, 3),), torch.float32, None)
        assert output.shape == (size, 3) and (output == 2).all()
        (group,) = own.groups.values()
        assert len(group.inputs[0]) == len(group.output) == max(group.graphs)
    assert len(group.output) == 256 and len(group.graphs) == len({batch_bucket(size) for size in (*range(2, 101), 250)})


def test_few_kinds_of_inputs_are_kept(no_cuda: FakeStream) -> None:
    own = CudaGraphs()
    for length in (*range(1, 30), 20):
        own.replay(
            lambda ids, mask: ids * mask, (torch.ones(2, length).long(), torch.ones(2, length) > 0), torch.half, ""
        )
    assert len(own.groups) == MAX_KINDS
    for kind in ("a", "b"):  # the same shapes, another function
        scale = ord(kind)
        y = own.replay(lambda x, scale=scale: x * scale, (torch.ones(2, 3),), torch.float32, kind)
        assert (y == scale).all()


def test_threads_wait_for_each_other(no_cuda: FakeStream) -> None:
    own, wrong = CudaGraphs(), []

    def compute(x: Tensor) -> Tensor:
        time.sleep(0.001)  # another thread would overwrite x now
        return x * 2

    def work(value: int) -> None:
        for size in (1, 2, 3) * 5:
            y = own.replay(compute, (torch.full((size, 1), value),), torch.float32, None)
            if not (len(y) == size and (y == 2 * value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert no_cuda.waits == 4 * 15 - 1  # each call but the first waits for the one before, on whatever stream it was


def test_capture_and_replay_run_under_the_device_guard(no_cuda: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []

    @contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(graphs, "device_guard", guard)
    calls: list[list[torch.device]] = []
    x = torch.ones(2, 3)
    CudaGraphs().replay(lambda x: (calls.append([*current]), x + 1)[1], (x,), torch.float32, None)
    assert calls == [[x.device]] * 3 and not current  # warming up, capturing, replaying


def test_an_error_names_the_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = create("mixer_nano")
    converted, (x,) = fast(model, batch_size=2), model.dummy_inputs(1)
    branch = converted.blocks[1]["channel"]  # type: ignore[index]

    def fail(z: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(branch, "forward", fail)
    with pytest.raises(RuntimeError, match=r"^blocks.1.channel: CUDA error: an illegal memory access"):
        converted(x)


def test_out_of_memory_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = create("mixer_nano")
    converted = fast(model, batch_size=2)

    def fail(z: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(converted.blocks[0]["token"], "forward", fail)  # type: ignore[index]
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
        converted(model.dummy_inputs(1)[0])


# --- on a GPU --------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("name", ["gmlp_nano", "vit_nano"])
def test_sizes_copies_threads_and_streams_on_a_gpu(name: str) -> None:
    model = create(name, device="cuda")
    converted = fast(model, torch.float32)
    (x,) = model.dummy_inputs(40)
    expected = model(x).detach()
    converted(x * torch.nan)
    for size in (33, 1, 40):
        torch.testing.assert_close(converted(x[:size]), expected[:size], rtol=1e-3, atol=1e-3)
    for twin in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        torch.testing.assert_close(twin(x[:3]), expected[:3], rtol=1e-3, atol=1e-3)
    converted.load_state_dict(fast(create(name, seed=5, device="cuda"), torch.float32).state_dict())
    results, wrong = {size: converted(x[:size]) for size in (1, 2, 5, 17)}, []
    assert not torch.allclose(results[5], expected[:5], rtol=1e-3, atol=1e-3)

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for size in [*results] * 10:
                if not torch.equal(converted(x[:size]), results[size]):
                    wrong.append(size)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
@needs_gpu
def test_workspaces_of_matrix_products_live_as_long_as_the_graphs() -> None:
    """torch.compile(mode="reduce-overhead") frees the workspaces of all streams, also those that other graphs use."""
    first, second = (create("mixer_b16", seed, device="cuda") for seed in (1, 2))
    (x,) = first.dummy_inputs(16)
    one, two = fast(first), fast(second)
    one(x)
    expected = two(x)
    del one
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((2**23,), 7, device="cuda") for _ in range(8)]
    for _ in range(3):
        assert torch.equal(two(x), expected)
    assert all((other == 7).all() for other in others)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_beside_the_graphs_of_torch_compile() -> None:
    """Which frees the workspaces of matrix products that other graphs may still use; then models come and go."""
    peer = torch.compile(
        nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda(), mode="reduce-overhead"
    )
    models = [create(name, device="cuda") for name in ("mixer_nano", "resmlp_nano", "gmlp_nano")]
    inputs = [model.dummy_inputs(8)[0] for model in models]
    with torch.inference_mode():
        first = fast(models[0])
        first(inputs[0])
        kept = [fast(model) for model in models]
        expected = [converted(x) for converted, x in zip(kept, inputs, strict=True)]
        del first
        for turn in range(12):
            torch.compiler.cudagraph_mark_step_begin()
            peer(torch.randn(8 + turn % 3, 256, device="cuda"))
            short_lived = fast(models[turn % 3])
            short_lived(inputs[turn % 3][: turn % 8 + 1])
            torch.cuda.empty_cache()
            for converted, x, result in zip(kept, inputs, expected, strict=True):
                assert torch.equal(converted(x), result)
    torch.cuda.synchronize()


@pytest.mark.gpu
@needs_gpu
def test_a_new_batch_size_compiles_and_tunes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = create("gmlp_nano", device="cuda")
    converted = fast(model)
    converted(model.dummy_inputs(2)[0])

    def refuse(kernel: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"{kernel.__name__} is compiled anew")

    monkeypatch.setattr("triton.runtime.jit.JITFunction._do_compile", refuse)
    monkeypatch.setattr("triton.testing.do_bench", refuse)
    for size in (1, 3, 16, 50, 129, 400):
        converted(model.dummy_inputs(size)[0])
