"""Two ranks split weights into parameters, each as if its linear algebra library were another one."""

import itertools

import torch
from tiny_training import config, facts, make, rank_and_size, report, train_step, weights

import megalowbit.layers.parameter_split.masters as split_masters
from megalowbit.engine.parameters.split import split_weights
from megalowbit.layers.conversion.convert import bit_layers
from megalowbit.spectral.weight_split import WeightParts

RANK, STEPS, SPLITS = 3, 6, (2, 4)


class ThreeLayers(torch.nn.Module):
    """A layer more than ranks, so that one rank has two to split."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = (8, 16, 12, 4)
        layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        self.body = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])

    def forward(self, x):
        target = x.sum(1, keepdim=True)
        y = self.body(x.to(self.body[0].weight.dtype)).float().sum(1, keepdim=True)
        return (y - target).square().mean()


def of_another_machine(split):
    """Other signs, other last bits, and columns of U of length 1/2 that tell whose they are."""

    def other(weight, rank):
        parts = split(weight, rank)
        return WeightParts(parts.residual * (1 + 1e-6), -parts.u / 2, parts.s * 2 * (1 + 1e-6), -parts.v)

    return other


def whole(masters):
    w, u, s, v = (master.detach().double() for master in masters)
    return w + u @ torch.diag(s) @ v


def masters_of(engine):
    layers = bit_layers(engine.module).values()
    return [[engine.optimizer.master_of(part) for part in layer.parts()] for layer in layers]


def state_of(engine):
    """All masters and moments, as numbers that JSON keeps exactly."""
    states = [
        {
            name: value.double().flatten().tolist()
            for name, value in engine.optimizer.state[part].items()
            if isinstance(value, torch.Tensor)
        }
        for parts in masters_of(engine)
        for part in parts
    ]
    return [part.double().flatten().tolist() for parts in masters_of(engine) for part in parts], states


rank, _ = rank_and_size()
if rank == 1:
    split_masters.weight_parts = of_another_machine(split_masters.weight_parts)
settings = config("bf16", steps=2, clipping=1.0)
settings["megalowbit"]["recipe"] = {"base": "nvfp4", "parameter_split": {"rank": RANK, "merged_lr": 5e-3}}
engine, *_ = make(ThreeLayers(), settings)
result = {"losses": [], "facts": [], "states": [], "errors": []}
for step in range(STEPS):
    if step in SPLITS:
        before = [whole(masters) for masters in masters_of(engine)]
        done = split_weights(engine)
        after = [whole(masters) for masters in masters_of(engine)]
        result["errors"].append(max((a - b).abs().max().item() for a, b in zip(after, before, strict=True)))
        result["ranks"] = dict(done.ranks)
        result["states"].append(state_of(engine))
    result["losses"].append(train_step(engine, step))
    result["facts"].append(facts(engine))
result["weights"] = weights(engine)
result["lr_scale"] = [group["lr_scale"] for group in engine.optimizer.param_groups]
report(result)
