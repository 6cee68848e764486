import copy
import io

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import bit_layers, cache_weights, convert
from megalowbit.layers.matmul.operand import MatmulOperand
from megalowbit.layers.matmul.weight_cache import WeightSlot
from megalowbit.layers.recipe import recipe
from megalowbit.quantize.names import quantizer


class Recorded:
    def __init__(self):
        self.roles = []

    def observe(self, layer, role, counts, error):
        self.roles.append(role)


def model_and_data(recipe="nvfp4"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
    convert(model, recipe, seed=1)
    return model, torch.randn(12, 8, 32)


def train(model, data, *, cache, steps=3, accumulation=4, is_checkpointed=False):
    """Losses and final weights; weights are written through .data, as DeepSpeed does."""
    losses = []
    for step in range(steps):
        for micro in range(accumulation):
            x = data[step * accumulation + micro].clone().requires_grad_()
            output = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
            loss = output.square().mean()
            loss.backward()
            losses.append(loss.item())
        for parameter in model.parameters():
            parameter.data.sub_(parameter.grad, alpha=0.5)
            parameter.grad = None
        if cache is not None:
            cache.clear()
    return losses, [p.detach().clone() for p in model.parameters()]


def same(one, other):
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize(
    "recipe",
    [
        "nvfp4",
        {"base": "nvfp4", "layout": "per_gemm", "hadamard": True},
        {"base": "nvfp4", "q_forward_weight": "nvfp4e2m1b", "q_backward_weight": "nvfp4e2m1b"},
        {"base": "mxfp4", "gemm": "fp8"},
    ],
)
def test_accumulation_with_a_cache_gives_the_bits_of_one_without(recipe, is_checkpointed):
    plain, data = model_and_data(recipe)
    expected = train(plain, data, cache=None, is_checkpointed=is_checkpointed)
    model, _ = model_and_data(recipe)
    got = train(model, data, cache=cache_weights(model), is_checkpointed=is_checkpointed)
    assert same(got, expected)


def test_a_weight_is_quantised_and_counted_once_a_step():
    model, data = model_and_data()
    cache = cache_weights(model)
    recorded = Recorded()
    for layer in bit_layers(model).values():
        layer.observer = recorded
    train(model, data, cache=cache, steps=1)
    assert recorded.roles.count("weight") == 2
    assert recorded.roles.count("input") == 8


def test_weights_changed_through_data_need_a_clear_and_then_give_new_codes():
    model, data = model_and_data()
    cache = cache_weights(model)
    before = model(data[0]).detach()
    model[0].weight.data.mul_(-1)
    assert torch.equal(model(data[0]), before)  # nobody can see such a change
    cache.clear()
    after = model(data[0]).detach()
    assert not torch.equal(after, before)
    fresh = copy.deepcopy(model)
    assert torch.equal(fresh(data[0]), after)


@pytest.mark.parametrize("change", [lambda w: w.mul_(2.0), lambda w: w.copy_(torch.ones_like(w))])
def test_changes_that_leave_a_trace_are_noticed(change):
    model, data = model_and_data()
    cache_weights(model)
    before = model(data[0]).detach()
    with torch.no_grad():
        change(model[0].weight)
    assert not torch.equal(model(data[0]), before)
    model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight))
    assert not torch.equal(model(data[0]), before)


def test_a_stochastic_weight_is_drawn_anew_each_micro_batch():
    model, data = model_and_data({"base": "nvfp4", "q_forward_weight": "nvfp4e2m1b"})
    cache_weights(model)
    assert not torch.equal(model(data[0]), model(data[0]))


def test_a_copied_model_does_not_share_or_keep_the_cache():
    model, data = model_and_data()
    cache = cache_weights(model)
    model(data[0])
    kept = len(cache)
    copied = copy.deepcopy(model)
    copied[0].weight.data.zero_()
    assert not torch.equal(copied(data[0]), model(data[0]))
    assert all(layer.weight_slot is None for layer in bit_layers(copied).values())
    assert len(cache) == kept > 0
    cache.clear()
    assert len(cache) == 0


def test_only_packed_codes_are_kept():
    model, data = model_and_data()
    cache_weights(model)
    model(data[0])
    for layer in bit_layers(model).values():
        (entry,) = layer.weight_slot._entries.values()
        assert entry.operand.tensor.ready_operand is None
        assert entry.operand.tensor.nbytes < layer.weight.numel() * 0.6 + 64


def test_a_weight_quantised_in_evaluation_is_still_counted_in_training():
    model, data = model_and_data()
    cache_weights(model)
    recorded = Recorded()
    for layer in bit_layers(model).values():
        layer.observer = recorded
    model.eval()
    expected = model(data[0])
    assert recorded.roles == []
    model.train()
    assert torch.equal(model(data[0]), expected)
    assert recorded.roles.count("weight") == 2
    model(data[0])
    model.eval()(data[0])
    model.train()(data[0])
    assert recorded.roles.count("weight") == 2  # once counted, kept


