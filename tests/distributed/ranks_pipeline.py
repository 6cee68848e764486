"""Two stages on two ranks, or two stages × two data-parallel ranks: see test_pipeline.py."""

import sys

import flash_kernel
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from tiny_models import FURTHER_KINDS, tiny_model
from tiny_training import report
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import megalowbit as mlb
from megalowbit.engine.checkpoints.store import CheckpointStore
from megalowbit.engine.pipeline import batch_reader
from megalowbit.engine.pipeline.setup import gather_weights
from megalowbit.layers.conversion.convert import random_stream

VOCABULARY, TOKENS, BATCH, MICRO_BATCHES = 40, 12, 2, 3
STOCHASTIC = {"base": "nvfp4", "q_forward_input": "nvfp4e2m1b"}  # forward draws random numbers too


def hf_model(kind, *, dropout=0.0, layers=3, seed=0):
    """A tiny model in fp32; GPT-2 with tied embeddings, LLaMA without."""
    torch.manual_seed(seed)
    if kind in FURTHER_KINDS:
        model = tiny_model(kind, seed=seed, vocab_size=VOCABULARY, positions=16, num_layers=layers)
    elif kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=layers, n_head=2,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
    else:
        config = LlamaConfig(
            vocab_size=VOCABULARY, max_position_embeddings=16, hidden_size=32, intermediate_size=48,
            num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    model.config.use_cache = False
    model.loss_type = "ForCausalLM"
    return model.train()


def batch(step, micro_batch, data_rank=0, *, is_padded=False):
    """Tokens that depend on nothing but their place in the run."""
    generator = torch.Generator().manual_seed((step * 16 + micro_batch) * 8 + data_rank)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)
    labels = tokens.clone()
    if not is_padded:
        return {"input_ids": tokens, "labels": labels}
    mask = torch.ones_like(tokens)
    mask[0, : 2 + micro_batch] = 0
    labels[mask == 0] = -100
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def settings(precision="fp32", *, recipe=None, scaler=None, micro_batches=MICRO_BATCHES, **more):
    block = {"precision": precision}
    if recipe is not None:
        block["recipe"] = recipe
    if scaler is not None:
        block["grad_scaler"] = scaler
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "megalowbit": block,
        **more,
    }


def train(engine, step, *, is_padded=False):
    """One optimizer step; what came of it."""
    data_rank = engine.process_grid.data_rank
    batches = [
        batch(step, each, data_rank, is_padded=is_padded)
        for each in range(engine.gradient_accumulation_steps())
    ]
    loss = engine.train_batch(iter(batches))
    return {
        "loss": loss.item(),
        "norm": engine.get_global_grad_norm(),
        "scale": engine.optimizer.loss_scale,
        "skipped": engine.skipped_steps,
        "lr": engine.get_lr()[0],
    }


def start(kind="gpt2", config=None, *, seed=0, dropout=0.0, layers=3, num_stages=2, **arguments):
    model = hf_model(kind, dropout=dropout, layers=layers, seed=seed)
    module = mlb.pipeline_module(model, num_stages=num_stages, **arguments)
    engine, *_ = mlb.initialize(model=module, config=config or settings(), seed=7)
    return engine


def weights(engine):
    return {name: p.detach().double().flatten().tolist() for name, p in engine.module.named_parameters()}


def trajectory(
    kind,
    precision,
    *,
    is_padded=False,
    recipe=None,
    steps=3,
    micro_batches=MICRO_BATCHES,
    zero=None,
    block=None,
    **arguments,
):
    scaler = {"initial_scale": 1024.0} if precision == "fp16" else None
    more = {} if zero is None else {"zero_optimization": zero}
    config = settings(precision, recipe=recipe, scaler=scaler, micro_batches=micro_batches, **more)
    config["megalowbit"].update(block or {})
    engine = start(kind, config, **arguments)
    torch.manual_seed(11 + engine.stage_id)
    seen = [
        {**train(engine, step, is_padded=is_padded), "zeros": engine.optimizer.report[2]}
        for step in range(steps)
    ]
    dtypes = {name: str(p.dtype) for name, p in engine.module.named_parameters()}
    names = engine.module.parameter_names()
    return {"steps": seen, "weights": weights(engine), "names": names, "dtypes": dtypes}


