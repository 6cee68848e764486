import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.kernels.counting import GPU, counting
from megalowbit.spectral import low_rank
from megalowbit.spectral.triton import launch_factors

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "dtype", "is_covered"),
    [
        ((64, 100), BF16, True),
        ((1, 3), BF16, True),
        ((65, 100), BF16, False),
        ((8, 100), torch.float32, False),
        ((0, 100), BF16, False),
        ((8, 0), BF16, False),
    ],
)
def test_kernels_take_bf16_of_up_to_64_directions(shape, dtype, is_covered):
    with counting():
        assert launch_factors.covers(torch.empty(shape, dtype=dtype, device=GPU)) == is_covered
    assert not launch_factors.covers(torch.empty(shape, dtype=dtype))  # a CPU has other kernels


def test_a_warm_step_launches_two_products_and_five_kernels():
    with counting() as gpu:
        low_rank.qb(
            torch.empty(8192, 4096, dtype=BF16, device=GPU), torch.empty(60, 4096, dtype=BF16, device=GPU)
        )
    assert [each.name for each in gpu.kernels] == [
        "mm",
        *(f"factors.{name}_kernel" for name in ("gram", "transform", "rows")),
        "mm",
        *(f"factors.{name}_kernel" for name in ("norms", "order")),
    ]
