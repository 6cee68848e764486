"""A one-process job on a few kilobytes of text, in this process."""

import os
import shutil
import signal

import pytest
from ended_runs import STEPS

from launchers import write_config
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.engine.process_start import start_process_group
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.job import assemble
from megalowbit.pretrain.run import pretrain
from megalowbit.pretrain.run_folder.folder import RunFolder
from megalowbit.pretrain.stopping.signals import STOP_SIGNALS, block_stop_signals

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _environment_as_before(monkeypatch, tmp_path):
    before = dict(os.environ)
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    os.environ["MEGALOWBIT_CACHE"] = str(tmp_path / "cache")
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def resolve(tmp_path):
    """Resolve the tiny configuration with overrides."""

    def resolve(*overrides):
        return load_config(write_config(tmp_path), list(overrides), world_size=1)

    return resolve


@pytest.fixture
def build_job(tmp_path, resolve):
    """Assemble a job with overrides; its run folder is tmp_path/run."""

    def build_job(*overrides):
        start_process_group()
        (tmp_path / "run").mkdir(exist_ok=True)
        return assemble(resolve(*overrides), ProcessIdentity(), RunFolder(tmp_path / "run"))

    return build_job


@pytest.fixture(scope="session")
def ended_run(tmp_path_factory):
    return tmp_path_factory.mktemp("ended")


@pytest.fixture
def finished(resolve, ended_run, tmp_path):
    """A run of four steps that has ended, in `tmp_path / "run"`; trained once."""
    if not (ended_run / "run").exists():
        pretrain(resolve(*STEPS), ProcessIdentity(), run_dir=ended_run / "run", is_resume=False)
    shutil.copytree(ended_run / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def stop_signals():
    """Blocked as in a program of its own, and none left waiting."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    block_stop_signals()
    yield
    while signal.sigtimedwait(STOP_SIGNALS, 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
