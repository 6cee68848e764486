import math
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler as deepspeed_scaler
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.base import LARGEST_FLOAT32, SMALLEST_SCALE, as_float32
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler

# derandomised: the same cases in each run; no deadline: the first call of a library is slow
steady = settings(deadline=None, derandomize=True, max_examples=200)
# three clean steps of four, and never few: growth and backoff both come
STEPS = st.lists(st.sampled_from([False, False, False, True]), min_size=15, max_size=60)
INTERVALS = st.integers(1, 6)
HYSTERESIS = st.integers(1, 4)
GROWTHS = st.one_of(st.just(2.0), st.floats(1.01, 4.0))
BACKOFFS = st.one_of(st.just(0.5), st.floats(0.2, 0.95))
SCALES = st.one_of(st.just(65536.0), st.floats(0.01, 1e9))


def scales(scaler, steps):
    return [scaler.update(found_inf) for found_inf in steps]


class MegatronTensors:
    """Megatron-Core's rule, on float32 tensors as it keeps them."""

    def __init__(self, initial, minimum, growth, backoff, interval, hysteresis):
        self.scale = torch.tensor([initial], dtype=torch.float32)
        self.minimum = torch.tensor([minimum], dtype=torch.float32)
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.hysteresis, self.clean, self.left = hysteresis, 0, hysteresis

    def update(self, found_inf):
        if found_inf:
            self.clean = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = torch.max(self.scale * self.backoff, self.minimum)
        else:
            self.clean += 1
            if self.clean == self.interval:
                self.clean, self.left = 0, self.hysteresis
                self.scale = self.scale * self.growth
        return self.scale.item()


class ApexTensors:
    """Apex's hysteresis kernel: float32 scale, float64 factors."""

    def __init__(self, initial, growth, backoff, interval, hysteresis):
        self.scale = torch.tensor(initial, dtype=torch.float32)
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self.hysteresis, self.clean, self.left = hysteresis, 0, hysteresis

    def update(self, found_inf):
        if found_inf:
            self.left -= 1
            self.clean = 0
            if self.left <= 0:
                self.scale = (self.scale.double() * self.backoff).float()
        else:
            self.left = self.hysteresis
            self.clean += 1
            if self.clean == self.interval:
                self.clean = 0
                grown = (self.scale.double() * self.growth).float()
                self.scale = grown if torch.isfinite(grown) else self.scale
        return self.scale.item()


class TorchOriginal:
    """torch.amp.GradScaler, driven through unscale_, step and update."""

    def __init__(self, initial, growth, backoff, interval):
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0)
        self.scaler = torch.amp.GradScaler("cpu", initial, growth, backoff, interval)
        self.scaler.scale(torch.zeros(1))  # creates its tensors

    def update(self, found_inf):
        self.parameter.grad = torch.tensor([math.inf if found_inf else 1.0])
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


@pytest.fixture(autouse=True, scope="module")
def quiet_deepspeed():
    # its scaler asks for the rank before it logs; any but 0 logs nothing and needs no process group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed_scaler.dist, "get_rank", lambda: 1)
        yield


def deepspeed_original(initial, minimum, factor, interval, hysteresis, consecutive=False, raises=False):
    scaler = deepspeed_scaler.DynamicLossScaler(initial, interval, minimum, hysteresis, consecutive, raises)
    scaler.scale_factor = factor
    return scaler


@steady
@given(SCALES, GROWTHS, BACKOFFS, INTERVALS, HYSTERESIS, STEPS)
def test_mode_megatron_equals_float32_tensors(initial, growth, backoff, interval, hysteresis, steps):
    original = MegatronTensors(initial, 0.001, growth, backoff, interval, hysteresis)
    ours = DynamicGradScaler(initial, 0.001, growth, backoff, interval, hysteresis, max_scale=1e38)
    assert ours.scale == original.scale.item()
    for found_inf in steps:
        expected = original.update(found_inf)
        if expected > 1e38:
            break
        assert ours.update(found_inf) == expected


@steady
@given(SCALES, GROWTHS, BACKOFFS, INTERVALS, STEPS)
def test_mode_torch_equals_its_grad_scaler(initial, growth, backoff, interval, steps):
    original = TorchOriginal(initial, growth, backoff, interval)
    ours = DynamicGradScaler(initial, None, growth, backoff, interval, mode="torch")
    for found_inf in steps:
        expected = original.update(found_inf)
        if expected < SMALLEST_SCALE:
            break
        assert ours.update(found_inf) == expected


@steady
@given(SCALES, GROWTHS, BACKOFFS, INTERVALS, HYSTERESIS, STEPS)
def test_mode_clean_step_equals_the_kernel_of_apex(initial, growth, backoff, interval, hysteresis, steps):
    original = ApexTensors(initial, growth, backoff, interval, hysteresis)
    ours = DynamicGradScaler(initial, None, growth, backoff, interval, hysteresis, mode="clean_step")
    for found_inf in steps:
        expected = original.update(found_inf)
        if expected < SMALLEST_SCALE:
            break
        assert ours.update(found_inf) == expected


