import copy

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.optim.optimizers.chained import ChainedOptimizer
from megalowbit.optim.optimizers.mixed_precision import FP32Optimizer
from megalowbit.optim.optimizers.saved_state import check_inner_state, check_masters, copy_masters, find_key


def stepped_adam(*shapes):
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = torch.optim.AdamW([{"params": [p]} for p in parameters])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_the_newest_key_wins_and_old_ones_are_understood():
    assert find_key({"new": 1, "old": 2}, ("new", "old")) == 1
    assert find_key({"old": 2}, ("new", "old")) == 2
    assert find_key({}, ("new",), default=[]) == []
    with pytest.raises(UserError, match=r"lacks 'new': found \['other'\]"):
        find_key({"other": 2}, ("new", "old"))


def test_the_state_of_the_same_optimizer_fits():
    optimizer = stepped_adam((2, 3), (4,))
    check_inner_state(optimizer.state_dict(), optimizer)


def test_a_state_with_other_groups_is_refused():
    with pytest.raises(UserError, match=r"groups of \[1\] parameters, the model \[1, 1\]"):
        check_inner_state(stepped_adam((2, 3)).state_dict(), stepped_adam((2, 3), (4,)))


def test_a_state_with_a_moment_of_another_shape_is_refused():
    with pytest.raises(UserError, match=r"exp_avg of parameter 0 has shape \(3, 2\)"):
        check_inner_state(stepped_adam((3, 2)).state_dict(), stepped_adam((2, 3)))


def test_something_else_than_a_state_is_refused():
    with pytest.raises(UserError, match="lacks state, param_groups"):
        check_inner_state({"momentum": 1}, stepped_adam((1,)))


def test_masters_are_copied_bit_for_bit_whatever_empty_groups_lie_between():
    saved = [[torch.randn(2, 3)], [], [torch.randn(4), torch.randn(())]]
    masters = [[torch.zeros(2, 3)], [torch.zeros(4), torch.zeros(())], []]
    check_masters(saved, masters)
    copy_masters(saved, masters)
    assert torch.equal(masters[0][0], saved[0][0])
    assert torch.equal(masters[1][0], saved[2][0])
    assert torch.equal(masters[1][1], saved[2][1])


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ([[torch.ones(2)]], r"groups of \[1\]"),
        ([[torch.ones(2), torch.ones(3)], []], r"groups of \[2\]"),
        ([[torch.ones(2)], [torch.ones(4)]], r"saved master 1 has shape \(4,\)"),
    ],
)
def test_masters_that_do_not_fit_are_refused(saved, message):
    masters = [[torch.zeros(2)], [torch.zeros(3)]]
    before = copy.deepcopy(masters)
    with pytest.raises(UserError, match=message):
        check_masters(saved, masters)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(masters, before, strict=True))


def trained(kind, **arguments):
    """An optimizer of two groups after a step; the second parameter is a single number."""
    parameters = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(()))]
    optimizer = kind([{"params": [p]} for p in parameters], lr=0.1, **arguments)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


KINDS = [
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adafactor, {}),
]


@pytest.mark.parametrize(("kind", "arguments"), KINDS)
def test_what_an_optimizer_has_saved_it_can_load(kind, arguments):
    optimizer = trained(kind, **arguments)
    check_inner_state(copy.deepcopy(optimizer.state_dict()), optimizer)
    check_inner_state(kind(list(optimizer.param_groups), **arguments).state_dict(), optimizer)  # no step yet


def test_adam_and_adamw_take_each_others_state():
    check_inner_state(trained(torch.optim.Adam).state_dict(), trained(torch.optim.AdamW))
    check_inner_state(trained(torch.optim.AdamW).state_dict(), trained(torch.optim.Adam))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_state_of_another_update_rule_is_refused_in_one_line(momentum):
    adam, sgd = trained(torch.optim.AdamW), trained(torch.optim.SGD, momentum=momentum)
    with pytest.raises(
        UserError, match=r"^the optimizer state is of SGD, the optimizer is AdamW: resume .*$"
    ):
        check_inner_state(sgd.state_dict(), adam)
    with pytest.raises(UserError, match=r"^the optimizer state is of Adam, the optimizer is SGD: resume .*$"):
        check_inner_state(adam.state_dict(), sgd)
    mixed = {**sgd.state_dict(), "param_groups": adam.state_dict()["param_groups"]}
    if momentum:
        with pytest.raises(
            UserError, match=r"holds \['momentum_buffer'\], that of AdamW exp_avg, exp_avg_sq"
        ):
            check_inner_state(mixed, adam)


def set_in(state, path, value):
    *parents, last = path
    for key in parents:
        state = state[key]
    if value is DELETED:
        del state[last]
    else:
        state[last] = value


