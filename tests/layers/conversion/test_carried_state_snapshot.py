import pytest
import torch

from megalowbit.layers.conversion.carried_state import forget_uses, restore_layers, split_counts, take_layers
from megalowbit.layers.conversion.convert import bit_layers, cache_weights, convert, random_stream

SPLIT = {
    "base": "nvfp4",
    **{f"split_{role}": {"method": "qb", "rank": 4} for role in ("input", "weight", "grad_output")},
}
RECIPES = [pytest.param("nvfp4", id="rounding"), pytest.param(SPLIT, id="splits")]


def model_of(recipe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32))
    convert(model, recipe, seed=5)
    return model.bfloat16()


def step(model, seed, micro_batches):
    """Gradients of a step, and where the stream is after it."""
    generator = torch.Generator().manual_seed(seed)
    model.zero_grad()
    for _ in range(micro_batches):
        torch.manual_seed(3)
        model(torch.randn(64, 32, generator=generator).bfloat16()).float().square().sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    return gradients.clone(), random_stream(model).step


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_repeated_step_gives_the_same_bits(recipe, micro_batches):
    model = model_of(recipe)
    step(model, 0, micro_batches)
    snapshot = take_layers(model)
    first, position = step(model, 1, micro_batches)
    counts = split_counts(model)
    for _ in range(2):
        restore_layers(model, snapshot)
        again, same_position = step(model, 1, micro_batches)
        assert torch.equal(first, again)
        assert position == same_position
        assert split_counts(model) == counts  # a step counts once
    assert (counts.get("warm", 0) > 0) == (recipe is SPLIT)
    untouched, _ = step(model, 1, micro_batches)
    assert not torch.equal(first, untouched)  # without putting anything back


def test_a_run_with_a_repeated_step_continues_like_one_without():
    straight, repeated = model_of(SPLIT), model_of(SPLIT)
    snapshot = take_layers(repeated)
    step(repeated, 0, 2)
    restore_layers(repeated, snapshot)
    for seed in range(3):
        assert torch.equal(step(straight, seed, 2)[0], step(repeated, seed, 2)[0])


def test_a_repeated_step_draws_the_numbers_of_all_streams_again():
    model = torch.nn.Sequential(model_of("nvfp4"), model_of("nvfp4"))
    snapshot = take_layers(model)
    first, _ = step(model, 0, 2)
    restore_layers(model, snapshot)
    assert torch.equal(first, step(model, 0, 2)[0])


def test_restoring_clears_cached_quantised_weights():
    model = model_of("mxfp4")
    cache = cache_weights(model)
    snapshot = take_layers(model)
    step(model, 0, 2)
    assert len(cache) > 0
    restore_layers(model, snapshot)
    assert len(cache) == 0


def test_a_model_without_low_bit_layers_is_accepted():
    model = torch.nn.Linear(2, 2)
    snapshot = take_layers(model)
    restore_layers(model, snapshot)
    assert snapshot.streams == {}
    assert not bit_layers(model)


def test_a_repeated_micro_batch_does_not_count_as_a_second_use():
    model = model_of("nvfp4")
    cache = cache_weights(model)
    before = random_stream(model).state_dict()
    first, _ = step(model, 1, 1)
    random_stream(model).load_state_dict(before)
    assert len(cache)
    second_use, _ = step(model, 1, 1)
    random_stream(model).load_state_dict(before)
    forget_uses(model)
    assert not len(cache)
    again, _ = step(model, 1, 1)
    assert torch.equal(first, again)
    assert not torch.equal(first, second_use)
