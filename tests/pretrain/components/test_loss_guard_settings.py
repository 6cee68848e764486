import sys
from subprocess import run

import pytest

from megalowbit.errors import UserError
from megalowbit.pretrain.components.loss_guard import LossGuardSettings
from megalowbit.pretrain.resume import changed_settings


def test_by_default_the_guard_only_warns():
    settings = LossGuardSettings()
    assert (settings.nonfinite, settings.spike) == ("skip", "warn")
    assert not settings.rolls_back


@pytest.mark.parametrize("policy", ["nonfinite", "spike"])
def test_both_policies_can_roll_back(policy):
    assert LossGuardSettings(**{policy: "rollback"}).rolls_back


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nonfinite=warn", r"megalowbit\.loss_guard\.nonfinite = 'warn'"),
        ("spike=skip", r"megalowbit\.loss_guard\.spike = 'skip'"),
        ("patience=0", r"megalowbit\.loss_guard\.patience = 0"),
        ("window=31", r"megalowbit\.loss_guard\.window = 31"),
        ("spike_deviations=0", r"megalowbit\.loss_guard\.spike_deviations = 0"),
        ("spike_deviations=NaN", r"spike_deviations|NaN"),
        ("max_rollbacks=0", r"megalowbit\.loss_guard\.max_rollbacks = 0"),
        ("max_rollback=2", "max_rollbacks"),
    ],
)
def test_a_mistake_is_named_with_its_key(resolve, override, message):
    with pytest.raises(UserError, match=message):
        resolve(f"megalowbit.loss_guard.{override}")


def test_a_configuration_with_all_its_components_is_read_without_torch():
    code = "import sys, megalowbit.pretrain.config; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_resumed_run_may_change_the_loss_guard_and_older_runs_have_its_defaults(resolve):
    saved = resolve().to_dict()
    now = resolve("megalowbit.loss_guard.nonfinite=rollback").to_dict()
    assert changed_settings(saved, now) == ["megalowbit.loss_guard.nonfinite: skip → rollback"]
    del saved["megalowbit"]["loss_guard"]
    assert changed_settings(saved, resolve().to_dict()) == []
