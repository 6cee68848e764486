"""GradBuffer against that of another revision: `python benchmarks/grad_buffer.py --against HEAD~1`.

Each round times the backward into both buffers, by process time:

    list    nodes that return finished bf16 gradients of GPT-2 124M (148 tensors): times autograd's copy of
    each,
            the hooks and the addition to fp32
    model   the backward of a two-block GPT-2, where hooks weigh most
    hooks   as list, with one element in each tensor
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from timing import keep_freed_memory, parser, positive, print_table, seconds

from megalowbit.optim.gradients import buffer as grad_buffer

MODULE = "megalowbit/optim/gradients/buffer.py"
MICRO_BATCHES = {"list": 2, "model": 8, "hooks": 8}


class ReturnGradient(torch.autograd.Function):
    """A node with a precomputed gradient for its parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.gradient, None


def of_revision(revision: str) -> ModuleType:
    """The module at `revision`; it imports the rest of the package as checked out."""
    command = ["git", "show", f"{revision}:{MODULE}"]
    done = subprocess.run(command, check=False, capture_output=True, cwd=Path(__file__).parent)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "grad_buffer.py")
        path.write_bytes(done.stdout)
        spec = importlib.util.spec_from_file_location("grad_buffer_of_revision", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def gpt2_shapes(width: int) -> list[tuple[int, ...]]:
    """Parameter shapes; at width 768 those of GPT-2 124M."""
    block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *block * 12, (width,), (width,)]


def finished(module: ModuleType, gradients: list[torch.Tensor]) -> tuple[Any, Callable[[], torch.Tensor]]:
    parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in gradients]
    buffer = module.GradBuffer(parameters)
    pairs = list(zip(parameters, gradients, strict=True))
    return buffer, lambda: torch.stack([ReturnGradient.apply(*pair) for pair in pairs]).sum()  # type: ignore[no-untyped-call]


def model(module: ModuleType) -> tuple[Any, Callable[[], torch.Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": 64}
    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).bfloat16()
    tokens = torch.randint(0, 256, (2, 32))
    return module.GradBuffer(net.parameters()), lambda: net(tokens, labels=tokens).loss


def make(kind: str, module: ModuleType, width: int) -> tuple[Any, Callable[[], torch.Tensor]]:
    if kind == "model":
        return model(module)
    shapes = gpt2_shapes(width) if kind == "list" else [(1,)] * 148
    return finished(module, [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes])


def backwards(arm: tuple[Any, Callable[[], torch.Tensor]], kind: str) -> float:
    """Seconds of the backward passes of one step."""
    buffer, forward = arm
    losses = [forward() for _ in range(MICRO_BATCHES[kind])]

    def run() -> None:
        for loss in losses:
            loss.backward()

    found = seconds(run, "cpu", time.process_time)
    buffer.zero()
    return found


def main() -> None:
    options_of = parser(__doc__ or "")
    options_of.add_argument("--against", default="HEAD", help="a git revision (default: %(default)s)")
    options_of.add_argument("--width", type=positive, default=768, help="of the list (default: %(default)s)")
    options = options_of.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    modules = {options.against: of_revision(options.against), "here": grad_buffer}
    for kind in MICRO_BATCHES:
        arms = {name: make(kind, module, options.width) for name, module in modules.items()}
        times: dict[str, list[float]] = {name: [] for name in arms}
        for each in range(-2, options.rounds):
            for name in list(arms) if each % 2 else reversed(list(arms)):
                found = backwards(arms[name], kind)
                times[name] += [found] * (each >= 0)
        print_table(kind, times, options.against)
        medians = {name: statistics.median(values) for name, values in times.items()}
        print(f"  ratio of medians {medians['here'] / medians[options.against]:.3f}")


if __name__ == "__main__":
    main()
