import pytest

from megalowbit.errors import UserError
from megalowbit.quantize.names import quantizer, quantizer_names


def test_every_listed_name_gives_a_quantizer_of_that_name():
    assert set(quantizer_names()) == {"nvfp4e2m1b", "nvfp4e2m1bnosr", "fp32"}
    for name in quantizer_names():
        assert quantizer(name).name == name


def test_the_suffix_nosr_means_nearest_even():
    assert quantizer("nvfp4e2m1b").is_stochastic
    assert not quantizer("nvfp4e2m1bnosr").is_stochastic
    assert quantizer("fp32").is_identity


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(UserError, match="unknown quantizer 'nvfp4e2m1': did you mean 'nvfp4e2m1b'"):
        quantizer("nvfp4e2m1")
