/* Scalar conversions and operations on vectors of sixteen lanes for the CPU kernels.
 *
 * Lanes are GCC/clang vectors, which compile for any machine. If compilers do not find the single AVX-512
 * instruction for a step, it is written as an intrinsic; the other branch computes the same bits.
 */
#ifndef KERNELS_CPU_LANES_H
#define KERNELS_CPU_LANES_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HAS_AVX512 1
#else
#define HAS_AVX512 0
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#if defined(__FAST_MATH__)
#error "fast math changes the numbers"
#endif
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "a little-endian machine is needed"
#endif

/* Enables subnormal numbers in this thread. torch.set_flush_denormal acts on one thread only, so results
 * would depend on the number of threads. Returns the former mode, for `restore_numbers`. */
static inline unsigned exact_numbers(void) {
#if defined(__SSE__)
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode & ~0x8040u); /* flush to zero, denormals are zeros */
    return mode;
#else
    return 0;
#endif
}

static inline void restore_numbers(unsigned mode) {
#if defined(__SSE__)
    _mm_setcsr(mode);
#else
    (void)mode;
#endif
}

/* Inlined, so that each combination of constant arguments is compiled separately. */
#define SPECIALISED static inline __attribute__((always_inline))
enum { GROUP = 16, FP32 = 0, BF16 = 1, FP16 = 2 };
#define INFINITY_BITS 0x7F800000u
#define NAN_BITS 0x7FC00000u

typedef uint64_t Words __attribute__((vector_size(64))); /* 8 pairs of 32-bit codes */
typedef uint8_t Bytes __attribute__((vector_size(8)));
typedef uint32_t Lanes __attribute__((vector_size(64)));
typedef uint16_t EightHalves __attribute__((vector_size(16)));
typedef uint16_t SixteenHalves __attribute__((vector_size(32)));
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));
/* Selects lanes of two vectors by index; the second vector's indices follow the first's. */
#if defined(__clang__)
#define SHUFFLED(kind, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(kind, a, b, ...) __builtin_shuffle(a, b, (kind){__VA_ARGS__})
#endif
/* Lane i of the result is lane i XOR h. */
#define SWAPPED(v, h) \
    SHUFFLED(Lanes, v, v, 0 ^ h, 1 ^ h, 2 ^ h, 3 ^ h, 4 ^ h, 5 ^ h, 6 ^ h, 7 ^ h, 8 ^ h, 9 ^ h, 10 ^ h, \
             11 ^ h, 12 ^ h, 13 ^ h, 14 ^ h, 15 ^ h)

static inline uint32_t bits_of(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
static inline float float_of(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t blocks_in(int64_t size, int64_t block) { return (size + block - 1) / block; }

static inline float float_of_half(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7FFF) << 13;
    uint32_t scaled = bits_of(float_of(bits) * 0x1p112f);
    uint32_t special = bits | INFINITY_BITS;
    return float_of(((half & 0x7C00) == 0x7C00 ? special : scaled) | (uint32_t)(half & 0x8000) << 16);
}

static inline uint16_t half_of_float(float value) {
    uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFF;
    uint32_t normal = (magnitude + 0xFFF + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    uint32_t small = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000; /* 0.5: spacing of fp16 subnormals */
    uint32_t result = magnitude < 0x38800000 ? small : normal;
    result = magnitude >= 0x477FF000 ? 0x7C00 : result;
    result = magnitude > INFINITY_BITS ? 0x7E00 : result;
    return (uint16_t)(result | (bits >> 16 & 0x8000));
}

static inline uint16_t bf16_of_float(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7FFFFFFF) > INFINITY_BITS ? NAN_BITS >> 16 : rounded);
}

static inline Lanes lanes_at(const void *from) { Lanes lanes; memcpy(&lanes, from, 64); return lanes; }

static inline Lanes chosen(Lanes is_first, Lanes first, Lanes second) {
    return (first & is_first) | (second & ~is_first);
}

/* Comparisons of integers below 2^31; they order non-negative floats too. They avoid vector comparisons,
 * which compilers split into scalars if the machine has no vectors of this width. */
