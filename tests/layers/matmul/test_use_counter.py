import copy

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalowbit.layers.conversion.convert import convert
from megalowbit.layers.matmul.use_counter import ProductCounts, UseCounter, is_recomputing


def test_uses_count_up_within_a_step_and_start_again_with_the_next():
    counter = UseCounter()
    assert [counter.next(1), counter.next(1), counter.next(1), counter.next(2)] == [0, 1, 2, 0]


@given(st.integers(1, 6), st.integers(1, 3))
def test_replays_repeat_all_uses_last_to_first(uses, passes):
    counter = UseCounter()
    for _ in range(uses):
        counter.next(5)
    for _ in range(passes):
        assert [counter.next(5, is_replay=True) for _ in range(uses)] == list(range(uses))[::-1]


def test_replays_repeat_the_uses_since_the_last_replays():
    counter, numbers = UseCounter(), []
    for _ in range(3):
        numbers.append([counter.next(0), counter.next(0)])
        assert [counter.next(0, is_replay=True) for _ in range(2)] == numbers[-1][::-1]
    assert numbers == [[0, 1], [2, 3], [4, 5]]


def test_a_replay_of_a_step_not_seen_counts_as_a_use():
    counter = UseCounter()
    assert counter.next(3, is_replay=True) == 0


def test_products_that_a_device_declines_are_counted_as_bf16_also_in_copies():
    counts, device = ProductCounts(), torch.device("cpu")
    for product in ("output", "output", "grad_input"):
        counts.on_device(product, device)[0] += 1
    assert counts.table() == {"output": {"fp8": 2}, "grad_input": {"fp8": 1}}
    counts.on_device("output", device)[1] += 1
    counts.on_device("grad_input", device)[1] += 1
    expected = {"output": {"fp8": 1, "bf16": 1}, "grad_input": {"bf16": 1}}
    again = copy.deepcopy(counts)
    assert counts.table() == again.table() == expected
    again.on_device("output", device).add_(1)
    assert again.table()["output"] == {"fp8": 1, "bf16": 2}
    assert counts.table() == expected


def test_recomputing_is_true_inside_a_backward_pass_only():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(is_recomputing()))
    assert not is_recomputing()
    y.sum().backward()
    assert seen == [True]
    assert not is_recomputing()


def test_forwards_before_the_first_backward_are_checkpointed_exactly_where_forward_rounds_to_nearest():
    def gradients(is_checkpointed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 32))
        convert(model, seed=1)
        inputs = [torch.randn(20, 48, requires_grad=True) for _ in range(3)]
        losses = []
        for x in inputs:  # as a pipeline does: all forwards, then backwards from the oldest on
            output = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
            losses.append(output.square().sum())
        for loss in losses:
            loss.backward()
        return [*(x.grad for x in inputs), model[0].weight.grad]

    assert all(map(torch.equal, gradients(is_checkpointed=True), gradients(is_checkpointed=False)))
