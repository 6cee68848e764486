"""What a checkpoint to start from holds, and which weights it refuses."""

import pytest
import torch
from start_checkpoints import write_start_checkpoint
from tiny_models import tiny_model

from megalowbit.errors import UserError
from megalowbit.hf.model import random_model
from megalowbit.hf.start_checkpoint import start_conversion
from megalowbit.hf.training_checkpoint import read_checkpoint
from megalowbit.layers.conversion.convert import convert
from megalowbit.layers.recipe import recipe


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("name", ["nvfp4", "metis-nvfp4"])
def test_the_weights_are_those_of_the_model_in_the_converted_layout(kind, name, tmp_path):
    model = tiny_model(kind).half()
    step = write_start_checkpoint(model, name, tmp_path / "start")
    assert step == tmp_path / "start" / (tmp_path / "start" / "latest").read_text()
    assert step.name == "step-00000000"
    found = read_checkpoint(tmp_path / "start")
    assert found.recipe == recipe(name)
    assert found.header["megalowbit"]["step"] == 0
    convert(model, name)
    expected = dict(model.named_parameters(remove_duplicate=False))
    assert found.state_dict.keys() == expected.keys()
    for each, value in expected.items():
        assert found.state_dict[each].dtype == torch.float16
        assert found.state_dict[each].equal(value)


def test_other_names_and_shapes_are_refused(tmp_path):
    model = tiny_model("llama")
    weights = {name: value for name, value in model.state_dict().items() if name != "model.norm.weight"}
    options = {"source": tmp_path, "dtype": torch.float32, "key": {}}
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        start_conversion(random_model(model.config, seed=0, device="meta"), weights, "nvfp4", **options)
    weights["model.norm.weight"] = torch.ones(7)
    empty = random_model(model.config, seed=0, device="meta")
    conversion = start_conversion(empty, weights, "nvfp4", **options)
    with pytest.raises(UserError, match=r"model\.norm\.weight .*7"):
        conversion.run(tmp_path / "start")
    assert not (tmp_path / "start").exists()
