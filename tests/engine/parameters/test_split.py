import copy

import pytest
import torch
from torch import nn

from megalowbit.engine.initialize import initialize
from megalowbit.engine.parameters.split import split_weights
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers, cache_weights, convert
from megalowbit.layers.parameter_split.split_linear import SPLIT_NAMES
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params, FP32Optimizer

IN, HIDDEN, RANK, LR = 16, 32, 4, 1e-2


def recipe(**split):
    return {"base": "nvfp4", "parameter_split": {"rank": RANK, **split}}


def build(dtype=torch.bfloat16, inner=torch.optim.AdamW, arguments=None, **split):
    """A converted model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, IN)).to(dtype)
    convert(model, recipe(**split))
    made = inner(model.parameters(), lr=LR, **(arguments or {}))
    if dtype == torch.float32:
        return model, FP32Optimizer(made, clip_grad=0.0)
    return model, Float16OptimizerWithFloat16Params(made, clip_grad=0.0, grad_scaler=None, bf16=True)


def train(model, optimizer, steps=3, seed=0):
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * seed + step)
        x = torch.randn(8, IN, generator=generator).to(next(model.parameters()).dtype)
        loss = (model(x).float() - x.float()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(masters):
    w, u, s, v = (master.detach().double() for master in masters)
    return w + u @ torch.diag(s) @ v


def masters_of(optimizer, layer):
    return [optimizer.master_of(part) for part in layer.parts()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_split_keeps_the_full_master_and_truncates_its_singular_values(dtype):
    model, optimizer = build(dtype)
    train(model, optimizer)
    before = [optimizer.master_of(layer.weight).detach().clone() for layer in bit_layers(model).values()]
    report = split_weights(model, optimizer)
    assert report.ranks == {"0": RANK, "2": RANK}
    assert str(report) == "2 weights split at rank 4; optimizer state projected"
    for layer, weight in zip(bit_layers(model).values(), before, strict=True):
        masters = masters_of(optimizer, layer)
        assert layer.is_split
        assert (whole(masters) - weight.double()).abs().max() < 1e-6
        values = torch.linalg.svdvals(weight.double())
        torch.testing.assert_close(masters[2].double(), values[:RANK], rtol=1e-5, atol=1e-6)
        residual = torch.linalg.svdvals(masters[0].detach().double())
        torch.testing.assert_close(residual[: len(values) - RANK], values[RANK:], rtol=1e-4, atol=1e-6)
        for part, master in zip(layer.parts(), masters, strict=True):
            assert torch.equal(part, master.to(dtype))


def test_a_second_split_starts_from_the_full_weight():
    model, optimizer = build()
    train(model, optimizer)
    split_weights(model, optimizer)
    train(model, optimizer, seed=1)
    layer = bit_layers(model)["0"]
    masters = masters_of(optimizer, layer)
    expected = whole(masters)
    values = torch.linalg.svdvals(expected)
    assert (masters[2] - values[:RANK]).abs().max() > 1e-4  # training has changed them
    split_weights(model, optimizer)
    assert (whole(masters) - expected).abs().max() < 1e-6
    torch.testing.assert_close(masters[2].double(), values[:RANK], rtol=1e-5, atol=1e-6)


def test_factors_get_moments_by_the_chain_rule_and_the_residual_keeps_those_of_the_weight():
    model, optimizer = build()
    train(model, optimizer)
    layer = bit_layers(model)["2"]
    before = copy.deepcopy(optimizer.state_of(layer.weight))
    split_weights(model, optimizer)
    after = [optimizer.state_of(part) for part in layer.parts()]
    for name, value in before.items():
        assert torch.equal(after[0][name], value)
    u, s, v = (master.detach().double() for master in masters_of(optimizer, layer)[1:])
    m, variance = before["exp_avg"].double(), before["exp_avg_sq"].double()
    s_matrix = torch.diag(s)
    expected = [
        (m @ v.t() @ s_matrix, variance @ v.t().square() @ s_matrix.square()),
        (torch.diag(u.t() @ m @ v.t()), torch.diag(u.t().square() @ variance @ v.t().square())),
        (s_matrix @ u.t() @ m, s_matrix.square() @ u.t().square() @ variance),
    ]
    for state, (first, second) in zip(after[1:], expected, strict=True):
        torch.testing.assert_close(state["exp_avg"].double(), first, rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(state["exp_avg_sq"].double(), second, rtol=1e-5, atol=1e-12)
        assert state["step"] == 3
        assert state["step"] is not after[0]["step"]
    assert first.abs().max() > 0


def test_reset_clears_the_moments_of_all_four_parts():
    model, optimizer = build(optimizer_state="reset")
    train(model, optimizer)
    report = split_weights(model, optimizer)
    assert "optimizer state reset" in str(report)
    for layer in bit_layers(model).values():
        assert [len(optimizer.state_of(part)) for part in layer.parts()] == [0, 0, 0, 0]
        assert optimizer.state_of(layer.bias)["step"] == 3
    train(model, optimizer, steps=1)
    for part in bit_layers(model)["0"].parts():
        assert optimizer.state_of(part)["step"] == 1


def test_a_split_before_the_first_step_has_no_state_to_carry():
    model, optimizer = build()
    split_weights(model, optimizer)
    train(model, optimizer, steps=1)
    assert all(optimizer.state_of(part)["step"] == 1 for part in bit_layers(model)["0"].parts())


def test_sgd_momentum_is_projected_like_a_first_moment():
    model, optimizer = build(inner=torch.optim.SGD, arguments={"momentum": 0.9})
    train(model, optimizer)
    layer = bit_layers(model)["0"]
    m = optimizer.state_of(layer.weight)["momentum_buffer"].double()
    split_weights(model, optimizer)
    _, u, s, v = (master.detach().double() for master in masters_of(optimizer, layer))
    found = [optimizer.state_of(part)["momentum_buffer"].double() for part in layer.parts()]
    torch.testing.assert_close(found[0], m, rtol=0, atol=0)
    torch.testing.assert_close(found[1], m @ v.t() * s, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(found[3], s[:, None] * (u.t() @ m), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("inner", [torch.optim.RMSprop, torch.optim.Adamax])
def test_unknown_optimizer_state_is_rejected_and_nothing_changes(inner):
    model, optimizer = build(inner=inner)
    train(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        UserError, match=f'{inner.__name__} keeps .*: use parameter_split.optimizer_state "reset"'
    ):
        split_weights(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(layer.is_split for layer in bit_layers(model).values())


def test_every_lazy_optimizer_can_be_reset():
    for inner in (torch.optim.RMSprop, torch.optim.Adamax, torch.optim.NAdam, torch.optim.SGD):
        model, optimizer = build(inner=inner, optimizer_state="reset")
        train(model, optimizer)
        split_weights(model, optimizer)
        train(model, optimizer)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
    model, optimizer = build(inner=torch.optim.Adagrad, optimizer_state="reset")
    with pytest.raises(UserError, match="Adagrad creates its state only once and cannot be reset"):
        split_weights(model, optimizer)


def test_training_continues_after_the_split():
    losses = {}
    for is_split in (False, True):
        model, optimizer = build(torch.float32)
        train(model, optimizer, steps=20)
        if is_split:
            split_weights(model, optimizer)
        losses[is_split] = train(model, optimizer, steps=20, seed=1)
    # close but not equal, because V is rounded too; then training continues
    assert losses[True][0] == pytest.approx(losses[False][0], rel=0.1)
    assert losses[True][-1] < losses[True][0]


def test_before_the_split_training_equals_that_without_factors_bit_for_bit():
    model, optimizer = build()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, IN)).to(torch.bfloat16)
    convert(plain, "nvfp4")
    other = Float16OptimizerWithFloat16Params(
        torch.optim.AdamW(plain.parameters(), lr=LR), clip_grad=0.0, grad_scaler=None, bf16=True
    )
    assert train(model, optimizer, steps=6) == train(plain, other, steps=6)
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        if name.rpartition(".")[2] in SPLIT_NAMES:
            assert not value.any()
        else:
            assert torch.equal(value, expected[name])


def test_merged_lr_is_the_peak_learning_rate_of_every_group():
    model, optimizer = build(merged_lr=4e-3)
    optimizer.param_groups[0]["lr"] = LR
    report = split_weights(model, optimizer)
    assert optimizer.param_groups[0]["lr_scale"] == pytest.approx(0.4)
    assert optimizer.param_groups[0]["lr"] == LR
    assert "learning rate times 0.4" in str(report)
    assert (
        split_weights(model, optimizer).lr_scale is None
    )  # reported only by the first split, but stays in force
    assert optimizer.param_groups[0]["lr_scale"] == pytest.approx(0.4)


def test_merged_lr_uses_the_peak_of_the_schedule_and_not_the_current_rate():
    class Warmup:  # like DeepSpeed's schedulers
        max_lrs = (0.02,)

    model, optimizer = build(merged_lr=4e-3)
    optimizer.param_groups[0]["lr"] = 1e-5
    split_weights(model, optimizer, lr_scheduler=Warmup())
    assert optimizer.param_groups[0]["lr_scale"] == pytest.approx(0.2)
    model, optimizer = build(merged_lr=4e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    split_weights(model, optimizer, lr_scheduler=scheduler)
    assert optimizer.param_groups[0]["lr_scale"] == pytest.approx(0.4)
    model, optimizer = build(merged_lr=4e-3)
    with pytest.raises(UserError, match="merged_lr needs the peak of object"):
        split_weights(model, optimizer, lr_scheduler=object())
    assert not bit_layers(model)["0"].is_split


def test_without_merged_lr_groups_are_unchanged():
    model, optimizer = build()
    split_weights(model, optimizer)
    assert "lr_scale" not in optimizer.param_groups[0]


def test_a_split_clears_cached_quantised_weights():
    model, optimizer = build()
    cache = cache_weights(model)
    model(torch.randn(2, IN, dtype=torch.bfloat16))
    assert len(cache) > 0
    split_weights(model, optimizer)
    assert len(cache) == 0


def test_weight_decay_shrinks_the_low_rank_part_as_fast_as_the_residual():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, HIDDEN))
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        "megalowbit": {"precision": "bf16", "recipe": recipe()},
        "gradient_clipping": 1.0,
    }
    engine, optimizer, *_ = initialize(model=model, config=settings)
    split_weights(engine)
    layer = bit_layers(engine.module)["0"]
    masters = masters_of(optimizer, layer)
    before = [master.detach().double() for master in masters]
    bias = optimizer.master_of(layer.bias).detach().clone()
    steps = 5
    for _ in range(steps):  # gradients are zero: only weight decay acts
        engine.backward((engine(torch.ones(8, IN, dtype=torch.bfloat16)) * 0).float().sum())
        engine.step()
    factor = (1 - LR * 0.1) ** steps
    w, u, s, v = (master.detach().double() for master in masters)
    low_rank = before[1] @ torch.diag(before[2]) @ before[3]
    torch.testing.assert_close(w, factor * before[0], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(u @ torch.diag(s) @ v, factor * low_rank, rtol=1e-5, atol=1e-8)
    assert torch.equal(optimizer.master_of(layer.bias), bias)


def test_a_plain_torch_optimizer_is_supported():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, HIDDEN))
    convert(model, recipe())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    model(torch.randn(4, IN)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = model[0].weight.detach().double()
    split_weights(model, optimizer)
    assert (whole(model[0].parts()) - before).abs().max() < 1e-6
    assert optimizer.state[model[0].split_u]["exp_avg"].shape == (HIDDEN, RANK)
    model, _ = build(merged_lr=1e-3)
    with pytest.raises(
        UserError, match="merged_lr needs one of megalowbit's optimizers, because AdamW does not"
    ):
        split_weights(model, torch.optim.AdamW(model.parameters()))


def test_frozen_layers_are_not_split():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, IN))
    model[0].requires_grad_(False)
    convert(model, recipe())
    report = split_weights(model, torch.optim.AdamW(model[1].parameters()))
    assert list(report.ranks) == ["1"]
    assert not model[0].is_split


def test_a_split_that_is_not_possible_raises_a_one_line_error():
    model, optimizer = build()
    with pytest.raises(UserError, match="finds no trained layer to split"):
        split_weights(nn.Linear(2, 2), optimizer)
    with pytest.raises(UserError, match="needs the model's optimizer"):
        split_weights(model)
    with pytest.raises(UserError, match=r"dict holds no full masters: set zero_optimization.stage 0"):
        split_weights(model, {})
    with pytest.raises(UserError, match=r"layer 0 has weight, split_u, .* outside of the optimizer"):
        split_weights(model, torch.optim.SGD([layer.weight for layer in bit_layers(model).values()]))
    with torch.no_grad():
        optimizer.master_of(bit_layers(model)["2"].weight)[0, 0] = torch.nan
    with pytest.raises(UserError, match="the weight of layer 2 is not finite"):
        split_weights(model, optimizer)
    assert not bit_layers(model)["0"].is_split


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_a_split_needs_only_the_engine(precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, IN))
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}},
        "megalowbit": {"precision": precision, "recipe": recipe(merged_lr=5e-3)},
        "gradient_clipping": 1.0,
    }
    if precision == "fp16":
        settings["megalowbit"]["grad_scaler"] = {"initial_scale": 256}
    engine, optimizer, _, _ = initialize(model=model, config=settings)
    dtype, losses = next(model.parameters()).dtype, []
    for step in range(60):
        if step == 7:
            with pytest.raises(UserError, match="not between micro-batches"):
                split_weights(engine)
        if step == 8:
            engine.backward(engine(torch.ones(8, IN, dtype=dtype)).float().sum())
            with pytest.raises(UserError, match="layer 0 has gradients that no step has applied"):
                split_weights(engine)
            optimizer.zero_grad()
            before = [
                optimizer.master_of(layer.weight).detach().double() for layer in bit_layers(model).values()
            ]
            report = split_weights(engine)
            for layer, weight in zip(bit_layers(model).values(), before, strict=True):
                assert (whole(masters_of(optimizer, layer)) - weight).abs().max() < 1e-6
        x = torch.randn(8, IN, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = (engine(x).float() - x.float()).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert report.lr_scale == pytest.approx(0.25)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    for layer in bit_layers(model).values():
        assert all(optimizer.state_of(part)["exp_avg"].any() for part in layer.parts())
