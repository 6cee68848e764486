"""Loss and gradients beside transformers' own, and beside float64 formulas."""

import copy
import inspect
import io

import accelerate
import pytest
import torch
import transformers
from quick_cases import slow_except
from tiny_models import KINDS, tiny_model
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.hf.losses import chunked_cross_entropy
from megalowbit.hf.losses.chunked_cross_entropy import chunk_cross_entropy, sum_of_losses

VOCABULARY = 300  # two chunks of 128 rows, and one of 44


@pytest.fixture(autouse=True)
def _chunks_of_128_rows(monkeypatch):
    monkeypatch.setattr(chunked_cross_entropy, "CHUNK_ELEMENTS", 0)


def operands(dtype, num_tokens=20, features=24):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, features, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, features, generator=generator).to(dtype)
    targets = torch.randint(VOCABULARY, (num_tokens,), generator=generator)
    targets[:4] = torch.tensor([0, 127, 128, 299])  # first and last rows of chunks
    targets[5:8] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def exact(hidden, weight, targets):
    """Loss and gradients by the formulas (p − y) · W and (p − y)ᵀ · h, in float64 and without autograd."""
    hidden, weight = hidden.detach().double(), weight.detach().double()
    logits = hidden @ weight.T
    rows = [index for index, target in enumerate(targets.tolist()) if target != -100]
    probabilities = (logits - logits.amax(1, keepdim=True)).exp()
    probabilities /= probabilities.sum(1, keepdim=True)
    gradient = torch.zeros_like(logits)
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows:
        target = int(targets[row])
        loss -= probabilities[row, target].log()
        gradient[row] = probabilities[row]
        gradient[row, target] -= 1
    return loss, gradient @ weight, gradient.T @ hidden


def whole(hidden, weight, targets):
    logits = torch.nn.functional.linear(hidden, weight).float()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")


def errors(function, dtype, factor=1.0):
    """Relative errors of the loss and of both gradients."""
    hidden, weight, targets = operands(dtype)
    loss = function(hidden, weight, targets)
    (loss * factor).backward()
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    found = [loss.detach(), hidden.grad / factor, weight.grad / factor]
    expected = exact(hidden, weight, targets)
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_loss_and_gradients_are_those_of_the_formulas(dtype, limit):
    assert max(errors(sum_of_losses, dtype)) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_errors_are_no_larger_than_of_the_whole_computation(dtype):
    for ours, theirs in zip(errors(sum_of_losses, dtype), errors(whole, dtype), strict=True):
        assert ours <= 1.1 * theirs + 1e-7


def test_gradients_that_only_the_loss_scale_makes_representable_survive_in_fp16():
    hidden, weight, targets = operands(torch.float16)
    (sum_of_losses(hidden, weight, targets) * 2.0**-22 * 2.0**20).backward()
    expected = exact(hidden, weight, targets)[2] * 2.0**-2
    assert (weight.grad.double() - expected).norm() < 2e-3 * expected.norm()


def test_a_label_outside_the_vocabulary_is_an_error():
    hidden, weight, targets = operands(torch.float32)
    for label in (VOCABULARY, -1):
        targets[3] = label
        with pytest.raises(RuntimeError, match="out of bounds"):
            sum_of_losses(hidden, weight, targets)


@pytest.mark.parametrize("change", [torch.Tensor.bool, torch.Tensor.float, lambda labels: labels[1:]])
def test_labels_of_another_dtype_or_number_are_an_error(change):
    hidden, weight, targets = operands(torch.float32)
    with pytest.raises(UserError, match=r"labels must be int64, one for each of \d+ tokens, not torch"):
        sum_of_losses(hidden, weight, change(targets))


def batch(**more):
    tokens = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :3] = -100
    return {"input_ids": tokens, "labels": labels, **more}


def loss_and_gradients(model, **inputs):
    loss = model(**inputs).loss
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters()}


def assert_same(found, expected):
    assert found[0].dtype == expected[0].dtype == torch.float32
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", slow_except(["gpt2", "llama"], KINDS))
def test_a_model_trains_as_with_the_loss_of_transformers(kind, is_tied):
    model = tiny_model(kind, vocab_size=VOCABULARY, tie_word_embeddings=is_tied).train()
    shifted = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(2))
    every = [
        batch(),
        batch(num_items_in_batch=torch.tensor(50)),
        batch(num_items_in_batch=50),
        batch(shift_labels=shifted),
        batch(attention_mask=torch.tensor([[1] * 12, [1] * 9 + [0] * 3])),
    ]
    expected = [loss_and_gradients(model, **inputs) for inputs in every]
    assert chunk_cross_entropy(model) is model
    for inputs, each in zip(every, expected, strict=True):
        assert_same(loss_and_gradients(model, **inputs), each)
    assert model(**batch()).logits is None


def test_labels_that_are_all_ignored_give_nan_as_in_transformers():
    model = tiny_model("llama", vocab_size=VOCABULARY).train()
    inputs = batch(labels=torch.full((2, 12), -100))
    assert model(**inputs).loss.isnan()
    assert chunk_cross_entropy(model)(**inputs).loss.isnan()


