import copy
import io
import itertools
import math
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalowbit.errors import UserError
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.recipe import recipe
from megalowbit.quantize import backends
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.random_stream import RandomStream


def layer_and_input(seed=0, in_features=48, out_features=32, **kwargs):
    torch.manual_seed(seed)
    layer = BitLinear(in_features, out_features, **kwargs)
    layer.random_stream, layer.layer_name = RandomStream(1), "layer"
    return layer, torch.randn(20, in_features, dtype=kwargs.get("dtype"), requires_grad=True)


def grads_of(layer, x, forward=None):
    layer.zero_grad()
    x.grad = None
    output = (forward or layer)(x)
    output.square().sum().backward()
    return output.detach(), x.grad.clone(), layer.weight.grad.clone()


def all_equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_output_is_close_to_that_of_the_plain_layer_and_parameters_are_shared(reference):
    layer, x = layer_and_input()
    assert [(name, p.shape) for name, p in layer.named_parameters()] == [
        ("weight", (32, 48)),
        ("bias", (32,)),
    ]
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    assert (layer(x) - plain).norm() / plain.norm() < 0.2
    q_x = reference.dequantized(x.detach().numpy())
    q_w = reference.dequantized(layer.weight.detach().numpy())
    exact = torch.from_numpy(q_x @ q_w.T) + layer.bias.double()
    assert torch.allclose(layer(x).double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(20, 48), (4, 5, 48), (48,)])
def test_the_output_may_be_changed_in_place(shape):
    """As that of a plain layer: adapters and residuals are added so."""
    gradients = []
    for add in (torch.add, torch.Tensor.add_):
        layer, x = layer_and_input()
        input = x.detach().flatten()[: math.prod(shape)].view(shape).requires_grad_()
        output = add(layer(input), 1.0)
        gradients.append(torch.autograd.grad(output.square().sum(), (input, layer.weight, layer.bias)))
    assert all_equal(*gradients)


def test_initial_weights_and_random_state_are_those_of_a_plain_layer():
    torch.manual_seed(3)
    plain = [nn.Linear(16, 8), nn.Linear(8, 4)]
    torch.manual_seed(3)
    low = [BitLinear(16, 8), BitLinear(8, 4)]
    for one, other in zip(plain, low, strict=True):
        assert torch.equal(one.weight, other.weight)
        assert torch.equal(one.bias, other.bias)


def test_state_dicts_load_from_and_into_plain_layers():
    plain, low = nn.Linear(16, 8), BitLinear(16, 8)
    low.load_state_dict(plain.state_dict())
    plain.load_state_dict(low.state_dict())
    assert list(low.state_dict()) == ["weight", "bias"]


def test_repr_shows_the_recipe():
    assert "in_features=16, out_features=8, bias=False, recipe='nvfp4'" in repr(BitLinear(16, 8, bias=False))


def test_repr_shows_the_rank_of_a_split_weight():
    layer = BitLinear(16, 8, recipe={"base": "nvfp4", "parameter_split": {"rank": 3}})
    assert "split at rank" not in repr(layer)
    layer.is_split = True
    assert "split at rank 3)" in repr(layer)


def test_the_same_step_gives_the_same_bits_and_another_step_different_bits():
    layer, x = layer_and_input()
    first = grads_of(layer, x)
    layer.random_stream.advance()
    other = grads_of(layer, x)
    assert torch.equal(first[0], other[0])  # nearest even forward
    assert not torch.equal(first[1], other[1])
    again, x = layer_and_input()
    assert all_equal(first, grads_of(again, x))


def test_backward_uses_the_step_of_its_forward():
    layer, x = layer_and_input()
    expected = grads_of(layer, x)
    layer, x = layer_and_input()
    output = layer(x)
    layer.random_stream.advance()
    output.square().sum().backward()
    assert torch.equal(x.grad, expected[1])


def test_two_uses_in_one_micro_batch_draw_different_random_numbers():
    layer, x = layer_and_input()
    first, second = layer(x), layer(x)
    grad = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    (one,) = torch.autograd.grad(first, x, grad)
    (other,) = torch.autograd.grad(second, x, grad)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("stochastic_forward", [True, False])
def test_checkpointing_changes_no_bit(use_reentrant, stochastic_forward):
    chosen = recipe({"base": "nvfp4", "q_forward_input": "nvfp4e2m1b", "q_backward_input": "nvfp4e2m1b"})
    options = {"recipe": chosen if stochastic_forward else "nvfp4"}
    layer, x = layer_and_input(**options)
    plain = grads_of(layer, x)
    layer, x = layer_and_input(**options)
    recomputed = grads_of(layer, x, lambda t: checkpoint(layer, t, use_reentrant=use_reentrant))
    assert all_equal(plain, recomputed)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_two_segments_with_the_same_layer_changes_no_bit(use_reentrant):
    chosen = recipe({"base": "nvfp4", "q_forward_input": "nvfp4e2m1b", "q_backward_input": "nvfp4e2m1b"})

    def segments(layer, t, run):
        return run(layer, run(layer, t))

    layer, x = layer_and_input(in_features=32, recipe=chosen)
    plain = grads_of(layer, x, lambda t: segments(layer, t, lambda f, u: f(u)))
    layer, x = layer_and_input(in_features=32, recipe=chosen)
    run = lambda f, u: checkpoint(f, u, use_reentrant=use_reentrant)  # noqa: E731
    assert all_equal(plain, grads_of(layer, x, lambda t: segments(layer, t, run)))


