"""Four ranks, 2 × 2: grids beside DeepSpeed's own, and a Megatron-style model; see test_grid.py."""

import os
import types
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_training import BATCH, HIDDEN, WIDTH, TinyModel, config, data, rank_and_size, report

from megalowbit.checkpoints.contents import CheckpointContents
from megalowbit.distributed.mpu import adapt_mpu, find_grid
from megalowbit.distributed.process_grid import ProcessGrid
from megalowbit.engine.checkpoints.store import CheckpointStore
from megalowbit.engine.initialize import initialize
from megalowbit.engine.process_start import start_process_group
from megalowbit.errors import UserError
from megalowbit.layers.tensor_parallel.linear import Sharding

RANK, WORLD = rank_and_size()
STEPS = 4


def groups_of(lists):
    """This rank's group of those listed; every rank makes all of them."""
    made = [(ranks, dist.new_group(ranks)) for ranks in lists]
    return next(group for ranks, group in made if RANK in ranks)


def megatron(data_lists=((0, 2), (1, 3)), tensor_lists=((0, 1), (2, 3)), **changes):
    """A module with Megatron-Core's functions for tensor 2 × data 2."""
    of_data, of_tensor = groups_of(data_lists), groups_of(tensor_lists)
    alone = groups_of([(rank,) for rank in range(WORLD)])
    state = types.ModuleType("parallel_state")
    functions = {
        "get_tensor_model_parallel_group": lambda check_initialized=True: of_tensor,
        "get_tensor_model_parallel_rank": lambda: dist.get_rank(of_tensor),
        "get_tensor_model_parallel_world_size": lambda: dist.get_world_size(of_tensor),
        "get_tensor_model_parallel_src_rank": lambda: members(of_tensor)[0],
        "get_pipeline_model_parallel_group": lambda check_initialized=True: alone,
        "get_pipeline_model_parallel_rank": lambda: 0,
        "get_pipeline_model_parallel_world_size": lambda: 1,
        "get_data_parallel_group": lambda with_context_parallel=False, partial_data_parallel=False: of_data,
        "get_data_parallel_rank": lambda with_context_parallel=False: dist.get_rank(of_data),
        "get_data_parallel_world_size": lambda with_context_parallel=False: dist.get_world_size(of_data),
        "get_model_parallel_group": lambda check_initialized=True: of_tensor,
        "get_context_parallel_world_size": lambda: 1,
        "get_expert_model_parallel_world_size": lambda: 1,
        **changes,
    }
    for name, function in functions.items():
        if function is not None:
            setattr(state, name, function)
    return state


members = dist.get_process_group_ranks


def numbers(mpu):
    return {
        "data": [mpu.get_data_parallel_rank(), mpu.get_data_parallel_group_ranks()],
        "model": [
            mpu.get_model_parallel_rank(),
            members(mpu.get_model_parallel_group()),
        ],
        "tensor": [mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_src_rank()],
        "stages": [mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()],
    }


def of_grid(grid):
    model = list(grid.model_parallel_ranks)
    return {
        "data": [grid.data_rank, list(grid.data_ranks)],
        "model": [model.index(RANK), model],
        "tensor": [grid.tensor_rank, grid.tensor_ranks[0]],
        "stages": [grid.stage, grid.pipeline_size],
    }


def autotp():
    """DeepSpeed's own groups of a tensor-parallel run, and our arithmetic."""
    from deepspeed.utils import groups

    groups._init_tp_mesh_device(tensor_model_parallel_size=2)
    grid = ProcessGrid.from_config({"tensor_parallel": {"autotp_size": 2}}, RANK, WORLD)
    theirs = {
        "data": [groups.get_data_parallel_rank(), members(groups.get_data_parallel_group())],
        "model": [
            groups.get_model_parallel_rank(), members(groups.get_model_parallel_group())
        ],
        "tensor": [groups.get_tensor_model_parallel_rank(), groups.get_tensor_model_parallel_src_rank()],
        "stages": [0, 1],
    }  # fmt: skip
    return [theirs, of_grid(grid)]


def pipeline():
    """DeepSpeed's own grid of a pipeline, as an mpu too, and our arithmetic."""
    from deepspeed.pipe import PipelineModule

    module = PipelineModule([torch.nn.Linear(2, 2) for _ in range(4)], num_stages=2)
    grid = find_grid({}, stages=module.num_stages)
    return [numbers(adapt_mpu(module.mpu())), of_grid(grid)]


