import itertools

from quick_cases import covering, every_pair, every_value


def quick(decorator):
    return [each.values for each in decorator.args[1] if not each.marks]


def test_few_cases_have_every_pair_of_values():
    axes = {"a": "wxyz", "b": "pqr", "c": [0, 1], "d": [0, 1]}
    decorator = every_pair(**axes)
    assert len(decorator.args[1]) == 4 * 3 * 2 * 2  # none is left out
    found = quick(decorator)
    assert len(found) <= 14
    for (one, first), (other, second) in itertools.combinations(enumerate(axes.values()), 2):
        assert {(case[one], case[other]) for case in found} == set(itertools.product(first, second))


def test_fewer_have_every_value():
    found = quick(every_value(a="wxyz", b="pqr", c=[0, 1]))
    assert len(found) == 4
    assert [set(values) for values in zip(*found, strict=True)] == [set("wxyz"), set("pqr"), {0, 1}]


def test_the_choice_is_the_same_in_every_process():
    cases = list(itertools.product(range(4), range(3), range(3)))
    assert covering(cases, 2) == covering(list(cases), 2)
