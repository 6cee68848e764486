import re

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from megalowbit.data.hf_tokenizers.token_bytes import letters_of_bytes
from megalowbit.data.tokenize import ByteTokenizer, FolderTokenizer

UNUSUAL = ["naïve日本 🙂🙂 e\u0301", " leading ▁ and Ġ", "a", "日", "plain text </s> inside", "🙂"]


def save(folder, vocabulary, merges=(), end="</s>", **stages):
    model = tokenizers.models.BPE(
        vocab=vocabulary, merges=list(merges), byte_fallback=True, unk_token="<unk>"
    )
    made = tokenizers.Tokenizer(model)
    for name, stage in stages.items():
        setattr(made, name, stage)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end).save_pretrained(folder)
    return FolderTokenizer(folder)


def like_sentencepiece(folder, kind):
    """A vocabulary with pieces for some letters, and bytes for all others: `llama` or `metaspace`."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abdeilnpstxï", "▁a", "▁p"]
    if kind == "llama":
        prepend = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback()]
        parts += [tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)]
        stages = {
            "normalizer": tokenizers.normalizers.Sequence(prepend),
            "decoder": tokenizers.decoders.Sequence(parts),
        }
    else:
        parts = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Metaspace(prepend_scheme="never")]
        stages = {
            "pre_tokenizer": tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never"),
            "decoder": tokenizers.decoders.Sequence(parts),
        }
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return save(folder, vocabulary, [("▁", "a"), ("▁", "p")], **stages)


def bytes_of_pieces(tokenizer, ids, kind):
    """What each id stands for, and nothing if it ends a document."""
    bytes_of_letters = {letter: byte for byte, letter in letters_of_bytes().items()}
    backend = tokenizer._bpe if kind == "bpe" else tokenizer._tokenizer.backend_tokenizer
    for number in ids.tolist():
        piece = backend.id_to_token(number)
        if number == tokenizer.eos_token_id:
            yield b""
        elif kind in ("bpe", "bpe folder"):
            yield bytes(bytes_of_letters[letter] for letter in piece)
        elif byte := re.fullmatch("<0x(..)>", piece):
            yield bytes.fromhex(byte[1])
        else:
            yield piece.replace("▁", " ").encode()


@pytest.mark.parametrize("kind", ["bpe", "bpe folder", "llama", "metaspace"])
def test_bytes_of_any_part_of_a_text_are_those_of_its_ids(tmp_path, bpe, kind):
    if kind == "bpe folder":
        bpe.save_pretrained(tmp_path)
    tokenizer = {
        "bpe": lambda: bpe,
        "bpe folder": lambda: FolderTokenizer(tmp_path),
    }.get(kind, lambda: like_sentencepiece(tmp_path, kind))()
    end = np.array([tokenizer.eos_token_id], tokenizer.dtype)
    tokens, pieces = [end], [b""]
    # "▁" is a space to SentencePiece
    texts = [text.replace("▁", "" if "bpe" not in kind else "▁") for text in UNUSUAL]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        of_text = list(bytes_of_pieces(tokenizer, ids, kind))
        if kind == "llama":
            assert of_text[0].startswith(b" ")  # which is not in the text
            of_text[0] = of_text[0][1:]
        assert b"".join(of_text) == text.encode()
        tokens, pieces = [*tokens, ids, end], [*pieces, *of_text, b""]
    tokens = np.concatenate(tokens)
    for place in range(1, len(tokens) + 1):  # many of them are within a character
        for start, stop in ((1, place), (place, len(tokens))):
            found = tokenizer.count_bytes(tokens[start:stop], tokens[start - 1 : stop - 1])
            assert found == len(b"".join(pieces[start:stop]))
    is_second = np.arange(1, len(tokens)) % 2 == 0  # what is not predicted is left out
    found = tokenizer.count_bytes(tokens[1:][is_second], tokens[:-1][is_second])
    assert found == len(b"".join(pieces[2::2]))


def test_a_space_that_tokenising_puts_before_a_document_is_no_byte_of_it(tmp_path, bpe):
    made = tokenizers.Tokenizer.from_str(bpe._bpe.to_str())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    tokenizer = FolderTokenizer(tmp_path)
    (ids,) = tokenizer.encode_batch(["few bits"])
    assert made.decode(ids.tolist()) == " few bits"
    assert tokenizer.count_bytes(ids, np.append(tokenizer.eos_token_id, ids[:-1])) == len("few bits")


def test_an_added_token_is_text_also_if_it_begins_like_a_space(tmp_path):
    like_sentencepiece(tmp_path, "llama")
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.add_special_tokens(["▁a"])  # in the vocabulary already, as the marks of CodeLlama
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = FolderTokenizer(tmp_path)
    ids, before = np.array([made.token_to_id("▁a")]), np.array([tokenizer.eos_token_id])
    assert tokenizer.count_bytes(ids, before) == len("▁a".encode())


def test_special_text_within_a_document_has_its_own_bytes(tmp_path, bpe):
    made = tokenizers.Tokenizer.from_str(bpe._bpe.to_str())
    made.add_special_tokens(["<|ü|>"])
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    tokenizer = FolderTokenizer(tmp_path, parse_special_tokens=True)
    (ids,) = tokenizer.encode_batch(["a<|ü|>b"])
    assert len(ids) == 3
    assert tokenizer.count_bytes(ids[1:], ids[:-1]) == len("<|ü|>b".encode())


def test_bytes_are_not_known_where_a_vocabulary_keeps_no_spaces(tmp_path, caplog):
    vocabulary = {"<unk>": 0, "</s>": 1, "word": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(tmp_path)
    ids = np.array([2, 2, 1])
    assert FolderTokenizer(tmp_path).count_bytes(ids[1:], ids[:-1]) == 0
    assert "bits per byte are not counted" in caplog.text


def counted(tokenizer, text):
    ids = np.concatenate([[tokenizer.eos_token_id], *tokenizer.encode_batch([text])])
    return tokenizer.count_bytes(ids[1:], ids[:-1])


def unigram(folder, **stages):
    """Like T5: letters, no bytes of others."""
    pieces = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("▁", -2.0),
        *((letter, -3.0) for letter in "abcdehtü"),
        ("▁the", -1.0),
    ]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0, byte_fallback=False))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    for name, stage in stages.items():
        setattr(made, name, stage)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>").save_pretrained(
        folder
    )
    return FolderTokenizer(folder)


def test_a_text_with_an_unknown_token_has_no_known_bytes(tmp_path, caplog):
    tokenizer = unigram(tmp_path)
    for text in ("the bad", "the übe  the", "a"):
        assert counted(tokenizer, text) == len(text.encode())
    assert not caplog.text
    for text in ("the 漢字漢字", "x"):
        assert counted(tokenizer, text) == 0
    assert "('<unk>' is in the text and may stand for any), so bits per byte are not counted" in caplog.text


NORMALIZERS = {
    "NFC": tokenizers.normalizers.NFC(),
    "NFKC": tokenizers.normalizers.NFKC(),
    "Lowercase": tokenizers.normalizers.Lowercase(),
    "Replace": tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
    "Strip": tokenizers.normalizers.Strip(),
    "Prepend": tokenizers.normalizers.Prepend("x"),
}


@pytest.mark.parametrize("kind", ["byte-level", "unigram"])
@pytest.mark.parametrize("name", NORMALIZERS)
def test_bytes_are_not_known_where_the_text_is_changed_before(tmp_path, bpe, caplog, name, kind):
    spaces = tokenizers.normalizers.Sequence([])
    for normalizer, is_known in ((NORMALIZERS[name], False), (spaces, True)):
        sequence = tokenizers.normalizers.Sequence([spaces, normalizer])
        if kind == "unigram":
            tokenizer = unigram(tmp_path, normalizer=sequence)
        else:
            made = tokenizers.Tokenizer.from_str(bpe._bpe.to_str())
            made.normalizer = sequence
            PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>").save_pretrained(
                tmp_path
            )
            tokenizer = FolderTokenizer(tmp_path)
        text = "the bad  a"
        assert counted(tokenizer, text) == (len(text.encode()) if is_known else 0)
        assert (f"its normalizer {name} changes the text" in caplog.text) != is_known
        caplog.clear()


def test_bytes_are_not_known_where_text_may_be_left_out(tmp_path, caplog):
    parts = tokenizers.pre_tokenizers
    removed = parts.Sequence([parts.Split(" ", "removed"), parts.ByteLevel(add_prefix_space=False)])
    kept = parts.Sequence([parts.Split(" ", "isolated"), parts.ByteLevel(add_prefix_space=False)])
    letters = list(letters_of_bytes().values())
    cases = [
        (letters, {}, removed, 0, "its pre-tokenizer Split may remove text"),
        (letters, {}, parts.Sequence([parts.WhitespaceSplit(), parts.Metaspace()]), 0, "WhitespaceSplit"),
        (letters, {"end_of_word_suffix": "</w>"}, kept, 0, "marks of words"),
        (letters[:0x80], {}, kept, 0, "it drops bytes that its vocabulary lacks"),
        (letters[:0xF5], {}, kept, len("a ü b".encode()), ""),
    ]
    for vocabulary, options, pre_tokenizer, expected, message in cases:
        caplog.clear()
        numbers = {letter: number for number, letter in enumerate(["</s>", *vocabulary])}
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=numbers, merges=[], **options))
        made.pre_tokenizer, made.decoder = pre_tokenizer, tokenizers.decoders.ByteLevel()
        PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(tmp_path)
        assert counted(FolderTokenizer(tmp_path), "a ü b") == expected
        assert message in caplog.text


def test_bytes_are_known_for_the_saved_byte_tokenizer(tmp_path):
    ByteTokenizer().save_pretrained(tmp_path)
    for text in UNUSUAL:
        assert counted(FolderTokenizer(tmp_path), text) == len(text.encode())


def test_a_token_that_takes_the_spaces_beside_it_has_no_known_bytes(tmp_path, bpe):
    made = tokenizers.Tokenizer.from_str(bpe._bpe.to_str())
    made.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    tokenizer = FolderTokenizer(tmp_path)
    assert counted(tokenizer, "few bits") == len("few bits")
    assert counted(tokenizer, "few   <mask> bits") == 0
