import copy
import gc
import io
import weakref

import pytest
import torch
from recording_chooser import RecordingChooser
from tiny_models import tiny_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalowbit import cuda_graphs
from megalowbit.layers import siblings
from megalowbit.layers.conversion.convert import (
    bit_layers,
    cache_weights,
    convert,
    restore,
    set_chooser,
    set_observer,
    share_inputs,
)
from megalowbit.layers.matmul.context import MatmulContext
from megalowbit.layers.recipe import recipe as recipe_of
from megalowbit.layers.siblings import SharedInput, find_siblings
from megalowbit.quantize.names import quantizer
from megalowbit.quantize.random_stream import RandomStream

STOCHASTIC = {"base": "nvfp4", "q_forward_input": "nvfp4e2m1b", "q_backward_input": "nvfp4e2m1b"}
RECIPES = {
    "nvfp4": "nvfp4",
    "stochastic inputs": STOCHASTIC,
    "mean split": "metis-nvfp4",
    "one copy for each product": {"base": "nvidia-nvfp4", "keep_last": 0},
    "fp8 GEMM": {"base": "mxfp4", "gemm": "fp8"},
    "other input in backward": {"base": "nvfp4", "q_backward_input": "fp8e4m3"},
    "kept directions": {"base": "nvfp4", "split_input": {"rank": 3, "q_factors": "nvfp4e2m1b"}},
}
INPUTS_OF_A_BLOCK = 4  # q/k/v, o, gate/up, down


class Observed:
    def __init__(self):
        self.seen = []

    def observe(self, layer, role, counts, error):
        self.seen.append((layer, role, counts.tolist(), error.tolist()))


class Attention(nn.Module):
    """Projections without the attention, and what happens to their input in between."""

    def __init__(self, between=lambda x: x, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(32, 48, dtype=dtype)
        self.k_proj = nn.Linear(32, 32, dtype=dtype)
        self.v_proj = nn.Linear(32, 16, dtype=dtype)
        self.o_proj = nn.Linear(16, 32, dtype=dtype)
        self.between = between

    def forward(self, x):
        x = x * 1.5
        return self.q_proj(x), self.k_proj(self.between(x)), self.o_proj(self.v_proj(x))


def converted(model, recipe="nvfp4"):
    convert(model, recipe, seed=3)
    return model


def without_sharing(model):
    other = copy.deepcopy(model)
    share_inputs(other, is_on=False)
    return other


def inputs(count=5, seed=0):
    return torch.randn(2, count, 32, generator=torch.Generator().manual_seed(seed))


def gradients(model, x, run=None):
    x = x.clone().requires_grad_()
    outputs = (model if run is None else run)(x)
    sum(each.float().square().sum() for each in outputs).backward()
    found = [*(each.detach() for each in outputs), x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found


def two_steps_of_a_model(model):
    found = []
    for seed in range(2):
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters())]
        model.zero_grad()
    return found


def assert_equal(one, other):
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def made(monkeypatch):
    """The roles of all operands that are quantised; a shared one appears once."""
    roles, original = [], MatmulContext._quantized

    def recording(self, operand, quantization, *args, **kwargs):
        roles.append(quantization.role)
        return original(self, operand, quantization, *args, **kwargs)

    monkeypatch.setattr(MatmulContext, "_quantized", recording)
    return roles


def test_siblings_are_layers_of_one_module_with_one_input_size():
    sizes = {f"h.0.self_attn.{name}": 64 for name in ("v_proj", "q_proj", "k_proj", "o_proj")}
    sizes |= {"h.0.mlp.up_proj": 64, "h.1.mlp.gate_proj": 64, "h.1.self_attn.q_proj": 64}
    qkv = tuple(f"h.0.self_attn.{name}_proj" for name in "qkv")
    assert find_siblings(sizes) == dict.fromkeys(qkv, qkv)
    assert find_siblings({"gate_proj": 8, "up_proj": 8}) == dict.fromkeys(
        ("gate_proj", "up_proj"), ("gate_proj", "up_proj")
    )
    # a cross attention may read keys and values of another size
    assert find_siblings({"a.q_proj": 8, "a.k_proj": 16, "a.v_proj": 16}) == dict.fromkeys(
        ("a.k_proj", "a.v_proj"), ("a.k_proj", "a.v_proj")
    )


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_sharing_changes_no_bit(recipe, made):
    model = converted(tiny_model("llama"), recipe)
    alone = without_sharing(model)
    expected = two_steps_of_a_model(alone)
    number_alone = sum(role in ("input", "backward_input") for role in made)
    made.clear()
    assert_equal(two_steps_of_a_model(model), expected)
    number = sum(role in ("input", "backward_input") for role in made)
    share = 1 if "split_input" in recipe else INPUTS_OF_A_BLOCK / 7
    assert number == number_alone * share
    assert model.model.layers[0].mlp.up_proj.shared_input._current is None


