import math
from itertools import permutations

import pytest
import torch

from megalowbit.telemetry.overflow.counters import ROLES, TABLE_NAMES
from megalowbit.telemetry.overflow.device_table import DeviceTable
from megalowbit.telemetry.overflow.exact_sum import NUM_DIGITS, to_float, whole

CPU = torch.device("cpu")


def add(table, layer, role, *counts, error=(0.0, 1.0)):
    table.append(layer, role, torch.tensor(counts), torch.tensor(error, dtype=torch.float64))


def test_sums_by_role_equal_sums_of_python_integers():
    table = DeviceTable(CPU)
    generator = torch.Generator().manual_seed(1)
    expected = {role: [0] * 8 for role in ROLES}
    for number in range(30):
        role, layer = ROLES[number % 3], f"layer{number % 7}"
        counts = torch.randint(1, 2**40, (8,), generator=generator).tolist()
        counts[4] = 0
        expected[role] = [a + b for a, b in zip(expected[role], counts, strict=True)]
        add(table, layer, role, *counts)
    integers, errors = table.step_by_role()
    assert integers.dtype == torch.int64
    assert integers[:, :8].tolist() == [expected[role] for role in ROLES]
    assert integers[:, TABLE_NAMES.index("quantizations")].tolist() == [10, 10, 10]
    assert errors.tolist() == [[0.0, 10.0]] * 3


def test_asking_twice_changes_nothing():
    table = DeviceTable(CPU)
    add(table, "a", "input", 16, 1, 2, 3, 0, 1, 0, 0)
    first, second = table.step_by_role(), table.step_by_role()
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_the_run_is_taken_once_and_holds_finished_steps_only():
    table = DeviceTable(CPU)
    add(table, "a", "input", 16, 1, 2, 3, 0, 1, 0, 0)
    assert list(table.take_run()) == []
    table.close_step()
    ((key, row),) = table.take_run()
    assert key == ("a", "input")
    assert row[:11] == [16, 1, 2, 3, 0, 1, 0, 0, 1, 1, 0]
    assert [to_float(whole(row[start : start + NUM_DIGITS])) for start in (11, 11 + NUM_DIGITS)] == [0.0, 1.0]
    assert list(table.take_run()) == [(key, [0] * len(row))]


def test_an_empty_table_sums_to_zero():
    integers, errors = DeviceTable(CPU).step_by_role()
    assert integers.shape == (3, 11)
    assert not integers.any()
    assert not errors.any()


def test_the_row_index_follows_when_the_order_of_layers_changes():
    table = DeviceTable(CPU)
    for order in ("ab", "ba", "ab"):
        for layer in order:
            add(table, layer, "input", ord(layer), 0, 0, 0, 0, 1, 0, 0)
        table.close_step()
    assert {key[0]: row[0] for key, row in table.take_run()} == {"a": 3 * 97, "b": 3 * 98}


@pytest.mark.parametrize("layers", ["abc", "aaa"], ids=["of a role", "of a row"])
def test_errors_of_a_step_do_not_depend_on_the_order_of_additions(layers):
    """A GPU adds in any order; float64 sums would be 1 if 1 came first, and 1 + 2^-52 if it came last."""
    sums = set()
    for errors in permutations([1.0, 2.0**-53, 2.0**-53]):
        table = DeviceTable(CPU)
        for layer, error in zip(layers, errors, strict=True):
            add(table, layer, "input", 16, 0, 0, 0, 0, 1, 0, 0, error=(error, 1.0))
        sums.add(tuple(table.step_by_role()[1][0].tolist()))
    assert sums == {(1 + 2.0**-52, 3.0)}


def test_errors_of_a_step_are_the_nearest_numbers_to_their_sums():
    generator = torch.Generator().manual_seed(2)
    errors = torch.rand(500, 2, generator=generator, dtype=torch.float64)
    errors *= 2.0 ** torch.randint(-60, 60, (500, 2), generator=generator)
    table = DeviceTable(CPU)
    for number, pair in enumerate(errors.tolist()):
        add(table, f"layer{number % 9}", "input", 16, 0, 0, 0, 0, 1, 0, 0, error=pair)
    expected = [math.fsum(column) for column in errors.t().tolist()]
    assert table.step_by_role()[1][0].tolist() == expected
