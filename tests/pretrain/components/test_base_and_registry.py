"""Properties of every registered component."""

import pytest

from megalowbit.config.deepspeed_json import LOOP_SECTIONS
from megalowbit.pretrain.components.registry import ALWAYS_ON, COMPONENTS, OPTIONAL
from megalowbit.pretrain.loop import train_step
from megalowbit.values import SettingsModel

SWITCH = "megalowbit.late_switch.at=4"
SPECULATION = ("megalowbit.recipe=speculative-int8", "megalowbit.speculation={}")
PROFILE = "megalowbit.profile={}"
MEDIA = ('megalowbit.samples={"prompts": ["def"]}', "megalowbit.histograms={}")
SWITCHED = ["OverflowCounts", "LateSwitch"]
MEASURED = ["Throughput", "Memory"]
RECORDED = ["LossGuard", "StaticInputRecord"]
SPLIT = 'megalowbit.recipe={"base": "nvfp4", "parameter_split": {"rank": 4, "warmup_steps": 3}}'


def test_each_section_of_a_component_has_settings_and_others_have_none():
    for kind in COMPONENTS:
        has_section = kind in (*OPTIONAL, *ALWAYS_ON)
        assert has_section == (kind.settings_class is not None) == (kind.key in LOOP_SECTIONS)
        assert not has_section or issubclass(kind.settings_class, SettingsModel)


def test_keys_and_files_of_components_are_their_own():
    keys = [kind.key for kind in COMPONENTS if kind.key]
    files = [name for kind in COMPONENTS for name in kind.records]
    assert len(set(keys)) == len(keys)
    assert len(set(files)) == len(files)
    assert not {"loader", "totals", "skips_in_a_row", "random_stream", "weight_splits"} & {*keys}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), ["OverflowCounts", *RECORDED, *MEASURED]),
        ((PROFILE,), ["OverflowCounts", "Profiler", *RECORDED, *MEASURED]),
        (
            (SWITCH, *SPECULATION),
            [*SWITCHED, "Speculation", *RECORDED, *MEASURED],
        ),
        (
            (SWITCH, SPLIT),
            [*SWITCHED, *RECORDED, "ParameterSplitting", *MEASURED],
        ),
        (MEDIA, ["OverflowCounts", "Samples", "Histograms", *RECORDED, *MEASURED]),
        (("megalowbit.recipe=bf16",), ["LossGuard", *MEASURED]),
    ],
)
def test_a_run_has_its_configured_components_in_registry_order(build_job, overrides, expected):
    found = [type(each) for each in build_job(*overrides).components]
    assert [kind.__name__ for kind in found] == expected
    assert found == [kind for kind in COMPONENTS if kind in found]


MACHINE = ("tflops_per_device", "host_memory_gib")


def test_component_columns_are_in_the_order_in_which_components_act(build_job):
    for overrides, more in (((SWITCH, *SPECULATION), "speculation"), ((SWITCH, SPLIT), "weights_split")):
        job = build_job(*overrides)
        job.loss_guard.rollbacks = [{"after_step": 3, "to_step": 2, "reason": ""}]
        columns = list(train_step(job).facts)
        assert columns[0] == "loss"
        names = dict.fromkeys(name.partition("/")[0] for name in columns[columns.index("tokens") + 1 :])
        order = ["precision_switched", "speculation", "rollbacks", "weights_split", *MACHINE]
        assert list(names) == [
            name for name in order if name in {"precision_switched", "rollbacks", *MACHINE, more}
        ]


def test_a_checkpoint_has_an_entry_for_each_component_also_if_it_is_off(build_job):
    progress = build_job()._state({})["progress"]
    assert {kind.key for kind in COMPONENTS if kind.key} <= progress.keys()
