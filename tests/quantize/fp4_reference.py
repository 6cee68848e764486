"""Block formats by the book: Python loops over blocks and elements, shares no code with the package.

Numbers that fp32 has to round are NumPy fp32 scalars, one operation at a time; everything else is Python
floats, which hold it exactly.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import philox_reference

F = np.float32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = [
    m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
    for e in range(16)
    for m in range(8)
    if (e, m) != (15, 7)
]


def nearest_code(magnitude: float, grid) -> int:
    """Of the nearest grid values the one with the even code."""
    if magnitude >= grid[-1]:
        return len(grid) - 1
    low = max(code for code, value in enumerate(grid) if value <= magnitude)
    middle = (grid[low] + grid[low + 1]) / 2
    return low + (magnitude > middle or (magnitude == middle and low % 2 == 1))


def stochastic_code(magnitude, random: int, grid) -> int:
    """The real-valued code plus random / 2²⁴, floored."""
    magnitude = min(float(magnitude), grid[-1])
    if grid == E2M1:
        y = F(magnitude)
        position = F(min(F(min(F(y + y), F(y + F(2)))), F(F(y * F(0.5)) + F(4))))
    else:
        low = max(code for code, value in enumerate(grid) if value <= magnitude)
        gap = grid[low + 1] - grid[low] if low + 1 < len(grid) else 1.0
        position = F(low + (magnitude - grid[low]) / gap)
    return math.floor(Fraction(float(position)) + Fraction(random, 2**24))


def e4m3_code(value: float, is_up: bool) -> int:
    code = nearest_code(value, E4M3)
    return code + 1 if is_up and E4M3[code] < value else code


def e8m0_code(a: float, element_max: float, is_up: bool) -> int:
    """By logarithms: the exponent of a less that of M, or the smallest 2^k with M·2^k ≥ a."""
    if a == 0:
        return 0
    exponent = math.frexp(a)[1] - math.frexp(element_max)[1]
    if is_up and element_max * 2.0**exponent < a:
        exponent += 1
    elif is_up and element_max * 2.0 ** (exponent - 1) >= a:
        exponent -= 1
    return min(max(exponent, -127), 127) + 127


@dataclass
class Blocks:
    """A matrix in blocks.

    codes (padded rows, padded cols), `element` the values of the codes, `values` element × block scale, all
    padded; `operand` the same, times a tensor scale that is a power of two; `stored` the bytes or fp32
    numbers of the scales; `tensor_scale` a Python float or None.
    """

    x: np.ndarray
    grid: tuple = E2M1
    block: tuple | None = (1, 16)
    scale: str = "e4m3"
    scale_rounding: str = "nearest"
    q_scalar: float = 1.0
    four_over_six: bool = False
    is_power_of_two: bool = False
    random: np.ndarray | None = None  # 24 bits for each padded element
    tensor_amax: float | None = None
    codes: np.ndarray = field(init=False)
    values: np.ndarray = field(init=False)
    stored: np.ndarray = field(init=False)
    scaled: np.ndarray = field(init=False)  # x · encode scale
    overflows: int = field(init=False, default=0)
    tensor_scale: float | None = field(init=False, default=None)

    def __post_init__(self):
        with np.errstate(all="ignore"):
            self._encode_all()

    def _encode_all(self):
        rows, cols = self.x.shape
        height, width = self.block or (rows, -(-cols // 16) * 16)
        self.padded = np.zeros((-(-rows // height) * height, -(-cols // max(width, 16)) * max(width, 16)), F)
        self.padded[:rows, :cols] = self.x.astype(F)
        shape = self.padded.shape[0] // height, self.padded.shape[1] // width
        where = [
            (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            for i in range(shape[0])
            for j in range(shape[1])
        ]
        self.amax = [self._amax(self.padded[each]) for each in where]
        finite = [float(a) for a in self.amax if not np.isnan(a)]
        self.largest = F(max(finite, default=0.0) if self.tensor_amax is None else self.tensor_amax)
        top = F((256 if self.four_over_six else 448) * self.grid[-1])
        most = F(2.0**118 if self.scale_rounding == "up" else 2.0**126)
        most = F(2.0**116) if self.is_power_of_two else most
        S = top / self.largest if self.largest > 0 else F(1)
        if self.is_power_of_two and np.isfinite(S):
            S = F(math.ldexp(1.0, math.frexp(float(S))[1] - 1))
        self.S = F(min(S, most))
        self.codes = np.zeros(self.padded.shape, int)
        self.values, self.scaled = np.zeros(self.padded.shape, F), np.zeros(self.padded.shape, F)
        self.stored = np.zeros(len(where))
        for number, (each, a) in enumerate(zip(where, self.amax, strict=True)):
            self._encode(number, each, a)
        self.stored = self.stored.reshape(shape)
        if self.scale == "e4m3":
            self.tensor_scale = float(F(1) / self.S)
        elif self.block is None:
            self.tensor_scale = float(self.stored[0, 0])

    @property
    def operand(self):
        with np.errstate(all="ignore"):
            return self.values * F(self.tensor_scale) if self.is_power_of_two else self.values

    def _amax(self, block):
        a = F(np.abs(block).max()) * F(self.q_scalar)
        return a if np.isfinite(a) else F(np.nan)

    def _encode(self, number, where, a):
        if np.isnan(a):
            self.stored[number] = {"e4m3": 0x7F, "e8m0": 0xFF, "fp32": np.nan}[self.scale]
            self.values[where] = self.scaled[where] = np.nan
            return
        tops = (6, 4) if self.four_over_six else (self.grid[-1],)
        candidates = [self._candidate(where, a, top) for top in tops]
        best = candidates[0]
        if self.four_over_six and candidates[1][0] < best[0]:
            best = candidates[1]
        _, self.stored[number], self.codes[where], self.values[where], self.scaled[where], top = best
        if self.scale == "e4m3":
            self.overflows += bool(a / (F(top) / self.S) > 448 * (1 + 2.0**-20))

    def _scale(self, a, top):
        """What is stored, the scale, and a function from x to scaled x."""
        if self.scale == "fp32":
            if self.block is None and self.tensor_amax is not None:
                a = self.largest
            scale = a / F(top)
            decoded = F(1) if self.block is None else scale
            return float(scale), decoded, lambda x: x / scale if scale else x * F(0)
        if self.scale == "e8m0":
            stored = e8m0_code(float(a), top, self.scale_rounding == "up")
            return stored, F(2.0 ** (stored - 127)), lambda x: x * F(2.0 ** (127 - stored))
        stored = e4m3_code(float(min(a / (F(top) / self.S), F(448))), self.scale_rounding == "up")
        scale = F(E4M3[stored])
        encode = self.S / scale if scale else F(0)
        return stored, scale, lambda x: x * (encode if np.isfinite(encode) else F(0))

    def _candidate(self, where, a, top):
        stored, scale, scaled = self._scale(a, top)
        block = self.padded[where]
        codes, values, ys = np.zeros(block.shape, int), np.zeros(block.shape, F), np.zeros(block.shape, F)
        for at, x in np.ndenumerate(block):
            y = ys[at] = scaled(x)
            if self.random is None:
                code = nearest_code(abs(float(y)), self.grid)
            else:
                code = stochastic_code(abs(y), self.random[where][at].item(), self.grid)
            values[at] = F(math.copysign(self.grid[code], y)) * scale
            codes[at] = code + self.sign_code * bool(np.signbit(y))
        squares = list(((values - block * self.S) ** 2).ravel())
        while self.four_over_six and len(squares) > 1:
            half = len(squares) // 2
            squares = [squares[i] + squares[i + half] for i in range(half)]
        return squares[0], stored, codes, values, ys, top

    def counts(self) -> tuple[list[int], list[float]]:
        """The eight counts and the two sums of E2M1 under E4M3 or E8M0 scales."""
        rows, cols = self.x.shape
        x, values, y = self.padded[:rows, :cols], self.values[:rows, :cols], np.abs(self.scaled[:rows, :cols])
        slack = 1 + 2.0**-20
        zero_blocks = self.stored == 0 if self.scale == "e4m3" else np.array(self.amax) == 0
        counts = [
            x.size,
            (y > 6 * slack).sum(),
            (y > 3 * slack).sum(),
            ((x != 0) & (values == 0)).sum(),
            (~np.isfinite(x)).sum(),
            self.stored.size,
            self.overflows,
            zero_blocks.sum(),
        ]
        with np.errstate(all="ignore"):
            decoded = values * (F(1) / self.S) if self.scale == "e4m3" else values
        sound = ~np.isnan(decoded)
        decoded = np.clip(decoded[sound].astype(np.float64), -np.finfo(F).max, np.finfo(F).max)
        exact = x[sound].astype(np.float64)
        return [int(count) for count in counts], [((exact - decoded) ** 2).sum(), (exact**2).sum()]

    @property
    def sign_code(self) -> int:
        return 1 << (len(self.grid) - 1).bit_length()


def transformed(x: np.ndarray, signs: int) -> np.ndarray:
    """Hadamard in groups of 16 along the rows of an fp32 matrix, number by number."""
    result = []
    for row in x.astype(F):
        row = [-value if signs >> j % 16 & 1 else value for j, value in enumerate(row)]
        for half in (1, 2, 4, 8):
            for i in range(len(row)):
                if not i & half:
                    row[i], row[i + half] = row[i] + row[i + half], row[i] - row[i + half]
        result.append(np.array(row, F) * F(0.25))
    return np.stack(result)


def drawn(rows: int, cols: int, key) -> np.ndarray:
    """What the elements of a padded matrix are rounded with."""
    draw = philox_reference.random_fractions
    return np.array([draw(group, *key) for group in range(rows * cols // 16)]).reshape(rows, cols)


def encoded(x: np.ndarray, encoding, key, signs=None, tensor_amax=None) -> Blocks:
    """What an encoding makes of a matrix, by the description of its fields; `key` is (key, step)."""
    format, random = encoding.format, None
    with np.errstate(all="ignore"):
        numbers = x if signs is None else transformed(x, signs)
    if encoding.is_stochastic:
        random = drawn(*format.padded(*x.shape), key)
    return Blocks(
        numbers,
        block=format.block,
        scale=format.scale,
        scale_rounding=encoding.scale_rounding,
        q_scalar=encoding.q_scalar,
        four_over_six=encoding.four_over_six,
        is_power_of_two=encoding.is_power_of_two,
        random=random,
        tensor_amax=tensor_amax,
    )


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of codes as bytes, by one big integer for each row: the first code in the lowest bits."""
    rows = []
    for row in codes.tolist():
        number = sum(code << bits * place for place, code in enumerate(row))
        rows.append(list(number.to_bytes(len(row) * bits // 8, "little")))
    return np.array(rows, np.uint8).reshape(codes.shape[0], -1)


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """NVFP4, nearest: element values, block scales (both float64, exact), the tensor's decode factor."""
    blocks = Blocks(x, is_power_of_two=True)
    scales = np.array([[E4M3[int(code)] for code in row] for row in blocks.stored])
    codes = blocks.codes[:, : x.shape[1]]
    return np.where(codes & 8, -1.0, 1.0) * np.array(E2M1)[codes & 7], scales, blocks.tensor_scale


def operand(x: np.ndarray) -> tuple[np.ndarray, float]:
    """NVFP4, nearest: elements × all scales in float64, and the tensor's decode factor."""
    blocks = Blocks(x, is_power_of_two=True)
    return blocks.operand[:, : x.shape[1]].astype(np.float64), blocks.tensor_scale


def dequantized(x: np.ndarray) -> np.ndarray:
    return operand(x)[0]
