"""Plans of small runs, and of large ones whose memory is not asked."""

import json
import os
from dataclasses import replace

import pytest

from launchers import ROOT, write_config
from megalowbit.doctor import plan as plan_module
from megalowbit.doctor.disk import Disk
from megalowbit.doctor.examine import Surroundings
from megalowbit.doctor.hosts import Host
from megalowbit.doctor.machine import Machine
from megalowbit.doctor.network import Network
from megalowbit.doctor.plan import plan_run
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.estimate.memory import MemoryEstimate

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NO_MEMORY = MemoryEstimate(
    parameters=0, main_gradients=0, master_parameters=0, optimizer_moments=0, saved_for_backward=0
)


@pytest.fixture(autouse=True)
def _environment_as_before(monkeypatch, tmp_path):
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    os.environ["MEGALOWBIT_CACHE"] = str(tmp_path / "cache")
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def plans():
    """Plans by their arguments: several tests ask for the same ones, which are frozen and slow to make."""
    return {}


@pytest.fixture
def tiny(tmp_path, plans):
    """The plan of a GPT-2 of a few thousand parameters, with overrides; `model` changes its config.json."""

    def tiny(*overrides, processes=1, model=None, block=None):
        key = "tiny", overrides, processes, json.dumps([model, block])
        if key not in plans:
            path = write_config(tmp_path, model=model, block=block)
            plans[key] = plan_run(load_config(path, list(overrides), world_size=processes))
        return plans[key]

    return tiny


@pytest.fixture
def large(tmp_path, plans, monkeypatch):
    """The plan of configs/llama3_8b_fp4.json without tensor parallelism, in bf16, or of another model.

    Its memory takes longest to estimate, has tests of its own, and is zero here.
    """
    monkeypatch.setattr(plan_module, "estimate_run", lambda config, recipe: NO_MEMORY)

    def large(*overrides, processes, micro_batch, batch, model=None):
        more = []
        if model is not None:
            path = tmp_path / "model.json"
            path.write_text(json.dumps(model))
            vocabulary = model["vocab_size"]
            more = [f"megalowbit.model.config={path}", f"megalowbit.data.vocab_size={vocabulary}"]
        values = [
            "tensor_parallel.autotp_size=1",
            "megalowbit.recipe=bf16",
            "megalowbit.late_switch=null",
            "megalowbit.activation_checkpointing.every=0",
            f"train_micro_batch_size_per_gpu={micro_batch}",
            f"train_batch_size={batch}",
        ]
        path = ROOT / "configs" / "llama3_8b_fp4.json"
        key = "large", overrides, processes, micro_batch, batch, json.dumps(model)
        if key not in plans:
            config = load_config(path, [*values, *more, *overrides], world_size=processes)
            plans[key] = plan_run(config)
        return plans[key]

    return large


@pytest.fixture
def network():
    """16 ranks on two hosts, as measured."""
    figures = {"latency": 1e-5, "bytes": 2**28, "bandwidth": 80e9, "links": {}, "clocks": {}}
    return Network(backend="nccl", ranks=16, hosts=2, **figures)


def machine(*gpus, memory=512.0):
    return Machine(
        host="n1",
        facts={"GPUs": ", ".join(gpus), "cpu cores": "8"},
        gpus=gpus,
        capability=(9, 0) if gpus else None,
        gpu_memory=79.1 if gpus else 0.0,
        memory=memory,
        notices=(),
    )


@pytest.fixture
def around():
    """What a job with GPUs of these names finds around it."""
    return surroundings


def surroundings(*gpus, hosts=1, ranks=1, network=None, write=1e9, file_system="lustre", memory=512.0):
    found = machine(*gpus, memory=memory)
    disk = Disk(folder="/runs", file_system=file_system, free=10**13, write=write, read=write)
    return Surroundings(
        machine=found,
        hosts=[Host(machine=replace(found, host=f"n{n}"), disk=disk, ranks=ranks) for n in range(hosts)],
        network=network,
        notices=[],
    )
