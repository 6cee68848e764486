"""`trainer_optimizers`: this package's optimizer for Hugging Face's Trainer, from its `TrainingArguments`.

Trainer clips, averages and clears `.grad`, and builds the schedule. So the optimizer does not clip, and keeps
fp32 sums of gradients (`main_grad`) only where nothing has to average them: in a job of one process. What
Trainer would ignore or override without an error is rejected here.

Not covered: an fp16 model, whose loss scale Trainer would not apply (fp16=True with an fp32 model works, with
torch's scaler), and DeepSpeed, with which Trainer drops any optimizer that it is given.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from megalowbit.errors import UserError, shown
from megalowbit.optim.optimizers.base import MegatronOptimizer
from megalowbit.optim.optimizers.chained import ChainedOptimizer
from megalowbit.optim.optimizers.megatron import OptimizerConfig, get_megatron_optimizer
from megalowbit.optim.optimizers.param_groups import ParameterCondition
from megalowbit.values import require_module

logger = logging.getLogger(__name__)

# update rules by the names in `TrainingArguments.optim`
RULES = {"adamw_torch": "adam", "adamw_torch_fused": "adam", "sgd": "sgd"}
READ = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "device")


def trainer_optimizers(
    model: torch.nn.Module,
    args: Any,
    *,
    no_weight_decay_cond: ParameterCondition | None = None,
    scale_lr_cond: ParameterCondition | None = None,
    lr_mult: float = 1.0,
) -> tuple[MegatronOptimizer | ChainedOptimizer | None, None]:
    """Build the argument `optimizers=` of Trainer: fp32 masters of a bf16 model, steps that skip inf and NaN.

    ```
    mlb.convert(model.bfloat16(), recipe="nvfp4")
    trainer = Trainer(
        model=model, args=args, train_dataset=dataset,
        optimizers=mlb.trainer_optimizers(model, args), callbacks=[mlb.MegalowbitCallback()],
    )
    ```

    Learning rate, betas, epsilon and weight decay are those of `args`; Trainer clips by `max_grad_norm` and
    builds the schedule. The model is moved to `args.device`, where Trainer would move it afterwards.

    Args:
        model: a converted model of bf16 or fp32 parameters.
        args: the `TrainingArguments` that Trainer will get.
        no_weight_decay_cond: as of `get_megatron_optimizer`; by default biases and vectors have no decay.
        scale_lr_cond: as of `get_megatron_optimizer`.
        lr_mult: as of `get_megatron_optimizer`.

    Returns:
        The optimizer, and None for the schedule. With `deepspeed=`, where Trainer drops any optimizer without
        an error, `(None, None)` and one line in the log: DeepSpeed's optimizer then takes the steps.

    Raises:
        UserError: the model has no low-bit layers or its precision contradicts `args`, or `args` ask for
            something that Trainer would not do with this optimizer.
    """
    require_module(model, "trainer_optimizers")
    _check_arguments(args)
    if not any(getattr(each, "random_stream", None) is not None for each in model.modules()):
        raise UserError(
            f"{type(model).__name__} has no low-bit layers, and would train in full precision: call "
            "megalowbit.convert(model, recipe) before trainer_optimizers"
        )
    if uses_deepspeed(args):
        logger.warning(
            "Trainer with DeepSpeed takes no optimizer: DeepSpeed's takes the steps, without megalowbit's "
            "loss scaling; for that, make the engine with megalowbit.initialize"
        )
        return None, None
    dtype = _precision_of(model.parameters(), args)
    model.to(args.device)
    config = OptimizerConfig(
        lr=args.learning_rate,
        optimizer=RULES[_name_of(args.optim)],  # type: ignore[arg-type]
        weight_decay=args.weight_decay,
        bf16=dtype == torch.bfloat16,
        clip_grad=0.0,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_epsilon,
        sgd_momentum=0.0,  # as Trainer's SGD, for which `args` have no momentum
        params_have_main_grad=args.world_size == 1,
    )
    optimizer = get_megatron_optimizer(
        model,
        config,
        no_weight_decay_cond=no_weight_decay_cond,
        scale_lr_cond=scale_lr_cond,
        lr_mult=lr_mult,
    )
    return optimizer, None


def uses_deepspeed(args: Any) -> bool:
    """Whether Trainer makes an engine, by `deepspeed=` or by `accelerate launch --use_deepspeed`."""
    return bool(getattr(args, "deepspeed", None) or getattr(args, "deepspeed_plugin", None))


def _check_arguments(args: Any) -> None:
    missing = [name for name in READ if not hasattr(args, name)]
    if missing:
        raise UserError(
            f"trainer_optimizers takes the TrainingArguments second, not {shown(args)}: write "
            "trainer_optimizers(model, args)"
        )
    if getattr(args, "fsdp", None):
        raise UserError(
            f"fsdp = {shown(args.fsdp)}: Trainer with FSDP takes no optimizer; leave out fsdp, or leave out "
            "trainer_optimizers"
        )
    if args.n_gpu > 1:
        raise UserError(
            f"Trainer would wrap the model in nn.DataParallel for {args.n_gpu} GPUs, and its copies share "
            "one random stream: start one process for each GPU with torchrun"
        )
    if _name_of(args.optim) not in RULES:
        raise UserError(
            f"optim = {shown(_name_of(args.optim))} is not one of trainer_optimizers' ({', '.join(RULES)}): "
            "choose one of them, or leave out trainer_optimizers"
        )
    if getattr(args, "optim_args", None):
        raise UserError(
            f"optim_args = {shown(args.optim_args)} has no effect on trainer_optimizers: leave out one of "
            "them"
        )


def _precision_of(parameters: Iterable[torch.Tensor], args: Any) -> torch.dtype:
    """The dtype of the model: fp32, or bf16 with fp32 masters."""
    found = {each.dtype for each in parameters if each.requires_grad}
    if torch.float16 in found:
        raise UserError(
            "the model is float16, and Trainer does not multiply its loss by a loss scale: use "
            "model.bfloat16(), or model.float() with TrainingArguments(fp16=True)"
        )
    if torch.bfloat16 not in found:
        return torch.float32
    if args.fp16:
        raise UserError(
            "fp16=True would compute a bfloat16 model in float16: use bf16=True, or model.float() with "
            "fp16=True"
        )
    return torch.bfloat16


def _name_of(optim: Any) -> str:
    """`TrainingArguments.optim`, a string or a member of a string enumeration."""
    return str(getattr(optim, "value", optim))
