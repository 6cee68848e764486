import math

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from megalowbit.errors import UserError
from megalowbit.optim.instruments import Instruments
from megalowbit.optim.local_ddp import LocalDDP
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.loss_scale.dynamic import DynamicGradScaler
from megalowbit.optim.loss_scale.max_value import MaxValueGradScaler
from megalowbit.optim.optimizers.chained import ChainedOptimizer
from megalowbit.optim.optimizers.megatron import OptimizerConfig, get_megatron_optimizer
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer


class Model(torch.nn.Module):
    def __init__(self, width=6, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = torch.nn.Linear(width, width)
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.body(x.to(self.head.weight.dtype))))).float()


def batch(step, width=6):
    return torch.randn(8, width, generator=torch.Generator().manual_seed(step))


def train(model, optimizer, steps):
    norms = []
    for step in range(steps):
        x = batch(step)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.scale_loss(loss).backward()
        norms.append(optimizer.step().grad_norm)
    return norms


def reference(model, config, steps):
    """The same training on float64 masters of a model in `config`'s precision, update rules written out."""
    parameters = list(model.parameters())
    masters = [p.detach().double() for p in parameters]
    first, second = ([torch.zeros_like(w) for w in masters] for _ in range(2))
    scale, norms = config.loss_scale or 1.0, []
    for step in range(1, steps + 1):
        x = batch(step - 1)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        (loss * scale).backward()
        gradients = [p.grad.double() / scale for p in parameters]
        norms.append(math.sqrt(sum(float(g.square().sum()) for g in gradients)))
        factor = min(1.0, config.clip_grad / (norms[-1] + 1e-6)) if config.clip_grad else 1.0
        for index, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            p.grad = None
            update(index, gradient * factor, p.ndim > 1, step, masters, first, second, config)
            p.data.copy_(masters[index])
    return norms


