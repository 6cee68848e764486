import json
import os
import shutil
import subprocess
import sys

import pytest
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from megalowbit.data.hf_tokenizers.folder import TEXT_TO_COMPARE, encoded
from megalowbit.data.tokenize import FolderTokenizer
from megalowbit.errors import UserError

TEXTS = [TEXT_TO_COMPARE, "  two  spaces \u00a0 日本 e\u0301 \ufb01", ""]


def qwen2_folder(folder, bpe):
    """A tokenizer of a Qwen2 model, with the vocabulary of `bpe`."""
    stored = json.loads(bpe._bpe.to_str())["model"]
    merges = [tuple(merge) for merge in stored["merges"]]
    Qwen2Tokenizer(stored["vocab"], merges, eos_token="<|endoftext|>").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return folder


def test_a_tokenizer_of_a_qwen2_model_is_exported_with_one(tmp_path, bpe):
    tokenizer = FolderTokenizer(qwen2_folder(tmp_path, bpe))
    tokenizer.check_export("qwen2")
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True, trust_remote_code=False)
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert loaded(text)["input_ids"] == ids.tolist()


@pytest.mark.parametrize("why", ["model_type", "tokenizer_class"])
def test_a_folder_whose_file_transformers_does_not_follow_is_refused(tmp_path, bpe, why):
    made = tokenizers.Tokenizer.from_str(bpe._bpe.to_str())
    made.normalizer = tokenizers.normalizers.NFKC()
    source, kept = tmp_path / "source", tmp_path / "kept"
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>").save_pretrained(kept)
    shutil.copytree(kept, source)
    if why == "model_type":
        (source / "config.json").write_text('{"model_type": "qwen2"}')
    else:
        path = source / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), why: "GPT2Tokenizer"}))
    message = (
        r"loads it as (Qwen2|GPT2)Tokenizer \(tokenizer_class '.*does not give the ids of its tokenizer\.js"
    )
    with pytest.raises(UserError, match=message) as caught:
        FolderTokenizer(source)
    assert "\n" not in str(caught.value)
    # its two remedies
    loaded = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    loaded.save_pretrained(tmp_path / "saved")
    for folder, expected in ((kept, made), (tmp_path / "saved", loaded.backend_tokenizer)):
        for text, ids in zip(TEXTS, FolderTokenizer(folder).encode_batch(TEXTS), strict=True):
            assert ids.tolist() == expected.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("setting", ["truncation", "padding"])
def test_lengths_in_the_file_are_no_ids_of_another_class(tmp_path, bpe, setting):
    """Some files have been saved while their tokenizer cut or filled texts; neither applies here."""
    made = tokenizers.Tokenizer.from_str(bpe._bpe.to_str())
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    if setting == "truncation":
        made.enable_truncation(8)
    else:
        made.enable_padding(length=1000)
    made.save(str(tmp_path / "tokenizer.json"))
    ids = FolderTokenizer(tmp_path).encode_batch([TEXT_TO_COMPARE])[0].tolist()
    assert ids == bpe.encode_batch([TEXT_TO_COMPARE])[0].tolist()


def test_the_fingerprint_knows_the_class_that_a_model_gives_a_folder(tmp_path, bpe):
    stored = json.loads(bpe._bpe.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(stored["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(merge) for merge in stored["merges"]))
    found = []
    for model_type in ("gpt2", "qwen2", "gpt2"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        folder = FolderTokenizer(tmp_path)
        found.append((folder.fingerprint, folder.encode_batch(["cafe\u0301"])[0].tolist()))
    assert found[0] == found[2]
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


@pytest.mark.slow
def test_a_fingerprint_is_that_of_other_processes(tmp_path, bpe):
    folder = qwen2_folder(tmp_path, bpe)
    code = (
        "import pathlib, sys; from megalowbit.data.tokenize import FolderTokenizer; "
        "print(FolderTokenizer(pathlib.Path(sys.argv[1])).fingerprint)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", code, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == FolderTokenizer(folder).fingerprint


@pytest.mark.parametrize("name", ["tokenizer.json", "additional_chat_templates/a.jinja"])
def test_a_folder_with_a_fifo_is_rejected_without_waiting(tmp_path, bpe, name):
    bpe.save_pretrained(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(UserError, match=f"tokenizer file .*{path.name} is a FIFO: remove it"):
        FolderTokenizer(tmp_path)


def test_a_vocabulary_that_lacks_words_of_the_text_cannot_be_compared(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "few": 1}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    assert encoded(lambda: words.encode("few").ids) == [1]
    assert encoded(lambda: words.encode(TEXT_TO_COMPARE).ids) is None
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(tmp_path)
    assert FolderTokenizer(tmp_path).encode_batch(["few few"])[0].tolist() == [1, 1]
