import copy
import pickle

import pytest

from megalowbit.optim.gradients.report import Overflow, StepReport

SPILL = {"tensor": "transformer.h.3.mlp.c_fc.weight", "num_gradients": 148}


def overflow(**changes):
    return Overflow(**{**SPILL, "rank": 5, "num_tensors": 1, "ranks": (5,), **changes})


def test_a_report_is_the_tuple_that_megatron_returns():
    report = StepReport(is_applied=True, grad_norm=1.5, num_zeros=7, loss_scale=8.0)
    assert report == (True, 1.5, 7)
    success, norm, zeros = report
    assert (success, norm, zeros) == (report.is_applied, report.grad_norm, report.num_zeros)
    assert isinstance(report, tuple)
    assert report.loss_scale == 8.0
    assert report.overflow is None


def test_a_skipped_step_has_neither_norm_nor_zeros():
    report = StepReport(is_applied=False, grad_norm=3.0, num_zeros=1, loss_scale=4.0, overflow=overflow())
    assert report == (False, None, None)
    assert (report.is_applied, report.grad_norm, report.num_zeros) == (False, None, None)
    assert report.overflow == overflow()


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (StepReport(is_applied=True, grad_norm=1.23456, loss_scale=65536.0), "applied, gradient norm 1.235, "
         "loss scale 2^16"),
        (StepReport(is_applied=True, grad_norm=2.0, num_zeros=12345), "applied, gradient norm 2, "
         "12,345 zeros, loss scale 1"),
        (StepReport(is_applied=False, loss_scale=512.0), "skipped at loss scale 2^9"),
        (StepReport(is_applied=False, loss_scale=512.0, overflow=overflow()), "skipped at loss scale 2^9: "
         "overflow in transformer.h.3.mlp.c_fc.weight on rank 5"),
    ],
    ids=["applied", "zeros", "skipped", "located"],
)  # fmt: skip
def test_a_report_is_one_line_in_a_log(report, line):
    assert str(report) == line


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, " on rank 5"),
        (
            {"num_tensors": 148},
            " on rank 5 (and in all 148 gradients: check the loss and the forward pass)",
        ),
        ({"num_tensors": 3}, " on rank 5 (first of 3 of 148 gradients)"),
        ({"ranks": (5, 6, 9)}, " on rank 5 (3 ranks overflowed)"),
        ({"num_tensors": 2, "ranks": (5, 6)}, " on rank 5 (first of 2 of 148 gradients, 2 ranks overflowed)"),
        ({"rank": None, "ranks": (0, 1)}, ""),
        ({"rank": None, "num_tensors": 2, "ranks": (0, 1)}, " (first of 2 of 148 gradients)"),
    ],
)
def test_an_overflow_says_which_tensor_where_and_how_far_it_went(changes, more):
    assert str(overflow(**changes)) == f"overflow in transformer.h.3.mlp.c_fc.weight{more}"


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda report: pickle.loads(pickle.dumps(report))],
    ids=["copy", "deepcopy", "pickle"],
)  # fmt: skip
@pytest.mark.parametrize("is_applied", [True, False])
def test_a_copy_has_all_fields_of_the_report(copied, is_applied):
    report = StepReport(
        is_applied=is_applied, grad_norm=1.5, num_zeros=7, loss_scale=8.0,
        overflow=None if is_applied else overflow(),
    )  # fmt: skip
    other = copied(report)
    assert (type(other), other) == (StepReport, report)
    assert (other.loss_scale, other.overflow, str(other)) == (8.0, report.overflow, str(report))
