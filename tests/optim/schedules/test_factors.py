import json
import subprocess
import sys

import numpy
import pytest
import torch
import transformers
from pydantic import BaseModel, ValidationError

from megalowbit.errors import invalid_settings
from megalowbit.optim.schedules.factors import SCHEDULES, AnySchedule

TOTAL, WARMUP, DECAY = 40, 7, 11
KINDS = {
    "constant": {},
    "linear": {"total_steps": TOTAL},
    "cosine": {"total_steps": TOTAL},
    "wsd": {"total_steps": TOTAL, "decay_steps": DECAY},
    "inverse_sqrt": {},
}
NAMES = [f"'{kind}'" for kind in KINDS]
LISTED = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}"  # as messages do


class Block(BaseModel):
    lr_schedule: AnySchedule | None = None


def read(kind, **settings):
    return Block(lr_schedule={"type": kind, **KINDS[kind], **settings}).lr_schedule


def factors(schedule, steps=TOTAL + 5):
    return [schedule.factor(step) for step in range(steps)]


def expected(kind, warmup, ratio, steps=TOTAL + 5):
    """The schedules as arrays of float64, from their definitions."""
    step = numpy.arange(steps, dtype=numpy.float64)
    left = numpy.clip((TOTAL - step) / (TOTAL - warmup), 0, 1)
    decay = numpy.clip((TOTAL - step) / DECAY, 0, 1)
    after = {
        "constant": numpy.ones(steps),
        "inverse_sqrt": (1 + numpy.clip(step - warmup, 0, None) / (warmup or 10_000)) ** -0.5,
        "linear": ratio + (1 - ratio) * left,
        "cosine": ratio + (1 - ratio) * numpy.sin(numpy.pi / 2 * left) ** 2,
        "wsd": ratio + (1 - ratio) * decay,
    }[kind]
    rising = (step + 1) / max(warmup, 1)
    return numpy.where(step < warmup, rising, after)


