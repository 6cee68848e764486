import pytest

from megalowbit.formats.element import E2M1, ElementFormat


def test_e2m1_lists_its_sixteen_numbers_by_code():
    assert E2M1.code_values()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E2M1.code_values()[9:] == [-0.5, -1, -1.5, -2, -3, -4, -6]
    assert E2M1.max == 6
    assert E2M1.sign_code == 8


@pytest.mark.parametrize(
    ("magnitude", "rounded"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (5.01, 6), (100, 6), (0.2, 0)],
)
def test_nearest_code_ties_to_even_and_saturates(magnitude, rounded):
    assert E2M1.grid[E2M1.nearest_code(magnitude)] == rounded


def test_every_threshold_is_a_whole_multiple_of_the_quantum():
    for low, high in zip(E2M1.grid, E2M1.grid[1:], strict=False):
        assert ((low + high) / 2 / E2M1.quantum).is_integer()


@pytest.mark.parametrize("element", [E2M1, ElementFormat(name="e1m2", grid=(0, 1, 2, 3, 4, 6, 8, 10))])
def test_knots_map_each_grid_value_to_its_code(element):
    def clamp(x, bound):
        return max(-bound, min(bound, x))

    for code, value in enumerate(element.grid):
        for sign in (1, -1):
            position = sum(weight * clamp(sign * value, bound) for bound, weight in element.knots)
            assert position == sign * code
