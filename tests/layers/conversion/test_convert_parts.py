"""Parts of a converted model, called without the model, draw the random numbers of its call."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalowbit.layers.conversion.convert import convert, random_stream

RECIPES = (
    "nvfp4",
    "metis-seed",
    "metis-qb",
    "nvfp4-unbiased-backward",
    "fp4-all-the-way",
    "mxfp4-rht",
    "quartet",
    "quartet-2",
    "tetrajet-2",
)
CHECKPOINTS = {"none": None, "reentrant": True, "non-reentrant": False}


class Net(nn.Module):
    """A body and a head; the body's activations may be recomputed."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.GELU())
        self.head = nn.Sequential(nn.Linear(128, 128), nn.Tanh())
        self.use_reentrant = None

    def forward(self, x):
        return self.head(self.recomputed(x))

    def recomputed(self, x):
        if self.use_reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.use_reentrant)

    def of_parts(self, x):
        """What `self(x)` returns, from calls of the two parts."""
        body = self.recomputed(x)
        return self.head(body)


class WithGradients(Net):
    """A model whose forward reads a gradient, as one that predicts forces does."""

    def forward(self, x):
        (slope,) = torch.autograd.grad(self.body(x).sum(), x)
        return self.head(self.body(x) + slope)


def net(recipe="nvfp4", use_reentrant=None, kind=Net):
    torch.manual_seed(0)
    model = kind()
    convert(model, {"base": recipe, "keep": []}, seed=3)
    model.use_reentrant = use_reentrant
    return model


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(64, 128, generator=generator, requires_grad=True)


def gradients(model, forward, steps=3, first=0):
    """The gradients of a weight in each of some micro-batches."""
    found = []
    for step in range(first, first + steps):
        model.zero_grad()
        forward(batch(step)).square().sum().backward()
        found.append(model.body[0].weight.grad.clone())
    return found


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("recipe", RECIPES)
def test_calls_of_parts_draw_the_numbers_of_a_call_of_the_model_with_each_kind_of_checkpointing(recipe):
    model = net(recipe)
    expected = gradients(model, model)
    assert random_stream(model).step == 3
    for use_reentrant in CHECKPOINTS.values():
        for name in ("of_parts", "forward"):
            other = net(recipe, use_reentrant)
            assert same(gradients(other, getattr(other, name)), expected), (name, use_reentrant)
            assert random_stream(other).step == 3


def test_errors_of_gradients_of_parts_average_out():
    model, found = net(use_reentrant=True), []
    for _ in range(32):
        found += [each.double() for each in gradients(model, model.recomputed, steps=1)]
    assert len({each.numpy().tobytes() for each in found}) == 32
    first, second = sum(found[:16]) / 16, sum(found[16:]) / 16
    assert (first - second).norm() < 0.5 * (found[0] - found[16]).norm()  # expected: a quarter


def test_redrawn_signs_change_between_the_micro_batches_of_a_part():
    model, signs = net("quartet-2"), set()
    for step in range(5):
        model.of_parts(batch(step)).sum().backward()
        signs.add(random_stream(model).hadamard_signs(random_stream(model).step))
    assert len(signs) == 5


def test_forwards_of_parts_without_a_backward_between_them_are_one_micro_batch():
    model = net()
    loss = sum(model.of_parts(batch(step)).square().sum() for step in range(3))
    assert random_stream(model).step == 1
    loss.backward()
    model.of_parts(batch(3))
    assert random_stream(model).step == 2


def test_calls_of_the_model_and_of_parts_may_alternate():
    model, other = net(use_reentrant=True), net()
    mixed = []
    for step in range(4):
        forward = model if step % 2 else model.of_parts
        mixed += gradients(model, forward, steps=1, first=step)
    assert same(mixed, gradients(other, other, steps=4))


def test_a_model_that_reads_gradients_in_its_forward_stays_in_its_micro_batch():
    model = net(kind=WithGradients)
    for step in range(1, 4):
        model(batch(step)).sum().backward()
        assert random_stream(model).step == step


def test_evaluation_mode_and_gradients_without_training_do_not_move_the_stream():
    model = net()
    gradients(model, model.of_parts)
    model.eval()
    gradients(model, model.of_parts)
    assert random_stream(model).step == 3


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_model_trained_in_evaluation_mode_draws_new_numbers_that_checkpointing_repeats(use_reentrant):
    plain, model = net().eval(), net(use_reentrant=use_reentrant).eval()
    expected = gradients(plain, plain, steps=4)
    assert same(gradients(model, model, steps=4), expected)
    found = [gradients(model, model, steps=1)[0].numpy().tobytes() for _ in range(4)]
    assert len(set(found)) == 4


@pytest.mark.parametrize("restore", ["state", "deepcopy", "pickle"])
def test_parts_continue_after_a_resume_as_without_one(restore):
    model = net(use_reentrant=True)
    expected = gradients(model, model.of_parts, steps=4)[2:]
    model = net(use_reentrant=True)
    gradients(model, model.of_parts, steps=2)
    if restore == "state":
        other = net(use_reentrant=True)
        random_stream(other).load_state_dict(random_stream(model).state_dict())
    else:
        other = copy.deepcopy(model) if restore == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert same(gradients(other, other.of_parts, steps=2, first=2), expected)


def test_a_compiled_part_draws_the_numbers_of_the_model():
    model, other = net(), net()
    body = torch.compile(other.body, backend="aot_eager", fullgraph=True)
    expected = gradients(model, model)
    assert same(gradients(other, lambda x: other.head(body(x))), expected)
    assert random_stream(other).step == 3
