/* FP4 on CPUs: quantise a matrix, decode it, and two small passes around a GEMM.
 *
 * A row is worked through in segments of 16 groups of 16 elements. Every phase (load as fp32, Hadamard, block
 * maxima, scales, codes, packing, operand, counts) is a short loop over a segment, which stays in the nearest
 * cache; it is written so that a vectoriser takes it, and no phase knows the dtype of x or the next phase. A
 * matrix whose rows are contiguous in the other direction (a transposed view) is loaded a tile at a time.
 *
 * Bits: each fp32 operation is rounded once, in the order of formats/block_scale.py; to be compiled without
 * contraction to fused multiply-add and without any "fast math". Results do not depend on the thread count:
 * work is cut into the same tasks for every count, and sums are added in the order of the tasks.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__FAST_MATH__)
#error "fast math changes the numbers"
#endif
#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "a little-endian machine is needed"
#endif

enum { GROUP = 16, GROUPS = 16, SEGMENT = GROUP * GROUPS, STRIP = 32 };
enum { PITCH = SEGMENT + GROUP }; /* of buffered rows: not a power of two, which would share cache sets */
enum { FP32 = 0, BF16 = 1, FP16 = 2 };
enum { E4M3 = 0, E8M0 = 1 };
enum { SATURATED = 1, UPPER_HALF, UNDERFLOW, NONFINITE, BLOCKS, SATURATED_SCALES, ZERO_BLOCKS };
#define INFINITY_BITS 0x7F800000u
#define NAN_BITS 0x7FC00000u
#define E4M3_MAX 448.0f
#define SLACK (1.0f + 0x1p-20f)

typedef struct { /* mirrored field by field in kernels_cpu.py; every field has 8 bytes */
    const void *x;
    int64_t dtype, rows, cols, row_stride, col_stride;
    int64_t block_rows, block_cols, scale_kind, is_up, is_stochastic, four_over_six, has_signs, signs;
    uint64_t key, step;
    double q_scalar;
    const float *tensor_amax;
    uint8_t *codes, *scales;
    float *tensor_scale;
    void *operand;
    int64_t operand_dtype;
    int64_t *counts;
    double *error;
    int64_t threads;
} Job;

typedef struct { /* of one row of blocks in a segment, a number for each group */
    float decoded[GROUPS], encode[GROUPS];
    uint32_t keep[GROUPS]; /* mask of the codes: 0 in a spoiled block */
    uint32_t stored[GROUPS], overflows[GROUPS];
} Scales;

typedef struct {
    int64_t counts[8];
    double squared_error[GROUP], squared_norm[GROUP];
} Tally;

typedef struct {
    uint64_t first;
    int is_filled;
    uint8_t bytes[SEGMENT];
} Random;

typedef struct { /* tasks of one matrix: rectangles of `rows` × `cols`, numbered row by row */
    int64_t rows, cols, across, count;
} Tasks;

typedef uint64_t Words __attribute__((vector_size(64))); /* 8 pairs of 32-bit codes */
typedef uint8_t Bytes __attribute__((vector_size(8)));
typedef uint32_t Lanes __attribute__((vector_size(64)));
typedef uint8_t SixteenBytes __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Eight __attribute__((vector_size(32)));
typedef int32_t Four __attribute__((vector_size(16)));
#define positive(v) ((v) & ~((v) >> 31))
#if defined(__clang__)
#define SHUFFLED(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define SHUFFLED(v, ...) __builtin_shuffle(v, (Lanes){__VA_ARGS__})
#endif
/* Each lane from the lane `h` away: 16 numbers are one group. */
#define SWAPPED(v, h) \
    SHUFFLED(v, 0 ^ h, 1 ^ h, 2 ^ h, 3 ^ h, 4 ^ h, 5 ^ h, 6 ^ h, 7 ^ h, 8 ^ h, 9 ^ h, 10 ^ h, 11 ^ h, \
             12 ^ h, 13 ^ h, 14 ^ h, 15 ^ h)

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
    uint32_t small = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000; /* 0.5: spacing of half's least */
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

/* ---- loading: fp32 segments from any dtype and strides ---- */

static void load_contiguous(const void *from, int64_t dtype, int64_t count, float *restrict out) {
    const uint16_t *restrict half = from;
    if (dtype == FP32) memcpy(out, from, (size_t)count * 4);
    else if (dtype == BF16) for (int64_t i = 0; i < count; i++) out[i] = float_of((uint32_t)half[i] << 16);
    else for (int64_t i = 0; i < count; i++) out[i] = float_of_half(half[i]);
}

