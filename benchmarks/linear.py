"""BitLinear against nn.Linear: time of forward + backward, and bytes kept for backward.

    python benchmarks/linear.py --device cpu --threads 2
    python benchmarks/linear.py --device cuda --shape 8192x4096x4096 --shape 8192x4096x11008 \\
        --recipe nvfp4 --recipe '{"base": "mxfp4", "gemm": "fp8"}'

Candidates run interleaved; the ratio is the median over rounds of candidate / bf16 nn.Linear.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from timing import interleaved, keep_freed_memory, print_table

import megalowbit as mlb

SHAPES = ("1024x128x512", "4096x768x3072", "4096x2048x2048")  # tokens, in_features, out_features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shape", action="append", help="tokens x in_features x out_features")
    parser.add_argument("--recipe", action="append", help="a name, or a block as JSON; any number of them")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.device}, {options.threads} threads, {options.rounds} rounds")
    for shape in options.shape or SHAPES:
        tokens, inputs, outputs = map(int, shape.split("x"))
        compare(tokens, inputs, outputs, options)


def compare(tokens: int, inputs: int, outputs: int, options: argparse.Namespace) -> None:
    x = torch.randn(tokens, inputs, device=options.device)
    grad = torch.randn(tokens, outputs, device=options.device)
    layers = {
        "nn.Linear bf16": torch.nn.Linear(inputs, outputs, device=options.device, dtype=torch.bfloat16),
        "nn.Linear fp32": torch.nn.Linear(inputs, outputs, device=options.device),
    }
    for text in options.recipe or ["nvfp4"]:
        recipe = mlb.recipe(json.loads(text) if text.startswith("{") else text)
        layers[f"BitLinear {recipe.name}"] = mlb.BitLinear(
            inputs, outputs, recipe=recipe, device=options.device, dtype=torch.bfloat16
        )
    runs = {name: training_step(layer, x, grad) for name, layer in layers.items()}
    times = interleaved(runs, options.rounds, options.device)
    print_table(f"forward + backward, {tokens} tokens × {inputs}→{outputs}", times, "nn.Linear bf16")
    peer = saved_bytes_a_token(layers["nn.Linear bf16"], x)
    for name, layer in layers.items():
        kept = saved_bytes_a_token(layer, x)
        print(f"  {name:<30}{kept:10.1f} bytes kept for backward a token  {kept / peer:6.3f} ×")


def training_step(layer: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> Callable[[], None]:
    dtype = next(layer.parameters()).dtype
    x, grad = x.to(dtype, copy=True).requires_grad_(), grad.to(dtype)

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        layer(x).backward(grad)

    return step


def saved_bytes_a_token(layer: torch.nn.Module, x: torch.Tensor) -> float:
    """Bytes autograd keeps for each further token: what a layer keeps of its weight does not count."""
    x = x.to(next(layer.parameters()).dtype)
    half = len(x) // 2
    return (saved_bytes(layer, x) - saved_bytes(layer, x[:half])) / (len(x) - half)


def saved_bytes(layer: torch.nn.Module, x: torch.Tensor) -> int:
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x.clone().requires_grad_())
    return sum(kept.values())


if __name__ == "__main__":
    keep_freed_memory()
    main()
