"""Weights read one by one, held against the model that transformers loads from the same folder."""

import errno
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import KINDS, tiny_model

from megalowbit.errors import TransientError, UserError
from megalowbit.families.registry import family
from megalowbit.hf.folders import stored_weights
from megalowbit.hf.folders.stored_weights import StoredWeights, narrowed, same_bits, widest
from megalowbit.hf.model import load_weights

FILES = {
    "one file": lambda model, folder: model.save_pretrained(folder),
    "shards": lambda model, folder: model.save_pretrained(folder, max_shard_size=20_000),
    "pickle": lambda model, folder: save_pickle(model, folder),
    "pickle of torch 1.5": lambda model, folder: save_pickle(model, folder, is_old=True),
    "without the head's prefix": lambda model, folder: save_base(model, folder),
    "former buffers": lambda model, folder: save_former_buffers(model, folder),
}


def save_pickle(model, folder, *, is_old=False):
    model.config.save_pretrained(folder)
    path = folder / "pytorch_model.bin"
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=not is_old)


def save_base(model, folder):
    """As published GPT-2s are stored."""
    prefix = f"{model.base_model_prefix}."
    state = {name.removeprefix(prefix): value.clone() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    model.config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors")


def save_former_buffers(model, folder):
    names = family(model.config.model_type)
    attention = next(name for name in names.projections).partition(".")[0]
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for ending in names.former_buffers:
        name = f"{names.blocks}.0.{attention}.{ending.removeprefix(f'{attention}.')}"
        state[name] = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    save_file(state, folder / "model.safetensors")


def open_weights(folder, config):
    names = family(config.model_type)
    with torch.device("meta"):
        model = names.load_model_class()(config)
    return StoredWeights(folder, model, names.former_buffers)


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_transformers_loads(tmp_path, kind, form):
    model = tiny_model(kind)
    (tmp_path / "hf").mkdir()
    FILES[form](model, tmp_path / "hf")
    weights = open_weights(tmp_path / "hf", model.config)
    expected = load_weights(model.config, tmp_path / "hf", dtype="auto")
    assert list(weights) == [name for name, _ in expected.named_parameters()]
    assert len(weights) == len(list(weights))
    for name, value in expected.named_parameters():
        assert same_bits(weights[name], value.detach()), name
        assert weights.specs[name][:2] == (value.dtype, tuple(value.shape))
    assert weights.dtype == torch.float32


def test_mixed_dtypes_have_the_narrowest_that_holds_all(tmp_path):
    model = tiny_model("llama")
    model.lm_head.half()
    model.model.norm.bfloat16()
    model.save_pretrained(tmp_path)
    weights = open_weights(tmp_path, model.config)
    assert weights["lm_head.weight"].dtype == torch.float16
    assert weights.dtype == load_weights(model.config, tmp_path, dtype="auto").dtype == torch.float32
    assert widest([torch.float16, torch.bfloat16]) == torch.float32
    assert widest([torch.bfloat16, torch.float64]) == torch.float64
    assert widest([torch.bfloat16]) == torch.bfloat16
    assert widest([]) == torch.float32


def test_a_tied_weight_may_be_stored_under_either_name_and_under_both_if_they_are_equal(tmp_path):
    model = tiny_model("gpt2")
    head = model.state_dict()["lm_head.weight"].clone()
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    save_file({**state, "lm_head.weight": head}, path)
    assert open_weights(tmp_path, model.config)["transformer.wte.weight"].equal(head)
    rounded = head.bfloat16()  # equal values in two dtypes
    save_file({**state, "transformer.wte.weight": rounded.float(), "lm_head.weight": rounded}, path)
    assert open_weights(tmp_path, model.config)["transformer.wte.weight"].equal(rounded.float())
    del state["transformer.wte.weight"]
    save_file({**state, "lm_head.weight": head}, path)
    assert open_weights(tmp_path, model.config)["transformer.wte.weight"].equal(head)


@pytest.mark.parametrize("change", [lambda head: head.neg(), lambda head: head.half()])
def test_tied_weights_with_other_values_are_refused_also_when_a_model_is_loaded(tmp_path, change):
    model = tiny_model("gpt2")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    head = change(model.lm_head.weight.detach()).contiguous()
    save_file({**load_file(path), "lm_head.weight": head}, path)
    message = r"ties lm_head.weight to transformer\.wte\.weight, but their values differ"
    with pytest.raises(UserError, match=message):
        open_weights(tmp_path, model.config)
    with pytest.raises(UserError, match=message):
        load_weights(model.config, tmp_path, dtype="auto")


def test_one_weight_under_two_names_is_refused(tmp_path):
    model = tiny_model("gpt2")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    save_file({**state, "ln_f.bias": state["transformer.ln_f.bias"].clone()}, path)
    with pytest.raises(UserError, match=r"holds the weight transformer\.ln_f\.bias twice"):
        open_weights(tmp_path, model.config)


def test_a_sparse_tensor_is_refused(tmp_path):
    model = tiny_model("gpt2")
    model.config.save_pretrained(tmp_path)
    state = {name: value.to_sparse() for name, value in model.state_dict().items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"wte\.weight as a sparse or quantised tensor"):
        open_weights(tmp_path, model.config)


def test_a_file_that_is_exchanged_meanwhile_is_an_error(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    weights = open_weights(tmp_path, model.config)
    model.half().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="changed while it was read"):
        weights["lm_head.weight"]
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="cannot be loaded"):
        weights["lm_head.weight"]


def test_bits_are_compared_and_not_values():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.half())
    assert not same_bits(zero, zero.view(1, 1))
    assert same_bits(torch.tensor(1.5), torch.tensor(1.5))


def test_an_index_with_another_order_gives_the_same_weights(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size=20_000)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "weight_map": dict(reversed(index["weight_map"].items()))}))
    weights = open_weights(tmp_path, model.config)
    assert all(weights[name].equal(value) for name, value in model.state_dict().items())


def test_a_lost_file_system_is_not_damage(tmp_path, monkeypatch):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    weights = open_weights(tmp_path, model.config)

    def lost(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(stored_weights, "safe_open", lost)
    with pytest.raises(TransientError, match="Stale file handle"):
        weights["lm_head.weight"]


@pytest.mark.parametrize(
    ("dtype", "limit", "wider"),
    [(torch.float16, 2.0**16 - 2.0**4, "bfloat16"), (torch.bfloat16, 2.0**128 - 2.0**119, "float32")],
)
def test_a_narrower_dtype_must_hold_the_finite_values(dtype, limit, wider):
    """Infinite by IEEE 754 is what exceeds the largest number by half of its last place, or more."""
    given = torch.tensor([limit, -limit, float("nan"), float("inf"), 0.0])
    given[:2] = torch.nextafter(given[:2], torch.zeros(2))
    found = narrowed("a", given, dtype, "x")
    assert found.dtype == dtype
    assert found.isfinite().tolist() == given.isfinite().tolist()
    given[4] = -limit
    text = re.escape(f"{limit:.6g}")
    message = rf"^x: weight a has values up to {text}, .*: choose {wider} as its dtype \(--dtype\)$"
    with pytest.raises(UserError, match=message):
        narrowed("a", given, dtype, "x")
    assert narrowed("a", torch.zeros(0), dtype, "x").dtype == dtype
