import logging
import math
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler as deepspeed_scaler
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from hypothesis import given, settings
from hypothesis import strategies as st

from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.loss_scale.max_value import MaxValueGradScaler
from megalowbit.optim.loss_scale.state import fitted_scale, read_saved_scaler

# derandomised: the same cases in each run; no deadline: the first call of a library is slow
steady = settings(deadline=None, derandomize=True, max_examples=60)
# three clean steps of four, and never few: growth and backoff both come
STEPS = st.lists(st.sampled_from([False, False, False, True]), min_size=15, max_size=40)
INTERVALS = st.integers(1, 5)


class TorchOriginal:
    def __init__(self, interval):
        self.scaler = torch.amp.GradScaler("cpu", 1024.0, 3.0, 0.3, interval)
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0)
        self.scaler.scale(torch.zeros(1))

    def update(self, found_inf):
        self.parameter.grad = torch.tensor([math.nan if found_inf else 1.0])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


class OldMegatron:
    """The scaler of Megatron's first FP16 optimizer, from which DeepSpeed's descends."""

    def __init__(self, interval, hysteresis):
        self.cur_scale, self.cur_iter, self.last_overflow_iter = 1024.0, 0, -1
        self.scale_factor, self.scale_window, self.min_scale = 2.0, interval, 0.5
        self.delayed_shift = self.cur_hysteresis = hysteresis
        self.consecutive_hysteresis = False

    def update(self, found_inf):
        if found_inf:
            if self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_hysteresis = self.delayed_shift
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
        return self.cur_scale


class ApexAmp:
    def __init__(self, interval):
        self.loss_scale, self.unskipped, self.interval = 1024.0, 0, interval

    def update(self, found_inf):
        if found_inf:
            self.loss_scale, self.unskipped = self.loss_scale / 2.0, 0
        else:
            self.unskipped += 1
        if self.unskipped == self.interval:
            self.loss_scale, self.unskipped = min(self.loss_scale * 2.0, 2.0**24), 0
        return self.loss_scale

    def state(self):
        return {"loss_scaler0": {"loss_scale": self.loss_scale, "unskipped": self.unskipped}}


@pytest.fixture(autouse=True, scope="module")
def quiet_deepspeed():
    # its scaler asks for the rank before it logs; any but 0 logs nothing and needs no process group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed_scaler.dist, "get_rank", lambda: 1)
        yield


def assert_continues(ours, original_update, steps):
    for found_inf in steps:
        assert ours.update(found_inf) == original_update(found_inf)


@steady
@given(INTERVALS, STEPS, STEPS)
def test_a_state_of_torch_continues_as_torch_would(interval, before, after):
    original = TorchOriginal(interval)
    for found_inf in before:
        original.update(found_inf)
    ours = DynamicGradScaler(7.0, None, 3.0, 0.3, interval, mode="torch")
    ours.load_state_dict(original.scaler.state_dict())
    assert_continues(ours, original.update, after)


@pytest.mark.parametrize("as_state", ["object", "dict", "bare"])
@steady
@given(interval=INTERVALS, hysteresis=st.integers(1, 3), before=STEPS, after=STEPS)
def test_a_loss_scaler_of_deepspeed_continues_as_it_would(as_state, interval, hysteresis, before, after):
    original = deepspeed_scaler.DynamicLossScaler(1024.0, interval, 1e-9, hysteresis, False, False)
    for found_inf in before:
        original.update_scale(found_inf)
    ours = DynamicGradScaler(7.0, 1e-9, growth_interval=interval, hysteresis=hysteresis, mode="deepspeed")
    bare = dict(vars(original))
    ours.load_state_dict(
        {"object": {"loss_scaler": original}, "dict": {"loss_scaler": bare}, "bare": bare}[as_state]
    )
    for found_inf in after:
        original.update_scale(found_inf)
        assert ours.update(found_inf) == original.cur_scale


@steady
@given(INTERVALS, STEPS, STEPS)
def test_a_state_of_deepspeeds_fp16_optimizer_continues_as_it_would(interval, before, after):
    arguments = {"init_scale": 1024.0, "scale_window": interval, "min_scale": 1e-9}
    config = deepspeed_scaler.LossScaleConfig(torch.float16, True, 1.0, arguments)
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    original = SimpleNamespace(
        loss_scale_config=config, verbose=False, optimizer=inner, fp32_groups_flat=[], clip_grad=0.0
    )
    for found_inf in before:
        FP16_Optimizer._update_scale(original, found_inf)
    ours = DynamicGradScaler(7.0, 1e-9, growth_interval=interval, hysteresis=1, mode="deepspeed")
    ours.load_state_dict(FP16_Optimizer.state_dict(original))
    for found_inf in after:
        FP16_Optimizer._update_scale(original, found_inf)
        assert ours.update(found_inf) == config.cur_scale


