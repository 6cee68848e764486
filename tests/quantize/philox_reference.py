"""Philox4x32-10 in Python integers (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)."""

WORD = 2**32

# (counter, key, output) of Random123's published known-answer vectors (tests/kat_vectors, "philox4x32 10").
KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD - 1,) * 4, (WORD - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    first, second, third, fourth = counter
    for number in range(10):
        round_keys = [
            (key[0] + number * 0x9E3779B9) % WORD,
            (key[1] + number * 0xBB67AE85) % WORD,
        ]
        product, other = first * 0xD2511F53, third * 0xCD9E8D57
        first, third = other // WORD ^ second ^ round_keys[0], product // WORD ^ fourth ^ round_keys[1]
        second, fourth = other % WORD, product % WORD
    return first, second, third, fourth


def random_bytes(group: int, key: int, step: int) -> bytes:
    """The 16 bytes of one group of 16 elements."""
    counter = (group % WORD, group // WORD, step % WORD, step // WORD % WORD)
    words = philox(counter, (key % WORD, key // WORD % WORD))
    return b"".join(word.to_bytes(4, "little") for word in words)


def random_fractions(group: int, key: int, step: int) -> list[int]:
    """The 16 numbers below 2²⁴ of one group: windows of three bytes in the ring of the group's bytes."""
    ring = random_bytes(group, key, step) * 2
    return [int.from_bytes(ring[place - 2 : place + 1], "little") for place in range(16, 32)]
