"""`megalowbit generate` writes what a model prepared with the public API writes."""

import json
import shutil

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import megalowbit as mlb
from launchers import training_text, write_config
from megalowbit.commands.models.generate import main
from megalowbit.distributed.process_group import ProcessIdentity
from megalowbit.errors import UserError
from megalowbit.hf.training_checkpoint import stored_static_inputs
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.estimate.generate import generator_of
from megalowbit.pretrain.run import pretrain

PROMPT = training_text()[:12]
GREEDY = {"max_tokens": 16, "temperature": 0.0, "seed": 0}


def trained(folder, **block):
    """A run of a few steps with learning rates that make its model say something."""
    config = write_config(folder, block={"recipe": "nvfp4", "run": {"steps": 6}, **block})
    settings = load_config(config, ["optimizer.params.lr=0.02"], world_size=1)
    pretrain(settings, ProcessIdentity(), run_dir=folder / "run", is_resume=False)
    return folder / "run"


def expected(run, *, recipe=None, static=None):
    """The greedy continuation by transformers, of the run's exported model."""
    block = json.loads((run / "config.json").read_text())["megalowbit"]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[block["precision"]]
    model = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32).to(dtype).eval()
    if recipe is not None:
        mlb.convert(model, recipe=recipe)
    if static is not None:
        mlb.use_static_inputs(model, static)
    ids = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, pad_token_id=0
        )
    return bytes(output[0, ids.shape[1] :].tolist()).decode("utf-8", errors="replace")


def test_a_run_writes_with_its_recipe_and_recorded_inputs(tmp_path):
    run = trained(tmp_path)
    static = stored_static_inputs(run / "checkpoints" / "step-00000006")
    found = generator_of(run)
    text, count = found.write(PROMPT, **GREEDY)
    assert (text, count) == (expected(run, recipe="nvfp4", static=static), 16)
    assert found.lines[1:] == (
        "recipe    nvfp4",
        "inputs    static: quantised by numbers recorded at the end of training",
    )
    exported = generator_of(run / "hf")
    assert exported.write(PROMPT, **GREEDY)[0] == expected(run, recipe="nvfp4")
    assert exported.lines[1] == "recipe    nvfp4"
    plain = generator_of(run, recipe="bf16")
    assert plain.write(PROMPT, **GREEDY)[0] == expected(run)
    elsewhere = shutil.copytree(run / "hf", tmp_path / "elsewhere")
    assert generator_of(elsewhere).lines[1] == "recipe    none, nothing is rounded: --recipe names one"


def test_after_a_late_switch_nothing_is_rounded_unless_asked_for(tmp_path):
    run = trained(tmp_path, late_switch={"at": 3})
    found = generator_of(run)
    assert found.lines[-1].startswith("forward   rounds nothing, as the run since its late switch")
    assert found.write(PROMPT, **GREEDY)[0] == expected(run)
    rounded = generator_of(run, forward="recipe")
    assert rounded.lines[-1].startswith("inputs    ")
    logits = [each.model(torch.tensor([[1, 2, 3]])).logits for each in (found, rounded)]
    assert not logits[0].equal(logits[1])


def test_the_export_of_a_run_runs_as_the_run_did_when_it_was_written(tmp_path):
    run = trained(tmp_path, late_switch={"at": 3})
    shutil.copytree(run / "hf", run / "hf-step-00000002")  # as if an earlier end had been there
    found = generator_of(run / "hf")
    assert found.lines[-1] == generator_of(run).lines[-1]
    assert found.write(PROMPT, **GREEDY)[0] == expected(run)
    rounded = expected(run, recipe="nvfp4")
    for path, forward in ((run / "hf", "recipe"), (run / "hf-step-00000002", "checkpoint")):
        found = generator_of(path, forward=forward)
        assert found.write(PROMPT, **GREEDY)[0] == rounded
        assert not found.lines[-1].startswith("forward")


