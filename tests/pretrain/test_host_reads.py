"""A training step reads the device once. All places that read a tensor's values are listed here by name.

On a CPU every read is a plain memory access, so reads are counted by the methods and operations they go by
(`tests/layers/host_reads.py`).
Of the places below, only those in `DEVICE` wait for a GPU; the others do not exist there, or read a tensor
that is on the host anyway.
"""

import json

import pytest
import torch
from forked_ranks import run_ranks
from host_reads import HostReads
from quick_cases import slow_except

from launchers import write_config
from megalowbit.pretrain.loop import train_step

DEVICE = {"megalowbit.optim.gradients.norm.read": 1}  # norm, flag, loss, counts: one copy
ON_THE_HOST = {
    "megalowbit.layers.matmul.fp8.fits",  # without Triton: whether a product is exact in FP8
    "megalowbit.layers.matmul.gemms._alpha",  # CPUs: tensor scales as an argument of a bf16 GEMM
    "megalowbit.layers.matmul.gemms.add_product",  # CPUs: as a factor of a sum in main_grad
    "megalowbit.layers.matmul.gemms.finish",  # CPUs: the same for the C kernel, in fp16 and fp32
    "megalowbit.spectral.orthogonal.cholesky_rows",  # CPUs: whether LAPACK failed
    "megalowbit.engine.pipeline.micro_batches._check_range",  # of batches on the host
    "megalowbit.pretrain.components.machine.throughput.read_batch",  # the same
    "deepspeed.runtime.utils.is_invalid_grad_norm",  # ZeRO: the norm has been read before
    "deepspeed.runtime.zero.partition_parameters.__init__",  # ZeRO 3: to the device by its name, here "cpu"
}
# before a pipeline's schedule, whether all ranks have their batches: a number of the host in a group of gloo,
# as tests/distributed/test_collectives.py shows for GPUs
AGREEMENT = "megalowbit.distributed.process_group.is_true_anywhere"
VALIDATION = "megalowbit.pretrain.components.validation.sums_of_batches"
OSCILLATION = "megalowbit.engine.parameters.oscillation.found"

SPECULATION = (
    "megalowbit.recipe=speculative-int8",
    'megalowbit.speculation={"candidates": ["int8", "bf16"], "threshold_db": 15, "every": EVERY}',
)


def step_of_the_loop(job):
    """A step with its components, the loss guard among them, as `loop.train` takes it."""
    for component in job.components:
        component.before_step(job.step)
    step = train_step(job)
    assert not step.is_skipped
    for component in job.components:
        list(component.after_step(job.step, step.facts))
    job.loss_guard.judge(job.step, job.totals.final_loss, is_skipped=False)
    for component in job.components:
        component.evaluate(job.step, lambda: None)


def reads_of_a_step(job):
    """Places on a device → reads there in the third step."""
    for _ in range(2):  # state is made, kernels are checked; speculation quantises from the second step on
        step_of_the_loop(job)
    with pytest.MonkeyPatch.context() as patch, HostReads(patch) as reads:
        step_of_the_loop(job)
    for component in job.components:
        component.stop(job.step)  # a profiler would record all later tests
    return without_host(reads.places)


def without_host(places):
    return {place: count for place, count in places.items() if place not in ON_THE_HOST}


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
    "FP8 products": ['megalowbit.recipe={"base": "mxfp4", "gemm": "fp8"}'],
    "ZeRO 1": ["zero_optimization.stage=1"],
    "ZeRO 2": ["zero_optimization.stage=2"],
    "ZeRO 3": ["zero_optimization.stage=3"],
    "ZeRO 3 with offload": [
        "zero_optimization.stage=3", 'zero_optimization.offload_optimizer={"device": "cpu"}',
        'zero_optimization.offload_param={"device": "cpu"}',
    ],
    "separate documents": ["megalowbit.data.packing=best_fit", "megalowbit.data.eod_mask_loss=true"],
    "loss guard": ['megalowbit.loss_guard={"nonfinite": "rollback", "spike": "rollback"}'],
    "profiler": ['megalowbit.profile={"first_step": 1, "steps": 4}'],
    "speculation between checks": [each.replace("EVERY", "4") for each in SPECULATION],
    "static inputs": ["megalowbit.recipe=metis-nvfp4", "megalowbit.static_inputs.last=6"],
    "within a window of oscillation_reset": ['megalowbit.oscillation_reset={"start": 2, "window": 2}'],
}  # fmt: skip


QUICK = ["ZeRO 0", "splits", "ZeRO 2", "static inputs"]


@pytest.mark.parametrize("case", slow_except(QUICK, CASES))
def test_a_step_reads_the_device_once(build_job, case):
    assert reads_of_a_step(build_job(*CASES[case])) == DEVICE


def test_a_check_of_speculation_is_a_second_read(build_job):
    places = reads_of_a_step(build_job(*(each.replace("EVERY", "1") for each in SPECULATION)))
    assert places == {**DEVICE, "megalowbit.speculation.exchange.pool": 1}


@pytest.mark.parametrize("reset", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_the_end_of_a_window_of_oscillation_reset_is_a_second_read(build_job, reset):
    """The window of the second step is closed before the third."""
    window = f'{{"start": 1, "window": 1, "reset": {reset}}}'
    places = reads_of_a_step(build_job(f"megalowbit.oscillation_reset={window}"))
    assert places == {**DEVICE, OSCILLATION: 1}


def held_text(folder):
    (folder / "held.txt").write_text("A text of some length to validate on. " * 100)
    return folder / "held.txt"


@pytest.mark.parametrize("bf16", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_a_validation_reads_once_for_each_loss_however_many_batches(build_job, tmp_path, bf16):
    job = build_job(
        f"megalowbit.data.validation.corpus={held_text(tmp_path)}",
        f'megalowbit.validation={{"every": 1, "bf16": {bf16}}}',
    )
    assert job.loader.validation.num_batches(job.loader.micro_batch_size) > 2
    assert reads_of_a_step(job) == {**DEVICE, VALIDATION: 1 + (bf16 == "true")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "agreements"), [("tensor_parallel.autotp_size=2", {}), ("pipeline.stages=2", {AGREEMENT: 1})]
)
def test_ranks_read_their_devices_once(tmp_path, layout, agreements):
    config = write_config(tmp_path, block={"run": {"steps": 2}})
    done = run_ranks(
        "--ds-config",
        config,
        "--set",
        layout,
        "--set",
        f"megalowbit.data.validation.corpus={held_text(tmp_path)}",
        "--set",
        "megalowbit.validation.tokens=128",  # a pipeline evaluates 16 batches in a call
        cwd=tmp_path,
        processes=2,
        hook="tests.layers.host_reads.install",
    )
    assert done.code == 0, done.output
    for rank in range(2):
        step, evaluation = (
            without_host(json.loads((tmp_path / f"{name}-{rank}.json").read_text()))
            for name in ("reads", "evaluation")
        )
        assert step == {**DEVICE, **agreements}
        assert evaluation == {VALIDATION: 1, **agreements}


def test_every_read_is_found(build_job):
    job = build_job()
    forward = job.engine.module.forward

    def reading(*arguments, **named):
        result = forward(*arguments, **named)
        result.loss.item()
        result.loss.detach()[None].nonzero()
        bool(torch.equal(result.loss, result.loss))
        result.logits[result.logits > 0].to("cpu")
        return result

    job.engine.module.forward = reading
    found = [count for place, count in reads_of_a_step(job).items() if place not in DEVICE]
    assert sum(found) == 5 * job.accumulation_steps
