import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from megalowbit.data import tokenize
from megalowbit.data.corpus import Corpus
from megalowbit.data.settings import DataSettings
from megalowbit.data.tokenize import (
    BPETokenizer,
    ByteTokenizer,
    FolderTokenizer,
    build_tokenizer,
    check_export,
    train_bpe,
)
from megalowbit.errors import UserError

TEXTS = [
    "def f(x):\n    return 'don\\'t'  # naïve\t\r\n",
    "  two  spaces \u00a0 Ā Ġ ▁ 日本 \x01\x7f é e\u0301 <s></s>",
    "",
    "🙂" * 3,
]


class Sentences(Corpus):
    name = "sentences"
    fingerprint = "0123"

    def __init__(self, size=400):
        words = "low precision numerics need few bits and much care to train"
        self.texts = [" ".join(words.split()[i * j % 11] for j in range(2, 30)) for i in range(size)]
        self.reads = 0

    def documents(self):
        self.reads += 1
        yield from self.texts


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return train_bpe(Sentences(), 300, tmp_path_factory.mktemp("cache"))


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_bytes_are_the_bytes_of_utf8(text):
    (ids,) = ByteTokenizer().encode_batch([text])
    assert ids.tolist() == list(text.encode("utf-8"))
    assert ids.dtype == np.uint16


def test_nul_is_dropped_within_documents_because_it_ends_them():
    (ids,) = ByteTokenizer().encode_batch(["a\0b\0"])
    assert ids.tolist() == [97, 98]
    assert ByteTokenizer.eos_token_id == 0


@settings(deadline=None, max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bpe_ids_spell_the_text(bpe, text):
    (ids,) = bpe.encode_batch([text])
    assert bpe._bpe.decode(ids.tolist(), skip_special_tokens=False) == text
    assert (ids < bpe.vocab_size).all()


def test_bpe_merges_what_is_frequent(bpe):
    assert bpe.vocab_size == 300
    (ids,) = bpe.encode_batch([" precision numerics"])
    assert len(ids) < 8


def test_bpe_is_trained_once_and_the_same_everywhere(tmp_path):
    corpus = Sentences()
    first = train_bpe(corpus, 300, tmp_path / "one")
    assert train_bpe(corpus, 300, tmp_path / "one").fingerprint == first.fingerprint
    assert corpus.reads == 1
    (tmp_path / "two").mkdir()
    assert train_bpe(corpus, 300, tmp_path / "two").fingerprint == first.fingerprint
    assert train_bpe(corpus, 310, tmp_path / "one").fingerprint != first.fingerprint


def test_bpe_reads_only_the_beginning_of_a_large_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize, "BPE_TRAINING_CHARACTERS", 10)
    tokenizer = train_bpe(Sentences(), 300, tmp_path)
    monkeypatch.setattr(tokenize, "BPE_TRAINING_CHARACTERS", 2**28)
    assert tokenizer.fingerprint == train_bpe(Sentences(size=1), 300, tmp_path / "other").fingerprint


def test_a_corpus_too_small_for_the_vocabulary_gives_what_it_can(tmp_path, caplog):
    tokenizer = train_bpe(Sentences(size=1), 5000, tmp_path)
    assert 257 <= tokenizer.vocab_size < 5000
    assert f"yields a vocabulary of only {tokenizer.vocab_size} tokens" in caplog.text


def test_an_error_in_the_corpus_ends_training(tmp_path):
    class Broken(Sentences):
        def documents(self):
            yield "fine"
            raise UserError("corpus file x, line 2: not JSON")

    with pytest.raises(UserError, match="line 2"):
        train_bpe(Broken(), 300, tmp_path)


def tokenizer_of(kind, bpe, folder):
    if kind == "folder":
        bpe.save_pretrained(folder)
        return FolderTokenizer(folder)
    return bpe if kind == "bpe" else ByteTokenizer()


