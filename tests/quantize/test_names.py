import pytest
import torch

from megalowbit.errors import UserError
from megalowbit.quantize.names import quantizer, quantizer_names
from megalowbit.quantize.seed_compat import SEED_COMPAT


def test_every_listed_name_gives_a_quantizer_of_that_name():
    assert len(quantizer_names()) == 26
    for name in (*quantizer_names(), *(f"{base}:seed_compat" for base in SEED_COMPAT)):
        assert quantizer(name).name == name
        assert quantizer(name) is quantizer(name)


def test_the_suffix_nosr_means_nearest_even():
    for base in ("nvfp4e2m1b", "mxfp4e2m1b", "fp4e2m1b"):
        assert quantizer(base).is_stochastic
        assert not quantizer(base + "nosr").is_stochastic
    assert quantizer("fp32").is_identity


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("fp8e4m3:sr", "is_stochastic", True),
        ("nvfp4e2m1b:unbiased", "is_stochastic", True),
        ("nvfp4e2m1b:unbiased", "scale_rounding", "up"),
        ("fp4e2m1b:unbiased", "scale_rounding", "nearest"),
        ("mxfp4e2m1b", "scale_rounding", "up"),
        ("mxfp4e2m1b:floor", "scale_rounding", "down"),
        ("nvfp4e2m1bnosr:4over6", "four_over_six", True),
        ("nvfp4e2m1b:4over6:tile16", "four_over_six_max", 256.0),
        ("nvfp4e2m1bnosr:4over6_448", "four_over_six_max", 448.0),
        ("mxfp8e4m3b", "scale_rounding", "up"),
        ("mxfp8e5m2b:floor", "scale_rounding", "down"),
        ("hif4:unbiased", "scale_rounding", "up"),
        ("ue5m3fp4e2m1b", "is_stochastic", True),
        ("nvfp4e2m1bnosr", "is_power_of_two", True),
        ("nvfp4e2m1b:tile16:fp32_scale", "is_power_of_two", False),
        ("int8:q_scalar=1.25", "q_scalar", 1.25),
        ("1p58bit", "scale_from", "mean"),
        ("int8e5m2b", "is_stochastic", False),
        ("int8e5m2b:sr", "is_stochastic", True),
        ("int8e5m2b:unbiased", "scale_rounding", "nearest"),
        ("int8e5m2b:q_scalar=1", "q_scalar", 1.0),
    ],
)
def test_options_change_the_encoding(name, field, value):
    assert getattr(quantizer(name).encoding, field) == value


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("nvfp4e2m1b:tile16", (16, 16)),
        ("fp4e2m1b:tile16", (16, 16)),
        ("int8b:block32", (1, 32)),
        ("mxfp4e2m1b", (1, 32)),
        ("fp8e5m2b", (1, 16)),
        ("fp8e5m2", None),
        ("int8e5m2b", (1, 128)),
        ("int8e5m2b:block32", (1, 32)),
        ("fp8e4m3b:block128", (1, 128)),
        ("fp8e4m3b:tile128", (128, 128)),
        ("mxfp8e5m2b", (1, 32)),
        ("hif4", (1, 64)),
        ("ue5m3fp4e2m1bnosr:tile16", (16, 16)),
    ],
)
def test_blocks_are_those_of_name_and_options(name, block):
    assert quantizer(name).encoding.format.block == block


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nvfp4e2m1", "unknown quantizer 'nvfp4e2m1': did you mean 'nvfp4e2m1b'"),
        ("", "unknown quantizer ''"),
        ("nvfp4e2m1b:tile61", "unknown option 'tile61': did you mean 'tile16'"),
        ("nvfp4e2m1b:", "an option is empty"),
        ("nvfp4e2m1b::sr", "an option is empty"),
        ("nvfp4e2m1b:TILE16", "write 'tile16'"),
        ("nvfp4e2m1bnosr:sr", "nosr and sr contradict each other, use nvfp4e2m1b"),
        ("mxfp4e2m1bnosr:unbiased", "use mxfp4e2m1b:unbiased"),
        ("nvfp4e2m1b:q_scalar", "write q_scalar=NUMBER"),
        ("nvfp4e2m1b:sr=1", "write q_scalar=NUMBER"),
        ("nvfp4e2m1b:q_scalar=x", "q_scalar='x' is not a number"),
        ("nvfp4e2m1b:q_scalar=1_0", "q_scalar='1_0' is not a number"),
        ("nvfp4e2m1b:q_scalar=-1", "q_scalar must be a normal fp32 number above 0"),
        ("nvfp4e2m1b:q_scalar=1e39", "q_scalar must be a normal fp32 number"),
        ("nvfp4e2m1b:q_scalar=1e-60", "q_scalar must be a normal fp32 number"),
        ("nvfp4e2m1b:q_scalar=1e-40", "q_scalar must be a normal fp32 number"),
        ("NVFP4e2m1b", "unknown quantizer 'NVFP4e2m1b': names are in lower case, write 'nvfp4e2m1b'"),
        ("bf16", "unknown quantizer 'bf16': write 'fp32' for not quantised"),
        ("nvfp4e2m1b:sr:sr", "sr is given twice"),
        ("mxfp4e2m1b:unbiased:floor", "unbiased and floor contradict each other"),
        ("int8b:tile16:block32", "tile16 and block32 contradict"),
        ("mxfp4e2m1b:4over6", "four-over-six needs NVFP4"),
        ("nvfp4e2m1b:4over6:4over6_448", "4over6 and 4over6_448 contradict"),
        ("nvfp4e2m1b:token_scale:tile16", "token_scale and tile16 contradict"),
        ("nvfp4e2m1b:fp32_scale:token_scale", "token_scale and fp32_scale contradict"),
        ("mxfp4e2m1b:token_scale", "NVFP4's tensor scale only"),
        ("hif4:tile16", "tile16 does not fit"),
        ("hif4nosr:unbiased", "use hif4:unbiased"),
        ("mxfp8e4m3b:tile128", "tile128 does not fit"),
        ("mxfp4e2m1b:fp32_scale", "NVFP4's tensor scale only"),
        ("nvfp4e2m1b:floor", "use mxfp4… or mxfp8…"),
        ("mxfp4e2m1b:tile16", "tile16 does not fit"),
        ("nvfp4e2m1b:block32", "block32 does not fit"),
        ("int8:tile16", "tile16 does not fit"),
        (
            "1p58bit:unbiased",
            "unbiased does not support scales from the mean magnitude, which saturate elements",
        ),
        (
            "nvfp4e2m1b:unbiased:q_scalar=0.9",
            "unbiased does not support q_scalar=0.9, which saturates elements",
        ),
        ("int8b:q_scalar=0.5:unbiased", "unbiased does not support q_scalar=0.5"),
        ("fp32:sr", "fp32 takes no options"),
        ("int8:seed_compat", "seed_compat exists for fp4e2m1, "),
        ("fp4e2m1b:seed_compat:sr", "seed_compat cannot be combined"),
    ],
)
def test_unknown_or_incompatible_names_and_options_are_rejected_by_name(name, message):
    with pytest.raises(UserError, match="quantizer") as caught:
        quantizer(name)
    assert message in str(caught.value)
    assert repr(name) in str(caught.value) or "unknown quantizer" in message


