"""The optimizer's passes over memory, each against torch's: `python benchmarks/optimizer.py --passes`.

Sizes are those of the full comparison. Gradients are scaled fp16 numbers; the fp32 gradients have equal
values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from optimizer_peers import ADAMW, SCALE
from timing import interleaved, print_table

from megalowbit.optim.kernels import cpu as cpu_kernels
from megalowbit.optim.kernels.cpu import AdamSettings, AdamTensors

Candidates = dict[str, Callable[[], object]]


def compare_passes(shapes: Sequence[tuple[int, ...]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Print a table of each pass; returns the seconds by title and name."""
    if not cpu_kernels.is_available():
        raise SystemExit(f"no CPU kernel: {cpu_kernels.why_unavailable()}")
    torch.manual_seed(0)
    halves = [torch.randn(shape).to(torch.float16) for shape in shapes]
    flat = torch.cat([half.flatten() for half in halves]).float()
    mains = list(flat.split([half.numel() for half in halves]))
    found = {}
    for title, candidates in (
        ("adding fp16 gradients to fp32", _adding(mains, halves)),
        ("norm of fp32 gradients", _norm(flat)),
        ("AdamW, half weights, cleared gradients", _update(mains)),
    ):
        found[title] = interleaved(candidates, rounds, "cpu")
        print_table(title, found[title], next(iter(candidates)))
    return found


def _adding(mains: Sequence[torch.Tensor], halves: Sequence[torch.Tensor]) -> Candidates:
    flats = [half.flatten() for half in halves]

    def by_torch() -> None:
        for main, half in zip(mains, flats, strict=True):
            main.add_(half)

    def by_kernel() -> None:
        for main, half in zip(mains, flats, strict=True):
            cpu_kernels.accumulate(main, half, 1.0)

    return {"torch add_": by_torch, "accumulate": by_kernel}


def _norm(flat: torch.Tensor) -> Candidates:
    pieces = list(flat.split(2**16))
    return {
        "torch _foreach_norm, pieces": lambda: torch._foreach_norm(pieces),
        "torch dot, fp32": lambda: torch.dot(flat, flat),
        "sums_of_squares, float64": lambda: cpu_kernels.sums_of_squares([flat]),
    }


def _update(gradients: Sequence[torch.Tensor]) -> Candidates:
    masters = [torch.nn.Parameter(torch.randn_like(gradient).mul_(0.02)) for gradient in gradients]
    halves = [master.detach().half() for master in masters]
    inner = torch.optim.AdamW(masters, **ADAMW, fused=True)
    inner.grad_scale, inner.found_inf = torch.tensor(SCALE), torch.tensor(0.0)  # type: ignore[attr-defined]
    settings = AdamSettings(
        learning_rate=ADAMW["lr"],
        beta1=ADAMW["betas"][0],
        beta2=ADAMW["betas"][1],
        epsilon=1e-8,
        weight_decay=ADAMW["weight_decay"],
        is_decoupled=True,
    )
    items = [
        AdamTensors(
            master=master.detach(),
            gradient=gradient,
            exp_avg=torch.zeros_like(gradient),
            exp_avg_sq=torch.zeros_like(gradient),
            step=torch.tensor(0.0),
            half=half,
            settings=settings,
        )
        for master, gradient, half in zip(masters, gradients, halves, strict=True)
    ]

    @torch.no_grad()
    def by_torch() -> None:
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        inner.step()
        torch._foreach_copy_(halves, masters)
        torch._foreach_zero_(gradients)

    def one_pass(*, clears_gradients: bool) -> None:
        cpu_kernels.adam_step(
            items, torch.tensor(SCALE), torch.tensor(0.0), clears_gradients=clears_gradients
        )

    return {
        "torch: fused, copy, zero": by_torch,
        "one pass": lambda: one_pass(clears_gradients=True),
        "one pass, gradients kept": lambda: one_pass(clears_gradients=False),
    }
