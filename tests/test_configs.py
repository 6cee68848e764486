"""Every shipped configuration is valid: it can be read, and its model and recipe exist."""

from pathlib import Path

import pytest

from megalowbit.layers.recipe import recipe
from megalowbit.pretrain.config import load_config

CONFIGS = Path(__file__).parent.parent / "configs"
METIS = {  # name: rank, clip, sequence length, sequences a step
    "metis_seed_gpt2": (60, 2.0, 256, 1 * 40 * 4),
    "metis_seed_llama": (64, 1.0, 1024, 12 * 1 * 4),
}
FILES = sorted(CONFIGS.glob("*.json"))


def load(name, world_size=8):
    return load_config(CONFIGS / f"{name}.json", [], world_size=world_size)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_configuration_is_valid(path):
    config = load(path.stem)
    if path.stem.startswith("finetune_"):  # from a folder that the user names
        assert config.settings.model.checkpoint is not None
    else:
        assert config.settings.model.config.is_file()
    assert recipe(config.recipe).name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_configuration_trains_from_its_first_step(path):
    config = load(path.stem)
    assert "scheduler" not in config.parts.deepspeed  # DeepSpeed's warm-ups lose a step, which a run warns of
    schedule = config.parts.settings.lr_schedule
    assert schedule.factor(0) == 1 / schedule.warmup_steps
    assert schedule.factor(schedule.warmup_steps) == 1


def test_a_shipped_configuration_can_be_tried_for_fewer_steps_than_its_warmup_has():
    config = load_config(CONFIGS / "gpt2_tiny_fp4.json", ["megalowbit.run.steps=4"], world_size=1)
    schedule = config.parts.settings.lr_schedule
    assert schedule.total_steps == schedule.warmup_steps == 40
    assert [schedule.factor(step) for step in range(4)] == [1 / 40, 2 / 40, 3 / 40, 4 / 40]


@pytest.mark.parametrize("name", ["finetune_gpt2", "finetune_llama"])
def test_finetuning_is_gentle_and_rounds_to_the_end(name):
    """With a late switch, the last steps would not train the rounded weights that are exported."""
    config = load(name)
    assert config.parts.deepspeed["optimizer"]["params"]["lr"] <= 2e-5
    assert config.parts.settings.lr_schedule.warmup_steps <= 0.05 * config.settings.run.steps
    assert config.settings.late_switch is None
    assert recipe(config.recipe).quantizes


@pytest.mark.parametrize("name", METIS)
def test_the_metis_configurations_set_what_its_scripts_set(name):
    rank, clip, sequence_length, batch_size = METIS[name]
    config = load(name)
    deepspeed = config.parts.deepspeed
    chosen = recipe(config.recipe)
    assert chosen.split_grad_output.rank == rank
    assert chosen.split_grad_output.niter == 0
    assert chosen.split_grad_output.order == "seed"
    assert {chosen.q_forward_input, chosen.q_backward_outputgrad} == {"fp4e2m1b:seed_compat"}
    assert deepspeed["gradient_clipping"] == clip
    assert config.parts.settings.gradient_norm == "sum_of_norms"
    optimizer, schedule = deepspeed["optimizer"]["params"], config.parts.settings.lr_schedule
    assert (optimizer["lr"], optimizer["weight_decay"], optimizer["eps"]) == (1.5e-4, 0.1, 1e-8)
    assert tuple(optimizer["betas"]) == (0.9, 0.95)
    assert (schedule.type, schedule.warmup_steps) == ("constant", 20)
    assert config.settings.data.sequence_length == sequence_length
    assert deepspeed["train_batch_size"] == batch_size


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", METIS)
def test_the_metis_configurations_keep_their_batch_on_any_number_of_ranks(name, world_size):
    deepspeed = load(name, world_size).parts.deepspeed
    micro, steps = deepspeed["train_micro_batch_size_per_gpu"], deepspeed["gradient_accumulation_steps"]
    assert micro * steps * world_size == METIS[name][3]
