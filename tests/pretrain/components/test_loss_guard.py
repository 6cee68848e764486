import json
import math

import pytest

from megalowbit.pretrain.components.loss_guard import GuardDecision, LossGuard, LossGuardSettings

NAN, INF = math.nan, math.inf
QUIET = [2.0 + 0.1 * (step % 7 - 3) for step in range(140)]  # no step of it stands out


def guard_of(**settings):
    return LossGuard(LossGuardSettings(**settings))


def decisions(guard, losses, *, start=1):
    """What is decided, by step, where it is not to go on in silence; non-finite steps were skipped."""
    found = {
        step: guard.judge(step, loss, is_skipped=not math.isfinite(loss))
        for step, loss in enumerate(losses, start=start)
    }
    return {step: decision for step, decision in found.items() if decision != GuardDecision()}


@pytest.mark.parametrize("policy", ["skip", "rollback", "stop"])
def test_a_single_non_finite_loss_is_ignored(policy):
    assert decisions(guard_of(nonfinite=policy), [2.0, NAN, 2.0, INF, NAN, 2.0] * 3) == {}


@pytest.mark.parametrize(("policy", "action"), [("rollback", "roll back"), ("stop", "stop")])
def test_consecutive_non_finite_losses_trigger_an_action(policy, action):
    (found,) = decisions(guard_of(nonfinite=policy), [2.0, NAN, 2.0, NAN, INF, NAN]).items()
    step, decision = found
    assert (step, decision.action, decision.since) == (6, action, 4)
    reason = "step 6: the loss of 3 steps in a row was not finite (the last one is nan)"
    remedy = ": resume with --set megalowbit.loss_guard.nonfinite=rollback to skip these batches, or start"
    assert decision.line.startswith(reason + (remedy if action == "stop" else ""))
    assert (decision.line == reason) == (action == "roll back")


def test_with_patience_one_the_guard_acts_at_once():
    guard = guard_of(nonfinite="rollback", patience=1)
    line = "step 2: the loss of the step was not finite (the last one is inf)"
    assert decisions(guard, [2.0, INF]) == {2: GuardDecision(action="roll back", line=line, since=2)}


def test_by_default_consecutive_problems_are_reported_once():
    found = decisions(guard_of(), [NAN] * 9 + [2.0] + [NAN] * 4)
    assert sorted(found) == [3, 13]
    assert {decision.action for decision in found.values()} == {"continue"}


def test_an_update_from_a_non_finite_loss_is_reported():
    decision = guard_of().judge(7, INF, is_skipped=False)
    assert decision.action == "continue"
    assert (
        decision.line == "step 7: the loss is inf, but its gradients were finite and the weights were updated"
    )


def test_a_skipped_step_with_a_finite_loss_is_not_unstable():
    guard = guard_of(nonfinite="stop", spike="stop", patience=1)
    for step in range(1, 100):
        assert guard.judge(step, 2.0 + 0.1 * (step % 3), is_skipped=True) == GuardDecision()
    assert guard.is_stable


def test_each_spike_is_reported_once():
    found = decisions(guard_of(), [*QUIET, 6.0, 7.0, 2.0, 6.0])
    assert sorted(found) == [141, 144]
    assert found[141].line.startswith("step 141: loss 6 is ")
    assert {decision.action for decision in found.values()} == {"continue"}


def test_disabled_spike_detection_finds_nothing():
    guard = guard_of(spike="off")
    assert decisions(guard, QUIET + [50.0] * 300) == {}
    assert guard.state_dict()["spikes"]["losses"] == []


@pytest.mark.parametrize(("policy", "action"), [("rollback", "roll back"), ("stop", "stop")])
def test_consecutive_spikes_trigger_an_action_and_a_single_one_is_reported(policy, action):
    found = decisions(guard_of(spike=policy), [*QUIET, 6.0, 2.0, 6.0, 7.0, 8.0])
    assert {step: decision.action for step, decision in found.items()} == {
        141: "continue",
        143: "continue",
        145: action,
    }
    assert found[145].line.startswith("step 145: loss 8 is ")
    assert ", 3 steps in a row" in found[145].line
    assert ("--set megalowbit.loss_guard.spike=rollback" in found[145].line) == (action == "stop")
    assert found[145].since == 143