def test_another_tensor_of_the_same_version_and_shape_is_another_weight():
    one, other = torch.zeros(4, 16), torch.full((4, 16), 0.75)
    assert one._version == other._version
    slot, name = WeightSlot(), "nvfp4e2m1bnosr"
    for weight in (one, other, other):
        factor = slot.get(weight, "weight", name, lambda w=weight: MatmulOperand(quantizer(name).quantize(w)))
        assert torch.equal(factor.tensor.dequantize(), weight)


def test_a_weight_that_gets_the_memory_of_a_freed_one_is_another_weight():
    """As with `functional_call` and weights that are made for one call."""
    slot, name, memory = WeightSlot(), "nvfp4e2m1bnosr", numpy.zeros((32, 32), numpy.float32)
    for number in (0.375, 0.75, 1.5):
        memory[...] = number
        weight = torch.from_numpy(memory)  # a new storage at the same address
        assert (weight.data_ptr(), weight._version) == (memory.ctypes.data, 0)
        kept = slot.get(weight, "weight", name, lambda w=weight: MatmulOperand(quantizer(name).quantize(w)))
        assert torch.equal(kept.tensor.dequantize(), weight)
        assert slot.find(weight.view(32, 32), "weight", name) is not None
        del weight, kept


def test_a_saved_model_has_no_cache():
    model, data = model_and_data()
    cache = cache_weights(model)
    expected = model.eval()(data[0])
    assert len(cache) > 0
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert all(layer.weight_slot is None for layer in bit_layers(loaded).values())
    assert torch.equal(loaded(data[0]), expected)


@pytest.mark.parametrize("recipe", ["nvfp4", {"base": "nvfp4", "layout": "per_gemm"}])
def test_weights_kept_in_inference_mode_are_not_used_for_training(recipe):
    results = []
    for is_evaluated_first in (False, True):
        model, data = model_and_data(recipe)
        cache = cache_weights(model)
        if is_evaluated_first:
            with torch.inference_mode():
                model.eval()(data[0])
            assert len(cache) > 0
        results.append(train(model.train(), data, cache=cache))
    assert same(*results)


def test_weights_kept_in_training_are_used_in_inference_mode():
    slot, made = WeightSlot(), []

    def quantize():
        made.append(torch.is_inference_mode_enabled())
        return MatmulOperand(quantizer("nvfp4e2m1bnosr").quantize(torch.ones(4, 16)))

    weight = torch.ones(4, 16)
    for is_inference in (True, True, False, True, False):
        with torch.inference_mode(is_inference):
            slot.get(weight, "weight", "nvfp4e2m1bnosr", quantize)
    assert made == [True, False]


def test_another_recipe_takes_no_kept_weights_of_the_one_before():
    # Equal quantizers, of an unlike axis: only the layouts differ.
    nearest = {"base": "nvfp4", "q_forward_weight": "fp32", "q_backward_outputgrad": "nvfp4e2m1bnosr"}
    other = recipe({**nearest, "layout": "per_gemm"})
    x, gradients = torch.randn(20, 48, requires_grad=True), []
    torch.manual_seed(0)
    layer = BitLinear(48, 32, recipe=nearest)
    layer.weight_slot = WeightSlot()
    for chosen, slot in ((nearest, layer.weight_slot), (other, layer.weight_slot), (other, WeightSlot())):
        layer.recipe, layer.weight_slot = chosen, slot
        assert len(slot) == 0
        gradients.append(torch.autograd.grad(layer(x).square().sum(), x)[0])
        assert len(slot) > 0
    assert torch.equal(gradients[1], gradients[2])
    assert not torch.equal(gradients[0], gradients[1])


@pytest.mark.parametrize("until_cleared", [False, True])
def test_a_gathered_weight_is_found_wherever_it_lies_until_the_slot_is_cleared(until_cleared):
    slot, name, weight = WeightSlot(), "nvfp4e2m1bnosr", torch.ones(4, 16)
    slot.get(
        weight,
        "weight",
        name,
        lambda: MatmulOperand(quantizer(name).quantize(weight)),
        until_cleared=until_cleared,
    )
    moved = weight.clone().add_(0)  # other memory, another version
    found = slot.find(moved, "weight", name, until_cleared=until_cleared)
    assert (found is not None) == until_cleared
    assert slot.find(moved[:2], "weight", name, until_cleared=until_cleared) is None
    slot.clear()
    assert slot.find(weight, "weight", name, until_cleared=until_cleared) is None


def test_a_partitioned_weights_codes_are_kept_though_it_moves():
    model, data = model_and_data()
    cache_weights(model)
    expected = model(data[0])
    model[0].weight.ds_id = 0  # as ZeRO 3 marks it
    recorded = Recorded()
    for layer in bit_layers(model).values():
        layer.weight_slot.clear()
        layer.observer = recorded
    for _ in range(2):
        assert torch.equal(model(data[0]), expected)
        for layer in (model[0], model[2]):
            layer.weight.data = layer.weight.data.clone()
    assert recorded.roles.count("weight") == 3
