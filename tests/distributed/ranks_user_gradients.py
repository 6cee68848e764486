"""Two ranks: gradients that users clear, set and read, at every ZeRO stage; see test_user_gradients.py.

Argument: `quick` for representative cells, `rest` for the others.
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from tiny_training import config, data, make, rank_and_size, report

from megalowbit.errors import UserError
from megalowbit.optim.local_ddp import LocalDDP
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params

CELLS = [
    *((stage, precision) for stage in "0123" for precision in ("fp16", "bf16", "fp32")),
    ("2 offload", "fp16"),
    ("2 offload", "fp32"),
    ("3 offload", "bf16"),
]
REFERENCE = ("0", "fp32")
QUICK = {REFERENCE, ("0", "fp16"), ("1", "bf16"), ("2 offload", "fp16"), ("3", "fp32")}
rank, world_size = rank_and_size()
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Net(torch.nn.Module):
    """Shapes that two ranks cannot share evenly, and a bias that rank 0 alone may use; not with ZeRO."""

    def __init__(self, is_rare):
        super().__init__()
        torch.manual_seed(0)
        self.is_used = rank == 0 or not is_rare
        self.first, self.second = torch.nn.Linear(8, 5), torch.nn.Linear(5, 3)
        self.rare = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x):
        y = self.second(torch.tanh(self.first(x.to(self.first.weight.dtype)))).float()
        return (y + self.rare.float() if self.is_used else y).square().mean()


def start(stage, precision, steps=1):
    settings = config(precision, steps=steps, clipping=0.1)
    zero = {"stage": int(stage[0]), "stage3_param_persistence_threshold": 0}
    if "offload" in stage:
        zero["offload_optimizer"] = {"device": "cpu"}
    settings["zero_optimization"] = zero
    if precision == "fp16":
        settings["megalowbit"]["grad_scaler"] = {"type": "constant", "scale": 64.0}
    return make(Net(stage == "0"), settings)[0]


def backward(engine, times, step, micro_batch=0):
    engine.backward(engine(data(step, micro_batch, rank, world_size)) * times)


def masters(engine):
    return [safe_get_full_fp32_param(p).double().flatten().tolist() for p in engine.module.parameters()]


def state(engine):
    return [engine.get_global_grad_norm(), masters(engine)]


def cleared(stage, precision):
    """Steps after `zero_grad`, and of an engine that had nothing to clear."""
    seen = []
    for part in (None, "module", "optimizer"):
        both = []
        for is_dirty in (True, False):
            engine = start(stage, precision)
            for step in range(2):
                if is_dirty:
                    backward(engine, 5.0, step + 7)
                    (getattr(engine, part) if part else engine).zero_grad()
                backward(engine, 1.0, step)
                engine.step()
            both.append(state(engine))
        seen.append(both)
    return seen


def cleared_inside(stage, precision):
    both = []
    for is_dirty in (True, False):
        engine = start(stage, precision, steps=2)
        for step in range(2):
            backward(engine, 5.0 if is_dirty else 0.0, step + 7)
            engine.step()
            if is_dirty:
                engine.module.zero_grad()
            backward(engine, 1.0, step, 1)
            engine.step()
        both.append(state(engine))
    return both


def set_by_hand(stage, precision):
    """Two steps on the same gradients, with and without a backward; the masters and the norm."""
    engine = start(stage, precision)
    parameters = list(engine.module.parameters())
    for has_backward in (True, False):
        if has_backward:
            backward(engine, 3.0, 0)
        with deepspeed.zero.GatheredParameters(parameters, enabled=stage[0] == "3"):
            for place, parameter in enumerate(parameters):
                ramp = torch.arange(parameter.numel()).view(parameter.shape) / 8 - place
                parameter.grad = ramp.to(parameter)
        engine.step()
    moments = [
        safe_get_full_optimizer_state(parameter, "exp_avg").double().flatten().tolist()
        for parameter in parameters
    ]
    return [*state(engine), moments]


def whole_gradients(stage, precision):
    """What DeepSpeed's function gives, and the average of both ranks' gradients of a plain model, times S."""
    engine = start(stage, precision)
    backward(engine, 1.0, 0)
    found = [safe_get_full_grad(p).double().flatten().tolist() for p in engine.module.parameters()]
    plain, scale = Net(stage == "0").double(), 64.0 if precision == "fp16" else 1.0
    plain(data(0, 0, rank, world_size)).backward()
    expected = []
    for parameter in plain.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradient)
        expected.append((gradient * scale / world_size).flatten().tolist())
    return [found, expected]


def refused(stage, precision):
    """Steps without gradients: at first, after a step, after zero_grad; then one that is taken."""
    engine, seen = start(stage, precision), []

    def try_step():
        try:
            engine.step()
            seen.append("applied" if engine.was_step_applied() else "skipped")
        except UserError as error:
            seen.append(str(error))

    try_step()
    backward(engine, 1.0, 0)
    try_step()
    try_step()
    backward(engine, 1.0, 1)
    engine.module.zero_grad()
    try_step()
    backward(engine, 1.0, 2)
    try_step()
    return [seen, masters(engine)]


def local_ddp(precision):
    """A plain loop; gradients are cleared before and after they have been averaged."""
    both = []
    for is_dirty in (True, False):
        model = LocalDDP(Net(is_rare=True).to(DTYPES[precision]))
        optimizer = Float16OptimizerWithFloat16Params(
            torch.optim.AdamW(model.parameters(), lr=0.1), grad_scaler=None, bf16=True, clip_grad=0.1
        )
        for step in range(2):
            for is_averaged in (True, False) if is_dirty else ():
                (model(data(step + 7, 0, rank, world_size)) * 5).backward()
                if is_averaged:
                    model.allreduce_gradients()
                model.module.zero_grad()
            model(data(step, 0, rank, world_size)).backward()
            model.allreduce_gradients()
            norm = optimizer.step().grad_norm
        both.append([norm, [p.double().flatten().tolist() for p in model.parameters()]])
    return both


seen = {}
for stage, precision in CELLS:
    cell = (stage, precision)
    if cell != REFERENCE and (cell in QUICK) != (sys.argv[1] == "quick"):
        continue
    cases = (cleared, cleared_inside, set_by_hand, whole_gradients, refused)
    seen[f"{stage}, {precision}"] = {case.__name__: case(stage, precision) for case in cases}
seen["local_ddp"] = local_ddp("bf16")  # in the process group that the engines have started
report(seen)
