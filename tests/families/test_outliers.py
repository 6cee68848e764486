import pytest
import torch
from tiny_models import KINDS, tiny_model
from transformers import GPT2Config

from megalowbit.errors import UserError
from megalowbit.families.outliers import OutlierSettings
from megalowbit.hf.checkpoint import build_model
from megalowbit.hf.settings import ModelSettings

NUM_NORMS = {
    "gpt2": 2,
    "llama": 2,
    "mistral": 2,
    "qwen2": 2,
    "qwen3": 2,
}  # of a block, without those of heads


def folder_of(tmp_path, kind):
    tiny_model(kind).save_pretrained(tmp_path / kind)
    return tmp_path / kind


def changes(settings, **outliers):
    """Ratio of each weight with planted outliers to the same one without, where it is not 1."""
    plain = dict(build_model(settings, seed=5).named_parameters())
    changed = build_model(settings.model_copy(update={"outliers": OutlierSettings(**outliers)}), seed=5)
    ratios = {name: value.detach() / plain[name].detach() for name, value in changed.named_parameters()}
    return {name: ratio for name, ratio in ratios.items() if not torch.equal(ratio, torch.ones_like(ratio))}


@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_all_blocks_have_the_same_channels_multiplied_and_nothing_else(tmp_path, kind):
    found = changes(ModelSettings(checkpoint=folder_of(tmp_path, kind)), channels=3, factor=8)
    assert len(found) == 2 * NUM_NORMS[kind]
    first = next(iter(found.values()))
    assert sorted(first.tolist()) == pytest.approx([1.0] * 29 + [8.0] * 3)
    assert all(torch.equal(first, ratio) for ratio in found.values())
    assert not any(name.endswith("bias") or "ln_f" in name or name == "model.norm.weight" for name in found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_token_embedding_has_its_channels_multiplied(tmp_path, kind):
    found = changes(ModelSettings(checkpoint=folder_of(tmp_path, kind)), where="embedding", channels=1)
    ((_, ratio),) = found.items()
    assert ratio.shape == (64, 32)
    assert sorted(ratio[0].tolist()) == pytest.approx([1.0] * 31 + [30.0])
    torch.testing.assert_close(ratio, ratio[:1].expand(64, 32))


def test_random_weights_have_them_too_and_the_seed_chooses_the_channels(tmp_path):
    GPT2Config(n_positions=32, n_embd=32, n_layer=1, n_head=2, vocab_size=64).to_json_file(
        tmp_path / "c.json"
    )
    settings = ModelSettings(config=tmp_path / "c.json", outliers=OutlierSettings(channels=2))
    chosen = set()
    for seed in range(8):
        weight = build_model(settings, seed=seed).transformer.h[0].ln_1.weight
        assert weight.count_nonzero() == 32
        chosen.add(tuple(weight.nonzero().flatten()[weight[weight != 0] == 30].tolist()))
    assert len(chosen) > 4
    assert {len(each) for each in chosen} == {2}


def test_a_model_without_weights_has_none_and_too_many_channels_are_refused(tmp_path):
    settings = ModelSettings(checkpoint=folder_of(tmp_path, "gpt2"), outliers=OutlierSettings(channels=33))
    build_model(settings, seed=0, device="meta")
    with pytest.raises(UserError, match="channels = 33 is above the model's hidden size 32: lower it"):
        build_model(settings, seed=0)
