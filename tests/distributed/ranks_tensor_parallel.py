"""Two (or four) ranks train small models whole, then cut; see test_tensor_parallel.py.

Arguments: the tensor-parallel size, `quick` or `rest`, and names of cases if not all of that part.

All models are trained whole first: DeepSpeed keeps the groups of a tensor-parallel engine for the process.
"""

import copy
import sys

import torch
import torch.distributed as dist
from tensor_parallel_cases import CASES, CHOSEN, QUICK, STEPS, STOCHASTIC, batch, config_of, make_model
from tiny_training import make, rank_and_size, report

import megalowbit as mlb
from megalowbit.engine.parameters.full_weights import full_numel, full_state_dict
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import (
    bit_layers,
    cache_weights,
    plain_state_dict,
    restore,
    set_chooser,
    share_inputs,
)
from megalowbit.layers.matmul.context import SplitOperand
from megalowbit.layers.matmul.quantizations import Quantization
from megalowbit.layers.recipe import recipe

rank, world_size = rank_and_size()
size, part = int(sys.argv[1]), sys.argv[2]
# others are compared with "gpt2"
names = sys.argv[3:] or [name for name in CASES if (name in QUICK) == (part == "quick") or name == "gpt2"]


class RecordingChooser:
    """Gives layers recipes in turn, and answers each operand with the largest magnitude on this rank."""

    def __init__(self, base, names):
        made = [recipe({"base": base, **changes}) for changes in CHOSEN]
        self.recipes = {name: made[number % len(made)] for number, name in enumerate(names)}
        self.events, self.worst = [], 0.0

    def recipe(self, layer, base):
        return self.recipes[layer]

    def probe(self, layer, use):
        return self

    def observe_operand(self, role, operand, full_amax=None):
        self.events.append([role, operand.numel()])
        return operand.float().abs().amax()

    def observe_product(self, product, left, right, result, bias):
        """How far the result is from this rank's own product, in float64."""
        left, right = (value(factor.tensor) for factor in (left, right))
        if product == "output":
            own = left @ right.T
        else:
            own = left @ right if product == "grad_input" else left.T @ right
        own = own if bias is None else own + bias.double()
        self.events.append([product, result.numel()])
        self.worst = max(self.worst, ((result.double() - own).norm() / own.norm()).item())


def value(tensor):
    made = tensor.dequantize() if hasattr(tensor, "dequantize") else tensor.operand()
    return made.double().flatten(0, -2)


def train(case, tensor_size, *, spoiled_step=None):
    settings = config_of(case, tensor_size)
    engine, optimizer, _, _ = make(make_model(case), settings)
    seen = {"losses": [], "norms": [], "is_applied": [], "zeros": [], "counted": [], "scales": []}
    if case.get("checkpointing"):
        engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    data_rank = engine.process_grid.data_rank if tensor_size > 1 else rank // size
    if case.get("has_chooser"):
        chooser = RecordingChooser(case["recipe"], bit_layers(engine.module))
        set_chooser(engine.module, chooser)
    for step in range(STEPS):
        if step == case.get("switch_before"):
            mlb.switch_precision(engine.module)
        hook = None
        if step == spoiled_step and rank == 1:
            weight = next(p for p in engine.module.parameters() if getattr(p, "tensor_model_parallel", False))
            hook = weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        loss = engine(**batch(step, data_rank)).loss
        engine.backward(loss)
        if case.get("counts_zeros"):
            seen["counted"].append(count_zeros(engine))
        engine.step()
        if hook is not None:
            hook.remove()
        seen["losses"].append(loss.item())
        seen["norms"].append(optimizer.report.grad_norm)
        seen["is_applied"].append(optimizer.report.is_applied)
        seen["zeros"].append(optimizer.report.num_zeros)
        seen["scales"].append(optimizer.loss_scale)
        if optimizer.report.overflow is not None:
            seen["where"] = [optimizer.report.overflow.tensor, optimizer.report.overflow.rank]
    if case.get("has_chooser"):
        seen["events"], seen["worst"] = chooser.events, chooser.worst
    if "layer_scaling" in case.get("block", {}):
        seen["factors"] = optimizer.layer_scaling.factors
    seen["numel"] = sum(map(full_numel, engine.module.parameters()))
    seen["layers"] = len(bit_layers(engine.module))
    if tensor_size > 1:
        seen["do_copies_agree"] = do_copies_agree(engine)
    seen["regularizer"] = None if engine.regularizer is None else engine.regularizer.value.item()
    weights = full_state_dict(engine)
    seen["shards"] = {name: list(value.shape) for name, value in engine.module.state_dict().items()}
    if tensor_size > 1:
        asked = engine._consolidated_16bit_state_dict()
        assert (asked is None) is (rank > 0)
        seen["asked"] = asked and {name: list(value.shape) for name, value in asked.items()}
    if rank == 0:
        exported = plain_state_dict(engine.module, weights)
        seen["exported"] = {name: list(value.shape) for name, value in exported.items()}
        seen["sums"] = {name: value.double().abs().sum().item() for name, value in exported.items()}
    return engine, seen


