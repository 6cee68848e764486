"""What `make` would run: the number of processes, and which tests."""

import os
import re
import subprocess
import sys

import pytest

from launchers import ROOT


def commands(*arguments):
    venv = f"VENV={sys.prefix}"
    done = subprocess.run(
        ["make", "-n", venv, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def launcher(*arguments):
    return re.search(r'PATH"? (.*?) --log_level error --master_port', commands("pretrain", *arguments))[1]


def test_a_given_number_of_processes_is_passed_on():
    assert launcher("GPUS=3") == "deepspeed --num_accelerators 3"


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5"])
def test_a_number_of_processes_that_cannot_be_is_an_error(number):
    made = subprocess.run(
        ["make", "-n", "pretrain", f"GPUS={number}"], cwd=ROOT, capture_output=True, text=True
    )
    assert made.returncode == 2
    assert f"GPUS={number} is not a number of processes: give 1 or more" in made.stderr


@pytest.mark.slow
def test_a_machine_without_gpus_gets_two_processes():
    counted = subprocess.run(["bash", "-c", f"echo {launcher()}"], capture_output=True, text=True, check=True)
    assert (
        counted.stdout == "DS_ACCELERATOR=cpu deepspeed --num_accelerators 2\n"
    )  # the GPUs are hidden, see tests/conftest.py


def test_other_tests_hide_the_gpus():
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_tests_that_need_a_gpu_are_run_apart():
    assert '-m "not slow and not gpu"' in commands("test")
    assert "-m pytest -m gpu" in commands("test-gpu")