@steady
@given(INTERVALS, st.integers(1, 3), STEPS, STEPS)
def test_a_scaler_of_older_megatron_continues_as_it_would(interval, hysteresis, before, after):
    original = OldMegatron(interval, hysteresis)
    for found_inf in before:
        original.update(found_inf)
    ours = DynamicGradScaler(7.0, 0.5, growth_interval=interval, hysteresis=hysteresis, max_scale=2.0**100)
    ours.load_state_dict({"loss_scaler": original})
    assert_continues(ours, original.update, after)


@steady
@given(INTERVALS, STEPS, STEPS)
def test_a_state_of_apex_amp_continues_as_apex_would(interval, before, after):
    original = ApexAmp(interval)
    for found_inf in before:
        original.update(found_inf)
    ours = DynamicGradScaler(7.0, 1e-30, growth_interval=interval, hysteresis=1, max_scale=2.0**24)
    ours.load_state_dict(original.state())
    assert_continues(ours, original.update, after)


@pytest.mark.parametrize("mode", ["megatron", "deepspeed", "torch", "clean_step"])
@steady
@given(interval=INTERVALS, before=STEPS, after=STEPS)
def test_our_own_state_continues_in_every_mode(mode, interval, before, after):
    whole, later = (DynamicGradScaler(1024.0, growth_interval=interval, mode=mode) for _ in range(2))
    for found_inf in before:
        whole.update(found_inf)
    later.load_state_dict(whole.state_dict())
    assert_continues(later, whole.update, after)
    assert later.state_dict() == whole.state_dict()


def test_values_may_be_tensors():
    ours = DynamicGradScaler(4.0, growth_interval=3)
    state = {"scale": torch.tensor([64.0]), "growth_tracker": torch.tensor(2), "hysteresis_tracker": 1}
    ours.load_state_dict(state)
    assert ours.state_dict() == {"scale": 64.0, "growth_tracker": 2, "hysteresis_tracker": 1}
    assert [type(value) for value in ours.state_dict().values()] == [float, int, int]


def test_a_constant_scaler_of_deepspeed_gives_its_scale():
    ours = DynamicGradScaler(4.0)
    ours.load_state_dict({"loss_scaler": deepspeed_scaler.LossScaler(128.0)})
    assert ours.state_dict() == {"scale": 128.0, "growth_tracker": 0, "hysteresis_tracker": 2}


def test_the_state_of_a_strategy_gives_its_scale():
    ours = DynamicGradScaler(4.0)
    ours.load_state_dict(MaxValueGradScaler(256.0).state_dict())
    assert ours.state_dict() == {"scale": 256.0, "growth_tracker": 0, "hysteresis_tracker": 2}


def test_arguments_that_differ_from_the_saved_ones_are_kept_with_a_warning(caplog):
    ours = DynamicGradScaler(4.0, growth_interval=5, mode="torch")
    with caplog.at_level(logging.WARNING):
        ours.load_state_dict(torch.amp.GradScaler("cpu", growth_interval=2000).state_dict())
    assert "had growth_interval = 2000: continuing with 5" in caplog.text
    assert ours.growth_interval == 5
    assert "backoff_factor" not in caplog.text


def test_a_scale_outside_the_bounds_is_clamped_with_a_warning(caplog):
    assert fitted_scale(2.0**40, 1.0, 2.0**32) == 2.0**32
    assert "outside [1, 4.29497e+09]" in caplog.text


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "lacks scale, growth_tracker, hysteresis_tracker: found only nothing"),
        ({"scale": 1.0, "growth_tracker": 0}, "lacks hysteresis_tracker"),
        ({"loss_scaler": 3.0}, '"loss_scaler" of the loaded state = 3.0 is neither'),
        ({"loss_scaler": {"dynamic": True}}, "holds no scale"),
        ({"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}, "loss_scaler1": {}}, "holds 2 loss scales"),
    ],
)
def test_a_state_of_no_known_scaler_is_refused(state, message):
    with pytest.raises(UserError, match=message):
        read_saved_scaler(state)


@pytest.mark.parametrize("value", ["3", math.nan, math.inf, [1], torch.ones(2), True, 10**400], ids=str)
@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({"scale": 2.0, "_growth_tracker": 0}, "_growth_tracker"),
        ({"scale": 2.0, "_growth_tracker": 0, "growth_interval": 5}, "growth_interval"),
        ({"cur_scale": 2.0}, "cur_scale"),
        ({"cur_scale": 2.0, "cur_iter": 3, "last_overflow_iter": 1}, "cur_iter"),
        ({"cur_scale": 2.0, "cur_hysteresis": 1}, "cur_hysteresis"),
        ({"cur_scale": 2.0, "scale_window": 7}, "scale_window"),
        ({"scale": 2.0, "strategy": "other"}, "scale"),
    ],
)
def test_an_impossible_value_is_rejected_by_name(state, key, value):
    read_saved_scaler(state)
    with pytest.raises(UserError, match=f"^{key} of the loaded grad scaler state must be"):
        read_saved_scaler({**state, key: value})


def test_keys_that_are_not_strings_are_listed_and_rejected():
    with pytest.raises(UserError, match=r"found only \['0', 'x'\]"):
        read_saved_scaler({0: 1.0, "x": 2})