@steady
@given(SCALES, GROWTHS, INTERVALS, HYSTERESIS, st.booleans(), STEPS)
def test_mode_deepspeed_equals_its_loss_scaler(initial, factor, interval, hysteresis, consecutive, steps):
    original = deepspeed_original(initial, 0.001, factor, interval, hysteresis, consecutive)
    ours = DynamicGradScaler(
        initial, 0.001, factor, 1 / factor, interval, hysteresis,
        mode="deepspeed", consecutive_hysteresis=consecutive,
    )  # fmt: skip
    for found_inf in steps:
        original.update_scale(found_inf)
        assert ours.update(found_inf) == original.cur_scale


@steady
@given(SCALES, GROWTHS, INTERVALS, STEPS)
def test_mode_deepspeed_without_hysteresis_equals_its_fp16_optimizer(initial, factor, interval, steps):
    arguments = {"init_scale": initial, "scale_window": interval, "min_scale": 0.001}
    config = deepspeed_scaler.LossScaleConfig(torch.float16, True, 1.0, arguments)
    config.scale_factor = factor
    original = SimpleNamespace(loss_scale_config=config, verbose=False)
    ours = DynamicGradScaler(initial, 0.001, factor, 1 / factor, interval, 1, mode="deepspeed")
    for found_inf in steps:
        FP16_Optimizer._update_scale(original, found_inf)
        assert ours.update(found_inf) == config.cur_scale


@steady
@given(st.integers(1, 3), STEPS)
def test_mode_deepspeed_raises_at_the_minimum_when_its_loss_scaler_does(hysteresis, steps):
    original = deepspeed_original(8.0, 2.0, 2.0, 3, hysteresis, raises=True)
    ours = DynamicGradScaler(
        8.0, 2.0, growth_interval=3, hysteresis=hysteresis, mode="deepspeed", raise_at_min_scale=True
    )
    for found_inf in steps:
        try:
            original.update_scale(found_inf)
        except Exception:
            with pytest.raises(UserError, match="smallest loss scale, min_scale = 2"):
                ours.update(found_inf)
        else:
            ours.update(found_inf)
        assert ours.scale == original.cur_scale


def test_mode_torch_keeps_a_scale_whose_growth_would_be_infinite():
    original = TorchOriginal(3e38, 2.0, 0.5, 1)
    ours = DynamicGradScaler(3e38, growth_interval=1, mode="torch")
    assert scales(ours, [False] * 3) == [original.update(False) for _ in range(3)] == [as_float32(3e38)] * 3


@pytest.mark.parametrize("mode", ["megatron", "deepspeed", "torch", "clean_step"])
def test_no_mode_reaches_infinity_or_zero(mode):
    scaler = DynamicGradScaler(65536.0, growth_interval=1, hysteresis=1, mode=mode)
    assert max(scales(scaler, [False] * 3000)) == scaler.scale <= LARGEST_FLOAT32
    assert math.isfinite(scaler.scale)
    assert min(scales(scaler, [True] * 3000)) == scaler.scale == scaler.min_scale > 0
    assert math.isfinite(as_float32(scaler.inv_scale))


def test_the_modes_differ_where_their_libraries_do():
    steps = [step == "x" for step in "x.x....xx"]
    ends = {
        mode: scales(DynamicGradScaler(1024.0, growth_interval=4, hysteresis=2, mode=mode), steps)[-1]
        for mode in ("megatron", "deepspeed", "torch", "clean_step")
    }
    assert ends == {"megatron": 512.0, "deepspeed": 128.0, "torch": 128.0, "clean_step": 1024.0}


@pytest.mark.parametrize("mode", ["megatron", "deepspeed", "torch", "clean_step"])
def test_bounds_that_float32_does_not_hold_are_refused(mode):
    with pytest.raises(UserError, match=r"^max_scale must be .* float32"):
        DynamicGradScaler(1.0, max_scale=1e39, mode=mode)
    with pytest.raises(UserError, match=r"^min_scale must be .* float32"):
        DynamicGradScaler(1.0, 1e-60, mode=mode)
    with pytest.raises(UserError, match=r"^initial_scale must be .* float32"):
        DynamicGradScaler(1e39, max_scale=1e40, mode=mode)


@pytest.mark.parametrize("mode", ["megatron", "torch", "clean_step"])
def test_factors_that_float32_rounds_to_1_are_rejected(mode):
    with pytest.raises(
        UserError, match=r"^growth_factor must be .* differs from 1 in float32.*, not 1\.000000001"
    ):
        DynamicGradScaler(1.0, growth_factor=1 + 1e-9, mode=mode)
    with pytest.raises(UserError, match=r"^backoff_factor must be .* differs from 1 in float32"):
        DynamicGradScaler(1.0, backoff_factor=1 - 1e-9, mode=mode)
    least = DynamicGradScaler(3.0, growth_factor=1 + 2.0**-23, growth_interval=1, hysteresis=1, mode=mode)
    assert least.update(False) > 3.0


def test_deepspeeds_scale_is_float64_and_moves_by_such_factors():
    assert DynamicGradScaler(1.0, growth_factor=1 + 1e-9, mode="deepspeed").growth_factor > 1.0
