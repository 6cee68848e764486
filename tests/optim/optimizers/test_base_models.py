"""A small GPT-2 trains in fp16 under every scaler; its weights against a float64 loop written here."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from megalowbit.optim.instruments import Instruments
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.loss_scale.controller import ControllerGradScaler
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.loss_scale.max_norm import MaxNormGradScaler
from megalowbit.optim.loss_scale.max_value import MaxValueGradScaler
from megalowbit.optim.loss_scale.norm_ratio import NormRatioGradScaler
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params
from megalowbit.optim.statistics.layer_scaling_settings import LayerScalingSettings

STEPS, MICRO_BATCHES, CLIP = 12, 2, 1.0
FIRST = 2.0**10
SCALERS = {
    "constant": lambda: ConstantGradScaler(FIRST),
    **{
        mode: lambda mode=mode: DynamicGradScaler(FIRST, growth_interval=3, mode=mode)
        for mode in ("megatron", "deepspeed", "torch", "clean_step")
    },
    "max_value": lambda: MaxValueGradScaler(FIRST),
    "norm_ratio": lambda: NormRatioGradScaler(FIRST, probe_every=2, epsilon=0.001),
    "max_norm": lambda: MaxNormGradScaler(FIRST, probe_every=3),
    "controller": lambda: ControllerGradScaler(FIRST),
}


def model_of():
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=11, n_positions=8, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def tokens(number):
    """Sequences that count up from a start drawn at random."""
    start = torch.randint(0, 11, (4, 1), generator=torch.Generator().manual_seed(number % 4))
    return (start + torch.arange(8)) % 11


def loss_of(model, number):
    batch = tokens(number)
    logits = model(batch).logits.float()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def reference_run():
    """fp16 model, gradients summed, clipped and stepped (SGD with momentum) in float64."""
    model = model_of()
    masters = [p.detach().double() for p in model.parameters()]
    model.half()
    momenta = [torch.zeros_like(master) for master in masters]
    losses = []
    for step in range(STEPS):
        total = [torch.zeros_like(master) for master in masters]
        for micro_batch in range(MICRO_BATCHES):
            loss = loss_of(model, step * MICRO_BATCHES + micro_batch) / MICRO_BATCHES
            losses.append(loss.item())
            (loss * 2.0**12).backward()
            for gradient, p in zip(total, model.parameters(), strict=True):
                gradient += p.grad.double() / 2.0**12
                p.grad = None
        norm = math.sqrt(sum(float(g.square().sum()) for g in total))
        for master, momentum, gradient, p in zip(masters, momenta, total, model.parameters(), strict=True):
            momentum.mul_(0.9).add_(gradient * min(1.0, CLIP / (norm + 1e-6)))
            master -= 0.1 * momentum
            p.data.copy_(master)
    return masters, losses


@pytest.fixture(scope="module")
def reference():
    return reference_run()


@pytest.mark.parametrize(
    ("name", "has_factors"),
    [
        pytest.param(name, has_factors, marks=() if place % 2 == has_factors else pytest.mark.slow)
        for place, name in enumerate(SCALERS)
        for has_factors in (False, True)
    ],
)
def test_a_model_trains_as_a_float64_loop_does(reference, name, has_factors):
    model, scaler = model_of(), SCALERS[name]()
    instruments = Instruments.attach(model, scaler, layer_scaling=LayerScalingSettings(enabled=has_factors))
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
        grad_scaler=scaler, clip_grad=CLIP, cast_parameters=True, instruments=instruments,
        named_parameters=model.named_parameters(),
    )  # fmt: skip
    losses, scales, step, largest_factor = [], [], 0, 1.0
    while step < STEPS:
        scales.append(optimizer.loss_scale)
        of_step = []
        for micro_batch in range(MICRO_BATCHES):
            loss = loss_of(model, step * MICRO_BATCHES + micro_batch) / MICRO_BATCHES
            of_step.append(loss.item())
            optimizer.scale_loss(loss).backward()
        report = optimizer.step()
        if has_factors:
            largest_factor = max(largest_factor, *optimizer.layer_scaling.factors.values())
        assert len(scales) < 3 * STEPS, report
        if report.is_applied:  # an overflow tries the same step again
            step += 1
            losses += of_step
    masters, expected = reference
    assert losses == pytest.approx(expected, rel=0.02)
    assert losses[-1] < 0.8 * losses[0]
    for p, master in zip(model.parameters(), masters, strict=True):
        found = optimizer.master_of(p).detach().double()
        assert (found - master).norm() <= 0.02 * (master.norm() + 0.1)
        assert torch.equal(p.detach(), found.float().half())
    if name != "constant" and name != "norm_ratio":  # where nothing is lost the latter leaves S alone
        assert len(set(scales)) > 1
    assert (largest_factor > 1) == has_factors  # strategies may raise S until none is needed any more


def test_gradients_too_small_for_half_precision_are_found_by_the_strategies_and_raised():
    """At S = 1 a third of this loss's gradients are zero in fp16; each strategy raises S to save them."""
    for name in ("max_value", "norm_ratio", "max_norm", "controller"):
        model = model_of()
        make = type(SCALERS[name]())
        scaler = make(1.0, **({"probe_every": 1} if "norm" in name else {}))
        optimizer = Float16OptimizerWithFloat16Params(
            torch.optim.AdamW(model.parameters(), lr=0.0, fused=True), grad_scaler=scaler, clip_grad=0.0,
            cast_parameters=True, instruments=Instruments.attach(model, scaler),
        )  # fmt: skip
        zeros = []
        for _ in range(14):
            optimizer.scale_loss(loss_of(model, 0) * 2.0**-14).backward()
            zeros.append(int((optimizer.grad_buffer.flat == 0).sum()))
            assert optimizer.step().is_applied
        assert zeros[0] > 2000
        assert zeros[-1] < 0.6 * zeros[0], name
        assert scaler.scale > 1.0, name
