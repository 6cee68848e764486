import pytest
import torch

from megalowbit.telemetry.facts import check_facts
from megalowbit.telemetry.overflow.counters import OperandCounts
from megalowbit.telemetry.step_facts import reduce_step_facts
from megalowbit.telemetry.summary import RunSummary, RunTotals


def test_plain_values_pass():
    facts = {"loss": 1.0, "skipped_steps": 3, "is_final": True, "name": "x", "overflow": None}
    assert check_facts(facts) is None


def test_what_steps_and_summaries_report_is_plain():
    check_facts(reduce_step_facts(torch.tensor(1.0)).facts())
    check_facts(RunSummary(totals=RunTotals(), overflow=OperandCounts()).facts())


@pytest.mark.parametrize("value", [torch.tensor(1.0), [1.0], {"a": 1}])
def test_anything_else_is_refused_by_name(value):
    with pytest.raises(TypeError, match="fact 'grad_norm' must be a plain number"):
        check_facts({"loss": 1.0, "grad_norm": value})