@pytest.mark.parametrize("name", [5, None, [], b"fp4e2m1b", 1.5])
def test_a_name_that_is_not_a_string_is_rejected(name):
    with pytest.raises(UserError, match="a quantizer has a name, not"):
        quantizer(name)


def test_representations_are_one_short_line():
    for name, expected in (
        ("fp8e4m3b", "BlockQuantizer('fp8e4m3b')"),
        ("fp32", "IdentityQuantizer('fp32')"),
        ("fp4e2m1b:seed_compat", "SeedCompatQuantizer('fp4e2m1b:seed_compat')"),
    ):
        assert repr(quantizer(name)) == expected
    x = torch.zeros(64, 32, dtype=torch.bfloat16)
    described = "(64, 32), bfloat16, e2m1 under e4m3 scales for 1 × 16, 4.5 bits an element"
    assert repr(quantizer("nvfp4e2m1b").quantize(x)) == f"QuantizedTensor({described})"
    described = "(64, 32), bfloat16, int8_e5m2 under signed_fp32 scales for 1 × 128, 8.25 bits an element"
    assert repr(quantizer("int8e5m2b").quantize(x)) == f"QuantizedTensor({described})"
    assert repr(quantizer("fp32").quantize(x)) == "UnquantizedTensor((64, 32), bfloat16)"
    assert len(repr(quantizer("fp8e4m3b").encoding)) < 300


def test_seed_compat_computes_something_else_than_the_format_of_that_name():
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for base in SEED_COMPAT:
        assert not torch.equal(quantizer(f"{base}:seed_compat")(x), quantizer(base)(x))
