"""What the controller's tests share: small models, their data, and a loop that writes everything down."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import megalowbit as mlb
from megalowbit.speculation.precisions import PRODUCTS

PLAIN = {"candidates": ["int8", "bf16"], "threshold_db": 15, "every": 10, "lookahead": 20, "verify_every": 0}
WIDE = 64


class Mlp(nn.Module):
    """Two layers, and a branch that not every step takes."""

    def __init__(self, *, seed=0, dropout=0.0, width=WIDE):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.drop = nn.Linear(width, 2 * width), nn.Dropout(dropout)
        self.down, self.branch = nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, x, *, takes_branch=True):
        x = self.down(self.drop(nn.functional.gelu(self.up(x))))
        return self.branch(x) if takes_branch else x


def converted(**arguments):
    model = Mlp(**arguments)
    mlb.convert(model, "fp8", seed=5)
    return model


def batch(step, *, rows=128, width=WIDE):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(step))


def train(model, controller, steps, *, data=batch, lr=1e-2, **arguments):
    """One report (or None) for each step; the layers' precisions during each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    reports, used, losses = [], [], []
    for step in steps:
        controller.begin_step()
        used.append(precisions_of(controller))
        loss = model(data(step), **arguments).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reports.append(controller.end_step())
        losses.append(loss.item())
    return reports, used, losses


def precisions_of(controller):
    return {(layer, product): controller.precision(layer, product) for layer in controller.layers
            for product in PRODUCTS}  # fmt: skip


def row(report, layer, product):
    (found,) = [each for each in report.rows if (each.layer, each.product) == (layer, product)]
    return found


def quantized_int8(x):
    scale = np.abs(x).max() / 127
    return np.rint(x / scale) * scale


def measured_bulk_db(left, right):
    """SNR of left · rightᵀ in INT8 with elements beyond 6 sigma zero, from whole matrices."""

    def is_bulk(x):
        distance = np.abs(x - np.median(x))
        return distance <= 6 * np.quantile(distance, 0.6827)

    exact = (left * is_bulk(left)) @ (right * is_bulk(right)).T
    made = (quantized_int8(left) * is_bulk(left)) @ (quantized_int8(right) * is_bulk(right)).T
    return 10 * math.log10(np.square(exact).sum() / np.square(made - exact).sum())


def growing(rate, start):
    """Batches whose first channel grows by `rate` a step from `start` on."""

    def data(step):
        x = batch(step)
        x[:, 0] *= (1 + rate) ** max(0, step - start)
        return x

    return data


def gpt2(**arguments):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        use_cache=False, **arguments,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    mlb.convert(model, {"base": "fp8"}, seed=3)
    return model


def tokens(step):
    ids = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(step))
    ids[:, 1::2] = ids[:, ::2]  # something to learn
    return ids


def train_gpt2(model, optimizer, controller, steps):
    losses, reports = [], []
    for step in steps:
        controller.begin_step()
        ids = tokens(step)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reports.append(controller.end_step())
        losses.append(loss.item())
    return losses, reports


GPT2_SETTINGS = {
    "candidates": ["int4", "int8", "fp8", "bf16"], "threshold_db": {"int4": 17, "int8": 31, "fp8": 22},
    "every": 2, "lookahead": 4, "verify_every": 2, "cooldown": 6, "patience": 2, "verify_size": 16,
}  # fmt: skip