def test_stochastic_siblings_round_with_the_numbers_of_the_first():
    model, x = converted(Attention(), STOCHASTIC), inputs()
    outputs = model(x)
    key = RandomStream(3).key("q_proj", "input", step=1)
    values = quantizer("nvfp4e2m1b").quantize(x * 1.5, random_key=key).dequantize().double()
    for output, layer in zip(outputs[:2], (model.q_proj, model.k_proj), strict=True):
        weight = quantizer("nvfp4e2m1bnosr")(layer.weight.detach()).double()
        expected = values @ weight.T + layer.bias.double()
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["in place", "a copy", "another tensor", "a hook", "a view of a part"])
def test_a_sibling_with_another_input_quantises_it(change, made):
    def doubled(x):
        with torch.no_grad():
            x *= 2
        return x

    between = {
        "in place": doubled,
        "a copy": torch.clone,
        "another tensor": lambda x: -x,
        "a hook": lambda x: x,
        "a view of a part": lambda x: x[:, 1:],
    }[change]
    model = converted(Attention(between))
    if change == "a hook":
        model.k_proj.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    alone = without_sharing(model)
    with torch.no_grad():
        expected = alone(inputs())
        made.clear()
        assert_equal(model(inputs()), expected)
    # changed in place, v reads what k has read; otherwise what q has read, which is no longer held
    assert made.count("input") == (3 if change == "in place" else 4)


def test_a_detached_alias_shares_codes_and_keeps_its_own_gradient(made):
    """ZeRO 3 gives every layer an alias of its input."""
    model = converted(Attention(lambda x: x.detach()))
    alone = without_sharing(model)
    expected = gradients(alone, inputs())
    made.clear()
    assert_equal(gradients(model, inputs()), expected)
    assert made.count("input") == 2


def test_a_layer_that_runs_again_quantises_again():
    """NumPy, and writes through `.data`, do not change a tensor's version."""
    model, x = converted(Attention()).eval(), inputs()
    with torch.no_grad():
        before = model.q_proj(x)
        x.numpy()[:] *= 3
        after = model.q_proj(x)
        assert torch.equal(after, without_sharing(model).q_proj(x))
        assert not torch.equal(after, before)


def test_a_sibling_on_another_stream_quantises_its_input(made, monkeypatch):
    """It would not wait for the kernels that write the codes."""
    streams = ["first"]
    monkeypatch.setattr(siblings, "_stream_of", lambda input: streams[-1])
    model = converted(Attention(lambda x: streams.append("second") or x))
    model(inputs())
    assert made.count("input") == 3  # q; k and v; o


@pytest.mark.parametrize("keeps_first", [True, False])
def test_data_of_a_changed_tensor_is_not_what_the_tensor_was(keeps_first, made):
    """`x.data` counts versions itself, from 0 like x. ZeRO 3 drops the alias that the first sibling read."""
    model, x = converted(Attention()).eval(), inputs()
    alone = without_sharing(model)
    with torch.no_grad():
        before = model.q_proj(x if keeps_first else x.detach())
        model.v_proj(x.detach())
        assert made.count("input") == 1
        x.add_(1)
        assert x.data._version == 0
        assert_equal([model.k_proj(x.data)], [alone.k_proj(x)])
        assert not torch.equal(model.q_proj(x), before)


@pytest.mark.parametrize("captures", [(1, 2), (None, 1), (1, None)], ids=str)
def test_a_sibling_on_the_other_side_of_a_capture_quantises_its_input(captures, made, monkeypatch):
    """What a graph repeats must not read codes that another graph, or nothing, writes."""
    current = [captures[0]]
    monkeypatch.setattr(cuda_graphs, "capture_of", lambda device: current[-1])
    model = converted(Attention(lambda x: current.append(captures[1]) or x))
    model(inputs())
    assert made.count("input") == 3  # q; k and v; o


def test_siblings_share_what_their_recipes_have_in_common(made):
    model = converted(Attention(), {"base": "nvfp4", "q_backward_input": "fp8e4m3"})
    model.k_proj.recipe = "fp8"
    model.v_proj.recipe = {"base": "nvfp4", "q_backward_input": "fp32"}
    alone = without_sharing(model)
    expected = gradients(alone, inputs())
    made.clear()
    assert_equal(gradients(model, inputs()), expected)
    # forward: nvfp4 for q and v, e4m3 for k, and o; backward: e4m3 for q, the raw input of v, and o
    assert (made.count("input"), made.count("backward_input")) == (3, 3)


