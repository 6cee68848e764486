"""Two ranks, ZeRO stages 1 to 3 beside stage 0 on the same data; see test_zero.py.

Argument: `quick` for few stages in fp16, `rest` for all stages and precisions.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from tiny_training import TinyModel, config, facts, make, rank_and_size, report, train_step
from transformers import GPT2Config, GPT2LMHeadModel

import megalowbit as mlb
from megalowbit.engine.checkpoints.store import CheckpointStore
from megalowbit.engine.overflow_retry import retry_engine_step
from megalowbit.engine.parameters.full_weights import full_state_dict
from megalowbit.errors import UserError
from megalowbit.hf.losses import chunked_cross_entropy
from megalowbit.layers.conversion.convert import cache_weights

IS_QUICK = sys.argv[1] == "quick"
STAGES = ("0", "2", "3 offload") if IS_QUICK else ("0", "1", "2", "3", "1 offload", "2 offload", "3 offload")
PRECISIONS = ("fp16",) if IS_QUICK else ("fp16", "bf16", "fp32")
VOCABULARY = 300
CHUNKED = {"chunked_cross_entropy": True, "activation_checkpointing": {"every": 2}}
chunked_cross_entropy.CHUNK_ELEMENTS = 0  # chunks of 128 rows
rank, world_size = rank_and_size()


def staged(settings, stage, **block):
    """The configuration at a stage, `"3 offload"` with everything on the CPU."""
    number, is_offloaded = int(str(stage)[0]), "offload" in str(stage)
    zero = {"stage": number, "stage3_param_persistence_threshold": 0, **settings.get("zero_optimization", {})}
    if is_offloaded:
        zero["offload_optimizer"] = {"device": "cpu"}
        if number == 3:
            zero["offload_param"] = {"device": "cpu"}
    return {
        **settings,
        "zero_optimization": zero,
        "megalowbit": {**settings["megalowbit"], **block},
    }


def whole(engine):
    """All weights as numbers that JSON keeps exactly; on rank 0."""
    return {name: value.double().flatten().tolist() for name, value in full_state_dict(engine).items()}


def masters(engine):
    """fp32 masters, whole, on every rank; collective."""
    if engine.zero_optimization_stage() == 0:
        found = [engine.optimizer.master_of(p) for p in engine.module.parameters()]
    else:
        found = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    return [each.detach().double().flatten().tolist() for each in found]


class One(torch.nn.Module):
    """Gradient 1 for each of five weights, which two ranks cannot share evenly."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(5))

    def forward(self):
        return self.weight.float().sum()


def growth(stage):
    """SGD, lr 1, gradient 1, the scale doubling every second step, two micro-batches."""
    settings = config(
        "fp16", steps=2, optimizer={"type": "SGD", "params": {"lr": 1.0}},
        scaler={"initial_scale": 256.0, "growth_interval": 2},
    )  # fmt: skip
    engine, optimizer, _, _ = make(One(), staged(settings, stage))
    seen = []
    for _ in range(5):
        for _ in range(2):
            engine.backward(engine())
            engine.step()
        seen.append([masters(engine)[0], optimizer.loss_scale, optimizer.report.loss_scale])
    return seen


def smallest(stage):
    """SGD of the smallest fp16 gradient on both ranks: half of it, as in a division before fp32, is zero."""
    settings = config(
        "fp16",
        optimizer={"type": "SGD", "params": {"lr": 2.0**24}},
        scaler={"type": "constant", "scale": 1.0},
    )
    engine, *_ = make(One(), staged(settings, stage))
    engine.backward(engine() * 2.0**-24)
    engine.step()
    return masters(engine)[0]


def exact_masters(stage):
    """Masters after the start; the ranks' models differ, and the first one's counts."""
    engine, *_ = make(TinyModel(seed=rank), staged(config("fp16"), stage))
    own = [p.detach().double().flatten().tolist() for p in TinyModel(seed=0).parameters()]
    weights = whole(engine)
    return {"masters": masters(engine), "expected": own, "weights": weights}


def spoil(value):
    """Make the gradient of the second Linear's weight what `value` says, on rank 1 only."""

    def hook_onto(engine):
        parameter = engine.module.body[3].weight
        return parameter.register_hook(lambda gradient: gradient * value if rank == 1 else gradient)

    return hook_onto


def overflow(stage, precision):
    """Eight steps, of which the third to sixth overflow on rank 1; the scale may fall to 1024 only."""
    scaler = {"initial_scale": 4096.0, "growth_interval": 100, "min_scale": 1024.0}
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 50}}
    settings = config(
        precision, steps=2, scaler=scaler if precision == "fp16" else None, scheduler=scheduler, clipping=1.0
    )
    engine, optimizer, _, _ = make(TinyModel(), staged(settings, stage))
    bad = {2: torch.inf, 3: torch.nan, 4: torch.inf, 5: torch.inf}
    seen = []
    for step in range(8):
        before = masters(engine)
        hook = spoil(bad[step])(engine) if step in bad else None
        train_step(engine, step)
        if hook is not None:
            hook.remove()
        where = optimizer.report.overflow
        seen.append(
            {
                **facts(engine),
                "has_moved": masters(engine) != before,
                "was_applied": engine.was_step_applied(),
                "report": list(optimizer.report),
                "where": None if where is None else where.tensor,
            }
        )
    return {"steps": seen, "weights": whole(engine)}