def of_transformers(make):
    """Factors that a scheduler of transformers gives to each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for _ in range(TOTAL + 5):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, WARMUP])
@pytest.mark.parametrize("ratio", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_factors_are_those_of_the_formula(kind, ratio, warmup):
    ending = {"min_lr_ratio": ratio} if "total_steps" in KINDS[kind] else {}
    found = factors(read(kind, warmup_steps=warmup, **ending))
    numpy.testing.assert_allclose(found, expected(kind, warmup, ratio), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (
            read("constant", warmup_steps=WARMUP),
            lambda optimizer: transformers.get_constant_schedule_with_warmup(optimizer, WARMUP),
        ),
        (
            read("linear", warmup_steps=WARMUP),
            lambda optimizer: transformers.get_linear_schedule_with_warmup(optimizer, WARMUP, TOTAL),
        ),
        (
            read("cosine", warmup_steps=WARMUP),
            lambda optimizer: transformers.get_cosine_schedule_with_warmup(optimizer, WARMUP, TOTAL),
        ),
        (
            read("inverse_sqrt", warmup_steps=WARMUP, timescale=20),
            lambda optimizer: transformers.get_inverse_sqrt_schedule(optimizer, WARMUP, timescale=20),
        ),
        *(
            (
                read("wsd", warmup_steps=WARMUP, decay=ours, min_lr_ratio=0.1),
                lambda optimizer, theirs=theirs: transformers.get_wsd_schedule(
                    optimizer, WARMUP, DECAY, TOTAL, decay_type=theirs, min_lr_ratio=0.1
                ),
            )
            for ours, theirs in (("linear", "linear"), ("cosine", "cosine"), ("sqrt", "1-sqrt"))
        ),
    ],
    ids=lambda value: getattr(value, "type", ""),
)
def test_after_the_warm_up_factors_are_those_of_transformers(schedule, make):
    ours, theirs = factors(schedule), of_transformers(make)
    # theirs may rise again after the end
    numpy.testing.assert_allclose(ours[WARMUP:TOTAL], theirs[WARMUP:TOTAL], rtol=1e-12, atol=1e-15)


def test_a_warm_up_is_that_of_transformers_without_its_step_at_0():
    theirs = of_transformers(lambda opt: transformers.get_linear_schedule_with_warmup(opt, WARMUP, TOTAL))
    ours = factors(read("linear", warmup_steps=WARMUP))
    assert theirs[0] == 0
    numpy.testing.assert_allclose(ours[:WARMUP], theirs[1 : WARMUP + 1], rtol=1e-12)


def test_cosine_is_torchs_cosine_annealing():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL, eta_min=0.1)
    for step in range(TOTAL):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(read("cosine", min_lr_ratio=0.1).factor(step))
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_of_the_run_trains_and_no_factor_exceeds_1(kind):
    assert all(0 < factor <= 1 for factor in factors(read(kind, warmup_steps=WARMUP), TOTAL))


def test_each_schedule_is_registered_under_its_own_type():
    assert [*SCHEDULES] == [*KINDS]
    assert all(schedule.model_fields["type"].default == kind for kind, schedule in SCHEDULES.items())


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_that_is_all_warm_up_is_at_its_minimum_after_it(kind):
    schedule = read(kind, warmup_steps=TOTAL, min_lr_ratio=0.1)
    assert [schedule.factor(step) for step in (TOTAL - 1, TOTAL)] == [1.0, pytest.approx(0.1)]


def test_a_schedule_that_is_all_warm_up_and_decay_has_no_stable_phase():
    schedule = read("wsd", warmup_steps=TOTAL - DECAY)
    assert [schedule.factor(step) for step in (28, 29, 30)] == [1.0, 1.0, 1 - 1 / DECAY]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "lr_schedule.type is missing: set it"),
        ({"type": None}, "lr_schedule.type is missing: set it"),
        ({"type": "cosin"}, f"lr_schedule.type = 'cosin' is not valid: Input should be {LISTED}"),
        ({"type": ["wsd"]}, "lr_schedule.type = ['wsd'] is not valid"),
        ({"type": "constant", "warmup_steps": True}, "lr_schedule.warmup_steps = True is not valid"),
        ({"type": "constant", "warmup_steps": -1}, "lr_schedule.warmup_steps = -1 is not valid"),
        (
            {"type": "wsd", "total_steps": 9, "decay_step": 3},
            "unknown key 'lr_schedule.decay_step': did you mean 'lr_schedule.decay_steps'",
        ),
        (
            {"type": "constant", "total_steps": 9},
            "lr_schedule.total_steps does not belong to type 'constant': remove it",
        ),
        ({"type": "wsd", "total_steps": 9}, "lr_schedule.decay_steps is missing"),
        (
            {"type": "wsd", "total_steps": 9, "decay_steps": 5, "warmup_steps": 5},
            "its phases take 10 steps of 9: shorten them",
        ),
        ({"type": "linear", "total_steps": 4, "warmup_steps": 5}, "its phases take 5 steps of 4"),
        ({"type": "cosine", "total_steps": 4, "min_lr_ratio": 2}, "lr_schedule.min_lr_ratio = 2"),
        ([], "lr_schedule = [] is not valid: Input should be a valid dictionary"),
        ("cosine", "lr_schedule = 'cosine' is not valid: Input should be a valid dictionary"),
    ],
)
def test_a_wrong_section_is_refused_by_key(section, message):
    with pytest.raises(ValidationError) as caught:
        Block.model_validate({"lr_schedule": section})
    assert message in str(invalid_settings(caught.value, "", Block))


@pytest.mark.parametrize("kind", KINDS)
def test_written_settings_read_back_as_they_are(kind):
    first = read(kind, warmup_steps=3)
    assert Block(lr_schedule=json.loads(first.model_dump_json())).lr_schedule == first


def test_schedules_load_without_torch():
    code = "import sys, megalowbit.optim.schedules.factors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