def test_a_chooser_may_give_siblings_different_precisions(made):
    class Chosen(RecordingChooser):
        def recipe(self, layer, base):
            return recipe_of("fp8") if layer == "k_proj" else base

    model = converted(Attention(), "nvfp4")
    alone = without_sharing(model)
    for each in (model, alone):
        set_chooser(each, Chosen(has_probe=lambda layer, use: layer == "q_proj"))
    expected = gradients(alone, inputs())
    made.clear()
    assert_equal(gradients(model, inputs()), expected)
    assert made.count("input") == 3


def test_a_form_for_fp8_products_has_exponents_whatever_gemm_its_sibling_uses(monkeypatch):
    """Where backward has an input of its own, neither `gemm` decodes it in forward."""
    forms = []
    original = MatmulContext.input

    def recording(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        forms.append((self.recipe.gemm, found.tensor))
        return found

    monkeypatch.setattr(MatmulContext, "input", recording)
    for first in ("bf16", "fp8"):
        recipe = {"base": "mxfp4", "layout": "per_gemm", "gemm": first}
        model = converted(Attention(), recipe)
        model.k_proj.recipe = recipe | {"gemm": "fp8" if first == "bf16" else "bf16"}
        alone, x = without_sharing(model), inputs(16)
        expected = gradients(alone, x)
        forms.clear()
        assert_equal(gradients(model, x), expected)
        assert {gemm for gemm, _ in forms} == {"bf16", "fp8"}
        for gemm, tensor in forms:
            assert (tensor.exponents is not None) == (gemm == "fp8")


def fail(*args):
    raise ArithmeticError


@pytest.mark.parametrize("where", ["between siblings", "in a sibling"])
def test_an_exception_leaves_nothing_of_the_input(where, monkeypatch):
    model, kept, original = converted(Attention()), [], MatmulContext._quantized

    def recording(self, operand, quantization, *args, **kwargs):
        made = original(self, operand, quantization, *args, **kwargs)
        if quantization.role == "input":
            kept.extend(weakref.ref(each) for each in (operand.tensor, made.operand.tensor.codes))
        return made

    monkeypatch.setattr(MatmulContext, "_quantized", recording)
    if where == "between siblings":
        model.between = fail
    else:  # in the first: with its input's codes made, and the weight's not
        monkeypatch.setattr(MatmulContext, "weight", fail)
    with pytest.raises(ArithmeticError):
        model(inputs())
    assert [each() for each in kept] == [None, None]


def test_after_an_exception_siblings_do_not_multiply_what_the_input_was():
    """The caller holds the input, and NumPy and `.data` do not change its version."""
    model, x = converted(Attention()).eval(), inputs()
    alone = without_sharing(model)
    with torch.no_grad():
        model.q_proj(x)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MatmulContext, "weight", fail)
            with pytest.raises(ArithmeticError):
                model.k_proj(x)
        x.numpy()[:] *= 3
        assert torch.equal(model.k_proj(x), alone.k_proj(x))


def test_forms_go_with_the_memory_of_their_input():
    x = inputs()
    forms = SharedInput().begin("q", x, ("q", "k"), 1)
    forms.forms["request"] = torch.ones(1)
    alias = x.detach()[1:]
    del x
    assert forms.forms  # the memory lives on in a view
    assert forms.is_for("k", inputs(), ("q", "k"), 1) is False
    del alias
    assert not forms.forms


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_forward_shares_and_repeats_the_same_codes(use_reentrant, made):
    model = converted(Attention(), STOCHASTIC)
    alone = without_sharing(model)
    expected = gradients(alone, inputs())
    made.clear()
    run = lambda x: checkpoint(model, x, use_reentrant=use_reentrant)  # noqa: E731
    assert_equal(gradients(model, inputs(), run), expected)
    assert made.count("input") == 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_holds_nothing_afterwards(mode, made):
    model = converted(Attention()).eval()
    alone = without_sharing(model)
    x = inputs()
    with mode():
        expected = alone(x)
        made.clear()
        assert_equal(model(x), expected)
    assert made.count("input") == (2 if mode is torch.no_grad else 4)
    assert model.q_proj.shared_input._current is None
    assert_equal(gradients(model.train(), x), gradients(alone.train(), x))  # nothing left of inference


