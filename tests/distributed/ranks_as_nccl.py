"""What this package sends between GPUs that are not there: meta tensors in a group that looks like NCCL's.

Writes for each case the calls that were checked, with the tensor's device, and the error if there was one.
The meta device stands for GPUs, because a torch without CUDA can do little with fake CUDA tensors. A case
ends where the host would read a number.
"""

from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from tiny_training import report
from torch.testing._internal.distributed.fake_pg import FakeStore

from megalowbit.distributed import collectives, process_group
from megalowbit.distributed.agreement import failing_together, gather_bytes
from megalowbit.distributed.tensor_group import TensorGroup
from megalowbit.engine.tensor_parallel.shard_model import _broadcast_initial_state
from megalowbit.engine.zero.pieces import GradientPieces, Piece
from megalowbit.optim import step
from megalowbit.optim.gradients.norm import measure_gradients
from megalowbit.optim.optimizers.options import StepOptions
from megalowbit.optim.statistics.amax import GradientWatch
from megalowbit.optim.statistics.probe import GradientProbe
from megalowbit.speculation import exchange
from megalowbit.speculation.probe import RankFindings
from megalowbit.telemetry.overflow.reduction import ROW_LENGTH, _are_equal, sum_over_ranks
from megalowbit.telemetry.overflow.tracker import GradientOverflowTracker
from megalowbit.telemetry.step_facts import PendingFacts

GPU = torch.device("meta")
CASES = {}


def case(work):
    CASES[work.__name__] = work
    return work


def model(device=GPU):
    return torch.nn.Sequential(torch.nn.Linear(4, 4, device=device), torch.nn.Linear(4, 2, device=device))


@case
def gradients_of_a_step():
    gradients = list(model().parameters())
    step._measure(steppable(partial(measure_gradients, gradients, group=WORLD)), is_exact=True)


@case
def a_step_without_gradients():
    step._measure(steppable(partial(measure_gradients, [None])), is_exact=False)
    measure_gradients([None], group=WORLD)


def steppable(measure):
    return SimpleNamespace(measure=measure, training_group=WORLD, is_flag_shared=False)


@case
def statistics_of_gradients():
    made = model()
    watch, probe = GradientWatch(made.named_parameters()), GradientProbe(made)
    probe.is_armed = True
    watch.take(WORLD)
    probe.take(WORLD)
    GradientWatch([]).take(WORLD)


@case
def offloaded_pieces():
    """ZeRO's optimizer is on the CPU, and with it the gradients."""
    parameter = torch.nn.Parameter(torch.ones(8, device=GPU))
    options = StepOptions(clip_grad=1.0, training_group=WORLD)
    pieces = GradientPieces([parameter], names=["a"], options=options, copies=None)
    pieces.measure([Piece(parameter, torch.ones(8), 0)], is_exact=False)


@case
def facts_of_a_step():
    tracker = GradientOverflowTracker(stages=WORLD)
    counts = torch.ones(8, dtype=torch.int64, device=GPU)
    tracker.observe("a", "input", counts, torch.ones(2, dtype=torch.float64, device=GPU))
    PendingFacts(torch.ones((), device=GPU), tracker=tracker)


@case
def facts_of_a_step_on_the_host():
    PendingFacts(torch.ones(()), tracker=GradientOverflowTracker(stages=WORLD))


@case
def the_end_of_a_counted_step():
    GradientOverflowTracker().end_step()


@case
def whether_tables_are_equal():
    _are_equal([], WORLD, process_group.exchange_device(WORLD))


@case
def tables_of_layers():
    list(sum_over_ranks({("a", "input"): [0] * ROW_LENGTH}, WORLD, torch.device("cpu")))


@case
def tensor_parallel_layers():
    group = TensorGroup(WORLD)
    group.sum(torch.ones(2, 3, device=GPU).t())
    group.start_sum(torch.ones(3, device=GPU)).wait()
    group.largest(torch.ones(2, device=GPU))
    group.gather(torch.ones(2, 3, device=GPU).t())


@case
def initial_weights_of_shards():
    _broadcast_initial_state(model(), WORLD)


@case
def initial_weights_of_shards_on_the_host():
    _broadcast_initial_state(model("cpu"), WORLD)


@case
def flags():
    process_group.is_true_anywhere(True)


@case
def random_numbers():
    process_group.check_numbers_differ((1, 2), WORLD, torch.device("cpu"))


@case
def states_of_generators():
    gather_bytes(b"abc")


@case
def findings_of_a_precision_check():
    pool = exchange.Exchange(["a"], {}, 2, WORLD)
    pool.pool(RankFindings(), {}, [], torch.device("cpu"))


def run(work):
    """The checked calls and the error of a case."""
    seen, check = [], collectives.check

    def recorded(call, tensor, *arguments):
        seen.append([call, tensor.device.type])
        check(call, tensor, *arguments)

    collectives.check = recorded
    try:
        work()
    except Exception as error:
        if "meta tensor" not in str(error):  # those of a host read
            return {"seen": seen, "error": f"{type(error).__name__}: {error}"}
    finally:
        collectives.check = check
    return {"seen": seen, "error": None}


def of_hosts():
    """The agreement of ranks about their batches, before a pipeline's schedule."""
    with failing_together(process_group.group_of_hosts()):
        pass


def exchange_device(group, device=None):
    if dist.get_backend(group) != "nccl":
        return own_exchange_device(group, device)
    return GPU if device is None or device.type == "cpu" else device


def nothing(*arguments, **named):
    return SimpleNamespace(wait=lambda: None)


dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
WORLD = dist.group.WORLD
own_exchange_device, process_group.exchange_device = process_group.exchange_device, exchange_device
HOSTS, asked = dist.new_group([0, 1]), []
dist.new_group = lambda ranks, backend: asked.append([ranks, backend]) or HOSTS
dist.get_backend = lambda group=None: "gloo" if group is HOSTS else "nccl"
dist.get_backend_config = lambda group=None: "cpu:gloo" if group is HOSTS else "meta:nccl"
dist.all_reduce = dist.all_gather = dist.all_gather_single = dist.broadcast = nothing
exchange.gather = lambda value, group: [value, value]
found = {name: run(work) for name, work in CASES.items()}
found["hosts"] = {**run(of_hosts), "asked": asked}
found["host"] = run(lambda: collectives.all_reduce(torch.ones(2)))
torch.cuda.current_device = lambda: 3
found["device"] = str(own_exchange_device(WORLD, torch.device("cpu")))
dist.barrier = lambda async_op, device_ids: device_ids
found["barrier"] = collectives.barrier()
dist.destroy_process_group()
report(found)
