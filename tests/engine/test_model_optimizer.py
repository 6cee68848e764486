import pytest
import torch

from megalowbit.config.deepspeed_json import read_deepspeed_config
from megalowbit.engine.deepspeed_optimizer import DeepSpeedFloat16Optimizer, DeepSpeedFP32Optimizer
from megalowbit.engine.model_optimizer import (
    client_optimizer,
    groups_to_train,
    parameter_groups,
    wrap_optimizer,
)
from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.max_norm import MaxNormGradScaler
from megalowbit.optim.precision.fp32_modules import keep_fp32

CONFIG = {"optimizer": {"params": {"weight_decay": 0.1}}}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Linear(4, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, x):
        x = self.embed(x.to(self.embed.weight.dtype))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x.to(self.norm.weight.dtype)).float().square().mean()


def parts_of(precision="fp16", **block):
    return read_deepspeed_config(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.25,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "megalowbit": {"precision": precision, **block},
        }
    )


def wrap(model, *, regularizer=None, parameters=None, **block):
    inner = torch.optim.SGD(parameters or [p for p in model.parameters() if p.requires_grad], lr=0.5)
    return wrap_optimizer(inner, model, parts_of(**block), mpu=None, regularizer=regularizer)


def ids(groups):
    return [[id(p) for p in group["params"]] for group in groups]


def test_by_default_all_trainable_parameters_are_trained_and_only_matrices_decay():
    model = Model()
    model.embed.weight.requires_grad_(False)
    groups = parameter_groups(model, None, CONFIG)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert ids(groups) == [
        [id(layer.weight) for layer in model.layers],
        [id(p) for p in model.parameters() if p.ndim == 1],
    ]
    assert parameter_groups(model, None, {"optimizer": {"params": {}}})[0]["weight_decay"] == 0.0


@pytest.mark.parametrize("kind", [list, iter])
def test_given_parameters_or_groups_are_used_unchanged(kind):
    model = Model()
    some = list(model.layers.parameters())
    assert ids(parameter_groups(model, kind(some), CONFIG)) == [[id(p) for p in some]]
    given = [{"params": iter(some[:1]), "lr": 3.0}, {"params": some[1:]}]
    groups = parameter_groups(model, kind(given), CONFIG)
    assert ids(groups) == [[id(some[0])], [id(p) for p in some[1:]]]
    assert groups[0]["lr"] == 3.0
    assert "params" in given[0]
    assert groups[0] is not given[0]


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (lambda model: [*model.parameters(), *Model().parameters()], 8),
        (lambda model: [{"params": list(Model().norm.parameters())}], 2),
        (lambda model: [], 0),
        (lambda model: [{"params": []}], 0),
    ],
)
def test_parameters_of_another_model_are_rejected(given, count):
    model = Model()
    with pytest.raises(UserError, match=f"holds {count} parameters that are not .* convert the model first"):
        parameter_groups(model, given(model), CONFIG)


def test_the_groups_of_an_optimizer_are_trained_and_must_belong_to_the_model():
    model = Model()
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    assert groups_to_train(model, optimizer, None, {}) is optimizer.param_groups
    with pytest.raises(UserError, match=r"optimizer holds 4 parameters .* pass a callable"):
        groups_to_train(Model(), optimizer, None, {})
    model.layers.requires_grad_(False)
    with pytest.raises(UserError, match="the model has no trainable parameter"):
        groups_to_train(model, optimizer, None, {})


def test_an_optimizer_with_moments_of_another_shape_is_rejected():
    model = Model()
    optimizer = torch.optim.Adam(model.layers.parameters())
    for parameter in model.layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert groups_to_train(model, optimizer, None, {}) is optimizer.param_groups
    weight = model.layers[0].weight
    weight.data = weight.data[:1]  # as a cut leaves it
    with pytest.raises(
        UserError, match=r"optimizer has exp_avg of shape .* after sharding: pass an optimizer without"
    ):
        groups_to_train(model, optimizer, None, {})


def test_an_optimizer_callable_receives_the_trained_parameters():
    model = Model()
    model.embed.requires_grad_(False)
    groups = groups_to_train(model, torch.optim.SGD, None, {})
    assert ids(groups) == [[id(p) for p in model.parameters() if p.requires_grad]]
    given = [{"params": list(model.layers.parameters()), "lr": 3.0}]
    groups = groups_to_train(model, torch.optim.SGD, given, {})
    optimizer = client_optimizer(model, torch.optim.SGD, groups)
    assert optimizer.param_groups[0]["lr"] == 3.0
    assert client_optimizer(model, optimizer, []) is optimizer
    with pytest.raises(UserError, match="optimizer holds 4 parameters"):
        client_optimizer(model, lambda _: torch.optim.SGD(Model().layers.parameters()), groups)