def test_only_codes_are_held_until_backward_and_nothing_after_it(monkeypatch):
    model, x = converted(Attention(dtype=torch.bfloat16)), inputs(64).bfloat16().requires_grad_()
    made, original = [], MatmulContext._quantized

    def recording(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        tensor = result.operand.tensor
        made.extend(weakref.ref(each) for each in (tensor.ready_operand, tensor.codes))
        return result

    def alive():
        return [tensor.dtype for ref in made if (tensor := ref()) is not None]

    monkeypatch.setattr(MatmulContext, "_quantized", recording)
    gc.disable()
    try:
        outputs = model(x)
        assert alive() == 6 * [torch.uint8]  # two inputs, four weights
        # an input whose siblings have not all run is dropped when another layer runs
        model.q_proj(x)
        assert alive().count(torch.bfloat16) == 1
        model.k_proj(x)
        model.v_proj(x)
        assert alive() == 6 * [torch.uint8]  # the last sibling has run
        model.q_proj(x)
        assert alive().count(torch.bfloat16) == 1
        model.o_proj(inputs()[..., :16].bfloat16())
        assert alive() == 6 * [torch.uint8]
        sum(each.sum() for each in outputs).backward()
        del outputs
        assert not alive()  # the codes of the output gradients included
    finally:
        gc.enable()


def test_a_compiled_model_shares_nothing_and_has_the_same_bits(made):
    torch._dynamo.reset()
    model = converted(Attention(), STOCHASTIC)
    compiled = copy.deepcopy(model)
    expected = gradients(model, inputs())
    made.clear()
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    assert_equal(gradients(compiled, inputs(), run), expected)
    assert made.count("input") == 4
    torch._dynamo.reset()


def test_each_sibling_reports_the_counts_of_its_input():
    model = converted(Attention())
    alone = without_sharing(model)
    reports = []
    for each in (alone, model):
        observed = Observed()
        set_observer(each, observed)
        gradients(each, inputs())
        reports.append(observed.seen)
    assert reports[0] == reports[1]
    assert [layer for layer, role, *_ in reports[1] if role == "input"] == [
        "q_proj", "k_proj", "v_proj", "o_proj",
    ]  # fmt: skip


def test_copies_pickles_and_restored_models_share_nothing_with_the_original():
    model = converted(Attention())
    model.q_proj(inputs())  # leaves its input
    file = io.BytesIO()
    torch.save(model.q_proj, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(model).q_proj, loaded):
        assert other.shared_input is not model.q_proj.shared_input
        assert other.shared_input._current is None
        assert other.siblings == model.q_proj.siblings
    copied = copy.deepcopy(model)
    assert copied.q_proj.shared_input is copied.o_proj.shared_input
    assert_equal(gradients(copied, inputs()), gradients(model, inputs()))
    restore(model)
    assert not hasattr(model.q_proj, "siblings")
    old = {name: value for name, value in loaded.__getstate__().items() if "sib" not in name}
    del old["shared_input"]
    loaded.__setstate__(old)  # written before layers had siblings
    assert loaded(inputs()).shape == (2, 5, 48)


def bytes_saved_of_inputs(model):
    """Bytes that the linear layers of a model save for backward, without weights; by storage."""
    calls = []
    layers = [module for module in model.model.layers.modules() if isinstance(module, nn.Linear)]
    handles = [
        layer.register_forward_pre_hook(lambda layer, args: calls.append((layer, args[0])))
        for layer in layers
    ]
    model(input_ids=torch.zeros(2, 16, dtype=torch.long))
    for handle in handles:
        handle.remove()
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = [layer(given) for layer, given in calls]
    slots = [layer.weight_slot for layer in bit_layers(model).values()]
    weights = [
        part for slot in slots for each in slot._entries.values() for part in each.operand.to_parts()[0]
    ]
    for each in (*model.parameters(), *weights):
        saved.pop(each.untyped_storage()._cdata, None)
    del outputs
    return sum(each.nbytes() for each in saved.values())


def test_a_llama_block_keeps_at_most_three_tenths_of_the_bytes_of_bf16():
    """A block with the proportions of an 8B model: k and v a quarter as wide, the MLP 3.5 times."""
    sizes = {"hidden_size": 128, "intermediate_size": 448, "num_heads": 4, "num_key_value_heads": 1}
    model = tiny_model("llama", num_layers=1, **sizes).bfloat16()
    bf16 = bytes_saved_of_inputs(model)
    assert bf16 == 2 * 32 * (3 * 128 + 448)
    convert(model)
    found = []
    for is_on in (True, False):
        share_inputs(model, is_on=is_on)
        cache_weights(model)
        found.append(bytes_saved_of_inputs(model) / bf16)
    assert found == pytest.approx([0.281, 0.411], abs=0.002)
