"""LocalDDP on two real ranks, compared with float64 arithmetic in one process."""

import importlib.util
import itertools
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


def test_all_ranks_start_with_the_parameters_and_buffers_of_rank_0(seen, program):
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


def test_frozen_parameters_rest_on_all_ranks_and_move_again_once_unfrozen(seen):
    steps = seen[0]["freeze"]
    assert steps == seen[1]["freeze"]
    for before, step in itertools.pairwise(range(len(steps))):
        assert steps[step]["head"] != steps[before]["head"]
        is_frozen = 3 <= step < 6
        assert (steps[step]["body"] == steps[before]["body"]) == is_frozen, step


def test_experts_stay_with_their_rank(seen, program):
    for number, rank in enumerate(seen):
        assert rank["experts"]["is_own"]
        assert rank["experts"]["head"] == program.numbers([program.Model(seed=0).head.weight])
        assert rank["experts"]["gradient"] == [1.5]
        assert rank["experts"]["expert_gradient"] == [(number + 1) / 2]


def test_a_group_of_one_sends_nothing(seen):
    assert [rank["alone"] for rank in seen] == [[True, 0.0], [True, 1.0]]


def test_strategies_see_the_largest_gradient_of_all_ranks_without_being_given_a_group(seen):
    for name in ("max_value", "controller"):
        one, other = (rank[name] for rank in seen)
        assert one["scales"] == other["scales"]
        assert one["weights"] == other["weights"]
        assert one["own"] != other["own"]
        assert len(set(one["scales"])) > 3
    one, other = (rank["max_value"] for rank in seen)
    for step, own in enumerate(zip(one["own"], other["own"], strict=True)):
        before, after = one["scales"][step : step + 2]
        assert after == min(2.0 ** math.floor(math.log2(2.0**15 / max(own))), 2 * before)  # no memory


def test_experts_without_a_group_for_their_norm_are_refused_in_a_line(seen):
    for rank in seen:
        refusal = rank["expert_step"]["refusal"]
        assert "allreduce = False" in refusal
        assert "pass expert_parallel_group" in refusal
        assert "\n" not in refusal


def test_dense_replicas_and_all_experts_are_clipped_by_their_joint_norm(seen, program):
    steps = [rank["expert_step"] for rank in seen]
    dense = [value for tensor in steps[0]["gradients"][0] for value in tensor]
    assert steps[0]["gradients"][0] == steps[1]["gradients"][0]
    for step, own in zip(steps, program.EXPERT_NORMS, strict=True):
        of_expert = [value for tensor in step["gradients"][1] for value in tensor]
        assert math.sqrt(math.fsum(g**2 for g in of_expert)) == pytest.approx(own, rel=1e-5)
    norm = math.sqrt(math.fsum(g**2 for g in dense) + sum(own**2 for own in program.EXPERT_NORMS))
    coefficient = program.CLIP / (norm + 1e-6)
    for step in steps:
        assert step["norm"] == pytest.approx(norm, rel=1e-6)
        for before, after, gradients in zip(step["before"], step["after"], step["gradients"], strict=True):
            for old, new, gradient in zip(before, after, gradients, strict=True):
                exact = [w - program.LR * coefficient * g for w, g in zip(old, gradient, strict=True)]
                assert new == pytest.approx(exact, rel=1e-5, abs=1e-7)
                assert new != old
    assert steps[0]["norm"] == steps[1]["norm"]
    assert steps[0]["after"][0] == steps[1]["after"][0]  # dense, to the bit
    assert steps[0]["after"][1] != steps[1]["after"][1]


def test_an_infinite_gradient_in_one_ranks_expert_skips_dense_and_experts_of_both(seen):
    for rank in seen:
        step = rank["expert_step"]
        assert step["skipped"] == "skipped at loss scale 64: overflow in body.bias on rank 1"
        assert not step["has_moved"]
        assert step["scale"] == 32.0


def test_a_rank_without_experts_does_not_wait(seen):
    one, other = (rank["rank_without_expert"] for rank in seen)
    assert one == other
    assert [text.split()[0] for text in one["reports"]] == ["applied,", "skipped", "applied,"]
    assert one["reports"][1].endswith("overflow in body.weight on rank 0")


def test_factors_of_blocks_change_neither_norms_nor_weights(seen):
    one, other = (rank["factors"] for rank in seen)
    assert one == other
    assert min(one["factors"][-1]) > 1
    for name in ("no factors", "factors alone"):
        for rank in seen:
            assert one["norms"] == pytest.approx(rank[name]["norms"], rel=2e-3), name
            for mine, theirs in zip(one["weights"], rank[name]["weights"], strict=True):
                assert mine == pytest.approx(theirs, abs=2e-3), name
    assert seen[0]["factors alone"]["factors"][-1] != [1.0] * 3


def test_a_local_ddp_without_the_block_factors_is_rejected(seen):
    for rank in seen:
        assert "pass the same instruments to LocalDDP" in rank["untold"]
        assert "\n" not in rank["untold"]