def update(index, gradient, is_matrix, step, masters, first, second, config):
    w, decay = masters[index], config.weight_decay if is_matrix else 0.0
    if config.optimizer == "sgd":
        gradient = gradient + decay * w
        first[index] = gradient if step == 1 else config.sgd_momentum * first[index] + gradient
        w -= config.lr * first[index]
        return
    if config.decoupled_weight_decay:
        w *= 1 - config.lr * decay
    else:
        gradient = gradient + decay * w
    beta1, beta2 = config.adam_beta1, config.adam_beta2
    first[index] = beta1 * first[index] + (1 - beta1) * gradient
    second[index] = beta2 * second[index] + (1 - beta2) * gradient**2
    denominator = (second[index] / (1 - beta2**step)).sqrt() + config.adam_eps
    w -= config.lr * first[index] / (1 - beta1**step) / denominator


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({}, 2e-5),
        ({"decoupled_weight_decay": False, "weight_decay": 0.3}, 2e-5),
        ({"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.1, "sgd_momentum": 0.8}, 2e-5),
        ({"fp16": True, "loss_scale": 64.0, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-4}, 2e-3),
        ({"bf16": True, "clip_grad": 0.0, "optimizer": "sgd", "lr": 0.01}, 2e-2),
    ],
    ids=["adamw", "adam", "sgd", "fp16", "bf16"],
)
def test_training_follows_update_rules_written_out_in_float64(settings, tolerance):
    config = OptimizerConfig(**{"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5, **settings})
    model, twin = Model().to(config.dtype), Model().to(config.dtype)
    norms = train(model, get_megatron_optimizer(model, config), steps=10)
    expected = reference(twin, config, steps=10)
    assert norms == pytest.approx(expected, rel=tolerance * 10)
    for found, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


def test_defaults_are_megatrons():
    config = OptimizerConfig(lr=1e-4)
    assert (config.optimizer, config.weight_decay, config.clip_grad) == ("adam", 0.01, 1.0)
    assert (config.adam_beta1, config.adam_beta2, config.adam_eps) == (0.9, 0.999, 1e-8)
    assert (config.sgd_momentum, config.decoupled_weight_decay) == (0.9, True)
    assert (config.loss_scale, config.initial_loss_scale, config.min_loss_scale) == (None, 2.0**32, 1.0)
    assert (config.loss_scale_window, config.hysteresis) == (1000, 2)
    assert (config.fp16, config.bf16, config.log_num_zeros_in_grad) == (False, False, False)


def test_the_precision_decides_optimizer_and_scaler():
    def made(**settings):
        config = OptimizerConfig(lr=1e-3, **settings)
        return get_megatron_optimizer(Model().to(config.dtype), config)

    plain, brain, constant = made(), made(bf16=True), made(bf16=True, loss_scale=8.0)
    assert isinstance(plain, FP32Optimizer)
    assert plain.grad_scaler is None
    assert isinstance(brain, Float16OptimizerWithFloat16Params)
    assert brain.grad_scaler is None
    assert isinstance(constant.grad_scaler, ConstantGradScaler)
    assert constant.loss_scale == 8.0
    half = made(fp16=True, initial_loss_scale=512, min_loss_scale=4, loss_scale_window=7, hysteresis=3)
    scaler = half.grad_scaler
    assert isinstance(scaler, DynamicGradScaler)
    assert (scaler.scale, scaler.min_scale, scaler.growth_interval, scaler.hysteresis) == (512, 4, 7, 3)
    assert (scaler.growth_factor, scaler.backoff_factor) == (2.0, 0.5)


def test_updates_are_fused_and_options_reach_the_optimizer():
    config = OptimizerConfig(lr=1e-3, log_num_zeros_in_grad=True, clip_grad=0.25, params_have_main_grad=False)
    model = Model()
    optimizer = get_megatron_optimizer(model, config)
    assert all(group["fused"] for group in optimizer.param_groups)
    assert optimizer.clip_grad == 0.25
    assert not hasattr(model.head.weight, "main_grad")
    optimizer.scale_loss(model(torch.zeros(1, 6)).sum()).backward()
    assert optimizer.step().num_zeros == 6 * 6  # of body.weight, whose inputs were zero


def test_conditions_choose_what_decays_and_what_learns_at_another_rate():
    model = Model()
    optimizer = get_megatron_optimizer(
        model,
        OptimizerConfig(lr=1.0, optimizer="sgd", sgd_momentum=0.0, weight_decay=0.5, clip_grad=0.0),
        no_weight_decay_cond=lambda name, parameter: name != "norm.weight",
        scale_lr_cond=lambda name, parameter: name.startswith("head.") or parameter is model.norm.weight,
        lr_mult=0.25,
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.main_grad.fill_(1.0)
    assert optimizer.step().is_applied
    moved = {name: before[name] - parameter.detach() for name, parameter in model.named_parameters()}
    assert all(group["lr"] == 1.0 for group in optimizer.param_groups)
    torch.testing.assert_close(moved["norm.weight"], torch.full((6,), 0.25 * (1 + 0.5)))
    torch.testing.assert_close(moved["head.weight"], torch.full((1, 6), 0.25))
    torch.testing.assert_close(moved["body.weight"], torch.ones(6, 6))


def test_chunks_of_a_model_train_as_the_model_does():
    whole, first, second = Model(), Model(), Model()
    del first.head, second.body, second.norm
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1)
    norms = train(whole, get_megatron_optimizer(whole, config), steps=4)

    def forward(x):
        return second.head(first.norm(torch.tanh(first.body(x)))).float()

    assert train(forward, get_megatron_optimizer([first, second], config), steps=4) == pytest.approx(norms)
    assert torch.equal(second.head.weight, whole.head.weight)


def test_overflow_is_reported_by_the_users_own_names():
    model = LocalDDP(Model().half())
    optimizer = get_megatron_optimizer(model, OptimizerConfig(lr=1e-3, fp16=True, initial_loss_scale=4.0))
    model.module.norm.weight.main_grad[0] = torch.inf
    report = optimizer.step()
    assert not report.is_applied
    assert report.overflow.tensor == "norm.weight"


def test_experts_have_an_optimizer_of_their_own_under_the_same_scaler():
    model = Model().half()
    for parameter in model.body.parameters():
        parameter.allreduce = False
    config = OptimizerConfig(lr=1e-2, fp16=True, initial_loss_scale=1024.0, hysteresis=1, clip_grad=0.5)
    optimizer = get_megatron_optimizer(model, config)
    assert isinstance(optimizer, ChainedOptimizer)
    dense, experts = optimizer.chained_optimizers
    assert dense.grad_scaler is experts.grad_scaler
    assert {id(p) for group in experts.float16_groups for p in group} == set(map(id, model.body.parameters()))
    sizes = [sum(p.numel() for group in o.float16_groups for p in group) for o in (dense, experts)]
    assert sum(sizes) == sum(parameter.numel() for parameter in model.parameters())


def test_a_chain_trains_as_one_optimizer_does():
    model, twin = Model().half(), Model().half()
    for parameter in model.body.parameters():
        parameter.allreduce = False
    config = OptimizerConfig(lr=1e-2, fp16=True, loss_scale=64.0, clip_grad=0.5)
    norms = train(model, get_megatron_optimizer(model, config), steps=4)
    assert norms == pytest.approx(train(twin, get_megatron_optimizer(twin, config), steps=4), rel=1e-6)
    for found, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "adm"}, "unknown optimizer 'adm': did you mean 'adam'"),
        ({"fp16": True, "bf16": True}, "fp16 and bf16 are both True"),
        ({"loss_scale": 8.0}, "loss_scale = 8.0 is for fp16 or bf16"),
        ({"fp16": True, "loss_scale": 0.0}, "loss_scale must be a number that fits in float32"),
        *[
            ({"fp16": True, name: value}, f"{name} must be a number that fits in float32")
            for name in ("loss_scale", "initial_loss_scale", "min_loss_scale")
            for value in (1e39, 1e-46, 1e-45, "8", 10**400, True)
        ],
        *[
            ({name: value}, f"{name} must be True or False, not")
            for name in (
                "fp16",
                "bf16",
                "decoupled_weight_decay",
                "log_num_zeros_in_grad",
                "params_have_main_grad",
            )
            for value in ("true", None, 1, "bf16")
        ],
        ({"lr": 10**400}, "lr must be a finite number ≥ 0, not 1000"),
        ({"lr": "1e-3"}, "lr must be a finite number ≥ 0, not '1e-3'"),
        ({"weight_decay": math.inf}, "weight_decay must be"),
        ({"optimizer": ["adam"]}, "unknown optimizer"),
        ({"optimizer": None}, "unknown optimizer None"),
        ({"lr": -1.0}, "lr must be a finite number ≥ 0, not -1.0"),
        ({"lr": None}, "lr must be a finite number ≥ 0, not None"),
        ({"clip_grad": math.nan}, "clip_grad must be a finite number ≥ 0"),
        ({"adam_beta2": 1.0}, "adam_beta2 must be from 0 to below 1"),
        ({"adam_eps": math.inf}, "adam_eps"),
        ({"loss_scale_window": 2.5}, "loss_scale_window must be a whole number > 0, not 2.5"),
        ({"hysteresis": True}, "hysteresis must be a whole number"),
        ({"initial_loss_scale": 2.0**40}, "initial_loss_scale .* to 2\\*\\*32"),
        ({"initial_loss_scale": 1.0, "min_loss_scale": 2.0}, "must be from min_loss_scale \\(2.0\\)"),
    ],
)
def test_a_bad_or_contradictory_value_is_refused_by_name(settings, message):
    with pytest.raises(UserError, match=message):
        OptimizerConfig(**{"lr": 1e-3, **settings})


