import torch

from megalowbit.quantize import reference
from megalowbit.quantize.cpu import fp4 as kernels_cpu
from megalowbit.quantize.cpu import known_bits


def scale_and_bias(product, scale, bias, out):
    scaled = product.float() * torch.tensor(scale)
    return out.copy_(scaled if bias is None else scaled + bias.float())


def column_sums(matrix):
    total = torch.zeros(matrix.shape[1])
    for part in matrix.float().split(kernels_cpu.SUM_ROWS):
        total += sum(part, torch.zeros(matrix.shape[1]))
    return total


PLAIN = (reference.encode, reference.decode, scale_and_bias, column_sums)


def test_the_known_bits_are_those_of_plain_torch():
    assert known_bits.answers(*PLAIN) == known_bits.KNOWN_BITS


def test_the_known_bits_of_8_bit_formats_are_those_of_plain_torch():
    assert known_bits.answers_8bit(reference.encode, reference.decode) == known_bits.KNOWN_BITS_8BIT


def test_every_8_bit_format_and_rounding_has_bits_of_its_own():
    answers = known_bits.KNOWN_BITS_8BIT
    assert {name for name in answers if "decoding" in name} == {
        f"decoding {name}, {rounding}"
        for name in known_bits.FORMATS_8BIT
        for rounding in ("nearest", "stochastic")
    }
    assert len({answers[name] for name in answers if " by " not in name}) == 4 * len(known_bits.FORMATS_8BIT)


def test_all_orders_in_memory_and_all_dtypes_have_one_answer():
    answers = known_bits.KNOWN_BITS
    assert len({answers[name] for name in answers if " by " in name}) == 1
    of_8_bits = known_bits.KNOWN_BITS_8BIT
    assert len({of_8_bits[name] for name in of_8_bits if " by " in name}) == 2  # with and without a maximum


def test_one_wrong_bit_shows():
    def encode(request):
        encoded = reference.encode(request)
        encoded.codes[-1, -1] ^= 8
        return encoded

    wrong = known_bits.answers(encode, *PLAIN[1:])
    differing = {name for name in wrong if wrong[name] != known_bits.KNOWN_BITS[name]}
    assert differing == {*known_bits.ENCODINGS} | {name for name in wrong if " by " in name}