def count_zeros(engine):
    """Exact zeros in the gradients of whole parameters: those of all shards, and of copies once."""
    zeros = torch.zeros(2, dtype=torch.int64)
    for parameter in engine.module.parameters():
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        zeros[int(is_cut)] += (parameter.grad == 0).sum()
    if engine.process_grid.tensor_size > 1:
        dist.all_reduce(zeros[1], group=engine.mpu.get_tensor_model_parallel_group())
    return zeros.sum().item()


def do_copies_agree(engine):
    """Whether what is not cut has the same bits on all tensor ranks."""
    group = engine.mpu.get_tensor_model_parallel_group()
    whole = [p for p in engine.module.parameters() if not getattr(p, "tensor_model_parallel", False)]
    return all(agree(parameter.detach().double(), group) for parameter in whole)


def variant(*, steps=3, is_cached=False, checkpointing=None, backend=None, seed=None, **changes):
    """Losses of a stochastic low-bit run on cut layers, in another way of running it."""
    case = {**STOCHASTIC, "accumulation": 2, **changes}
    net = make_model(case)
    torch.manual_seed(17 + (rank if seed is None else seed))
    engine, *_ = make(net, config_of(case, size))
    if checkpointing is not None:
        kind = {"use_reentrant": checkpointing == "reentrant"}
        engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kind)
    cache = cache_weights(engine.module) if is_cached else None
    forward = engine if backend is None else torch.compile(engine.module, backend=backend)
    losses = []
    for micro_step in range(steps * 2):
        loss = forward(**batch(micro_step, engine.process_grid.data_rank)).loss
        engine.backward(loss)
        engine.step()
        if cache is not None and micro_step % 2:
            cache.clear()
        losses.append(loss.item())
    found = {"losses": losses, "do_copies_agree": do_copies_agree(engine)}
    engine.destroy()
    return found


def kept_codes():
    """Losses at stage 3 without and with codes kept over micro-batches; ranks use memory unlike."""
    case = {**CASES["llama"], "recipe": "nvfp4", "stage": 3, "accumulation": 3}
    found = []
    for is_cached in (False, True):
        engine, *_ = make(make_model(case), config_of(case, size))
        cache = cache_weights(engine.module) if is_cached else None
        losses, taken, kept = [], [], 0
        for micro_step in range(6):
            if rank % 2:
                taken.append(torch.empty(1000 + 977 * micro_step))
            loss = engine(**batch(micro_step, engine.process_grid.data_rank)).loss
            engine.backward(loss)
            kept = max(kept, 0 if cache is None else len(cache))
            engine.step()
            if cache is not None and micro_step % 3 == 2:
                cache.clear()
            losses.append(loss.item())
        found.append({"losses": losses, "kept": kept})
        engine.destroy()
    return found


def numbers_drawn():
    """What one tensor is rounded to as each operand of a column- and a row-parallel layer."""
    engine, *_ = make(make_model(CASES["llama"]), config_of({**CASES["llama"], "recipe": "nvfp4"}, size))
    layers = bit_layers(engine.module)
    x = torch.linspace(-6.0, 6.0, 512).view(16, 32)
    found = {}
    for name in ("q_proj", "o_proj"):
        layer = layers[f"model.layers.0.self_attn.{name}"]
        context = layer.context(layer.begin_use(), compute_dtype=torch.float32, needs_grad=True)
        for role in ("input", "weight", "grad_output"):
            made = context.quantize(SplitOperand(x), Quantization(role, "nvfp4e2m1b", ""), is_reported=False)
            found[f"{name} {role}"] = made.tensor.dequantize().flatten().tolist()
    engine.destroy()
    return found


def gradients_of_siblings():
    """Input gradients that are summed over ranks in a backward, without and with shared inputs; gradients."""
    found = []
    for is_shared in (False, True):
        engine, *_ = make(make_model(CASES["llama"]), config_of(CASES["llama"], size))
        share_inputs(engine.module, is_on=is_shared)
        loss = engine(**batch(0, engine.process_grid.data_rank)).loss
        summed, all_reduce = [], dist.all_reduce

        def counting(tensor, *args, **kwargs):
            summed.append(tensor.ndim)  # noqa: B023
            return all_reduce(tensor, *args, **kwargs)  # noqa: B023

        dist.all_reduce = counting
        try:
            engine.backward(loss)
        finally:
            dist.all_reduce = all_reduce
        gradients = {name: p.grad.double().norm().item() for name, p in engine.module.named_parameters()}
        found.append({"summed": summed.count(3), "gradients": gradients})
        engine.destroy()
    return found