static void load_strided(const void *from, int64_t dtype, int64_t stride, int64_t count, float *out) {
    const float *single = from;
    const uint16_t *half = from;
    for (int64_t i = 0; i < count; i++) {
        if (dtype == FP32) out[i] = single[i * stride];
        else if (dtype == BF16) out[i] = float_of((uint32_t)half[i * stride] << 16);
        else out[i] = float_of_half(half[i * stride]);
    }
}

static inline const char *address(const Job *job, int64_t row, int64_t col) {
    const int64_t place = row * job->row_stride + col * job->col_stride;
    return (const char *)job->x + place * (job->dtype == FP32 ? 4 : 2);
}

static inline int is_column_major(const Job *job) { return job->col_stride != 1 && job->row_stride == 1; }

/* Some rows from `row` on, columns from `col` on into a buffer of PITCH; zeros behind, up to `width`. */
static void load(const Job *job, int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t width,
                 float *v) {
    if (is_column_major(job)) {
        float column[STRIP];
        for (int64_t j = 0; j < cols; j++) {
            load_contiguous(address(job, row, col + j), job->dtype, rows, column);
            for (int64_t i = 0; i < rows; i++) v[i * PITCH + j] = column[i];
        }
    }
    for (int64_t i = 0; i < rows; i++) {
        const void *from = address(job, row + i, col);
        if (job->col_stride == 1) load_contiguous(from, job->dtype, cols, v + i * PITCH);
        else if (job->row_stride != 1) load_strided(from, job->dtype, job->col_stride, cols, v + i * PITCH);
        memset(v + i * PITCH + cols, 0, (size_t)(width - cols) * 4);
    }
}

/* One group: signs, then the butterfly, then a quarter. a - b is b with its sign flipped, plus a. */
static inline void hadamard(float *v, Lanes flips) {
    const Lanes lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Lanes a;
    memcpy(&a, v, sizeof a);
    a ^= flips;
#define STAGE(h, bit) a = (Lanes)((Floats)SWAPPED(a, h) + (Floats)(a ^ (lane >> bit & 1) << 31))
    STAGE(1, 0);
    STAGE(2, 1);
    STAGE(4, 2);
    STAGE(8, 3);
#undef STAGE
    const Floats result = (Floats)a * 0.25f;
    memcpy(v, &result, sizeof result);
}

static void load_transformed(const Job *job, int64_t row, int64_t rows, int64_t col, int64_t cols,
                             int64_t width, float *v) {
    load(job, row, rows, col, cols, width, v);
    if (!job->has_signs) return;
    Lanes flips;
    for (int i = 0; i < GROUP; i++) flips[i] = (uint32_t)(job->signs >> i & 1) << 31;
    for (int64_t i = 0; i < rows; i++) /* groups of padding alone stay zeros, without signs */
        for (int64_t j = 0; j < cols; j += GROUP) hadamard(v + i * PITCH + j, flips);
}

/* ---- block maxima and scales ---- */

static inline uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* Each group's block maximum times q_scalar, NaN where the block is spoiled. */
static void block_maxima(const Job *job, const float *v, int64_t rows, int64_t groups, float *restrict a) {
    uint32_t largest[GROUPS][GROUP] = {{0}}, quarter[GROUPS][4] = {{0}}, amax[GROUPS];
    for (int64_t i = 0; i < rows; i++)
        for (int64_t g = 0; g < groups; g++) /* as integers: infinities and NaN are above all */
            for (int j = 0; j < GROUP; j++)
                largest[g][j] = larger(largest[g][j], bits_of(v[i * PITCH + g * GROUP + j]) & 0x7FFFFFFF);
    for (int64_t g = 0; g < groups; g++) {
        Eight halves[2];
        Four quarters[2];
        memcpy(halves, largest[g], sizeof halves);
        halves[0] += positive(halves[1] - halves[0]); /* the larger of the two, as a + max(b - a, 0) */
        memcpy(quarters, halves, sizeof quarters);
        quarters[0] += positive(quarters[1] - quarters[0]);
        memcpy(quarter[g], quarters, sizeof quarter[g]);
    }
    for (int g = 0; g < GROUPS; g++)
        amax[g] = larger(larger(quarter[g][0], quarter[g][1]), larger(quarter[g][2], quarter[g][3]));
    if (job->block_cols == 2 * GROUP)
        for (int g = 0; g < GROUPS; g += 2)
            amax[g] = amax[g + 1] = amax[g] > amax[g + 1] ? amax[g] : amax[g + 1];
    const float q_scalar = (float)job->q_scalar;
    for (int g = 0; g < GROUPS; g++) {
        uint32_t scaled = bits_of(float_of(amax[g]) * q_scalar);
        a[g] = float_of(scaled >= INFINITY_BITS ? NAN_BITS : scaled);
    }
}

