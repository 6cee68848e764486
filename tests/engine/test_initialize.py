import json
import logging

import pytest
import torch

from megalowbit.config.deepspeed_json import read_deepspeed_config
from megalowbit.engine.deepspeed_optimizer import DeepSpeedFloat16Optimizer, DeepSpeedFP32Optimizer
from megalowbit.engine.initialize import initialize
from megalowbit.errors import UserError
from megalowbit.layers import cpu_gemm
from megalowbit.layers.conversion.convert import bit_layers, convert, random_stream

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def config(precision="bf16", **changes):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
        "megalowbit": {"precision": precision, "grad_scaler": {"type": "constant", "scale": 64.0}}
        if precision == "fp16"
        else {"precision": precision},
        **changes,
    }


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def train(engine, steps=30):
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 4, generator=generator)
        y = engine(x.to(engine.module[0].weight.dtype)).float()
        loss = (y - x.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", DTYPES)
def test_every_precision_trains(precision):
    engine, optimizer, dataloader, scheduler = initialize(model=model(), config=config(precision))
    assert type(optimizer) is (DeepSpeedFP32Optimizer if precision == "fp32" else DeepSpeedFloat16Optimizer)
    assert {p.dtype for p in engine.module.parameters()} == {DTYPES[precision]}
    assert (dataloader, scheduler) == (None, None)
    losses = train(engine)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert engine.skipped_steps == 0


@pytest.mark.parametrize(
    ("precision", "choice", "expected"),
    [("bf16", "fp32", True), ("bf16", "bf16", False), ("fp32", "fp32", False), ("fp16", "fp32", False)],
)
def test_a_bf16_engine_lets_torch_follow_the_choice_of_products(monkeypatch, precision, choice, expected):
    cpu_gemm._of_process.cache_clear()
    monkeypatch.setenv(cpu_gemm.VARIABLE, choice)
    initialize(model=model(), config=config(precision))
    assert (cpu_gemm._of_process().library is not None) == expected


def test_masters_are_the_initial_weights_exactly():
    original = model()
    expected = [p.detach().clone() for p in original.parameters()]
    _, optimizer, _, _ = initialize(model=original, config=config())
    masters = [m for group in optimizer.fp32_from_float16_groups for m in group]
    halves = [p for group in optimizer.float16_groups for p in group]
    for parameter, start in zip(original.parameters(), expected, strict=True):
        (index,) = [i for i, half in enumerate(halves) if half is parameter]
        assert torch.equal(masters[index], start)


def test_matrices_decay_and_biases_do_not():
    _, optimizer, _, _ = initialize(model=model(), config=config())
    decays = {p.ndim: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays == {2: 0.1, 1: 0.0}


def test_given_groups_are_used_unchanged():
    net = model()
    groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters()}]
    _, optimizer, _, _ = initialize(model=net, config=config(), model_parameters=groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.02]


def test_frozen_parameters_are_cast_and_buffers_are_not():
    net = model()
    net[0].requires_grad_(False)
    net.register_buffer("table", torch.ones(2))
    engine, optimizer, _, _ = initialize(model=net, config=config())
    assert engine.module[0].weight.dtype == torch.bfloat16
    assert engine.module.table.dtype == torch.float32
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2
    assert len(train(engine, 2)) == 2


def test_a_configuration_may_be_a_read_object_or_a_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config("fp32")))
    runs = [train(initialize(model=model(), config=c)[0], 3) for c in (path, read_deepspeed_config(path))]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 4}},
        {"type": "LinearLR", "params": {"start_factor": 0.1, "total_iters": "auto"}},
    ],
)
def test_the_configured_scheduler_moves_the_learning_rate(block):
    engine, _, _, scheduler = initialize(model=model(), config=config(scheduler=block), total_steps=10)
    rates = [engine.get_lr()[0]]
    for _ in range(4):
        train(engine, 1)
        rates.append(engine.get_lr()[0])
    assert scheduler is not None
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] <= 0.02


