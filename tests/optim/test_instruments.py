import math

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.optim.gradients.buffer import GradBuffer
from megalowbit.optim.instruments import Instruments, complete_instruments, joined_statistics
from megalowbit.optim.loss_scale.base import GradientStatistics
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.loss_scale.controller import ControllerGradScaler
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.loss_scale.max_norm import MaxNormGradScaler
from megalowbit.optim.loss_scale.max_value import MaxValueGradScaler
from megalowbit.optim.loss_scale.norm_ratio import NormRatioGradScaler
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params
from megalowbit.optim.statistics.layer_scaling import LayerScaling
from megalowbit.optim.statistics.layer_scaling_settings import LayerScalingSettings


class Blocks(torch.nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Linear(4, 4, bias=False)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 5) for _ in range(depth))
        self.head = torch.nn.Linear(5, 1, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))[:, :4]
        return self.head(torch.nn.functional.pad(x, (0, 1))).float().square().mean()


def build(scaler, *, layers=False, **options):
    model = Blocks().half()
    settings = LayerScalingSettings(enabled=layers)
    instruments = Instruments.attach(model, scaler, layer_scaling=settings)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = Float16OptimizerWithFloat16Params(
        inner, grad_scaler=scaler, clip_grad=0.0, instruments=instruments,
        named_parameters=model.named_parameters(), **options,
    )  # fmt: skip
    return model, optimizer


def record(scaler):
    """Record the statistics that the scaler receives."""
    recorded, update = [], scaler.update

    def noted(found_inf, statistics=None):
        recorded.append(statistics)
        return update(found_inf, statistics)

    scaler.update = noted
    return recorded


@pytest.mark.parametrize(
    ("scaler", "has_watch", "has_probe"),
    [
        (None, False, False),
        (ConstantGradScaler(1.0), False, False),
        (DynamicGradScaler(1.0), False, False),
        (MaxValueGradScaler(), True, False),
        (ControllerGradScaler(), True, False),
        (NormRatioGradScaler(), False, True),
        (MaxNormGradScaler(), True, True),
    ],
)
def test_a_scaler_gets_the_hooks_it_needs_and_no_others(scaler, has_watch, has_probe):
    model = Blocks()
    found = complete_instruments(Instruments.attach(model, scaler), scaler, list(model.named_parameters()))
    assert (found.watch is not None, found.probe is not None) == (has_watch, has_probe)
    assert found.layer_scaling is None
    if has_probe:
        assert found.probe.is_armed


def test_a_scaler_that_probes_needs_the_model():
    with pytest.raises(
        UserError, match=r"NormRatioGradScaler .* needs the model for that: .*Instruments.attach"
    ):
        complete_instruments(None, NormRatioGradScaler(), list(Blocks().named_parameters()))


def test_attaching_makes_all_hooks_so_that_a_buffer_may_come_next():
    model, scaler = Blocks().half(), MaxNormGradScaler(2.0**8)
    attached = Instruments.attach(model, scaler, layer_scaling=LayerScalingSettings(enabled=True))
    assert attached.watch.num_groups == attached.layer_scaling.num_groups == 5
    assert attached.factor_of == attached.layer_scaling.factor_of
    GradBuffer(model.parameters(), factor_of=attached.factor_of)
    model(torch.ones(2, 4).half()).backward()
    twin = Blocks().half()
    twin(torch.ones(2, 4).half()).backward()
    largest = max(p.grad.abs().max().item() for p in twin.parameters())
    assert attached.watch.take(None).max().item() == largest
    # complete instruments are returned unchanged
    found = complete_instruments(attached, scaler, list(model.named_parameters()))
    assert (found.watch, found.probe) == (attached.watch, attached.probe)
    assert Instruments().factor_of is None


def test_hooks_attached_too_late_are_rejected():
    model = Blocks()
    GradBuffer(model.parameters())
    with pytest.raises(UserError, match=r"call Instruments\.attach before LocalDDP and before the optimizer"):
        Instruments.attach(model, None)
    named = list(model.named_parameters())
    with pytest.raises(UserError, match=r"MaxValueGradScaler needs gradients before they are summed"):
        complete_instruments(None, MaxValueGradScaler(), named)
    scaling = Instruments(layer_scaling=LayerScaling(model, ["layers.0"]))
    for scaler in (None, ConstantGradScaler(1.0)):
        with pytest.raises(UserError, match="layer scaling needs gradients before"):
            complete_instruments(scaling, scaler, named)
    assert complete_instruments(None, DynamicGradScaler(), named).watch is None


