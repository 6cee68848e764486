"""A launch that by-passes Triton's binder gives a driver what Triton's own launch gives it."""

import copy
import logging
import os
import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
import triton
import triton.language as tl
from simulated_gpus import simulate_current_gpu
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.kernels.launches import all_launches, name_of
from benchmarks.kernels.stand_in import standing_in
from megalowbit.quantize.triton import launch_plans
from megalowbit.quantize.triton.fixed_arguments import FixedArguments

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1: kernels cannot be compiled"
)


@triton.jit(do_not_specialize=["seed"])
def copy_kernel(x, out, bias, n, stride, seed, factor, TILE: tl.constexpr, IS_SCALED: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    value = tl.load(x + at * stride, mask=at < n)
    if IS_SCALED:
        value = value * factor + seed
    if bias is not None:
        value += tl.load(bias)
    tl.store(out + at, value, mask=at < n)


def arguments(**changes):
    given = {"x": torch.ones(64), "out": torch.ones(64), "bias": None, "n": 48, "stride": 2, "seed": 7}
    return given | {"factor": 0.5, "TILE": 16, "IS_SCALED": True} | changes


@triton.jit(do_not_specialize=["low", "high"])
def key_kernel(out, low, high):
    tl.store(out, low + high)


CASES = {
    "aligned": arguments(),
    "other numbers of the same kind": arguments(n=32, stride=3, seed=-9, factor=2.0),
    "pointer not divisible by 16": arguments(x=torch.ones(65)[1:]),
    "integer 1": arguments(stride=1),
    "integer not divisible by 16": arguments(n=47),
    "integer of 64 bits": arguments(n=2**35),
    "unspecialised 1": arguments(seed=1),
    "unspecialised 64 bits": arguments(seed=2**40),
    "unsigned 64 bits": arguments(seed=2**63),
    "other dtype": arguments(x=torch.ones(64, dtype=torch.float16)),
    "a pointer instead of None": arguments(bias=torch.ones(1)),
    "other constant": arguments(TILE=32),
    "constant of another type": arguments(IS_SCALED=1),
}


@pytest.fixture(scope="module")
def stand_in():
    with standing_in() as driver:
        yield driver


def launched(driver, launch):
    with driver.recording() as found:
        launch()
    return found


def plan_launch(kernel, programs, given):
    launch_plans.launch(kernel, programs, torch.device("cpu"), given)


def triton_launch(kernel, programs, given):
    kernel[(programs,)](**given, enable_fp_fusion=False)


@pytest.fixture
def ran(monkeypatch):
    """The calls of Triton's own launch."""
    calls, run = [], JITFunction.run

    def counted(self, *args, **kwargs):
        calls.append(self)
        return run(self, *args, **kwargs)

    # the by-pass compares the names that `run` reads
    monkeypatch.setattr(launch_plans, "RUN_NAMES", frozenset(counted.__code__.co_names))
    monkeypatch.setattr(JITFunction, "run", counted)
    return calls


def test_a_driver_gets_the_same_function_grid_stream_and_bytes(stand_in, ran):
    launch_plans.plans_of(copy_kernel).driver = None
    for _ in range(2):
        for programs, (name, given) in enumerate(CASES.items(), start=1):
            expected = launched(stand_in, lambda n=programs, g=given: triton_launch(copy_kernel, n, g))
            assert (
                launched(stand_in, lambda n=programs, g=given: plan_launch(copy_kernel, n, g)) == expected
            ), name
            assert len(expected) == 1
            assert expected[0].grid == (programs, 1, 1)
    own = 2 * len(CASES)  # the expected ones
    assert len(ran) <= own + len(CASES)  # of the others, those of the first round and none of the second
    functions = {name: launched(stand_in, lambda g=given: plan_launch(copy_kernel, 1, g))[0].function
                 for name, given in CASES.items()}  # fmt: skip
    same = ("aligned", "other numbers of the same kind", "unspecialised 1")
    assert len({functions[each] for each in same}) == 1
    assert len(set(functions.values())) >= len(CASES) - len(same)


def specialisation(launch):
    """What Triton's binder finds."""
    *_, binder = launch.kernel.device_caches[0]
    return str(binder(**launch.arguments)[1])


def key_of(launch):
    values = tuple(launch.arguments[name] for name in launch.kernel.arg_names)
    layout = launch_plans.plans_of(launch.kernel).layout(values)
    assert layout.is_known
    return tuple(map(type, values)), layout.key(values, 0)


def unaligned(tensor):
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return moved if moved.data_ptr() % 16 else tensor


def test_keys_are_as_fine_as_tritons_for_each_kernel_size_and_alignment(stand_in):
    found, launches = (
        {},
        [each for sizes in ((64, 128), (48, 80), (37, 65), (1, 16)) for each in all_launches(*sizes)],
    )
    launches += [
        each._replace(arguments=each.arguments | {name: unaligned(value)})
        for each in launches[:: len(launches) // 60]
        for name, value in each.arguments.items()
        if isinstance(value, torch.Tensor)
    ]
    for each in launches:
        found.setdefault((name_of(each.kernel), key_of(each)), set()).add(specialisation(each))
    assert all(len(specialised) == 1 for specialised in found.values())
    assert len(found) > 200


@pytest.mark.slow
def test_each_kernel_of_the_package_is_launched_alike(stand_in):
    one_each = {name_of(each.kernel): each for each in all_launches(48, 64)}
    for name, each in one_each.items():
        for launch in (each, each):
            expected = launched(stand_in, lambda e=launch: triton_launch(e.kernel, e.programs, e.arguments))
            found = launched(stand_in, lambda e=launch: plan_launch(e.kernel, e.programs, e.arguments))
            assert found == expected, name
            assert len(found) == 1


def test_hooks_see_each_launch(stand_in, ran, monkeypatch):
    names = []

    def hook(metadata):
        names.append(metadata.get()["name"])

    for _ in range(2):
        plan_launch(copy_kernel, 1, arguments())
    ran.clear()
    plan_launch(copy_kernel, 1, arguments())
    assert not ran
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        plan_launch(copy_kernel, 1, arguments())
        assert names == ["copy_kernel"]
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    monkeypatch.setattr(copy_kernel, "pre_run_hooks", [lambda *_, **named: names.append(named["n"])])
    plan_launch(copy_kernel, 1, arguments())
    assert names == ["copy_kernel", 48]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda patch, _: patch.setattr(triton, "__version__", "3.99.0"), "Triton 3.99.0 were not checked"),
        (
            lambda patch, _: patch.setattr(JITFunction, "run", lambda self, **_: self.other),
            r"JITFunction.run of Triton 3.* reads other names than expected \(RuntimeError, ",
        ),
        (
            lambda patch, _: patch.setattr(
                triton.backends.nvidia.driver.CudaLauncher, "__call__", lambda *_: 0
            ),
            "takes other parameters",
        ),
        (
            lambda patch, driver: patch.setattr(
                driver, "get_current_target", lambda: triton.backends.compiler.GPUTarget("hip", "gfx942", 64)
            ),
            "not checked on hip",
        ),
    ],
)
def test_other_internals_are_left_to_triton_and_logged_once(stand_in, monkeypatch, caplog, changed, reason):
    changed(monkeypatch, stand_in)
    assert launch_plans.why_not_bypassed(stand_in) is not None
    with caplog.at_level(logging.INFO, "megalowbit"):
        launch_plans._may_bypass.cache_clear()
        assert [launch_plans._may_bypass(stand_in, JITFunction.run) for _ in range(2)] == [False, False]
    launch_plans._may_bypass.cache_clear()
    assert len(caplog.records) == 1
    assert re.search(reason, caplog.text)