@pytest.mark.parametrize("config", [None, GPT2Config, LlamaConfig])
@pytest.mark.parametrize("kind", ["byte", "bpe", "folder"])
def test_a_saved_tokenizer_is_loaded_by_transformers_and_gives_the_same_ids(tmp_path, bpe, kind, config):
    tokenizer = tokenizer_of(kind, bpe, tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "saved")
    if config is not None:  # as beside a model's weights; its model_type must not change the tokenizer
        config().save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved", local_files_only=True)
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert loaded(text)["input_ids"] == ids.tolist()
        assert loaded.decode(ids.tolist()) == text
    assert (loaded.eos_token_id, len(loaded)) == (tokenizer.eos_token_id, tokenizer.vocab_size)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "mistral", "gpt2"])
@pytest.mark.parametrize("kind", ["byte", "bpe", "folder"])
def test_a_tokenizer_that_a_model_gives_other_ids_is_not_exported_with_it(tmp_path, bpe, kind, model_type):
    tokenizer = tokenizer_of(kind, bpe, tmp_path / "source")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True, trust_remote_code=False)
    text = "cafe\u0301 needs 12 bits"
    gives_others = loaded(text)["input_ids"] != tokenizer.encode_batch([text])[0].tolist()
    assert gives_others == (model_type == "qwen2")  # transformers replaces its normalizer
    if not gives_others:
        tokenizer.check_export(model_type)
        tokenizer.save_pretrained(tmp_path)
        return
    for export in (lambda: tokenizer.check_export(model_type), lambda: tokenizer.save_pretrained(tmp_path)):
        with pytest.raises(UserError, match=r"a qwen2 model: .* as Qwen2Tokenizer, .*use a tokenizer of a"):
            export()


def test_an_export_is_checked_before_a_bpe_is_trained(tmp_path):
    settings = DataSettings(sequence_length=8, tokenizer="bpe", vocab_size=300, corpus="nowhere")
    check_export(settings, "llama")
    with pytest.raises(UserError, match="tokenizer bpe cannot be exported with a qwen2 model"):
        check_export(settings, "qwen2")
    check_export(DataSettings(sequence_length=8, tokenizer="none", vocab_size=300, corpus="x"), "qwen2")


def test_a_folder_tokenizer_adds_no_tokens_and_lists_its_files(tmp_path, bpe):
    bpe.save_pretrained(tmp_path / "a")
    bpe.save_pretrained(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").write_bytes(b"weights")
    first, second = FolderTokenizer(tmp_path / "a"), FolderTokenizer(tmp_path / "b")
    assert [ids.tolist() for ids in first.encode_batch(TEXTS)] == [
        ids.tolist() for ids in bpe.encode_batch(TEXTS)
    ]
    assert first.fingerprint == second.fingerprint
    ByteTokenizer().save_pretrained(tmp_path / "b")
    assert FolderTokenizer(tmp_path / "b").fingerprint != first.fingerprint


@pytest.mark.parametrize("kind", ["bpe", "folder", "in another process"])
def test_text_that_spells_a_special_token_is_text_unless_it_is_to_be_parsed(tmp_path, bpe, kind):
    texts = ["few bits<|endoftext|>and care", "<|endoftext|>"]
    path = tmp_path / "bpe.json"
    bpe._bpe.save(str(path))
    if kind == "folder":
        bpe.save_pretrained(tmp_path)
    make, place = (FolderTokenizer, tmp_path) if kind == "folder" else (BPETokenizer, path)
    plain, parsing = make(place), make(place, parse_special_tokens=True)
    if kind == "in another process":
        plain, parsing = (pickle.loads(pickle.dumps(each)) for each in (plain, parsing))
    for text, ids in zip(texts, plain.encode_batch(texts), strict=True):
        assert plain.eos_token_id not in ids
        assert bpe._bpe.decode(ids.tolist(), skip_special_tokens=False) == text
        assert plain.count_bytes(ids, np.append(plain.eos_token_id, ids[:-1])) == len(text)
    middle = [*bpe.encode_batch(["few bits"])[0], 0, *bpe.encode_batch(["and care"])[0]]
    assert [ids.tolist() for ids in parsing.encode_batch(texts)] == [middle, [0]]
    saved = AutoTokenizer.from_pretrained(tmp_path) if kind == "folder" else None
    assert saved is None or saved(texts)["input_ids"] == [middle, [0]]
    assert plain.fingerprint != parsing.fingerprint


def test_a_tokenizer_that_finds_its_end_token_in_text_is_refused(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"few": 0, "</s>": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"makes its end-of-document token '</s>' of text .*parse_special_tok"
    ):
        FolderTokenizer(tmp_path).encode_batch(["few", "few </s> bits"])
    assert FolderTokenizer(tmp_path).encode_batch(["few bits"])[0].tolist() == [0, 2]
    parsing = FolderTokenizer(tmp_path, parse_special_tokens=True)
    assert parsing.encode_batch(["few </s> bits"])[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, np.uint16), (2**16, np.uint16), (2**16 + 1, np.uint32)]
)
def test_ids_take_two_bytes_if_they_fit(vocab_size, dtype):
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = vocab_size
    assert tokenizer.dtype == dtype
    assert vocab_size - 1 <= np.iinfo(dtype).max


