"""Replays of captured micro-batches, for each shipped recipe, against layers that are not captured.

A program of its own, because Triton chooses between compiler and interpreter once for a process.
"""

import copy
import sys
from itertools import chain

import pytest
import torch
from simulated_graphs import Device

import megalowbit as mlb
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import product_counts
from megalowbit.layers.matmul.use_counter import ProductCounts
from megalowbit.quantize.philox import RandomKey
from megalowbit.quantize.random_stream import RandomStream
from megalowbit.quantize.triton.launch_arguments import random_arguments
from megalowbit.quantize.triton.step_counters import ROWS

TOKENS, INPUTS, OUTPUTS = 32, 48, 32
WARM_UPS, REPLAYS = 1, 2
FP8 = {"base": "mxfp4", "name": "mxfp4, FP8 products", "gemm": "fp8"}
SPLIT = {"base": "nvfp4", "name": "a split", "split_grad_output": {"rank": 8}}
DRAWING = {"base": "nvfp4", "name": "drawing", "q_forward_input": "nvfp4e2m1b"}
REFUSED = {  # by recipe: what the error names
    "hif4": "random numbers that no Triton kernel draws",
    "metis-qb": "the choice of a split's factors",
    "metis-seed": "random numbers that no Triton kernel draws",
    "quartet-2": "signs of the Hadamard transform",
    "tetrajet-2": "the choice of a split's factors",
    SPLIT["name"]: "the choice of a split's factors",
}


class Run:
    """A layer that runs micro-batches with the same data, and a copy that is not captured."""

    def __init__(self, recipe):
        torch.manual_seed(1)
        self.layer = mlb.BitLinear(INPUTS, OUTPUTS, bias=False, recipe=recipe)
        self.layer.layer_name = "layer"
        self.layer.random_stream = stream_of(RandomStream(0, 0))
        self.x = torch.randn(TOKENS, INPUTS).requires_grad_()
        self.grad = torch.randn(TOKENS, OUTPUTS)

    def twin(self):
        other = copy.copy(self)
        other.layer, other.x = copy.deepcopy(self.layer), self.x.detach().clone().requires_grad_()
        stream_of(other.stream)
        return other

    @property
    def stream(self):
        return self.layer.random_stream

    def forward(self):
        self.x.grad = self.layer.weight.grad = None
        return self.layer(self.x)

    def backward(self, output):
        output.backward(self.grad)
        return [output.detach(), self.x.grad, self.layer.weight.grad]

    def step(self, advances=True):
        if advances:
            self.stream.advance()
        return self.backward(self.forward())


def stream_of(stream):
    """A stream that has been checked; other tests do that, and it takes the interpreter seconds."""
    stream._checked.add("cpu")
    return stream


def steps(run, count):
    """Results and draws of micro-batches that are not captured."""
    found = []
    for _ in range(count):
        device.drawn.clear()
        results = [each.clone() for each in run.step()]
        found.append((results, list(device.drawn)))
    return found


def replays(graph, results, count):
    found = []
    for _ in range(count):
        drawn = device.draws(graph.replay)
        found.append(([each.clone() for each in results], drawn))
    return found


def captured(run, **how):
    with device.capture() as graph:
        results = run.step(**how)
    return graph, results


def check_equal(found, expected):
    for (results, drawn), (others, other_draws) in zip(found, expected, strict=True):
        assert drawn == other_draws, (drawn, other_draws)
        assert all(map(torch.equal, results, others))


def check_new(*draws):
    """No two of these have drawn the same numbers."""
    pairs = list(chain.from_iterable(drawn for drawn in draws))
    assert len(set(pairs)) == len(pairs) > 0, pairs


