"""The command line with precision speculation: two processes, killed and resumed, two stages, a mistake."""

import json
import shutil
import statistics

import pytest
from forked_ranks import Ranks, run_ranks

from launchers import ROOT, SPEEDS, metrics, write_config

STEPS, EVERY = 14, 4
SPECULATION = {"every": 2, "lookahead": 2, "verify_every": 2, "cooldown": 4, "threshold_db": 20}
# in make test: the same in one process (tests/pretrain/components), and of engines on two ranks
pytestmark = pytest.mark.slow
BLOCK = {
    "recipe": "speculative-int8",
    "speculation": SPECULATION,
    "run": {"steps": STEPS},
    "checkpoint": {"every": EVERY, "keep": None, "export_hf": False},
}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)  # its masks differ by stage


def check_rows(folder):
    return [json.loads(line) for line in (folder / "speculation.jsonl").read_text().splitlines()]


def rows(folder):
    return [{key: value for key, value in row.items() if key not in SPEEDS} for row in metrics(folder)]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())["speculation"]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run of two processes at ZeRO 2, killed; of its checkpoints the first one is left."""
    folder = tmp_path_factory.mktemp("speculation")
    config = write_config(folder, block=BLOCK, zero_optimization={"stage": 2})
    arguments = ("--ds-config", config, "--run-dir", folder / "run", "--resume", "auto")
    with Ranks(folder, *arguments) as ranks:
        ranks.reach(folder / "run", 2 * EVERY + 2)
    output = ranks.done.output
    for saved in (folder / "run" / "checkpoints").glob("step-*"):  # as where saves come seldom
        if saved.name != f"step-{EVERY:08d}":
            shutil.rmtree(saved)
    return folder / "run", rows(folder / "run"), check_rows(folder / "run"), output, arguments


@pytest.fixture(scope="module")
def resumed(killed):
    """What the resumed run said."""
    folder, *_, arguments = killed
    done = run_ranks(*arguments, cwd=folder.parent, processes=2)
    assert done.code == 0, done.output
    return done.output


def test_two_processes_decide_together_and_one_of_them_writes(killed, resumed):
    folder, _, _, output, _ = killed
    found = check_rows(folder)
    gemms = [(row["step"], row["layer"], row["product"]) for row in found]
    assert len(gemms) == len(set(gemms)) == 24 * (STEPS // 2)
    assert sorted({step for step, *_ in gemms}) == list(range(1, STEPS, 2))
    verified = [row for row in found if row["is_hit"] is not None]
    # the first check, at bf16, has nothing to verify; others than these are of layers with a new precision
    assert {row["step"] for row in verified} >= {3, 5, 9, 13}
    assert all((row["measured_db"] >= 20) == row["is_hit"] for row in verified)
    last = [row for row in metrics(folder) if "speculation/misses" in row][-1]
    hits = sum(row["is_hit"] for row in verified)
    assert last["speculation/hit_rate"] == pytest.approx(hits / len(verified))
    assert summary(folder)["hits"] == hits
    assert resumed.count("speculate int8, fp8, bf16 at 20 dB; check every 2 steps, 1 of 2 verified") == 1
    assert output.count("step 1: and ") == 1


def test_a_killed_run_resumes_with_bitwise_equal_losses_and_decisions(killed, resumed):
    folder, rows_before, checks_before, *_ = killed
    assert f"resumed after step {EVERY}" in resumed
    assert rows_before[-1]["step"] >= 2 * EVERY + 2
    assert rows(folder)[: len(rows_before)] == rows_before
    assert check_rows(folder)[: len(checks_before)] == checks_before
    assert {row["precision"] for row in checks_before} >= {"int8", "bf16"}
    assert rows(folder)[-1]["step"] == STEPS


def test_a_mistake_on_two_processes_is_a_one_line_error(tmp_path):
    config = write_config(tmp_path, block={**BLOCK, "recipe": "bf16"})
    done = run_ranks("--ds-config", config, "--run-dir", tmp_path / "new", cwd=tmp_path, processes=2)
    assert done.code != 0
    (line,) = done.errors
    assert "megalowbit.speculation: " in line
    assert "it quantises nothing; set recipe to" in line
    assert "megalowbit/" not in done.output  # no traceback of ours
    assert not (tmp_path / "new").exists()


def test_two_stages_decide_for_all_layers_and_one_process_resumes_their_decisions(tmp_path):
    write_config(tmp_path, model=NO_DROPOUT, block=BLOCK, pipeline={"stages": 2})
    arguments = ("--ds-config", tmp_path / "tiny.json", "--run-dir", tmp_path / "run")
    steps = ("--set", f"megalowbit.run.steps={EVERY}")
    done = run_ranks(*arguments, *steps, cwd=tmp_path, processes=2)
    assert done.code == 0, done.output
    found = check_rows(tmp_path / "run")
    layers = {
        f"transformer.h.{block}.{name}"
        for block in range(2)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    for step in (1, 3):
        assert {row["layer"] for row in found if row["step"] == step} == layers
    chosen = {(row["layer"], row["product"]): row["next_precision"] for row in found if row["step"] == 3}
    more = ("--resume", "auto", "--set", f"megalowbit.run.steps={EVERY + 1}")
    one = run_ranks(*arguments, *more, "--set", "pipeline.stages=1", cwd=tmp_path)
    assert one.code == 0, one.output
    ran = {(row["layer"], row["product"]): row["precision"] for row in check_rows(tmp_path / "run")[-24:]}
    assert ran == chosen
    assert set(ran.values()) != {"bf16"}


def test_the_shipped_configuration_learns_at_few_bits(tmp_path):
    config = ROOT / "configs" / "gpt2_tiny_speculative.json"
    done = run_ranks("--ds-config", config, "--run-dir", tmp_path / "run",
        "--set", "megalowbit.run.steps=21", "--set", "megalowbit.checkpoint.export_hf=false", cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.output
    losses = [row["loss"] for row in metrics(tmp_path / "run")]
    assert statistics.median(losses[-8:]) < 3.9 < 5 < losses[0]
    assert summary(tmp_path / "run")["share_8bit_or_less"] > 0.7
