"""Ranges of a model's layers on the profiler's timeline, with and without recomputed activations."""

from collections import Counter

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megalowbit.telemetry.ranges import LayerRanges


def tiny_llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2
        )
    ).train()


@pytest.fixture(autouse=True)
def plain_linear(monkeypatch):
    """Without the function that DeepSpeed's ZeRO 3, in an earlier test of this process, has left there."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)


def parts_of(model):
    blocks = {f"block {index}": block for index, block in enumerate(model.model.layers)}
    layers = {f"first {index}": block.self_attn.q_proj for index, block in enumerate(model.model.layers)}
    layers |= {f"last {index}": block.mlp.down_proj for index, block in enumerate(model.model.layers)}
    return blocks, layers


def hooks_of(model):
    return [
        [*module._forward_pre_hooks.values(), *module._forward_hooks.values()] for module in model.modules()
    ]


@pytest.mark.parametrize("recomputed", ["nothing", "reentrant", "non-reentrant"])
def test_all_ranges_end_and_change_no_gradient(recomputed):
    model = tiny_llama()
    if recomputed != "nothing":
        model.gradient_checkpointing_enable({"use_reentrant": recomputed == "reentrant"})
    hooks_before = hooks_of(model)
    tokens = torch.arange(16).reshape(2, 8)
    gradients = []
    for has_ranges in (False, True):
        ranges = LayerRanges(*(parts_of(model) if has_ranges else ({}, {})))
        model.zero_grad()
        with torch.profiler.profile() as profile:
            model(input_ids=tokens, labels=tokens).loss.backward()
        ranges.remove()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    found = [event for event in profile.events() if event.name.startswith(("block", "first", "last"))]
    counts = Counter(event.name for event in found)
    runs = 1 if recomputed == "nothing" else 2  # transformers recomputes below the hooks of a block
    assert counts == {
        f"{part} {index} {phase}": count
        for index in range(3)
        for part, phase, count in (
            ("block", "forward", 1), ("block", "backward", 1), ("first", "forward", runs),
            ("last", "forward", runs),
        )
    }  # fmt: skip
    ends = {event.name: event.time_range for event in found}
    for index in range(2):  # backward goes from the last block to the first
        assert ends[f"block {index + 1} backward"].end <= ends[f"block {index} backward"].start
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert hooks_of(model) == hooks_before  # with checkpointing, transformers has one of its own


def test_a_range_that_no_gradient_ends_is_ended_when_ranges_are_removed():
    model = tiny_llama()
    model.model.embed_tokens.requires_grad_(False)
    tokens = torch.arange(8)[None]
    ranges = LayerRanges(*parts_of(model))
    with torch.profiler.profile() as profile:
        model(input_ids=tokens, labels=tokens).loss.backward()
        ranges.remove()
        with torch.profiler.record_function("after"):
            torch.ones(1) + 1
    found = {event.name: event.time_range for event in profile.events()}
    last = max(time.end for name, time in found.items() if name.startswith("autograd::engine"))
    assert last <= found["block 0 backward"].end <= found["after"].start