def check_recipe(recipe):
    """Replays have the bits of the micro-batches that they stand for; host counts stay right."""
    run = Run(recipe)
    name, eager = run.layer.recipe.name, run.twin()
    expected = steps(eager, WARM_UPS + REPLAYS)
    steps(run, WARM_UPS)
    counts = product_counts(run.layer)
    if name in REFUSED:
        expect(REFUSED[name], lambda: captured(run))
        return
    graph, results = captured(run)
    assert product_counts(run.layer) == counts
    found = replays(graph, results, REPLAYS)
    check_equal(found, expected[WARM_UPS:])
    if any(drawn for _, drawn in expected):
        check_new(*(drawn for _, drawn in found))
        assert not torch.equal(found[0][0][1], found[1][0][1])
    if name == FP8["name"]:
        assert product_counts(run.layer) == {
            product: {"fp8": WARM_UPS + REPLAYS} for product in ("output", "grad_input", "grad_weight")
        }


def check_no_other_numbers():
    """A step after a capture, whose graph was not replayed, is that of a layer that was not captured."""
    run = Run(DRAWING)
    expected = steps(run.twin(), WARM_UPS + 2)
    steps(run, WARM_UPS)
    captured(run)
    check_equal(steps(run, 1), expected[-1:])


def check_two_graphs_of_a_micro_batch():
    run = Run(DRAWING)
    expected = steps(run.twin(), WARM_UPS + REPLAYS)
    steps(run, WARM_UPS)
    first, second = captured(run), captured(run, advances=False)
    found = [replays(*each, 1) for _ in range(REPLAYS) for each in (first, second)]
    check_equal(list(chain(*found[::2])), expected[WARM_UPS:])
    check_new(*(drawn for ((_, drawn),) in found))


def check_two_graphs_of_two_micro_batches():
    run = Run(DRAWING)
    expected = steps(run.twin(), WARM_UPS + REPLAYS)
    steps(run, WARM_UPS)
    first, second = captured(run), captured(run)
    found = [replays(*each, 1) for _ in range(REPLAYS) for each in (first, second)]
    check_equal(list(chain(*found[::2])), expected[WARM_UPS:])
    check_new(*(drawn for ((_, drawn),) in found))


def check_after_a_failed_capture():
    run = Run(DRAWING)
    expected = steps(run.twin(), WARM_UPS + 2)
    steps(run, WARM_UPS)
    for advances in (True, False):
        try:
            with device.capture():
                run.step(advances)
                raise KeyError
        except KeyError:
            pass
    graph, results = captured(run, advances=False)
    found = replays(graph, results, REPLAYS)
    check_new(*(drawn for _, drawn in found))
    steps_after = steps(run, 1)
    check_equal(steps_after, expected[-1:])


def check_after_a_rollback():
    run = Run(DRAWING)
    run.layer.random_stream.load_state_dict({"seed": 0, "step": 7})
    expected = steps(run.twin(), REPLAYS)
    run.layer.random_stream.load_state_dict({"seed": 0, "step": 20})
    steps(run, WARM_UPS)
    run.layer.random_stream.load_state_dict({"seed": 0, "step": 7})
    graph, results = captured(run)
    found = replays(graph, results, REPLAYS)
    check_equal(found, expected)
    check_new(*(drawn for _, drawn in found))
    run.layer.random_stream.load_state_dict({"seed": 0, "step": 20})
    steps(run, WARM_UPS)
    run.layer.random_stream.load_state_dict({"seed": 0, "step": 7})
    check_equal(replays(*captured(run), REPLAYS), expected)  # a repeated step has its numbers again
    run.layer.random_stream.load_state_dict({"seed": 0, "step": 3})
    other = replays(*captured(run), REPLAYS)
    check_new(*(drawn for _, drawn in (*found, *other)))


def check_forward_and_backward_apart():
    run = Run(DRAWING)
    expected = steps(run.twin(), WARM_UPS + REPLAYS)[WARM_UPS:]
    steps(run, WARM_UPS)
    run.stream.advance()
    with device.capture() as forward:
        output = run.forward()
    with device.capture() as backward:
        results = run.backward(output)
    found = []
    for _ in range(REPLAYS):
        drawn = device.draws(lambda: (forward.replay(), backward.replay()))
        found.append(([each.clone() for each in results], drawn))
    check_equal(found, expected)