def overflow(precision, stage=0):
    """Six steps; in the third a gradient of the first stage is inf, in the fourth one of the last is NaN.

    In the fifth it is activations' gradients in the last stage, from where it spreads to the first.
    """
    scaler = {"initial_scale": 4096.0, "growth_interval": 100} if precision == "fp16" else None
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 50}}
    zero = {"zero_optimization": {"stage": stage}}
    engine = start("gpt2", settings(precision, scaler=scaler, scheduler=scheduler, **zero))
    bad = {2: (0, torch.inf), 3: (1, torch.nan), 4: (1, None)}
    seen = []
    for step in range(7):
        spoiled, value = bad.get(step, (None, None))
        handle = None
        if spoiled == engine.stage_id and engine.process_grid.data_rank == 0:
            if value is None:
                norm = engine.module.get_submodule("transformer.ln_f")
                handle = norm.register_forward_pre_hook(
                    lambda _, inputs: inputs[0].register_hook(lambda g: g * torch.inf) and None
                )
            else:
                first = next(engine.module.parameters())
                handle = first.register_hook(lambda gradient, value=value: gradient * value)
        before = weights(engine)
        facts = train(engine, step)
        if handle is not None:
            handle.remove()
        report = engine.optimizer.report
        seen.append(
            {
                **facts,
                "has_moved": weights(engine) != before,
                "was_applied": engine.was_step_applied(),
                "where": None if report.overflow is None else [report.overflow.tensor, report.overflow.rank],
                "ranks": None if report.overflow is None else report.overflow.ranks,
                "line": str(report),
            }
        )
    return {"steps": seen, "weights": weights(engine)}


def evaluation():
    """A run with dropout and stochastic rounding, with and without an evaluation in its middle."""
    runs = []
    for is_evaluated in (False, True):
        engine = start("gpt2", settings("bf16", recipe="nvfp4"), dropout=0.1)
        torch.manual_seed(3 + engine.stage_id)
        losses = [train(engine, 0)["loss"]]
        if is_evaluated:
            held_out = [batch(100, each) for each in range(MICRO_BATCHES)]
            evaluated = [engine.eval_batch(iter(held_out)).item() for _ in range(2)]
        losses += [train(engine, step)["loss"] for step in (1, 2)]
        runs.append({"losses": losses, "weights": weights(engine)})
    return {"without": runs[0], "with": runs[1], "evaluated": evaluated}


def resume(folder, stage=0):
    """Three steps, a checkpoint, two more; and the same two in a new engine."""
    scaler = {"initial_scale": 256.0, "growth_interval": 2}
    config = settings("fp16", recipe="nvfp4", scaler=scaler, zero_optimization={"stage": stage})
    store = CheckpointStore(folder)
    engine = start("gpt2", config, dropout=0.1)
    torch.manual_seed(5 + engine.stage_id)
    stream = random_stream(engine.module)
    for step in range(3):
        train(engine, step)
    store.save(engine, 3, {"stream": stream.state_dict()})
    stopped = [train(engine, step) for step in (3, 4)]
    other = start("gpt2", config, dropout=0.1, seed=9)
    state = store.load(other, store.path_of(3))
    random_stream(other.module).load_state_dict(state["stream"])
    resumed = [train(other, step) for step in (3, 4)]
    files = sorted(path.name for path in store.path_of(3).iterdir())
    return {
        "stopped": stopped,
        "resumed": resumed,
        "is_alike": weights(engine) == weights(other),
        "files": files,
    }


def message(call):
    """Of the refusal; None where there is none."""
    try:
        call()
    except mlb.UserError as error:
        return str(error)
    return None


def start_frozen(kind, frozen_stage):
    """With nothing to train in one stage."""
    module = mlb.pipeline_module(hf_model(kind), num_stages=2)
    if module.stage_id == frozen_stage:
        module.requires_grad_(False)
    mlb.initialize(model=module, config=settings())


def start_with_whole_optimizer():
    """An optimizer over all stages."""
    model = hf_model("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    module = mlb.pipeline_module(model, num_stages=2)
    mlb.initialize(model=module, config=settings(), optimizer=optimizer)


def by_callable():
    """Losses with an optimizer that a callable makes of each stage's own parameters."""
    module = mlb.pipeline_module(hf_model("gpt2"), num_stages=2)
    config = settings()
    del config["optimizer"]
    engine, *_ = mlb.initialize(
        model=module, config=config, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1)
    )
    return [train(engine, step)["loss"] for step in range(3)]