def variants():
    if part == "quick":
        return {
            "plain": variant(),
            "cached, reentrant": variant(is_cached=True, checkpointing="reentrant"),
        }
    return {
        "plain": variant(),
        "cached": variant(is_cached=True),
        "non-reentrant": variant(checkpointing="non-reentrant"),
        "reentrant": variant(checkpointing="reentrant"),
        "compiled": variant(backend="aot_eager"),
        "dropout": variant(dropout=0.2, steps=20, seed=0),
        "dropout, other seeds": variant(dropout=0.2, steps=20),
    }


def clients_optimizer():
    """The refusal of weights that cutting has replaced, and losses with what a callable makes of the new."""
    case = CASES["gpt2"]
    found = {}
    settings = config_of(case, size)
    net = make_model(case)
    try:
        make(net, settings, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    except UserError as error:
        found["refusal"] = str(error)
    engine, *_ = make(make_model(case), settings, optimizer=make_sgd)
    found["losses"] = sgd_losses(engine)
    engine.destroy()
    return found


def make_sgd(groups):
    return torch.optim.SGD(groups, lr=0.1)


def sgd_losses(engine):
    losses = []
    for step in range(3):
        loss = engine(**batch(step, 0)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def agree(values, group):
    smallest, largest = values.clone(), values.clone()
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return torch.equal(smallest, largest)


def copies_and_restored(engine):
    """A deep copy computes the same; so does the model with plain layers put back, but for the quantising."""
    engine.module.eval()
    inputs = batch(0, 0)
    with torch.no_grad():
        before = engine.module(**inputs).loss.item()
        copied = copy.deepcopy(engine.module)(**inputs).loss.item()
        try:
            plain_state_dict(engine.module)
            refusal = None
        except UserError as error:
            refusal = str(error)
        restore(engine.module)
        restored = engine.module(**inputs).loss.item()
    kinds = {type(module).__name__ for module in engine.module.modules()}
    return {
        "before": before,
        "copied": copied,
        "restored": restored,
        "refusal": refusal,
        "kinds": sorted(kinds),
    }


def refusals():
    found = {}
    for name, changes, model_changes in (
        ("splits", {"recipe": "metis-nvfp4"}, {}),
        ("blocks", {"recipe": "mxfp4"}, {"num_key_value_heads": 2}),
        ("heads", {}, {"num_key_value_heads": 1}),
        ("mean", {"recipe": {"base": "nvfp4", "q_forward_weight": "1p58bit"}}, {}),
    ):
        case = {**CASES["llama"], **changes, "model": {**CASES["llama"].get("model", {}), **model_changes}}
        try:
            make(make_model(case), config_of(case, size))
            found[name] = None
        except UserError as error:
            found[name] = str(error)
    try:
        make(torch.nn.Sequential(torch.nn.Linear(16, 16)), config_of(CASES["llama"], size))
    except UserError as error:
        found["family"] = str(error)
    engine, *_ = make(make_model(CASES["llama"]), config_of(CASES["llama"], size))
    try:
        engine(**{**batch(0, 0), "labels": batch(rank, 0)["labels"]})
    except UserError as error:
        found["data"] = str(error)
    engine(**batch(0, 0))
    engine(**batch(rank, 0))  # checked once only: a message per step would cost time
    engine.destroy()
    return found


result = {"whole": {}, "cut": {}}
for name in names:
    engine, result["whole"][name] = train(CASES[name], 1)
    engine.destroy()
if size == world_size and part == "quick":
    engine, *_ = make(make_model(CASES["gpt2"]), config_of(CASES["gpt2"], 1), optimizer=make_sgd)
    result["client, whole"] = sgd_losses(engine)
    engine.destroy()
for name in names:
    engine, result["cut"][name] = train(CASES[name], size)
    if name == "gpt2 tied":
        result["copies"] = copies_and_restored(engine)
    engine.destroy()
if size == world_size:
    for stage in (0, 3) if part == "quick" else (1, 2):
        engine, result[f"spoiled {stage}"] = train({**CASES["llama"], "stage": stage}, size, spoiled_step=1)
        engine.destroy()
    result["variants"] = variants()
if size == world_size and part == "quick":
    result["refusals"] = refusals()
    result["client"] = clients_optimizer()
    result["drawn"] = numbers_drawn()
    result["siblings"] = gradients_of_siblings()
if size < world_size and part == "quick":
    result["kept codes"] = kept_codes()
report(result)
