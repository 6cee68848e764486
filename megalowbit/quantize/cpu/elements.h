/* Elements of 4, 6 and 8 bits on sixteen lanes: numbers to codes, codes to numbers, loads and stores.
 *
 * Every format is sign-magnitude: an integer, or a small float with subnormals, whose magnitudes are ordered
 * like their codes. The arithmetic below replaces the tables of thresholds and knots in formats/codes.py and
 * gives the same bits; the compiler folds the constants of each format.
 */
#ifndef KERNELS_CPU_ELEMENTS_H
#define KERNELS_CPU_ELEMENTS_H
#include "lanes.h"

enum { INT4, INT8, FP4_E2M1, FP6_E3M2, FP8_E4M3, FP8_E5M2 }; /* as in kernel_arguments.py */

typedef struct {
    uint32_t bits, mantissa, top; /* mantissa: 0 for integers; top: the largest code without its sign */
    float largest;
    uint32_t least_normal; /* its fp32 bits */
} Element;

static const Element ELEMENTS[] = {
    {4, 0, 7, 7.0f, 0},           {8, 0, 127, 127.0f, 0},         {4, 1, 7, 6.0f, 0x3F800000},
    {6, 2, 31, 28.0f, 0x3E800000}, {8, 3, 126, 448.0f, 0x3C800000}, {8, 2, 123, 57344.0f, 0x38800000},
};

/* ---- codes of numbers already divided by their scale; the code of a NaN is arbitrary ---- */

SPECIALISED Lanes with_sign(Element of, Lanes magnitudes, Lanes quotients) {
    return magnitudes | (quotients >> (32 - of.bits) & 1u << (of.bits - 1));
}

/* Adds a number whose fp32 spacing equals the format's spacing around y. The fp32 addition then rounds y
 * to the format, ties to even, and the low bits of the sum count the steps. */
SPECIALISED Lanes nearest_elements(int element, Lanes quotients) {
    const Element of = ELEMENTS[element];
    const Lanes zero = {0}, y = smaller(quotients & 0x7FFFFFFF, zero + bits_of(of.largest));
    if (!of.mantissa) return with_sign(of, (Lanes)((Floats)y + 0x1p23f) - 0x4B000000, quotients);
    const uint32_t shift = 23 - of.mantissa;
    const Lanes exponent = larger(y & INFINITY_BITS, zero + of.least_normal), wide = exponent + (shift << 23);
    const Lanes steps = (Lanes)((Floats)y + (Floats)wide) - wide;
    return with_sign(of, steps + ((exponent - of.least_normal) >> shift), quotients);
}

/* Real-valued code: the position within the number's binade, plus the number of codes below the binade.
 * The latter is added in parts, in the order of the definition in formats/codes.py, because the sums are
 * rounded. */
SPECIALISED Lanes stochastic_elements(int element, Lanes quotients, const uint8_t *random) {
    const Element of = ELEMENTS[element];
    const Lanes zero = {0}, y = smaller(quotients & 0x7FFFFFFF, zero + bits_of(of.largest));
    Floats position = (Floats)y;
    if (of.mantissa) {
        const Lanes exponent = larger(y & INFINITY_BITS, zero + of.least_normal);
        position *= (Floats)(((254 + of.mantissa) << 23) - exponent);
        Floats below = floats_of((exponent - of.least_normal) >> (23 - of.mantissa));
        for (uint32_t some = 2u << of.mantissa; some < of.top; some *= 2) { /* codes up to the next binade */
            const Floats part = (Floats)smaller((Lanes)below, (Lanes)((Floats){0} + (float)some));
            position += part, below -= part;
        }
    }
    return with_sign(of, stochastic_steps(position, random), quotients);
}

/* ---- numbers of codes; NaN for codes that the format does not use ---- */

SPECIALISED Floats element_values(int element, Lanes codes) {
    const Element of = ELEMENTS[element];
    const uint32_t sign = 1u << (of.bits - 1);
    const Lanes zero = {0}, magnitude = codes & (sign - 1), count = (Lanes)floats_of(magnitude);
    Lanes bits = count;
    if (of.mantissa) {
        const float least = float_of(of.least_normal - (of.mantissa << 23));
        const Lanes normal = (magnitude << (23 - of.mantissa)) + (of.least_normal - (1u << 23));
        bits = chosen(is_less(magnitude, zero + (1u << of.mantissa)), (Lanes)((Floats)count * least), normal);
    }
    if (of.top < sign - 1) bits = chosen(is_less(zero + of.top, magnitude), zero + NAN_BITS, bits);
    return (Floats)(bits | (codes & sign) << (32 - of.bits));
}

/* ---- memory ---- */

/* Stores the codes of one group, 2 · bits bytes, the first code in the lowest bits. */
SPECIALISED void store_codes(uint32_t bits, Lanes codes, uint8_t *out) {
    if (bits == 4) pack(codes, out);
    else if (bits == 8) {
#if HAS_AVX512
        _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8((__m512i)codes));
#else
        uint32_t lanes[GROUP];
        memcpy(lanes, &codes, sizeof lanes);
        for (int j = 0; j < GROUP; j++) out[j] = (uint8_t)lanes[j];
#endif
    } else { /* four codes in three bytes */
        uint32_t lanes[GROUP];
        memcpy(lanes, &codes, sizeof lanes);
        for (int j = 0; j < GROUP; j += 4, out += 3) {
            const uint32_t four = lanes[j] | lanes[j + 1] << 6 | lanes[j + 2] << 12 | lanes[j + 3] << 18;
            for (int i = 0; i < 3; i++) out[i] = (uint8_t)(four >> 8 * i);
        }
    }
}

SPECIALISED Lanes codes_at(uint32_t bits, const uint8_t *from) {
    if (bits == 4) return unpacked(from);
    if (bits == 8) return lanes_of_bytes(from);
    uint32_t lanes[GROUP];
    for (int j = 0; j < GROUP; j += 4, from += 3) {
        const uint32_t four = from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16;
        for (int i = 0; i < 4; i++) lanes[j + i] = four >> 6 * i & 63;
    }
    return lanes_at(lanes);
}

/* Stores sixteen numbers as fp32, bf16 or fp16, rounded to nearest even. */
static inline void store_rounded(Floats values, int64_t dtype, void *out) {
    const Lanes bits = (Lanes)values, is_nan = is_less((Lanes){0} + INFINITY_BITS, bits & 0x7FFFFFFF);
    if (dtype == FP32) memcpy(out, &values, sizeof values);
    else if (dtype == BF16) {
        const Lanes rounded = chosen(is_nan, (Lanes){0} + NAN_BITS, bits + 0x7FFF + (bits >> 16 & 1));
        store_exact((Floats)rounded, BF16, out);
    } else {
#if HAS_AVX512
        const __m256i halves = _mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
        float from[GROUP];
        uint16_t halves[GROUP];
        memcpy(from, &values, sizeof from);
        for (int j = 0; j < GROUP; j++) halves[j] = half_of_float(from[j]);
#endif
        memcpy(out, &halves, sizeof halves);
    }
}

#endif
