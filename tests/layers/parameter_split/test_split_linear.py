import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.pytorch_utils import Conv1D

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import (
    bit_layers,
    cache_weights,
    convert,
    plain_state_dict,
    restore,
)
from megalowbit.layers.parameter_split.split_linear import SPLIT_NAMES
from megalowbit.layers.recipe import Recipe, recipe
from megalowbit.quantize.names import quantizer

IN, OUT, RANK, TOKENS = 24, 40, 3, 10
SPLIT = {"base": "nvfp4", "q_backward_outputgrad": "nvfp4e2m1bnosr", "parameter_split": {"rank": RANK}}
EXACT = dict.fromkeys(
    (
        "q_forward_input",
        "q_forward_weight",
        "q_backward_input",
        "q_backward_weight",
        "q_backward_outputgrad",
    ),
    "fp32",
)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def split(layer, seed=5):
    """Fill the factors by hand, and say so."""
    with torch.no_grad():
        for index, name in enumerate(SPLIT_NAMES):
            parameter = getattr(layer, name)
            parameter.copy_(randn(*parameter.shape, seed=seed + index))
    layer.is_split = True
    return layer


def make(recipe=SPLIT, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return BitLinear(IN, OUT, bias=bias, recipe=recipe, dtype=dtype)


def parts(layer):
    return [layer.weight, layer.split_u, layer.split_s, layer.split_v]


@pytest.mark.parametrize("is_biased", [True, False])
def test_gradients_of_all_parts_are_those_of_float64_autograd(is_biased):
    # only the weight of grad_input is rounded, so forward and all gradients of parameters are exact
    exact = Recipe(**{**EXACT, "q_backward_weight": "fp8e4m3"}, name="x", parameter_split={"rank": RANK})
    layer = split(make(exact, torch.float64, is_biased))
    x, gradient = (
        randn(2, TOKENS, IN, dtype=torch.float64),
        randn(2, TOKENS, OUT, seed=1, dtype=torch.float64),
    )
    output = layer(x.requires_grad_())
    output.backward(gradient)
    w, u, s, v = (part.detach().clone().requires_grad_() for part in parts(layer))
    expected = x.detach() @ (w + u @ torch.diag(s) @ v).t()
    expected = expected + layer.bias.detach() if is_biased else expected
    expected.backward(gradient)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for part, reference in zip(parts(layer), (w, u, s, v), strict=True):
        torch.testing.assert_close(part.grad, reference.grad, rtol=1e-12, atol=1e-12)
    if is_biased:
        torch.testing.assert_close(layer.bias.grad, gradient.sum((0, 1)), rtol=1e-12, atol=1e-12)


def test_the_gradient_of_the_input_is_that_of_float64_autograd():
    exact = Recipe(**{**EXACT, "q_forward_input": "fp8e4m3"}, name="x", parameter_split={"rank": RANK})
    layer = split(make(exact, torch.float64))
    x, gradient = randn(TOKENS, IN, dtype=torch.float64), randn(TOKENS, OUT, seed=1, dtype=torch.float64)
    layer(x.requires_grad_()).backward(gradient)
    w, u, s, v = (part.detach() for part in parts(layer))
    torch.testing.assert_close(x.grad, gradient @ (w + u @ torch.diag(s) @ v), rtol=1e-12, atol=1e-12)


def test_input_and_residual_are_quantised_and_the_factors_are_not():
    layer, q = split(make()), quantizer("nvfp4e2m1bnosr")
    x = randn(TOKENS, IN)
    w, u, s, v = (part.detach().double() for part in parts(layer))
    low_rank = u @ torch.diag(s) @ v
    expected = q(x).double() @ (q(w.float()).double() + low_rank).t() + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    with_q_of_v = q(x).double() @ (q(w.float()).double() + u @ torch.diag(s) @ q(v.float()).double()).t()
    exact = x.double() @ (w + low_rank).t()
    for other in (with_q_of_v + layer.bias.double(), exact + layer.bias.double()):
        assert (expected - other).abs().max() > 0.1  # the comparison can tell


def test_what_is_kept_for_backward_holds_the_input_once_and_packed():
    layer, x, kept = split(make()), randn(64, IN), []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    assert not any(tensor.is_floating_point() and tensor.shape == x.shape for tensor in kept)
    assert sum(tensor.dtype == torch.uint8 and tensor.shape[0] == 64 for tensor in kept) == 1


@pytest.mark.parametrize("layout", ["single_copy", "per_gemm"])
def test_a_layer_not_split_yet_computes_the_same_bits_as_one_without_factors(layout):
    plain, able = (
        make({"base": "nvfp4", "layout": layout}),
        make({**SPLIT, "base": "nvfp4", "layout": layout}),
    )
    able.recipe = recipe({"base": "nvfp4", "layout": layout, "parameter_split": {"rank": RANK}})
    able.load_state_dict(plain.state_dict())
    results = []
    for layer in (plain, able):
        torch.manual_seed(3)
        x = randn(TOKENS, IN).requires_grad_()
        output = layer(x)
        output.square().sum().backward()
        results.append([output, x.grad, layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not able.is_split
    assert all(getattr(able, name).grad is None for name in SPLIT_NAMES)


@pytest.mark.parametrize("base", ["nvfp4", "mxfp4", "nvidia-nvfp4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_recipe_trains_when_split(base, dtype):
    layer = split(make({"base": base, "parameter_split": {"rank": RANK}}, dtype))
    output = layer(randn(TOKENS, IN).to(dtype))
    output.float().square().mean().backward()
    assert output.dtype == dtype
    assert all(part.grad.isfinite().all() and part.grad.any() for part in parts(layer))


def test_under_autocast_the_output_has_autocasts_dtype():
    layer = split(make())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(randn(TOKENS, IN))
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert layer.split_u.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "changes",
    [{}, {"layout": "per_gemm", "hadamard": True}, {"split_grad_output": {"rank": 2}}],
    ids=["single_copy", "per_gemm", "with a split of grad_output"],
)
def test_a_compiled_split_layer_is_one_graph_with_equal_bits(changes):
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Tanh())
    convert(model, {**SPLIT, **changes})
    split(model[0])
    twin, results = copy.deepcopy(model), []
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for each, layer in ((model, model[0]), (compiled, twin[0])):
        x = randn(TOKENS, IN).requires_grad_()
        output = each(x)
        output.sum().backward()
        results.append([output, x.grad, *(part.grad for part in parts(layer))])
    for eager, other in zip(*results, strict=True):
        assert torch.equal(eager, other)


def test_a_layer_compiled_before_the_split_notices_it():
    model = nn.Sequential(nn.Linear(IN, OUT))
    convert(model, SPLIT)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = randn(TOKENS, IN)
    compiled(x)
    split(model[0])
    assert torch.equal(compiled(x), model(x))


def test_the_cache_keeps_the_residual_and_no_factor():
    model = nn.Sequential(nn.Linear(IN, OUT))
    convert(model, SPLIT)
    split(model[0])
    cache, x = cache_weights(model), randn(TOKENS, IN)
    model(x)
    assert len(cache) == 1
    with torch.no_grad():
        for part in parts(model[0])[1:]:  # without a word to the cache
            part.mul_(1.5)
    uncached = copy.deepcopy(model)
    uncached[0].weight_slot = None
    assert torch.equal(model(x), uncached(x))


def test_rank_may_be_a_share_of_the_smaller_size():
    layer = make({"base": "nvfp4", "parameter_split": {"rank": 0.2}})
    assert layer.split_u.shape == (OUT, 5)  # 0.2 · 24, rounded up
    assert layer.split_s.shape == (5,)
    assert layer.split_v.shape == (5, IN)


def test_factors_are_made_like_the_weight():
    frozen = nn.Sequential(nn.Linear(IN, OUT).to(torch.bfloat16).requires_grad_(False))
    convert(frozen, SPLIT)
    assert {part.dtype for part in parts(frozen[0])} == {torch.bfloat16}
    assert not any(part.requires_grad for part in parts(frozen[0]))
    with torch.device("meta"):
        assert make().split_v.is_meta


def test_converting_leaves_the_original_layer_without_factors():
    original = nn.Linear(IN, OUT)
    model = nn.Sequential(original)
    convert(model, SPLIT)
    assert [name for name, _ in original.named_parameters()] == ["weight", "bias"]
    assert model[0].weight is original.weight


def test_a_recipe_that_needs_other_factors_is_refused():
    layer = make("nvfp4")
    with pytest.raises(UserError, match="parameter_split of rank 3, but the layer was created with none"):
        layer.recipe = recipe(SPLIT)
    layer = make()
    with pytest.raises(UserError, match="of rank 4, but the layer was created with one of rank 3"):
        layer.recipe = recipe({**SPLIT, "parameter_split": {"rank": 4}})
    layer.recipe = "mxfp4"
    assert layer.recipe == recipe("mxfp4")
    assert layer.has_factors


def test_a_state_dict_without_factors_is_a_whole_weight():
    source, target = make("nvfp4"), split(make())
    before = dict(source.state_dict())
    target.load_state_dict(before)
    assert not target.is_split
    assert list(before) == ["weight", "bias"]  # the caller's is left alone
    assert not any(getattr(target, name).any() for name in SPLIT_NAMES)
    assert torch.equal(target(randn(TOKENS, IN)), source(randn(TOKENS, IN)))


def test_is_split_follows_from_what_is_loaded():
    source, target = split(make()), make()
    with torch.no_grad():
        source.split_s.zero_()  # as of a weight of zeros
    target.load_state_dict(source.state_dict())
    assert target.is_split
    target.load_state_dict(make().state_dict())
    assert not target.is_split


def test_a_partial_state_dict_leaves_the_split_alone():
    layer = split(make())
    expected = layer.split_v.clone()
    layer.load_state_dict({"bias": torch.ones(OUT)}, strict=False)
    assert layer.is_split
    assert torch.equal(layer.split_v, expected)
    layer.load_state_dict({}, strict=False)
    assert layer.is_split


def test_loading_works_without_data():
    with FakeTensorMode():
        layer = make()
        layer.load_state_dict(make().state_dict())
    assert not layer.is_split
    with torch.device("meta"):
        empty = make()
    empty.load_state_dict(split(make()).state_dict(), assign=True)
    assert empty.is_split


def test_a_state_dict_with_half_of_the_factors_is_refused():
    state = split(make()).state_dict()
    del state["split_s"]
    with pytest.raises(RuntimeError, match="split_s"):
        make().load_state_dict(state)


@pytest.mark.parametrize("kept", [["weight", "split_v"], ["split_u", "split_s", "split_v"], ["split_s"]])
@pytest.mark.parametrize("is_split", [False, True])
def test_half_of_a_split_is_refused_where_missing_keys_are_not(kept, is_split):
    source = {name: value for name, value in split(make(), seed=9).state_dict().items() if name in kept}
    layer = split(make()) if is_split else make()
    model = nn.Sequential(layer)
    before = copy.deepcopy(model.state_dict())
    message = rf"0\.{kept[0]}.* without .* is an incomplete split weight: load all four, or the full"
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict({f"0.{name}": value for name, value in source.items()}, strict=False)
    assert layer.is_split is is_split
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_copies_and_pickles_stay_split():
    layer = split(make())
    x = randn(TOKENS, IN)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
    ):
        assert other.is_split
        assert torch.equal(other(x), layer(x))


def test_new_parameters_are_whole():
    layer = split(make())
    layer.reset_parameters()
    assert not layer.is_split
    assert not any(getattr(layer, name).any() for name in SPLIT_NAMES)


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restore_merges_the_weight_with_one_rounding(kind, dtype):
    model = nn.Sequential(kind(IN, OUT) if kind is nn.Linear else Conv1D(OUT, IN)).to(dtype)
    convert(model, SPLIT)
    layer = split(model[0])
    w, u, s, v = (part.detach().double() for part in parts(layer))
    whole = (w + u @ torch.diag(s) @ v).float().to(dtype)
    assert torch.equal(layer.merged_weight(), whole)
    expected = plain_state_dict(model)
    restore(model)
    assert type(model[0]) is kind
    assert torch.equal(model[0].weight, whole if kind is nn.Linear else whole.t())
    assert [name for name, _ in model[0].named_parameters()] == ["weight", "bias"]
    assert model[0].weight.requires_grad
    assert expected.keys() == model.state_dict().keys()
    assert all(torch.equal(expected[name], value) for name, value in model.state_dict().items())
    model(randn(TOKENS, IN).to(dtype)).sum().backward()


def test_restore_of_a_layer_not_split_keeps_its_parameter():
    model = nn.Sequential(nn.Linear(IN, OUT))
    convert(model, SPLIT)
    weight = model[0].weight
    restore(model)
    assert model[0].weight is weight
    assert not bit_layers(model)
