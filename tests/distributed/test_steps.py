"""Two real ranks train; every figure is compared with what an independent float64 loop gives."""

import math

import pytest
import torch

WORLD = 2


@pytest.fixture(scope="module")
def seen(launch_ranks):
    """What both ranks of ranks_steps.py reported; launched once for all tests of this file."""
    return launch_ranks("ranks_steps.py").wait(timeout=90)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_overflow_on_one_rank_skips_the_step_on_both(seen, precision):
    for rank in seen:
        steps = rank[precision]["steps"]
        assert [step["was_applied"] for step in steps] == [True, True, False, False, True, True]
        assert [step["skipped"] for step in steps] == [0, 0, 1, 2, 2, 2]
        assert [step["norm"] is None for step in steps] == [False, False, True, True, False, False]
        assert [step["has_state_changed"] for step in steps] == [True, True, False, False, True, True]
        # the warm-up starts at lr 0, so the first two steps move nothing
        assert [step["has_moved"] for step in steps[2:]] == [False, False, True, True]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_learning_rate_is_held_on_a_skip(seen, precision):
    for rank in seen:
        lrs = [step["lr"] for step in rank[precision]["steps"]]
        assert lrs[1] == lrs[2] == lrs[3]
        assert lrs[3] < lrs[4] < lrs[5]


def test_the_scale_halves_once_hysteresis_is_used_up(seen):
    for rank in seen:
        assert [s["scale"] for s in rank["fp16"]["steps"]] == [4096, 4096, 4096, 2048, 2048, 2048]
        assert {s["scale"] for s in rank["bf16"]["steps"]} == {1.0}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_weights_are_the_same_on_both_ranks_after_overflows(seen, precision):
    assert seen[0][precision]["weights"] == seen[1][precision]["weights"]


def reference_run(tiny, precision, steps=12, accumulation=2, clip=0.5, lr=1e-2, decay=0.01):
    """The same training in one process: AdamW written out in float64 on masters, model in `precision`."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    model = tiny.TinyModel(seed=3)
    masters = [p.detach().double() for p in model.parameters()]
    model.to(dtype)
    m, v = ([torch.zeros_like(w) for w in masters] for _ in range(2))
    losses, norms = [[], []], []
    for step in range(1, steps + 1):
        total = [torch.zeros_like(w) for w in masters]
        for rank in range(WORLD):
            losses[rank].append([])
            for micro_batch in range(accumulation):
                loss = model(tiny.data(step - 1, micro_batch, rank, WORLD))
                losses[rank][-1].append(loss.item())
                # any power of two: fp16 needs one so that small gradients survive
                (loss * 256).backward()
                for gradient, p in zip(total, model.parameters(), strict=True):
                    gradient += p.grad.double() / (256 * WORLD * accumulation)
                    p.grad = None
        norm = math.sqrt(sum(float((g * g).sum()) for g in total))
        norms.append(norm)
        for index, (gradient, p) in enumerate(zip(total, model.parameters(), strict=True)):
            gradient *= min(1.0, clip / (norm + 1e-6))
            m[index] = 0.9 * m[index] + 0.1 * gradient
            v[index] = 0.999 * v[index] + 0.001 * gradient**2
            masters[index] *= 1 - lr * (decay if p.ndim > 1 else 0.0)
            denominator = (v[index] / (1 - 0.999**step)).sqrt() + 1e-8
            masters[index] -= lr * (m[index] / (1 - 0.9**step)) / denominator
            p.data.copy_(masters[index])
    return losses, norms


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-5), ("bf16", 2e-2), ("fp16", 2e-3)])
def test_losses_and_norms_follow_a_float64_master_loop(seen, tiny, precision, tolerance):
    losses, norms = reference_run(tiny, precision)
    for rank in range(WORLD):
        found = seen[rank]["trajectory"][precision]
        torch.testing.assert_close(
            torch.tensor(found["losses"]), torch.tensor(losses[rank]), rtol=tolerance, atol=tolerance
        )
        torch.testing.assert_close(
            torch.tensor(found["norms"]), torch.tensor(norms), rtol=tolerance, atol=tolerance
        )
    assert max(norms) > 0.5  # clipping has taken part


def test_sgd_with_lr_1_and_gradient_1_moves_by_exactly_minus_1(seen):
    for rank in seen:
        assert rank["stock"] == [[[-1.0] * 4], [[-1.0] * 4]]


def test_the_norm_of_sharded_gradients_counts_replicas_once(seen):
    expected = [
        [False, 13.0, None],  # 3² + 4² + 12²
        [False, 5.0, 1],  # one rank holds nothing and takes part
        [True, None, None],
        [True, None, None],
        [False, pytest.approx(5e30), None],
    ]
    for rank in seen:
        assert rank["sharded_norm"] == expected


def test_a_sum_of_norms_counts_shards_together_and_replicas_once(seen):
    for number, rank in enumerate(seen):
        both, one_shard, huge, is_bad, step, refused = rank["sum_of_norms"]
        assert both == [False, 17.0, 1]  # √(3² + 4²) + 12
        assert one_shard == [False, 16.0, 1]  # one rank has no gradient and takes part
        assert huge == [False, pytest.approx(5e30, rel=1e-6), 1]
        assert is_bad is True
        norm, shard, whole = step
        assert norm == 17.0
        assert shard == pytest.approx([-1.5, -2.0][number], rel=1e-6)
        assert whole == pytest.approx([-6.0, 0.0], rel=1e-6)
        assert "needs the same parameters on all ranks" in refused
        assert 'which have [1, 2]: use "global"' in refused


def test_a_decision_of_rank_0_reaches_all_and_so_do_its_errors(seen):
    errors = [["UserError", "mend it"], ["TransientError", "try again"]]
    assert seen[0]["agreement"] == ["of rank 0", *errors, ["OSError", "disk"]]
    assert seen[1]["agreement"] == [
        "of rank 0",
        *errors,
        ["RuntimeError", "rank 0 failed: OSError: disk"],
    ]
