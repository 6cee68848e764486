"""Against the formula in float64, differentiated by autograd."""

import math

import pytest
import torch

from megalowbit.engine.parameters.split import split_weights
from megalowbit.errors import UserError
from megalowbit.layers import regularizer as module
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import bit_layers, convert
from megalowbit.layers.regularizer import DualRangeRegularizer, build_regularizer
from megalowbit.layers.settings import RegularizerSettings
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer
from megalowbit.spectral.weight_split import weight_parts

SETTINGS = RegularizerSettings(strength=0.3, alpha1=0.7, alpha2=2e-5, epsilon=1e-3, max_gradient=1e9)


def layer(rows=12, columns=7, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.nn.Linear(columns, rows, dtype=dtype)


def reference(weights, settings):
    """R and its gradients, uncapped, in float64."""
    copies = [weight.detach().double().requires_grad_() for weight in weights]
    value = sum(
        (settings.alpha1 * (w**2).sum() + settings.alpha2 * (1 / (w**2 + settings.epsilon)).sum()) / w.numel()
        for w in copies
    )
    value = settings.strength * value
    value.backward()
    return value.item(), [copy.grad for copy in copies]


def close(gradient, expected):
    torch.testing.assert_close(
        gradient.double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max())
    )


@pytest.mark.parametrize("chunk", [2**22, 10, 1])
@pytest.mark.parametrize("epsilon", [1e-3, 1e-8])
def test_value_and_gradient_follow_the_formula(chunk, epsilon, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    settings = SETTINGS.model_copy(update={"epsilon": epsilon})
    layers = {"a": layer(), "b": layer(5, 3, seed=1)}
    with torch.no_grad():
        layers["a"].weight[0] = torch.tensor([0.0, 1e-4, -1e-4, 1e-6, 0.5, -3.0, 0.01])
    value, gradients = reference([each.weight for each in layers.values()], settings)
    found = DualRangeRegularizer(layers, settings).add_gradients()
    assert (found.dtype, found.ndim) == (torch.float64, 0)
    assert found.item() == pytest.approx(value, rel=1e-6)
    for each, expected in zip(layers.values(), gradients, strict=True):
        close(each.weight.grad, expected)
        assert each.bias.grad is None


def test_it_adds_its_gradient_times_the_loss_scale_to_that_of_the_loss():
    one = layer()
    one.weight.grad = torch.ones_like(one.weight)
    DualRangeRegularizer({"": one}, SETTINGS).add_gradients(loss_scale=64.0)
    close(one.weight.grad - 1, 64 * reference([one.weight], SETTINGS)[1][0])


def test_main_grad_is_used_if_present():
    one = layer(dtype=torch.bfloat16)
    one.weight.main_grad = torch.zeros(one.weight.shape)
    DualRangeRegularizer({"": one}, SETTINGS).add_gradients()
    assert one.weight.grad is None
    close(one.weight.main_grad, reference([one.weight], SETTINGS)[1][0])


def test_every_element_is_capped_before_the_loss_scale():
    one = layer()
    settings = RegularizerSettings(strength=1e-3, epsilon=1e-8, max_gradient=0.25)
    with torch.no_grad():
        one.weight[0, :4] = torch.tensor([1e-4, -1e-4, 0.0, 1e-3])
    (expected,) = reference([one.weight], settings)[1]
    assert expected.abs().max() > 1e3
    DualRangeRegularizer({"": one}, settings).add_gradients(loss_scale=8.0)
    assert one.weight.grad[0, :4].tolist() == [-2.0, 2.0, 0.0, -2.0]
    close(one.weight.grad, 8 * expected.clamp(-0.25, 0.25))


def test_a_strided_weight_gets_the_same_gradient():
    one = layer(8, 8)
    one.weight = torch.nn.Parameter(one.weight.detach().t())
    assert not one.weight.is_contiguous()
    DualRangeRegularizer({"": one}, SETTINGS).add_gradients()
    close(one.weight.grad, reference([one.weight], SETTINGS)[1][0])


def splittable(is_split=True, dtype=torch.float32):
    """A 12 × 7 layer with factors of rank 2; split: those of its weight, moved a little as by training."""
    torch.manual_seed(0)
    one = BitLinear(7, 12, recipe={"base": "nvfp4", "parameter_split": {"rank": 2}}, dtype=dtype)
    if is_split:
        with torch.no_grad():
            for parameter, part in zip(one.parts(), weight_parts(one.weight.float(), 2), strict=True):
                parameter.copy_(part + 0.01 * torch.randn(part.shape))
        one.is_split = True
    return one


def split_reference(one, settings, cap=None):
    """R of W_R + U·diag(S)·V and the gradients of the four, by autograd in float64."""
    copies = [part.detach().double().requires_grad_() for part in one.parts()]
    residual, u, s, v = copies
    whole = residual + u @ torch.diag(s) @ v
    value, (slope,) = reference([whole], settings)
    whole.backward(slope if cap is None else slope.clamp(-cap, cap))
    return value, [copy.grad for copy in copies]


@pytest.mark.parametrize("chunk", [2**22, 20, 1])
@pytest.mark.parametrize("place", ["grad", "main_grad"])
def test_a_split_weight_is_regularised_as_the_full_weight_through_its_four_parts(chunk, place, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    one = splittable(dtype=torch.bfloat16 if place == "main_grad" else torch.float32)
    for part in one.parts():
        setattr(part, place, torch.ones(part.shape))
    found = DualRangeRegularizer({"": one}, SETTINGS).add_gradients(loss_scale=64.0)
    value, gradients = split_reference(one, SETTINGS)
    assert found.item() == pytest.approx(value, rel=1e-6)
    for part, expected in zip(one.parts(), gradients, strict=True):
        close((getattr(part, place) - 1) / 64, expected)
        assert (part.grad is None) == (place == "main_grad")
    assert one.bias.grad is None


def test_the_gradient_of_a_split_weight_is_capped_before_the_chain_rule_to_its_parts():
    one = splittable()
    cap = float(split_reference(one, SETTINGS)[1][0].abs().median())
    settings = SETTINGS.model_copy(update={"max_gradient": cap})
    DualRangeRegularizer({"": one}, settings).add_gradients()
    for part, expected in zip(one.parts(), split_reference(one, settings, cap)[1], strict=True):
        close(part.grad, expected)


@pytest.mark.parametrize("frozen", ["weight", "split_u", "split_s", "split_v"])
def test_frozen_parts_of_a_split_weight_get_no_gradient(frozen):
    one = splittable()
    getattr(one, frozen).requires_grad_(False)
    found = DualRangeRegularizer({"": one}, SETTINGS).add_gradients()
    value, gradients = split_reference(one, SETTINGS)
    assert found.item() == pytest.approx(value, rel=1e-6)
    for part, expected in zip(one.parts(), gradients, strict=True):
        if part is getattr(one, frozen):
            assert part.grad is None
        else:
            close(part.grad, expected)


def test_factors_of_a_layer_not_split_yet_get_no_gradient():
    one = splittable(is_split=False)
    found = DualRangeRegularizer({"": one}, SETTINGS).add_gradients()
    value, (expected,) = reference([one.weight], SETTINGS)
    assert found.item() == pytest.approx(value, rel=1e-6)
    close(one.weight.grad, expected)
    assert all(part.grad is None for part in one.parts()[1:])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_a_split_does_not_change_the_value(dtype, tolerance):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64, dtype=dtype))
    with torch.no_grad():
        model[0].weight.normal_(std=0.02)
    convert(model, {"base": "nvfp4", "parameter_split": {"rank": 8}})
    settings = RegularizerSettings(strength=1e-4, epsilon=1e-5)
    regularizer = DualRangeRegularizer(bit_layers(model), settings)
    before = regularizer.add_gradients().item()
    model.zero_grad()
    split_weights(model, torch.optim.AdamW(model.parameters()))
    residual_alone = reference([bit_layers(model)["0"].weight], settings)[0]
    assert residual_alone > 1.2 * before
    assert regularizer.add_gradients().item() == pytest.approx(before, rel=tolerance)