def refusals():
    """Messages of what cannot be combined."""

    def beside(**more):
        block = more.pop("block", {})
        config = settings(**more)
        config["megalowbit"].update(block)
        return message(lambda: start("gpt2", config))

    split = {"base": "nvfp4", "split_input": {"rank": 2}}
    return {
        "whole": message(
            lambda: mlb.initialize(model=hf_model("gpt2"), config=settings(pipeline={"stages": 2}))
        ),
        "stages": message(lambda: mlb.pipeline_module(hf_model("gpt2"), num_stages=3)),
        "partition": message(lambda: mlb.pipeline_module(hf_model("gpt2"), num_stages=2, partition="type:x")),
        "zero": beside(zero_optimization={"stage": 2}),
        "norm": beside(block={"gradient_norm": "sum_of_norms"}),
        "layers": beside(block={"layer_scaling": {"enabled": True}}),
        "replay": beside(recipe=split, pipeline={"stages": 2, "activation_checkpoint_interval": 1}),
        "one stage": beside(pipeline={"stages": 1}),
        "other partition": beside(pipeline={"partition": "uniform"}),
        "other interval": message(
            lambda: start(
                "gpt2",
                settings(pipeline={"activation_checkpoint_interval": 1}),
                activation_checkpoint_interval=2,
            )
        ),
        "same block": beside(pipeline={"stages": 2, "partition": "best"}),
        "frozen": message(lambda: start_frozen("gpt2", 0)),
        "others": message(lambda: start_with_whole_optimizer()),
        "foreign": message(
            lambda: mlb.initialize(
                model=PipelineModule([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], num_stages=2),
                config=settings(),
            )
        ),
    }


def packed_batch(micro_batch):
    """Two documents in a row, told apart by their positions alone."""
    positions = torch.cat([torch.arange(5), torch.arange(TOKENS - 5)]).expand(BATCH, -1)
    return {**batch(0, micro_batch), "position_ids": positions}


def packed(kind, attention="sdpa"):
    engine = start(kind)
    engine.module.config._attn_implementation = attention
    loss = engine.train_batch(packed_batch(each) for each in range(MICRO_BATCHES)).item()
    return [loss, engine.get_global_grad_norm()]