def test_this_version_of_triton_is_checked(stand_in):
    if not triton.__version__.startswith(launch_plans.CHECKED):
        pytest.skip(f"Triton {triton.__version__} is left to itself")
    assert launch_plans.why_not_bypassed(stand_in) is None


def fixed_of(given):
    """What of some arguments is kept, and what is not."""
    kept = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
    kept.pop("bias"), kept.pop("seed")
    others = {name: given[name] for name in ("x", "out", "bias", "seed")}
    return FixedArguments(kept, 3, words=("out",)), others


def test_kept_arguments_give_a_driver_the_same(stand_in, ran):
    launch_plans.plans_of(copy_kernel).driver = None
    fixed, given = fixed_of(arguments(x=torch.ones(64, dtype=torch.bfloat16)))
    changes = [
        {},
        {"x": torch.ones(65, dtype=torch.bfloat16)[1:]},
        {"seed": 2**40},
        {"seed": -(2**31) - 1},
        {"bias": torch.ones(1, dtype=torch.bfloat16)},
        {"bias": torch.ones(2, dtype=torch.bfloat16)[1:]},
    ]
    for is_known in (False, True):
        for change in changes:
            whole = fixed.complete(given | change)
            assert (whole["x"].dtype, whole["out"].dtype) == (torch.int16, torch.int32)
            expected = launched(stand_in, lambda w=whole: triton_launch(copy_kernel, 3, w))
            ran.clear()
            found = launched(
                stand_in,
                lambda g=given | change: launch_plans.launch_fixed(
                    copy_kernel, torch.device("cpu"), fixed, g
                ),
            )
            assert found == expected, change
            assert not ran or not is_known
    # numbers of 64 bits share a plan
    assert sum(len(each.compiled) for each in fixed.plans.values()) == len(changes) - 1


