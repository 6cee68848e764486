import pytest
import torch
from small_engines import config, model

from megalowbit.config.deepspeed_json import read_deepspeed_config
from megalowbit.distributed.process_grid import ProcessGrid
from megalowbit.engine.initialize import initialize
from megalowbit.engine.prepare_model import (
    PreparedModel,
    check_prepared,
    check_quantised,
    prepare_model,
    set_random_ranks,
)
from megalowbit.errors import UserError
from megalowbit.layers.conversion.convert import bit_layers, convert, random_stream, restore
from megalowbit.layers.recipe import recipe


def test_the_prepared_model_is_converted_and_lists_its_low_bit_layers():
    net, parts = model(), read_deepspeed_config(config("nvfp4"))
    prepared = prepare_model(net, parts, ProcessGrid(0, 1), mpu=None, seed=5)
    assert list(prepared.low_bit) == list(bit_layers(net)) == ["0", "2"]
    assert prepared.recipe == recipe("nvfp4")
    assert (prepared.mpu, prepared.groups) == (None, None)
    assert random_stream(net).state_dict()["seed"] == 5


def test_without_a_recipe_the_model_is_unchanged():
    net, parts = model(), read_deepspeed_config(config())
    prepared = prepare_model(net, parts, ProcessGrid(0, 1), mpu=None, seed=0)
    assert prepared == PreparedModel(recipe=None, low_bit=prepared.low_bit, mpu=None, groups=None)
    assert not prepared.low_bit
    assert type(net[0]) is torch.nn.Linear


def test_the_former_name_of_an_attribute_is_rejected():
    net = model()
    net[0].weight.cut = object()
    with pytest.raises(UserError, match=r"parameter 0.weight has an attribute cut, .* called sharding"):
        prepare_model(net, read_deepspeed_config(config()), ProcessGrid(0, 1), mpu=None, seed=0)


def test_a_low_bit_layer_missing_from_the_engine_is_named():
    net = model()
    engine, *_ = initialize(model=net, config=config("nvfp4"))
    prepared = PreparedModel(recipe=recipe("nvfp4"), low_bit=["0", "2"], mpu=None, groups=None)
    check_prepared(engine, prepared)
    engine.module[2] = torch.nn.Linear(32, 1)
    with pytest.raises(UserError, match="2"):
        check_prepared(engine, prepared)
    restore(net)
    with pytest.raises(UserError, match="asks for low-bit layers but the model has none"):
        check_prepared(engine, prepared)


def test_missing_low_bit_layers_are_an_error():
    with pytest.raises(UserError, match="'nvfp4' asks for low-bit layers but the model has none"):
        check_quantised(model(), recipe("nvfp4"))


def test_an_unknown_recipe_is_named():
    with pytest.raises(UserError, match="nvfp5"):
        initialize(model=model(), config=config("nvfp5"))


def test_a_model_converted_with_a_recipe_other_than_the_configured_one_is_rejected():
    net = model()
    convert(net, recipe("nvfp4"))
    with pytest.raises(UserError, match=r"recipe is 'bf16' but layer 0 was converted with 'nvfp4'"):
        initialize(model=net, config=config("bf16"))


def test_every_data_parallel_rank_rounds_with_its_own_random_numbers():
    net = model()
    convert(net, recipe("nvfp4"))
    set_random_ranks(net, ProcessGrid(7, 8, tensor_size=2))
    assert random_stream(net).rank == 3
    set_random_ranks(net, ProcessGrid(0, 8, tensor_size=2))
    assert random_stream(net).rank == 0


class WithExperts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.experts = torch.nn.Linear(32, 32), torch.nn.Parameter(torch.zeros(2, 32, 32))

    def forward(self, x):
        return self.first(x) @ self.experts[0]


@pytest.mark.parametrize("is_converted", [False, True])
def test_projections_outside_linear_layers_are_rejected_unless_they_are_kept(is_converted):
    kept = {"base": "nvfp4", "keep": ["experts"]}
    for asked in ("nvfp4", kept):
        net = WithExperts()
        if is_converted:
            convert(net, asked)
        if asked is kept:
            initialize(model=net, config=config(asked))
            assert list(bit_layers(net)) == ["first"]
            continue
        with pytest.raises(
            UserError, match=r"does not reach weight experts \(2, 32, 32\).*keep \('experts'\)"
        ):
            initialize(model=net, config=config(asked))
    initialize(model=WithExperts(), config=config())
    initialize(model=WithExperts(), config=config("bf16"))