def test_micro_batches_accumulate_gradients():
    layer, x = layer_and_input()
    layer(x).sum().backward()
    first = layer.weight.grad.clone()
    layer.random_stream.advance()
    layer(x).sum().backward()
    layer.weight.grad -= first
    assert layer.weight.grad.abs().sum() > 0
    assert torch.allclose(layer.weight.grad, first, rtol=0.2, atol=first.abs().max().item() * 0.2)


def test_without_grad_mode_no_graph_is_recorded():
    layer, x = layer_and_input()
    expected = layer(x).detach()
    with torch.no_grad():
        output = layer(x)
    assert not output.requires_grad
    assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_dtype_and_keeps_fp32_gradients(dtype):
    layer, x = layer_and_input()
    with torch.autocast("cpu", dtype=dtype):
        output = layer(x)
        loss = output.float().square().sum()
    loss.backward()
    full, _, full_grad = grads_of(*layer_and_input())
    assert output.dtype == dtype
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert (output.float() - full).norm() / full.norm() < 2e-2
    assert (layer.weight.grad - full_grad).norm() / full_grad.norm() < 0.1


def test_backward_inside_autocast_gives_the_same_gradients():
    layer, x = layer_and_input()
    outside = grads_of(layer, x)
    layer, x = layer_and_input()
    output = layer(x)
    loss = output.square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    assert torch.equal(x.grad, outside[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_trains(dtype):
    layer, x = layer_and_input(dtype=dtype)
    output = layer(x)
    assert output.dtype == dtype
    output.sum().backward()
    assert layer.weight.grad.dtype == dtype
    assert layer.weight.grad.isfinite().all()


def test_tied_weights_collect_gradients_of_both_layers():
    one, other = BitLinear(16, 16, bias=False), BitLinear(16, 16, bias=False)
    other.weight = one.weight
    x = torch.randn(4, 16)
    (one(x) * 0.75).sum().backward()  # .75 is exact in NVFP4
    first = one.weight.grad.clone()
    (other(x) * 0.75).sum().backward()
    assert torch.allclose(one.weight.grad, 2 * first, rtol=0.3, atol=0.3)
    assert not torch.equal(one.weight.grad, first)


def test_a_single_layer_draws_new_random_numbers_each_forward_and_follows_torchs_seed():
    def two_gradients():
        torch.manual_seed(5)
        layer = BitLinear(32, 32)
        x = torch.randn(8, 32, requires_grad=True)
        grad = torch.randn(8, 32)
        return [torch.autograd.grad(layer(x), x, grad)[0] for _ in range(2)]

    first, second = two_gradients()
    assert not torch.equal(first, second)
    assert all_equal((first, second), two_gradients())


def test_two_single_layers_draw_different_random_numbers():
    torch.manual_seed(0)
    one, other = BitLinear(32, 32), BitLinear(32, 32)
    for parameter in (*one.parameters(), *other.parameters()):
        nn.init.zeros_(parameter)  # alike in every number
    grad, x = torch.randn(8, 32), torch.randn(8, 32)
    drawn = []
    for layer in (one, other):
        layer(x).backward(grad)
        drawn.append(layer.weight.grad)
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_a_single_layer_keeps_the_masks_of_the_following_dropout(use_reentrant):
    def gradients(run):
        torch.manual_seed(3)
        block = nn.Sequential(BitLinear(32, 32), nn.Dropout(0.5))
        x = torch.randn(8, 32, requires_grad=True)
        steps = []
        for _ in range(2):  # the seed is drawn in the first
            run(block, x).square().sum().backward()
            steps.append(x.grad.clone())
        return [*steps, block[0].weight.grad]

    plain = gradients(lambda block, x: block(x))
    assert all_equal(plain, gradients(lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant)))


def test_copies_and_pickles_compute_the_same():
    layer, x = layer_and_input()
    expected = grads_of(layer, x)
    stored = io.BytesIO()
    torch.save(layer_and_input()[0], stored)
    stored.seek(0)
    for make in (
        lambda: copy.deepcopy(layer_and_input()[0]),
        lambda: pickle.loads(pickle.dumps(layer_and_input()[0])),
        lambda: torch.load(stored, weights_only=False),
    ):
        assert all_equal(expected, grads_of(make(), layer_and_input()[1]))


@pytest.mark.parametrize("shape", [(), (20, 47), (48, 20)])
def test_a_wrong_input_size_is_rejected_by_name(shape):
    layer, _ = layer_and_input()
    with pytest.raises(UserError, match="BitLinear 'layer' expects a last axis of 48"):
        layer(torch.randn(shape))


def test_an_integer_input_is_rejected():
    layer, _ = layer_and_input()
    with pytest.raises(UserError, match="int64"):
        layer(torch.ones(2, 48, dtype=torch.int64))


def test_an_empty_batch_gives_zero_gradients():
    layer, _ = layer_and_input()
    output = layer(torch.randn(0, 5, 48))
    output.sum().backward()
    assert output.shape == (0, 5, 32)
    assert layer.weight.grad.abs().sum() == 0
    assert layer.bias.grad.abs().sum() == 0


def test_training_with_low_bit_gradients_fits_a_linear_map():
    torch.manual_seed(0)
    target = nn.Linear(32, 16)
    layer = BitLinear(32, 16)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(300):
        x = torch.randn(64, 32)
        loss = nn.functional.mse_loss(layer(x), target(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-20:]) < 0.1 * sum(losses[:20])


def test_a_stack_saves_at_most_30_percent_of_the_bytes_of_bf16_linear_layers():
    def kept(layer_class, tokens):
        """Bytes of distinct memory that autograd holds at the end of a forward pass, its peak."""
        torch.manual_seed(0)
        sizes = (64, 256, 96, 64)
        stack = nn.Sequential(
            *(layer_class(a, b, dtype=torch.bfloat16) for a, b in itertools.pairwise(sizes))
        )
        held = {}

        def hold(tensor):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        x = torch.randn(tokens, sizes[0], dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            stack(x)
        return sum(storage.nbytes() for storage in held.values())

    plain, low = (kept(each, 512) - kept(each, 256) for each in (nn.Linear, BitLinear))  # without the weights
    assert plain == 256 * (64 + 256 + 96) * 2
    assert low <= 0.30 * plain


class BiasedStream(RandomStream):
    """A stream on a device that rounds up too often, as its check sees it."""

    def check(self, device, encode=None):
        def biased_backend(request):
            x = request.x
            return backends.encode(request._replace(x=torch.where(x < 6, x + 0.06, x)))

        super().check(device, biased_backend)


def test_a_layer_rejects_a_device_with_biased_rounding():
    layer, x = layer_and_input()
    layer.random_stream = BiasedStream(1)
    output = layer(x)  # nearest even: nothing is drawn
    with pytest.raises(RuntimeError, match="is biased"):
        output.sum().backward()
    layer.recipe = {"base": "nvfp4", "q_forward_weight": "nvfp4e2m1b"}
    with pytest.raises(RuntimeError, match="is biased"):
        layer(x)


def test_ranks_round_a_stochastic_weight_equally_and_their_data_differently():
    def quantized(rank):
        """Q(W) of forward and of backward, and Q(input), each seen through a product with the identity."""
        torch.manual_seed(0)
        layer = BitLinear(
            48,
            48,
            bias=False,
            recipe={
                "base": "bf16",
                "q_forward_weight": "nvfp4e2m1b",
                "q_backward_weight": "nvfp4e2m1b:tile16",
                "q_backward_input": "nvfp4e2m1b",
            },
        )
        layer.random_stream, layer.layer_name = RandomStream(1, rank), "layer"
        x = torch.randn(48, 48, generator=torch.Generator().manual_seed(1), requires_grad=True)
        eye = torch.eye(48)
        forward = layer(eye).detach()
        layer(x).backward(eye)
        return forward, x.grad, layer.weight.grad

    one, other = quantized(rank=0), quantized(rank=5)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert not torch.equal(one[0].t(), one[1])  # two roles: two draws
    assert not torch.equal(one[2], other[2])


@pytest.mark.parametrize("seed", [1, 2])
def test_the_streams_hadamard_signs_reach_the_codes(seed):
    nearest = "nvfp4e2m1bnosr"
    chosen = {"base": "nvfp4", "layout": "per_gemm", "hadamard": True, "q_backward_outputgrad": nearest}
    layer, x = layer_and_input(recipe=chosen, bias=False)
    layer.random_stream = RandomStream(seed)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = layer(x)
    grad = torch.randn(20, 32, generator=torch.Generator().manual_seed(3))
    output.backward(grad)
    signs = RandomStream(seed).hadamard_signs()
    q_x, q_g = (quantizer(nearest).quantize_transposed(t, signs=signs) for t in (x, grad))
    plain = quantizer(nearest).quantize_transposed(x, signs=0)
    assert torch.equal(saved[0], q_x.codes)
    assert not torch.equal(saved[0], plain.codes)
    expected = q_g.dequantize().double() @ q_x.dequantize().double().t()
    assert (layer.weight.grad - expected).norm() <= 1e-6 * expected.norm()
