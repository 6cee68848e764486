import logging

import pytest
import torch

from megalowbit.engine.zero.scaler import ZeroLossScaler
from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler


def test_the_scale_follows_the_scaler_and_not_deepspeed():
    scaler = DynamicGradScaler(2.0**10, growth_interval=1, hysteresis=1)
    adapter = ZeroLossScaler(scaler)
    adapter.update_scale(True)
    adapter.update_scale(False)
    assert adapter.cur_scale == adapter.loss_scale == 2.0**10
    scaler.update(False)
    assert adapter.cur_scale == 2.0**11


def test_a_half_precision_loss_is_scaled_in_fp32():
    loss = ZeroLossScaler(ConstantGradScaler(2.0**20)).scale_loss(torch.tensor(1.0, dtype=torch.float16))
    assert loss.dtype == torch.float32
    assert loss.item() == 2.0**20


def test_without_a_scaler_the_scale_is_one_and_cannot_be_set():
    adapter = ZeroLossScaler(None)
    loss = torch.tensor(3.0)
    assert adapter.scale_loss(loss) is loss
    assert (adapter.cur_scale, adapter.dynamic) == (1.0, False)
    with pytest.raises(UserError, match="without a grad scaler"):
        adapter.cur_scale = 2.0


def test_a_state_is_saved_and_loaded_into_the_same_scaler_object():
    saved = ZeroLossScaler(DynamicGradScaler(2.0**10, growth_interval=3))
    saved.grad_scaler.update(False)
    live = DynamicGradScaler(2.0**20, growth_interval=3)
    adapter = ZeroLossScaler(live)
    adapter.load_state_dict(saved.state_dict())
    assert adapter.grad_scaler is live
    assert live.state_dict() == saved.grad_scaler.state_dict()
    assert adapter.dynamic


@pytest.mark.parametrize("state", [object(), {"cur_scale": 4.0}, None, 3.0])
def test_the_state_of_a_foreign_scaler_is_rejected_and_changes_nothing(state):
    adapter = ZeroLossScaler(DynamicGradScaler(2.0**10))
    with pytest.raises(UserError, match="loss scaler of another program"):
        adapter.load_state_dict(state)
    assert adapter.cur_scale == 2.0**10


def test_a_state_without_a_scaler_warns_and_keeps_the_scale(caplog):
    adapter = ZeroLossScaler(DynamicGradScaler(2.0**10))
    with caplog.at_level(logging.WARNING):
        adapter.load_state_dict(ZeroLossScaler(None).state_dict())
    assert "no loss scale" in caplog.text
    assert adapter.cur_scale == 2.0**10
