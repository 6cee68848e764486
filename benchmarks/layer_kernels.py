"""What a layer's forward and backward launch on a GPU, against a bf16 linear layer; runs without a GPU.

    python benchmarks/layer_kernels.py
    python benchmarks/layer_kernels.py --shape 8192x4096x14336 --recipe metis-nvfp4 --all
    python benchmarks/layer_kernels.py --recipe '{"base": "nvfp4", "split_grad_output": {"rank": 60}}'

Columns: kernels; bytes moved, divided by the elements of input, weight and output; operations of products
over those of bf16; predicted time over that of bf16. A prediction adds for each kernel the longest of its
bytes, its operations, and the time of a small kernel (`counting.Prediction`): a model, not a measurement. The
second micro-batch is counted, so directions of splits are warm. Layers have no bias.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from arguments import recipe, shape

if TYPE_CHECKING:
    import megalowbit as mlb
    from benchmarks.kernels.counting import Kernel, Prediction

SHAPES = ((8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096))  # tokens, in, out: LLaMA 8B
SPLITS = {
    "grad_output": {"split_grad_output": {"rank": 60}},
    "input and grad_output": {"split_input": {"rank": 60}, "split_grad_output": {"rank": 60}},
    "weight": {"split_weight": {"rank": 60}},
    "mean of both": {"split_input": {"method": "mean"}, "split_grad_output": {"method": "mean"}},
}
PEER = "bf16 linear layer"


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--shape", action="append", type=shape, help="tokens x in_features x out_features")
    options.add_argument("--recipe", action="append", type=recipe, help="a name, or a block as JSON")
    options.add_argument("--all", action="store_true", help="also list the kernels")
    print_rows(options.parse_args())


def print_rows(chosen: argparse.Namespace) -> None:
    """A table for each shape."""
    from benchmarks.kernels.counting import Prediction  # imports torch and Triton, which takes seconds
    from benchmarks.kernels.layers import layer_kernels, plain_layer

    predicted = Prediction()
    for sizes in chosen.shape or SHAPES:
        peer = plain_layer(*sizes)
        print("\n{} tokens × {}→{}".format(*sizes))
        print(f"  {'':<34}{'kernels':>8}{'bytes':>8}{'FLOP':>8}{'time':>8}")
        rows = {PEER: peer}
        rows |= {each.name: layer_kernels(each, sizes) for each in chosen.recipe or shipped()}
        elements = sizes[0] * sizes[1] + sizes[1] * sizes[2] + sizes[0] * sizes[2]
        for name, kernels in rows.items():
            launched = sum(each.launches for each in kernels)
            moved = sum(each.bytes for each in kernels) / elements
            work = sum(each.flops for each in kernels) / sum(each.flops for each in peer)
            time = predicted.seconds(kernels) / predicted.seconds(peer)
            print(f"  {name:<34}{launched:8}{moved:8.1f}{work:8.3f}{time:8.2f}")
            if chosen.all:
                print_kernels(kernels, predicted)


def shipped() -> list[mlb.Recipe]:
    """Recipes with splits, and plain `nvfp4`."""
    import megalowbit as mlb

    splits = [mlb.recipe({"base": "nvfp4", "name": name, **block}) for name, block in SPLITS.items()]
    return [mlb.recipe("nvfp4"), *splits, mlb.recipe("metis-nvfp4")]


def print_kernels(kernels: list[Kernel], predicted: Prediction) -> None:
    """One line for each name: launches, bytes and time."""
    launches: Counter[str] = Counter()
    moved, seconds = Counter[str](), dict[str, float]()
    for each in kernels:
        launches[each.name] += each.launches
        moved[each.name] += each.bytes
        seconds[each.name] = seconds.get(each.name, 0) + predicted.seconds([each])
    for name in sorted(launches, key=lambda name: -seconds[name]):
        print(f"    {launches[name]:4} {name:<34}{moved[name] / 1e6:10.1f} MB{seconds[name] * 1e6:8.0f} µs")


if __name__ == "__main__":
    main()
