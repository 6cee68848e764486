"""`oscillation_reset` with two data-parallel ranks: the same weights are reset at every ZeRO stage."""

import pytest
from forked_ranks import run_ranks

from launchers import metrics, write_config

pytestmark = pytest.mark.slow  # in make test: the stages with one rank, on prescribed paths
DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
BLOCK = {
    "precision": "bf16",
    "recipe": "nvfp4",
    "oscillation_reset": {"start": 2, "period": 2, "window": 1, "threshold": 4.0},
}


def recorded(folder, stage):
    folder.mkdir()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 100}
    write_config(folder, model=DROPOUT, block=BLOCK, zero_optimization=zero)
    arguments = ("--ds-config", folder / "tiny.json", "--run-dir", folder / "run")
    done = run_ranks(*arguments, cwd=folder, processes=2)
    assert done.code == 0, done.output
    return metrics(folder / "run")


def test_partitioned_masters_are_reset_like_whole_ones(tmp_path):
    whole, *others = (recorded(tmp_path / f"stage{stage}", stage) for stage in (0, 2, 3))
    found = [row for row in whole if "oscillation/ratio" in row]
    assert [row["step"] for row in found] == [4, 6]
    assert all(row["oscillation/reset_share"] > 0.01 for row in found)
    for rows in others:
        assert [row["loss"] for row in rows] == [row["loss"] for row in whole]
        for row, expected in zip(rows, whole, strict=True):
            assert row.get("oscillation/reset_share") == expected.get("oscillation/reset_share")


@pytest.mark.parametrize("fields", [{"keep": ["*.h.0"]}, {"layers": {"*.h.0": "mxfp4-rht"}}])
def test_a_stage_that_rounds_no_weights_measures_with_the_others(tmp_path, fields):
    block = {**BLOCK, "recipe": {"base": "nvfp4", **fields}}
    write_config(tmp_path, model=DROPOUT, block=block, pipeline={"stages": 2})
    arguments = ("--ds-config", tmp_path / "tiny.json", "--run-dir", tmp_path / "run")
    done = run_ranks(*arguments, cwd=tmp_path, processes=2)
    assert done.code == 0, done.output
    found = [row for row in metrics(tmp_path / "run") if "oscillation/ratio" in row]
    assert [row["step"] for row in found] == [4, 6]
    assert all(row["oscillation/reset_share"] > 0.01 for row in found)