def test_evaluation_generation_and_calls_that_need_logits_are_unchanged():
    plain = tiny_model("gpt2", vocab_size=VOCABULARY).train()
    model = chunk_cross_entropy(copy.deepcopy(plain))
    inputs = batch()
    calls = [
        {"input_ids": inputs["input_ids"]},
        {**inputs, "logits_to_keep": 12},
        {**inputs, "return_dict": False},
    ]
    for is_training in (True, False):
        for each in (plain, model):
            each.train(is_training)
        for call in calls if is_training else [*calls, inputs]:
            found, expected = model(**call), plain(**call)
            if not isinstance(found, tuple):
                found, expected = (found.logits, found.loss), (expected.logits, expected.loss)
            assert torch.equal(found[0], expected[0])
            assert found[1] is expected[1] or torch.equal(
                tree_leaves(found[1])[0], tree_leaves(expected[1])[0]
            )
    prompt = {"input_ids": inputs["input_ids"], "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**prompt), plain.generate(**prompt))


def test_the_signature_is_kept():
    """Trainer passes on the columns of a batch that the forward names."""
    model = tiny_model("llama", vocab_size=VOCABULARY)
    before = inspect.signature(model.forward)
    assert inspect.signature(chunk_cross_entropy(model).forward) == before
    assert "input_ids" in before.parameters


def test_hidden_states_and_attentions_are_returned():
    model = tiny_model("gpt2", vocab_size=VOCABULARY, attn_implementation="eager").train()
    more = {"output_hidden_states": True, "output_attentions": True}
    expected = model(**batch(), **more)
    found = chunk_cross_entropy(model)(**batch(), **more)
    for name in ("hidden_states", "attentions"):
        for a, b in zip(found[name], expected[name], strict=True):
            assert torch.equal(a, b)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation returned, parameters' gradients included."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return result


def test_the_logits_never_exist_whole():
    model = tiny_model("llama", vocab_size=VOCABULARY, positions=128).train()
    tokens = torch.randint(VOCABULARY, (2, 128))
    seen = []
    for _ in range(2):
        with Largest() as largest:
            model(input_ids=tokens, labels=tokens).loss.backward()
        seen.append(largest.numel)
        chunk_cross_entropy(model)
    assert seen[0] == 2 * 128 * VOCABULARY
    assert seen[1] <= 2 * 128 * 128


@pytest.mark.parametrize("recipe", [None, "nvfp4"])
def test_a_copy_is_chunked_and_independent_and_the_state_dict_is_the_same(recipe):
    model = tiny_model("llama", vocab_size=VOCABULARY).train()
    if recipe is not None:
        mlb.convert(model, recipe)
    names = list(model.state_dict())
    chunk_cross_entropy(chunk_cross_entropy(model))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert other(**batch()).loss.item() == pytest.approx(torch.tensor(VOCABULARY).log().item())
    assert model(**batch()).loss.item() != pytest.approx(torch.tensor(VOCABULARY).log().item())
    assert list(model.state_dict()) == names


def test_under_autocast_the_projection_is_in_half_precision_as_before():
    plain = tiny_model("llama", vocab_size=VOCABULARY).train()
    model = chunk_cross_entropy(copy.deepcopy(plain))
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = loss_and_gradients(plain, **batch()), loss_and_gradients(model, **batch())
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0.05, atol=1e-3, msg=name)
    assert found[1]["lm_head.weight"].dtype == torch.float32


def test_our_autocast_gives_the_loss_of_transformers():
    plain = tiny_model("llama", vocab_size=VOCABULARY).bfloat16().train()
    model = chunk_cross_entropy(copy.deepcopy(plain))
    losses = []
    for each in (plain, model):
        mlb.attach_autocast(each, "bf16", "cpu")
        losses.append(each(**batch()).loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)


@pytest.mark.slow
def test_a_compiled_model_has_the_same_loss_and_gradients():
    model = chunk_cross_entropy(tiny_model("llama", vocab_size=VOCABULARY, num_layers=1).train())
    expected = loss_and_gradients(model, **batch())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(**batch()).loss
    model.zero_grad()
    loss.backward()
    assert_same((loss.detach(), {name: each.grad for name, each in model.named_parameters()}), expected)


def with_own_loss(model):
    model.loss_function = torch.nn.functional.mse_loss


def with_other_head(model):
    model.lm_head = torch.nn.Linear(32, VOCABULARY, bias=True)


def with_replaced_forward(model):
    model.forward = lambda *args, **options: None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_own_loss, "mse_loss: set it to false"),
        (with_other_head, "nn.Linear without bias"),
        (with_replaced_forward, "has been replaced"),
    ],
)
def test_models_with_another_loss_or_head_are_rejected(change, message):
    model = tiny_model("llama", vocab_size=VOCABULARY)
    change(model)
    with pytest.raises(UserError, match=message):
        chunk_cross_entropy(model)
    with pytest.raises(UserError, match="needs a causal language model"):
        chunk_cross_entropy(torch.nn.Linear(2, 2))