static inline float e4m3_value(uint32_t code) { /* without branches, which vectorisers do not take */
    const uint32_t small = bits_of((float)(int32_t)code * 0x1p-9f), normal = (code << 20) + (120u << 23);
    const uint32_t bits = code < 8 ? small : normal;
    return float_of(code == 0x7F ? NAN_BITS : bits);
}

static inline float e8m0_value(uint32_t code) {
    return float_of(code == 255 ? NAN_BITS : code == 0 ? 0x00400000u : code << 23);
}

static void e4m3_scales(const float *restrict a, float S, float element_max, int64_t is_up,
                        Scales *restrict out) {
    const float unit = element_max / S;
    const uint32_t up = is_up != 0;
    for (int g = 0; g < GROUPS; g++) {
        const int is_spoiled = bits_of(a[g]) > INFINITY_BITS;
        float unclamped = a[g] / unit;
        float clamped = unclamped < E4M3_MAX ? unclamped : E4M3_MAX;
        uint32_t bits = bits_of(clamped);
        uint32_t normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120u << 3);
        uint32_t small = bits_of(clamped + 0x1.8p14f) - 0x46C00000; /* 1.5 · 2^14 has E4M3's least spacing */
        uint32_t code = bits < 0x3C800000 ? small : normal;
        code += up & (uint32_t)(e4m3_value(code) < clamped);
        code = is_spoiled ? 0x7F : code;
        out->stored[g] = code;
        out->decoded[g] = e4m3_value(code);
        uint32_t encode = bits_of(S / out->decoded[g]);
        out->encode[g] = float_of((encode & 0x7FFFFFFF) >= INFINITY_BITS ? 0 : encode);
        out->keep[g] = is_spoiled ? 0 : 15;
        out->overflows[g] = unclamped > E4M3_MAX * SLACK;
    }
}

static void e8m0_scales(const float *restrict a, int64_t is_up, Scales *restrict out) {
    for (int g = 0; g < GROUPS; g++) {
        uint32_t bits = bits_of(a[g]);
        const int is_spoiled = bits > INFINITY_BITS;
        const int is_beyond = (bits & 0x7FFFFF) > 0x400000; /* 6 = 1.5 · 2^2 */
        int32_t code = (int32_t)(bits >> 23) - 2 + (is_up && is_beyond);
        code = code < 0 ? 0 : code;
        uint32_t encode = code == 254 ? 0x00400000u : (uint32_t)(254 - code) << 23;
        out->stored[g] = is_spoiled ? 255 : (uint32_t)code;
        out->decoded[g] = e8m0_value(out->stored[g]);
        out->encode[g] = float_of(is_spoiled ? 0 : encode);
        out->keep[g] = is_spoiled ? 0 : 15;
        out->overflows[g] = 0;
    }
}

static float tensor_encode_scale(const Job *job, float tensor_amax) {
    if (!(tensor_amax > 0)) return 1.0f;
    float S = (job->four_over_six ? 256.0f : E4M3_MAX) * 6.0f / tensor_amax;
    return S < 0x1p126f ? S : 0x1p126f;
}

/* ---- codes ---- */

static void philox(const Job *job, Random *random, uint64_t first) {
    const Words word = {0}, low = word + 0xFFFFFFFF, index = {0, 1, 2, 3, 4, 5, 6, 7};
    for (uint64_t half = 0; half < 2; half++) { /* eight groups at once, 32-bit words in 64-bit lanes */
        const Words number = index + (first + half * 8);
        Words c0 = number & low, c1 = number >> 32;
        Words c2 = word + (job->step & 0xFFFFFFFF), c3 = word + (job->step >> 32);
        uint32_t k0 = (uint32_t)job->key, k1 = (uint32_t)(job->key >> 32);
        for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
            const Words product0 = c0 * 0xD2511F53u, product1 = c2 * 0xCD9E8D57u;
            c0 = product1 >> 32 ^ c1 ^ k0, c2 = product0 >> 32 ^ c3 ^ k1;
            c1 = product1 & low, c3 = product0 & low;
        }
        const Words begin = c0 | c1 << 32, end = c2 | c3 << 32;
        for (int i = 0; i < 8; i++) {
            const uint64_t both[2] = {begin[i], end[i]};
            memcpy(random->bytes + (half * 8 + (uint64_t)i) * GROUP, both, sizeof both);
        }
    }
    random->first = first, random->is_filled = 1;
}

static const uint8_t *random_bytes(const Job *job, Random *random, uint64_t first, int64_t groups) {
    int is_inside = random->is_filled && first >= random->first;
    if (!is_inside || first + (uint64_t)groups > random->first + GROUPS) philox(job, random, first);
    return random->bytes + (first - random->first) * GROUP;
}