static inline Lanes is_less(Lanes a, Lanes b) { return (Lanes)((Integers)(a - b) >> 31); }

static inline Lanes smaller(Lanes a, Lanes b) {
#if HAS_AVX512
    return (Lanes)_mm512_min_epi32((__m512i)a, (__m512i)b);
#else
    return b + ((a - b) & is_less(a, b));
#endif
}

static inline Lanes larger(Lanes a, Lanes b) {
#if HAS_AVX512
    return (Lanes)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    return a + ((b - a) & is_less(a, b));
#endif
}

static inline Floats floats_of(Lanes integers) {
#if HAS_AVX512
    return __builtin_convertvector((Integers)integers, Floats);
#else
    int32_t from[GROUP];
    float to[GROUP];
    memcpy(from, &integers, sizeof from);
    for (int j = 0; j < GROUP; j++) to[j] = (float)from[j];
    return (Floats)lanes_at(to);
#endif
}

static inline Lanes truncated(Floats values) {
#if HAS_AVX512
    return (Lanes)__builtin_convertvector(values, Integers);
#else
    float from[GROUP];
    int32_t to[GROUP];
    memcpy(from, &values, sizeof from);
    for (int j = 0; j < GROUP; j++) to[j] = (int32_t)from[j];
    return lanes_at(to);
#endif
}

/* The low 32 bits of each lane times a 32-bit number; the high bits are ignored. */
static inline Words low_product(Words a, uint32_t b) {
#if HAS_AVX512
    return (Words)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#else
    return (a & 0xFFFFFFFF) * b;
#endif
}

/* Values of sixteen codes. */
static inline Floats e2m1_values(Lanes codes) {
#if HAS_AVX512
    const __m512 table = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return (Floats)_mm512_permutexvar_ps((__m512i)codes, table);
#else
    const Lanes magnitude = codes & 7, wide = (magnitude << 22) + 0x3F000000;
    const Lanes bits = chosen(is_less((Lanes){0} + 1, magnitude), wide, magnitude * 0x3F000000);
    return (Floats)(bits | (codes & 8) << 28);
#endif
}

static inline Lanes lanes_of_bytes(const uint8_t *from) {
#if HAS_AVX512
    return (Lanes)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#else
    uint32_t lanes[GROUP];
    for (int j = 0; j < GROUP; j++) lanes[j] = from[j];
    return lanes_at(lanes);
#endif
}

/* Packs codes into 8 bytes, two per byte, the first in the low bits; and back. */
static inline void pack(Lanes codes, uint8_t *packed) {
    const Words pairs = (Words)codes;
    const Bytes bytes = __builtin_convertvector((pairs | pairs >> 28) & 0xFF, Bytes);
    memcpy(packed, &bytes, sizeof bytes);
}

static inline Lanes unpacked(const uint8_t *packed) {
#if HAS_AVX512
    const Words words = (Words)_mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)packed));
#else
    Bytes bytes;
    memcpy(&bytes, packed, sizeof bytes);
    const Words words = __builtin_convertvector(bytes, Words);
#endif
    return (Lanes)((words & 15) | words >> 4 << 32);
}

/* Stores sixteen numbers as bf16 or fp32; they must be exact in that dtype. */
static inline void store_exact(Floats values, int64_t dtype, void *out) {
    if (dtype == FP32) memcpy(out, &values, sizeof values);
    else {
#if HAS_AVX512
        const SixteenHalves halves = (SixteenHalves)_mm512_cvtepi32_epi16((__m512i)((Lanes)values >> 16));
#else
        uint32_t bits[GROUP];
        uint16_t halves[GROUP];
        memcpy(bits, &values, sizeof bits);
        for (int j = 0; j < GROUP; j++) halves[j] = (uint16_t)(bits[j] >> 16);
#endif
        memcpy(out, &halves, sizeof halves);
    }
}

