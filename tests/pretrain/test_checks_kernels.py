import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.layers.cpu_gemm import _of_process
from megalowbit.layers.recipe import Recipe, recipe
from megalowbit.pretrain.checks import check_kernels, describe_kernels, this_device, why_not
from megalowbit.quantize.cpu import fp32_scales

CPU = torch.device("cpu")
FP4 = Recipe.from_dict({"base": "nvfp4", "layout": "per_gemm", "gemm": "fp4"})
FP8 = Recipe.from_dict({"base": "mxfp4", "gemm": "fp8"})


def test_kernels_are_described_on_one_line(monkeypatch):
    monkeypatch.setenv("MEGALOWBIT_BACKEND", "torch")
    assert describe_kernels(FP8, CPU) == "plain torch (slow) on cpu, fp8 products"
    assert describe_kernels(recipe("nvfp4"), CPU) == "plain torch (slow) on cpu, bf16 products"


def test_products_that_a_cpu_multiplies_in_fp32_are_described_so(monkeypatch):
    monkeypatch.setenv("MEGALOWBIT_BACKEND", "torch")
    monkeypatch.setenv("MEGALOWBIT_CPU_GEMM", "fp32")
    _of_process.cache_clear()
    try:
        assert describe_kernels(FP8, CPU) == "plain torch (slow) on cpu, fp8 products"
        wide = "plain torch (slow) on cpu, bf16 products (multiplied in fp32)"
        assert describe_kernels(recipe("nvfp4"), CPU) == wide
    finally:
        _of_process.cache_clear()


def test_a_gemm_the_device_lacks_is_named_with_the_device():
    assert why_not(FP4, CPU) == (
        'gemm "fp4" cannot run on cpu: only NVIDIA GPUs from Blackwell on have FP4 tensor cores'
    )
    assert why_not(FP8, CPU) is None
    assert why_not(recipe("nvfp4"), CPU) is None


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_a_run_without_a_usable_gemm_is_rejected_with_a_remedy():
    assert this_device() == CPU
    check_kernels(FP8)
    with pytest.raises(UserError, match=r'gemm "fp4" cannot run on cpu.*set gemm to "bf16"'):
        check_kernels(FP4)


@pytest.mark.parametrize(
    ("name", "backend", "is_loaded"), [("nvfp4", "", True), ("nvfp4", "torch", False), ("bf16", "", False)]
)
def test_the_c_kernels_of_all_formats_are_loaded_before_the_first_step(monkeypatch, name, backend, is_loaded):
    """Those of 8-bit formats too: speculation may choose one in the first step."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("MEGALOWBIT_BACKEND", backend)
    monkeypatch.delitem(vars(fp32_scales.LIBRARY), "_loaded", raising=False)
    check_kernels(recipe(name))
    assert ("_loaded" in vars(fp32_scales.LIBRARY)) == is_loaded


def test_a_library_that_a_recipe_does_not_need_may_be_missing(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("MEGALOWBIT_BACKEND", "c")
    monkeypatch.setitem(vars(fp32_scales.LIBRARY), "_loaded", (None, "no C compiler found"))
    check_kernels(recipe("nvfp4"))


@pytest.mark.parametrize(("accelerator", "device"), [("cpu", CPU), ("cuda", torch.device("cuda"))])
def test_deepspeeds_variable_leaves_gpus_unused(monkeypatch, accelerator, device):
    monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert this_device() == device


def test_a_backend_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv("MEGALOWBIT_BACKEND", "cpu")
    with pytest.raises(UserError, match="unknown MEGALOWBIT_BACKEND 'cpu'"):
        check_kernels(recipe("nvfp4"))
