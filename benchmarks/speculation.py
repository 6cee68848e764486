"""What a PrecisionController costs: forward + backward without one, between precision checks, and in checks.

    python benchmarks/speculation.py --threads 2
    python benchmarks/speculation.py --threads 1 --shape 512x256x1024 --layers 8 --cpu-time
    python benchmarks/speculation.py --device cuda --shape 8192x4096x4096 --verify-size 128

All layers run at INT8, so the variants differ only in their checks. Several layers form a chain in → out →
in …; `end_step` then reads one table and decides once for all of them. The last line is the average cost of a
step at the default intervals. Variants run interleaved; the ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from arguments import shape
from timing import interleaved, keep_freed_memory, parser, positive, print_table, ratio

import megalowbit as mlb
from megalowbit.speculation.precisions import recipe_with
from megalowbit.speculation.settings import SpeculationSettings

PEER = "no controller"


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--shape", type=shape, default=(4096, 768, 3072), help="tokens x in_features x out_features"
    )
    options.add_argument("--layers", type=positive, default=1, help="number of layers in the chain")
    options.add_argument(
        "--cpu-time", action="store_true", help="measure the CPU time of this process, for busy machines"
    )
    options.add_argument("--verify-size", type=positive, default=SpeculationSettings().verify_size)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    print(f"torch {torch.__version__}, {chosen.device}, {chosen.threads} threads, {chosen.rounds} rounds")
    tokens, inputs, outputs = chosen.shape
    x = torch.randn(tokens, inputs, device=chosen.device, dtype=torch.bfloat16)
    last = outputs if chosen.layers % 2 else inputs
    grad = torch.randn(tokens, last, device=chosen.device, dtype=torch.bfloat16)
    runs = {
        PEER: step_without(model_of(chosen), x, grad),
        "between checks": step_with(chosen, x, grad, every=1_000_000, verify_every=0),
        "check": step_with(chosen, x, grad, every=1, verify_every=0),
        "verified check": step_with(chosen, x, grad, every=1, verify_every=1),
    }
    clock = time.process_time if chosen.cpu_time else time.perf_counter
    times = interleaved(runs, chosen.rounds, chosen.device, clock)
    title = f"forward + backward at INT8, {tokens} tokens × {inputs}→{outputs}, bf16"
    print_table(title if chosen.layers == 1 else f"{title}, {chosen.layers} layers", times, PEER)
    print_average(times)


def model_of(options: argparse.Namespace) -> torch.nn.Module:
    """The layers in a model, which gives them names."""
    _, inputs, outputs = options.shape
    sizes = [(outputs, inputs) if number % 2 else (inputs, outputs) for number in range(options.layers)]
    model = torch.nn.Sequential(
        *(torch.nn.Linear(*size, device=options.device, dtype=torch.bfloat16) for size in sizes)
    )
    mlb.convert(model, "fp8")
    return model


def training_step(model: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> Callable[[], None]:
    x = x.clone().requires_grad_()

    def step() -> None:
        model.zero_grad()
        x.grad = None
        model(x).backward(grad)

    return step


def step_without(model: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> Callable[[], None]:
    for layer in mlb.bit_layers(model).values():
        layer.recipe = recipe_with(layer.recipe, ["int8"] * 3)
    return training_step(model, x, grad)


def step_with(
    options: argparse.Namespace, x: torch.Tensor, grad: torch.Tensor, *, every: int, verify_every: int
) -> Callable[[], None]:
    """A step under a controller that has chosen INT8 at its first check."""
    model = model_of(options)
    settings = {
        "candidates": ["int8", "bf16"],
        "threshold_db": 0,
        "every": every,
        "lookahead": 0,
        "verify_every": verify_every,
        "verify_size": options.verify_size,
    }
    controller = mlb.PrecisionController(model, settings)
    inner = training_step(model, x, grad)

    def step() -> None:
        controller.begin_step()
        inner()
        controller.end_step()

    step()
    assert controller.precision("0", "output") == "int8"
    return step


def print_average(times: dict[str, list[float]]) -> None:
    settings = SpeculationSettings()
    idle, check, verified = (
        ratio(times, name, PEER) for name in ("between checks", "check", "verified check")
    )
    share = 1 / settings.every
    checked = check + (verified - check) / settings.verify_every
    average = idle * (1 - share) + checked * share
    print(
        f"  on average {average:.3f} × {PEER} "
        f"(a check every {settings.every} steps, one of {settings.verify_every} verified)"
    )


if __name__ == "__main__":
    keep_freed_memory()
    main()