KEYS = [(1, 1), (2**40, 1), (1, 2**40), (2**40, 2**40), (2**63, 1), (1, 2**63), (-(2**31) - 1, -(2**31))]


@pytest.mark.parametrize("way", [0, 1], ids=["whole", "kept"])
def test_each_number_has_its_own_width(stand_in, way):
    out, functions = torch.ones(1, dtype=torch.int64), {}
    fixed = FixedArguments({}, 1)
    for low, high in KEYS * 3:
        given = {"out": out, "low": low, "high": high}
        (expected,) = launched(stand_in, lambda g=given: triton_launch(key_kernel, 1, g))
        ways = (
            lambda g=given: plan_launch(key_kernel, 1, g),
            lambda g=given: launch_plans.launch_fixed(key_kernel, torch.device("cpu"), fixed, g),
        )
        assert launched(stand_in, ways[way]) == [expected], (low, high)
        functions[low, high] = expected.function
    assert len(set(functions.values())) == len(KEYS) - 1  # the last one's are those of (2**40, 1)


@pytest.mark.parametrize(
    ("name", "value"), [("stride", 2), ("factor", 0.5), ("TILE", 16), ("IS_SCALED", True)]
)
def test_what_a_kernel_is_compiled_for_must_be_kept(stand_in, name, value):
    fixed, given = fixed_of(arguments())
    others = {key: each for key, each in fixed.values.items() if key != name}
    with pytest.raises(TypeError, match=f"copy_kernel is compiled for the value of {name} = {value}: "):
        launch_plans.launch_fixed(
            copy_kernel, torch.device("cpu"), FixedArguments(others, 3), {**given, name: value}
        )


def planned_twice(given):
    """Make a plan, for whole arguments and for kept ones; returns how to launch by either."""
    fixed, others = fixed_of(given)
    cpu = torch.device("cpu")
    ways = (
        lambda: plan_launch(copy_kernel, 3, given),
        lambda: launch_plans.launch_fixed(copy_kernel, cpu, fixed, others),
    )
    for way in ways * 3:
        way()
    return ways


