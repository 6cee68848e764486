import copy
import gc
import shutil
import weakref

import pytest
import torch
from quick_cases import slow_except
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.compiled import _forward, _layer, may_be_captured
from megalowbit.layers.conversion.convert import (
    bit_layers,
    cache_weights,
    convert,
    product_counts,
    random_stream,
    set_observer,
)
from megalowbit.layers.recipe import recipe as recipe_of


def doubles_the_fourth(values):
    """A user's gain that needs four singular values."""
    factors = torch.ones_like(values)
    factors[3] = 2
    return factors, 0.5


RECIPES = {
    "nvfp4": "nvfp4",
    "transformed": {"base": "nvfp4", "layout": "per_gemm", "hadamard": True},
    "all transformed": {
        "base": "nvfp4",
        "layout": "per_gemm",
        "hadamard": ["output", "grad_input", "grad_weight"],
    },
    "eden": "quartet-2",
    "masks": "quartet",
    "mixed": {"base": "mxfp4", "gemm": "fp8", "q_backward_input": "fp32", "q_backward_weight": "mxfp4e2m1b"},
    "int8 or e5m2": "speculative-int8",
    "stochastic": {"base": "nvfp4", "q_forward_input": "nvfp4e2m1b"},
    "split": {
        "base": "nvfp4",
        "split_input": {"rank": 3, "gains": "ysche"},
        "split_weight": {"rank": 2, "q_factors": "fp32"},
        "split_grad_output": {"rank": 4},
    },
    "own gain": {"base": "nvfp4", "split_input": {"rank": 8, "gains": f"{__name__}:doubles_the_fourth"}},
    "kept factors": {
        "base": "nvfp4",
        "split_input": {"rank": 3, "q_factors": "fp32", "refresh_every": 2, "reuse": "factors"},
    },
    "mean": {
        "base": "mxfp4",
        "layout": "per_gemm",
        "split_input": {"method": "mean"},
        "split_grad_output": {"method": "mean"},
    },
}


class Block(nn.Module):
    """A GPT-2 block in small: norms, attention, an MLP, residual connections."""

    def __init__(self, size=32):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size, bias=False)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Recorded:
    def __init__(self):
        self.seen = []

    def observe(self, layer, role, counts, error):
        self.seen.append((layer, role, tuple(counts.tolist()), tuple(error.tolist())))


