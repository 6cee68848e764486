"""Step 9: forward, backward and update of a whole model, in bf16 and NVFP4, and how long the GPU idles."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import megalowbit as mlb
from benchmarks.first_hour.findings import Finding, at_most, info, skip
from benchmarks.first_hour.session import NO_GPU, Session

LIMITS = {"nvfp4": 1.25, "nvfp4, counting": 1.35}  # × the time of bf16
DEFECT = 2.0
IDLE = 0.10
WARM_UPS = 2


def check(session: Session) -> Iterator[Finding]:
    """Speed by recipe; tokens/s, MFU, idle share."""
    steps: dict[str, Callable[[], None]] = {}
    length, batch = session.size((2048, 4), (32, 2))
    tokens, seconds = length * batch, {}
    for name in ("bf16", *LIMITS):
        torch.manual_seed(0)
        steps[name] = step_of(session, name, batch, length)
        for _ in range(WARM_UPS):
            steps[name]()
    for name, step in steps.items():
        seconds[name] = statistics.median(timed(session, step) for _ in range(session.size(5, 2)))
        yield info(
            f"speed of {name}",
            tokens / seconds[name],
            " tokens/s",
            note=utilisation(session, tokens, length, seconds[name]),
        )
    for name, goal in LIMITS.items():
        value = seconds[name] / seconds["bf16"]
        if session.is_gpu:
            yield at_most(f"step of {name} ÷ bf16's", value, DEFECT, " ×", warn=goal)
            yield idle(session, name, steps[name])
        else:
            yield info(f"step of {name} ÷ bf16's", value, " ×")
    if not session.is_gpu:
        yield skip("idle share of the GPU", NO_GPU)


def sizes(session: Session) -> dict[str, int]:
    """A model like LLaMA with 1 B parameters; on a CPU a small one."""
    width, layers = session.size((2048, 16), (64, 2))
    return {
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": width // session.size(128, 16),
        "vocab_size": session.size(32000, 256),
    }


def step_of(session: Session, name: str, batch: int, length: int) -> Callable[[], None]:
    """A training step on fixed random tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes(session), max_position_embeddings=length, use_cache=False)
    with torch.device(session.device):  # a CPU needs many seconds for random weights
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    tracker = mlb.GradientOverflowTracker() if "counting" in name else None
    if name != "bf16":
        mlb.convert(model, "nvfp4")
        mlb.set_observer(model, tracker)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, config.vocab_size, (batch, length), device=session.device)

    def step() -> None:
        if tracker is not None:
            tracker.begin_step()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(session: Session, step: Callable[[], None]) -> float:
    """Seconds of one step with everything it has queued."""
    session.synchronize()
    started = time.perf_counter()
    step()
    session.synchronize()
    return time.perf_counter() - started


def utilisation(session: Session, tokens: int, length: int, seconds: float) -> str:
    """Model FLOPs (PaLM's formula) over the peak of products that step 1 has measured."""
    peak = session.figures.get("bf16_flops_per_second")
    if peak is None:
        return "run step 1 first for the share of its peak"
    each = sizes(session)
    width, layers = each["hidden_size"], each["num_hidden_layers"]
    weights = layers * (4 * width**2 + 3 * width * each["intermediate_size"]) + width * each["vocab_size"]
    flops = tokens * (6 * weights + 12 * layers * width * length)
    return f"{flops / seconds / peak:.1%} of the products' speed in step 1"


def idle(session: Session, name: str, step: Callable[[], None]) -> Finding:
    """Share of two steps in which no kernel runs."""
    with torch.profiler.profile() as profile:
        step()
        step()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(session.folder / f"model-{name.replace(', ', '-')}.json"))
    kernels = [each for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((each.time_range.start, each.time_range.end) for each in kernels)
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    share = 1 - busy / (end - spans[0][0])
    return at_most(f"idle share of the GPU, {name}", 100 * share, 50, " %", warn=100 * IDLE)
