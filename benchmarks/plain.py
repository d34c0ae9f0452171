"""timm and `allmlp.fast`, timed without any code of `allmlp bench`, which must agree with this within 3 %."""

import argparse
import random
import statistics
import timeit

import timm
import torch

import allmlp


def build(name, side, x):
    if side == "fast":
        ours = allmlp.fast(allmlp.create(name, seed=0, device=x.device).eval(), x.dtype, batch_size=len(x))
        return lambda: ours(x)
    model = timm.create_model(name.replace("resmlp_s", "resmlp_") + "_224").eval().to(x.device, x.dtype)
    if side not in ("eager", "compiled"):  # the other modes of torch.compile are at their best in channels_last, too
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    mode = side if side in ("reduce-overhead", "max-autotune") else "default"
    call = model if side == "eager" else torch.compile(model, dynamic=False, mode=mode)
    return lambda: call(x)


def seconds(call):
    call()  # while the device is busy with this one, the next ones are launched
    if options.device == "cpu":
        return timeit.timeit(call, number=options.calls) / options.calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    timeit.timeit(call, number=options.calls)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / options.calls


parser = argparse.ArgumentParser(description=__doc__)
for option, default in {"batch-size": 256, "calls": 40, "rounds": 7, "device": "cuda"}.items():
    parser.add_argument(f"--{option}", type=type(default), default=default)
parser.add_argument("--models", default="mixer_b16,resmlp_s24,gmlp_s16")
parser.add_argument("--sides", default="compiled,channels_last,reduce-overhead,fast", help="also eager, max-autotune")
options = parser.parse_args()
torch.backends.cudnn.benchmark = True
dtype, size = (torch.float32, 512) if options.device == "cpu" else (torch.bfloat16, 8192)
x = torch.randn(options.batch_size, 3, 224, 224, device=options.device, dtype=dtype)
matrix = torch.randn(size, size, device=options.device, dtype=dtype)
for name in options.models.split(","):
    with torch.inference_mode():
        calls = {side: build(name, side, x) for side in options.sides.split(",")} | {"matmul": lambda: matrix @ matrix}
        orders = [random.sample(list(calls), len(calls)) for _ in range(options.rounds + 1)]
        rounds = [{side: seconds(calls[side]) for side in order} for order in orders][1:]  # the first warms up
    for side in calls:
        amount, unit = (2 * size**3 / 1e9, "GFLOP") if side == "matmul" else (options.batch_size, "images")
        columns = [amount / one[side] for one in rounds], [one[side] / one["fast"] for one in rounds]
        rate, ratio = (statistics.quantiles(column, n=4, method="inclusive") for column in columns)
        print(f"{name:10} {side:15} {rate[1]:9,.1f} {unit}/s ({rate[0]:,.1f} to {rate[2]:,.1f}), time / fast", end=" ")
        print(f"{ratio[1]:.3f} ({ratio[0]:.3f} to {ratio[2]:.3f})", flush=True)
    torch.compiler.reset()  # the models share their code, and one function is compiled eight times at most