def test_a_risen_loss_rolls_back_to_before_the_rise():
    rising = [loss * math.exp(0.004 * step) for step, loss in enumerate(QUIET * 2)]
    warned = decisions(guard_of(), QUIET * 4 + rising)
    first = min(warned)
    assert warned[first].line.startswith(f"step {first}: the loss has risen: ")
    acted = decisions(guard_of(spike="rollback"), QUIET * 4 + rising)
    assert acted[first].action == "roll back"
    assert 560 - 100 < acted[first].since <= 560 < first


def test_two_problems_have_the_start_of_the_first():
    guard = guard_of(nonfinite="rollback", spike="rollback")
    found = decisions(guard, [*QUIET, 6.0, NAN, 6.0, NAN, NAN, NAN])
    assert found[146].since == 141
    assert found[146].action == "roll back"


def test_no_checkpoint_qualifies_for_rollback_while_the_loss_is_unstable():
    calm = {}
    for policy in ("skip", "rollback", "stop"):
        guard = guard_of(nonfinite=policy)
        calm[policy] = []
        for step, loss in enumerate([2.0, NAN, NAN, 2.0, NAN], start=1):
            guard.judge(step, loss, is_skipped=True)
            calm[policy].append(guard.is_stable)
    assert calm == {
        "skip": [True] * 5,  # nothing goes back
        "rollback": [True, False, False, True, False],
        "stop": [True, False, False, True, False],
    }


def test_the_guard_reports_which_checkpoints_a_rollback_may_need():
    assert guard_of().good_until(7) is None
    guard = guard_of(nonfinite="rollback")
    decisions(guard, [2.0, 2.0, NAN, NAN])
    assert guard.good_until(4) == 2
    decisions(guard, [2.0], start=5)
    assert guard.good_until(5) == 5
    patient = guard_of(spike="rollback")
    decisions(patient, QUIET)
    assert patient.good_until(140) == 140 - 100  # a rise since then might be seen later


def test_rollbacks_are_counted_and_the_last_one_stops():
    guard = guard_of(nonfinite="rollback", patience=1, max_rollbacks=2)
    assert guard.facts({}) == {}
    guard.rollbacks = [{"after_step": 5, "to_step": 4, "reason": "a"}]
    assert guard.facts({}) == {"rollbacks": 1}
    assert guard.judge(9, NAN, is_skipped=True).action == "roll back"
    guard.rollbacks.append({"after_step": 9, "to_step": 8, "reason": "b"})
    decision = guard.judge(15, NAN, is_skipped=True)
    assert decision.action == "stop"
    assert (
        ": megalowbit.loss_guard.max_rollbacks = 2 is reached: raise it, or start a new run" in decision.line
    )


def test_a_problem_that_recurs_at_once_needs_an_earlier_checkpoint():
    guard = guard_of(nonfinite="rollback")
    assert guard.newest_good_step(18) == 17
    guard.rollbacks = [{"after_step": 20, "to_step": 15, "reason": ""}]
    assert guard.newest_good_step(21) == 20  # got past it
    assert guard.newest_good_step(18) == 14
    assert guard.newest_good_step(12) == 11


@pytest.mark.parametrize("stop", [3, 139, 141, 143, 147])
def test_a_restored_guard_makes_the_same_decisions(stop):
    settings = {"nonfinite": "rollback", "spike": "stop"}
    losses = [*QUIET, 6.0, 2.0, NAN, NAN, 6.0, NAN, NAN, NAN, 6.0, 7.0, 8.0]
    whole = decisions(guard_of(**settings), losses)
    assert {decision.action for decision in whole.values()} == {"continue", "roll back", "stop"}
    first = guard_of(**settings)
    found = decisions(first, losses[:stop])
    first.rollbacks = [{"after_step": 2, "to_step": 1, "reason": "x"}]
    again = guard_of(**settings)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())), step=stop, source="a checkpoint")
    assert again.facts({}) == {"rollbacks": 1}
    assert {**found, **decisions(again, losses[stop:], start=stop + 1)} == whole
