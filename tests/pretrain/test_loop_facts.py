import math

import pytest
import torch

from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params
from megalowbit.optim.timers import StepTimers
from megalowbit.pretrain.loop import optimizer_facts
from megalowbit.pretrain.records.lines import skip_line
from megalowbit.telemetry.facts import check_facts


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2).half()


def make(model, **options):
    return Float16OptimizerWithFloat16Params(
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
        grad_scaler=DynamicGradScaler(16.0, hysteresis=1),
        clip_grad=1.0,
        named_parameters=model.named_parameters(),
        **options,
    )


def test_an_applied_step_has_norm_and_scale_and_only_requested_facts(model):
    optimizer = make(model)
    model.weight.main_grad.fill_(32.0)  # 2 each, unscaled
    facts = optimizer_facts(optimizer, optimizer.step())
    assert facts == {"grad_norm": pytest.approx(2 * math.sqrt(6), rel=1e-6), "loss_scale": 16.0}


def test_zero_counts_and_times_are_facts_on_request(model):
    optimizer = make(model, log_num_zeros_in_grad=True, timers=StepTimers())
    model.weight.main_grad.fill_(1.0)
    facts = optimizer_facts(optimizer, optimizer.step())
    check_facts(facts)
    assert facts["num_zeros"] == 2  # of the bias
    assert facts["milliseconds/inspect"] > 0
    assert facts["milliseconds/update"] > 0


def test_a_skipped_step_names_tensor_rank_and_scales(model):
    optimizer = make(model)
    model.bias.main_grad[1] = math.inf
    report = optimizer.step()
    facts = optimizer_facts(optimizer, report)
    assert facts["skipped/tensor"] == "bias"
    assert facts["skipped/rank"] == 0
    assert facts["grad_norm"] is None
    line = skip_line(7, report, optimizer.loss_scale)
    assert line == "step 7 skipped: overflow in bias on rank 0; loss scale 2^4 → 2^3"
    assert skip_line(7, report, 16.0) == "step 7 skipped: overflow in bias on rank 0"


def test_an_applied_step_prints_no_line(model):
    optimizer = make(model)
    assert skip_line(1, optimizer.step(), 16.0) is None
