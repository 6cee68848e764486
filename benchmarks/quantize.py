"""Quantizers against this machine's copy bandwidth, and against torchao's casts if it is installed.

    python benchmarks/quantize.py --device cpu --threads 2
    pip install -c constraints.txt -e '.[bench]' && python benchmarks/quantize.py

All candidates run interleaved on one matrix, by default in bf16. The peer is `x.clone()`, which allocates its
result, as the quantizers do. The ratio is the median over rounds of candidate / clone. GB/s counts the bytes
read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from timing import cache_note, interleaved, keep_freed_memory, parser, positive, print_table

import megalowbit as mlb
from megalowbit.quantize import reference
from megalowbit.quantize.encoding import EncodeRequest

NAMES = (
    "nvfp4e2m1bnosr",
    "nvfp4e2m1b",
    "nvfp4e2m1b:unbiased",
    "nvfp4e2m1bnosr:4over6",
    "nvfp4e2m1bnosr:tile16",
    "mxfp4e2m1bnosr",
    "mxfp4e2m1b",
    "int8",
    "int8:sr",
    "int8b",
    "int4",
    "fp6e3m2",
    "fp8e4m3",
    "fp8e4m3:sr",
    "fp8e5m2",
    "fp8e5m2:sr",
    "int8e5m2b",
    "int8e5m2b:sr",
)
DECODED = (NAMES[0], "int8", "fp8e4m3", "int8b", "int8e5m2b")
PLAIN = ("int8", "fp8e4m3", "int8e5m2b")  # quantizers that are also timed without their kernel


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--size", type=positive, help="rows and columns of the matrix (default: 4096, and 16384 on a GPU)"
    )
    arguments.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    options = arguments.parse_args()
    options.size = options.size or (4096 if options.device == "cpu" else 16384)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    x = torch.randn(options.size, options.size, device=options.device).to(getattr(torch, options.dtype))
    print(f"torch {torch.__version__}, {options.device}, {options.threads} threads, {options.rounds} rounds")
    if note := cache_note(x.nbytes, options.device):
        print(note)

    candidates: dict[str, Callable[[], object]] = {"clone": x.clone}
    for name in NAMES:
        quantizer = mlb.quantizer(name)
        candidates[name] = lambda q=quantizer: q.quantize(x)
    with_operand = mlb.quantizer(NAMES[0])
    candidates[f"{NAMES[0]} + operand"] = lambda: with_operand.quantize(x, operand_dtype=torch.bfloat16)
    candidates[f"{NAMES[0]} + counts"] = lambda: with_operand.quantize(x, with_counts=True)
    candidates[f"{NAMES[0]} of the transpose"] = lambda: with_operand.quantize(x.t())
    candidates[f"{NAMES[0]}, Hadamard"] = lambda: with_operand.quantize_transposed(x.t(), signs=0xA5C3)
    int8, amax = mlb.quantizer("int8"), x.abs().amax()
    candidates["int8, amax given"] = lambda: int8.quantize(x, tensor_amax=amax)
    candidates["int8 + counts"] = lambda: int8.quantize(x, with_counts=True)
    candidates["int8 of the transpose"] = lambda: int8.quantize(x.t())
    times = interleaved(candidates, options.rounds, options.device)
    print_table(f"quantise {options.size} × {options.size}, {x.dtype}", times, "clone", x.nbytes)

    decoded: dict[str, Callable[[], object]] = {"clone": x.clone}
    for name in DECODED:
        packed = mlb.quantizer(name).quantize(x)
        decoded[f"{name} to bf16"] = packed.operand
        decoded[f"{name} to bf16, transposed"] = functools.partial(packed.operand, transpose=True)
    times = interleaved(decoded, options.rounds, options.device)
    print_table("decode", times, "clone", x.nbytes)

    slow = {name: candidates[name] for name in (*NAMES[:2], *PLAIN)}
    for name in (NAMES[0], *PLAIN):
        encoding = mlb.quantizer(name).encoding
        slow[f"plain torch, {name}"] = functools.partial(reference.encode, EncodeRequest(x, encoding))
    slow |= torchao_casts(x)
    slow["1p58bit"] = functools.partial(mlb.quantizer("1p58bit").quantize, x)
    times = interleaved(slow, max(3, options.rounds // 3), options.device)
    print_table("plain torch and peers", times, NAMES[0], x.nbytes)


def torchao_casts(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    try:
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    except ImportError as error:
        print(f"torchao's casts are left out: {error}")
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
