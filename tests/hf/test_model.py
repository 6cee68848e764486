import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig

from megalowbit.data.tokenize import ByteTokenizer
from megalowbit.errors import UserError
from megalowbit.hf.batches.separate_documents import attention_within_documents
from megalowbit.hf.model import fill_weights, load_weights, random_model, save_hf
from megalowbit.layers.conversion.convert import bit_layers, convert

GPT2 = GPT2Config(
    vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
LLAMA = LlamaConfig(
    vocab_size=256,
    max_position_embeddings=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
TOKENS = torch.arange(20).reshape(2, 10) * 7 % 256


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(first, second):
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_random_weights_depend_on_the_seed_alone(config):
    torch.manual_seed(1)
    first = weights(random_model(config, seed=5))
    torch.manual_seed(2)
    assert equal(first, weights(random_model(config, seed=5)))
    assert not equal(first, weights(random_model(config, seed=6)))
    assert {value.dtype for value in first.values()} == {torch.float32}


def test_the_callers_random_state_is_unchanged():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    random_model(GPT2, seed=5)
    assert torch.rand(4).equal(expected)


def test_a_model_without_weights_has_the_same_shapes():
    model = random_model(GPT2, seed=0, device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    assert shapes == {name: value.shape for name, value in random_model(GPT2, seed=0).state_dict().items()}


@pytest.mark.parametrize("config", [GPT2, LLAMA])
@pytest.mark.parametrize("recipe", [None, "nvfp4", "bf16"])
def test_a_saved_model_has_the_logits_of_the_plain_one(tmp_path, config, recipe):
    model = random_model(config, seed=1)
    expected = logits(model)
    if recipe is not None:
        convert(model, recipe)
    save_hf(model, tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert logits(loaded).equal(expected)
    assert loaded.config.use_cache


def test_saving_does_not_disturb_the_live_model(tmp_path):
    model = random_model(GPT2, seed=1).half()
    convert(model, "nvfp4")
    layers = bit_layers(model)
    # What training hangs on a model must neither be copied nor be lost.
    next(iter(layers.values())).register_forward_hook(lambda *_: None)
    parameters = list(model.parameters())
    handle = parameters[0].register_post_accumulate_grad_hook(lambda _: pytest.fail("copied"))
    before, use_cache = weights(model), model.config.use_cache
    model.config.use_cache = False
    save_hf(model, tmp_path / "hf", ByteTokenizer())
    assert bit_layers(model) == layers
    assert all(mine is theirs for mine, theirs in zip(parameters, model.parameters(), strict=True))
    assert equal(before, weights(model))
    assert model.training
    assert model.config.use_cache is False
    assert use_cache
    assert handle is not None


def test_half_weights_keep_their_dtype(tmp_path):
    model = random_model(GPT2, seed=1).to(torch.bfloat16)
    convert(model, "nvfp4")
    save_hf(model, tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert saved.dtype == torch.bfloat16
    assert equal(weights(saved), weights(model))


def test_the_tokenizer_is_saved_with_the_model_and_sets_its_end_of_text(tmp_path):
    save_hf(random_model(LLAMA, seed=1), tmp_path / "hf", ByteTokenizer())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert tokenizer("né\n")["input_ids"] == list("né\n".encode())
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == tokenizer.eos_token_id == 0
    ids = tokenizer("ab", return_tensors="pt")
    assert loaded.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] <= 5


def test_an_existing_folder_is_never_overwritten(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").write_text("precious")
    with pytest.raises(UserError, match="already exists"):
        save_hf(random_model(GPT2, seed=1), tmp_path / "hf")
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["mine"]


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def garble(path):
    path.write_bytes(b"\0" * 200)


def test_missing_weights_are_a_one_line_error(tmp_path):
    GPT2.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no weights: add model\.safetensors or [\w.]+$"):
        load_weights(GPT2, tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("damage", [cut, garble])
def test_damaged_weights_are_a_one_line_error(tmp_path, damage):
    GPT2LMHeadModel(GPT2).save_pretrained(tmp_path)
    damage(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"the weights in .* cannot be loaded \(.*\): replace") as caught:
        load_weights(GPT2, tmp_path, dtype=torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"garbage", b"", b"PK\x03\x04junk", b"\0" * 200, b"\x80\x02junk"])
def test_corrupt_pickled_weights_are_a_one_line_error(tmp_path, content):
    GPT2.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    message = r"the weights in .* cannot be loaded \(.+\): replace|is not loaded: it is damaged, or contains"
    with pytest.raises(UserError, match=message) as caught:
        load_weights(GPT2, tmp_path, dtype=torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["transformer.", ""])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_whose_scale_is_lost_are_refused(tmp_path, file, prefix, dtype):
    GPT2.save_pretrained(tmp_path)
    state = {name.replace("transformer.", prefix): w for name, w in weights(GPT2LMHeadModel(GPT2)).items()}
    del state["lm_head.weight"]  # tied
    write = save_file if file == "model.safetensors" else torch.save
    write(state, tmp_path / file)
    load_weights(GPT2, tmp_path, dtype=torch.float32)
    state[f"{prefix}h.1.mlp.c_fc.weight"] = state[f"{prefix}h.1.mlp.c_fc.weight"].to(dtype)
    write(state, tmp_path / file)
    with pytest.raises(UserError, match=rf"weight {prefix}h\.1\.mlp\.c_fc\.weight is {dtype}, whose scale"):
        load_weights(GPT2, tmp_path, dtype=torch.float32)


def test_stored_masks_may_be_integers(tmp_path):
    GPT2.save_pretrained(tmp_path)
    state = weights(GPT2LMHeadModel(GPT2))
    del state["lm_head.weight"]
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.uint8)  # as older GPT-2s have
    save_file(state, tmp_path / "model.safetensors")
    loaded = load_weights(GPT2, tmp_path, dtype=torch.float32)
    assert loaded.transformer.wpe.weight.equal(state["transformer.wpe.weight"])


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(initializer_range=-1.0, n_layer=1, n_embd=8, n_head=1, vocab_size=9),
        LlamaConfig.from_dict({"rope_scaling": {"type": "bogus"}, "num_hidden_layers": 1, "vocab_size": 9}),
        GPT2Config(n_embd=2**25, n_layer=1, n_head=1, vocab_size=2**29),  # an embedding of 2^56 bytes
    ],
)
def test_a_configuration_that_no_model_can_be_built_from_is_a_one_line_error(config):
    message = rf"no {config.model_type} can be built from x\.json \(\w+: .+\): correct its fields"
    with pytest.raises(UserError, match=message) as caught:
        random_model(config, seed=1, where="x.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 3}, r"lacks the weight transformer\.h\.2\.attn\.c_attn\.bias and 11 others"),
        ({"n_layer": 1}, r"has the weight transformer\.h\.1\..* and \d+ others that its"),
        (
            {"n_positions": 16},
            r"weight transformer\.wpe\.weight has shape \(32, 32\), its configuration says \(16, 32\)",
        ),
    ],
)
def test_weights_of_another_architecture_are_refused(tmp_path, change, message):
    GPT2LMHeadModel(GPT2).save_pretrained(tmp_path)
    config = GPT2Config(**{**GPT2.to_dict(), **change})
    with pytest.raises(UserError, match=message):
        load_weights(config, tmp_path, dtype=torch.float32)


def test_filling_checks_names_and_shapes_first():
    model = random_model(GPT2, seed=1)
    state = weights(random_model(GPT2, seed=2))
    before = weights(model)
    broken = {**state, "transformer.wpe.weight": torch.zeros(3, 3)}
    with pytest.raises(UserError, match=r"here: weight transformer\.wpe\.weight has shape \(3, 3\)"):
        fill_weights(model, broken, "here")
    broken = {name: value for name, value in state.items() if "ln_f" not in name}
    with pytest.raises(UserError, match=r"here lacks the weight transformer\.ln_f\.bias and 1 other"):
        fill_weights(model, broken, "here")
    assert equal(before, weights(model))
    fill_weights(model, state, "here")
    assert equal(state, weights(model))


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_a_forward_of_one_sequence_a_row_does_not_read_its_positions(config, monkeypatch):
    model, reads = random_model(config, seed=5).eval(), []
    monkeypatch.setattr(model.config, "use_cache", False)  # as in training
    expected, test = logits(model), torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: reads.append(tensor) or test(tensor))
    with attention_within_documents({"input_ids": TOKENS}, model.config):
        assert logits(model).equal(expected)
    assert not reads
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]] * 2)
    with torch.no_grad():
        found = model(TOKENS, position_ids=packed).logits  # afterwards they are looked for again
        alone = model(TOKENS[:, 5:]).logits
    assert reads
    assert torch.allclose(found[:, 5:], alone, atol=1e-5)
