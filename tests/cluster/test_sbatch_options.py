import pytest

from megalowbit.cluster.sbatch_options import check_sbatch_option
from megalowbit.cluster.settings import ClusterSettings
from megalowbit.errors import UserError


@pytest.mark.parametrize(
    "option",
    [
        "--mail-type=END",
        "--licenses=a:1",
        "--hint=nomultithread",
        "-d afterok:12",
        "--exclusive",
        "-Lmatlab",
        "--comment='a b'",
        "-H",
    ],
)
def test_options_that_the_script_does_not_use_are_accepted(option):
    settings = ClusterSettings(gpus_per_node=0, cpus_per_task=1, sbatch=[option])
    assert settings.sbatch == (option,)


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--partition=gpu", "partition"),
        ("-p gpu", "partition"),
        ("-pgpu", "partition"),
        ("-N2", "nodes"),
        ("--gres=gpu:4", "gpus_per_node"),
        ("--mem 64G", "memory"),
        ("--signal=USR1@5", "signal_seconds"),
        ("-n=8", "tasks_per_node"),
    ],
)
def test_options_with_a_dedicated_key_name_that_key(option, key):
    with pytest.raises(UserError, match=f"is set by the script: use the key '{key}'"):
        check_sbatch_option(option)


@pytest.mark.parametrize(
    "option",
    [
        "--no-requeue",
        "--output=x",
        "-o x",
        "--open-mode=truncate",
        "-a 1-3",
        "--no-req",
        "--test-only",
        "--wait",
        "-W",
        "-Q",
    ],
)
def test_options_that_the_script_relies_on_cannot_be_changed(option):
    with pytest.raises(UserError, match="leave it out, because it cannot be changed"):
        check_sbatch_option(option)


@pytest.mark.parametrize("option", ["mail-type=END", "--a=b\n#SBATCH --no-requeue", "--\0", "-", "--", ""])
def test_a_string_that_is_not_an_option_is_rejected(option):
    with pytest.raises(UserError, match="is not an option on one line"):
        check_sbatch_option(option)


@pytest.mark.parametrize(
    "option",
    [
        "--exclusive --no-requeue --time=1",
        "--exclusive -t1",
        "-H -t1",
        "-Ht1",
        "-H x",
        "--comment=a b",
        "-Lmatlab x",
        "--comment a #b",
        "--comment='a",
    ],
)
def test_a_string_holds_one_option(option):
    with pytest.raises(UserError, match="is more than one option, or its value has spaces"):
        check_sbatch_option(option)
