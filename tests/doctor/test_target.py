import pytest

from megalowbit.doctor.target import TARGETS, cpu_target, named_target, target_of_device
from megalowbit.errors import UserError
from megalowbit.layers.matmul.fp4 import CAPABILITY
from megalowbit.telemetry.peak_tflops import PEAKS


def test_every_target_has_a_peak_and_every_peak_a_target():
    assert {each.device for each in TARGETS.values()} == {name for name, _ in PEAKS}
    without = [(each.name, unit) for each in TARGETS.values() for unit in each.units if not each.peak(unit)]
    assert without == []


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("a100", ("bf16",)),
        ("h100", ("bf16", "fp8")),
        ("B200", ("bf16", "fp8", "fp4")),
        ("gb300", ("bf16", "fp8", "fp4")),
        ("mi300x", ("bf16", "fp8")),
    ],
)
def test_units_follow_the_capability(name, units):
    target = named_target(name)
    assert target.units == units
    assert ("fp4" in units) == (target.peak("fp4") is not None)
    assert ("fp4" in units) == (target.capability is not None and target.capability >= CAPABILITY)


def test_an_unknown_target_names_the_nearest():
    with pytest.raises(UserError, match="unknown target 'h101': did you mean 'h100'"):
        named_target("h101")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100-40gb", "did you mean 'h100'"),
        ("H200-141GB", "did you mean 'h200'"),
        ("a100-8gb", "did you mean 'a100'"),
    ],
)
def test_an_unknown_memory_names_the_device(name, message):
    with pytest.raises(UserError, match=message):
        named_target(name)


def test_a_name_may_have_the_memory():
    assert named_target("A100-80GB") is named_target("a100")
    assert named_target("h100-80gb") is named_target("H100")
    assert named_target("a100-40gb") is not named_target("a100")


def test_a_gpu_of_this_machine_is_recognised_by_its_name():
    found = target_of_device("NVIDIA H100 80GB HBM3", capability=(9, 0), memory=79.1, count=4)
    assert (found.name, found.bandwidth, found.devices_of_host) == ("h100", 3350, 4)
    assert found.hosts(9) == 3


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090",
        "NVIDIA H100 PCIe",
        "NVIDIA H200 NVL",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    ],
)
def test_other_gpus_have_a_capability_and_no_bandwidth(name):
    found = target_of_device(name, capability=(8, 9), memory=23.6, count=1)
    assert (found.name, found.bandwidth, found.peak("bf16")) == (name, None, None)
    assert found.units == ("bf16", "fp8")
    assert "24 GiB" in found.describe()


@pytest.mark.parametrize(
    "name", ["NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM-64GB", "GRID A100-40C"]
)
def test_other_a100s_have_the_peak_and_not_the_bandwidth_of_the_table(name):
    found = target_of_device(name, capability=(8, 0), memory=39.4, count=8)
    assert (found.name, found.bandwidth, found.link, found.network) == (name, None, None, None)
    assert found.peak("bf16") == TARGETS["a100"].peak("bf16")
    assert found.units == ("bf16",)


@pytest.mark.parametrize(
    ("name", "memory", "target", "bandwidth"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.1, "a100", 2039),
        ("NVIDIA A100-SXM4-40GB", 39.3, "a100-40gb", 1555),
        ("A100-SXM4-40GB", 39.3, "a100-40gb", 1555),
    ],
)
def test_the_a100s_of_the_table_are_those_with_sxm(name, memory, target, bandwidth):
    found = target_of_device(name, capability=(8, 0), memory=memory, count=8)
    assert found == named_target(target)
    assert (found.name, found.bandwidth, found.link) == (target, bandwidth, 300)
    assert found.peak("bf16") == TARGETS["a100"].peak("bf16")


@pytest.mark.parametrize(
    "name", ["NVIDIA H100 96GB HBM2e", "NVIDIA H100 64GB HBM3", "NVIDIA H100 80GB HBM2e"]
)
def test_an_h100_of_another_memory_is_not_that_of_the_table(name):
    found = target_of_device(name, capability=(9, 0), memory=93.0, count=8)
    assert (found.name, found.bandwidth) == (name, None)


def test_cpus_have_no_matrix_units_and_amd_is_no_cpu():
    assert cpu_target(64.0).units == ()
    assert not cpu_target(64.0).is_amd
    assert TARGETS["mi300x"].is_amd
