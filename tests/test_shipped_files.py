"""Files that come with the package are found from any working folder."""

import json
from pathlib import Path

import pytest

from launchers import ROOT
from megalowbit import shipped_files
from megalowbit.errors import UserError
from megalowbit.shipped_files import find_config


def test_in_a_checkout_they_are_those_of_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shipped_files.checkout() == shipped_files.shipped_folder() == ROOT
    assert shipped_files.pretrain_script().read_text() == (ROOT / "launch" / "pretrain.py").read_text()
    assert shipped_files.study_script().exists()
    assert {path.name for path in shipped_files.job_templates().glob("*.sbatch")} == {
        "pretrain.sbatch",
        "study.sbatch",
    }
    for name, path in shipped_files.shipped_configs().items():
        assert path == ROOT / "configs" / f"{name}.json"
        assert "megalowbit" in json.loads(path.read_text())


def test_a_wheel_has_its_own_folder(tmp_path, monkeypatch):
    (tmp_path / "shipped" / "configs").mkdir(parents=True)
    (tmp_path / "shipped" / "configs" / "a.json").write_text("{}")
    monkeypatch.setattr(shipped_files, "IN_WHEEL", tmp_path / "shipped")
    assert shipped_files.checkout() is None
    assert shipped_files.shipped_configs() == {"a": tmp_path / "shipped" / "configs" / "a.json"}


@pytest.mark.parametrize("name", ["gpt2_tiny_fp4", "gpt2_tiny_fp4.json"])
def test_a_name_stands_for_a_shipped_configuration_unless_there_is_such_a_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = []
    assert find_config(Path(name), lines.append) == ROOT / "configs" / "gpt2_tiny_fp4.json"
    assert lines == [f"config    gpt2_tiny_fp4 comes with megalowbit: {ROOT}/configs/gpt2_tiny_fp4.json"]
    (tmp_path / name).write_text("{}")
    assert find_config(Path(name), lines.append) == Path(name)
    assert len(lines) == 1


@pytest.mark.parametrize("path", ["nowhere/gpt2_tiny_fp4", "other.json", "x" * 300])
def test_what_is_no_name_is_a_file(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(Path(path), pytest.fail) == Path(path)


def test_an_unknown_name_is_refused_with_the_nearest_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no file gpt2_tny_fp4, and unknown shipped .* mean 'gpt2_tiny_fp4'"):
        find_config(Path("gpt2_tny_fp4"), pytest.fail)
