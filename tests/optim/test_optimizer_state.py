import copy

import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.optim.optimizer_state import check_inner_state, check_masters, copy_masters, find_key


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
