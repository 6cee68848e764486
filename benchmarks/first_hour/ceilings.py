"""Step 1: what this GPU reaches at best. Later limits are fractions of these figures."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator

import torch

from benchmarks.first_hour.findings import Finding, at_least, at_most, info, skip
from benchmarks.first_hour.session import NO_GPU, Session
from benchmarks.timing import ratio

COPY_TERABYTES = {"H200": 4.0, "H100": 2.8}  # per second, read and written
BF16_TERAFLOPS = {"H200": 720.0, "H100": 720.0}  # 8192³, random data
FP8 = ((torch.float8_e4m3fn, torch.float8_e4m3fn), (torch.float8_e5m2, torch.float8_e4m3fn))
LAUNCHES = 400  # fewer than the queue holds, or the host would wait


def check(session: Session) -> Iterator[Finding]:
    """Copy, products by dtype, and what a launch costs the host."""
    name = torch.cuda.get_device_name() if session.is_gpu else ""
    x = torch.empty(session.size(2**29, 2**22), dtype=torch.bfloat16, device=session.device).normal_()
    y = torch.empty_like(x)
    seconds, state = session.median(functools.partial(y.copy_, x))
    copied = 2 * x.nbytes / seconds
    session.keep("copy_bytes_per_second", copied)
    yield _ceiling("copy", copied / 1e12, " TB/s", _expected(COPY_TERABYTES, name), state)
    del x, y
    yield from products(session, name)
    yield from launches(session)


def _expected(table: dict[str, float], name: str) -> float | None:
    return next((value for part, value in table.items() if part in name), None)


def _ceiling(check: str, value: float, unit: str, expected: float | None, state: object) -> Finding:
    if expected is None:
        return info(check, value, unit, state=state, note="no figure is expected for this device")
    return at_least(check, value, 0.5 * expected, unit, warn=expected, state=state)


def products(session: Session, name: str) -> Iterator[Finding]:
    """A square bf16 product, the same summed in fp32, and FP8."""
    size = session.size(8192, 512)
    a, b = (torch.randn(size, size, device=session.device).bfloat16() for _ in range(2))
    runs: dict[str, Callable[[], object]] = {"bf16": lambda: a @ b}
    reasons: dict[str, str] = {}
    _add(runs, reasons, "bf16 to fp32", lambda: torch.mm(a, b, out_dtype=torch.float32))
    one = torch.ones((), device=session.device)
    for left, right in FP8:
        for is_fast in (False, True):
            label = f"{_short(left)} × {_short(right)}, fast accumulation {is_fast}"
            x, w = a.to(left), b.to(right).t().contiguous().t()  # the second operand is column-major
            run = functools.partial(
                torch._scaled_mm, x, w, one, one, out_dtype=torch.bfloat16, use_fast_accum=is_fast
            )
            _add(runs, reasons, label, run)
    times = session.time(runs)
    rate = 2 * size**3 / statistics.median(times["bf16"]) / 1e12
    session.keep("bf16_flops_per_second", rate * 1e12)
    yield _ceiling(
        f"bf16 product of {size}³", rate, " TFLOP/s", _expected(BF16_TERAFLOPS, name), times.state("bf16")
    )
    for label in runs:
        if label == "bf16":
            continue
        speed, state = 1 / ratio(times, label, "bf16"), times.state(label)
        text = f"{label}, speed ÷ bf16's"
        if not session.is_gpu:
            yield info(text, speed, " ×")
        elif label == "bf16 to fp32":
            yield at_least(text, speed, 0.90, " ×", warn=0.97, state=state)
        elif label.endswith("False"):
            yield at_least(
                text, speed, 0, " ×", warn=1.5, state=state, note="below 1.5, layers in FP8 miss .80 × bf16"
            )
        else:
            yield info(text, speed, " ×", state=state)
    for label, reason in reasons.items():
        yield skip(label, reason)


def _add(
    runs: dict[str, Callable[[], object]], reasons: dict[str, str], label: str, run: Callable[[], object]
) -> None:
    """Add a candidate if the device has the operation; torch's own words go to the step's log."""
    try:
        run()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        print(f"{label}: {type(error).__name__}: {error}")
        reasons[label] = (
            f"torch {torch.__version__} has no such product on this device (logs/ceilings.log says why)"
        )
    else:
        runs[label] = run


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.float8_")


def launches(session: Session) -> Iterator[Finding]:
    """Host time of one operation of torch, and of one empty Triton kernel."""
    x = torch.zeros(16, device=session.device)
    microseconds = session.host_seconds(lambda: x.add_(1), LAUNCHES) * 1e6
    if session.is_gpu:
        yield at_most("host time of a torch operation", microseconds, 12, " µs", warn=6)
    else:
        yield info("host time of a torch operation", microseconds, " µs", note="with its work, on a CPU")
        yield skip("host time of an empty Triton kernel", NO_GPU)
        return
    from benchmarks.kernels.compiling import empty_kernel

    microseconds = session.host_seconds(lambda: empty_kernel[(1,)](), LAUNCHES) * 1e6
    yield at_most("host time of an empty Triton kernel", microseconds, 50, " µs", warn=25)
