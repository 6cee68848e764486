import copy
import io

import pytest
import torch
import torch.nn.functional as F
from quick_cases import every_value
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from megalowbit.errors import UserError
from megalowbit.optim.loss_scale.constant import ConstantGradScaler
from megalowbit.optim.optimizers.mixed_precision import Float16OptimizerWithFloat16Params
from megalowbit.optim.precision.autocast import attach_autocast
from megalowbit.optim.precision.fp32_modules import is_kept_fp32, keep_fp32

HALVES = [torch.float16, torch.bfloat16]


class Router(nn.Linear):
    pass


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), Router(8, 8), LlamaRMSNorm(8), nn.RMSNorm(8)
    )


def kept_names(net):
    return {name for name, parameter in net.named_parameters() if is_kept_fp32(parameter)}


NORMS = {"1.weight", "1.bias", "4.weight", "5.weight"}


def inputs(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_norms_of_torch_and_of_models_are_found_by_type_and_by_class_name():
    net = model()
    assert keep_fp32(net).names == ("1", "4", "5")
    assert kept_names(net) == NORMS


@pytest.mark.parametrize("pattern", ["3", "Router", "Rout*"])
def test_patterns_name_further_modules_by_name_or_class(pattern):
    assert keep_fp32(model(), [pattern], norms=False).names == ("3",)


@pytest.mark.parametrize("pattern", ["*.router", "layernorm", ""])
def test_a_pattern_that_matches_nothing_is_refused_and_changes_nothing(pattern):
    net = model().half()
    with pytest.raises(UserError, match="matches no module"):
        keep_fp32(net, ["Router", pattern])
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float16}
    assert not any(module._forward_pre_hooks for module in net)


@pytest.mark.parametrize("pattern", ["Rout*", ("3",), iter(["3"])])
def test_one_pattern_needs_no_list(pattern):
    assert keep_fp32(model(), pattern, norms=False).names == ("3",)


@pytest.mark.parametrize("patterns", [None, 3, [None], ["Router", 3]])
def test_patterns_that_are_no_strings_are_refused_in_one_line_and_change_nothing(patterns):
    net = model()
    with pytest.raises(UserError, match=r"patterns = .* is not valid: pass names of modules") as caught:
        keep_fp32(net, patterns)
    assert "\n" not in str(caught.value)
    assert kept_names(net) == set()


def test_a_model_without_norms_is_refused():
    with pytest.raises(UserError, match="no norm to keep in fp32"):
        keep_fp32(nn.Linear(2, 2))


