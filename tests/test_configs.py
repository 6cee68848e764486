"""Every shipped configuration is one that starts: it is read, its model and its recipe exist."""

from pathlib import Path

import pytest

from megalowbit.layers.recipe import recipe
from megalowbit.pretrain.config import load_config

CONFIGS = Path(__file__).parent.parent / "configs"
METIS = [("metis_seed_gpt2", 60, 2.0), ("metis_seed_llama", 64, 1.0)]
FILES = sorted(CONFIGS.glob("*.json"))


def load(name):
    return load_config(CONFIGS / f"{name}.json", [], world_size=8)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_configuration_is_valid(path):
    config = load(path.stem)
    assert config.settings.model.config.is_file()
    assert recipe(config.recipe).name


@pytest.mark.parametrize(("name", "rank", "clip"), METIS)
def test_the_metis_configurations_set_what_its_scripts_set(name, rank, clip):
    config = load(name)
    chosen = recipe(config.recipe)
    assert chosen.split_grad_output.rank == rank
    assert chosen.split_grad_output.niter == 0
    assert chosen.split_grad_output.order == "seed"
    assert {chosen.q_forward_input, chosen.q_backward_outputgrad} == {"fp4e2m1b:seed_compat"}
    assert config.parts.deepspeed["gradient_clipping"] == clip
    assert config.parts.settings.gradient_norm == "sum_of_norms"
    assert config.parts.deepspeed["optimizer"]["params"]["lr"] == 1.5e-4