def run_of(settings, *, steps=6, make_model=TinyModel, **arguments):
    """Losses, reports, scales and weights of a few steps."""
    engine, optimizer, _, _ = make(make_model(), settings, **arguments)
    seen = {"losses": [], "reports": [], "scales": [], "values": [], "lrs": []}
    for step in range(steps):
        seen["losses"].append(train_step(engine, step))
        seen["reports"].append(list(optimizer.report))
        seen["scales"].append(optimizer.loss_scale)
        seen["lrs"].append(engine.get_lr())
        if engine.regularizer is not None:
            seen["values"].append(float(engine.regularizer.value))
    return {**seen, "weights": whole(engine)}


def low_bit_model():
    torch.manual_seed(5)
    model = TinyModel(seed=2)
    model.body[0] = torch.nn.Linear(8, 16, bias=False)
    mlb.convert(model, {"base": "nvfp4", "q_backward_outputgrad": "nvfp4e2m1bnosr", "keep": []})
    return model


def features(stage):
    """What stage 0 has too, each by its own run."""
    plain = staged(config("fp16", steps=2, clipping=0.5, scaler={"initial_scale": 256.0}), stage)
    scaler = {"initial_scale": 64.0}
    found = {
        "norms": run_of(
            staged(plain, stage, gradient_norm="sum_of_norms", log_num_zeros_in_grad=True),
            make_model=lambda: TinyModel(vocabulary=7),
        ),
        "max_value": run_of(staged(plain, stage, grad_scaler={"type": "max_value", **scaler})),
    }

    def dropout_model():
        torch.manual_seed(rank)
        return TinyModel(dropout=0.3)

    found["dropout"] = run_of(plain, make_model=dropout_model)
    model = TinyModel(seed=4)
    found["lr_scale"] = run_of(
        plain,
        make_model=lambda: model,
        model_parameters=[
            {"params": list(model.body[0].parameters()), "lr_scale": 0.5},
            {"params": list(model.body[3].parameters()), "weight_decay": 0.0},
        ],
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    )
    other = TinyModel(seed=4)
    found["own optimizer"] = run_of(
        {key: value for key, value in plain.items() if key != "optimizer"},
        make_model=lambda: other,
        optimizer=torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9),
    )
    return found