def packed_by_flash_attention(kind):
    """The same with documents found in the positions, and the documents of each call of the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        kernel = flash_kernel.install(patch)
        return [*packed(kind, flash_kernel.NAME), kernel.calls]


def reading():
    """Messages of steps whose data are wrong on one rank or on both; then a step with the right ones."""
    engine = start("gpt2")
    # as under NCCL, whose groups take no tensors of the host
    batch_reader.group_of_hosts, hosts = (lambda: dist.new_group(backend="gloo")), batch_reader.group_of_hosts
    fixed = start("gpt2", dynamic_shape=False)
    batch_reader.group_of_hosts = hosts
    is_first = engine.stage_id == 0
    right = [batch(0, each) for each in range(MICRO_BATCHES)]
    short = [{name: value[:, 1:] for name, value in each.items()} for each in right]
    beyond = {**right[1], "input_ids": right[1]["input_ids"] + VOCABULARY}

    def refused(batches, engine=engine):
        return message(lambda: engine.train_batch(batches))

    def broken():
        yield right[0]
        if is_first:
            raise OSError("no such shard")
        yield from right[1:]

    found = {
        "ended": refused(iter(right[:2])),
        "ended in the last": refused(iter(right if is_first else right[:1])),
        "ended in evaluation": message(lambda: engine.eval_batch(iter(right), num_micro_batches=4)),
        "labels": refused({"input_ids": each["input_ids"]} for each in right),
        "token": refused(iter([right[0], beyond, right[2]])),
        "long": refused({name: value.repeat(1, 2) for name, value in each.items()} for each in right),
        "list": refused(right),
        "nothing": message(lambda: start("gpt2").train_batch()),
        "shapes": refused(iter([*right[:2], short[2]]), fixed),
        "forward": message(lambda: engine(**right[0])),
        "backward": message(lambda: engine.backward(torch.ones(()))),
        "step": message(lambda: engine.step()),
    }
    try:
        engine.train_batch(broken())
    except Exception as error:
        found["broken"] = f"{type(error).__name__}: {error}"
    found["losses"] = [each.train_batch(iter(right)).item() for each in (engine, fixed)]
    found["shapes later"] = refused(iter(short), fixed)
    fixed.reset_activation_shape()
    found["shapes after a reset"] = refused(iter(short), fixed)
    return found


def plain_after_stages():
    """Losses of a plain engine after those with stages; alone it has the same."""
    engine, *_ = mlb.initialize(model=hf_model("gpt2"), config=settings(micro_batches=1))
    loss = engine(**batch(0, 0)).loss
    engine.backward(loss)
    engine.step()
    return [loss.item(), engine.get_global_grad_norm()]


def whole_weights():
    """The weights of a low-bit pipeline, gathered on rank 0, against those the model was made with."""
    module = start("gpt2", settings("fp32", recipe="nvfp4")).module
    gathered = gather_weights(module)
    expected = hf_model("gpt2").state_dict()
    if gathered is None:
        return None
    return gathered.keys() == expected.keys() and all(gathered[n].equal(v) for n, v in expected.items())


def four(folder):
    """Stages beside data-parallel ranks, ZeRO 1 among these, and stages that are neither first nor last."""
    one = {"stage": 1}
    return {
        "zero_fp32": trajectory("gpt2", "fp32", zero=one),
        "overflow": {"1": overflow("fp16", 1)},
        "resume": resume(folder, 1),
        "four_stages": trajectory("gpt2", "fp32", num_stages=4, is_padded=True),
        "whole": whole_weights(),
        "empty": message(lambda: mlb.pipeline_module(hf_model("gpt2", layers=1), num_stages=4)),
    }


def rest_of_four(_):
    """What `four` leaves out."""
    one = {"stage": 1}
    return {
        "zero_fp16": trajectory("gpt2", "fp16", zero=one),
        "zero_bf16": trajectory("gpt2", "bf16", zero=one),
        "zero_llama": trajectory("llama", "fp32", is_padded=True, recipe=STOCHASTIC, zero=one),
        "llama": trajectory("llama", "fp32", is_padded=True, recipe=STOCHASTIC),
        "zero_offloaded": trajectory(
            "gpt2", "bf16", zero={"stage": 1, "offload_optimizer": {"device": "cpu"}}
        ),
        "overflow": {"0": overflow("fp16", 0)},
        "two_by_two": trajectory("gpt2", "fp32", num_stages=2),
    }


def two(folder):
    """What two ranks can show."""
    return {
        "gpt2": trajectory("gpt2", "fp32"),
        "llama": trajectory("llama", "fp32", is_padded=True),
        "fp16": trajectory("gpt2", "fp16"),
        "lowbit": trajectory("gpt2", "fp32", recipe=STOCHASTIC),
        "recomputed": trajectory("gpt2", "fp32", recipe=STOCHASTIC, activation_checkpoint_interval=1),
        "zeros": trajectory("gpt2", "fp32", block={"log_num_zeros_in_grad": True}),
        "fp32_norms": trajectory("gpt2", "bf16", block={"fp32_norms": True}),
        "callable": by_callable(),
        "whole": whole_weights(),
        "overflow": {"fp16": overflow("fp16")},
        "evaluation": evaluation(),
        "resume": resume(folder),
        "refusals": refusals(),
        "packed": {kind: packed(kind) for kind in ("gpt2", "llama")},
        "packed by flash attention": packed_by_flash_attention("llama"),
        "reading": reading(),
        "plain_after_stages": plain_after_stages(),
    }


def rest_of_two(_):
    """What `two` leaves out."""
    return {
        **{kind: trajectory(kind, "fp32", is_padded=True) for kind in FURTHER_KINDS},
        "bf16": trajectory("llama", "bf16"),
        "dropout": trajectory("gpt2", "fp32", dropout=0.2),
        "dropout_recomputed": trajectory("gpt2", "fp32", dropout=0.2, activation_checkpoint_interval=2),
        "autocast": trajectory("gpt2", "bf16", block={"autocast": {"enabled": True}}),
        "autocast_off": trajectory("gpt2", "bf16"),
        "one_micro_batch": trajectory("gpt2", "fp32", micro_batches=1),
        "overflow": {"bf16": overflow("bf16")},
        "packed": {kind: packed(kind) for kind in FURTHER_KINDS},
    }


PARTS = {"two": two, "rest of two": rest_of_two, "four": four, "rest of four": rest_of_four}

if __name__ == "__main__":
    torch.set_num_threads(1)
    report(PARTS[sys.argv[1]](sys.argv[2]))