/* 2y, y + 2 and y/2 + 4, each rounded to an integer (ties to even) by one addition; the least is the code. */
static void nearest_codes(const float *restrict v, const Scales *restrict scales, int64_t groups,
                          uint32_t *restrict codes) {
    for (int64_t g = 0; g < groups; g++) {
        const float encode = scales->encode[g];
        const uint32_t keep = scales->keep[g];
        for (int j = 0; j < GROUP; j++) {
            uint32_t bits = bits_of(v[g * GROUP + j] * encode), magnitude = bits & 0x7FFFFFFF;
            float y = float_of(magnitude < 0x40C00000 ? magnitude : 0x40C00000); /* 6 */
            int32_t below2 = (int32_t)(bits_of(y + 0x1.8p22f) - 0x4AC00000);
            int32_t below4 = (int32_t)(bits_of(y + 0x1.8p23f) - 0x4B400000 + 2);
            int32_t above4 = (int32_t)(bits_of(y + 0x1.8p24f) - 0x4BC00000 + 4);
            int32_t code = below2 < below4 ? below2 : below4;
            code = code < above4 ? code : above4;
            codes[g * GROUP + j] = ((uint32_t)code | (bits >> 28 & 8)) & keep;
        }
    }
}

/* 16 bytes to 32 bits each. In a loop of mixed sizes vectorisers let the bytes decide the width of all. */
static inline void widen(const uint8_t *from, uint32_t *to) {
    SixteenBytes bytes;
    memcpy(&bytes, from, GROUP);
    const Lanes lanes = __builtin_convertvector(bytes, Lanes);
    memcpy(to, &lanes, sizeof lanes);
}

static void stochastic_codes(const float *restrict v, const Scales *restrict scales, int64_t groups,
                             const uint8_t *restrict random, uint32_t *restrict codes) {
    for (int64_t g = 0; g < groups; g++) {
        uint32_t byte[GROUP];
        widen(random + g * GROUP, byte);
        const float encode = scales->encode[g];
        const uint32_t keep = scales->keep[g];
        for (int j = 0; j < GROUP; j++) {
            uint32_t bits = bits_of(v[g * GROUP + j] * encode), magnitude = bits & 0x7FFFFFFF;
            float y = float_of(magnitude < 0x40C00000 ? magnitude : 0x40C00000);
            float low = y + y, middle = y + 2.0f, high = y * 0.5f + 4.0f;
            float position = low < middle ? low : middle;
            position = position < high ? position : high;
            int32_t code = (int32_t)(position + ((float)(int32_t)byte[j] + 0.5f) * 0x1p-8f);
            code = code < 7 ? code : 7;
            codes[g * GROUP + j] = ((uint32_t)code | (bits >> 28 & 8)) & keep;
        }
    }
}

/* Codes to nibbles and back, the first one low; 8 bytes for each group. */
static void pack(const uint32_t *codes, int64_t groups, uint8_t *packed) {
    for (int64_t g = 0; g < groups; g++) {
        Words pairs;
        memcpy(&pairs, codes + g * GROUP, sizeof pairs);
        const Bytes bytes = __builtin_convertvector((pairs | pairs >> 28) & 0xFF, Bytes);
        memcpy(packed + g * 8, &bytes, sizeof bytes);
    }
}

static void unpack(const uint8_t *packed, int64_t groups, uint32_t *codes) {
    for (int64_t g = 0; g < groups; g++) {
        Bytes bytes;
        memcpy(&bytes, packed + g * 8, sizeof bytes);
        const Words words = __builtin_convertvector(bytes, Words), pairs = (words & 15) | words >> 4 << 32;
        memcpy(codes + g * GROUP, &pairs, sizeof pairs);
    }
}

/* Codes × block scale, fp32. */
static void decode_codes(const uint32_t *restrict codes, const float *restrict scale, int64_t groups,
                         float *restrict values) {
    for (int64_t g = 0; g < groups; g++)
        for (int j = 0; j < GROUP; j++) {
            uint32_t code = codes[g * GROUP + j], magnitude = code & 7;
            uint32_t wide = (magnitude << 22) + 0x3F000000;
            uint32_t bits = magnitude > 1 ? wide : magnitude * 0x3F000000u;
            values[g * GROUP + j] = float_of(bits | (code & 8) << 28) * scale[g];
        }
}