/* Lane g: the maximum of v[g]. Each of four steps halves the number of vectors. */
static inline Lanes largest_of_each(Lanes *v) {
#if HAS_AVX512
#define STEP(count, low, high) \
    for (int i = 0; i < count; i++) \
        v[i] = larger(SHUFFLED(Lanes, v[2 * i], v[2 * i + 1], low), \
                      SHUFFLED(Lanes, v[2 * i], v[2 * i + 1], high))
#define LIST(...) __VA_ARGS__
    STEP(8, LIST(0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29),
         LIST(2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31));
    STEP(4, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
         LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
    STEP(2, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
         LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    STEP(1, LIST(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
         LIST(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
#undef LIST
#undef STEP
    return v[0];
#else
    uint32_t tree[GROUP][GROUP], largest[GROUP];
    memcpy(tree, v, sizeof tree);
    for (int g = 0; g < GROUP; g++) {
        for (int j = 0; j < 8; j++) tree[g][j] = tree[g][j] > tree[g][j + 8] ? tree[g][j] : tree[g][j + 8];
        for (int j = 0; j < 4; j++) tree[g][j] = tree[g][j] > tree[g][j + 4] ? tree[g][j] : tree[g][j + 4];
    }
    for (int g = 0; g < GROUP; g++) {
        const uint32_t a = tree[g][0] > tree[g][1] ? tree[g][0] : tree[g][1];
        const uint32_t b = tree[g][2] > tree[g][3] ? tree[g][2] : tree[g][3];
        largest[g] = a > b ? a : b;
    }
    return lanes_at(largest);
#endif
}

/* Transposes 8 × 8 16-bit numbers; source rows are `pitch` bytes apart. */
static inline void transpose_halves(const char *from, int64_t pitch, uint16_t *out, int64_t out_pitch) {
    EightHalves a[8], b[8];
    for (int i = 0; i < 8; i++) memcpy(a + i, from + i * pitch, sizeof a[i]);
    for (int step = 0; step < 3; step++) { /* a perfect shuffle of all 64 rotates the index by a bit */
        for (int i = 0; i < 4; i++) {
            b[2 * i] = SHUFFLED(EightHalves, a[i], a[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
            b[2 * i + 1] = SHUFFLED(EightHalves, a[i], a[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        memcpy(a, b, sizeof a);
    }
    for (int i = 0; i < 8; i++) memcpy(out + i * out_pitch, a + i, sizeof a[i]);
}

/* ---- stochastic rounding of real-valued codes, see formats/codes.py ---- */

/* Lane i: bytes i - 2, i - 1 and i of sixteen as a number, byte i highest. Byte 15 precedes byte 0. */
static inline Lanes overlapping_bytes(const uint8_t *bytes) {
    const Lanes places = { /* 0xFF: a zero */
        0xFF000F0E, 0xFF01000F, 0xFF020100, 0xFF030201, 0xFF040302, 0xFF050403, 0xFF060504,
        0xFF070605, 0xFF080706, 0xFF090807, 0xFF0A0908, 0xFF0B0A09, 0xFF0C0B0A, 0xFF0D0C0B,
        0xFF0E0D0C, 0xFF0F0E0D};
#if HAS_AVX512
    const __m128i all = _mm_loadu_si128((const __m128i *)bytes);
    return (Lanes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), (__m512i)places);
#elif defined(__AVX2__)
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)bytes));
    __m256i halves[2];
    memcpy(halves, &places, sizeof halves);
    for (int i = 0; i < 2; i++) halves[i] = _mm256_shuffle_epi8(twice, halves[i]);
    return lanes_at(halves);
#else
    uint32_t lanes[GROUP];
    for (int j = 0; j < GROUP; j++) {
        const uint32_t place = places[j];
        lanes[j] = (uint32_t)bytes[place >> 16 & 15] << 16 | (uint32_t)bytes[place >> 8 & 15] << 8 | bytes[place & 15];
    }
    return lanes_at(lanes);
#endif
}

/* Codes of positions below 128: their fixed-point numbers and random fractions of 24 bits are added. */
SPECIALISED Lanes stochastic_steps(Floats position, const uint8_t *random) {
    return (truncated(position * 0x1p24f) + overlapping_bytes(random)) >> 24;
}

#endif
