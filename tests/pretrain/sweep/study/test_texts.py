import json
import random

import pytest

from megalowbit.data.text_files.local_files import LocalCorpus
from megalowbit.errors import UserError
from megalowbit.pretrain.sweep.study.study_file import Text
from megalowbit.pretrain.sweep.study.texts import docstrings, write_text

VOCABULARY = [f"w\u00e9rd{number}" for number in range(2000)]


@pytest.fixture
def source(tmp_path):
    """100 files of some hundred bytes: two are equal, and 20 others begin differently and continue alike."""
    folder = tmp_path / "source"
    folder.mkdir()
    draw = random.Random(0)
    common = " ".join(draw.choices(VOCABULARY, k=60))
    for number in range(100):
        own = " ".join(draw.choices(VOCABULARY, k=draw.randint(12, 60)))
        text = {99: "the same " * 20, 98: "the same " * 20}.get(number, own)
        (folder / f"{number}.txt").write_text(f"{text} {common}\n" if number < 20 else f"{text}\n")
    return Text(name="t", source="file", path=folder)


def documents(path):
    return list(LocalCorpus(path).documents())


def phrases(texts):
    return {tuple(words[k : k + 8]) for words in map(str.split, texts) for k in range(len(words) - 7)}


def test_what_is_held_out_are_parts_of_many_documents_that_no_run_reads(source, tmp_path):
    facts = write_text(source, tmp_path / "a", heldout_bytes=4096)
    train, held_out = (documents(tmp_path / "a" / name) for name in ("train.jsonl", "heldout.jsonl"))
    everything = documents(source.path)
    of = [[each for each in everything if part.strip() in each] for part in held_out]
    assert all(len(each) == 1 for each in of)
    assert len(train) + len(held_out) == len({*everything})  # a document is in one of them
    assert {*train} | {each for (each,) in of} == {*everything}
    assert len(held_out) == facts.heldout_documents >= 32
    assert all(len(part.encode()) <= 4096 // 32 for part in held_out)
    assert facts.heldout_bytes == sum(len(each.encode()) for each in held_out) >= 4096
    assert facts.train_bytes == sum(len(each.encode()) for each in train)


def test_documents_that_others_repeat_are_not_held_out(source, tmp_path):
    facts = write_text(source, tmp_path / "a", heldout_bytes=4096)
    train, held_out = (documents(tmp_path / "a" / name) for name in ("train.jsonl", "heldout.jsonl"))
    assert not phrases(train) & phrases(held_out)
    assert facts.heldout_repeated == 0
    tails = [" ".join(each.split()[-8:]) for each in train]
    assert max(map(tails.count, tails)) >= 19  # their ends are alike; the beginning of one may be held out


def test_the_share_of_repeated_phrases_is_told(source, tmp_path):
    draw = random.Random(1)
    shared = " ".join(draw.choices(VOCABULARY, k=8))
    for path in source.path.iterdir():  # one phrase of many in each
        path.write_text(" ".join(draw.choices(VOCABULARY, k=40)) + f" {shared} " + path.read_text())
    facts = write_text(source, tmp_path / "a", heldout_bytes=20_480)
    train, held_out = (documents(tmp_path / "a" / name) for name in ("train.jsonl", "heldout.jsonl"))
    in_parts = [tuple(words[k : k + 8]) for words in map(str.split, held_out) for k in range(len(words) - 7)]
    trained = phrases(train)
    expected = sum(phrase in trained for phrase in in_parts) / len(in_parts)
    assert 0 < expected <= 0.05
    assert facts.heldout_repeated == round(expected, 4)


def test_a_text_is_the_same_every_time_and_a_changed_file_is_refused(source, tmp_path):
    facts = write_text(source, tmp_path / "a", heldout_bytes=3000)
    assert write_text(source, tmp_path / "b", heldout_bytes=3000) == facts
    before = (tmp_path / "a" / "train.jsonl").stat().st_mtime_ns
    assert write_text(source, tmp_path / "a", heldout_bytes=3000) == facts
    assert (tmp_path / "a" / "train.jsonl").stat().st_mtime_ns == before
    with pytest.raises(UserError, match=r"was made from .*'heldout_bytes': 3000.*use another --out"):
        write_text(source, tmp_path / "a", heldout_bytes=4000)
    with (tmp_path / "a" / "train.jsonl").open("a") as file:
        file.write(json.dumps({"text": "more"}) + "\n")
    with pytest.raises(UserError, match="is not what was written: remove"):
        write_text(source, tmp_path / "a", heldout_bytes=3000)


def test_a_text_whose_files_have_changed_is_refused_and_without_them_its_copy_counts(source, tmp_path):
    folder = tmp_path / "out" / "texts" / "t"
    facts = write_text(source, folder, heldout_bytes=3000)
    first = sorted(source.path.iterdir())[0]
    before = first.read_text()
    first.write_text(before + "and more\n")
    with pytest.raises(
        UserError, match=rf"{source.path} has changed since text 't' .* --out instead of {tmp_path}/out$"
    ):
        write_text(source, folder, heldout_bytes=3000)
    first.write_text(before)
    assert write_text(source, folder, heldout_bytes=3000) == facts
    source.path.rename(tmp_path / "gone")
    assert write_text(source, folder, heldout_bytes=3000) == facts


def test_a_text_that_is_too_small_or_missing_is_refused(source, tmp_path):
    with pytest.raises(
        UserError, match=r"text 't' has 99 different .* too few to hold out 60,000 bytes in 32"
    ):
        write_text(source, tmp_path / "a", heldout_bytes=60_000)
    assert not (tmp_path / "a").exists()
    gone = Text(name="t", source="file", path=tmp_path / "gone")
    with pytest.raises(UserError, match="gone does not exist"):
        write_text(gone, tmp_path / "a", heldout_bytes=3000)
    unknown = Text(name="t", source="docstrings", packages=("no_such_package",))
    with pytest.raises(UserError, match="no installed package 'no_such_package'"):
        write_text(unknown, tmp_path / "a", heldout_bytes=3000)


def test_docstrings_are_the_long_ones_of_modules_classes_and_functions(tmp_path):
    long = {name: f"{name} " + "word " * 50 for name in ("module", "class", "method", "function")}
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(f'"""{long["module"]}"""\n')
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "good.py").write_text(
        f'"""{long["module"]}"""\nx = """{"not a docstring " * 20}"""\n'
        f'class A:\n    """{long["class"]}"""\n    def f(self):\n        """{long["method"]}"""\n'
        f'async def g():\n    """{long["function"]}"""\ndef h():\n    """Short."""\n'
    )
    found = list(docstrings(tmp_path))
    assert sorted(each.split()[0] for each in found) == ["class", "function", "method", "module"]
    assert all(each.endswith("word \n") for each in found)