def test_a_rank_that_trains_nothing_reports_maxima_of_zero():
    scaling = LayerScaling(Blocks(), ["layers.0", "layers.1"])
    for parts, scaler, count in (
        ({}, MaxValueGradScaler(), 1),
        ({"layer_scaling": scaling}, ConstantGradScaler(1.0), 4),
    ):
        found = complete_instruments(Instruments(**parts), scaler, [])
        assert found.watch.names == []
        (figures,) = found.take(None)
        assert figures.tolist() == [0.0] * count
        assert figures.dtype == torch.float64
        statistics, amaxes = found.read([4.0] * count, 2.0)
        assert (statistics.amax, amaxes) == (2.0, [4.0] * count)


def test_statistics_of_several_optimizers_are_combined():
    def seen(**parts):
        return GradientStatistics(loss_scale=4.0, **parts)

    assert joined_statistics([seen(amax=2.0), seen(), seen(amax=3.0)]) == seen(amax=3.0)
    assert joined_statistics([seen(amax=math.inf), seen(amax=3.0)]).amax == math.inf
    assert joined_statistics([seen(), seen()]) == seen()
    probed = seen(norm_ratio=1.5, flushed_fraction=0.25)
    assert joined_statistics([seen(amax=2.0), probed]) == seen(
        amax=2.0, norm_ratio=1.5, flushed_fraction=0.25
    )
    assert joined_statistics([probed, seen(norm_ratio=9.0)]) == probed


def test_the_sample_of_a_scaler_is_that_of_its_hooks():
    model, scaler = Blocks(depth=12), MaxNormGradScaler(sample=0.25)
    found = complete_instruments(Instruments.attach(model, scaler), scaler, list(model.named_parameters()))
    everything = MaxNormGradScaler()
    all_of_it = complete_instruments(
        Instruments.attach(model, everything), everything, list(model.named_parameters())
    )
    assert 0 < len(found.watch.names) <= 0.4 * len(all_of_it.watch.names)
    assert 0 < len(found.probe.names) <= 0.4 * len(all_of_it.probe.names)


def test_layer_scaling_exists_only_if_enabled_and_defines_the_groups():
    model = Blocks()
    off = Instruments.attach(model, None, layer_scaling=LayerScalingSettings())
    assert off.layer_scaling is None
    on = Instruments.attach(model, None, layer_scaling=LayerScalingSettings(enabled=True))
    found = complete_instruments(on, ConstantGradScaler(1.0), list(model.named_parameters()))
    assert list(found.layer_scaling.factors) == ["layers.0", "layers.1", "layers.2"]
    assert found.watch.num_groups == found.layer_scaling.num_groups == 5
    with pytest.raises(UserError, match="ModuleList"):
        Instruments.attach(torch.nn.Linear(2, 2), None, layer_scaling=LayerScalingSettings(enabled=True))


@pytest.mark.parametrize("layers", [False, True])
def test_a_strategy_receives_the_largest_gradient_without_scale_and_factors(layers):
    scaler = MaxValueGradScaler(2.0**8)
    recorded = record(scaler)
    model, optimizer = build(scaler, layers=layers)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).half()
    exact = Blocks().half().double()
    exact(x.double()).backward()
    largest = max(p.grad.abs().max().item() for p in exact.parameters())
    for _ in range(5):
        optimizer.scale_loss(model(x)).backward()
        optimizer.step()
    assert [statistics.loss_scale for statistics in recorded] == [2.0 ** (8 + step) for step in range(5)]
    for statistics in recorded:
        assert statistics.amax == pytest.approx(largest, rel=1e-2)
        assert (statistics.norm_ratio, statistics.flushed_fraction) == (None, None)
    if layers:
        assert max(optimizer.layer_scaling.factors.values()) > 1


def test_the_largest_gradient_is_of_each_micro_batch_and_not_of_their_sum():
    scaler = MaxValueGradScaler(2.0**8)
    recorded = record(scaler)
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD([weight], lr=0.0), grad_scaler=scaler, clip_grad=0.0
    )
    for value in (3.0, -5.0, 4.0):
        optimizer.scale_loss((weight * value).sum()).backward()
    optimizer.step()
    assert recorded[0].amax == 5.0