def test_a_nan_weight_makes_gradient_and_value_nan():
    one = layer()
    with torch.no_grad():
        one.weight[1, 1] = math.nan
    value = DualRangeRegularizer({"": one}, SETTINGS).add_gradients()
    assert one.weight.grad.isnan().nonzero().tolist() == [[1, 1]]
    assert value.isnan()


def converted():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
    convert(model, {"base": "nvfp4", "keep": ["2"]})
    return model


def test_the_low_bit_layers_of_a_model_are_regularised():
    model = converted()
    regularizer = build_regularizer(model, SETTINGS, list(model.parameters()))
    regularizer.add_gradients()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["0.weight"]


def test_strength_0_builds_no_regularizer():
    model = converted()
    assert build_regularizer(model, RegularizerSettings(), list(model.parameters())) is None


def test_a_model_without_a_trained_low_bit_layer_is_rejected():
    model = converted()
    for trained in ([], list(model[2].parameters())):
        with pytest.raises(UserError, match=r"strength = 0\.3 but no low-bit layer is trained: set it to 0"):
            build_regularizer(model, SETTINGS, trained)
    bit_layers(model)["0"].weight.requires_grad_(False)
    with pytest.raises(UserError, match="no low-bit layer is trained"):
        build_regularizer(model, SETTINGS, list(model.parameters()))


