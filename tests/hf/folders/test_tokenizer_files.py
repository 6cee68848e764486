"""A tokenizer that goes through our checkpoints comes back as it was."""

import json

import pytest
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from megalowbit.data.tokenize import ByteTokenizer
from megalowbit.hf.checkpoint import export_checkpoint, import_checkpoint
from megalowbit.hf.folders.tokenizer_files import copy_tokenizer, has_tokenizer, tokenizer_folder

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


def hf_folder(folder):
    config = GPT2Config(
        vocab_size=256, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=5, eos_token_id=7
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "<pad>", "additional_special_tokens": ["<user>"]})
    tokenizer.chat_template = {"default": CHAT, "tools": CHAT + "!"}
    tokenizer.save_pretrained(folder)
    (folder / "tokenization_own.py").write_text("raise SystemExit")
    return folder


def tokenizer_files(folder):
    paths = [
        path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".safetensors", ".md")
    ]
    names = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return {name: data for name, data in names.items() if "config.json" not in name or "token" in name}


@pytest.mark.parametrize("is_cache", [False, True])
def test_a_round_trip_keeps_special_tokens_and_chat_templates(tmp_path, is_cache):
    source = hf_folder(tmp_path / "source")
    if is_cache:  # of links, as Hugging Face keeps them
        linked = tmp_path / "linked"
        for path in [path for path in source.rglob("*") if path.is_file()]:
            link = linked / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
        source = linked
    import_checkpoint(source, tmp_path / "start")
    export_checkpoint(tmp_path / "start", tmp_path / "back")
    expected = tokenizer_files(source)
    del expected["tokenization_own.py"]
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= expected.keys()
    assert tokenizer_files(tmp_path / "back") == expected
    first, back = (AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "back"))
    chat = [{"role": "user", "content": "hello"}]
    assert back.apply_chat_template(chat) == first.apply_chat_template(chat)
    assert back("a<user>b").input_ids == first("a<user>b").input_ids
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (5, 7)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "start" / "tokenizer")("a").input_ids == first("a").input_ids
    )


def test_a_folder_without_a_tokenizer_leaves_none(tmp_path):
    source = hf_folder(tmp_path / "source")
    for path in source.rglob("*"):
        if path.is_file() and ("token" in path.name or "chat" in path.name):
            path.unlink()
    assert not has_tokenizer(source)
    copy_tokenizer(source, tmp_path / "target", with_config=True)
    import_checkpoint(source, tmp_path / "start")
    assert not (tmp_path / "target").exists()
    assert not (tmp_path / "start" / "tokenizer").exists()


def test_a_named_tokenizer_takes_precedence_over_the_kept_one(tmp_path):
    import_checkpoint(hf_folder(tmp_path / "source"), tmp_path / "start")
    export_checkpoint(tmp_path / "start", tmp_path / "back", tokenizer=ByteTokenizer())
    assert AutoTokenizer.from_pretrained(tmp_path / "back").chat_template is None


def test_the_tokenizer_of_weights_is_found_wherever_they_are(tmp_path):
    source = hf_folder(tmp_path / "source")
    assert tokenizer_folder(source) == source
    start, run = tmp_path / "start", tmp_path / "run"
    import_checkpoint(source, start)
    step = "step-00000000"
    assert tokenizer_folder(start) == tokenizer_folder(start / step) == start / "tokenizer"
    run.mkdir()
    start.rename(run / "checkpoints")
    assert tokenizer_folder(run) is None  # a run has it beside the folder of its checkpoints
    (run / "checkpoints" / "tokenizer").rename(run / "tokenizer")
    for path in (run, run / "checkpoints", run / "checkpoints" / step):
        assert tokenizer_folder(path) == run / "tokenizer"
    (run / "checkpoints" / step / "manifest.json").unlink()
    assert tokenizer_folder(run) is None
    assert tokenizer_folder(tmp_path) is None