@pytest.mark.parametrize("octaves", [8, 4])
def test_a_strategy_receives_the_underflow_of_half_precision(octaves):
    """Compared with fp32 gradients of the same half-precision operands, computed by hand for one layer."""
    scaler = NormRatioGradScaler(2.0**octaves, probe_every=2)
    recorded = record(scaler)
    layer = torch.nn.Linear(3, 2, bias=False).half()
    x = torch.tensor([[2.0**-12, 2.0**-24, 1.0]]).half()
    up = torch.tensor([[2.0**-13, 2.0**-10]]).half()  # gradient of the output, unscaled
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD(layer.parameters(), lr=0.0), grad_scaler=scaler, clip_grad=0.0,
        instruments=Instruments.attach(layer, scaler),
    )  # fmt: skip
    for _ in range(2):
        optimizer.scale_loss((layer(x) * up).sum()).backward()
        optimizer.step()
    exact = (up.double() * 2.0**octaves).T @ x.double()
    half = exact.half().double()
    probed, skipped = recorded
    assert probed.norm_ratio == pytest.approx(float(exact.norm() / half.norm()), rel=1e-6)
    assert probed.flushed_fraction == pytest.approx(float(((half == 0) & (exact != 0)).double().mean()))
    assert probed.flushed_fraction > 0
    assert (skipped.norm_ratio, skipped.flushed_fraction) == (None, None)


def read(numbers, loss_scale=4.0, **parts):
    return Instruments(**parts).read(numbers, loss_scale)


class Watch:
    num_groups = 2


@pytest.mark.parametrize(
    ("probed", "ratio", "flushed"),
    [
        ([9.0, 4.0, 1.0, 4.0, 8.0], 1.5, 0.25),
        ([9.0, 0.0, 4.0, 4.0, 4.0], math.inf, 1.0),
        ([0.0, 0.0, 0.0, 0.0, 0.0], None, None),  # no layer took part
        ([0.0, 0.0, 0.0, 0.0, 8.0], math.inf, 1.0),  # every non-zero input was flushed to zero
        ([math.inf, 1.0, 0.0, 4.0, 4.0], None, None),
        ([1.0, math.nan, 0.0, 4.0, 4.0], None, None),
        ([math.nan, 1.0, 0.0, 4.0, 4.0], None, None),
        ([], None, None),
    ],
)
def test_numbers_are_read_back_as_statistics(probed, ratio, flushed):
    statistics, amaxes = read([8.0, 2.0, *probed], watch=Watch())
    assert amaxes == [8.0, 2.0]
    assert (statistics.loss_scale, statistics.amax) == (4.0, 2.0)
    assert (statistics.norm_ratio, statistics.flushed_fraction) == (ratio, flushed)
    statistics, amaxes = read(probed)
    assert (amaxes, statistics.amax, statistics.norm_ratio) == ([], None, ratio)


def test_an_infinite_maximum_stays_infinite():
    assert read([math.inf, 1.0], watch=Watch())[0].amax == math.inf


def test_factors_are_divided_out_of_maxima_by_group():
    model = Blocks()
    scaling = LayerScaling(model, ["layers.0", "layers.1", "layers.2"])
    state = scaling.state_dict()
    for octaves, block in enumerate(state["blocks"].values()):
        block["octaves"] = octaves + 1
    scaling.load_state_dict(state)
    watch = type("Watch", (), {"num_groups": 5})()
    # outside, three blocks with factors 2, 4, 8, and behind them
    statistics, amaxes = read([4.0, 80.0, 8.0, 8.0, 4.0], watch=watch, layer_scaling=scaling)
    assert statistics.amax == 10.0
    assert amaxes == [4.0, 80.0, 8.0, 8.0, 4.0]


def test_no_figures_are_taken_without_a_scaler_and_an_unarmed_probe_adds_none():
    assert Instruments().take(None) == []
    model, scaler = Blocks(), NormRatioGradScaler(probe_every=2)
    instruments = complete_instruments(Instruments.attach(model, scaler), scaler, [])
    assert [figure.shape for figure in instruments.take(None)] == [(5,)]
    scaler.update(False)
    instruments.prepare(scaler)
    assert instruments.take(None) == []
    scaler.update(True)  # an overflow does not repeat the probe; it waits for its next step
    instruments.prepare(scaler)
    assert not instruments.probe.is_armed
    instruments.prepare(None)
    assert not instruments.probe.is_armed


def test_layer_scaling_may_be_given_as_a_configuration_has_it():
    found = Instruments.attach(Blocks(), None, layer_scaling={"enabled": True, "max_factor": 8.0})
    assert found.layer_scaling.settings == LayerScalingSettings(enabled=True, max_factor=8.0)
    with pytest.raises(UserError, match=r"unknown key 'layer_scaling\.enable': did you mean"):
        Instruments.attach(Blocks(), None, layer_scaling={"enable": True})
