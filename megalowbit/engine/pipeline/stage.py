"""One stage of a Hugging Face model as DeepSpeed's `PipelineModule`.

A stage holds its part of the model's modules under their names in the model, so reports, telemetry, random
numbers and checkpoints use the same layer names as in one process. Recomputed blocks use the random numbers
of their micro-batch, even if later micro-batches have started. They do not use DeepSpeed's reentrant
checkpointing, which needs floating-point inputs. A tied embedding has two copies, in the first and in the
last stage. They start equal, and `engine.pipeline` keeps them equal.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalowbit.distributed import collectives, process_group
from megalowbit.distributed.mpu import GroupsOfRank
from megalowbit.engine.pipeline.micro_batches import Inputs
from megalowbit.engine.pipeline.parts import (
    Block,
    BlockInputs,
    BlockOptions,
    Part,
    causal_loss,
    is_tied,
    parts_of,
    place,
    run_blocks,
    run_parts,
    tied_names,
)
from megalowbit.engine.pipeline.stage_bounds import empty_stage
from megalowbit.errors import UserError
from megalowbit.hf.generation import store_generation, stored_generation
from megalowbit.layers.conversion.convert import random_stream
from megalowbit.layers.conversion.stream_hook import AdvanceStream

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TIED = "embedding"  # the one key of `tied_comms`


class PipelinedModel(PipelineModule):
    """This process's stage of a model. The model must be complete, on the CPU and the same on all ranks.

    Its parameters may be on the meta device; then `initialize` gives the stage its weights.

    For the arguments, see `pipeline_module`.

    Attributes:
        config: of the model.
        partition: how parts are distributed over stages.
        num_parameters_of_all_stages: of the model; a tied weight counts once.
        full_model: the given model, until `release`. Conversion replaces layers in it.

    Raises:
        UserError: a stage would be empty, `partition` is unknown, or the model's family is unknown.
    """

    config: PretrainedConfig
    partition: str
    full_model: PreTrainedModel | None

    def __init__(
        self, model: PreTrainedModel, *, num_stages: int, partition: str, interval: int, is_dynamic: bool
    ) -> None:
        parts = parts_of(model)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints the parts
                super().__init__(
                    parts,
                    num_stages=num_stages,
                    loss_fn=causal_loss,
                    partition_method=partition,
                    activation_checkpoint_interval=interval,
                    activation_checkpoint_func=non_reentrant_checkpoint,
                    dynamic_shape=is_dynamic,
                )
        except (RuntimeError, NotImplementedError) as error:
            if "artition" not in str(error):
                raise
            raise UserError(
                f'pipeline.partition = {partition!r} is unknown: use "parameters", "uniform" or "type:block"'
            ) from None
        self._check_stages(len(parts))
        self.config = model.config
        store_generation(self, stored_generation(model))
        self.partition = partition
        self.num_parameters_of_all_stages = sum(each.numel() for each in model.parameters())
        self._block_inputs = BlockInputs(model)
        self._register_under_model_names()
        self._tied_names = tied_names(model.config) if is_tied(model) else None
        self.tied_comms = self._make_tied_groups()
        self._synchronize_tied_weights()
        object.__setattr__(self, "full_model", model)  # not registered: most of it belongs to other stages
        self.follow_stream()

    def release(self) -> None:
        """Release the modules of other stages."""
        object.__setattr__(self, "full_model", None)

    def follow_stream(self) -> None:
        """Advance the random stream of the full model's layers at each training forward of this stage."""
        stream = None if self.full_model is None else random_stream(self.full_model)
        hooks = self._forward_pre_hooks.values()
        if stream is not None and not any(isinstance(hook, AdvanceStream) for hook in hooks):
            self.register_forward_pre_hook(AdvanceStream(stream))

    def forward(self, forward_input: Inputs) -> Inputs:
        """Run this stage: see `parts.run_parts`."""
        return run_parts(self.forward_funcs, forward_input, self._block_inputs, self._run_blocks)

    def get_output_embeddings(self) -> nn.Module | None:
        """The output projection, which is not converted; None if another stage has it."""
        name = tied_names(self.config)[1].removesuffix(".weight")
        return dict(self.named_modules()).get(name)

    def parameter_names(self) -> dict[str, str]:
        """Local parameter name → name in the Hugging Face model; a tied head has the embedding's name."""
        tied = self.tied_names()
        return {name: tied.get(name, name) for name, _ in self.named_parameters(remove_duplicate=False)}

    def tied_names(self) -> dict[str, str]:
        """Name of a tied head → name of the embedding, in every stage; empty if nothing is tied."""
        return {} if self._tied_names is None else {self._tied_names[1]: self._tied_names[0]}

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """This stage's copy of the tied weight and the group of ranks with a copy; empty in other stages."""
        return [(comm["module"].weight, comm["group"]) for comm in self.tied_comms.values()]

    def to(self, *arguments: Any, **named: Any) -> PipelinedModel:
        """As of every module; parameters on the meta device stay there, and buffers with them."""
        return self if self._is_on_meta() else super().to(*arguments, **named)

    def _is_on_meta(self) -> bool:
        return any(parameter.is_meta for parameter in self.parameters())

    @torch.no_grad()  # autograd has no rule for a broadcast into a parameter
    def _synchronize_tied_weights(self) -> None:
        if not self._is_on_meta():
            super()._synchronize_tied_weights()

    def groups(self) -> GroupsOfRank:
        """Process groups of this rank, for our optimizer."""
        grid = self._grid
        return GroupsOfRank(
            data=grid.dp_proc_group,
            model=grid.ds_model_proc_group,
            tensor=grid.slice_proc_group,
            pipeline=grid.pp_proc_group,
        )

    def _check_stages(self, num_parts: int) -> None:
        for stage in range(self.num_stages):
            if self.parts[stage] == self.parts[stage + 1]:
                raise empty_stage(self.num_stages, stage, num_parts)

    def _register_under_model_names(self) -> None:
        """Register the parts' modules in this module, instead of the parts."""
        self._modules.clear()
        self.tied_modules = nn.ModuleDict()  # DeepSpeed's tied layers; we have none
        for part in self.forward_funcs:
            assert isinstance(part, Part)
            for name in part.names:
                place(self, name, part.get_submodule(name))
        if self._block_inputs.rotary is not None:
            self._block_inputs.rotary.to(get_accelerator().current_device_name())

    def _make_tied_groups(self) -> dict[str, dict[str, Any]]:
        """Groups of the tied weight's copies, in DeepSpeed's format; every rank must call it."""
        if self._tied_names is None or self.num_stages == 1:
            return {}
        own: dict[str, dict[str, Any]] = {}
        for data in range(self._grid.data_parallel_size):
            stages = (0, self.num_stages - 1)
            ranks = [self._grid.stage_to_global(stage_id=stage, data=data) for stage in stages]
            group = collectives.new_group(ranks=ranks)
            if process_group.rank() in ranks:
                is_head = self.stage_id > 0
                module = self.get_submodule(self._tied_names[is_head].removesuffix(".weight"))
                # the norm must count it once: the first mark is Megatron's (our norm), the second DeepSpeed's
                module.weight.shared = is_head
                module.weight.ds_pipe_replicated = is_head
                own[TIED] = {"ranks": ranks, "group": group, "weight_attr": ["weight"], "module": module}
        return own

    def _run_blocks(self, blocks: Sequence[Block], hidden: Tensor, options: BlockOptions) -> Tensor:
        interval = self.activation_checkpoint_interval if torch.is_grad_enabled() else 0
        if not interval:
            return run_blocks(blocks, hidden, options)
        for start in range(0, len(blocks), interval):
            segment = blocks[start : start + interval]
            hidden = checkpoint(
                run_blocks, segment, hidden, options, use_reentrant=False, context_fn=self._contexts
            )
        return hidden

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts of a segment and of its recomputation, which gets the random stream's current position."""
        stream = random_stream(self)
        return nullcontext(), nullcontext() if stream is None else stream.at(stream.step)
