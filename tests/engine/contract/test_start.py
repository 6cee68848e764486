"""How DeepSpeed and its launcher start a process."""

import inspect

import deepspeed
from deepspeed.launcher import launch

from megalowbit.distributed.process_group import SLURM_NAMES
from megalowbit.engine.process_start import SHARED_MEMORY_OP, import_deepspeed
from megalowbit.pretrain.command_line import build_parser


def test_the_shared_memory_kernel_stays_off():
    from deepspeed.comm.torch import build_shm_op

    import_deepspeed()
    assert deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] is False
    assert build_shm_op() is None, "every start on a CPU would compile for a minute, or fail without g++"


def test_the_accelerator_reports_its_name_and_communication_backend():
    accelerator = import_deepspeed().get_accelerator()
    for name in ("set_device", "communication_backend_name", "device_name", "device_count"):
        assert callable(getattr(accelerator, name, None)), f"no process could start: {name} is gone"


def test_the_logger_accepts_filters():
    import_deepspeed()
    before = list(deepspeed.utils.logger.filters)
    import_deepspeed()
    assert deepspeed.utils.logger.filters == before, "a filter would be added at every start"


def test_the_launcher_passes_the_arguments_and_variables_that_we_read():
    source = inspect.getsource(launch)
    assert "--local_rank=" in source, "its argument has another name now: the command line would refuse it"
    assert build_parser().parse_args(["--ds-config", "x", "--local_rank=3"]).local_rank == 3
    for name in (*SLURM_NAMES, "MASTER_ADDR", "MASTER_PORT"):
        assert f'current_env["{name}"]' in source, f"every process would take itself for rank 0: no {name}"