class CopyToRanks(torch.autograd.Function):
    """Identity whose gradient is summed over the tensor-parallel ranks: before a column-parallel layer."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumOverRanks(torch.autograd.Function):
    """Sum over the tensor-parallel ranks: after a row-parallel layer."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class MegatronModel(torch.nn.Module):
    """`TinyModel` with a replicated first layer, cut over the tensor-parallel ranks as Megatron would."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        whole = whole_model()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        share = slice(rank * WIDTH // size, (rank + 1) * WIDTH // size)
        self.first = whole[0]
        self.column = torch.nn.Parameter(whole[1].weight.detach()[share].clone())
        self.row = torch.nn.Parameter(whole[3].weight.detach()[:, share].clone())
        self.bias = torch.nn.Parameter(whole[3].bias.detach().clone())
        self.column.tensor_model_parallel = self.row.tensor_model_parallel = True

    def forward(self, x):
        h = CopyToRanks.apply(self.first(x.to(self.column.dtype)), self.group)
        h = torch.tanh(h @ self.column.T) @ self.row.T
        y = SumOverRanks.apply(h, self.group) + self.bias
        return (y.float() - x.sum(1, keepdim=True)).square().mean()


def whole_model():
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.Linear(HIDDEN, WIDTH, bias=False),
        torch.nn.Tanh(),
        torch.nn.Linear(WIDTH, 1),
    )


def train(precision, *, spoilt=None, stage=0):
    state = megatron()
    scaler = {"initial_scale": 1024.0, "hysteresis": 1} if precision == "fp16" else None
    settings = config(precision, steps=2, clipping=0.5, scaler=scaler)
    if stage:
        settings["zero_optimization"] = {"stage": stage}
    group = state.get_tensor_model_parallel_group()
    engine, optimizer, *_ = initialize(model=MegatronModel(group), config=settings, mpu=state)
    grid, steps = engine.process_grid, []
    for step in range(STEPS):
        losses = []
        for micro_batch in range(2):
            loss = engine(data(step, micro_batch, grid.data_rank, grid.data_size))
            if step == spoilt and RANK == 3 and micro_batch == 1:
                engine.module.column.main_grad[0, 0] = torch.inf
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        steps.append(
            {
                "losses": losses, "norm": engine.get_global_grad_norm(), "scale": optimizer.loss_scale,
                "skipped": engine.skipped_steps,
                "replicated": engine.module.first.weight.double().sum().item(),
            }
        )  # fmt: skip
    return steps


def checkpoints():
    """What becomes of shards that only their mark tells from copies, and of those with a `.sharding`."""
    seen, state = {}, megatron()
    for name in ("marked", "cut"):
        engine = shards(state, is_cut=name == "cut")
        engine.backward(engine(data(0, 0, engine.process_grid.data_rank, 2)))
        engine.step()
        store = CheckpointStore(Path(os.environ["RESULTS"]) / name)
        path = store.save(engine, 1, {})
        parameters = dict(engine.module.named_parameters())
        saved = {key: parameter.tolist() for key, parameter in parameters.items()}
        whole = {key: attempt(CheckpointContents(path).weight, key) for key in ("column", "row", "bias")}
        seen[name] = {"shapes": {k: v if isinstance(v, str) else list(v.shape) for k, v in whole.items()}}
        for stage in (0, 1):
            again = shards(state, is_cut=name == "cut", stage=stage, shift=1.0)
            line = attempt(store.load, again, path)
            found = {key: parameter.tolist() for key, parameter in again.module.named_parameters()}
            seen[name][str(stage)] = [line, found == saved]
    return seen


def shards(state, *, is_cut, stage=0, shift=0.0):
    model = MegatronModel(state.get_tensor_model_parallel_group())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += shift
    if is_cut:
        model.column.sharding, model.row.sharding = Sharding(0, (WIDTH,)), Sharding(1, (WIDTH,))
    settings = {**config("fp32"), "zero_optimization": {"stage": stage}}
    return initialize(model=model, config=settings, mpu=state)[0]


def attempt(work, *its_arguments):
    try:
        return work(*its_arguments)
    except UserError as error:
        return str(error)


def refusals():
    """What is said of groups that do not fit; the same on every rank."""
    wrong = {
        "no_data": megatron(get_data_parallel_group=None),
        "not_made": megatron(get_data_parallel_group=unmade),
        "no_group": megatron(get_model_parallel_group=lambda: 7),
        "not_mine": megatron(get_data_parallel_group=lambda: dist.GroupMember.NON_GROUP_MEMBER),
        "does_not_multiply": megatron(data_lists=[(0,), (1,), (2,), (3,)]),
        "strided": megatron(data_lists=((0, 1), (2, 3)), tensor_lists=((0, 2), (1, 3))),
        "overlap": megatron(data_lists=((0, 1), (2, 3))),
        "wrong_rank": megatron(get_data_parallel_rank=lambda: 5),
        "context": megatron(get_context_parallel_world_size=lambda: 2),
        "sequence": types.SimpleNamespace(initialize_sequence_parallel=None),
    }
    seen = {}
    for name, mpu in wrong.items():
        try:
            initialize(model=TinyModel(), config=config("fp32"), mpu=mpu)
        except UserError as error:
            seen[name] = str(error)
    try:
        settings = {**config("fp32"), "tensor_parallel": {"autotp_size": 2}}
        initialize(model=TinyModel(), config=settings, mpu=megatron())
    except UserError as error:
        seen["twice"] = str(error)
    return seen


def unmade(*_, **__):
    raise AssertionError("data parallel group is not initialized")


start_process_group()
assert BATCH == 4
adapted = adapt_mpu(megatron())
report(
    {
        "autotp": autotp(),
        "pipeline": pipeline(),
        "megatron": [numbers(adapted), of_grid(find_grid({}, mpu=adapted))],
        "fp32": train("fp32"),
        "zero1": train("fp32", stage=1),
        "overflow": train("fp16", spoilt=1),
        "checkpoints": checkpoints(),
        "refusals": refusals(),
    }
)