def stepped(scale, micro_batches=1, spoil=False):
    """Master of an fp16 weight after one SGD step on regulariser and loss, and its start."""
    one = layer()
    start = one.weight.detach().clone()
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD(one.parameters(), lr=0.5),
        clip_grad=0.0,
        grad_scaler=ConstantGradScaler(scale),
        cast_parameters=True,
        before_step=DualRangeRegularizer({"": one}, SETTINGS).add_gradients,
    )
    for _ in range(micro_batches):
        optimizer.scale_loss(one(torch.full((1, 7), 0.25, dtype=torch.float16)).sum()).backward()
    if spoil:
        one.bias.main_grad[0] = math.inf
    is_applied, _, _ = optimizer.step()
    return is_applied, start, one.weight.detach(), optimizer.master_of(one.weight).detach()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_in_fp16_the_update_is_independent_of_the_loss_scale(micro_batches):
    updates = {}
    for scale in (1.0, 1024.0):
        is_applied, start, _, master = stepped(scale, micro_batches)
        assert is_applied
        (slope,) = reference([start.half()], SETTINGS)[1]
        expected = start.double() - 0.5 * (0.25 * micro_batches + slope)
        torch.testing.assert_close(master.double(), expected, rtol=1e-5, atol=1e-6)
        updates[scale] = master - start
    torch.testing.assert_close(updates[1.0], updates[1024.0], rtol=1e-5, atol=1e-7)


def test_a_skipped_step_does_not_apply_the_regularizer():
    is_applied, start, weight, master = stepped(1024.0, spoil=True)
    assert not is_applied
    assert torch.equal(master, start)
    assert torch.equal(weight, start.half())


def test_clipping_includes_the_gradient_of_the_regularizer():
    one = layer()
    one.bias.requires_grad_(False)
    start = one.weight.detach().clone()
    (slope,) = reference([start], SETTINGS)[1]
    optimizer = FP32Optimizer(
        torch.optim.SGD(one.parameters(), lr=1.0),
        clip_grad=1e-3,
        before_step=DualRangeRegularizer({"": one}, SETTINGS).add_gradients,
    )
    _, norm, _ = optimizer.step()
    assert norm == pytest.approx(float(slope.norm()), rel=1e-5)
    assert norm > 1e-3
    expected = start.double() - slope * (1e-3 / (norm + 1e-6))
    torch.testing.assert_close(one.weight.detach().double(), expected, rtol=1e-6, atol=1e-7)
