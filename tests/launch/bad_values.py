"""Values that no run can use, section by section: what `--set` would be given, and the key that is named.

All of them are mistakes in the values alone: whatever machine, data or number of processes, each way to a run
has to refuse them, with the same words.
"""

OURS = {
    "run.steps": ["true", "0", "-1", "1.5", '"200"', "null", "[]", "{}", "1e999"],
    "run.seed": ["true", "-1", "9223372036854775808", '"1"'],
    "run.name": ["true", '"../x"', '""', "3"],
    "run.max_consecutive_skips": ["true", "0"],
    "run.deterministic": ["1", "null", '"yes"'],
    "run.overflow_retries": ["true", "-1", "2.5"],
    "checkpoint.keep": ["true", "false", "0", '"3"'],
    "checkpoint.every": ["true", "-1", '"10"'],
    "checkpoint.export_hf": ["1", "0", '"yes"', "null"],
    "telemetry.log_every": ["true", "0"],
    "telemetry.tensorboard": ["1", '"off"'],
    "telemetry.former_names": ["1", "null"],
    "telemetry.overflow": ["2", "[]"],
    "telemetry.count_every": ["true", "0"],
    "telemetry.layers_every": ["true", "-1"],
    "trackio.enabled": ["1", '"yes"', "null"],
    "trackio.project": ["true", '""', "null"],
    "histograms.every": ["true", "0", "1.5"],
    "data.sequence_length": ["true", "1", '"64"', "64.5"],
    "data.seed": ["true", "-1"],
    "data.vocab_size": ["true"],
    "data.corpus": ["true", '""', "3"],
    "data.max_bad_records": ["true", "-1", "1.5", "null"],
    "data.stream": ["true", "0", "-1", "1.5", '"some"', '"10"'],
    "data.workers": ["true", "0", '"4"'],
    "data.packing": ["true", "null", '"bfd"'],
    "data.eod_mask_loss": ["1", "null"],
    "data.build_timeout": ["true", "0", "1e999", "null"],
    "data.validation": [
        "true",
        "{}",
        '"held.txt"',
        '{"share": 0}',
        '{"share": 1}',
        '{"share": 0.1, "split": "x"}',
    ],
    "data.sources": [
        "true",
        "{}",
        "[]",
        '{"a": {}}',
        '{"a": {"corpus": "x", "weight": 0}}',
        '{"a": {"corpus": "x", "weight": 1}}',  # corpus is set, too
    ],
    "data.phases": ["true", "3", '[{"from_step": 1, "weights": {}}]'],
    "validation.every": ["true", "-1", "1.5", "10"],  # the last has no effect without text
    "validation.tokens": ["true", "0"],
    "validation.micro_batch_size": ["true", "0"],
    "validation.bf16": ["1", "null"],
    "validation.keep_best": ["0", '"no"'],
    "model.pad_vocab_to_multiple_of": ["true", "1", '"128"', "64.5"],
    "model.overrides": ["true", "[]", '"n_layer"'],
    "loss_guard.patience": ["true", "0"],
    "loss_guard.spike_deviations": ["true", "0", "-1", '"5"'],
    "loss_guard.window": ["true", "3"],
    "loss_guard.spike": ['"sometimes"', "true"],
    "late_switch.at": ["true", "0", "1.0", '"0.5"', "1e999"],
    "watchdog.timeout": ["true", "1", '"60"'],
    "watchdog.silence": ["true", "2.9", '"15"'],
    "watchdog.slow_step": ["true", "1.0"],
    "lr_schedule": ["true", "3", "{}", '{"type": "cosin"}', '{"type": "constant", "warmup_steps": true}'],
    "regularizer.strength": ["true", "-1", '"0"'],
    "layer_scaling.every": ["true", "0"],
    "layer_scaling.enabled": ["1", '"true"'],
    "activation_checkpointing": ["true", "2"],
    "activation_checkpointing.every": ["true", "-1", '"2"', "1.5"],
    "activation_checkpointing.first": ["true", "0", "4"],  # the last has no effect without every
    "chunked_cross_entropy": ["1", '"true"', "{}"],
    "precision": ["true", '"fp8"', "16", "{}"],
    "grad_scaler.type": ["true", '"none_such"'],
    "gradient_norm": ["true", '"max"'],
    "log_num_zeros_in_grad": ["1", '"false"'],
    "fp32_norms": ["0", '"true"'],
    "autocast": ["1", '"on"', "[]"],
    "recipe": ["true", "{}", '""', '"nvpf4"', "[]", "3", '{"keep": []}', '{"based": "nvfp4"}'],
    "recipe.base": ["true", "{}", '"none"'],
    "speculation.every": ["true", "0"],
    "speculation.use_alignment": ["1"],
    "nonsense": ["1"],
}
# of a recipe's fields the name is enough
OF_RECIPES = {
    "keep_first": ["true", "-1", "1.0"],
    "keep_last": ["true", '"1"'],
    "hadamard": ["1", '"true"'],
    "keep": ['"nvfp4"', "true", "[3]"],
    "keep_if_present": ["true", "[3]"],
    "layout": ["true", '"rows"'],
    "q_forward_input": ["true", '"nvpf4"'],
    "split_input": ["true", '{"rank": true}', '{"niter": true}', '{"rnk": 1}'],
    "parameter_split": ['{"warmup_steps": true}', '{"merged_lr": true}'],
}
OF_DEEPSPEED = {
    "train_micro_batch_size_per_gpu": ["true", "0", "2.5", '"2"', "{}"],
    "train_batch_size": ["true", "-4", "[]"],
    "gradient_accumulation_steps": ["true", "0", '"1"'],
    "gradient_clipping": ["true", "-1", '"1.0"', "{}", "1e999"],
    "communication_data_type": ['"fp99"', "true", "{}"],
    "zero_optimization.stage": ["{}", "[]", '""', "true", "false", "4", "1.5", '"1"'],
    "zero_optimization": ["3", "[]", '"1"'],
    "zero_optimization.reduce_bucket_size": ["true", '"large"', "-1", "{}"],
    "zero_optimization.overlap_comm": ["3", '"maybe"'],
    "zero_optimization.offload_optimizer": ["3", '{"device": "tape"}', '{"device": {}}'],
    "optimizer.type": ['"Lion"', "true", "null", "{}"],
    "optimizer.params.lr": ["true", "-1", '"1e-3"', "{}", "null"],
    "optimizer.params.betas": ["true", "[0.9]", "[0.9, true]", "[0.9, 1.5]"],
    "optimizer.params.eps": ["true", "0"],
    "scheduler.type": ['"CosineLR"', "true"],
    "steps_per_print": ["true", "0", '"10"'],
    "prescale_gradients": ["1", '"true"'],
    "gradient_predivide_factor": ["true", "0"],
    "wall_clock_breakdown": ["1"],
    "pipeline.stages": ["true", "0", "1.5", '"2"'],
    "tensor_parallel.autotp_size": ["true", "-1", '"2"'],
    "comms_logger.enabled": ['"perhaps"'],
    "checkpoint.tag_validation": ["3", '"Sometimes"'],
    "data_types.keep_in_fp32_modules": ["3"],
    "fp16.enabled": ["1", '"yes"'],
    "bf16.enabled": ["1"],
    "wandb.enabled": ["1", '"true"'],
    "tensorboard.enabled": ["1"],
    "tensorbord": ["{}"],
}


def overrides():
    """(`key=value` as for `--set`, a word that each message about it holds)."""
    for keys, start in ((OURS, "megalowbit."), (OF_DEEPSPEED, "")):
        for key, values in keys.items():
            for value in values:
                yield f"{start}{key}={value}", key.split(".")[-1].replace("base", "recipe")
    for key, values in OF_RECIPES.items():
        for value in values:
            yield f'megalowbit.recipe={{"base": "nvfp4", "{key}": {value}}}', key
