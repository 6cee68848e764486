import json
import shlex

import pytest

from launchers import write_config
from megalowbit.doctor.plan import plan_run
from megalowbit.doctor.risks import NODE_MTBF, check_risks, warmup_steps
from megalowbit.doctor.target import TARGETS
from megalowbit.layers.settings import DEFAULT_RECIPE
from megalowbit.pretrain.config import load_config

H100 = TARGETS["h100"]
# a run without notices: warm-up, decay, the usual betas, clipping, a late switch, and too short to be saved
GOOD = (
    'megalowbit.lr_schedule={"type": "cosine", "warmup_steps": 40}',
    "optimizer.params.betas=[0.9, 0.95]",
    "megalowbit.run.steps=900",
    'megalowbit.late_switch={"at": 0.7}',
)


@pytest.fixture
def unscheduled(tmp_path):
    """The tiny configuration without a schedule."""
    path = write_config(tmp_path)
    raw = json.loads(path.read_text())
    raw.pop("scheduler")
    path.write_text(json.dumps(raw))
    return path


@pytest.fixture
def good(unscheduled):
    """The plan of the good run, with overrides."""

    def good(*overrides, processes=1):
        return plan_run(load_config(unscheduled, [*GOOD, *overrides], world_size=processes))

    return good


def codes(plan, seconds=600.0, disk=None):
    return {each.code for each in check_risks(plan, H100, seconds, disk)}


@pytest.mark.parametrize("kind", ["cosine", "constant"])
def test_a_warm_up_longer_than_the_run_is_named_as_the_cause(good, kind):
    long = f'megalowbit.lr_schedule={{"type": "{kind}", "warmup_steps": 1000}}'
    [found] = check_risks(good(long), H100, 600.0, None)
    assert "the warm-up of 1,000 steps is longer than the run's 900" in str(found)
    assert "lr_schedule.warmup_steps=40" in str(found)
    assert "total_steps" not in str(found)


def test_a_good_run_has_no_notices(good):
    assert codes(good()) == set()


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("gradient_clipping=0", "no-clipping"),
        ("megalowbit.late_switch=null", None),  # off on purpose
        ('megalowbit.recipe={"base": "nvfp4", "split_grad_output": {"gains": "ysche"}}', "gradient-gains"),
        ('megalowbit.recipe={"base": "nvfp4", "split_grad_output": {}}', None),
        ("optimizer.params.betas=[0.9, 0.999]", "beta2"),
        ("megalowbit.lr_schedule.warmup_steps=10", "warmup"),
        ("megalowbit.lr_schedule.total_steps=500", "schedule-length"),
        ("megalowbit.lr_schedule.total_steps=2000", "schedule-length"),
        ("megalowbit.run.deterministic=true", "deterministic"),
    ],
)
def test_each_setting_has_its_finding(good, override, code):
    found = codes(good(override))
    assert (code in found) if code else not found


def test_fp16_with_a_constant_scale(good):
    constant = 'megalowbit.grad_scaler={"type": "constant", "scale": 1024}'
    assert codes(good("megalowbit.precision=fp16", constant)) == {"fp16-constant-scale"}
    assert codes(good("megalowbit.precision=fp16")) == set()


def test_the_default_recipe_without_its_late_switch(tiny):
    plan = tiny()
    (found,) = [each for each in check_risks(plan, H100, 60.0) if each.code == "recipe-section-off"]
    assert '"late_switch"' in found.text
    assert "docs/experiments/loss.md" in found.text


def test_the_default_recipe_in_a_model_without_its_layers(tiny, large):
    code, sizes = "default-of-another-family", {"processes": 8, "micro_batch": 1, "batch": 8}
    plan = large(f"megalowbit.recipe={DEFAULT_RECIPE}", **sizes)
    (found,) = [each for each in check_risks(plan, H100, 60.0) if each.code == code]
    option, value = shlex.split(found.fix)
    assert option == "--set"
    assert code not in codes(large(value, **sizes))
    assert code not in codes(tiny())


def test_the_remedy_replaces_a_block_with_layers_of_its_own(large):
    code, sizes = "default-of-another-family", {"processes": 8, "micro_batch": 1, "batch": 8}
    given = 'megalowbit.recipe={"base": "nvfp4", "layers": {"*.h.0": {"base": "fp8", "if_present": true}}}'
    (found,) = [each for each in check_risks(large(given, **sizes), H100, 60.0) if each.code == code]
    _, value = shlex.split(found.fix)
    assert code not in codes(large(given, value, **sizes))


