"""LocalDDP on two real ranks, compared with float64 arithmetic in one process."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def seen(launch_ranks):
    return launch_ranks("ranks_local_ddp.py").wait(timeout=60)


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location(
        "ranks_local_ddp", Path(__file__).parent / "ranks_local_ddp.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_ranks_start_with_the_first_ones_parameters_and_buffers(seen, program):
    first = program.Model(seed=0).half()
    expected = program.numbers([*first.parameters(), *first.buffers()])
    for rank in seen:
        assert rank["train"]["started"] == expected


def test_overflow_on_one_rank_is_skipped_by_both_and_weights_stay_the_same_bits(seen, program):
    for rank in seen:
        assert rank["train"]["applied"] == [step != program.BAD_STEP for step in range(program.STEPS)]
    assert seen[0]["train"]["ended"] == seen[1]["train"]["ended"]
    assert seen[0]["train"]["norms"] == seen[1]["train"]["norms"]


def test_training_follows_the_average_of_all_ranks_in_float64(seen, program):
    model = program.Model(seed=0).half()
    model = model.double()
    norms = []
    for step in range(program.STEPS):
        if step == program.BAD_STEP:
            norms.append(None)
            continue
        losses = [
            model(program.data(step, micro_batch, rank).double())
            for rank in range(2)
            for micro_batch in range(program.MICRO_BATCHES)
        ]
        gradients = torch.autograd.grad(sum(losses) / len(losses), list(model.parameters()))
        norms.append(math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients)))
        factor = min(1.0, program.CLIP / (norms[-1] + 1e-6))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.data -= program.LR * factor * gradient
    found = seen[0]["train"]
    for mine, exact in zip(found["norms"], norms, strict=True):
        assert mine == (None if exact is None else pytest.approx(exact, rel=2e-2))
    assert max(norm for norm in norms if norm is not None) > program.CLIP  # clipping has taken part
    for mine, parameter in zip(found["ended"], model.parameters(), strict=True):
        assert mine == pytest.approx(parameter.flatten().tolist(), abs=4e-3)


def test_experts_stay_with_their_rank(seen, program):
    for number, rank in enumerate(seen):
        assert rank["experts"]["is_own"]
        assert rank["experts"]["head"] == program.numbers([program.Model(seed=0).head.weight])
        assert rank["experts"]["gradient"] == [1.5]
        assert rank["experts"]["expert_gradient"] == [(number + 1) / 2]


def test_a_group_of_one_sends_nothing(seen):
    assert [rank["alone"] for rank in seen] == [[True, 0.0], [True, 1.0]]
