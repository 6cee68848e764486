"""Probes that hand on the largest magnitude they have found: a search less, and not a bit changed."""

import math
from dataclasses import replace

import pytest
import torch
from quick_cases import every_pair
from recording_chooser import (
    ONE_USE,
    RecordingChooser,
    RecordingObserver,
    all_equal,
    layer_with,
    results,
    tensors,
    uniform,
)
from torch import nn

from megalowbit.layers.conversion.convert import convert, set_chooser, set_observer
from megalowbit.layers.recipe import Recipe

RECIPES = {
    "nvfp4": "nvfp4",
    "fp8": "fp8",
    "int8": {"base": "fp8", "q_forward_input": "int8", "q_forward_weight": "int8:sr"},
    "per_gemm": {"base": "nvfp4", "layout": "per_gemm"},
    "hadamard": "nvidia-nvfp4",
    "mxfp4 in fp8": {"base": "mxfp4", "gemm": "fp8"},
    "splits": "metis-nvfp4",
    "apart": {"base": "nvfp4", "q_backward_outputgrad_for_weight": "int8:sr", "q_backward_input": "fp8e4m3"},
}


@pytest.mark.parametrize("chosen", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chooser_of_the_layers_own_recipe_changes_no_bit_of_a_training_run(chosen, dtype):
    """Nor do probes that find the largest magnitudes."""
    chosen = {"base": chosen, "keep_last": 0} if isinstance(chosen, str) else chosen
    runs, observers = [], []
    for chooser in (None, RecordingChooser(answer=lambda largest: largest)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32))
        convert(model, chosen, seed=3)
        model.to(dtype)
        observers.append(RecordingObserver())
        set_observer(model, observers[-1])
        if chooser is not None:
            set_chooser(model, chooser)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x, _ = tensors(dtype=dtype, seed=step)
            model.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        runs.append([x.grad, *model.parameters()])
    assert len(chooser.probes) == 6
    assert all(events == ONE_USE for events in chooser.events)
    assert all_equal(*runs)
    assert [role for role, _, _ in observers[0].seen] == [role for role, _, _ in observers[1].seen]
    for one, other in zip(observers[0].seen, observers[1].seen, strict=True):
        assert torch.equal(one[1], other[1])
        assert torch.equal(one[2], other[2])


@every_pair(
    name=["int8", "int8:sr", "fp8e4m3", "fp8e5m2", "nvfp4e2m1bnosr", "nvfp4e2m1b", "int4"],
    dtype=[torch.float32, torch.bfloat16, torch.float16, torch.float64],
    spoiled=[None, math.inf, math.nan],
)
def test_the_maximum_a_probe_hands_on_changes_no_bit(name, dtype, spoiled):
    x, g = tensors(dtype=dtype)
    if spoiled is not None:
        with torch.no_grad():
            x[3, 5] = g[4, 6] = spoiled
    found = [
        results(layer_with(chooser, uniform(name), dtype=dtype), x, g)
        for chooser in (RecordingChooser(), RecordingChooser(answer=lambda largest: largest))
    ]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(nan=7e7), other.nan_to_num(nan=7e7))
        assert one.isnan().any() == (spoiled is not None) or one.isinf().any()


@pytest.mark.parametrize(
    ("chosen", "is_used"),
    [
        (uniform("int8"), True),
        (uniform("fp8e4m3"), True),
        (uniform("nvfp4e2m1bnosr"), True),
        (uniform("nvfp4e2m1bnosr:tile16"), True),
        (replace(uniform("nvfp4e2m1bnosr"), layout="per_gemm"), True),
        (uniform("mxfp4e2m1bnosr"), False),  # blocks alone
        (uniform("int8b"), False),
        (uniform("int8:q_scalar=0.5"), False),  # what the quantizer takes is not the largest magnitude itself
        (uniform("1p58bit"), False),  # a scale from the mean
        (uniform("fp4e2m1:seed_compat"), False),
    ],
    ids=lambda value: f"{value.q_forward_input}, {value.layout}" if isinstance(value, Recipe) else str(value),
)
def test_a_search_is_left_out_where_the_scale_follows_from_the_answer_alone(chosen, is_used):
    """A wrong answer shows it: a quarter of the largest input saturates it, and moves the output."""
    moved = moved_by_a_wrong_answer(chosen)
    assert moved == [is_used, is_used, is_used, False]  # output, grad_input, grad_weight, grad_bias


def moved_by_a_wrong_answer(chosen):
    x, g = tensors(tokens=32)
    right, wrong = (
        results(layer_with(RecordingChooser(answer=answer), chosen), x, g)
        for answer in (lambda largest: None, lambda largest: largest / 4.3)
    )
    return [not torch.equal(one, other) for one, other in zip(right, wrong, strict=True)]


def test_what_is_no_longer_the_operand_is_searched():
    """Transformed operands, those of grad_weight here; and the residual of a split."""
    chosen = replace(uniform("nvfp4e2m1bnosr"), layout="per_gemm", hadamard=True)
    assert moved_by_a_wrong_answer(chosen) == [True, True, False, False]
    split = {"rank": 2, "q_factors": "fp32"}
    fields = ("split_input", "split_weight", "split_grad_output")
    assert not any(moved_by_a_wrong_answer(replace(uniform("int8"), **dict.fromkeys(fields, split))))