DELETED = object()
DAMAGE = [
    (("state", 0, "exp_avg"), torch.zeros(()), r"exp_avg of parameter 0 has shape \(\)"),
    (("state", 0, "exp_avg"), torch.zeros(2, 3, dtype=torch.complex64), "not a dense tensor"),
    (("state", 0, "exp_avg"), torch.zeros(()).expand(2, 3), "not a dense tensor"),
    (("state", 0, "exp_avg"), torch.zeros(2, 3, device="meta"), "not a dense tensor"),
    (("state", 0, "exp_avg"), torch.zeros(2, 3).to_sparse(), "not a dense tensor"),
    (("state", 0, "exp_avg"), None, "exp_avg of parameter 0 = None is not a tensor"),
    (("state", 0, "exp_avg_sq"), [1.0], "exp_avg_sq of parameter 0"),
    (("state", 1, "exp_avg_sq"), torch.zeros(1), r"exp_avg_sq of parameter 1 has shape \(1,\)"),
    (("state", 0, "exp_avg_sq"), DELETED, "state of parameter 0 holds"),
    (("state", 0, "step"), DELETED, "state of parameter 0 holds"),
    (("state", 0, "momentum_buffer"), torch.zeros(2, 3), "state of parameter 0 holds"),
    (("state", 0, "step"), torch.zeros(2), "step of parameter 0"),
    (("state", 0, "step"), torch.tensor(float("nan")), "step of parameter 0"),
    (("state", 0, "step"), float("inf"), "step of parameter 0"),
    (("state", 0, "step"), -1, "step of parameter 0 = -1"),
    (("state", 0, "step"), "3", "step of parameter 0 = '3'"),
    (("state", 0, "step"), None, "step of parameter 0"),
    (("state", 0, "step"), True, "step of parameter 0"),
    (("state", 0, "step"), 10**400, "step of parameter 0"),
    (("state", 0), None, "must map a parameter's index"),
    (("state", 0), [1], "must map a parameter's index"),
    (("state",), None, "must map a parameter's index"),
    (("state", 7), {}, r"has parameters \[7\] that no group has"),
    (("param_groups",), None, "must be a list of mappings"),
    (("param_groups", 0), 3, "must be a list of mappings"),
    (("param_groups", 0, "params"), None, "must be a list of mappings"),
    (("param_groups", 0, "params"), [1], "are not indices"),
    (("param_groups", 0, "params"), ["0"], "are not indices"),
    (("param_groups", 0, "lr"), DELETED, "group 0 of the optimizer state lacks lr"),
    (("param_groups", 1, "weight_decay"), DELETED, "group 1 of the optimizer state lacks weight_decay"),
    (("param_groups", 0, "betas"), (0.9,), "betas of group 0"),
    (("param_groups", 0, "betas"), (0.9, "x"), "betas of group 0"),
    (("param_groups", 0, "lr"), None, "lr of group 0 .* = None"),
    (("param_groups", 0, "eps"), float("nan"), "eps of group 0"),
]


@pytest.mark.parametrize(("path", "value", "message"), DAMAGE)
def test_a_damaged_state_of_adam_is_refused_by_name(path, value, message):
    optimizer = trained(torch.optim.AdamW)
    state = copy.deepcopy(optimizer.state_dict())
    set_in(state, path, value)
    with pytest.raises(UserError, match=message):
        check_inner_state(state, optimizer)


def test_a_momentum_may_be_missing_or_none_but_not_of_another_shape():
    optimizer = trained(torch.optim.SGD, momentum=0.9)
    state = optimizer.state_dict()
    check_inner_state({**state, "state": {0: {"momentum_buffer": None}, 1: {}}}, optimizer)
    with pytest.raises(UserError, match="momentum_buffer of parameter 0 has shape"):
        check_inner_state({**state, "state": {0: {"momentum_buffer": torch.zeros(())}}}, optimizer)


def test_a_step_may_be_a_number_or_a_tensor_of_one():
    optimizer = trained(torch.optim.AdamW)
    for step in (3, 3.0, torch.tensor(3), torch.tensor([3.0])):
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][0]["step"] = step
        check_inner_state(state, optimizer)


def test_the_factor_of_a_groups_learning_rate_may_not_be_lost():
    optimizer = trained(torch.optim.AdamW)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[1]["lr_scale"] = 0.1
    with pytest.raises(UserError, match="group 1 of the optimizer state lacks lr_scale"):
        check_inner_state(state, optimizer)


