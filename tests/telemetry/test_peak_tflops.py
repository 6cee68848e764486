import pytest

from megalowbit.telemetry.peak_tflops import PEAKS, peak_tflops


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2450.0),
        ("NVIDIA GB300", 2450.0),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI325X", 1307.0),
        ("AMD Instinct MI355X", 2500.0),
    ],
)
def test_names_as_drivers_give_them(name, bf16):
    assert peak_tflops(name, "bf16") == peak_tflops(name, "fp16") == bf16


def test_dtypes_of_an_h200():
    assert [peak_tflops("NVIDIA H200", dtype) for dtype in ("fp32", "tf32")] == [67.0, 494.5]


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA H100",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA A10",
        "AMD Instinct MI250X / MI250",
    ],
)
def test_unknown_devices_parts_of_devices_and_ambiguous_names_have_no_peak(name):
    assert peak_tflops(name, "bf16") is None


def test_a_device_without_a_figure_for_a_dtype_has_no_peak_in_it():
    assert peak_tflops("AMD Instinct MI355X", "fp32") is None


def test_bf16_is_twice_as_fast_as_tf32():
    """As the matrix units are, to the rounding of the sources; figures with sparsity would be off by 2."""
    for name, peak in PEAKS:
        if peak.tf32 is not None:
            assert peak.half / peak.tf32 == pytest.approx(2, rel=0.03), name


def test_fp8_is_twice_and_fp4_at_least_four_times_as_fast_as_bf16():
    for name, peak in PEAKS:
        if peak.fp8 is not None:
            assert peak.fp8 / peak.half == pytest.approx(2, rel=0.002), name
        if peak.fp4 is not None:
            assert peak.fp4 / peak.half in (4, 6), name


def test_only_blackwell_has_a_peak_in_fp4():
    with_fp4 = {name for name, peak in PEAKS if peak.fp4 is not None}
    assert with_fp4 == {"B200", "B300", "GB200", "GB300"}
    assert [peak_tflops(f"NVIDIA {name}", "fp8") for name in ("B200", "H200", "A100")] == [4500, 1979, None]