static void squared_errors(const float *restrict v, const uint32_t *codes, const Scales *scales, float S,
                           int64_t groups, float *restrict out) {
    float values[SEGMENT];
    decode_codes(codes, scales->decoded, groups, values);
    for (int64_t g = 0; g < groups; g++) {
        float squares[GROUP];
        for (int j = 0; j < GROUP; j++) {
            float difference = values[g * GROUP + j] - v[g * GROUP + j] * S;
            squares[j] = difference * difference;
        }
        for (int j = 0; j < 8; j++) squares[j] = squares[j] + squares[j + 8];
        for (int j = 0; j < 4; j++) squares[j] = squares[j] + squares[j + 4];
        out[g] = (squares[0] + squares[2]) + (squares[1] + squares[3]);
    }
}

/* Codes for a largest element of 6; a group takes scale and codes for 4 where that is closer. */
static void four_over_six(const Job *job, const float *v, const float *a, float S, int64_t groups,
                          Scales *scales, uint32_t *codes) {
    Scales other;
    uint32_t other_codes[SEGMENT] = {0};
    float error[GROUPS], other_error[GROUPS];
    e4m3_scales(a, S, 4.0f, job->is_up, &other);
    nearest_codes(v, scales, groups, codes);
    nearest_codes(v, &other, groups, other_codes);
    squared_errors(v, codes, scales, S, groups, error);
    squared_errors(v, other_codes, &other, S, groups, other_error);
    for (int64_t g = 0; g < groups; g++)
        if (other_error[g] < error[g]) {
            scales->stored[g] = other.stored[g], scales->decoded[g] = other.decoded[g];
            scales->encode[g] = other.encode[g], scales->overflows[g] = other.overflows[g];
            memcpy(codes + g * GROUP, other_codes + g * GROUP, GROUP * 4);
        }
}

/* ---- counting ---- */

/* One row of a segment; everything behind its `cols` elements is set to zero first, which counts nowhere. */
static void count(Tally *tally, float *v, float *values, const Scales *scales, float tensor_scale,
                  int64_t cols) {
    const int64_t groups = blocks_in(cols, GROUP);
    memset(v + cols, 0, (size_t)(groups * GROUP - cols) * 4);
    memset(values + cols, 0, (size_t)(groups * GROUP - cols) * 4);
    uint32_t saturated = 0, upper_half = 0, underflow = 0, nonfinite = 0;
    for (int64_t g = 0; g < groups; g++)
        for (int j = 0; j < GROUP; j++) {
            const float x = v[g * GROUP + j], value = values[g * GROUP + j];
            const float magnitude = float_of(bits_of(x * scales->encode[g]) & 0x7FFFFFFF);
            saturated += magnitude > 6.0f * SLACK;
            upper_half += magnitude > 3.0f * SLACK;
            underflow += (bits_of(x) << 1 != 0) & (bits_of(value) << 1 == 0);
            nonfinite += (bits_of(x) & 0x7FFFFFFF) >= INFINITY_BITS;
        }
    tally->counts[SATURATED] += saturated, tally->counts[UPPER_HALF] += upper_half;
    tally->counts[UNDERFLOW] += underflow, tally->counts[NONFINITE] += nonfinite;
    for (int64_t g = 0; g < groups; g++)
        for (int j = 0; j < GROUP; j++) {
            uint32_t bits = bits_of(values[g * GROUP + j] * tensor_scale), magnitude = bits & 0x7FFFFFFF;
            /* Decoding the largest numbers may round beyond fp32, which is no error of that size. */
            uint32_t finite = magnitude == INFINITY_BITS ? bits - 1 : magnitude > INFINITY_BITS ? 0 : bits;
            uint32_t exact = magnitude > INFINITY_BITS ? 0 : bits_of(v[g * GROUP + j]);
            double x = float_of(exact), difference = x - (double)float_of(finite);
            tally->squared_error[j] += difference * difference;
            tally->squared_norm[j] += x * x;
        }
}

static void count_blocks(const Job *job, Tally *tally, const Scales *scales, const float *a, int64_t blocks) {
    const int64_t step = job->block_cols / GROUP;
    tally->counts[BLOCKS] += blocks;
    for (int64_t g = 0; g < blocks * step; g += step) {
        tally->counts[SATURATED_SCALES] += scales->overflows[g];
        tally->counts[ZERO_BLOCKS] += (job->scale_kind == E4M3 ? scales->decoded[g] : a[g]) == 0;
    }
}

/* ---- whole matrices ---- */

