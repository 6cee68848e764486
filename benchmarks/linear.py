"""BitLinear against nn.Linear: time of forward + backward, and bytes kept for backward.

    python benchmarks/linear.py --device cpu --threads 2
    python benchmarks/linear.py --device cuda --shape 8192x4096x4096 --shape 8192x4096x11008 \\
        --recipe nvfp4 --recipe '{"base": "mxfp4", "gemm": "fp8"}' \\
        --recipe '{"base": "nvfp4", "split_grad_output": {"rank": 60}}'

Candidates run interleaved; the ratio is the median over rounds of candidate / bf16 nn.Linear. If a recipe
splits output gradients, a peer does the same in plain PyTorch operations. With --main-grad, all layers sum
their gradients in fp32, as under the optimizers of this package. MEGALOWBIT_CPU_GEMM sets the dtype of our
products on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from arguments import recipe, shape
from eager_split import EagerSplitLinear
from timing import cache_note, interleaved, keep_freed_memory, parser, print_table

import megalowbit as mlb
from megalowbit.optim.gradients.buffer import GradBuffer

SHAPES = ((1024, 128, 512), (4096, 768, 3072), (4096, 2048, 2048))  # tokens, in_features, out_features


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", action="append", type=shape, help="tokens x in_features x out_features")
    options.add_argument("--recipe", action="append", type=recipe, help="a name, or a block as JSON")
    options.add_argument("--counts", action="store_true", help="also time each recipe with saturation counts")
    options.add_argument("--main-grad", action="store_true", help="sum gradients in fp32 main_grads")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    print(f"torch {torch.__version__}, {chosen.device}, {chosen.threads} threads, {chosen.rounds} rounds")
    for tokens, inputs, outputs in chosen.shape or SHAPES:
        compare(tokens, inputs, outputs, chosen)


def compare(tokens: int, inputs: int, outputs: int, options: argparse.Namespace) -> None:
    x = torch.randn(tokens, inputs, device=options.device)
    grad = torch.randn(tokens, outputs, device=options.device)
    if note := cache_note(2 * tokens * min(inputs, outputs), options.device):
        print(note)
    layers = {
        "nn.Linear bf16": torch.nn.Linear(inputs, outputs, device=options.device, dtype=torch.bfloat16),
        "nn.Linear fp32": torch.nn.Linear(inputs, outputs, device=options.device),
    }
    for each in options.recipe or [mlb.recipe("nvfp4")]:
        for is_counted in (False, True) if options.counts else (False,):
            layer = mlb.BitLinear(inputs, outputs, recipe=each, device=options.device, dtype=torch.bfloat16)
            layer.observer = mlb.GradientOverflowTracker() if is_counted else None
            layers[f"BitLinear {each.name}" + ", counted" * is_counted] = layer
    splits = [each.split_grad_output for each in options.recipe or [] if each.split_grad_output]
    if splits and tokens % 16 == inputs % 16 == outputs % 16 == 0:
        rank = splits[0].rank_of(inputs, outputs)
        peer = EagerSplitLinear(inputs, outputs, rank=rank, device=options.device)
        layers["split in eager PyTorch, fp32"] = peer
    if options.main_grad:
        for layer in layers.values():
            GradBuffer(layer.parameters())
    runs = {name: training_step(layer, x, grad) for name, layer in layers.items()}
    times = interleaved(runs, options.rounds, options.device)
    print_table(f"forward + backward, {tokens} tokens × {inputs}→{outputs}", times, "nn.Linear bf16")
    plain = saved_bytes_a_token(layers["nn.Linear bf16"], x)
    for name, layer in layers.items():
        kept = saved_bytes_a_token(layer, x)
        print(f"  {name:<30}{kept:10.1f} bytes kept for backward a token  {kept / plain:6.3f} ×")


def training_step(layer: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> Callable[[], None]:
    dtype = next(layer.parameters()).dtype
    x, grad = x.to(dtype, copy=True).requires_grad_(), grad.to(dtype)

    def step() -> None:
        if not hasattr(layer.weight, "main_grad"):  # otherwise a further micro-batch of the same step
            layer.zero_grad()
        x.grad = None
        layer(x).backward(grad)

    return step


def saved_bytes_a_token(layer: torch.nn.Module, x: torch.Tensor) -> float:
    """Bytes autograd keeps for each additional token; this excludes what a layer keeps of its weight."""
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
