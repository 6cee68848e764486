"""One step of the Float16 optimizer against those of torch, DeepSpeed and loops over tensors, on a CPU.

    python benchmarks/optimizer.py --threads 2 --json step.json
    python benchmarks/optimizer.py --passes
    python benchmarks/optimizer.py --layers 24 --hidden 1024 --only "ours, fp16, main_grad"

Each candidate gets the same scaled gradients of a GPT-2 of the given size. Its time includes norm, overflow
check, clipping, the update of the half-precision weights and clearing the gradients. None of this is done
while the gradients are put in place. `--passes` times the parts instead. Fused AdamW alone, on fp32 weights
and gradients, is the floor: in each round, the other times are divided by its time.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from optimizer_passes import compare_passes
from optimizer_peers import (
    ADAMW,
    CLIP,
    SCALE,
    Peer,
    deepspeed_bf16,
    deepspeed_fp16,
    fill,
    fill_main,
    fused_adamw,
    loops,
    parameters,
    start_deepspeed,
    torch_scaler,
)
from timing import keep_freed_memory, parser, positive, print_table, ratio, seconds

import megalowbit as mlb

FLOOR = "AdamW fused, fp32, alone"
Shapes = Sequence[tuple[int, ...]]
Make = Callable[[Shapes, Sequence[torch.Tensor]], Peer]


def ours(
    shapes: Shapes, gradients: Sequence[torch.Tensor], *, dtype: torch.dtype, has_main_grad: bool
) -> Peer:
    weights = parameters(shapes, dtype)
    is_fp16 = dtype == torch.float16
    optimizer = mlb.Float16OptimizerWithFloat16Params(
        torch.optim.AdamW(weights, **ADAMW, fused=True),
        clip_grad=CLIP,
        grad_scaler=mlb.DynamicGradScaler(initial_scale=SCALE) if is_fp16 else None,
        params_have_main_grad=has_main_grad,
        bf16=not is_fp16,
    )

    def step() -> None:
        optimizer.step()
        assert all(weight.grad is None for weight in weights), "the step has not cleared all gradients"

    return Peer(partial(fill_main if has_main_grad else fill, weights, gradients), step)


# Two lists, because all candidates together need more memory than most machines have.
FP16: dict[str, Make] = {
    FLOOR: fused_adamw,
    "ours, fp16, main_grad": partial(ours, dtype=torch.float16, has_main_grad=True),
    "ours, fp16, half .grad": partial(ours, dtype=torch.float16, has_main_grad=False),
    "torch GradScaler, fp32": torch_scaler,
    "DeepSpeed FP16": partial(deepspeed_fp16, is_flat=True),
    "DeepSpeed FP16, unfused": partial(deepspeed_fp16, is_flat=False),
    "loops over tensors, fp16": loops,
}
BF16: dict[str, Make] = {
    FLOOR: fused_adamw,
    "ours, bf16, main_grad": partial(ours, dtype=torch.bfloat16, has_main_grad=True),
    "ours, bf16, half .grad": partial(ours, dtype=torch.bfloat16, has_main_grad=False),
    "DeepSpeed BF16": deepspeed_bf16,
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--layers", type=positive, default=12)
    options.add_argument("--hidden", type=positive, default=768)
    options.add_argument("--vocabulary", type=positive, default=50257)
    names = [name for name in (*FP16, *BF16) if name != FLOOR]
    options.add_argument("--only", action="append", choices=names, metavar="NAME", help=", ".join(names))
    options.add_argument(
        "--passes", action="store_true", help="time the passes one by one instead of full steps"
    )
    options.add_argument("--json", type=Path, help="file for all times")
    chosen = options.parse_args()
    if chosen.device != "cpu":
        options.error("the peers run on a CPU only: leave --device out")
    torch.set_num_threads(chosen.threads)
    shapes = gpt2_shapes(chosen.layers, chosen.hidden, chosen.vocabulary)
    count = sum(torch.Size(shape).numel() for shape in shapes)
    print(f"torch {torch.__version__}, {chosen.threads} threads, {chosen.rounds} rounds")
    print(f"{count / 1e6:.1f} M parameters in {len(shapes)} tensors")
    if chosen.passes:
        found = compare_passes(shapes, chosen.rounds)
    else:
        start_deepspeed()
        found = {
            title: compare(title, candidates, shapes, chosen)
            for title, candidates in (("fp16 and fp32", FP16), ("bf16", BF16))
        }
    if chosen.json:
        settings = {"threads": chosen.threads, "parameters": count, "tensors": len(shapes)}
        chosen.json.write_text(json.dumps({**settings, "seconds": found}, indent=1))


def gpt2_shapes(layers: int, hidden: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Parameter shapes of a GPT-2 whose output projection is tied to the embedding."""
    norm = [(hidden,), (hidden,)]
    attention = [(hidden, 3 * hidden), (3 * hidden,), (hidden, hidden), (hidden,)]
    mlp = [(hidden, 4 * hidden), (4 * hidden,), (4 * hidden, hidden), (hidden,)]
    return [(vocabulary, hidden), (1024, hidden), *layers * [*norm, *attention, *norm, *mlp], *norm]


def compare(
    title: str, candidates: dict[str, Make], shapes: Shapes, options: argparse.Namespace
) -> dict[str, list[float]]:
    chosen = {
        name: make
        for name, make in candidates.items()
        if name == FLOOR or not options.only or name in options.only
    }
    if len(chosen) == 1:
        return {}
    torch.manual_seed(0)
    gradients = [
        torch.randn(shape).to(torch.float16) for shape in shapes
    ]  # exact in fp16; `fill` rounds them to bf16 for the list BF16
    peers = {name: make(shapes, gradients) for name, make in chosen.items()}
    times: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(options.rounds + 2):  # two for warm-up
        for name, peer in peers.items():
            peer.prepare()
            taken = seconds(peer.step, "cpu")
            if number >= 2:
                times[name].append(taken)
    print_table(f"one optimizer step, {title}", times, FLOOR)
    slow = "loops over tensors, fp16"
    for name in times:
        if slow in times and name.startswith("ours"):
            print(f"  {name:<30}{ratio(times, slow, name):8.2f} × faster than {slow}")
    del peers
    gc.collect()
    return times


if __name__ == "__main__":
    keep_freed_memory()
    main()