/* One row of blocks in one segment: `rows` rows in v, `cols` real columns. */
static void encode_blocks(const Job *job, float S, float *v, int64_t row, int64_t rows, int64_t col,
                          int64_t cols, Random *random, Tally *tally) {
    const int64_t step = job->block_cols / GROUP, blocks = blocks_in(cols, job->block_cols);
    const int64_t groups = blocks * step;
    const int64_t row_blocks = blocks_in(job->cols, job->block_cols), row_groups = row_blocks * step;
    float a[GROUPS], values[SEGMENT];
    uint32_t codes[SEGMENT];
    Scales scales;
    block_maxima(job, v, rows, groups, a);
    if (job->scale_kind == E4M3) e4m3_scales(a, S, 6.0f, job->is_up, &scales);
    else e8m0_scales(a, job->is_up, &scales);
    for (int64_t i = 0; i < rows; i++) {
        float *row_values = v + i * PITCH;
        uint8_t *packed = job->codes + (row + i) * row_groups * 8 + col / 2;
        uint64_t first = (uint64_t)(row + i) * (uint64_t)row_groups + (uint64_t)(col / GROUP);
        if (job->is_stochastic)
            stochastic_codes(row_values, &scales, groups, random_bytes(job, random, first, groups), codes);
        else if (job->four_over_six) four_over_six(job, row_values, a, S, groups, &scales, codes);
        else nearest_codes(row_values, &scales, groups, codes);
        pack(codes, groups, packed);
        if (job->operand || tally) decode_codes(codes, scales.decoded, groups, values);
        if (job->operand && job->operand_dtype == FP32)
            memcpy((float *)job->operand + (row + i) * job->cols + col, values, (size_t)cols * 4);
        else if (job->operand) {
            uint16_t *restrict out = (uint16_t *)job->operand + (row + i) * job->cols + col;
            for (int64_t j = 0; j < cols; j++) out[j] = (uint16_t)(bits_of(values[j]) >> 16); /* exact */
        }
        if (tally) count(tally, row_values, values, &scales, job->scale_kind == E4M3 ? 1.0f / S : 1.0f, cols);
    }
    uint8_t *stored = job->scales + row / job->block_rows * row_blocks + col / job->block_cols;
    for (int64_t b = 0; b < blocks; b++) stored[b] = (uint8_t)scales.stored[b * step];
    if (tally) count_blocks(job, tally, &scales, a, blocks);
}

static Tasks tasks_of(int64_t rows, int64_t cols, int64_t task_rows, int64_t task_cols) {
    Tasks tasks = {task_rows, task_cols, blocks_in(cols, task_cols), 0};
    tasks.count = blocks_in(rows, task_rows) * tasks.across;
    return tasks;
}

/* Tall tasks where rows are contiguous in the other direction: the next strip is next in memory. */
static Tasks encode_tasks(const Job *job) {
    return is_column_major(job) ? tasks_of(job->rows, job->cols, 16 * STRIP, SEGMENT)
                                : tasks_of(job->rows, job->cols, STRIP, 64 * SEGMENT);
}

/* The bits of the largest magnitude: of integers one vector maximum, and no conversion before it. */
static uint32_t largest_magnitude(const void *from, int64_t dtype, int64_t length) {
    if (dtype == FP32) {
        const uint32_t *restrict single = from;
        uint32_t largest = 0;
        for (int64_t i = 0; i < length; i++) {
            const uint32_t magnitude = single[i] & 0x7FFFFFFF;
            largest = magnitude > largest ? magnitude : largest;
        }
        return largest;
    }
    const uint16_t *restrict half = from;
    uint16_t largest = 0;
    for (int64_t i = 0; i < length; i++) {
        const uint16_t magnitude = half[i] & 0x7FFF;
        largest = magnitude > largest ? magnitude : largest;
    }
    return dtype == BF16 ? (uint32_t)largest << 16 : bits_of(float_of_half(largest));
}

/* The largest block maximum of a task, found without its blocks: 0 where one of them might be spoiled. */
static int scan_task(const Job *job, Tasks tasks, int64_t task, float *largest) {
    const int64_t top = task / tasks.across * tasks.rows, left = task % tasks.across * tasks.cols;
    const int64_t rows = at_most(tasks.rows, job->rows - top), cols = at_most(tasks.cols, job->cols - left);
    const int is_down = is_column_major(job);
    if (job->has_signs || (!is_down && job->col_stride != 1)) return 0;
    uint32_t bits = 0;
    for (int64_t i = 0; i < (is_down ? cols : rows); i++) {
        const void *from = address(job, is_down ? top : top + i, is_down ? left + i : left);
        const uint32_t magnitude = largest_magnitude(from, job->dtype, is_down ? rows : cols);
        bits = magnitude > bits ? magnitude : bits;
    }
    const float a = float_of(bits) * (float)job->q_scalar;
    if (bits >= INFINITY_BITS || bits_of(a) >= INFINITY_BITS) return 0;
    *largest = a > *largest ? a : *largest;
    return 1;
}

