import argparse
import enum
import pickle
import sys
import types
from collections import defaultdict

import numpy
import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.hf.importers.inert_files import Inert, fields_of, read_inert


class Stage(enum.Enum):
    SECOND = 2


class Custom:
    def __init__(self, value):
        self.value = value


class Harmful:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


class Table(dict):
    pass


def saved(tmp_path, content, **options):
    torch.save(content, tmp_path / "file.pt", **options)
    return tmp_path / "file.pt"


def test_tensors_are_read_and_other_objects_are_kept_without_their_classes(tmp_path):
    tensor = torch.arange(6.0).view(2, 3)
    arguments = argparse.Namespace(
        hidden_size=32, dtype=torch.bfloat16, stage=Stage.SECOND, nested={"a": (1, 2)}
    )
    content = {"t": tensor, "args": arguments, "custom": Custom(tensor)}
    found = read_inert(saved(tmp_path, content))
    assert found["t"].read().equal(tensor)
    fields = fields_of(found["args"])
    assert fields["hidden_size"] == 32
    assert fields["dtype"] is torch.bfloat16
    assert fields["nested"] == {"a": (1, 2)}
    stage = fields["stage"]
    assert isinstance(stage, Inert)
    if stage.kind == "builtins.getattr":  # Python 3.11.2 stores a member by its name, 3.11.7 by its value
        assert (stage.arguments[0].kind, stage.arguments[1]) == (f"{Stage.__module__}.Stage", "SECOND")
    else:
        assert (stage.kind, stage.arguments) == (f"{Stage.__module__}.Stage", (2,))
    assert fields_of(found["custom"])["value"].equal(tensor)
    assert fields_of(3) == {}


def test_classes_need_not_be_installed_and_are_not_imported(tmp_path, monkeypatch):
    module = types.ModuleType("a_program_that_is_not_installed")
    module.Scaler = type("Scaler", (), {"__module__": module.__name__, "__qualname__": "Scaler"})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    path = saved(tmp_path, {"scaler": module.Scaler(), "weight": torch.ones(2)})
    monkeypatch.delitem(sys.modules, module.__name__)
    found = read_inert(path)
    assert found["scaler"].kind == "a_program_that_is_not_installed.Scaler"
    assert module.__name__ not in sys.modules


@pytest.mark.parametrize(
    "harmful",
    [
        Harmful(print, "code from a file has run"),
        Harmful(exec, "print('code from a file has run')"),
        Harmful(eval, "print('code from a file has run')"),
        Harmful(pickle.loads, pickle.dumps(Harmful(print, "code from a file has run"))),
        Harmful(defaultdict, print),
    ],
)
def test_functions_in_a_file_are_not_called(tmp_path, capsys, harmful):
    found = read_inert(saved(tmp_path, {"x": harmful, "weight": torch.ones(2)}))
    assert isinstance(found["x"], Inert)
    assert found["weight"].read().equal(torch.ones(2))
    assert capsys.readouterr().out == ""


def test_names_of_the_operating_system_are_refused(tmp_path, capfd):
    import os

    with pytest.raises(UserError, match=r"objects that are not allowed: posix\.system"):
        read_inert(saved(tmp_path, {"x": Harmful(os.system, "echo run")}))
    assert capfd.readouterr().out == ""


def test_objects_of_numpy_that_generators_states_contain_are_kept(tmp_path):
    found = read_inert(saved(tmp_path, {"rng": numpy.arange(3), "weight": torch.ones(2)}))
    assert found["weight"].read().equal(torch.ones(2))


def test_files_before_torch_1_6_are_read_if_they_hold_only_tensors(tmp_path):
    old = saved(tmp_path, {"weight": torch.ones(2)}, _use_new_zipfile_serialization=False)
    assert read_inert(old)["weight"].read().equal(torch.ones(2))
    old = saved(tmp_path, {"args": Custom(1)}, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"objects that are not allowed: \S+\.Custom"):
        read_inert(old)


def test_other_kinds_of_dictionaries_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="not allowed: Can only SETITEM for dict"):
        read_inert(saved(tmp_path, {"table": Table(a=1)}))


def test_damaged_files_are_one_line_errors(tmp_path):
    path = saved(tmp_path, {"weight": torch.ones(2000)})
    data = path.read_bytes()
    for bad in (data[:-100], data[: len(data) // 2], b"", b"text", b"PK\x03\x04"):
        path.write_bytes(bad)
        with pytest.raises(UserError, match=r"file\.pt (cannot be read|is not loaded)") as caught:
            read_inert(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="holds 'list', not a checkpoint"):
        read_inert(saved(tmp_path, [1]))
    assert read_inert(saved(tmp_path, [1]), is_dictionary=False) == [1]
    with pytest.raises(UserError, match=r"missing\.pt cannot be read"):
        read_inert(tmp_path / "missing.pt")
