import json
import math

import pytest
import torch
from tiny_models import tiny_config

from launchers import write_config
from megalowbit.hf.model import random_model
from megalowbit.layers.conversion.convert import convert
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.sweep.study.evaluation import heldout_losses, mean_loss, read_tokens


@pytest.fixture
def model():
    return random_model(tiny_config("gpt2"), seed=3).eval()


@pytest.mark.parametrize("count", [2, 8, 9, 30, 161])
def test_every_token_after_the_first_is_predicted_once(model, count):
    """Against one token at a time, in float64, from the tokens since the last multiple of the length."""
    tokens = torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(count))
    reference, double = 0.0, model.double()
    for index in range(1, count):
        start = (index - 1) // 8 * 8
        with torch.no_grad():
            logits = double(input_ids=tokens[None, start:index]).logits[0, -1]
        reference -= torch.log_softmax(logits, 0)[tokens[index]].item()
    found = mean_loss(model.float(), tokens, 8)
    assert found == pytest.approx(reference / (count - 1), abs=2e-6)


def test_the_losses_of_weights_are_in_bf16_and_in_the_recipes_own_precision(tmp_path):
    path = write_config(tmp_path)
    with (tmp_path / "train.jsonl").open("w") as file:
        file.writelines(
            json.dumps({"text": line}) + "\n" for line in (tmp_path / "text.txt").read_text().split("\n")[:-1]
        )
    (tmp_path / "heldout.jsonl").write_text(
        json.dumps({"text": "the baker counts letters at dawn. " * 9}) + "\n"
    )
    overrides = [
        f"megalowbit.data.corpus={tmp_path / 'train.jsonl'}",
        f"megalowbit.data.cache_dir={tmp_path}",
    ]
    config = load_config(path, [*overrides, "megalowbit.recipe=nvfp4"], world_size=1)
    model = random_model(tiny_config("gpt2", vocab_size=256, positions=64), seed=0)
    model.save_pretrained(tmp_path / "hf")
    found = heldout_losses(config, tmp_path / "hf", tmp_path / "heldout.jsonl")
    tokens = read_tokens(config.settings.data, tmp_path / "heldout.jsonl")
    assert bytes(tokens[:9].tolist()) == b"the baker"
    assert found["tokens"] == len(tokens) - 1 == 9 * 34 // 32 * 32 - 1
    assert found["bf16"] == mean_loss(model.bfloat16().eval(), tokens, 32)
    convert(model, "nvfp4", seed=0, rank=0)
    assert found["own"] == mean_loss(model, tokens, 32) != found["bf16"]
    assert found["bf16"] == pytest.approx(math.log(256), rel=0.02)
    # after a late switch of the forward product, nothing of it is quantised any more
    switch = 'megalowbit.late_switch={"at": 3, "scope": "forward"}'
    switched = load_config(path, [*overrides, "megalowbit.recipe=nvfp4", switch], world_size=1)
    after = heldout_losses(switched, tmp_path / "hf", tmp_path / "heldout.jsonl")
    assert after["bf16"] == found["bf16"]
    assert after["own"] == pytest.approx(found["bf16"], abs=2e-4)
    assert abs(after["own"] - found["bf16"]) < abs(found["own"] - found["bf16"])