def test_the_remedy_of_a_recipe_in_a_block_leaves_its_other_fields(large):
    code, sizes = "default-of-another-family", {"processes": 8, "micro_batch": 1, "batch": 8}
    given = f'megalowbit.recipe={{"base": "{DEFAULT_RECIPE}", "keep_last": 1}}'
    (found,) = [each for each in check_risks(large(given, **sizes), H100, 60.0) if each.code == code]
    _, value = shlex.split(found.fix)
    plan = large(given, value, **sizes)
    assert code not in codes(plan)
    assert (plan.recipe.keep_last, dict(plan.recipe.layers).keys()) == (1, {"*attn.*"})


def test_without_a_schedule_the_fix_is_one_that_is_accepted(unscheduled):
    steps = "megalowbit.run.steps=900"
    plan = plan_run(load_config(unscheduled, [steps], world_size=1))
    (found,) = [each for each in check_risks(plan, H100, 60.0) if each.code == "no-schedule"]
    option, value = shlex.split(found.fix)
    assert option == "--set"
    fixed = load_config(unscheduled, [steps, value], world_size=1)
    assert warmup_steps(plan_run(fixed)) == 900  # β₂ is 0.999 here: 2,000, but no more than the run has


def test_a_long_run_must_save(good):
    assert codes(good(), seconds=600.0) == set()
    (found,) = check_risks(good(), H100, 20 * 86400.0)
    assert (found.level, found.code) == ("warning", "no-checkpoints")
    assert "the run of 20d00:00 saves only after its last step" in found.text
    two_hosts = check_risks(good(processes=16), H100, 20 * 86400.0)
    assert [(each.level, each.code) for each in two_hosts] == [("problem", "no-checkpoints")]
    assert codes(good("megalowbit.run.steps=5000"), seconds=None) == {"no-checkpoints"}


def test_the_interval_of_saves_is_compared_with_dalys(good):
    """16 ranks on two hosts; a step of 1,000 s: half the interval is lost at each failure."""
    plan = good("megalowbit.checkpoint.every=900", processes=16)
    seconds = plan.steps * 2000.0
    (found,) = [each for each in check_risks(plan, H100, seconds) if each.code == "checkpoint-interval"]
    best = int(found.fix.split("every=")[1].split()[0])
    mtbf = NODE_MTBF / 2
    assert 1 <= best < 900
    assert f"{900 * 2000 / 2 / mtbf:.0%}"[:-2] in found.text
    other = good(f"megalowbit.checkpoint.every={best}", processes=16)
    assert codes(other, seconds=seconds) == set()


@pytest.mark.parametrize(("step", "shown"), [(0.04, "0.04 s"), (9.2, "9.2 s"), (75.0, "0:01:15")])
def test_an_interval_of_less_than_a_second_is_not_zero(good, step, shown):
    plan = good("megalowbit.checkpoint.every=1")
    found = check_risks(plan, H100, plan.steps * step, 1.0)
    (text,) = [each.text for each in found if each.code == "checkpoint-interval"]
    assert f"a checkpoint every 1 step ({shown}) costs" in text


def test_saves_of_a_run_of_seconds_are_no_matter(good):
    plan = good("megalowbit.checkpoint.every=1")
    assert codes(plan, seconds=plan.steps * 1e-6) == set()
    (found,) = check_risks(plan, H100, plan.steps * 0.04, 1.0)
    assert int(found.fix.split("every=")[1].split()[0]) <= plan.steps


def test_many_ranks_need_a_watchdog_that_outlasts_a_save(good, large):
    assert "watchdog-off" not in codes(good("megalowbit.watchdog.timeout=null"))
    off = good("megalowbit.watchdog.timeout=null", processes=16)
    assert [(e.level, e.code) for e in check_risks(off, H100, 600.0)] == [("problem", "watchdog-off")]
    assert codes(good("megalowbit.watchdog.silence=null", processes=2)) == {"watchdog-silence"}
    plan = large("zero_optimization.stage=1", processes=8, micro_batch=1, batch=8)
    (found,) = [e for e in check_risks(plan, H100, None, disk=1e8) if e.code == "watchdog-save"]
    timeout = int(found.fix.split("=")[1])
    assert timeout > 14 * plan.parameters / 1e8
    longer = large(
        "zero_optimization.stage=1",
        f"megalowbit.watchdog.timeout={timeout}",
        processes=8,
        micro_batch=1,
        batch=8,
    )
    assert "watchdog-save" not in codes(longer, None, 1e8)


def test_tensor_parallelism_beyond_a_host(large):
    model = {"model_type": "gpt2", "vocab_size": 512, "n_positions": 64, "n_embd": 256, "n_layer": 2}
    model |= {"n_head": 16, "bos_token_id": 0, "eos_token_id": 0}
    more = ("tensor_parallel.autotp_size=16", "megalowbit.data.sequence_length=32")
    plan = large(*more, processes=16, micro_batch=1, batch=1, model=model)
    assert "tensor-parallel-network" in codes(plan)