@pytest.mark.parametrize("state", [None, 3, [1], "optimizer"])
def test_a_state_that_is_not_a_mapping_is_rejected(state):
    with pytest.raises(UserError, match="must be a mapping"):
        find_key(state, ("optimizer",))
    with pytest.raises(UserError, match="must be a mapping"):
        check_inner_state(state, trained(torch.optim.AdamW))


@pytest.mark.parametrize(
    "saved",
    [
        None,
        torch.ones(2),
        [None],
        [torch.ones(2)],
        [[None]],
        [[[1.0, 1.0]]],
        [[torch.ones(2, device="meta")]],
        [[torch.ones(2, dtype=torch.complex64)]],
    ],
)
def test_masters_that_are_no_lists_of_tensors_are_refused(saved):
    with pytest.raises(UserError, match="saved master"):
        check_masters(saved, [[torch.zeros(2)]])


def test_tensors_of_other_update_rules_have_the_shape_of_their_parameter_or_a_factor_of_it():
    optimizer = trained(torch.optim.Adafactor)
    for shape in [(3, 1), (2,), (1, 2, 3)]:
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][0]["row_var"] = torch.zeros(shape)
        with pytest.raises(UserError, match="row_var of parameter 0 has shape"):
            check_inner_state(state, optimizer)
    adagrad = trained(torch.optim.Adagrad)
    state = copy.deepcopy(adagrad.state_dict())
    state["state"][0]["sum"] = torch.zeros(())
    with pytest.raises(UserError, match=r"sum of parameter 0 has shape \(\)"):
        check_inner_state(state, adagrad)


def test_a_state_that_fits_gives_the_same_steps_after_loading():
    whole, later = trained(torch.optim.AdamW, fused=True), trained(torch.optim.AdamW, fused=True)
    whole.step()
    state = copy.deepcopy(whole.state_dict())
    check_inner_state(state, later)
    later.load_state_dict(state)
    for mine, theirs in zip(whole.param_groups, later.param_groups, strict=True):
        torch.testing.assert_close(later.state[theirs["params"][0]], whole.state[mine["params"][0]])


def stepped(make):
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def torch_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.1)


def fp32(parameters):
    return FP32Optimizer(torch_optimizer(parameters), clip_grad=0.0)


def chain(parameters):
    return ChainedOptimizer([fp32([each]) for each in parameters])


@pytest.mark.parametrize("make", [torch_optimizer, fp32, chain])
def test_hooks_of_a_state_dict_are_called_as_torch_calls_them(make):
    saved, loaded, calls = stepped(make), stepped(make), []
    plain = saved.state_dict()

    def note(name, result):
        def hook(optimizer, *state):
            calls.append((name, optimizer in (saved, loaded), len(state)))
            return result(*state) if state else None

        return hook

    saved.register_state_dict_pre_hook(note("before", None))
    saved.register_state_dict_post_hook(note("after", lambda state: ["wrapped", state]))
    saved.register_state_dict_post_hook(note("last", lambda _: None))
    loaded.register_load_state_dict_pre_hook(note("load", lambda state: state[1]))
    loaded.register_load_state_dict_pre_hook(note("clear", clear))
    loaded.register_load_state_dict_post_hook(note("loaded", None))
    state = saved.state_dict()
    assert state[0] == "wrapped"
    assert str(state[1]) == str(plain)
    loaded.load_state_dict(state)
    assert calls == [("before", True, 0), ("after", True, 1), ("last", True, 1),
                     ("load", True, 1), ("clear", True, 1), ("loaded", True, 0)]  # fmt: skip


def clear(state):
    """Returns a copy, and empties what it was given."""
    kept = copy.copy(state)
    state.clear()
    return kept


@pytest.mark.parametrize("make", [torch_optimizer, fp32, chain])
def test_a_hook_that_adds_a_key_before_a_load_does_not_change_the_state_of_the_caller(make):
    optimizer = stepped(make)
    state = optimizer.state_dict()
    size = len(state)
    optimizer.register_load_state_dict_pre_hook(lambda _, each: clear(each))
    optimizer.load_state_dict(state)
    assert len(state) == size


def test_hooks_of_a_chains_parts_change_their_states():
    optimizer = stepped(chain)
    first = optimizer.chained_optimizers[0]
    first.register_state_dict_post_hook(lambda _, state: {"kept": state})
    first.register_load_state_dict_pre_hook(lambda _, state: state["kept"])
    state = optimizer.state_dict()
    assert list(state[0]) == ["kept"]
    optimizer.load_state_dict(state)


def test_a_refused_state_calls_no_hook_after_the_load():
    optimizer = stepped(fp32)
    optimizer.register_load_state_dict_post_hook(lambda _: pytest.fail("nothing was loaded"))
    with pytest.raises(UserError):
        optimizer.load_state_dict({"optimizer": {}})