/* Quantises a task, or with `largest` only finds the largest finite block maximum. */
static void run_task(const Job *job, Tasks tasks, int64_t task, float S, Tally *tally, float *largest) {
    if (largest && scan_task(job, tasks, task, largest)) return;
    _Alignas(64) float v[STRIP * PITCH];
    Random random = {0};
    const int64_t top = task / tasks.across * tasks.rows, left = task % tasks.across * tasks.cols;
    const int64_t bottom = at_most(top + tasks.rows, job->rows);
    const int64_t right = at_most(left + tasks.cols, job->cols);
    const int64_t strip = is_column_major(job) ? STRIP : job->block_rows;
    for (int64_t row = top; row < bottom; row += strip)
        for (int64_t col = left; col < right; col += SEGMENT) {
            const int64_t rows = at_most(strip, bottom - row), cols = at_most(SEGMENT, right - col);
            const int64_t width = blocks_in(cols, job->block_cols) * job->block_cols;
            load_transformed(job, row, rows, col, cols, width, v);
            for (int64_t i = 0; i < rows; i += job->block_rows) {
                const int64_t count = at_most(job->block_rows, rows - i);
                if (!largest) {
                    encode_blocks(job, S, v + i * PITCH, row + i, count, col, cols, &random, tally);
                    continue;
                }
                float a[GROUPS];
                block_maxima(job, v + i * PITCH, count, width / GROUP, a);
                for (int g = 0; g < GROUPS; g++) *largest = a[g] > *largest ? a[g] : *largest;
            }
        }
}

static void add_up(const Job *job, const Tally *tallies, int64_t num_tallies) {
    memset(job->counts, 0, 8 * sizeof(int64_t));
    job->error[0] = job->error[1] = 0;
    for (int64_t t = 0; t < num_tallies; t++) {
        for (int i = 0; i < 8; i++) job->counts[i] += tallies[t].counts[i];
        for (int j = 0; j < GROUP; j++) {
            job->error[0] += tallies[t].squared_error[j];
            job->error[1] += tallies[t].squared_norm[j];
        }
    }
    job->counts[0] = job->rows * job->cols;
}

/* 0, or -1 where memory is lacking. */
int megalowbit_encode(const Job *job) {
    const Tasks tasks = encode_tasks(job);
    float S = 1.0f;
    if (job->scale_kind == E4M3) {
        float tensor_amax = 0;
        if (job->tensor_amax) tensor_amax = *job->tensor_amax;
        else {
#pragma omp parallel for schedule(static) num_threads((int)job->threads) reduction(max : tensor_amax)
            for (int64_t task = 0; task < tasks.count; task++)
                run_task(job, tasks, task, S, NULL, &tensor_amax);
        }
        S = tensor_encode_scale(job, tensor_amax);
        *job->tensor_scale = 1.0f / S;
    }
    Tally *tallies = NULL;
    if (job->counts && !(tallies = calloc((size_t)tasks.count, sizeof(Tally)))) return -1;
#pragma omp parallel for schedule(static) num_threads((int)job->threads)
    for (int64_t task = 0; task < tasks.count; task++)
        run_task(job, tasks, task, S, tallies ? tallies + task : NULL, NULL);
    if (tallies) add_up(job, tallies, tasks.count);
    free(tallies);
    return 0;
}

/* One row of a segment: codes × block scale. */
static void decode_row(const Job *job, const float *table, int64_t row, int64_t col, int64_t cols,
                       float *values) {
    const int64_t step = job->block_cols / GROUP, row_blocks = blocks_in(job->cols, job->block_cols);
    const int64_t groups = blocks_in(cols, GROUP);
    const uint8_t *packed = job->codes + row * row_blocks * job->block_cols / 2 + col / 2;
    const uint8_t *stored = job->scales + row / job->block_rows * row_blocks + col / job->block_cols;
    uint32_t codes[SEGMENT];
    float scale[GROUPS];
    for (int64_t g = 0; g < groups; g++) scale[g] = table[stored[g / step]];
    unpack(packed, groups, codes);
    decode_codes(codes, scale, groups, values);
}

