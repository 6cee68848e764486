import pytest

from megalowbit.engine.versions.internals import (
    Contract,
    deepspeed_object,
    deepspeed_source,
    has_attribute,
    name_contracts,
    takes,
)

ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"


def test_a_check_that_returns_false_or_raises_is_a_broken_contract():
    def gone():
        raise AttributeError("gone")

    checks = (lambda: 1, lambda: "", gone)
    assert [Contract(name="a", breaks="b", check=check).holds() for check in checks] == [True, False, False]


def test_a_dotted_name_is_a_module_or_an_object_within_it():
    import deepspeed.runtime.engine as module

    assert deepspeed_object("deepspeed.runtime.engine") is module
    assert deepspeed_object(f"{ENGINE}.step") is module.DeepSpeedEngine.step
    with pytest.raises(AttributeError):
        deepspeed_object(f"{ENGINE}.stride")
    with pytest.raises(ImportError):
        deepspeed_object("deepspeak.engine")


@pytest.mark.parametrize(
    ("name", "is_there"),
    [("step", True), ("global_steps", True), ("module", True), ("stride", False), ("module_is", False)],
)
def test_attributes_of_the_class_and_of_its_objects_are_found(name, is_there):
    assert has_attribute(ENGINE, name, "runtime/engine.py") == is_there


def test_arguments_are_looked_up_by_name():
    def function(first, *, second=0):
        """Two."""

    assert takes(function, ("second", "first"))
    assert not takes(function, ("third",))


def test_every_contract_has_a_unique_name_and_says_what_breaks():
    contracts = list(name_contracts())
    assert len({each.name for each in contracts}) == len(contracts)
    assert all(each.breaks for each in contracts)


def test_several_sources_are_concatenated_in_order():
    both = deepspeed_source("pipe/__init__.py", "__init__.py")
    assert both == deepspeed_source("pipe/__init__.py") + deepspeed_source("__init__.py")
    assert "def initialize(" in both
