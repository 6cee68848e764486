"""A training step reads the device once. All places that read a tensor's values are listed here by name.

On a CPU every read is a plain memory access, so reads are counted by the methods and operators they go by.
Of the places below, only those in `DEVICE` wait for a GPU; the others do not exist there, or read a tensor
that is on the host anyway.
"""

import sys
from collections import Counter

import pytest
import torch
from quick_cases import slow_except
from torch.utils._python_dispatch import TorchDispatchMode

from megalowbit.pretrain.loop import train_step

METHODS = (
    "item", "tolist", "numpy", "cpu", "nonzero", "__array__", "__bool__", "__int__", "__float__", "__index__",
)  # fmt: skip
OPERATORS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim",
}  # fmt: skip
PACKAGES = ("megalowbit", "deepspeed", "transformers")

DEVICE = {"megalowbit.optim.gradients.norm.read": 1}  # norm, flag, loss, counts: one copy
ON_THE_HOST = {
    "megalowbit.layers.matmul.gemms._alpha",  # CPUs: tensor scales as an argument of a bf16 GEMM
    "megalowbit.layers.matmul.gemms.add_product",  # CPUs: as a factor of a sum in main_grad
    "megalowbit.layers.matmul.gemms.finish",  # CPUs: the same for the C kernel, in fp16 and fp32
    "megalowbit.spectral.orthogonal.cholesky_rows",  # CPUs: whether LAPACK failed
    "deepspeed.runtime.utils.is_invalid_grad_norm",  # ZeRO: the norm has been read before
}


class HostReads(TorchDispatchMode):
    """Counts reads by the function of one of `PACKAGES` that issued them."""

    def __init__(self, patch):
        super().__init__()
        self.places = Counter()
        self._depth = 0
        for name in METHODS:
            patch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, method):
        def read(*arguments, **named):
            self._note()
            self._depth += 1
            try:
                return method(*arguments, **named)
            finally:
                self._depth -= 1

        return read

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in OPERATORS:
            self._note()
        return function(*args, **(kwargs or {}))

    def _note(self):
        if self._depth:
            return
        frame = sys._getframe(2)
        while frame is not None:
            module = frame.f_globals["__name__"]
            if module.split(".")[0] in PACKAGES:
                self.places[f"{module}.{frame.f_code.co_name}"] += 1
                return
            frame = frame.f_back
        self.places["elsewhere"] += 1


def reads_of_a_step(job):
    train_step(job)  # state is made, kernels are checked
    with pytest.MonkeyPatch.context() as patch, HostReads(patch) as reads:
        step = train_step(job)
    assert not step.is_skipped
    return reads.places


CASES = {
    "ZeRO 0": [],
    "fp16": ["megalowbit.precision=fp16", 'megalowbit.grad_scaler={"initial_scale": 16}'],
    "a scaler with statistics": [
        "megalowbit.precision=fp16", 'megalowbit.grad_scaler={"type": "max_value", "initial_scale": 16}',
    ],
    "retries": [
        "megalowbit.precision=fp16", 'megalowbit.grad_scaler={"initial_scale": 16}',
        "megalowbit.run.overflow_retries=2",
    ],
    "no counts": ["megalowbit.telemetry.overflow=false"],
    "splits": ['megalowbit.recipe={"base": "nvfp4", "split_grad_output": {"rank": 2}}'],
    "ZeRO 1": ["zero_optimization.stage=1"],
    "ZeRO 2": ["zero_optimization.stage=2"],
    "ZeRO 3": ["zero_optimization.stage=3"],
}  # fmt: skip


QUICK = ["ZeRO 0", "splits", "ZeRO 2"]


@pytest.mark.parametrize("case", slow_except(QUICK, CASES))
def test_a_step_reads_the_device_once(build_job, case):
    places = reads_of_a_step(build_job(*CASES[case]))
    for place in ON_THE_HOST:
        places.pop(place, None)
    assert places == DEVICE


def test_every_read_is_found(build_job):
    job = build_job()
    forward = job.engine.module.forward

    def reading(*arguments, **named):
        result = forward(*arguments, **named)
        result.loss.item()
        result.loss.detach()[None].nonzero()
        bool(torch.equal(result.loss, result.loss))
        return result

    job.engine.module.forward = reading
    places = reads_of_a_step(job)
    found = [count for place, count in places.items() if place not in {*DEVICE, *ON_THE_HOST}]
    assert sum(found) == 3 * job.accumulation_steps
