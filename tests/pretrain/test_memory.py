import pytest
import torch

from megalowbit.hf.checkpoint import build_model
from megalowbit.layers.recipe import recipe
from megalowbit.layers.surgery import convert
from megalowbit.optim.op_classes import OpClasses
from megalowbit.pretrain.memory import (
    GIB,
    MemoryEstimate,
    ZeroSharing,
    estimate_memory,
    saved_for_backward,
)


def estimate(config, **changes):
    arguments = {
        "precision": "bf16",
        "optimizer_type": "AdamW",
        "has_momentum": False,
        "micro_batch_size": 2,
        "sequence_length": 32,
        **changes,
    }
    return estimate_memory(config.settings.model, recipe("nvfp4"), **arguments)


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_weights_gradients_masters_and_moments_are_what_an_optimizer_really_holds(build_job, resolve):
    from megalowbit.pretrain.loop import train_step

    job = build_job()
    train_step(job)
    optimizer = job.engine.optimizer
    expected = estimate(resolve())
    assert expected.parameters == bytes_of(job.engine.module.parameters())
    assert expected.main_gradients == bytes_of([optimizer.grad_buffer.flat])
    masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert expected.master_parameters == bytes_of(masters)
    moments = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name in ("exp_avg", "exp_avg_sq")
    ]
    assert expected.optimizer_moments == bytes_of(moments)


SPLIT = {"base": "nvfp4", "split_input": {"rank": 4, "gains": "ysche"}, "split_weight": {"method": "svd"}}


@pytest.mark.parametrize("name", ["nvfp4", "bf16", SPLIT], ids=["nvfp4", "bf16", "split"])
def test_what_is_saved_for_backward_is_counted_as_on_real_tensors(resolve, name):
    config = resolve()
    model = build_model(config.settings.model, seed=0)
    convert(model, name)
    model.bfloat16()
    real = saved_for_backward(model, 2, 32)
    estimated = estimate_memory(
        config.settings.model, recipe(name), precision="bf16", optimizer_type="AdamW", has_momentum=False,
        micro_batch_size=2, sequence_length=32,
    ).saved_for_backward  # fmt: skip
    assert estimated == pytest.approx(real, rel=0.1)


def test_a_bit_linear_saves_packed_operands_only():
    layers = torch.nn.Sequential(torch.nn.Linear(256, 512, bias=False, dtype=torch.bfloat16))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, input_ids, labels):
            x = torch.ones(input_ids.numel(), 256, dtype=torch.bfloat16, requires_grad=True)
            return type("Output", (), {"loss": self.layers(x).sum()})

    model = Model()
    plain = saved_for_backward(model, 1, 1024)
    convert(model, "nvfp4")
    packed = saved_for_backward(model, 1, 1024)
    assert plain == 1024 * 256 * 2
    # 4.5 bits an element of input and weight, and two fp32 tensor scales
    assert packed == (1024 * 256 + 512 * 256) * 9 // 16 + 8


def test_precision_and_optimizer_decide_the_state(resolve):
    config = resolve()
    half, full = estimate(config), estimate(config, precision="fp32")
    assert full.master_parameters == 0
    assert full.parameters == 2 * half.parameters
    assert estimate(config, optimizer_type="SGD").optimizer_moments == 0
    momentum = estimate(config, optimizer_type="SGD", has_momentum=True)
    assert momentum.optimizer_moments == half.optimizer_moments // 2


def test_the_report_names_every_part_and_their_sum():
    parts = MemoryEstimate(
        parameters=GIB, main_gradients=2 * GIB, master_parameters=0, optimizer_moments=0, saved_for_backward=0
    )
    assert parts.total == 3 * GIB
    assert "main gradients           2.000 GiB" in str(parts)
    assert str(parts).splitlines()[-1].split() == ["total", "3.000", "GiB"]


def test_fp32_norms_have_no_masters_and_autocast_keeps_more(resolve):
    plain, with_norms = estimate(resolve()), estimate(resolve(), fp32_norms=True)
    model = build_model(resolve().settings.model, seed=0)
    norms = sum(
        p.numel() for m in model.modules() if isinstance(m, torch.nn.LayerNorm) for p in m.parameters()
    )
    assert norms > 0
    assert with_norms.parameters == plain.parameters + 2 * norms
    assert with_norms.master_parameters == plain.master_parameters - 4 * norms
    assert with_norms.main_gradients == plain.main_gradients
    casts = estimate(resolve(), op_classes=OpClasses.default())
    assert casts.saved_for_backward > plain.saved_for_backward
    assert casts.parameters == plain.parameters


def test_zero_leaves_each_process_its_share(resolve):
    whole = estimate(resolve())
    stages = [estimate(resolve(), sharing=ZeroSharing(stage=stage, data_size=4)) for stage in range(4)]
    assert stages[0] == whole
    masters = -(-whole.parameters * 2 // 4)  # bf16: two bytes each, four of a master
    for shared in stages[1:]:
        assert shared.master_parameters == masters
        assert shared.optimizer_moments == 2 * masters
        assert shared.saved_for_backward == whole.saved_for_backward
    assert [shared.parameters for shared in stages] == [whole.parameters] * 3 + [masters // 2]
    gradients = whole.main_gradients
    assert [shared.main_gradients for shared in stages] == [
        gradients, gradients + gradients // 4, gradients // 4, gradients // 4
    ]  # fmt: skip


def test_what_is_offloaded_is_on_the_host_and_not_in_the_total(resolve):
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    there = estimate(resolve(), sharing=ZeroSharing.from_config(config, 2))
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    both = estimate(resolve(), sharing=ZeroSharing.from_config(config, 2))
    plain = estimate(resolve(), sharing=ZeroSharing(stage=3, data_size=2))
    assert there.total == plain.parameters + plain.saved_for_backward
    assert both.total == plain.saved_for_backward
    assert there.on_the_host == plain.master_parameters + plain.optimizer_moments + plain.main_gradients
    assert both.on_the_host == there.on_the_host + plain.parameters
    assert str(both).splitlines()[-1].startswith("  on the host")
