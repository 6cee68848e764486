"""Private names of torch that layers ask about modes and transforms: they answer what the package expects.

Each test says what breaks if a new torch answers otherwise.
"""

import torch
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


class Remembering(torch.autograd.Function):
    """Keeps what `_functorch` says of the output gradient."""

    seen = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Remembering.seen = _functorch.is_batchedtensor(grad), _functorch.is_legacy_batchedtensor(grad)
        return grad


def test_dispatch_modes_are_counted_and_found_in_their_order():
    breaks = "kernels would run unseen by selective checkpointing and tracers"
    assert torch._C._len_torch_dispatch_stack() == 0, "each operand would look for modes"
    with Mode() as outer, Mode() as inner:
        assert torch._C._len_torch_dispatch_stack() == 2, breaks
        assert [torch._C._get_dispatch_stack_at(index) for index in range(2)] == [outer, inner], breaks
    with FakeTensorMode() as fake:  # torch keeps its own modes elsewhere
        assert torch._C._len_torch_dispatch_stack() == 1, breaks
        assert torch._C._get_dispatch_stack_at(0) is fake, breaks
        assert fake.is_infra_mode(), breaks
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_level_of_forward_mode_derivatives_is_negative_outside():
    breaks = "tensors with a forward-mode derivative would lose it without an error"
    assert forward_ad._current_level < 0, "each use of a layer would look for forward-mode derivatives"
    with forward_ad.dual_level():
        assert forward_ad._current_level >= 0, breaks
    assert forward_ad._current_level < 0


def test_batches_of_output_gradients_are_recognised():
    breaks = "a layer would quantise a batch of output gradients as one"
    x = torch.ones(3, requires_grad=True)
    output, grads = Remembering.apply(x), torch.ones(2, 3)
    torch.autograd.grad(output, x, grads[0], retain_graph=True)
    assert Remembering.seen == (False, False), "each backward would be refused"
    torch.autograd.grad(output, x, grads, retain_graph=True, is_grads_batched=True)
    assert Remembering.seen == (False, True), breaks
    torch.func.vmap(lambda grad: torch.autograd.grad(output, x, grad, retain_graph=True))(grads)
    assert Remembering.seen == (True, False), breaks


def test_transforms_and_traces_are_seen():
    breaks = "C code would read the memory of a transform's or a trace's tensors"
    answers = []

    def ask(x):
        answers.append((_functorch.peek_interpreter_stack() is not None, torch._C._is_tracing()))
        return x + 1

    ask(torch.ones(2))
    torch.func.vmap(ask)(torch.ones(2))
    torch.jit.trace(ask, torch.ones(2), check_trace=False)
    assert answers == [(False, False), (True, False), (False, True)], breaks
