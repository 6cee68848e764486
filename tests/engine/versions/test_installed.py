"""Starts with unsupported versions: copies of DeepSpeed in real processes and ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed_copies import copy_deepspeed, environment
from packaging.requirements import Requirement

from launchers import free_port
from megalowbit.engine.versions import installed as installed_versions
from megalowbit.errors import UserError

PIPE = subprocess.PIPE
ROOT = Path(__file__).parents[3]
# One start for each value of MEGALOWBIT_ALLOW_DEEPSPEED among the arguments, or one. The group is stopped at
# the end: an interpreter that exits while Gloo threads run may abort.

START = """
import logging, os, sys
logging.basicConfig(level="WARNING")
import torch.distributed as dist
from megalowbit.engine.process_start import start_process_group
from megalowbit.errors import UserError
for allowed in sys.argv[1:] or [None]:
    if allowed is not None:
        os.environ["MEGALOWBIT_ALLOW_DEEPSPEED"] = allowed
    try:
        start_process_group()
    except UserError as error:
        print(error, error.is_on_all_ranks)
    else:
        print("started")
dist.barrier()
dist.destroy_process_group()
"""
REFUSED = "deepspeed 0.19.9 is installed, but megalowbit is verified only with 0.19.8"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return copy_deepspeed(tmp_path_factory.mktemp("copies") / "sound", "0.19.9")


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    change = ("runtime/zero/stage_1_and_2.py", "round_robin_bit16_offsets", "bit16_offsets")
    return copy_deepspeed(tmp_path_factory.mktemp("copies") / "broken", "0.19.9", [change])


def start(*folders, allowed=(), **more):
    """Start one rank for each folder (None: the installed DeepSpeed) and return their output.

    Args:
        folders: of copies of DeepSpeed.
        allowed: values of MEGALOWBIT_ALLOW_DEEPSPEED to start with in turn, with a line of output for each.
        more: variables of the environment.
    """
    port, ranks = free_port(), []
    for rank, folder in enumerate(folders):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(folders))}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env = environment(folder or ROOT, os.environ, **place, **address, **more)
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", START, *allowed],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [rank.communicate(timeout=400) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs
    return outputs


def test_the_supported_versions_are_those_of_the_setup_and_the_constraints():
    setup = (ROOT / "setup.py").read_text()
    found = map(Requirement, re.findall(r'^        "([^"]+)",', setup, re.MULTILINE))
    required = {each.name: each.specifier for each in found}
    assert str(required["deepspeed"]) == f"=={installed_versions.DEEPSPEED}"
    assert str(required["torch"]) == f"=={installed_versions.TORCH}"
    assert set(str(required["transformers"]).split(",")) == set(installed_versions.TRANSFORMERS.split(","))
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"deepspeed=={installed_versions.DEEPSPEED}" in constraints
    assert f"torch=={installed_versions.TORCH}" in constraints
    assert deepspeed.__version__ == installed_versions.DEEPSPEED


@pytest.mark.slow
def test_another_deepspeed_version_is_rejected_on_all_ranks_in_one_line(sound):
    for output, _ in start(sound, sound):
        assert output.count("\n") == 1
        assert output.startswith(REFUSED)
        assert "pip install 'deepspeed==0.19.8', or set MEGALOWBIT_ALLOW_DEEPSPEED=0.19.9" in output
        assert output.endswith(" True\n")


@pytest.mark.slow
def test_another_deepspeed_version_on_one_rank_stops_all_ranks(sound):
    lines = [output for output, _ in start(None, sound)]
    assert lines[0] == lines[1]
    assert lines[0].startswith(f"rank 1: {REFUSED}")


@pytest.mark.slow
def test_only_the_exact_version_is_accepted_as_permission(sound):
    values = ["*", "1", "0.19.8", "0.19", ""]
    ((output, _),) = start(sound, allowed=values)
    assert output.count("\n") == len(values)
    for line, value in zip(output.splitlines(), values, strict=True):
        assert line.startswith(REFUSED)
        assert f"MEGALOWBIT_ALLOW_DEEPSPEED is {value!r}, which allows no other version" in line


@pytest.mark.slow
def test_an_allowed_version_that_meets_the_contracts_starts_with_one_warning(sound):
    (first, warned), (second, silent) = start(sound, sound, MEGALOWBIT_ALLOW_DEEPSPEED="0.19.9")
    assert (first, second) == ("started\n", "started\n")
    assert warned.count("deepspeed 0.19.9 instead of 0.19.8") == 1
    assert "instead of" not in silent


@pytest.mark.slow
def test_an_allowed_version_that_breaks_a_contract_is_rejected(broken):
    ((output, _),) = start(broken, MEGALOWBIT_ALLOW_DEEPSPEED="0.19.9")
    assert output.startswith("deepspeed 0.19.9 breaks 1 of the ")
    assert "round_robin_bit16_offsets (checkpoints record where each parameter is" in output


@pytest.mark.slow
def test_the_command_line_ends_with_one_line(sound, tmp_path):
    env = environment(sound, os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    command = [
        sys.executable,
        ROOT / "launch/pretrain.py",
        "--ds-config",
        ROOT / "configs/gpt2_tiny_fp4.json",
    ]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {REFUSED}"), done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "a run folder was made"


def check(monkeypatch):
    installed_versions.check_installed.cache_clear()
    try:
        installed_versions.check_installed()
    finally:
        monkeypatch.undo()
        installed_versions.check_installed.cache_clear()


def test_another_torch_version_is_rejected_unless_it_is_allowed(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.14.1+cu130")
    with pytest.raises(UserError, match=r"torch 2\.14\.1\+cu130 is inst.*_ALLOW_TORCH=2\.14\.1\+cu130"):
        check(monkeypatch)
    monkeypatch.setattr(torch, "__version__", "2.14.1+cu130")
    monkeypatch.setenv("MEGALOWBIT_ALLOW_TORCH", "2.14.1+cu130")
    check(monkeypatch)


@pytest.mark.parametrize("build", ["2.13.0", "2.13.0+cpu", "2.13.0+cu129"])
def test_every_build_of_the_supported_torch_is_accepted(monkeypatch, build):
    monkeypatch.setattr(torch, "__version__", build)
    check(monkeypatch)


def test_transformers_outside_the_supported_range_is_rejected(monkeypatch, tmp_path):
    (tmp_path / "transformers-4.57.1.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.1\n"
    (tmp_path / "transformers-4.57.1.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"transformers 4\.57\.1 is installed.*'transformers>=5\.20,<6'"):
        check(monkeypatch)
