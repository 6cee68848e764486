import pytest
import torch

from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import convert, set_observer
from megalowbit.layers.matmul.slots import Observer, warn_of_uncounted
from megalowbit.quantize.encoding import COUNT_NAMES


class Recorder:
    def __init__(self):
        self.seen = []

    def observe(self, layer, role, counts, error):
        self.seen.append((layer, role, counts, error))


def test_a_class_with_observe_is_an_observer():
    assert isinstance(Recorder(), Observer)
    assert not isinstance(object(), Observer)


def test_each_operand_is_reported_once_with_its_layer_and_role():
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 16))
    convert(model)
    recorder = Recorder()
    set_observer(model, recorder)
    model(torch.randn(5, 32)).sum().backward()
    assert [(layer, role) for layer, role, _, _ in recorder.seen] == [
        ("0", "input"),
        ("0", "weight"),
        ("2", "input"),
        ("2", "weight"),
        ("2", "grad_output"),
        ("0", "grad_output"),
    ]
    elements = [counts[COUNT_NAMES.index("elements")].item() for _, _, counts, _ in recorder.seen]
    assert elements == [5 * 32, 32 * 48, 5 * 48, 48 * 16, 5 * 16, 5 * 48]
    for _, _, counts, error in recorder.seen:
        assert counts.dtype == torch.int64
        assert error.dtype == torch.float64
        assert error[0] < 0.05 * error[1] or error[1] == 0


def test_evaluation_and_identity_operands_are_not_reported():
    layer = BitLinear(16, 16, recipe={"base": "nvfp4", "q_forward_weight": "fp32"})
    layer.observer = Recorder()
    layer.eval()(torch.randn(2, 16))
    assert layer.observer.seen == []
    layer.train()(torch.randn(2, 16))
    assert [role for _, role, _, _ in layer.observer.seen] == ["input"]


def test_a_backward_in_evaluation_mode_warns_once_that_nothing_is_counted(caplog):
    warn_of_uncounted.cache_clear()
    model = torch.nn.Sequential(BitLinear(16, 16), BitLinear(16, 16)).eval()
    x = torch.randn(2, 16)
    model(x).sum().backward()  # without an observer
    recorder = Recorder()
    set_observer(model, recorder)
    model(x)  # without a backward
    assert not caplog.records
    for _ in range(2):
        model(x).sum().backward()
    (warning,) = caplog.messages
    assert "call model.train()" in warning
    assert recorder.seen == []


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_forward_is_reported_once(use_reentrant):
    layer = BitLinear(16, 16)
    layer.observer = Recorder()
    x = torch.randn(4, 16, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert [role for _, role, _, _ in layer.observer.seen] == ["input", "weight", "grad_output"]


def test_counting_does_not_change_the_result():
    torch.manual_seed(0)
    layer = BitLinear(32, 32)
    x = torch.randn(4, 32)
    plain = layer(x)
    layer.observer = Recorder()
    assert torch.equal(layer(x), plain)
