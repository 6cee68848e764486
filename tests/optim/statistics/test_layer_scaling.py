import copy
import logging
import math
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from megalowbit.errors import UserError
from megalowbit.optim.gradients.buffer import GradBuffer
from megalowbit.optim.statistics.amax import GradientWatch
from megalowbit.optim.statistics.layer_scaling import RECOVERY_STEPS, LayerScaling, find_blocks
from megalowbit.optim.statistics.layer_scaling_settings import LayerScalingSettings

HIDDEN = 8


class Block(torch.nn.Module):
    """Residual; returns a tuple as transformers' blocks may, with a second output that matters too."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(HIDDEN, HIDDEN)
        self.gate = torch.nn.Linear(HIDDEN, 1)

    def forward(self, x, *, side=None):
        hidden = torch.tanh(self.inner(x if side is None else x + side))
        return x + hidden, self.gate(hidden).mean()


class Model(torch.nn.Module):
    def __init__(self, depth=3, is_checkpointing=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Linear(4, HIDDEN)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(depth))
        self.norm = torch.nn.LayerNorm(HIDDEN)
        self.is_checkpointing = is_checkpointing

    def forward(self, x):
        side = x = self.embed(x)
        extra = 0
        for block in self.blocks:
            if self.is_checkpointing:
                x, more = checkpoint(block, x, use_reentrant=False, side=side)
            else:
                x, more = block(x, side=side)
            extra = extra + more
        return self.norm(x).square().mean() + extra


def settle(scaling, octaves):
    """Set the factors as a loaded state does."""
    state = scaling.state_dict()
    for saved, value in zip(state["blocks"].values(), octaves, strict=True):
        saved["octaves"] = value
    scaling.load_state_dict(state)
    return scaling


def gradients_of(model, octaves=None, scale=1.0):
    """fp32 gradients, with factors divided out; without `octaves`, without layer scaling."""
    scaling = None
    if octaves is not None:
        scaling = settle(LayerScaling(model, find_blocks(model)), octaves)
    buffer = GradBuffer(model.parameters(), factor_of=scaling and scaling.factor_of)
    torch.manual_seed(1)
    dtype = next(model.parameters()).dtype
    for _ in range(2):
        (model(torch.randn(5, 4).to(dtype)).float() * scale).backward()
    return buffer.flat.clone()


@pytest.mark.parametrize("is_checkpointing", [False, True])
def test_in_fp32_gradients_are_the_same_bit_for_bit(is_checkpointing):
    plain, ones, scaled = (
        gradients_of(Model(is_checkpointing=is_checkpointing), octaves)
        for octaves in (None, [0, 0, 0], [3, 16, 7])
    )
    assert plain.abs().min() > 0
    assert torch.equal(ones, scaled)
    # `side` goes into every block: its gradients are summed in another order than without the identities
    torch.testing.assert_close(plain, scaled)


def test_inside_a_block_gradients_are_multiplied_and_outside_they_are_not():
    plain, scaled = Model(), Model()
    LayerScaling(plain, find_blocks(plain))
    settle(LayerScaling(scaled, find_blocks(scaled)), [1, 2, 3])
    for model in (plain, scaled):
        torch.manual_seed(1)
        model(torch.randn(5, 4)).backward()
    for (name, a), b in zip(plain.named_parameters(), scaled.parameters(), strict=True):
        factor = 2 ** (int(name.split(".")[1]) + 1) if name.startswith("blocks") else 1
        assert torch.equal(a.grad * factor, b.grad), name


def test_tiny_fp16_gradients_are_flushed_without_and_kept_with_factors():
    def block_gradients(octaves, dtype):
        model = Model(depth=2).half().to(dtype)
        if octaves is not None:
            settle(LayerScaling(model, find_blocks(model)), octaves)
        torch.manual_seed(1)
        (model(torch.randn(5, 4).half().to(dtype)).to(torch.float64) * 2.0**-20).backward()
        factor = 1 if octaves is None else 2.0 ** octaves[0]
        return torch.cat([p.grad.double().flatten() / factor for p in model.blocks.parameters()])

    exact = block_gradients(None, torch.float64)
    without, kept = (block_gradients(octaves, torch.float16) for octaves in (None, [12, 12]))
    assert exact.abs().min() > 0
    assert (without == 0).double().mean() > 0.4
    assert (kept == 0).double().mean() < 0.05
    last = exact.numel() // 2  # the first block gets a gradient that has been outside, at S alone
    assert (kept - exact)[last:].norm() < 0.01 * exact[last:].norm()
    assert (without - exact)[last:].norm() > 0.03 * exact[last:].norm()


def test_a_gpt2_with_factors_has_the_gradients_it_has_without():
    config = GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=11, n_positions=8, use_cache=False)
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(config).eval()
    scaled = copy.deepcopy(plain)
    found = []
    for model, octaves in ((plain, None), (scaled, [5, 1, 16])):
        scaling = None
        if octaves is not None:
            assert find_blocks(model) == [f"transformer.h.{index}" for index in range(3)]
            scaling = settle(LayerScaling(model, find_blocks(model)), octaves)
        buffer = GradBuffer(model.parameters(), factor_of=scaling and scaling.factor_of)
        tokens = torch.arange(8)[None] % 11
        model(input_ids=tokens, labels=tokens).loss.backward()
        found.append(buffer.flat)
    assert torch.equal(*found)
    assert found[0].abs().sum() > 0


def run_steps(scaling, levels, *, loss_scale=1024.0, steps=40):
    """Feed amaxes that lie at `levels` (log2, unscaled) whatever the factors; returns the factors by step."""
    seen = []
    for _ in range(steps):
        factors = list(scaling.factors.values())
        amaxes = [loss_scale * factor * 2.0**level for factor, level in zip(factors, levels, strict=True)]
        assert not scaling.update([1.0, *amaxes, 1.0], found_inf=False, loss_scale=loss_scale)
        seen.append([int(math.log2(factor)) for factor in scaling.factors.values()])
    return seen


def test_factors_climb_an_octave_a_step_to_the_target_and_stay():
    model = Model()
    scaling = LayerScaling(model, find_blocks(model), LayerScalingSettings(target=2048.0))
    seen = run_steps(scaling, [-10.0, -4.0, 5.0])
    # 2^11 = 2^10 (S) · c · 2^level
    assert seen[:3] == [[1, 1, 0], [2, 2, 0], [3, 3, 0]]
    assert seen[-1] == [11, 5, 0]
    assert run_steps(scaling, [-30.0, -4.0, 5.0])[-1] == [16, 5, 0]  # max_factor


def test_factors_follow_a_jump_or_a_changed_loss_scale_at_once():
    model = Model()
    scaling = LayerScaling(model, find_blocks(model))
    run_steps(scaling, [-10.0, -4.0, -4.0])
    assert run_steps(scaling, [-7.0, -4.0, -4.0], steps=1) == [[8, 5, 5]]
    assert run_steps(scaling, [-7.0, -4.0, -4.0], loss_scale=4096.0, steps=1) == [[6, 3, 3]]


def test_factors_change_every_n_steps():
    model = Model()
    scaling = LayerScaling(model, find_blocks(model), LayerScalingSettings(every=4))
    assert [row[0] for row in run_steps(scaling, [-10.0, 0.0, 0.0], steps=9)] == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_an_overflow_is_attributed_to_the_last_block_in_forward_order():
    model = Model()
    scaling = LayerScaling(model, find_blocks(model))
    run_steps(scaling, [-10.0, -4.0, -4.0])
    inf = math.inf
    assert scaling.update([inf, inf, inf, 3.0, 1.0], found_inf=True, loss_scale=1024.0)
    assert list(scaling.factors.values()) == [2.0**11, 2.0**4, 2.0**5]
    # an overflow of the head is caused by S; one outside all watched modules, by no block
    assert not scaling.update([inf, inf, inf, inf, inf], found_inf=True, loss_scale=1024.0)
    assert not scaling.update([1.0] * 5, found_inf=True, loss_scale=1024.0)
    assert list(scaling.factors.values()) == [2.0**11, 2.0**4, 2.0**5]
    # the octave stays lost for some steps; otherwise the next step would overflow again
    assert run_steps(scaling, [-10.0, -4.0, -4.0])[-1] == [11, 4, 5]
    assert run_steps(scaling, [-10.0, -4.0, -4.0], steps=RECOVERY_STEPS)[-1] == [11, 5, 5]


def test_a_block_with_factor_1_is_not_at_fault():
    model = Model()
    scaling = LayerScaling(model, find_blocks(model))
    assert not scaling.update([1.0, 1.0, 1.0, math.inf, 1.0], found_inf=True, loss_scale=1.0)


def test_the_groups_of_a_watch_find_the_block_that_overflows():
    model = Model().half()
    scaling = settle(LayerScaling(model, find_blocks(model)), [0, 12, 0])
    watch = GradientWatch(model.named_parameters(), group_of=scaling.group_of, num_groups=scaling.num_groups)
    torch.manual_seed(1)
    (model(torch.randn(5, 4).half()).float() * 2.0**14).backward()
    amaxes = watch.take().tolist()
    assert [math.isfinite(amax) for amax in amaxes[2:]] == [False, True, True]
    assert scaling.update(amaxes, found_inf=True, loss_scale=2.0**14)
    assert list(scaling.factors.values()) == [1.0, 2.0**11, 1.0]


def test_a_resumed_layer_scaling_continues_exactly():
    model = Model()
    one, other = (LayerScaling(model, find_blocks(model)) for _ in range(2))
    run_steps(one, [-10.0, -4.0, -3.3], steps=7)
    one.update([1.0, 1.0, math.inf, 1.0, 1.0], found_inf=True, loss_scale=64.0)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert other.factors == one.factors
    assert run_steps(one, [-9.0, -4.5, -3.3], steps=9) == run_steps(other, [-9.0, -4.5, -3.3], steps=9)
    assert one.state_dict() == other.state_dict()


def test_a_state_of_other_blocks_is_refused():
    model = Model()
    scaling = LayerScaling(model, find_blocks(model))
    state = LayerScaling(model, find_blocks(model)[:2]).state_dict()
    with pytest.raises(UserError, match="does not fit the blocks"):
        scaling.load_state_dict(state)


def test_blocks_that_share_parameters_share_a_factor():
    model = Model()
    model.blocks[2].inner.weight = model.blocks[0].inner.weight
    scaling = LayerScaling(model, find_blocks(model))
    assert scaling.num_groups == 4
    assert scaling.group_of(model.blocks[1].inner.weight) == 1
    assert scaling.group_of(model.blocks[2].gate.bias) == 2  # the later one decides the order
    assert scaling.group_of(model.blocks[0].gate.bias) == 2
    settle(scaling, [3, 5])
    assert list(scaling.factors.values()) == [8.0, 32.0, 32.0]
    tied = Model()
    tied.blocks[2].inner.weight = tied.blocks[0].inner.weight
    same = Model()
    same.blocks[2].inner.weight = same.blocks[0].inner.weight
    assert torch.equal(gradients_of(tied, [3, 5]), gradients_of(same, [0, 0]))


def test_a_block_sharing_parameters_with_the_outside_has_no_factor_and_is_logged(caplog):
    model = Model()
    model.norm.weight = model.blocks[1].inner.bias
    model.blocks[2].gate.weight = model.blocks[1].gate.weight
    with caplog.at_level(logging.WARNING):
        scaling = LayerScaling(model, find_blocks(model))
    assert list(scaling.factors) == ["blocks.0"]
    assert "blocks.1, blocks.2 share parameters" in caplog.text
    assert scaling.factor_of(model.blocks[2].inner.weight) == 1.0


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["blocks.7"], "no module 'blocks.7'"),
        (["blocks.0", "blocks.0"], "a module occurs twice"),
        (["blocks.0", "blocks"], "blocks.0 is inside blocks"),
    ],
)
def test_names_that_do_not_work_are_refused(names, message):
    with pytest.raises(UserError, match=message):
        LayerScaling(Model(), names)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UserError, match=r"no nn\.ModuleList"):
        find_blocks(torch.nn.Linear(2, 2))


def test_a_detached_scaling_leaves_the_model_alone():
    model = Model()
    scaling = settle(LayerScaling(model, find_blocks(model)), [4, 4, 4])
    scaling.detach()
    assert set(scaling.factors.values()) == {1.0}
    assert torch.equal(gradients_of(model), gradients_of(Model()))


def test_figures_for_another_number_of_groups_raise_a_value_error():
    with pytest.raises(ValueError, match="5 groups"):
        LayerScaling(Model(), find_blocks(Model())).update([1.0], found_inf=False, loss_scale=1.0)


DAMAGED = [None, "3", math.nan, math.inf, -1, 2.5, 10**400, torch.ones(2), [1]]


@pytest.mark.parametrize("value", DAMAGED, ids=str)
@pytest.mark.parametrize("key", ["octaves", "penalty", "clean_steps", "average", "applied_steps"])
def test_a_damaged_state_is_refused_and_changes_nothing(key, value):
    if key == "average" and str(value) in ("None", "-1", "2.5"):
        return  # it may be these
    model = Model()
    scaling = LayerScaling(model, find_blocks(model))
    run_steps(scaling, [-10.0, -4.0, -3.3], steps=3)
    state, before = copy.deepcopy(scaling.state_dict()), copy.deepcopy(scaling.state_dict())
    state["applied_steps"] += 1
    state["blocks"]["blocks.0"]["clean_steps"] += 1
    (state if key in state else state["blocks"]["blocks.2"])[key] = value
    for load in (scaling.check_state_dict, scaling.load_state_dict):
        with pytest.raises(UserError, match=rf"damaged, {key}.* = "):
            load(state)
        assert scaling.state_dict() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: None,
        lambda _: [1],
        lambda state: {**state, "blocks": None},
        lambda state: {**state, "blocks": {**state["blocks"], 7: {}}},
        lambda state: {**state, "blocks": {**state["blocks"], "blocks.1": [0]}},
        lambda state: {"blocks": state["blocks"]},
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(damage):
    model = Model()
    scaling = settle(LayerScaling(model, find_blocks(model)), [1, 2, 3])
    before = copy.deepcopy(scaling.state_dict())
    with pytest.raises(UserError, match="layer_scaling state"):
        scaling.load_state_dict(damage(before))
    assert scaling.state_dict() == before


def test_a_state_may_hold_tensors_and_octaves_are_held_to_the_largest_factor():
    model = Model()
    scaling = LayerScaling(model, find_blocks(model), LayerScalingSettings(max_factor=4.0))
    state = scaling.state_dict()
    state["applied_steps"] = torch.tensor(3)
    state["blocks"]["blocks.1"] |= {"octaves": torch.tensor([3]), "average": torch.tensor(-1.5)}
    scaling.check_state_dict(state)
    assert set(scaling.factors.values()) == {1.0}
    scaling.load_state_dict(state)
    assert scaling.state_dict()["applied_steps"] == 3
    assert scaling.state_dict()["blocks"]["blocks.1"]["average"] == -1.5
    assert list(scaling.factors.values()) == [1.0, 4.0, 1.0]


def test_settings_choose_modules_by_pattern_or_else_the_blocks():
    model = Model()
    assert list(LayerScaling.from_settings(model, LayerScalingSettings()).factors) == find_blocks(model)
    by_pattern = LayerScalingSettings(modules=("*.gate", "blocks.0.*", "embed"))
    chosen = LayerScaling.from_settings(model, by_pattern)
    assert list(chosen.factors) == [
        "embed",
        "blocks.0.inner",
        "blocks.0.gate",
        "blocks.1.gate",
        "blocks.2.gate",
    ]
    assert chosen.settings is by_pattern


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("*.gate", "*.attn"), r"modules: '\*\.attn' matches no module"),
        (("blocks.*",), "is inside"),
        (("blocks",), "blocks is a ModuleList, which is never called"),
    ],
)
def test_patterns_that_name_nothing_useful_are_refused(patterns, message):
    with pytest.raises(UserError, match=message):
        LayerScaling.from_settings(Model(), LayerScalingSettings(modules=patterns))


def test_chosen_modules_leave_gradients_as_they_are_bit_for_bit():
    plain, scaled = Model(), Model()
    scaling = LayerScaling.from_settings(scaled, LayerScalingSettings(modules=("*.inner", "*.gate")))
    settle(scaling, [3, 1, 16, 7, 2, 5])
    buffers = [GradBuffer(plain.parameters()), GradBuffer(scaled.parameters(), factor_of=scaling.factor_of)]
    for model in (plain, scaled):
        torch.manual_seed(1)
        model(torch.randn(5, 4)).backward()
    assert torch.equal(buffers[0].flat, buffers[1].flat)
    assert buffers[0].flat.any()


@pytest.mark.parametrize("octaves", [[0, 0, 0], [3, 16, 7]])
def test_a_graph_of_gradients_is_an_error(octaves):
    def gradient_of_x(model):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        return torch.autograd.grad(model(x), x, create_graph=True)[0]

    scaled = Model()
    settle(LayerScaling(scaled, find_blocks(scaled)), octaves)
    gradient_of_x(Model()).square().sum().backward()  # the remedy
    with pytest.raises(
        UserError,
        match=r"^second derivatives of a model with layer_scaling are not defined .*: leave it out$",
    ):
        gradient_of_x(scaled)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_has_ordinary_gradients(duplicate):
    model, plain = Model(), Model()
    settle(LayerScaling(model, find_blocks(model)), [3, 4, 5])
    twin = duplicate(model)
    for each in (twin, plain):
        each(torch.ones(2, 4)).backward()
    for one, other in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
