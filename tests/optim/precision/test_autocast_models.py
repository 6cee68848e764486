"""Whole models under autocast: raw functions, BitLinear, transformers' models, activation checkpointing."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megalowbit.layers.bitlinear import BitLinear
from megalowbit.layers.conversion.convert import convert
from megalowbit.optim.precision.autocast import attach_autocast, autocast, contexts_for_checkpoint

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
A = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
BATCH = torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(1))


class Attention(torch.nn.Module):
    """Raw functions in a module, as models have them."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.seen = []

    def forward(self, a):
        scores = torch.softmax(self.project(a) @ a.transpose(-1, -2), -1)
        self.seen.append(scores.dtype)
        return a + self.norm(scores @ a).to(a.dtype)


class Stack(torch.nn.Module):
    def __init__(self, use_reentrant=None, is_disabled=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList([Attention(), Attention()])
        self.use_reentrant, self.is_disabled = use_reentrant, is_disabled

    def forward(self, a):
        with torch.autocast("cpu", enabled=not self.is_disabled, dtype=torch.float16):
            for block in self.blocks:
                if self.use_reentrant is None:
                    a = block(a)
                else:
                    a = checkpoint(block, a, use_reentrant=self.use_reentrant)
        return F.mse_loss(a, torch.zeros_like(a))


@pytest.mark.parametrize("is_disabled", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_sees_the_same_casts(use_reentrant, is_disabled):
    results = []
    for mode in (None, use_reentrant):
        model = Stack(mode, is_disabled).half()
        attach_autocast(model, "fp16", "cpu")
        a = BATCH.half().requires_grad_()
        loss = model(a)
        loss.backward()
        (dtype,) = {dtype for block in model.blocks for dtype in block.seen}
        assert dtype == (torch.float16 if is_disabled else torch.float32)
        assert len(model.blocks[0].seen) == (1 if mode is None else 2)
        results.append([loss.detach(), a.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_checkpointed_function_sees_the_same_casts_with_our_contexts():
    seen = []

    def function(a):
        seen.append(torch.softmax(a, -1).dtype)
        return (torch.softmax(a, -1) @ a).exp()

    a = A.half().requires_grad_()
    with autocast("fp16", "cpu"):
        out = checkpoint(
            function, a, use_reentrant=False, context_fn=contexts_for_checkpoint(None, "cpu")
        ).sum()
    out.backward()
    assert seen == [torch.float32, torch.float32]


def test_an_attached_model_computes_by_class_also_in_evaluation_and_as_a_copy():
    model = Stack().half()
    handle = attach_autocast(model, "fp16", "cpu")
    copied = copy.deepcopy(model)
    for each in (model, copied):
        with torch.no_grad():
            assert each.eval()(BATCH.half()).dtype == torch.float32
        assert {dtype for block in each.blocks for dtype in block.seen} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")
    handle.remove()
    model.blocks[0].seen.clear()
    assert model(BATCH.half()).dtype == torch.float16
    assert model.blocks[0].seen == [torch.float16]


def test_a_failed_forward_leaves_autocast_off():
    model = Stack().half()
    attach_autocast(model, "fp16", "cpu")
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, 8, 7).half())
    assert not torch.is_autocast_enabled("cpu")
    assert A.half().exp().dtype == torch.float16
    assert model(BATCH.half()).dtype == torch.float32


@pytest.mark.parametrize("precision", HALVES)
def test_bitlinear_computes_in_half_and_its_quantisation_is_not_disturbed(precision):
    half = HALVES[precision]
    torch.manual_seed(0)
    layer = BitLinear(32, 16, recipe="nvfp4").eval()
    a = torch.randn(4, 32)
    with torch.autocast("cpu", dtype=half):
        expected = layer(a)
    with autocast(precision, "cpu"):
        got = layer(a)
    assert got.dtype == half
    assert torch.equal(got, expected)


def tiny_model(family, dtype):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "use_cache": False}
    if family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, **sizes))
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, **sizes
            )
        )
    model.config._attn_implementation = "eager"  # softmax as a function of its own
    return model.to(dtype)


def loss_and_gradients(model, scale):
    tokens = torch.arange(24).reshape(2, 12)
    loss = model.train()(input_ids=tokens, labels=tokens).loss
    (loss * scale).backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("recipe", [None, "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_models_of_transformers_train_and_recompute_the_same(family, dtype, recipe):
    results = []
    for is_checkpointed in (False, True):
        model = tiny_model(family, dtype)
        if recipe is not None:
            convert(model, recipe)
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        attach_autocast(model, "bf16" if dtype == torch.bfloat16 else "fp16", "cpu")
        torch.manual_seed(0)  # dropout
        results.append(loss_and_gradients(model, scale=128.0))
    loss, *gradients = results[0]
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert {gradient.dtype for gradient in gradients} == {dtype}
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_half_precision_loss_under_autocast_is_close_to_that_of_fp32():
    tokens = torch.arange(24).reshape(2, 12)
    losses = []
    for dtype in (torch.float64, torch.float16):
        model = tiny_model("gpt2", dtype).eval()
        if dtype == torch.float16:
            attach_autocast(model, "fp16", "cpu")
        losses.append(model(input_ids=tokens, labels=tokens).loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_a_compiled_model_takes_the_same_casts():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Softmax(-1)).half()
    attach_autocast(model, "fp16", "cpu")
    compiled = torch.compile(model, backend="eager")
    got = compiled(A.half())
    assert got.dtype == torch.float32
    assert torch.equal(got, model(A.half()))
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_may_enter_autocast_itself(backend):
    torch.compiler.reset()

    def function(a):
        with autocast("fp16", "cpu"):
            return a.exp() @ a, a.exp(), torch.softmax(a @ a, -1)

    for got, expected in zip(torch.compile(function, backend=backend)(A), function(A), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    assert not torch.is_autocast_enabled("cpu")
