"""Host time of a BitLinear's forward and backward, by recipe; runs without a GPU.

    python benchmarks/launch_overhead.py
    python benchmarks/launch_overhead.py --device cuda --recipe nvfp4

The matrices are so small that a GPU, or the C code of torch on a CPU, has next to nothing to compute. Without
a GPU, Triton's own launcher runs up to the driver, which is a library that only records
(`benchmarks.kernels.stand_in`): kernels are compiled and launched, and nothing runs. A call of a real driver
takes longer than that of the recording one. Products are in bf16, as on a GPU.

Without a GPU, times are CPU seconds of the process, so other processes count only by what they do to caches
and clock. Bytecodes do not depend on the machine. The columns are explained above the table.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import megalowbit as mlb
from benchmarks.kernels.launches import launching
from benchmarks.kernels.stand_in import StandInDriver, standing_in
from benchmarks.launch_floor import applied, layer_launches
from benchmarks.timing import parser, ratio
from megalowbit.layers.matmul import gemms
from megalowbit.quantize.random_stream import RandomStream
from megalowbit.quantize.triton import launch_arguments, launch_plans

SIZES = (16, 64, 64)  # tokens, in_features, out_features
REPEATS = 20  # steps of a round
WIDE = 0.2  # a ratio whose middle half of rounds differs by more is not printed
RECIPES = {
    "nvfp4": "nvfp4",
    "mxfp4, FP8 products": {"base": "mxfp4", "name": "fp8", "gemm": "fp8"},
    "metis-nvfp4": "metis-nvfp4",
}


LEGEND = """
nn.Linear   µs of host time of its forward and backward in bf16 (the process's, median of interleaved rounds)
former      µs of the layer's, with Triton's launcher
plans       µs of the layer's, with launch plans
floor       µs of its launches with plans, allocations and products, without the layer (`launch_floor`);
            only the recipe `nvfp4` has one
bare        µs of the same, with launches without plans
ratio       what the layer adds to nn.Linear with launch plans, over what it adds with Triton's launcher;
            median over rounds. "noisy": their middle half differs by more than 0.2, as on a busy machine
÷ floor     the layer with launch plans ÷ the floor, median over rounds
launches    launches of Triton kernels
operations  operations of torch, views included
bytecodes   instructions of Python in the layer's step
of floor    instructions of Python in the floor's step
–           there is no floor: only the recipe nvfp4 has one, and only where launch plans are used"""


class Overhead(NamedTuple):
    """Figures of one recipe.

    Attributes:
        plain: seconds of a forward and backward of `nn.Linear`.
        former: of a BitLinear whose kernels Triton's launcher launches.
        planned: of a BitLinear with launch plans.
        launches: of Triton kernels.
        operations: of torch, views included.
        bytecodes: instructions of Python.
        floor: seconds, bytecodes and more of the floor; `None`: there is none for the recipe, or launch plans
            are not used.
        ratios: in each round, what the layer adds to `nn.Linear`, over what it adds with Triton's launcher.
    """

    plain: float
    former: float
    planned: float
    launches: int
    operations: int
    bytecodes: int
    floor: Floor | None
    ratios: list[float]

    @property
    def ratio(self) -> float:
        """What the layer adds to `nn.Linear`, over what it adds with Triton's launcher; a median."""
        return statistics.median(self.ratios)

    @property
    def is_noisy(self) -> bool:
        """Whether the middle half of the ratios differs by more than `WIDE`, or is not finite."""
        cut = len(self.ratios) // 4
        middle = sorted(self.ratios)[cut : len(self.ratios) - cut]
        return not middle[-1] - middle[0] <= WIDE


class Floor(NamedTuple):
    """Figures of the floor of a recipe.

    Attributes:
        planned: seconds, with launch plans.
        bare: seconds, without plans.
        ratio: the layer's time over the floor's, both with launch plans.
        bytecodes: instructions of Python, with launch plans.
    """

    planned: float
    bare: float
    ratio: float
    bytecodes: int


class Operations(TorchDispatchMode):
    """Counts operations by name, and which of them are views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def main() -> None:
    from arguments import recipe  # a script of this folder

    options = parser(__doc__)
    options.set_defaults(threads=1)
    options.add_argument("--recipe", action="append", type=recipe, help="a name, or a block as JSON")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    recipes = {each.name: each for each in chosen.recipe} if chosen.recipe else RECIPES
    titles = ("nn.Linear", "former", "plans", "floor", "bare", "ratio", "÷ floor")
    counts = ("launches", "operations", "bytecodes", "of floor")
    print(LEGEND, flush=True)
    print(f"\n{'':<20}{''.join(f'{each:>10}' for each in titles)}{''.join(f'{each:>11}' for each in counts)}")
    with on(chosen.device):
        for name, each in recipes.items():
            print(f"{name:<20}{row(overhead(each, chosen.device, chosen.rounds))}", flush=True)


def row(found: Overhead) -> str:
    """The columns of a recipe."""
    times, floor = found[:3], found.floor
    of_floor = ["–"] * 4
    if floor is not None:
        of_floor = [*_microseconds(floor.planned, floor.bare), f"{floor.ratio:.2f}", str(floor.bytecodes)]
    ratio = "noisy" if found.is_noisy else f"{found.ratio:.2f}"
    shown = [*_microseconds(*times), *of_floor[:2], ratio, of_floor[2]]
    counts = [found.launches, found.operations, found.bytecodes, of_floor[3]]
    return "".join(f"{each:>10}" for each in shown) + "".join(f"{each:>11}" for each in counts)


def _microseconds(*times: float) -> list[str]:
    return [f"{1e6 * each:.0f}" for each in times]


def on(device: str) -> AbstractContextManager[StandInDriver | None]:
    """Where kernels are launched: on the GPU, or on one that is not there."""
    return nullcontext() if device == "cuda" else standing_in()


def overhead(chosen: Any, device: str, rounds: int) -> Overhead:
    """The figures of a recipe, where `on` says."""
    with unchecked_rounding(), patch.object(gemms, "cpu_gemm", lambda: "bf16"):
        layer = mlb.BitLinear(*SIZES[1:], recipe=chosen, device=device, dtype=torch.bfloat16)
        plain, step = step_of(nn.Linear(*SIZES[1:], device=device, dtype=torch.bfloat16)), step_of(layer)

        def former() -> None:
            with patch.object(launch_plans, "is_observed", lambda: True):  # each launch is Triton's
                step()

        candidates = {"plain": plain, "former": former, "planned": step}
        if layer.recipe == mlb.recipe("nvfp4"):
            for _ in range(2):  # compiles, and makes plans
                step()
            launches = layer_launches(step)
            if launches is not None:
                candidates["floor"] = step_of(layer, applied(layer, launches.planned))
                candidates["bare"] = step_of(layer, applied(layer, launches.bare))
        times = timed(candidates, rounds, device)
        return Overhead(
            statistics.median(times["plain"]),
            statistics.median(times["former"]),
            statistics.median(times["planned"]),
            launches=launches_of(step),
            operations=len(operations_of(step)),
            bytecodes=bytecodes_of(step),
            floor=floor_of(candidates, times) if "floor" in candidates else None,
            ratios=ratios_of(times),
        )


def ratios_of(times: dict[str, list[float]]) -> list[float]:
    """`Overhead.ratios`: a slow phase of the machine would not cancel in a difference of medians."""
    rounds = zip(times["plain"], times["former"], times["planned"], strict=True)
    return [
        (planned - plain) / (former - plain) if former > plain else math.inf
        for plain, former, planned in rounds
    ]


def floor_of(candidates: dict[str, Callable[[], None]], times: dict[str, list[float]]) -> Floor:
    """The floor's figures among those of all candidates."""
    return Floor(
        statistics.median(times["floor"]),
        statistics.median(times["bare"]),
        ratio(times, "planned", "floor"),
        bytecodes_of(candidates["floor"]),
    )


@contextmanager
def unchecked_rounding() -> Iterator[None]:
    """Without the check that stochastic rounding is unbiased, for kernels that do not run."""
    with patch.object(RandomStream, "check", lambda *_: None):
        yield


def step_of(layer: nn.Module, forward: Callable[[Tensor], Tensor] | None = None) -> Callable[[], None]:
    """Forward and backward of a layer; `forward` is in place of the layer's own."""
    run = forward or layer
    device = next(layer.parameters()).device
    x = torch.randn(SIZES[0], SIZES[1], device=device).bfloat16().requires_grad_()
    grad = torch.randn(SIZES[0], SIZES[2], device=device).bfloat16()
    tensors = [x, *layer.parameters()]

    def step() -> None:
        for each in tensors:
            each.grad = None
        run(x).backward(grad)

    return step


def timed(candidates: dict[str, Callable[[], None]], rounds: int, device: str) -> dict[str, list[float]]:
    """Host seconds of one step of each candidate in each round."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        for _ in range(REPEATS):  # compiles, and warms up
            run()
    for _ in range(rounds):
        for name, run in candidates.items():
            if device == "cuda":
                torch.cuda.synchronize()
            started = clock()
            for _ in range(REPEATS):
                run()
            times[name].append((clock() - started) / REPEATS)
    return times


def launches_of(step: Callable[[], None]) -> int:
    """Launches of Triton kernels of a step."""
    count, launch = [0], launch_arguments.launch

    def counted(*given: Any, **arguments: Any) -> None:
        count[0] += 1
        launch(*given, **arguments)

    with launching(counted):
        step()
    return count[0]


def operations_of(step: Callable[[], None]) -> list[str]:
    """Names of the operations of torch in a step."""
    with Operations() as counted:
        step()
    return counted.names


def bytecodes_of(step: Callable[[], None]) -> int:
    """Instructions that Python executes in a step.

    autograd computes gradients on a GPU in a thread that C++ started, where Python traces nothing. Here it
    computes them in the calling thread, by the same functions.
    """
    count = [0]

    def trace(frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count[0] += event == "opcode"
        return trace

    former = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 reports none if no frame asks before tracing begins
    with torch.autograd.set_multithreading_enabled(False):
        sys.settrace(trace)
        try:
            step()
        finally:
            sys.settrace(former)
    return count[0]


if __name__ == "__main__":
    main()
