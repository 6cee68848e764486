"""What the policy's tests share: a policy with little switched on, and a run of it over predictions."""

import itertools
import math

from megalowbit.speculation.policy import Policy
from megalowbit.speculation.settings import SpeculationSettings

INF, NAN = math.inf, math.nan
THRESHOLD = 15.0


def policy(**changes):
    """Two candidates, a threshold of 15 dB; whatever a test is not about is switched off."""
    quiet = {
        "candidates": ["int8", "bf16"],
        "threshold_db": THRESHOLD,
        "lookahead": 0,
        "hysteresis_db": 0.0,
        "patience": 1,
    }
    return Policy(SpeculationSettings(**{**quiet, **changes}))


def run(policy, predictions, *, state=None, step=0):
    """States after each check, every `every` steps; `predictions` of the cheapest one, or of all but bf16."""
    state, states = state or policy.start(), []
    for each in predictions:
        predicted = [*each, INF] if isinstance(each, tuple | list) else [each, INF]
        state = policy.decide(state, step, predicted)
        states.append(state)
        step += policy.settings.every
    return states


def candidates(policy, predictions, **options):
    return [state.precision for state in run(policy, predictions, **options)]


def changes(precisions):
    return sum(one != other for one, other in itertools.pairwise(precisions))
