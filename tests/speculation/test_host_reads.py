"""How often the host reads a tensor: once in a step with a check, never in a step without one.

On a CPU nothing waits, and reading is a plain memory access. What would make the host wait for an accelerator
is counted by the names it goes by: methods of tensors that give their memory away, and operators whose result
is a number or has a shape that depends on numbers.
"""

from collections import Counter

import pytest
import torch
from controlled_training import PLAIN, batch, converted
from torch.utils._python_dispatch import TorchDispatchMode

import megalowbit as mlb

METHODS = ("tolist", "numpy", "cpu", "__array__")  # need no operator on a CPU
OPERATORS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}


class _Operators(TorchDispatchMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen[name] += name in OPERATORS
        return func(*args, **(kwargs or {}))


def counted(seen, name):
    method = getattr(torch.Tensor, name)

    def counting(*args, **kwargs):
        seen[name] += 1
        return method(*args, **kwargs)

    return counting


def reads(action):
    """How often each name was met while `action` ran, in backward too."""
    seen = Counter()
    with pytest.MonkeyPatch.context() as patch, _Operators(seen):
        for name in METHODS:
            patch.setattr(torch.Tensor, name, counted(seen, name))
        action()
    return Counter({name: count for name, count in seen.items() if count})


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: float(x),
        lambda x: x > 1 and None,
        lambda x: [0, 1, 2, 3][x],
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: torch.equal(x, x),
    ],
)
def test_all_ways_to_read_are_counted(read):
    assert sum(reads(lambda: read(torch.tensor(2))).values()) > 0
    x = torch.ones(2, requires_grad=True)
    y = x.sum()

    def hook(grad):
        read(2 * grad.detach().long())

    y.register_hook(hook)
    assert sum(reads(y.backward).values()) > 0
    assert not reads(lambda: (torch.ones(3) * torch.full((3,), 2.0)).sum())


def step(model, controller):
    controller.begin_step()
    torch.autograd.backward(
        model(batch(0)).square().mean()
    )  # Tensor.backward is a method: it hides what it runs
    model.zero_grad()
    controller.end_step()


class NoController:
    def begin_step(self):
        pass

    def end_step(self):
        pass


@pytest.mark.parametrize("candidate", ["int8", "mixed", "fp8", "int4"])
def test_a_check_costs_one_host_read_and_other_steps_none(candidate):
    """Verified too. NVFP4 is not here: layers ask whether its maxima are finite, though on CPUs alone."""
    model = converted()
    settings = {
        **PLAIN, "candidates": [candidate, "bf16"], "every": 2, "lookahead": 4, "verify_every": 1,
        "threshold_db": 0,
    }  # fmt: skip
    controller = mlb.PrecisionController(model, settings)
    step(model, controller)  # bf16, sampled
    between = reads(lambda: step(model, controller))
    looked_at = reads(lambda: step(model, controller))
    assert set(controller.totals().shares) == {candidate, "bf16"}
    assert controller.totals().share_8bit > 0.5
    chosen = [
        layer.chooser.recipe(layer.layer_name, layer.recipe) for layer in mlb.bit_layers(model).values()
    ]
    controller.detach()
    for layer, recipe in zip(mlb.bit_layers(model).values(), chosen, strict=True):
        layer.recipe = recipe
    alone = reads(lambda: step(model, NoController()))
    assert between == alone
    assert looked_at == alone + Counter(tolist=1)
