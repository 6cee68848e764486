import pytest
import torch
import transformers
from small_engines import config, model

from megalowbit.config.optimizer import fill_optimizer
from megalowbit.engine.build_optimizer import build_optimizer
from megalowbit.engine.initialize import initialize
from megalowbit.errors import UserError


def tiny_gpt2():
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def test_parameters_collected_before_a_conversion_that_replaces_them_are_rejected():
    net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    parameters = [torch.nn.Parameter(p.detach().clone()) for p in net.parameters()]
    with pytest.raises(UserError, match="convert the model first"):
        initialize(model=net, config=config("nvfp4"), model_parameters=parameters)


def test_an_optimizer_with_weights_that_the_conversion_replaced_is_rejected():
    """Conversion gives a `Conv1D` a new weight parameter; training the old one would have no effect."""
    net = tiny_gpt2()
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(UserError, match=r"optimizer holds 4 parameters .* no longer.* pass a callable"):
        initialize(model=net, config=config("nvfp4"), optimizer=optimizer)


@pytest.mark.parametrize("stage", [0, 1])
def test_an_optimizer_callable_gets_the_parameters_of_the_converted_model(stage):
    net, given = tiny_gpt2(), []
    settings = {**config("nvfp4"), "zero_optimization": {"stage": stage}}
    del settings["optimizer"]

    def make(groups):
        given.extend(id(each) for group in groups for each in group["params"])
        return torch.optim.SGD(groups, lr=0.5)

    engine, optimizer, _, _ = initialize(model=net, config=settings, optimizer=make)
    assert given == [id(each) for each in engine.module.parameters()]
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    tokens = torch.arange(8).unsqueeze(0)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    still = [name for name, p in engine.module.named_parameters() if torch.equal(p, before[name])]
    assert not [name for name in still if name.endswith("weight") and "h.0" in name and "ln" not in name]
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_callable_that_returns_no_optimizer_raises_a_one_line_error():
    with pytest.raises(UserError, match=r"optimizer returned a list: return a torch.optim.Optimizer"):
        initialize(model=model(), config=config(), optimizer=lambda groups: list(groups))
    with pytest.raises(UserError, match="optimizer is a str: pass a torch optimizer, or a callable"):
        initialize(model=model(), config=config(), optimizer="AdamW")


def filled(kind, **params):
    settings = {"optimizer": {"type": kind, "params": params}}
    fill_optimizer(settings)
    return settings["optimizer"]


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("AdamW", {}, torch.optim.AdamW),
        ("Adam", {}, torch.optim.AdamW),  # DeepSpeed's Adam decouples weight decay by default
        ("adam", {"adam_w_mode": False}, torch.optim.Adam),
        ("SGD", {"momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    ],
)
def test_the_default_optimizer_is_torchs_fused_adam_and_it_steps(kind, params, expected):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(filled(kind, lr=0.1, **params), [{"params": [parameter]}])
    assert type(optimizer) is expected
    assert optimizer.param_groups[0]["fused"]
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert (parameter < 1).all()


def test_the_weight_decay_of_a_group_overrides_the_configured_one():
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "weight_decay": 0.0}]
    assert build_optimizer(filled("AdamW", weight_decay=0.3), groups).param_groups[0]["weight_decay"] == 0.0


def two_layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def engine_of(model, stage, precision="bf16", **arguments):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        "megalowbit": {"precision": precision},
    }
    return initialize(model=model, config=config, **arguments)[0]


def step(engine, seed=0):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(x.to(next(engine.module.parameters()).dtype)).float().square().mean())
    engine.step()


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_block_frozen_between_steps_of_stage_0_stays_where_it_is(precision):
    engine = engine_of(two_layers(), 0, precision)
    for seed in range(3):
        step(engine, seed)
    engine.module[0].requires_grad_(False)
    frozen, trained = (layer.weight.detach().clone() for layer in engine.module)
    for seed in range(3):
        step(engine, seed)
    assert torch.equal(engine.module[0].weight, frozen)
    assert not torch.equal(engine.module[1].weight, trained)


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("gives", ["nothing", "all", "callable"])
def test_a_parameter_unfrozen_later_is_an_error_that_names_it(stage, gives):
    model = two_layers()
    model[0].bias.requires_grad_(False)
    arguments = {
        "nothing": {},
        "all": {"model_parameters": model.parameters()},
        "callable": {"optimizer": lambda groups: torch.optim.AdamW(groups, lr=0.1)},
    }
    engine = engine_of(model, stage, **arguments[gives])
    step(engine)
    engine.module[0].bias.requires_grad_(True)
    with pytest.raises(UserError, match=r"^0\.bias requires a gradient, but was frozen when the optimizer"):
        step(engine)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_parameter_that_the_caller_has_left_out_may_be_unfrozen(stage):
    model = two_layers()
    model[0].bias.requires_grad_(False)
    given = [each for each in model.parameters() if each.requires_grad]
    engine = engine_of(model, stage, model_parameters=given)
    before = engine.module[0].bias.detach().clone()
    engine.module[0].bias.requires_grad_(True)
    step(engine)
    assert torch.equal(engine.module[0].bias, before)