@pytest.mark.parametrize("way", [0, 1], ids=["whole", "kept"])
def test_a_plan_belongs_to_one_device(stand_in, ran, monkeypatch, way):
    given = arguments()
    launch, functions = planned_twice(given)[way], []
    ran.clear()
    for device in (0, 1, 0, 1):
        monkeypatch.setattr(stand_in, "get_current_device", lambda device=device: device)
        monkeypatch.setattr(stand_in, "get_current_stream", lambda index: 0x100 + index)
        (found,) = launched(stand_in, launch)
        assert found.stream == 0x100 + device
        functions.append(found.function)
    assert functions[0] == functions[2] != functions[1] == functions[3]
    assert len(ran) == 1


@pytest.mark.parametrize("way", [0, 1], ids=["whole", "kept"])
def test_a_plan_belongs_to_one_driver(stand_in, ran, way):
    launch = planned_twice(arguments())[way]
    ran.clear()
    launch()
    assert not ran
    driver.set_active(copy.copy(stand_in))
    try:
        launch()
    finally:
        driver.set_active(stand_in)
    assert ran == [copy_kernel]


@pytest.mark.parametrize("way", [0, 1], ids=["whole", "kept"])
def test_launches_are_on_the_device_of_their_tensors(stand_in, monkeypatch, way):
    current, found = simulate_current_gpu(monkeypatch), []
    name = ("launch", "launch_fixed")[way]
    monkeypatch.setattr(launch_plans.KernelPlans, name, lambda *_: found.append(current[-1]))
    for index in (0, 1, 0):
        getattr(launch_plans, name)(copy_kernel, *(() if way else (3,)), torch.device("cuda", index), *(
            (FixedArguments({}, 3), {}) if way else ({},)
        ))  # fmt: skip
    assert found == [0, 1, 0]
    assert current == [0]


def exit_hook(_metadata):
    """A profiler's."""


@pytest.mark.parametrize("way", [0, 1], ids=["whole", "kept"])
@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (knobs.runtime, "debug", True),
        (knobs.compilation, "instrumentation_mode", "fpsan"),
        (knobs.runtime, "add_stages_inspection_hook", lambda *_: ("", "")),
        (knobs.runtime, "launch_exit_hook", exit_hook),
    ],
    ids=["debug", "instrumentation", "stages", "exit hook"],
)
def test_what_must_see_or_change_each_launch_gets_tritons(monkeypatch, stand_in, way, owner, name, value):
    launch = planned_twice(arguments())[way]
    triton_launches = []
    monkeypatch.setattr(
        type(copy_kernel), "__getitem__", lambda self, _grid: lambda **named: triton_launches.append(named)
    )
    launch()
    assert not triton_launches
    monkeypatch.setattr(owner, name, value)
    launch()
    assert len(triton_launches) == 1


def test_a_launch_with_options_makes_no_plan_and_uses_none(stand_in, ran):
    launch_plans.plans_of(copy_kernel).driver = None
    given, blocks = arguments(), []
    for options in ({"num_warps": 8}, {}, {"num_warps": 8}, {}):
        (found,) = launched(stand_in, lambda options=options: plan_launch(copy_kernel, 3, given | options))
        blocks.append(found.block[0])
    assert blocks == [256, 128, 256, 128]
    assert len(ran) == 3  # all but the last one


@pytest.mark.parametrize("way", [0, 1], ids=["whole", "kept"])
def test_another_run_of_triton_is_not_bypassed(stand_in, monkeypatch, way):
    launch, seen, run = planned_twice(arguments())[way], [], JITFunction.run

    def watching(self, *args, **kwargs):
        seen.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", watching)
    for _ in range(2):
        launch()
    assert seen == [copy_kernel] * 2


def test_tensors_of_other_classes_are_left_to_triton(stand_in):
    class Other(torch.Tensor):
        pass

    given = arguments(x=torch.ones(64).as_subclass(Other))
    values = tuple(given[name] for name in copy_kernel.arg_names)
    assert not launch_plans.plans_of(copy_kernel).layout(values).is_known
    expected = launched(stand_in, lambda: triton_launch(copy_kernel, 3, given))
    assert launched(stand_in, lambda: plan_launch(copy_kernel, 3, given)) == expected