def test_a_loss_that_is_set_later_is_rejected_when_the_model_runs():
    model = chunk_cross_entropy(tiny_model("llama", vocab_size=VOCABULARY).train())
    with_own_loss(model)
    with pytest.raises(UserError, match="mse_loss"):
        model(**batch())


def test_a_pickled_model_is_chunked_and_has_the_same_loss():
    model = chunk_cross_entropy(tiny_model("gpt2", vocab_size=VOCABULARY).train())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    torch.manual_seed(0)
    expected = model(**batch()).loss
    torch.manual_seed(0)
    found = loaded(**batch())
    assert found.logits is None
    assert found.loss == expected
    assert chunk_cross_entropy(loaded) is loaded


def test_accelerate_wraps_and_unwraps_a_chunked_model():
    model = chunk_cross_entropy(tiny_model("llama", vocab_size=VOCABULARY).train())
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    wrapped = accelerator.prepare(model)
    assert wrapped(**batch()).logits is None
    unwrapped = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    assert unwrapped is model
    found = unwrapped(**batch())
    assert found.logits is None
    assert found.loss.isfinite()
    assert chunk_cross_entropy(unwrapped) is unwrapped


def test_positional_arguments_are_those_of_the_model():
    plain = tiny_model("llama", vocab_size=VOCABULARY).train()
    model = chunk_cross_entropy(copy.deepcopy(plain))
    tokens = batch()["input_ids"]
    arguments = (tokens, torch.ones_like(tokens), None, None, None, tokens)  # the last are the labels
    found = model(*arguments)
    assert found.logits is None
    torch.testing.assert_close(found.loss, plain(*arguments).loss)
    with pytest.raises(TypeError, match="multiple values"):
        model(*arguments, labels=tokens)
    with pytest.raises(TypeError, match="positional argument"):
        model(*arguments, *arguments)


def granite():
    return transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**TINY, logits_scaling=4.0, tie_word_embeddings=False)
    )


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**TINY, output_router_logits=True))


class OwnForward(transformers.LlamaForCausalLM):
    def forward(self, *args, **options):
        output = super().forward(*args, **options)
        output.loss = 2 * output.loss
        return output


def own_forward():
    return OwnForward(transformers.LlamaConfig(**TINY))


TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("build", [granite, mixtral, own_forward])
def test_models_that_may_do_more_than_project_are_rejected(build):
    with pytest.raises(UserError, match="may scale its logits or add to the loss: set it to false"):
        chunk_cross_entropy(build())


def test_a_hook_that_would_see_losses_is_rejected_and_removing_it_mends_that():
    model, ids = tiny_model("gpt2").train(), torch.arange(8)[None]
    chunk_cross_entropy(model)
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(UserError, match=r"a hook of the output projection .* would see the sum"):
        model(input_ids=ids, labels=ids)
    hook.remove()
    hook = model.lm_head.register_full_backward_hook(lambda module, grads, more: None)
    with pytest.raises(UserError, match="a hook of the output projection"):
        model(input_ids=ids, labels=ids)
    hook.remove()
    assert model(input_ids=ids, labels=ids).loss.isfinite()


def test_a_head_that_is_replaced_is_told_and_a_second_call_changes_it():
    model, ids = tiny_model("llama").train(), torch.arange(8)[None]
    chunk_cross_entropy(model)
    model.lm_head = torch.nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
    with pytest.raises(UserError, match=r"has been replaced since chunk_cross_entropy .*: call it again"):
        model(input_ids=ids, labels=ids)
    found = chunk_cross_entropy(model)(input_ids=ids, labels=ids)
    assert found.logits is None
    expected = model.eval()(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(found.loss, expected)


def test_a_graph_of_gradients_is_an_error():
    def penalised(loss_of, wanted):
        """Loss and a penalty on a gradient."""
        source, weight, targets = operands(torch.float64)
        loss = loss_of(source * 2, weight, targets)
        (gradient,) = torch.autograd.grad(loss, source if wanted == "hidden" else weight, create_graph=True)
        (loss + gradient.square().sum()).backward()

    for wanted in ("hidden", "weight"):
        penalised(whole, wanted)  # as without the option
        with pytest.raises(UserError, match=r"^second derivatives of chunked_cross_entropy are not .*false"):
            penalised(sum_of_losses, wanted)


def test_transforms_and_forward_mode_are_one_line():
    hidden, weight, targets = operands(torch.float64)
    with pytest.raises(UserError, match=r"^chunked_cross_entropy cannot run inside torch\.func.* false"):
        torch.func.grad(lambda hidden: sum_of_losses(hidden, weight, targets))(hidden)
    with (
        forward_ad.dual_level(),
        pytest.raises(UserError, match=r"^chunked_cross_entropy has no forward-mode derivatives.* false"),
    ):
        sum_of_losses(hidden, forward_ad.make_dual(weight, torch.ones_like(weight)), targets)


def test_hidden_states_in_another_dtype_are_rejected_as_in_the_projection():
    hidden, weight, targets = operands(torch.float32)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.nn.functional.linear(hidden, weight.bfloat16())
    with pytest.raises(UserError, match=r"hidden states in its torch\.bfloat16, not torch\.float32"):
        sum_of_losses(hidden, weight.bfloat16(), targets)
