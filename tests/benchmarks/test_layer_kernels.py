"""Counts of kernels, bytes and operations are those of layers that are small enough to count by hand."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

import megalowbit as mlb
from benchmarks.kernels.counting import GPU, Kernel, Prediction, counting
from benchmarks.kernels.layers import layer_kernels, plain_layer

SIZES = (128, 64, 96)


def launches(kernels):
    return sum(each.launches for each in kernels)


def test_a_plain_layer_is_three_products():
    kernels = plain_layer(*SIZES)
    m, k, n = SIZES
    assert [each.name for each in kernels] == ["mm"] * 3
    assert [each.flops for each in kernels] == [2 * m * k * n] * 3
    assert [each.bytes for each in kernels] == [2 * (m * k + k * n + m * n)] * 3


def test_views_cost_nothing_and_in_place_operations_are_counted():
    with counting() as gpu:
        x = torch.empty(4, 8, device=GPU)
        y = x.t().narrow(0, 2, 6).unsqueeze(0)
        assert gpu.kernels == []
        y.mul_(2)
        torch.addmm(x, torch.empty(4, 3, device=GPU), torch.empty(3, 8, device=GPU))
    assert gpu.kernels[0] == Kernel("mul_", 1, 2 * 6 * 4 * 4, 0)
    factors, matrix = (4 * 3 + 3 * 8) * 4, 4 * 8 * 4
    assert gpu.kernels[1] == Kernel("addmm", 2, 4 * matrix + factors, 2 * 4 * 3 * 8)


def test_a_read_by_the_host_is_an_error():
    with counting(), pytest.raises(RuntimeError, match="makes the host wait"):
        torch.zeros((), device=GPU).item()


def test_a_time_is_the_longest_of_bytes_operations_and_launches():
    predicted = Prediction(bandwidth=1.0, speed=1.0, shortest=5.0)
    kernels = [Kernel("a", 1, 9, 2), Kernel("b", 1, 2, 8), Kernel("c", 2, 1, 1)]
    assert predicted.seconds(kernels) == 9 + 8 + 10


def test_a_layer_quantises_three_matrices_and_decodes_two():
    names = [each.name for each in layer_kernels(mlb.recipe("nvfp4"), SIZES)]
    wanted = {"zeros": 3, "fp4.amax_kernel": 3, "fp4.encode_kernel": 3, "decode.decode_kernel": 2, "mm": 3}
    assert {name: names.count(name) for name in names} == wanted


@pytest.mark.parametrize("chosen", ["nvfp4", "nvidia-nvfp4", {"base": "mxfp4", "gemm": "fp8"}], ids=str)
def test_counts_take_two_sums_an_operand_and_do_not_stop_the_host(chosen):
    """A number that is assigned to an element would be copied to the device, and the host would wait."""
    observed, recipe = [], mlb.recipe(chosen)
    with_counts = layer_kernels(recipe, SIZES, lambda *each: observed.append(each))
    operands = len(observed) // 2  # of each of two micro-batches
    assert operands >= 3
    assert launches(with_counts) - launches(layer_kernels(recipe, SIZES)) == 2 * operands


@pytest.mark.parametrize(("operands", "count", "fills"), [(1, 25, 2), (2, 42, 1)])
def test_splits_find_the_maxima_of_their_parts_while_they_write_them(operands, count, fills):
    blocks = {key: {"rank": 8} for key in ("split_grad_output", "split_input")[:operands]}
    kernels = layer_kernels(mlb.recipe({"base": "nvfp4", **blocks}), SIZES)
    names = [each.name for each in kernels]
    assert launches(kernels) == count
    assert names.count("zeros") == names.count("fp4.amax_kernel") == fills  # of operands that are not split


def test_fp8_products_are_counted_and_take_half_the_time():
    chosen = mlb.recipe({"base": "mxfp4", "gemm": "fp8"})
    m, k, n = SIZES
    kernels = [each for each in layer_kernels(chosen, SIZES) if each.flops]
    assert [(each.name, each.flops) for each in kernels] == [("_scaled_mm", 2 * m * k * n)] * 3
    predicted = Prediction(bandwidth=1e30, speed=1.0, fp8_speed=2.0, shortest=0.0)
    assert predicted.seconds(kernels) == predicted.seconds(plain_layer(*SIZES)) / 2
