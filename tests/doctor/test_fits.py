from dataclasses import replace

import pytest

from launchers import write_config
from megalowbit.doctor.fits import check_memory, check_room, device_bytes, host_bytes, save_seconds, to_dict
from megalowbit.doctor.target import TARGETS, cpu_target
from megalowbit.pretrain.config import load_config
from megalowbit.pretrain.estimate.memory import GIB

H100 = TARGETS["h100"]


def with_memory(plan, gib):
    """The plan with a device memory of so many GiB."""
    rest = plan.memory.total - plan.memory.saved_for_backward
    return replace(plan, memory=replace(plan.memory, saved_for_backward=int(gib * GIB) - rest))


@pytest.mark.parametrize(("gib", "levels"), [(60, []), (75, ["warning"]), (90, ["problem"])])
def test_device_memory_is_compared_with_the_target(tiny, gib, levels):
    plan = with_memory(tiny(), gib)
    assert device_bytes(plan, H100) == pytest.approx(gib * GIB)
    found = list(check_memory(plan, H100, None))
    assert [each.level for each in found] == levels
    assert all(each.code == "memory-device" and f"{gib}.0 of h100's 79.1 GiB" in each.text for each in found)


def test_each_way_to_fit_is_a_setting_that_lowers_the_estimate(tiny):
    plan = with_memory(tiny("zero_optimization.stage=1", processes=2), 90)
    (found,) = check_memory(plan, H100, None)
    ways = found.fix.split(" or ")
    assert len(ways) == 3
    before = tiny("zero_optimization.stage=1", processes=2).memory.total
    for way in ways:
        more = [way.removeprefix("--set ")]
        if "micro_batch" in more[0]:
            more.append("gradient_accumulation_steps=4")
        assert (
            tiny("zero_optimization.stage=1", *more, processes=2).memory.total < before + GIB
        )  # buckets of stage 2
        assert way.startswith("--set ")


@pytest.mark.parametrize("stage", [0, 1])
def test_each_way_to_fit_a_pipeline_is_accepted_by_the_configuration(tmp_path, tiny, stage):
    more = ["pipeline.stages=2", f"zero_optimization.stage={stage}", "gradient_accumulation_steps=null"]
    plan = with_memory(tiny(*more, processes=4), 90)
    fix = next(each.fix for each in check_memory(plan, H100, None) if each.code == "memory-device")
    assert ("zero_optimization.stage" in fix) == (stage == 0)
    for way in fix.split(" or "):
        chosen = [*more, way.removeprefix("--set ")]
        assert load_config(write_config(tmp_path), chosen, world_size=4).grid.pipeline_size == 2
    deep = {"n_layer": 8}
    recomputed = tiny(*more, "pipeline.activation_checkpoint_interval=1", processes=4, model=deep).memory
    assert recomputed.saved_for_backward < tiny(*more, processes=4, model=deep).memory.saved_for_backward


def test_host_memory_counts_what_zero_offloads_for_each_process(tiny):
    offload = 'zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}'
    plan = tiny(offload, processes=16)
    assert plan.start.offloaded > 0
    expected = plan.start.tensor + plan.start.reading + 8 * (plan.start.offloaded + GIB // 2)
    assert host_bytes(plan, H100) == expected
    found = list(check_memory(plan, H100, expected / GIB / 2))
    assert [each.code for each in found] == ["memory-host"]
    assert list(check_memory(plan, H100, 2 * expected / GIB)) == []


def test_on_cpus_the_host_is_the_device(tiny):
    plan = tiny(processes=2)
    target = replace(cpu_target(64.0), devices_of_host=2)
    assert device_bytes(plan, target) == plan.memory.total - plan.memory.context_and_communication
    assert host_bytes(plan, target) >= 2 * device_bytes(plan, target)
    assert to_dict(plan, target)["host"]["processes"] == 2


def test_room_is_needed_for_all_checkpoints_that_are_kept(tiny):
    plan = tiny("megalowbit.checkpoint.every=1", "megalowbit.checkpoint.keep=2")
    needed = 3 * plan.checkpoint_bytes + 2 * plan.parameters
    assert list(check_room(plan, needed, "/x")) == []
    (found,) = check_room(plan, needed - 1, "/x")
    assert (found.level, found.code) == ("problem", "disk-room")
    everything = tiny("megalowbit.checkpoint.every=1", "megalowbit.checkpoint.keep=null")
    assert list(check_room(everything, needed, "/x"))


def test_a_save_takes_the_longer_of_the_disk_and_of_a_rank(large):
    plan = large("zero_optimization.stage=1", processes=8, micro_batch=1, batch=8)
    alone = (2 + 12 / 8) * plan.parameters / 0.25e9  # docs/scaling.md
    assert save_seconds(plan, None) == pytest.approx(alone, rel=1e-6)
    assert save_seconds(plan, 1e12) == pytest.approx(alone, rel=1e-6)
    assert save_seconds(plan, 1e8) == pytest.approx(14 * plan.parameters / 1e8)


def test_stage_0_on_many_ranks_names_what_stage_1_would_free(large):
    plan = large("zero_optimization.stage=0", processes=8, micro_batch=1, batch=8)
    masters = replace(plan.memory, master_parameters=8 * GIB, optimizer_moments=16 * GIB)
    (found,) = check_memory(replace(plan, memory=masters), H100, None)
    assert found.code == "zero-stage"
    assert "21.0 GiB" in found.text
    assert found.fix == "--set zero_optimization.stage=1"