@pytest.mark.parametrize("has_autocast", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_norm_is_computed_in_fp32_and_returns_its_inputs_type(dtype, has_autocast):
    norm = LlamaRMSNorm(64).to(dtype)
    norm.weight.data.copy_(inputs(64) + 1)
    keep_fp32(norm)
    norm.weight.data += 1e-4  # what half precision could not hold
    x = (inputs(32, 64, seed=2) * 100).to(dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=has_autocast):
        got = norm(x)
    wide = x.double()
    reference = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight.double()
    assert got.dtype == dtype
    # Rounded once: all but ties, and what fp32 places on the other side of one.
    assert (got == reference.to(dtype)).double().mean() > 0.999


def test_linear_layers_that_are_kept_do_not_follow_autocast():
    layer = Router(64, 4).half()
    keep_fp32(nn.Sequential(layer), ["Router"])
    layer.weight.data += 1e-5
    x = inputs(16, 64).half()
    with torch.autocast("cpu", dtype=torch.float16):
        got = layer(x)
    reference = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    assert got.dtype == torch.float16
    assert (got == reference.half()).double().mean() > 0.98


def test_an_fp32_input_stays_fp32():
    norm = nn.LayerNorm(8)
    keep_fp32(norm)
    x = inputs(2, 8)
    assert torch.equal(norm(x), F.layer_norm(x, (8,)))


def test_the_optimizer_leaves_kept_parameters_fp32_and_without_a_master():
    net = model()
    keep_fp32(net)
    inner = torch.optim.SGD(net.parameters(), lr=0.5)
    optimizer = Float16OptimizerWithFloat16Params(
        inner, clip_grad=0.0, grad_scaler=ConstantGradScaler(2.0**8), cast_parameters=True
    )
    dtypes = {name: parameter.dtype for name, parameter in net.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == NORMS
    assert set(dtypes.values()) == {torch.float16, torch.float32}
    assert [len(group) for group in optimizer.fp32_from_fp32_groups] == [4]
    before = net[1].weight.detach().clone()
    loss = net(inputs(4, 8).half()).float().square().mean()
    optimizer.scale_loss(loss).backward()
    gradient = net[1].weight.main_grad / 2.0**8
    assert gradient.dtype == torch.float32
    optimizer.step()
    assert torch.equal(net[1].weight, before - 0.5 * gradient)


def test_gradients_of_a_kept_norm_are_those_of_fp32():
    norm = nn.LayerNorm(64).half()
    keep_fp32(norm)
    x, weights = inputs(256, 64).half(), inputs(256, 64, seed=4).half()
    (norm(x) * weights).sum().backward()
    normed = F.layer_norm(x.double(), (64,))
    reference = (normed * weights.double()).sum(0)
    assert norm.weight.grad.dtype == torch.float32
    assert ((norm.weight.grad - reference).abs().max() / reference.abs().max()).item() < 1e-5


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_casts_as_well(use_reentrant):
    results = []
    for is_checkpointed in (False, True):
        net = model().half()
        keep_fp32(net)
        x = inputs(4, 8).half().requires_grad_()
        out = checkpoint(net, x, use_reentrant=use_reentrant) if is_checkpointed else net(x)
        out.float().square().mean().backward()
        results.append([x.grad, *(parameter.grad for parameter in net.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_forward_that_fails_leaves_nothing_behind():
    net = nn.Sequential(nn.LayerNorm(8)).half()
    keep_fp32(net)
    with torch.autocast("cpu", dtype=torch.float16):
        with pytest.raises(RuntimeError):
            net(inputs(2, 7).half())
        assert torch.is_autocast_enabled("cpu")
    assert net(inputs(2, 8).half()).dtype == torch.float16
    assert net(inputs(2, 8)).dtype == torch.float32


def test_removing_deletes_hooks_and_marks():
    net = model()
    kept = keep_fp32(net)
    kept.remove()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in net)
    assert not any(is_kept_fp32(parameter) for parameter in net.parameters())


def copied(net):
    return copy.deepcopy(net)


def pickled(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copied, pickled])
def test_a_duplicate_of_a_model_is_kept_like_it_and_trains(duplicate):
    net = model()
    keep_fp32(net)
    other = duplicate(net)
    assert kept_names(other) == kept_names(net) == NORMS
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD(other.parameters(), lr=0.5),
        clip_grad=0.0, grad_scaler=ConstantGradScaler(2.0**8), cast_parameters=True,
    )  # fmt: skip
    assert {name for name, parameter in other.named_parameters() if parameter.dtype == torch.float32} == NORMS
    x = inputs(4, 8).half()
    before = other[5].weight.detach().clone()
    optimizer.scale_loss(other(x).float().square().mean()).backward()
    assert optimizer.step().is_applied
    assert not torch.equal(other[5].weight, before)
    assert torch.equal(net[5].weight, before)


def test_a_copy_is_undone_by_itself():
    net = model().half()
    keep_fp32(net)
    other = copy.deepcopy(net)
    keep_fp32(other).remove()
    assert kept_names(other) == set()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in other)
    assert kept_names(net) == NORMS
    assert net(inputs(4, 8).half()).dtype == torch.float16


def test_a_module_kept_twice_stays_kept_until_both_are_removed():
    net = model().half()
    first, second = keep_fp32(net), keep_fp32(net, "1")
    assert len(net[1]._forward_pre_hooks) == 1
    first.remove()
    first.remove()
    assert kept_names(net) == NORMS
    assert net(inputs(4, 8).half()).dtype == torch.float16
    second.remove()
    assert kept_names(net) == set()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in net)


def test_a_norm_in_a_block_that_another_call_kept_survives_the_blocks_release():
    net = nn.Sequential(nn.Sequential(nn.LayerNorm(8), Router(8, 8)))
    keep_fp32(net)
    keep_fp32(net, "0").remove()
    assert kept_names(net) == {"0.0.weight", "0.0.bias"}


def test_tied_parameters_are_kept_while_one_of_their_modules_is():
    net = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    net[1].weight = net[0].weight
    one, other = keep_fp32(net, "0", norms=False), keep_fp32(net, "1", norms=False)
    one.remove()
    assert is_kept_fp32(net[0].weight)
    assert not is_kept_fp32(net[0].bias)
    other.remove()
    assert not is_kept_fp32(net[0].weight)


@pytest.mark.parametrize("dtype", HALVES)
def test_half_after_keep_fp32_raises_a_one_line_error_with_the_module_and_the_order(dtype):
    net = model()
    keep_fp32(net)
    net.to(dtype)
    with pytest.raises(
        UserError, match=r"module '1' is kept in fp32.*\.half\(\).* before keep_fp32"
    ) as caught:
        net(inputs(2, 8).to(dtype))
    assert str(dtype).removeprefix("torch.") in str(caught.value)
    assert "\n" not in str(caught.value)
    keep_fp32(model().to(dtype))


@every_value(is_attached_first=[False, True], backend=["eager", "aot_eager"])
def test_a_compiled_model_under_autocast_computes_and_trains_the_same(is_attached_first, backend):
    torch.compiler.reset()
    results = []
    for is_compiled in (False, True):
        net = model().half()
        if is_attached_first:
            attach_autocast(net, "fp16", "cpu")
        keep_fp32(net)
        if not is_attached_first:
            attach_autocast(net, "fp16", "cpu")
        run = torch.compile(net, backend=backend) if is_compiled else net
        out = run(inputs(4, 8).half())
        out.float().square().mean().backward()
        assert not torch.is_autocast_enabled("cpu")
        results.append([out.detach(), *(parameter.grad for parameter in net.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_module_within_a_kept_one_is_covered_by_it():
    net = nn.Sequential(nn.Sequential(nn.LayerNorm(8), Router(8, 8)), nn.LayerNorm(8))
    kept = keep_fp32(net, ["0"])
    assert kept.names == ("0", "1")
    assert all(is_kept_fp32(parameter) for parameter in net.parameters())
