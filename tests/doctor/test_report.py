import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from launchers import ROOT, write_config
from megalowbit.doctor.examine import Request, examine
from megalowbit.doctor.notices import LEVELS, problem
from megalowbit.doctor.report import to_json, to_text, verdict
from megalowbit.doctor.target import TARGETS
from megalowbit.pretrain.config import load_config

PAGE = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")


@pytest.fixture
def found(tmp_path, around, network):
    config = load_config(write_config(tmp_path), ['megalowbit.late_switch={"at": 4}'], world_size=8)
    request = Request(config=config, target=TARGETS["h100"], assumed_mfu=0.4)
    surroundings = around(*["NVIDIA H100 80GB HBM3"] * 8, ranks=8, network=network)
    facts = dict.fromkeys(
        ("torch", "CUDA of torch", "driver", "NCCL", "deepspeed", "transformers", "triton", "C compiler"), "1"
    )
    facts |= {
        "apex": "not installed",
        "cpu": "X",
        "cpu units": "amx_bf16",
        "cpu cores": "96",
        "GPUs": "8 × H100",
    }
    machine = replace(surroundings.machine, facts=facts)
    hosts = [replace(each, machine=machine) for each in surroundings.hosts]
    return examine(request, replace(surroundings, machine=machine, hosts=hosts))


def test_the_json_has_every_documented_key_and_round_trips(found):
    report = json.loads(json.dumps(to_json(found)))
    section = PAGE[PAGE.index("## JSON") :]
    for key in re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE):
        value = report
        for part in key.split("."):
            value = value[part]
    assert report["run"]["time"]["days"] == pytest.approx(report["run"]["time"]["seconds"] / 86400)
    assert report["run"]["phases"][0]["products"][0].keys() == {
        "projection", "product", "unit", "operands", "is_emulated", "reason"
    }  # fmt: skip
    assert len(report["run"]["phases"]) == len(report["run"]["time"]["phases"]) == 2
    assert report["run"]["time"]["phases"][0]["mfu"] == pytest.approx(0.4)


def test_the_verdict_follows_from_problems(found):
    fine = replace(found, notices=[each for each in found.notices if each.level != "problem"])
    bad = replace(found, notices=[problem("memory-device", "too large")])
    assert [to_json(each)["verdict"] for each in (fine, bad)] == ["fine", "problems"]
    assert verdict(fine).startswith("doctor: no problems, ")
    assert verdict(bad) == "doctor: 1 problem (memory-device), 0 warnings, 0 notes"
    assert to_text(bad).endswith(verdict(bad))


def test_the_text_has_the_figures_of_the_json(found):
    text, report = to_text(found), to_json(found)
    time = report["run"]["time"]["phases"][0]
    assert f"{time['seconds_per_step']:.3g} s a step" in text
    assert "MFU 40.0%" in text
    assert f"{report['run']['memory_gib']['device']['total']:.1f} of 79.1 GiB" in text
    assert "bf16 (emulates nvfp4)" in text
    assert "nccl over 16 ranks on 2 hosts" in text
    for line in report["run"]["time"]["assumptions"]:
        assert line in text


def test_a_long_list_of_hosts_shows_the_first_and_those_with_notices(found):
    (host,) = found.hosts
    hosts = [replace(host, machine=replace(host.machine, host=f"n{number}")) for number in range(40)]
    text = to_text(replace(found, hosts=hosts, notices=[problem("clock", "late", "", ["n33"])]))
    assert re.search(r"^  n33 .* clock$", text, re.MULTILINE)
    assert "n34 " not in text
    assert "and 31 more hosts" in text


def test_every_code_is_explained_with_its_levels_and_every_explained_code_exists():
    made = {}
    for path in (ROOT / "megalowbit" / "doctor").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (*LEVELS, "make"):
                (code,) = [each.value for each in node.args[:1] if isinstance(each, ast.Constant)]
                levels = {node.func.id} if node.func.id in LEVELS else set()
                made.setdefault(code, set()).update(levels)
    conditional = {"shape-vocabulary"}  # (warning if … else note)(code, …)
    table = dict(re.findall(r"^\| `([\w-]+)` \| ((?:problem|warning|note)[\w, ]*) \|", PAGE, re.MULTILINE))
    assert set(made) | conditional == set(table)
    for code, levels in made.items():
        assert levels <= set(table[code].split(", ")), code
    assert Path(ROOT / "docs" / "doctor.md").is_file()
