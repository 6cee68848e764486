import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from quick_cases import slow_except

from megalowbit.data.hub import HubCorpus
from megalowbit.errors import UserError

ROWS = [{"text": f"document {number}", "number": number} for number in range(2000)]


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A data set as a folder on disk, which `load_dataset` opens without a network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, rows in (
        ("one", ROWS),
        ("copy", ROWS),
        ("other", [*ROWS[:-1], {"text": "changed", "number": 0}]),
    ):
        (tmp_path / name).mkdir()
        lines = [json.dumps(row) for row in rows]
        (tmp_path / name / "train.jsonl").write_text("\n".join(lines))
        (tmp_path / name / "test.jsonl").write_text("\n".join(lines[:3]))
    return tmp_path / "one"


def test_a_row_is_a_document(dataset):
    assert list(HubCorpus(str(dataset)).documents()) == [row["text"] for row in ROWS]


def test_splits_are_chosen_in_the_notation_of_the_library(dataset):
    assert len(list(HubCorpus(str(dataset), split="test").documents())) == 3
    assert len(list(HubCorpus(str(dataset), split="train[:10%]").documents())) == 200


def test_the_fingerprint_follows_the_rows_and_the_split(dataset):
    first = HubCorpus(str(dataset)).fingerprint
    assert HubCorpus(str(dataset)).fingerprint == first
    assert HubCorpus(str(dataset), split="train[:50%]").fingerprint != first
    assert HubCorpus(str(dataset.parent / "other")).fingerprint != first


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_field": "texts"}, "unknown text_field 'texts': did you mean 'text'"),
        ({"text_field": "number"}, "column 'number' is int64, not text"),
        ({"split": "validation"}, 'Unknown split "validation"'),
        ({"config": "large"}, "BuilderConfig 'large' not found"),
        ({"split": "train[:0]"}, "corresponds to no data"),
    ],
)
def test_a_missing_part_of_a_data_set_is_a_one_line_error(dataset, values, message):
    with pytest.raises(UserError, match=message) as caught:
        HubCorpus(str(dataset), **values)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variable", slow_except(["HF_HUB_OFFLINE"], ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
)
def test_without_a_network_the_error_names_the_data_set_and_the_remedy(tmp_path, variable):
    code = (
        "from megalowbit.data.sources import open_corpus\n"
        "from megalowbit.data.settings import DataSettings\n"
        "from megalowbit.errors import UserError\n"
        "try:\n"
        "    open_corpus(DataSettings(corpus='someone/no-such-data', sequence_length=8))\n"
        "except UserError as error:\n"
        "    print(error)\n"
    )
    environ = {**os.environ, variable: "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert done.stdout.startswith("data set 'someone/no-such-data/train' cannot be loaded"), done.stderr
    assert "network" in done.stdout
    assert done.stdout.count("\n") == 1
