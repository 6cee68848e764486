import os
import platform

import pytest
import torch

from launchers import ROOT
from megalowbit.doctor.gemms import _has_instructions, check_formats, has_kernel, product_formats
from megalowbit.doctor.target import TARGETS, cpu_target
from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import product_counts
from megalowbit.layers.layer_recipe import GEMMS, PRODUCTS
from megalowbit.layers.recipe import recipes
from megalowbit.processor import cpu_lines, cpu_units

X86 = platform.machine() in ("x86_64", "AMD64") and bool(cpu_units())
SIZES = {"n_embd": 64, "n_head": 4}  # all sizes of the model are multiples of 16
FP4 = 'megalowbit.recipe={"base": "nvfp4", "layout": "per_gemm", "gemm": "fp4"}'
FP8 = 'megalowbit.recipe={"base": "mxfp4", "gemm": "fp8"}'


def units(plan, target):
    """The unit of each product of low-bit layers, by product."""
    found = {}
    for each in product_formats(plan, target, plan.recipe):
        if each.operands:
            found.setdefault(each.product, set()).add(each.unit)
    return found


def test_named_recipes_multiply_in_bf16_as_the_limits_say():
    assert {each.gemm for each in recipes().values()} == {"bf16"}
    page = " ".join((ROOT / "docs" / "limits.md").read_text(encoding="utf-8").split())
    assert "with all named recipes, their products run in bf16, on every GPU" in page
    assert all(f'`"{gemm}"`' in page for gemm in GEMMS if gemm != "bf16")


@pytest.mark.parametrize("target", ["a100", "h100", "b200", "mi300x"])
def test_the_default_recipe_is_emulated_in_bf16_everywhere(tiny, target):
    plan = tiny()
    found = product_formats(plan, TARGETS[target], plan.recipe)
    assert {each.unit for each in found} == {"bf16"}
    assert all(each.is_emulated == bool(each.operands) for each in found)
    assert any(each.is_emulated for each in found)
    assert "gemm-emulated" in {each.code for each in check_formats(plan, TARGETS[target])}


def test_native_fp4_runs_on_blackwell_and_is_refused_on_hopper(tiny):
    plan = tiny(FP4, model=SIZES)
    assert units(plan, TARGETS["b200"]) == {product: {"fp4"} for product in PRODUCTS}
    assert check_formats(plan, TARGETS["b200"]) == []
    assert units(plan, TARGETS["h100"]) == {product: {"bf16"} for product in PRODUCTS}
    (found,) = check_formats(plan, TARGETS["h100"])
    assert (found.level, found.code) == ("problem", "gemm-units")
    assert "h100 has no FP4 units" in found.text


def test_fp4_products_with_odd_columns_fall_back(tiny):
    plan = tiny(FP4, model={"n_embd": 64, "n_head": 4, "n_inner": 200})  # 200 columns: no multiple of 16
    found = units(plan, TARGETS["b200"])
    assert found["output"] == found["grad_weight"] == {"fp4", "bf16"}
    (notice,) = check_formats(plan, TARGETS["b200"])
    assert notice.code == "gemm-falls-back"
    assert "200 columns" in notice.text


@pytest.mark.parametrize(("target", "unit"), [("h100", "fp8"), ("mi300x", "fp8"), ("a100", "bf16")])
def test_fp8_products_of_mxfp4_need_fp8_units(tiny, target, unit):
    plan = tiny(FP8, model=SIZES)
    assert units(plan, TARGETS[target]) == {product: {unit} for product in PRODUCTS}
    levels = {(each.level, each.code) for each in check_formats(plan, TARGETS[target])}
    assert (("problem", "gemm-units") in levels) == (unit == "bf16")


@pytest.mark.parametrize(("precision", "unit"), [("fp32", "fp32"), ("fp16", "fp32"), ("bf16", "bf16")])
def test_the_wide_unit_on_a_cpu_is_that_of_the_layers(tiny, precision, unit):
    plan = tiny(f"megalowbit.precision={precision}")
    lowbit = [each for each in product_formats(plan, cpu_target(8.0), plan.recipe) if each.operands]
    assert {each.unit for each in lowbit} == {unit}