def test_a_model_of_another_precision_is_refused():
    with pytest.raises(UserError, match=r"expects a model of float16 and found float32: call model\.to"):
        get_megatron_optimizer(Model(), OptimizerConfig(lr=1e-3, fp16=True))
    with pytest.raises(UserError, match="expects a model of float32 and found bfloat16"):
        get_megatron_optimizer(Model().bfloat16(), OptimizerConfig(lr=1e-3))
    mixed = Model().half()
    mixed.norm.float()
    optimizer = get_megatron_optimizer(mixed, OptimizerConfig(lr=1e-3, fp16=True))
    assert [id(p) for group in optimizer.fp32_from_fp32_groups for p in group] == [
        id(mixed.norm.weight), id(mixed.norm.bias)
    ]  # fmt: skip


def test_main_grads_of_another_are_neither_ignored_nor_replaced():
    wrapped = LocalDDP(Model())
    with pytest.raises(UserError, match="leave params_have_main_grad at True"):
        get_megatron_optimizer(wrapped, OptimizerConfig(lr=1e-3, params_have_main_grad=False))
    with pytest.raises(UserError, match="6 of 12 parameters have a main_grad"):
        get_megatron_optimizer([wrapped, Model(seed=1)], OptimizerConfig(lr=1e-3))


def test_torchs_ddp_needs_ordinary_gradients(tmp_path):
    is_ours = not torch.distributed.is_initialized()  # tests of the engine leave a group behind
    if is_ours:
        store = f"file://{tmp_path}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Model())
        with pytest.raises(UserError, match=r"DistributedDataParallel averages \.grad"):
            get_megatron_optimizer(model, OptimizerConfig(lr=1e-3))
        optimizer = get_megatron_optimizer(model, OptimizerConfig(lr=1e-3, params_have_main_grad=False))
        before = model.module.head.weight.detach().clone()
        train(model, optimizer, steps=1)
        assert not torch.equal(model.module.head.weight, before)
        del model, optimizer  # a reducer that outlives its group may wait for it for ever
    finally:
        if is_ours:
            torch.distributed.destroy_process_group()


def test_a_users_strategy_works_through_local_ddp_with_its_instruments():
    model, scaler = Model().half(), MaxValueGradScaler(2.0**20)
    instruments = Instruments.attach(model, scaler)
    wrapped = LocalDDP(model, instruments=instruments)
    options = {"grad_scaler": scaler, "instruments": instruments}
    optimizer = get_megatron_optimizer(wrapped, OptimizerConfig(lr=1e-3, fp16=True), **options)
    assert optimizer.grad_scaler is scaler
    train(wrapped, optimizer, steps=14)
    assert scaler.scale < 2.0**20  # its gradients would have overflowed, or it has seen that they would
    assert optimizer.report.is_applied
    with pytest.raises(UserError, match="fp16 and bf16 are off"):
        get_megatron_optimizer(Model(), OptimizerConfig(lr=1e-3), grad_scaler=MaxValueGradScaler())
