"""BitLinear against nn.Linear, quantisers against a copy: interleaved in one run, medians and ratios.

    python benchmarks/layer.py --device cpu --threads 2

Every round times each candidate once, in turn, so that a machine that slows down slows all of them. The
ratio is the median over rounds of candidate / peer. `--device cuda` times with CUDA events.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import megalowbit as mlb

SHAPES = ((1024, 128, 512), (4096, 768, 3072), (4096, 2048, 2048))  # tokens, in_features, out_features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.device}, {options.threads} threads, {options.rounds} rounds")
    for shape in SHAPES:
        compare(
            f"forward + backward, {shape[0]} tokens × {shape[1]}→{shape[2]}, bf16",
            {
                "nn.Linear bf16": training_step(torch.nn.Linear, *shape, torch.bfloat16, options.device),
                "BitLinear nvfp4": training_step(mlb.BitLinear, *shape, torch.bfloat16, options.device),
                "nn.Linear fp32": training_step(torch.nn.Linear, *shape, torch.float32, options.device),
            },
            options,
        )
    x = torch.randn(4096, 4096, device=options.device, dtype=torch.bfloat16)
    quantizers = {name: mlb.quantizer(name) for name in mlb.quantizer_names() if name != "fp32"}
    candidates: dict[str, Callable[[], object]] = {"clone": x.clone}
    candidates |= {name: lambda q=each: q.quantize(x) for name, each in quantizers.items()}
    compare("quantise 4096 × 4096, bf16", candidates, options)


def training_step(
    layer_class: type[torch.nn.Linear],
    tokens: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    device: str,
) -> Callable[[], None]:
    torch.manual_seed(0)
    layer = layer_class(inputs, outputs, device=device, dtype=dtype)
    x = torch.randn(tokens, inputs, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(tokens, outputs, device=device, dtype=dtype)

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x).backward(grad)

    return step


def compare(title: str, candidates: dict[str, Callable[[], object]], options: argparse.Namespace) -> None:
    for run in candidates.values():  # warm-up
        run()
        run()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(options.rounds):
        for name, run in candidates.items():
            times[name].append(seconds(run, options.device))
    peer = next(iter(candidates))
    print(f"\n{title}")
    for name, values in times.items():
        ratio = statistics.median(a / b for a, b in zip(values, times[peer], strict=True))
        median, least = statistics.median(values) * 1e3, min(values) * 1e3
        print(f"  {name:<20}{median:9.2f} ms  (min {least:8.2f})  {ratio:6.2f} × {peer}")


def seconds(run: Callable[[], object], device: str) -> float:
    if device == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


if __name__ == "__main__":
    main()