def model_folder(folder, tokenizer, **generation):
    """A random LLaMA with a tokenizer of the tokenizers library; `generation` are its generation settings."""
    torch.manual_seed(0)
    size = tokenizer.get_vocab_size()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=size, max_position_embeddings=64, initializer_range=0.3, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def like_sentencepiece():
    """Words with the space before them, which the decoder takes away at the beginning of a text."""
    pieces = ["</s>", "▁", *"abc", *(f"▁{letter}" for letter in "abc"), "<|user|>"]
    merges = [("▁", letter) for letter in "abc"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    made.add_special_tokens(["</s>", "<|user|>"])
    return made


@torch.no_grad()
def most_probable(folder, ids, count, ends=(0,)):
    """The ids of the greedy text, by whole forwards."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = list(ids)
    while len(text) < len(ids) + count and not {*text[len(ids) :][-1:]} & {*ends}:
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text


def test_a_text_keeps_the_space_between_prompt_and_continuation(tmp_path):
    made = like_sentencepiece()
    writer = generator_of(model_folder(tmp_path, made))
    found = {}
    for prompt in ("a b", "b", "c", "ab cb", " a"):
        ids = most_probable(tmp_path, made.encode(prompt).ids, 16)
        found[prompt] = writer.write(prompt, **GREEDY)[0]
        assert prompt.lstrip() + found[prompt] == made.decode(ids)
    assert {text[:1] == " " for text in found.values()} == {False, True}


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"bad_words_ids": [[5], [6]]},
        {"encoder_repetition_penalty": 3.0, "repetition_penalty": 2.0, "no_repeat_ngram_size": 2},
        {"sequence_bias": [[[4], 50.0]], "min_new_tokens": 12},
        {"do_sample": True, "min_p": 0.9, "typical_p": 0.2, "top_k": 1, "epsilon_cutoff": 0.5},
        {"exponential_decay_length_penalty": [1, 3.0]},
        {"do_sample": True, "num_return_sequences": 2},
        {"stop_strings": ["a"]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_folders_generation_settings_change_no_text(tmp_path, settings):
    made = like_sentencepiece()
    plain = generator_of(model_folder(tmp_path / "plain", made))
    found = generator_of(model_folder(tmp_path / "set", made, **settings))
    ids = made.encode("a b").ids
    text = most_probable(tmp_path / "set", ids, 16)
    assert found.write("a b", **GREEDY) == (made.decode(text).removeprefix("a b"), len(text) - len(ids))
    sampled = {"max_tokens": 12, "temperature": 1.0, "seed": 1}
    assert found.write("a b", **sampled) == plain.write("a b", **sampled)


def test_a_folders_further_end_tokens_end_a_text_if_the_tokenizers_is_one_of_them(tmp_path):
    made = like_sentencepiece()
    ids = made.encode("a b").ids
    plain = most_probable(model_folder(tmp_path / "plain", made), ids, 16)
    third = plain[len(ids) + 2]
    for listed, ends in (([0, third], (0, third)), ([third], (0,)), (third, (0,))):
        folder = model_folder(tmp_path / str(listed), made, eos_token_id=listed)
        text = most_probable(folder, ids, 16, ends)
        assert generator_of(folder).write("a b", **GREEDY)[1] == len(text) - len(ids)
        assert (len(text) <= len(ids) + 3) == (third in ends)


@pytest.mark.parametrize("parses", [False, True, None])
def test_a_prompt_has_special_tokens_as_the_training_of_the_run(tmp_path, parses, caplog):
    made, prompt = like_sentencepiece(), "a<|user|>b"
    folder = model_folder(tmp_path / "hf", made)
    if parses is not None:
        block = {"precision": "fp32", "data": {"tokenizer": "x", "parse_special_tokens": parses}}
        (tmp_path / "config.json").write_text(json.dumps({"megalowbit": block}))
    writer = generator_of(folder)
    token = made.token_to_id("<|user|>")
    assert (token in writer.tokenizer.encode_batch([prompt])[0]) == bool(parses)
    writer.write(prompt, **GREEDY)
    message = "the prompt spells the special token '<|user|>', which is read as text: --parse-special-tokens"
    assert (message in caplog.text) == (parses is None)
    forced = generator_of(folder, parse_special_tokens=True)
    assert token in forced.tokenizer.encode_batch([prompt])[0]
    caplog.clear()
    forced.write(prompt, **GREEDY)
    assert not caplog.text


def test_sampling_repeats_with_its_seed_and_stops_at_the_models_positions(tmp_path, capsys):
    run = trained(tmp_path)
    writer = generator_of(run)
    first, second, other = (writer.write("", max_tokens=8, temperature=1.0, seed=seed) for seed in (3, 3, 4))
    assert first == second
    assert first != other
    positions = writer.model.config.max_position_embeddings
    assert writer.write("a" * (positions - 2), max_tokens=50, temperature=1.0, seed=0)[1] <= 2
    with pytest.raises(UserError, match=f"the prompt has {positions} tokens, and the model {positions} pos"):
        writer.write("a" * positions, max_tokens=1, temperature=1.0, seed=0)
    capsys.readouterr()
    assert main([str(run), "--prompt", PROMPT, "--greedy", "--max-tokens", "16"]) == 0
    printed = capsys.readouterr()
    assert printed.out == PROMPT + writer.write(PROMPT, **GREEDY)[0] + "\n"
    assert printed.err.splitlines()[0].startswith("model     ")
    shutil.rmtree(run / "tokenizer")
    with pytest.raises(UserError, match=r"--tokenizer"):
        generator_of(run, tokenizer="nowhere")
    assert generator_of(run).tokenizer.vocab_size == 256  # the configuration says that it is of bytes
