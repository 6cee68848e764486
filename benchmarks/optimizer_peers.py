"""Peers of the optimizer step: torch's and DeepSpeed's optimizers, and loops over tensors as in Megatron.

A `Peer` has two functions. `prepare` puts scaled gradients where backward leaves them; it is not timed.
`step` updates the weights and clears the gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
CLIP = 1.0
SCALE = 2.0**12


@dataclass
class Peer:
    prepare: Callable[[], None]
    step: Callable[[], object]


def parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape).mul_(0.02).to(dtype)) for shape in shapes]


def fill(weights: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
    """Give each weight a gradient of its dtype, as backward does."""
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.to(weight.dtype, copy=True)


def fill_main(weights: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
    """Copy each gradient to `main_grad` without the hooks, which could do part of the step's work."""
    for weight, gradient in zip(weights, gradients, strict=True):
        assert not weight.main_grad.any(), "the last step has not cleared all gradients"
        weight.main_grad.copy_(gradient)


def fused_adamw(shapes: Sequence[tuple[int, ...]], gradients: Sequence[torch.Tensor]) -> Peer:
    """The floor: only the update, of fp32 weights by fp32 gradients."""
    weights = parameters(shapes, torch.float32)
    optimizer = torch.optim.AdamW(weights, **ADAMW, fused=True)
    fill(weights, gradients)
    return Peer(lambda: None, optimizer.step)


def torch_scaler(shapes: Sequence[tuple[int, ...]], gradients: Sequence[torch.Tensor]) -> Peer:
    """torch.amp.GradScaler around fused AdamW on fp32 weights."""
    weights = parameters(shapes, torch.float32)
    optimizer = torch.optim.AdamW(weights, **ADAMW, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))  # initialises its state

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Peer(lambda: fill(weights, gradients), step)


def loops(shapes: Sequence[tuple[int, ...]], gradients: Sequence[torch.Tensor]) -> Peer:
    """Megatron's order of operations, with a loop over tensors for each and a host read after each check."""
    weights = parameters(shapes, torch.float16)
    masters = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    mains = [torch.zeros_like(master) for master in masters]
    optimizer = torch.optim.AdamW(masters, **ADAMW, fused=False, foreach=False)

    def prepare() -> None:
        for main, gradient in zip(mains, gradients, strict=True):
            main.copy_(gradient)

    @torch.no_grad()
    def step() -> None:
        for master, main in zip(masters, mains, strict=True):
            master.grad = main
        is_finite = True
        for master in masters:
            master.grad.mul_(1 / SCALE)
            is_finite = bool(master.grad.isfinite().all()) and is_finite
        if is_finite:
            norm = sum(master.grad.norm(2).item() ** 2 for master in masters) ** 0.5
            if CLIP / (norm + 1e-6) < 1:
                for master in masters:
                    master.grad.mul_(CLIP / (norm + 1e-6))
            optimizer.step()
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        for master, main in zip(masters, mains, strict=True):
            master.grad = None
            main.zero_()

    return Peer(prepare, step)


def start_deepspeed() -> None:
    """Create a process group of one rank; DeepSpeed's optimizers need one."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from megalowbit.engine.process_start import start_process_group

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    start_process_group()  # tells DeepSpeed, which then does not compile its shared-memory collectives


def deepspeed_fp16(
    shapes: Sequence[tuple[int, ...]], gradients: Sequence[torch.Tensor], *, is_flat: bool
) -> Peer:
    """FP16_Optimizer (one flat tensor a group) or FP16_UnfusedOptimizer around fused AdamW."""
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    weights = parameters(shapes, torch.float16)
    inner = torch.optim.AdamW(weights, **ADAMW, fused=True)
    options = {"init_scale": SCALE, "scale_window": 1000, "min_scale": 1.0, "delayed_shift": 2}
    kind = FP16_Optimizer if is_flat else FP16_UnfusedOptimizer
    optimizer = kind(
        inner,
        dynamic_loss_scale=True,
        dynamic_loss_args={**options, "consecutive_hysteresis": False},
        clip_grad=CLIP,
        verbose=False,
    )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Peer(lambda: fill(weights, gradients), step)


def deepspeed_bf16(shapes: Sequence[tuple[int, ...]], gradients: Sequence[torch.Tensor]) -> Peer:
    """BF16_Optimizer with fp32 gradient accumulation around fused AdamW."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config

    weights = parameters(shapes, torch.bfloat16)
    optimizer = BF16_Optimizer(
        torch.optim.AdamW(weights, **ADAMW, fused=True),
        param_names={weight: f"weight {index}" for index, weight in enumerate(weights)},
        bfloat16_config=DeepSpeedBF16Config(enabled=True),
        clip_grad=CLIP,
        dp_process_group=torch.distributed.group.WORLD,
        grad_acc_dtype=torch.float32,
    )

    def prepare() -> None:
        fill(weights, gradients)
        optimizer.update_hp_grads(clear_lp_grads=True)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Peer(prepare, step)