def check_several_micro_batches_in_a_graph():
    run = Run(DRAWING)
    expected = steps(run.twin(), WARM_UPS + 2 * REPLAYS)[WARM_UPS:]
    steps(run, WARM_UPS)
    with device.capture() as graph:
        results = [run.step(), run.step()]
    for replay in range(REPLAYS):
        drawn = device.draws(graph.replay)
        (one, first), (other, second) = expected[2 * replay : 2 * replay + 2]
        assert drawn == first + second
        assert all(map(torch.equal, chain(*results), [*one, *other]))


def check_forks():
    """Two streams of a capture do not share a counter, because one does not wait for the other's addition."""
    run, other = Run(DRAWING), Run(DRAWING)
    other.layer.layer_name, other.layer.random_stream = "other", run.stream
    steps(run, 1), steps(other, 1)
    run.stream.advance()
    with device.capture() as graph:
        run.step(advances=False)
        device.stream = 2
        other.step(advances=False)
    draws = [device.draws(graph.replay) for _ in range(REPLAYS)]
    check_new(*draws)
    assert [{step for _, _, step in drawn} for drawn in draws] == [{3}, {4}]


def siblings():
    """Two layers that have run once, an input, another one, and the second's result for that."""
    torch.manual_seed(2)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(INPUTS, OUTPUTS) for name in ("q_proj", "k_proj")})
    mlb.convert(model, "nvfp4", seed=0)
    stream_of(mlb.random_stream(model))
    x, other = torch.randn(2, TOKENS, INPUTS)
    expected = model["k_proj"](other)
    model["q_proj"](x), model["k_proj"](x)  # afterwards no layer holds an input
    return *model.values(), x, other, expected


@torch.no_grad()
def check_siblings_in_two_graphs():
    """A replay of the second alone reads its input, not codes of the first."""
    first, second, x, other, expected = siblings()
    with device.capture():
        first(x)
    with device.capture() as graph:
        result = second(x)
    x.copy_(other)
    graph.replay()
    assert torch.equal(result, expected)


@torch.no_grad()
def check_a_sibling_before_a_capture():
    first, second, x, other, expected = siblings()
    first(x)
    with device.capture(stream=device.stream) as graph:
        result = second(x)
    x.copy_(other)
    graph.replay()
    assert torch.equal(result, expected)


@torch.no_grad()
def check_a_sibling_after_a_capture():
    first, second, _, other, expected = siblings()
    with device.capture(stream=device.stream):
        first(other)  # writes no codes: nothing runs
    assert torch.equal(second(other), expected)


def check_errors():
    run = Run(DRAWING)
    expect("run one step first", lambda: captured(run))
    steps(run, WARM_UPS)
    key = run.stream.key("any", "input")
    for _ in range(ROWS):
        in_a_capture(lambda: random_arguments(key, run.grad.device))
    expect("no counter for its random numbers is left", lambda: captured(run))
    random_arguments(key, run.grad.device)  # in the same micro-batch
    captured(run)
    counts = ProductCounts()
    expect("counts of FP8 products", lambda: in_a_capture(lambda: counts.on_device("output", run.x.device)))
    quantizer = mlb.quantizer("nvfp4e2m1b")
    constant = {"random_key": RandomKey(1, 2)}
    expect(
        "take keys from a RandomStream",
        lambda: in_a_capture(lambda: quantizer.quantize(run.grad, **constant)),
    )


def in_a_capture(call):
    with device.capture():
        call()


def expect(part, call):
    with pytest.raises(UserError) as caught:
        call()
    assert part in str(caught.value), caught.value
    assert "\n" not in str(caught.value)


if __name__ == "__main__":
    device = Device()
    group = sys.argv[2]
    with device.active():
        if group == "captures":
            for name, check in list(globals().items()):
                if name.startswith("check_") and name not in ("check_equal", "check_new", "check_recipe"):
                    check()
        else:
            for recipe in (FP8, SPLIT) if group == "others" else group.split(","):
                check_recipe(recipe)
    print("equal")