class PartlyUsed(torch.nn.Module):
    """Two weights, of which the second is used where asked for only."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(3))
        self.second = torch.nn.Parameter(torch.ones(3))

    def forward(self, uses_both):
        loss = self.first.float().sum()
        return loss + self.second.float().sum() if uses_both else loss


def unused(stage):
    """SGD, lr 1: the second weight is used in step 1, then not, then in the second micro-batch only."""
    settings = config(
        "fp16", steps=2, optimizer={"type": "SGD", "params": {"lr": 1.0}}, scaler={"initial_scale": 8.0}
    )
    engine, *_ = make(PartlyUsed(), staged(settings, stage))
    seen = []
    for uses in ((True, True), (False, False), (False, True)):
        for uses_both in uses:
            engine.backward(engine(uses_both))
            engine.step()
        seen.append(masters(engine)[1])
    return seen


def resume(stage, precision):
    """Three steps, a save, three more; then a new engine that loads and makes the same three."""
    scaler = {"initial_scale": 64.0, "growth_interval": 2} if precision == "fp16" else None
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 5}}
    settings = staged(config(precision, steps=2, scaler=scaler, scheduler=scheduler, clipping=0.7), stage)
    engine, *_ = make(TinyModel(), settings)
    folder = [tempfile.mkdtemp(dir=os.environ["RESULTS"])]
    dist.broadcast_object_list(folder, 0)
    store = CheckpointStore(folder[0])
    for step in range(3):
        train_step(engine, step)
    path = store.save(engine, 3, {})
    expected = [[train_step(engine, step), facts(engine)] for step in (3, 4, 5)]
    last = masters(engine)
    other, optimizer, _, _ = make(TinyModel(seed=9), settings)
    live = optimizer.grad_scaler
    store.load(other, path)
    found = [[train_step(other, step), facts(other)] for step in (3, 4, 5)]
    return {
        "expected": expected,
        "found": found,
        "are_masters_equal": masters(other) == last,
        "is_scaler_live": optimizer.grad_scaler is live
        and optimizer.loss_scale == (live.scale if live else 1),
    }


def retries(stage):
    """A run whose first attempts overflow at S = 2^24, and one that began at the scale where it ended."""
    ends = []
    for initial_scale in (2.0**24, None):
        scale = initial_scale or ends[0]["scale"]
        settings = config("fp16", steps=2, scaler={"initial_scale": scale, "growth_interval": 100})
        engine, optimizer, _, _ = make(TinyModel(dropout=0.2), staged(settings, stage))
        torch.manual_seed(7 + rank)
        counts = [
            retry_engine_step(
                engine, lambda step=step, engine=engine: train_step(engine, step), max_retries=30
            )
            for step in range(2)
        ]
        ends.append(
            {
                "scale": optimizer.loss_scale,
                "retries": [count for _, count in counts],
                "skipped": engine.skipped_steps,
                "steps": engine.global_steps,
                "masters": masters(engine),
            }
        )
    return ends


def refusals():
    """Messages of what a start or a load refuses."""
    found = {}

    def refused(name, action):
        try:
            action()
        except UserError as error:
            found[name] = str(error)

    plain = {key: value for key, value in staged(config("fp16"), 2).items() if key != "optimizer"}
    model = TinyModel()
    trained = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 8)).backward()
    trained.step()
    refused("state", lambda: make(model, plain, optimizer=trained))
    other = TinyModel()
    adagrad = torch.optim.Adagrad(other.parameters(), lr=0.1, initial_accumulator_value=0.0)
    refused("adagrad", lambda: make(other, plain, optimizer=adagrad))
    engine, *_ = make(TinyModel(), staged(config("fp16"), 2))
    state = engine.optimizer.state_dict()
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    refused(
        "stock", lambda: engine.optimizer.load_state_dict([{**state, "loss_scaler": LossScaler(4.0)}] * 2)
    )
    found["scale"] = engine.optimizer.loss_scale
    return found


def layers(stage):
    """Low-bit layers with the regulariser, quantised weights kept over micro-batches, and the probe."""
    regularizer = {"strength": 1e-2, "epsilon": 1e-3}
    settings = staged(
        config("fp16", steps=2, scaler={"type": "norm_ratio", "initial_scale": 64.0, "probe_every": 1}),
        stage, recipe={"base": "nvfp4", "q_backward_outputgrad": "nvfp4e2m1bnosr", "keep": []},
        regularizer=regularizer,
    )  # fmt: skip
    return run_of(settings, make_model=low_bit_model)


class Uneven(torch.nn.Module):
    """A low-bit layer of 15 weights, which two ranks cannot share evenly: the second has padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(5, 3, bias=False)])

    def forward(self, x):
        return self.blocks[0](x[:, :5].to(self.blocks[0].weight.dtype)).float().square().mean()


def uneven(stage):
    """Zeros counted and the regulariser at work where pieces are padded."""
    settings = staged(
        config("fp16", scaler={"initial_scale": 64.0}), stage,
        recipe={"base": "nvfp4", "q_backward_outputgrad": "nvfp4e2m1bnosr", "keep": []},
        regularizer={"strength": 1e-2, "epsilon": 1e-3}, log_num_zeros_in_grad=True,
    )  # fmt: skip
    return run_of(settings, steps=3, make_model=Uneven)


def checkpointing(stage, **block):
    """A GPT-2 with dropout that recomputes its blocks, low-bit weights kept over all uses in a step."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": VOCABULARY}
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False))
    if not block:
        model.gradient_checkpointing_enable()
    settings = config("fp16", steps=2, scaler={"initial_scale": 256.0})
    settings = staged(settings, stage, recipe="nvfp4", **block)
    engine, optimizer, _, _ = make(model, settings)
    cache = cache_weights(engine.module)
    torch.manual_seed(rank)
    losses, norms = [], []
    for step in range(3):
        for micro_batch in range(2):
            generator = torch.Generator().manual_seed(step * 8 + micro_batch * 2 + rank)
            tokens = torch.randint(VOCABULARY, (2, 16), generator=generator)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        cache.clear()
        norms.append(optimizer.report.grad_norm)
    return {"losses": losses, "norms": norms, "weights": whole(engine)}


result = {}
for stage in STAGES:
    cases = {
        "growth": lambda: growth(stage),  # noqa: B023
        "smallest": lambda: smallest(stage),  # noqa: B023
        "masters": lambda: exact_masters(stage),  # noqa: B023
        "overflow": lambda: {p: overflow(stage, p) for p in PRECISIONS},  # noqa: B023
        "unused": lambda: unused(stage),  # noqa: B023
        "resume": lambda: {p: resume(stage, p) for p in PRECISIONS},  # noqa: B023
        "features": lambda: features(stage),  # noqa: B023
        "layers": lambda: layers(stage),  # noqa: B023
        "uneven": lambda: uneven(stage),  # noqa: B023
        "checkpointing": lambda: checkpointing(stage),  # noqa: B023
        "chunked": lambda: checkpointing(stage, **CHUNKED),  # noqa: B023
        "retries": lambda: retries(stage),  # noqa: B023
    }
    result[stage] = {name: case() for name, case in cases.items()}
result["refusals"] = refusals()
report(result)