def test_a_scheduler_callable_receives_the_wrapped_optimizer():
    def make(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    engine, *_ = initialize(model=model(), config=config(), lr_scheduler=make)
    train(engine, 2)
    assert engine.get_lr() == [0.005, 0.005]


def test_an_optimizer_of_the_caller_needs_a_scheduler_of_the_caller():
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    settings = config()
    del settings["optimizer"]
    engine, optimizer, _, _ = initialize(model=net, config=settings, optimizer=inner, lr_scheduler=scheduler)
    assert optimizer.optimizer is inner
    train(engine, 2)
    assert engine.get_lr() == [0.125]


@pytest.mark.filterwarnings("error:'pin_memory' argument")  # on CPUs, each rank would print it
def test_training_data_gives_a_loader_of_micro_batches():
    data = torch.utils.data.TensorDataset(torch.randn(12, 4))
    _, _, loader, _ = initialize(model=model(), config=config(), training_data=data)
    assert [batch[0].shape for batch in loader] == [(4, 4)] * 3


def test_deepspeed_logs_only_warnings_unless_asked():
    levels = []
    for changes in ({}, {"log_level": "info"}, {}):
        initialize(model=model(), config=config(**changes))
        levels.append(logging.getLogger("DeepSpeed").level)
    assert levels == [logging.WARNING, logging.INFO, logging.WARNING]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": config(tensorboard={"enabledd": True})}, "DeepSpeed rejects .*enabledd"),
        ({"config": config(communication_data_type="int8")}, "unknown communication_data_type .int8."),
        ({"model": model().double()}, "parameter 0.weight is float64 but precision is bf16"),
        ({"model": model().half()}, "parameter 0.weight is float16 but precision is bf16"),
        ({"model_parameters": list(model().parameters())}, "holds 4 parameters that are not"),
        ({"model_parameters": []}, "holds 0 parameters"),
        ({"model": model().requires_grad_(False)}, "no trainable parameter"),
        (
            {"lr_scheduler": torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model().parameters()))},
            "belongs to another optimizer",
        ),
        (
            {"optimizer": torch.optim.SGD(model().parameters()), "model_parameters": []},
            "pass optimizer or model_parameters",
        ),
    ],
)
def test_arguments_that_cannot_be_combined_raise_a_one_line_error(arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        initialize(**{"model": model(), "config": config(), **arguments})
    assert "\n" not in str(caught.value)


def quantised(recipe):
    return config(megalowbit={"precision": "bf16", "recipe": recipe})


def test_a_quantising_recipe_converts_the_model_and_it_trains():
    net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
    engine, *_ = initialize(model=net, config=quantised("nvfp4"), seed=3)
    assert list(bit_layers(engine.module)) == ["0", "2"]
    assert random_stream(engine.module).seed == 3
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    losses = []
    for _ in range(8):
        loss = (engine(x).float() - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


SCHEDULED = {
    "late_switch": {"late_switch": {"at": 0.9}},
    "speculation": {"speculation": {"every": 20}},
    "oscillation_reset": {"oscillation_reset": {}},
    "parameter_split": {"recipe": {"base": "nvfp4", "parameter_split": {"rank": 2}}},
}
WARNINGS = {
    "late_switch": "megalowbit.late_switch is applied by launch/pretrain.py only: "
    "call mlb.switch_precision(model) in your training loop",
    "speculation": "megalowbit.speculation is applied by launch/pretrain.py only: "
    "create an mlb.PrecisionController(model, settings) in your training loop",
    "oscillation_reset": "megalowbit.oscillation_reset is applied by launch/pretrain.py only: leave it out",
    "parameter_split": "recipe.parameter_split: call mlb.split_weights(engine) before the steps that are due",
}


def warnings_of(caplog, settings):
    net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    caplog.clear()
    initialize(model=net, config=settings)
    return [each.getMessage() for each in caplog.records if each.name == "megalowbit.engine.initialize"]


@pytest.mark.parametrize(
    "names", [(), ("late_switch",), ("speculation",), ("parameter_split",), tuple(SCHEDULED)]
)
def test_a_schedule_that_the_callers_loop_must_apply_is_warned_about_once(caplog, tmp_path, names):
    settings = quantised("nvfp4")
    for name in names:
        settings["megalowbit"].update(SCHEDULED[name])
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    with caplog.at_level(logging.WARNING):
        for given in (settings, tmp_path / "ds.json"):
            assert warnings_of(caplog, given) == [WARNINGS[name] for name in names]
        assert warnings_of(caplog, read_deepspeed_config(settings)) == []


def test_a_schedule_set_to_null_gives_no_warning(caplog):
    settings = quantised({"base": "nvfp4", "parameter_split": None})
    settings["megalowbit"].update(late_switch=None, speculation=None)
    with caplog.at_level(logging.WARNING):
        assert warnings_of(caplog, settings) == []


def test_a_converted_model_is_not_converted_again():
    net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    convert(net, "nvfp4")
    layers = bit_layers(net)
    engine, *_ = initialize(model=net, config=quantised("nvfp4"))
    assert bit_layers(engine.module) == layers


def test_a_recipe_without_quantizers_leaves_plain_layers():
    engine, *_ = initialize(model=model(), config=quantised("bf16"))
    assert bit_layers(engine.module) == {}


def test_a_recipe_that_matches_no_layer_is_an_error():
    net = torch.nn.Sequential(torch.nn.Embedding(4, 4))
    with pytest.raises(UserError):
        initialize(model=net, config=quantised("nvfp4"))


def test_the_regularizer_changes_the_low_bit_layers_once_per_step():
    def moved(**block):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
        starts = [net[0].weight.detach().clone(), net[2].weight.detach().clone()]
        recipe = {"base": "nvfp4", "keep": ["2"]}
        settings = config(
            megalowbit={"precision": "bf16", "recipe": recipe, **block},
            gradient_accumulation_steps=2,
            gradient_clipping=0.0,
            optimizer={"type": "SGD", "params": {"lr": 1.0}},
        )
        engine, optimizer, _, _ = initialize(model=net, config=settings)
        x = torch.ones(4, 32, dtype=torch.bfloat16)
        for _ in range(2):
            engine.backward(engine(x).float().square().mean())
            engine.step()
        masters = [optimizer.master_of(net[index].weight).detach() for index in (0, 2)]
        return engine, starts, masters

    plain, _, without = moved()
    assert plain.regularizer is None
    block = {"strength": 0.5, "alpha1": 3.0, "alpha2": 1e-4, "epsilon": 1e-3}
    engine, starts, with_it = moved(regularizer=block)
    weight = starts[0].bfloat16().double()
    slope = 0.5 / weight.numel() * (2 * 3.0 * weight - 2 * 1e-4 * weight / (weight**2 + 1e-3) ** 2)
    torch.testing.assert_close((without[0] - with_it[0]).double(), slope, rtol=1e-3, atol=1e-7)
    assert torch.equal(without[1], with_it[1])  # a kept layer has no such gradient
    value = 0.5 / weight.numel() * (3.0 * weight**2 + 1e-4 / (weight**2 + 1e-3)).sum()
    assert engine.regularizer.value.item() == pytest.approx(float(value), rel=1e-6)


def test_a_regularizer_without_low_bit_layers_is_rejected():
    asked = config(megalowbit={"regularizer": {"strength": 1e-4}})
    with pytest.raises(UserError, match=r"regularizer\.strength = 0\.0001 but no low-bit layer is trained"):
        initialize(model=model(), config=asked)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_engine_reports_the_configured_gradient_norm(precision):
    norms = {}
    for name in ("global", "sum_of_norms"):
        settings = config(megalowbit={"precision": precision, "gradient_norm": name})
        engine, optimizer, _, _ = initialize(model=model(), config=settings)
        each = []
        optimizer.before_step = lambda _, engine=engine, each=each: each.extend(
            parameter.main_grad.double().norm().item() for parameter in engine.module.parameters()
        )
        train(engine, steps=1)
        norms[name] = (engine.get_global_grad_norm(), each)
    assert norms["sum_of_norms"][0] == pytest.approx(sum(norms["sum_of_norms"][1]), rel=1e-6)
    assert norms["global"][0] == pytest.approx(sum(n**2 for n in norms["global"][1]) ** 0.5, rel=1e-6)


def test_the_configuration_checks_run_inside_succeed_together(monkeypatch):
    depth, seen = [], []

    def together(work, *arguments, **named):
        depth.append(work)
        try:
            return work(*arguments, **named)
        finally:
            depth.pop()

    monkeypatch.setattr("megalowbit.engine.initialize.succeed_together", together)
    monkeypatch.setattr("megalowbit.engine.initialize.check_parts", lambda parts: seen.append(len(depth)))
    initialize(model=model(), config=config())
    assert seen == [1]