def test_the_formats_are_those_that_a_layer_counts():
    """FP8 products run on CPUs: the same recipe and sizes, computed."""
    from megalowbit.layers.matmul.fp8 import may_fit

    torch.manual_seed(0)
    recipe = {"base": "mxfp4", "gemm": "fp8", "layout": "per_gemm"}
    layer = BitLinear(64, 32, bias=False, recipe=recipe, dtype=torch.bfloat16)
    layer(torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert may_fit(["e8m0", "e8m0"], (16, 64, 32))
    assert set(product_counts(layer)["output"]) == {"fp8"}
    odd = BitLinear(64, 24, bias=False, recipe=recipe, dtype=torch.bfloat16)
    odd(torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert not may_fit(["e8m0", "e8m0"], (16, 64, 24))
    assert set(product_counts(odd)["output"]) == {"bf16"}


def test_recipes_without_kernels_are_named_for_gpus_only(tiny):
    plan = tiny("megalowbit.recipe=mxfp8")
    found = {each.code for each in check_formats(plan, TARGETS["h100"])}
    assert "recipe-without-kernels" in found
    assert "recipe-without-kernels" not in {each.code for each in check_formats(plan, cpu_target(8.0))}
    assert has_kernel("nvfp4e2m1bnosr")
    assert not has_kernel("fp32")


def test_bf16_on_a_gpu_without_its_units_is_a_problem(tiny):
    from dataclasses import replace

    old = replace(TARGETS["a100"], name="t4", capability=(7, 5))
    codes = {(each.level, each.code) for each in check_formats(tiny(), old)}
    assert ("problem", "gemm-units") in codes


@pytest.mark.parametrize(
    ("precision", "recipe", "gemm", "has_instructions", "is_slow"),
    [
        ("bf16", "bf16", "bf16", False, True),
        ("bf16", "nvfp4", "bf16", False, True),
        ("bf16", "bf16", "fp32", False, False),
        ("bf16", "nvfp4", "fp32", False, False),
        ("fp16", "bf16", "fp32", False, True),
        ("bf16", "bf16", "bf16", True, False),
        ("fp32", "nvfp4", "bf16", False, False),
    ],
)
def test_products_in_half_precision_are_slow_on_a_cpu_without_instructions(
    tiny, monkeypatch, precision, recipe, gemm, has_instructions, is_slow
):
    monkeypatch.setattr("megalowbit.doctor.gemms._has_instructions", lambda precision: has_instructions)
    monkeypatch.setenv("MEGALOWBIT_CPU_GEMM", gemm)
    plan = tiny(f"megalowbit.precision={precision}", f"megalowbit.recipe={recipe}")
    found = [each for each in check_formats(plan, cpu_target(8.0)) if each.code == "gemm-slow"]
    assert [each.level for each in found] == ["note"] * is_slow
    first = "transformer.h.*.attn.c_attn"
    assert all(f"in {precision}, such as those of {first}, take" in each.text for each in found)
    assert not [each for each in check_formats(plan, TARGETS["h100"]) if each.code == "gemm-slow"]


@pytest.mark.parametrize("gemm", ["bf16", "fp32"])
def test_on_a_cpu_the_products_outside_low_bit_layers_have_the_dtype_of_the_choice(tiny, monkeypatch, gemm):
    monkeypatch.setenv("MEGALOWBIT_CPU_GEMM", gemm)
    plan = tiny("megalowbit.precision=bf16")
    formats = product_formats(plan, cpu_target(8.0), plan.recipe)
    assert {each.unit for each in formats if each.projection == "lm_head"} == {gemm}
    formats = product_formats(plan, TARGETS["h100"], plan.recipe)
    assert {each.unit for each in formats if each.projection == "lm_head"} == {"bf16"}


@pytest.mark.skipif(not X86, reason="knows the instructions of x86")
@pytest.mark.skipif("ONEDNN_MAX_CPU_ISA" in os.environ, reason="oneDNN is limited")
def test_onednn_multiplies_in_bf16_from_avx_512_on():
    if "avx512f" in cpu_units():
        assert _has_instructions("bf16")
    elif "avx_ne_convert" not in "".join(cpu_lines()):
        assert not _has_instructions("bf16")
