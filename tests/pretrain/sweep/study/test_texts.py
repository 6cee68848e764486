import json
import random

import pytest

from megalowbit.data.local_files import LocalCorpus
from megalowbit.errors import UserError
from megalowbit.pretrain.sweep.study.study_file import Text
from megalowbit.pretrain.sweep.study.texts import docstrings, write_text


@pytest.fixture
def source(tmp_path):
    """40 files of 100 bytes, two of them equal."""
    folder = tmp_path / "source"
    folder.mkdir()
    draw = random.Random(0)
    for number in range(40):
        text = f"{min(number, 38):02d}" + "".join(draw.choices("abcdé", k=5))
        (folder / f"{number}.txt").write_text(("39 the same" if number > 37 else text).ljust(99) + "\n")
    return Text(name="t", source="file", path=folder)


def documents(path):
    return list(LocalCorpus(path).documents())


def test_the_held_out_documents_are_whole_and_not_in_the_training_text(source, tmp_path):
    facts = write_text(source, tmp_path / "a", heldout_bytes=550)
    train, held_out = (documents(tmp_path / "a" / name) for name in ("train.jsonl", "heldout.jsonl"))
    everything = documents(source.path)
    assert sorted({*everything}) == sorted([*train, *held_out])
    assert len(held_out) == 6
    assert not {*train} & {*held_out}
    assert facts.heldout_bytes == sum(len(each.encode()) for each in held_out)
    assert facts.train_bytes == sum(len(each.encode()) for each in train)
    numbers = sorted(int(each[:2]) for each in held_out)
    assert numbers[-1] - numbers[0] > 12  # a sample, not the last files


def test_a_text_is_the_same_every_time_and_a_changed_file_is_refused(source, tmp_path):
    facts = write_text(source, tmp_path / "a", heldout_bytes=300)
    assert write_text(source, tmp_path / "b", heldout_bytes=300) == facts
    before = (tmp_path / "a" / "train.jsonl").stat().st_mtime_ns
    assert write_text(source, tmp_path / "a", heldout_bytes=300) == facts
    assert (tmp_path / "a" / "train.jsonl").stat().st_mtime_ns == before
    with pytest.raises(UserError, match=r"was made from .*'heldout_bytes': 300.*use another --out"):
        write_text(source, tmp_path / "a", heldout_bytes=400)
    with (tmp_path / "a" / "train.jsonl").open("a") as file:
        file.write(json.dumps({"text": "more"}) + "\n")
    with pytest.raises(UserError, match="is not what was written: remove"):
        write_text(source, tmp_path / "a", heldout_bytes=300)


def test_a_text_that_is_too_small_or_missing_is_refused(source, tmp_path):
    with pytest.raises(UserError, match=r"text 't' has .* bytes, too few to hold out 3,000"):
        write_text(source, tmp_path / "a", heldout_bytes=3000)
    assert not (tmp_path / "a").exists()
    gone = Text(name="t", source="file", path=tmp_path / "gone")
    with pytest.raises(UserError, match="gone does not exist"):
        write_text(gone, tmp_path / "a", heldout_bytes=10)
    unknown = Text(name="t", source="docstrings", packages=("no_such_package",))
    with pytest.raises(UserError, match="no installed package 'no_such_package'"):
        write_text(unknown, tmp_path / "a", heldout_bytes=10)


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