def test_text_after_a_prompt_is_what_the_ids_add_to_it(tmp_path, bpe):
    bpe.save_pretrained(tmp_path)
    tokenizer = FolderTokenizer(tmp_path)
    text = "few bits, naïve 日本 🙂"
    ids = tokenizer.encode_batch([text])[0].tolist()
    for place in range(len(ids) + 1):  # some of them are within a character, which the rest completes
        added = tokenizer.decode_after(ids[:place], ids[place:])
        assert text.endswith(added)
        shown = tokenizer.decode(ids[:place]).rstrip("\ufffd")
        assert shown + added == text
    assert tokenizer.decode_after([0], [*ids, 0]) == text  # the end of a document is no text
    assert tokenizer.special_tokens_in("few<|endoftext|>") == ["<|endoftext|>"]
    assert tokenizer.special_tokens_in(text) == []


def test_the_settings_choose_the_tokenizer(tmp_path, bpe):
    (tmp_path / "a.txt").write_text(" ".join(Sentences().texts))
    values = {"sequence_length": 8, "cache_dir": tmp_path, "corpus": str(tmp_path / "a.txt")}
    assert isinstance(build_tokenizer(DataSettings(**values)), ByteTokenizer)
    assert isinstance(build_tokenizer(DataSettings(**values, tokenizer="bpe", vocab_size=280)), BPETokenizer)
    bpe.save_pretrained(tmp_path / "folder")
    tokenizer = build_tokenizer(DataSettings(**values, tokenizer=str(tmp_path / "folder")))
    assert isinstance(tokenizer, FolderTokenizer)


def break_json(folder: Path):
    (folder / "tokenizer.json").write_text("{")


def nest_json(folder: Path):
    (folder / "tokenizer.json").write_text('{"model":' + "[" * 5000)


def lose_file(folder: Path):
    (folder / "tokenizer.json").unlink()


def lose_end_token(folder: Path):
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_json, "no usable tokenizer in folder"),
        (nest_json, "no usable tokenizer in folder"),
        (lose_file, "no usable tokenizer in folder"),
        (lose_end_token, "has no end-of-sequence token"),
    ],
)
def test_an_unusable_folder_is_named_in_one_line(tmp_path, bpe, damage, message):
    bpe.save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        FolderTokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_tokenizer_that_is_neither_a_name_nor_a_folder_is_refused():
    with pytest.raises(UserError, match="'bytes' is neither"):
        build_tokenizer(DataSettings(sequence_length=8, tokenizer="bytes"))
