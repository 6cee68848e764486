"""Files that come with the package are found from any working folder."""

import json

from launchers import ROOT
from megalowbit import shipped_files


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
