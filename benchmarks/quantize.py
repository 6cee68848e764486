"""Quantisers against this machine's copy bandwidth, and against torchao's casts where it is installed.

    python benchmarks/quantize.py --device cpu --threads 2
    pip install -c constraints.txt -e '.[bench]' && python benchmarks/quantize.py

Everything runs interleaved on one bf16 matrix. The peer is `x.clone()`, a copy into memory of its own, as the
quantisers' results are; the ratio is the median over rounds of candidate / clone. GB/s counts the bytes read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from timing import interleaved, keep_freed_memory, parser, positive, print_table

import megalowbit as mlb
from megalowbit.quantize import reference

NAMES = (
    "nvfp4e2m1bnosr",
    "nvfp4e2m1b",
    "nvfp4e2m1b:unbiased",
    "nvfp4e2m1bnosr:4over6",
    "nvfp4e2m1bnosr:tile16",
    "mxfp4e2m1bnosr",
    "mxfp4e2m1b",
)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--size", type=positive, default=4096, help="rows and columns of the matrix")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    x = torch.randn(options.size, options.size, device=options.device).bfloat16()
    print(f"torch {torch.__version__}, {options.device}, {options.threads} threads, {options.rounds} rounds")

    candidates: dict[str, Callable[[], object]] = {"clone": x.clone}
    for name in NAMES:
        quantizer = mlb.quantizer(name)
        candidates[name] = lambda q=quantizer: q.quantize(x)
    with_operand = mlb.quantizer(NAMES[0])
    candidates[f"{NAMES[0]} + operand"] = lambda: with_operand.quantize(x, operand_dtype=torch.bfloat16)
    candidates[f"{NAMES[0]} + counts"] = lambda: with_operand.quantize(x, with_counts=True)
    candidates[f"{NAMES[0]} of the transpose"] = lambda: with_operand.quantize(x.t())
    candidates[f"{NAMES[0]}, Hadamard"] = lambda: with_operand.quantize_transposed(x.t(), signs=0xA5C3)
    packed = with_operand.quantize(x)
    candidates["decode to bf16"] = packed.operand
    times = interleaved(candidates, options.rounds, options.device)
    print_table(f"quantise {options.size} × {options.size}, bf16", times, "clone", x.nbytes)

    slow: dict[str, Callable[[], object]] = {NAMES[0]: candidates[NAMES[0]], NAMES[1]: candidates[NAMES[1]]}
    encoding = with_operand.encoding
    slow["plain torch, nearest"] = lambda: reference.encode(x, encoding)
    slow |= torchao_casts(x)
    without_kernels = (
        name for name in mlb.quantizer_names() if not name.startswith(("nvfp4", "mxfp4", "fp32"))
    )
    slow |= {name: functools.partial(mlb.quantizer(name).quantize, x) for name in without_kernels}
    times = interleaved(slow, max(3, options.rounds // 3), options.device)
    print_table("plain torch and peers", times, NAMES[0], x.nbytes)


def torchao_casts(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    try:
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    except ImportError as error:
        print(f"without torchao's casts: {error}")
        return {}

    def nvfp4() -> object:
        return nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().max()))

    return {
        "torchao NVFP4, eager": nvfp4,
        "torchao MXFP4, eager": lambda: to_mx(x, torch.float4_e2m1fn_x2, 32),
    }


if __name__ == "__main__":
    keep_freed_memory()
    main()