static void decode_strip(const Job *job, const float *table, int64_t row, int64_t rows, int64_t col,
                         int64_t cols, int64_t is_transposed) {
    _Alignas(64) float v[STRIP * PITCH];
    const int64_t is_wide = job->operand_dtype == FP32, size = is_wide ? 4 : 2;
    for (int64_t i = 0; i < rows; i++) decode_row(job, table, row + i, col, cols, v + i * PITCH);
    for (int64_t k = 0; k < (is_transposed ? cols : rows); k++) {
        const float *restrict from = is_transposed ? v + k : v + k * PITCH;
        const int64_t step = is_transposed ? PITCH : 1, length = is_transposed ? rows : cols;
        int64_t place = is_transposed ? (col + k) * job->rows + row : (row + k) * job->cols + col;
        float *restrict wide = (float *)((char *)job->operand + place * size);
        uint16_t *restrict narrow = (uint16_t *)wide;
        if (is_wide) for (int64_t j = 0; j < length; j++) wide[j] = from[j * step];
        else if (is_transposed)
            for (int64_t j = 0; j < length; j++) narrow[j] = (uint16_t)(bits_of(from[j * PITCH]) >> 16);
        else
            for (int64_t j = 0; j < length; j++) narrow[j] = (uint16_t)(bits_of(from[j]) >> 16);
    }
}

/* Reads job->codes and job->scales, writes job->operand: (rows, cols), or (cols, rows). */
void megalowbit_decode(const Job *job, int64_t is_transposed) {
    const int64_t strip = is_transposed ? STRIP : 1;
    const Tasks tasks = tasks_of(job->rows, job->cols, STRIP, is_transposed ? SEGMENT : 64 * SEGMENT);
    float table[256];
    for (uint32_t i = 0; i < 256; i++) {
        float e4m3 = float_of(bits_of(e4m3_value(i & 0x7F)) | (i & 0x80) << 24);
        table[i] = job->scale_kind == E4M3 ? e4m3 : e8m0_value(i);
    }
#pragma omp parallel for schedule(static) num_threads((int)job->threads)
    for (int64_t task = 0; task < tasks.count; task++) {
        const int64_t top = task / tasks.across * tasks.rows, left = task % tasks.across * tasks.cols;
        const int64_t bottom = at_most(top + tasks.rows, job->rows);
        const int64_t right = at_most(left + tasks.cols, job->cols);
        for (int64_t row = top; row < bottom; row += strip)
            for (int64_t col = left; col < right; col += SEGMENT)
                decode_strip(job, table, row, at_most(strip, bottom - row), col,
                             at_most(SEGMENT, right - col), is_transposed);
    }
}

/* ---- around a GEMM ---- */

/* job->operand = cast(x · scale + bias), one row after the other; x may be job->operand. */
void megalowbit_scale_and_bias(const Job *job, float scale, const float *bias, int64_t out_stride) {
#pragma omp parallel for schedule(static) num_threads((int)job->threads)
    for (int64_t row = 0; row < job->rows; row++) {
        float v[SEGMENT];
        for (int64_t col = 0; col < job->cols; col += SEGMENT) {
            const int64_t cols = at_most(SEGMENT, job->cols - col), place = row * out_stride + col;
            load_contiguous(address(job, row, col), job->dtype, cols, v);
            for (int64_t j = 0; j < cols; j++) v[j] = v[j] * scale;
            if (bias) for (int64_t j = 0; j < cols; j++) v[j] = v[j] + bias[col + j];
            uint16_t *half = (uint16_t *)job->operand + place;
            if (job->operand_dtype == FP32) memcpy((float *)job->operand + place, v, (size_t)cols * 4);
            else if (job->operand_dtype == BF16)
                for (int64_t j = 0; j < cols; j++) half[j] = bf16_of_float(v[j]);
            else
                for (int64_t j = 0; j < cols; j++) half[j] = half_of_float(v[j]);
        }
    }
}

/* Sums over rows: `block` rows at a time into partial (blocks, cols), those into job->operand (cols,). */
void megalowbit_column_sums(const Job *job, int64_t block, float *partial) {
    const Tasks tasks = tasks_of(job->rows, job->cols, block, SEGMENT);
    float *out = job->operand;
#pragma omp parallel for schedule(static) num_threads((int)job->threads)
    for (int64_t task = 0; task < tasks.count; task++) {
        const int64_t top = task / tasks.across * block, col = task % tasks.across * SEGMENT;
        const int64_t bottom = at_most(top + block, job->rows), cols = at_most(SEGMENT, job->cols - col);
        float v[SEGMENT], sum[SEGMENT] = {0};
        for (int64_t row = top; row < bottom; row++) {
            load_contiguous(address(job, row, col), job->dtype, cols, v);
            for (int64_t j = 0; j < cols; j++) sum[j] += v[j];
        }
        memcpy(partial + task / tasks.across * job->cols + col, sum, (size_t)cols * 4);
    }
    memset(out, 0, (size_t)job->cols * 4);
    for (int64_t b = 0; b < blocks_in(job->rows, block); b++)
        for (int64_t col = 0; col < job->cols; col++) out[col] += partial[b * job->cols + col];
}

int megalowbit_has_threads(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