def block(recipe="nvfp4"):
    torch.manual_seed(0)
    model = Block()
    convert(model, recipe, seed=3)
    return model


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def three_steps(model, run, *, autocast=False, accumulation=1):
    """Outputs, gradients and counts of three training steps."""
    recorded = Recorded()
    set_observer(model, recorded)
    results = []
    for step in range(3):
        x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(step // 2)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = run(x)
        output.float().square().sum().backward()
        results += [output.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return results, sorted(recorded.seen), product_counts(model), random_stream(model).step


def assert_same(one, other):
    for a, b in zip(one[0], other[0], strict=True):
        assert torch.equal(a, b)
    assert one[1:] == other[1:]


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=name, marks=() if name == "split" else pytest.mark.slow)
        for name, recipe in RECIPES.items()
    ],
)
def test_a_compiled_block_computes_draws_and_counts_like_an_eager_one(recipe):
    eager, compiled = block(recipe), block(recipe)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    expected = three_steps(eager, eager)
    assert_same(three_steps(compiled, run), expected)
    assert expected[3] == 3
    first, second = (expected[0][i] for i in (1, 1 + len(expected[0]) // 3))
    assert not torch.equal(first, second)  # the same input, the next micro-batch


def test_autocast_is_followed():
    # An MLP: torch's compiled attention and norms round differently under autocast, with nn.Linear as well.
    def mlp():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        convert(model, seed=3)
        return model

    eager, compiled = mlp(), mlp()
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    got = three_steps(compiled, run, autocast=True)
    assert_same(got, three_steps(eager, eager, autocast=True))
    assert got[0][0].dtype == torch.bfloat16


@pytest.mark.slow
def test_compiled_models_use_cached_weights():
    eager, compiled = block(), block()
    caches = cache_weights(eager), cache_weights(compiled)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    assert_same(three_steps(compiled, run), three_steps(eager, eager))
    assert len(caches[0]) == len(caches[1]) == 4


def test_evaluation_neither_advances_the_stream_nor_saves_tensors():
    eager, compiled = block().eval(), block().eval()
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 8, 32)
    with torch.no_grad():
        assert torch.equal(run(x), eager(x))
        assert torch.equal(run(x), eager(x))
    assert random_stream(compiled).step == 0


def test_a_model_compiles_into_one_graph_without_a_break():
    model = block()
    explanation = torch._dynamo.explain(lambda x: model(x))(torch.randn(2, 8, 32))
    assert explanation.graph_count == 1
    assert explanation.graph_break_count == 0


def test_may_be_captured_is_marked_constant_as_torch_marks_it():
    def answer():
        return True

    assert vars(may_be_captured) == vars(torch.compiler.assume_constant_result(answer)) != {}


@pytest.mark.slow
def test_a_resumed_stream_continues_in_a_compiled_model():
    model = block()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    first = three_steps(model, run)
    random_stream(model).load_state_dict({"seed": 3, "step": 0})
    again = three_steps(model, run)
    assert all(torch.equal(a, b) for a, b in zip(first[0], again[0], strict=True))


def test_a_single_layer_draws_its_own_random_numbers():
    torch.manual_seed(0)
    layer = BitLinear(32, 32)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(8, 32, requires_grad=True)
    grad = torch.randn(8, 32)
    one, other = (torch.autograd.grad(run(x), x, grad)[0] for _ in range(2))
    assert not torch.equal(one, other)
    assert layer._layer_stream.stream.step == 2


def test_frozen_tensors_get_no_gradient():
    model = block()
    model.qkv.weight.requires_grad_(False)
    model.up.bias.requires_grad_(False)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    run(torch.randn(2, 8, 32)).sum().backward()
    assert model.qkv.weight.grad is None
    assert model.up.bias.grad is None
    assert model.up.weight.grad.abs().sum() > 0


def test_a_copied_layer_has_a_new_handle_and_a_deleted_one_none():
    layer = BitLinear(16, 16)
    copied = copy.deepcopy(layer)
    assert _layer(layer.handle) is layer
    assert _layer(copied.handle) is copied
    handle = copied.handle
    del copied
    gc.collect()
    with pytest.raises(UserError, match=f"BitLinear number {handle}, which has been freed"):
        _layer(handle)


def test_sizes_may_change_from_step_to_step():
    def mlp():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        convert(model, RECIPES["transformed"], seed=3)
        return model

    eager, compiled = mlp(), mlp()
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (24, 37, 53):  # sizes of 0 and 1, groups of tokens too, are always compiled for themselves
        x = torch.randn(2, tokens, 32)
        outputs = [model(x) for model in (eager, run)]
        for output in outputs:
            output.square().sum().backward()
        assert torch.equal(*outputs)
    for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("is_inside", slow_except({False}, [False, True]))
def test_checkpointing_a_compiled_block_repeats_its_random_numbers(is_inside):
    def gradients(make_run):
        model = block(RECIPES["stochastic"])
        return three_steps(model, make_run(model))

    def compiled(model):
        if is_inside:
            whole = nn.Sequential(Checkpointed(model))
            return torch.compile(whole, fullgraph=True, backend="aot_eager")
        run = torch.compile(model, fullgraph=True, backend="aot_eager")
        return lambda x: checkpoint(run, x, use_reentrant=False)

    expected = gradients(lambda model: model)
    got = gradients(compiled)
    assert got[3] == expected[3] == 3
    for a, b in zip(got[0], expected[0], strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler"
)
def test_inductor_keeps_the_layers_bits():
    eager, compiled = block(RECIPES["transformed"]), block(RECIPES["transformed"])
    run = torch.compile(compiled, fullgraph=True)
    got, expected = three_steps(compiled, run), three_steps(eager, eager)
    assert got[2:] == expected[2:]
    for a, b in zip(got[0], expected[0], strict=True):  # inductor's norms and activations round differently
        assert (a - b).norm() <= 0.2 * b.norm()


def test_operators_are_neither_merged_nor_captured():
    for operator in (torch.ops.megalowbit.linear, torch.ops.megalowbit.linear_backward):
        tags = set(operator.default.tags)
        assert {torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe} <= tags


def test_an_operator_returns_no_tensor_that_aliases_the_weight_cache():
    model = block()
    cache = cache_weights(model)
    layer = model.up
    x = torch.randn(8, 32)
    for _ in range(2):  # made, and found
        outputs = _forward(
            x,
            layer.weight,
            layer.bias,
            None,
            None,
            None,
            None,
            layer.handle,
            torch.float32,
            True,
            True,
            True,
        )
        (entry,) = layer.weight_slot._entries.values()
        kept = {part.data_ptr() for part in entry.operand.to_parts()[0]}
        assert len(kept) == 3
        assert not kept & {each.data_ptr() for each in outputs}
    assert len(cache) == 1


@pytest.mark.parametrize(("distance", "expected"), [(8, "fp8"), (20, "bf16")])
@pytest.mark.parametrize("wide", ["input", "weight"])
def test_exponents_found_in_forward_reach_a_compiled_backward_unchanged(wide, distance, expected):
    def gradients(is_compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32))
        convert(model, {"base": "mxfp4", "gemm": "fp8", "q_backward_outputgrad": "mxfp4e2m1bnosr"})
        x = torch.randn(32, 64)
        with torch.no_grad():  # blocks some powers of two apart
            (x if wide == "input" else model[0].weight)[:, 32:] *= 2.0**-distance
        x.requires_grad_()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
        run(x).square().sum().backward()
        product = "grad_weight" if wide == "input" else "grad_input"
        assert product_counts(model)[product] == {expected: 1}
        return x.grad, model[0].weight.grad

    for one, other in zip(gradients(is_compiled=True), gradients(is_compiled=False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_forward_in_evaluation_is_not_counted_even_if_differentiated_in_training(is_compiled):
    model, recorded = block().eval(), Recorded()
    set_observer(model, recorded)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if is_compiled else model
    output = run(torch.randn(2, 8, 32, requires_grad=True))
    model.train()
    output.sum().backward()
    assert recorded.seen == []


def change_recipe(model, recipe):
    for layer in bit_layers(model).values():
        layer.recipe = recipe_of(recipe)


@pytest.mark.parametrize("recipes", slow_except([["mxfp4"]], [["mxfp4"], ["bf16", "mxfp4"]]), ids=str)
def test_a_compiled_model_notices_another_recipe(recipes):
    eager, compiled = block(), block()
    caches = cache_weights(eager), cache_weights(compiled)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    assert_same(three_steps(compiled, run), three_steps(eager, eager))
    with torch._dynamo.config.patch(error_on_recompile=False):
        for recipe in recipes:
            change_recipe(eager, recipe)
            change_recipe(compiled, recipe)
            assert_same(three_steps(compiled, run), three_steps(eager, eager))
    assert len(caches[0]) == len(caches[1]) == 4


def test_changing_the_recipe_before_a_compiled_backward_is_rejected():
    model = block()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    output = run(torch.randn(2, 8, 32))
    change_recipe(model, "mxfp4")
    with pytest.raises(UserError, match=r"recipe of BitLinear '.*' was changed between"):
        output.sum().backward()


@pytest.mark.parametrize("is_forward_called_directly", slow_except({False}, [False, True]))
def test_a_layer_lives_until_its_compiled_backward(is_forward_called_directly):
    def gradient(is_freed):
        torch.manual_seed(0)
        layer = BitLinear(32, 32)
        gone = weakref.ref(layer)
        x = torch.randn(8, 32, requires_grad=True)
        if is_forward_called_directly:
            weight, bias = (p.detach() for p in layer.parameters())
            output = _forward(
                x, weight, bias, None, None, None, None, layer.handle, torch.float32, False, True, True
            )[0]
        else:
            output = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        if is_freed:
            del layer
            torch._dynamo.reset()
            gc.collect()
            assert gone() is not None
        output.square().sum().backward()
        if is_freed:
            del output
            gc.collect()
            assert gone() is None
        return x.grad

    assert torch.equal(gradient(is_freed=True), gradient(is_freed=False))


def test_a_model_converted_in_inference_mode_can_be_compiled_and_trained():
    torch.manual_seed(0)
    model = Block()
    with torch.inference_mode():
        convert(model, seed=3)
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    eager = block()
    assert_same(three_steps(model, run), three_steps(eager, eager))


def test_a_compiled_stream_does_not_advance_past_its_last_step():
    model = block()
    random_stream(model).load_state_dict({"seed": 3, "step": 2**63 - 1})
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(UserError, match="the last there is"):
        run(torch.randn(2, 8, 32))
