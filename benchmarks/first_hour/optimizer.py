"""Step 8: the optimizer's step by bytes, and that an overflow changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.first_hour.findings import Finding, at_most, expect, info
from benchmarks.first_hour.session import Session
from megalowbit.optim.optimizers.inner_step import InnerStep

# A parameter, in one pass: reads of gradient, master and moments, writes of master, moments and half weight.
# torch's fused Adam also writes the unscaled gradient, and the half weights are a second pass: 38.
BYTES = 30
SLOWEST = 1.25  # × what the copy's bandwidth allows


def check(session: Session) -> Iterator[Finding]:
    """Path, time, and an infinite gradient."""
    size, count = session.size((2**24, 60), (2**14, 4))
    halves = [torch.randn(size, device=session.device).bfloat16() for _ in range(count)]
    masters = [half.float() for half in halves]
    for master in masters:
        master.grad = torch.randn_like(master)
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    step = InnerStep(optimizer, dict(zip(masters, halves, strict=True)))
    fast = ("fused", "apex") if session.is_gpu else ("one_pass", "fused")
    yield expect("path of the step", step.path in fast, step.path, " or ".join(fast))
    if session.is_gpu and step.path == "apex":
        yield expect("apex is left out until compared", False, "apex", "fused", is_hard=False,
                     note="compare five steps with the fused path, or unset MEGALOWBIT_APEX")  # fmt: skip
    one, zero = (torch.full((), value, device=session.device) for value in (1.0, 0.0))
    step.run(one, zero)
    yield from overflow(step, optimizer, masters, halves, one)
    seconds, state = session.median(lambda: step.run(one, zero))
    parameters = size * count
    bandwidth = session.figures.get("copy_bytes_per_second")
    note = f"{parameters / 1e6:.0f} M parameters in {seconds * 1e3:.2f} ms"
    if bandwidth is None:
        yield info("step", seconds * 1e3, " ms", note=f"{note}; run step 1 first for a limit")
        return
    value = seconds / (BYTES * parameters / bandwidth)
    if session.is_gpu:
        yield at_most("step ÷ its bytes at the copy's speed", value, SLOWEST, " ×", note=note, state=state)
    else:
        yield info("step ÷ its bytes at the copy's speed", value, " ×", note=note)


def overflow(
    step: InnerStep,
    optimizer: torch.optim.Optimizer,
    masters: list[Tensor],
    halves: list[Tensor],
    found: Tensor,
) -> Iterator[Finding]:
    """An infinite gradient leaves masters, weights, moments and step counts bit for bit."""

    def state() -> list[Tensor]:
        moments = [
            value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)
        ]
        return [each.detach().clone() for each in (*masters, *halves, *moments)]

    before, gradients = state(), [master.grad.clone() for master in masters]
    masters[0].grad[0] = torch.inf
    step.run(torch.ones_like(found), found)
    wrong = sum(not torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad.copy_(gradient)
    yield at_most("changed by a step that overflowed", wrong, 0, " tensors", note=f"of {len(before)}")