def test_a_pipeline_stage_without_trainable_parameters_is_named():
    model = Model().requires_grad_(False)
    model.stage_id = 2
    with pytest.raises(UserError, match=r"stage 2 has no trainable parameter: .* pipeline.partition"):
        groups_to_train(model, None, None, CONFIG)


@pytest.mark.parametrize(
    ("precision", "cls", "dtype"),
    [
        ("fp16", DeepSpeedFloat16Optimizer, torch.float16),
        ("bf16", DeepSpeedFloat16Optimizer, torch.bfloat16),
        ("fp32", DeepSpeedFP32Optimizer, torch.float32),
    ],
)
def test_all_parameters_get_the_requested_precision_including_frozen_ones(precision, cls, dtype):
    model = Model()
    model.embed.requires_grad_(False)
    keep_fp32(model)
    exact = [p.detach().clone() for p in model.parameters()]
    optimizer = wrap(model, precision=precision)
    assert type(optimizer) is cls
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name.startswith("norm") else dtype), name
    for parameter, before in zip(model.parameters(), exact, strict=True):
        assert torch.equal(parameter, before.to(parameter.dtype))
        if parameter.requires_grad:
            assert torch.equal(optimizer.master_of(parameter), before)


def test_the_settings_reach_the_optimizer():
    model = Model()
    optimizer = wrap(
        model,
        grad_scaler={"type": "max_norm", "initial_scale": 64.0, "probe_every": 3, "sample": 0.5},
        gradient_norm="sum_of_norms", log_num_zeros_in_grad=True, layer_scaling={"enabled": True},
    )  # fmt: skip
    assert (optimizer.clip_grad, optimizer.gradient_norm) == (0.25, "sum_of_norms")
    assert optimizer.log_num_zeros_in_grad
    assert isinstance(optimizer.grad_scaler, MaxNormGradScaler)
    assert (optimizer.loss_scale, optimizer.grad_scaler.probe_every) == (64.0, 3)
    assert list(optimizer.layer_scaling.factors) == ["layers.0", "layers.1"]
    assert optimizer.instruments.probe.is_armed
    assert optimizer.instruments.watch.num_groups == 4
    assert optimizer.before_step is None
    assert wrap(Model()).layer_scaling is None


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_steps_with_all_instruments_name_the_overflowed_parameter(precision):
    model = Model()
    scaler = {} if precision == "fp32" else {"grad_scaler": {"type": "max_norm", "initial_scale": 64.0}}
    optimizer = wrap(model, precision=precision, layer_scaling={"enabled": True}, **scaler)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        optimizer.scale_if_loss(model(x)).backward()
        optimizer.get_grads_for_reduction()
        optimizer.step()
        assert optimizer.report.is_applied
    assert max(optimizer.layer_scaling.factors.values()) > 1
    model(x).backward()
    model.layers[0].bias.main_grad[1] = torch.nan
    optimizer.get_grads_for_reduction()
    optimizer.step()
    assert str(optimizer.report.overflow) == "overflow in layers.0.bias on rank 0"


def test_a_regularizer_adds_its_gradients_at_each_step():
    scales = []

    class Regularizer:
        def add_gradients(self, loss_scale):
            scales.append(loss_scale)

    model = Model()
    optimizer = wrap(model, regularizer=Regularizer(), grad_scaler={"type": "constant", "scale": 8.0})
    next(model.parameters()).main_grad.fill_(1.0)
    optimizer.step()
    assert scales == [8.0]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"layer_scaling": {"enabled": True}}, "ModuleList"),
        ({"grad_scaler": {"type": "norm_ratio"}}, "no linear layer"),
    ],
)
def test_a_model_without_the_modules_that_the_settings_need_is_rejected(block, message):
    with pytest.raises(UserError, match=message):
        wrap(torch.nn.LayerNorm(3), **block)


def test_an_optimizer_that_needs_a_closure_is_rejected():
    model = Model()
    message = "^optimizer LBFGS needs a closure to step"
    with pytest.raises(UserError, match=message):
        groups_to_train(model, torch.optim.LBFGS(model.parameters()), None, CONFIG)
    with pytest.raises(UserError, match=message):
        client_optimizer(model, torch.optim.LBFGS, list(model.parameters()))
    client_optimizer(model, torch.optim.SGD, list(model.parameters()))
