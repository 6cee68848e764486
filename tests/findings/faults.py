"""Faults for runs in processes of their own: what breaks in practice, planted at a step of a real run.

A test names one as the hook of its ranks, and its step, rank and layer in the environment. The hook is called
in the new process before the program starts. It wraps `train_step`, and everything else is the program's own.
"""

import os
import signal
import time

STEP, RANK, LAYER, FACTOR = "FAULT_STEP", "FAULT_RANK", "FAULT_LAYER", "FAULT_FACTOR"


def _number(name, default):
    return float(os.environ.get(name, default))


def _is_here():
    rank = os.environ.get(RANK)
    return rank is None or rank == os.environ.get("RANK", "0")


def _before_steps(act):
    """Call `act(job, step)` on the faulty rank before each step from FAULT_STEP on."""
    from megalowbit.pretrain import loop

    original, first = loop.train_step, int(_number(STEP, 1))

    def train_step(job):
        if _is_here() and job.step + 1 >= first:
            act(job, job.step + 1)
        return original(job)

    loop.train_step = train_step


def _once(act):
    done = []

    def once(job, step):
        if not done:
            done.append(step)
            act(job, step)

    return once


def _layer(job):
    return job.engine.module.get_submodule(os.environ[LAYER])


def _optimizer_weights(job):
    """The parameters, and their fp32 masters where the optimizer has them."""
    named = dict(job.engine.module.named_parameters())
    inner = getattr(job.engine.optimizer, "optimizer", None)
    masters = [p for group in inner.param_groups for p in group["params"]] if inner is not None else []
    return named, masters


def scale_a_row():
    """Multiply one row of a layer's weights by FAULT_FACTOR, masters too: an outlier from a bad write."""
    import torch

    def act(job, step):
        weight = _layer(job).weight
        with torch.no_grad():
            before = weight.detach().float().clone()
            weight[0] *= _number(FACTOR, 1e4)
            for master in _optimizer_weights(job)[1]:
                if (
                    master is not weight
                    and master.shape == before.shape
                    and torch.allclose(master.float(), before, rtol=1e-2, atol=1e-4)
                ):
                    master[0] *= _number(FACTOR, 1e4)

    _before_steps(_once(act))


def scale_all_weights():
    """Multiply all weights of the faulty rank by 1 + FAULT_FACTOR · noise: its replica has gone astray."""
    import torch

    def act(job, step):
        named, masters = _optimizer_weights(job)
        with torch.no_grad():
            for weight in {id(each): each for each in (*named.values(), *masters)}.values():
                weight += _number(FACTOR, 0.5) * weight.float().abs().mean().to(weight.dtype)

    _before_steps(_once(act))


def nan_gradient():
    """The weight gradients of one layer have a NaN, as after a bit flip in the exponent."""

    def act(job, step):
        weight = _layer(job).weight
        weight.register_hook(lambda grad: grad.index_fill(0, grad.new_tensor([0]).long(), float("nan")))

    _before_steps(_once(act))


def nan_activation():
    """A layer's output has a NaN."""

    def act(job, step):
        def spoil(module, inputs, output):
            output = output.clone()
            output.view(-1)[0] = float("nan")
            return output

        _layer(job).register_forward_hook(spoil)

    _before_steps(_once(act))


def slow_forward():
    """The forward pass takes FAULT_FACTOR seconds longer: a device that is throttled or shared."""

    def act(job, step):
        job.engine.module.register_forward_pre_hook(lambda *_: time.sleep(_number(FACTOR, 0.2)))

    _before_steps(_once(act))


def hang():
    """The main thread sleeps for ever."""
    _before_steps(lambda job, step: time.sleep(10_000))


def kill_self():
    """SIGKILL, as the kernel sends it when memory is out."""
    _before_steps(lambda job, step: os.kill(os.getpid(), signal.SIGKILL))


def out_of_memory():
    """An allocation that no machine has room for."""
    import torch

    _before_steps(lambda job, step: torch.empty(2**50))


def terminate():
    """SIGTERM, as SLURM sends it at the time limit."""
    _before_steps(_once(lambda job, step: os.kill(os.getpid(), signal.SIGTERM)))


def crash():
    """A bug."""

    def act(job, step):
        raise KeyError("a bug")

    _before_steps(act)


def scale_an_element():
    """Multiply one element of a layer's weights by FAULT_FACTOR: a bit flip in an exponent."""
    import torch

    def act(job, step):
        weight = _layer(job).weight
        with torch.no_grad():
            before = weight.detach().float().clone()
            for master in {id(each): each for each in (weight, *_optimizer_weights(job)[1])}.values():
                if master.shape == before.shape and torch.allclose(
                    master.float(), before, rtol=1e-2, atol=1e-4
                ):
                    master.view(-1)[0] = _number(FACTOR, 1e6) * before.abs().mean()

    _before_steps(_once(act))
