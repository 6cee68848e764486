/* A segment of 16 groups of 16 elements: loading, scales, codes. */
#ifndef KERNELS_CPU_CODES_H
#define KERNELS_CPU_CODES_H
#include "lanes.h"

enum { GROUPS = 16, SEGMENT = GROUP * GROUPS, STRIP = 32, BATCH = 4 };
enum { PITCH = SEGMENT + GROUP }; /* floats per buffered row; a power of two would share cache sets */
enum { AHEAD = 32 }; /* columns that a transposing load prefetches */
enum { E4M3 = 0, E8M0 = 1, ONE_FP32 = 2, FP32_BLOCKS = 3, SIGNED_BLOCKS = 4 }; /* kinds of scales */
#define E4M3_MAX 448.0f
#define SLACK (1.0f + 0x1p-20f)

typedef struct { /* mirrored field by field in kernel_arguments.py; every field has 8 bytes */
    const void *x;
    int64_t dtype, rows, cols, row_stride, col_stride;
    int64_t block_rows, block_cols, scale_kind, element; /* block_cols: 16 to 128 */
    int64_t is_up, is_stochastic, four_over_six, is_power_of_two, has_signs, signs;
    uint64_t key, step;
    double q_scalar;
    const float *tensor_amax;
    uint8_t *codes, *scales;
    float *tensor_scale; /* decoding: a power of two to multiply by, or NULL */
    void *operand;
    int64_t operand_dtype;
    int64_t *counts;
    double *error;
    int64_t threads;
} Args;

typedef struct { /* one row of blocks in a segment; one entry per group */
    float a[GROUPS], decoded[GROUPS], encode[GROUPS]; /* a: block maximum, NaN if the block has inf or NaN */
    uint32_t keep[GROUPS]; /* mask of the codes: 0 if the block has inf or NaN */
    uint32_t stored[GROUPS], overflows[GROUPS];
} Scales;

typedef struct { /* a random byte for each element of a segment */
    uint64_t first;
    int is_filled;
    uint8_t bytes[SEGMENT];
} Random;

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

static inline const char *address(const Args *args, int64_t row, int64_t col) {
    const int64_t place = row * args->row_stride + col * args->col_stride;
    return (const char *)args->x + place * (args->dtype == FP32 ? 4 : 2);
}

/* Block index of a row or column. Sizes are powers of two; a shift is faster than a division. */
static inline int64_t block_row(const Args *args, int64_t row) {
    return row >> __builtin_ctzll((uint64_t)args->block_rows);
}

static inline int64_t block_col(const Args *args, int64_t col) {
    return col >> __builtin_ctzll((uint64_t)args->block_cols);
}

static inline int64_t blocks_across(const Args *args, int64_t cols) {
    return block_col(args, cols + args->block_cols - 1);
}

static inline int is_column_major(const Args *args) { return args->col_stride != 1 && args->row_stride == 1; }

/* Transposes a column-major tile of 16-bit numbers to rows of PITCH: 8 × 8 squares by shuffles, the rest one
 * by one. */
static void transpose_tile(const Args *args, int64_t row, int64_t rows, int64_t col, int64_t cols,
                           uint16_t *tile) {
    const int64_t whole_rows = rows & ~7, whole_cols = cols & ~7, pitch = args->col_stride * 2;
    for (int64_t j = 0; j < whole_cols; j += 8) {
        for (int64_t k = 0; k < 8; k++) /* columns are too far apart for the hardware prefetcher */
            __builtin_prefetch(address(args, row, at_most(col + j + k + AHEAD, args->cols - 1)));
        for (int64_t i = 0; i < whole_rows; i += 8)
            transpose_halves(address(args, row + i, col + j), pitch, tile + i * PITCH + j, PITCH);
    }
    for (int64_t j = 0; j < cols; j++) {
        const uint16_t *from = (const uint16_t *)address(args, row, col + j);
        for (int64_t i = j < whole_cols ? whole_rows : 0; i < rows; i++) tile[i * PITCH + j] = from[i];
    }
}

/* Loads rows from `row` on and columns from `col` on as fp32 into v, rows PITCH apart; pads each row with
 * zeros up to `width`. */
static void load(const Args *args, int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t width,
                 float *v) {
    const int is_turned = is_column_major(args), is_wide = args->dtype == FP32;
    _Alignas(64) uint16_t tile[STRIP * PITCH];
    if (is_turned && is_wide)
        for (int64_t j = 0; j < cols; j++) {
            const float *column = (const float *)address(args, row, col + j);
            __builtin_prefetch(address(args, row, at_most(col + j + AHEAD, args->cols - 1)));
            for (int64_t i = 0; i < rows; i++) v[i * PITCH + j] = column[i];
        }
    else if (is_turned) transpose_tile(args, row, rows, col, cols, tile);
    for (int64_t i = 0; i < rows; i++) {
        const void *from = is_turned ? (const void *)(tile + i * PITCH) : address(args, row + i, col);
        if (is_turned && is_wide) {}
        else if (is_turned || args->col_stride == 1) load_contiguous(from, args->dtype, cols, v + i * PITCH);
        else load_strided(from, args->dtype, args->col_stride, cols, v + i * PITCH);
        memset(v + i * PITCH + cols, 0, (size_t)(width - cols) * 4);
    }
}

/* One group: flip signs, butterfly, times 1/4. a - b is computed as a plus b with its sign flipped. */
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

static void load_transformed(const Args *args, int64_t row, int64_t rows, int64_t col, int64_t cols,
                             int64_t width, float *v) {
    load(args, row, rows, col, cols, width, v);
    if (!args->has_signs) return;
    Lanes flips;
    for (int i = 0; i < GROUP; i++) flips[i] = (uint32_t)(args->signs >> i & 1) << 31;
    for (int64_t i = 0; i < rows; i++) /* groups of padding only stay +0 */
        for (int64_t j = 0; j < cols; j += GROUP) hadamard(v + i * PITCH + j, flips);
}

/* ---- block maxima and scales ---- */

/* Lane g: the largest magnitude in group g, over `rows` rows. Compared as integers: inf and NaN are
 * largest. */
SPECIALISED Lanes magnitudes(const float *v, int64_t rows, int64_t groups) {
    Lanes largest[GROUPS];
    for (int64_t g = 0; g < GROUPS; g++)
        largest[g] = g < groups ? lanes_at(v + g * GROUP) & 0x7FFFFFFF : (Lanes){0};
    for (int64_t i = 1; i < rows; i++)
        for (int64_t g = 0; g < groups; g++)
            largest[g] = larger(largest[g], lanes_at(v + i * PITCH + g * GROUP) & 0x7FFFFFFF);
    return largest_of_each(largest);
}

/* The block maximum of each group times q_scalar; NaN if the block has inf or NaN. Lanes of one block get
 * the same value. */
static void block_maxima(const Args *args, const float *v, int64_t rows, int64_t groups, float *a) {
    Lanes amax = groups == GROUPS ? magnitudes(v, rows, GROUPS) : magnitudes(v, rows, groups);
    if (args->block_cols >= 2 * GROUP) amax = larger(amax, SWAPPED(amax, 1));
    if (args->block_cols >= 4 * GROUP) amax = larger(amax, SWAPPED(amax, 2));
    if (args->block_cols >= 8 * GROUP) amax = larger(amax, SWAPPED(amax, 4));
    const Lanes scaled = (Lanes)((Floats)amax * (float)args->q_scalar);
    const Lanes is_sound = is_less(scaled, (Lanes){0} + INFINITY_BITS);
    const Lanes result = chosen(is_sound, scaled, (Lanes){0} + NAN_BITS);
    memcpy(a, &result, sizeof result);
}

static inline Floats e4m3_values(Lanes codes) {
    const Lanes small = (Lanes)(floats_of(codes) * 0x1p-9f), zero = {0};
    const Lanes bits = chosen(is_less(codes, zero + 8), small, (codes << 20) + (120u << 23));
    return (Floats)chosen(is_less(zero + 0x7E, codes), zero + NAN_BITS, bits);
}

static inline float e8m0_value(uint32_t code) {
    return float_of(code == 255 ? NAN_BITS : code == 0 ? 0x00400000u : code << 23);
}

static void e4m3_scales(const float *a, float S, float element_max, int64_t is_up, Scales *out) {
    const Lanes zero = {0}, bits_of_a = lanes_at(a);
    const Lanes all = zero - (bits_of(S) > INFINITY_BITS); /* if the tensor's scale is NaN */
    const Lanes is_spoiled = is_less(zero + INFINITY_BITS, bits_of_a) | all;
    const Floats unclamped = (Floats)bits_of_a / (element_max / S);
    const Lanes bits = smaller((Lanes)unclamped, zero + 0x43E00000); /* 448 */
    const Lanes normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120u << 3);
    /* fp32 numbers near 1.5 · 2^14 have the spacing of E4M3's subnormals: the addition rounds to it. */
    const Lanes small = (Lanes)((Floats)bits + 0x1.8p14f) - 0x46C00000;
    Lanes codes = chosen(is_less(bits, zero + 0x3C800000), small, normal);
    if (is_up) codes += is_less((Lanes)e4m3_values(codes), bits) & 1;
    codes = chosen(is_spoiled, zero + 0x7F, codes);
    const Floats decoded = e4m3_values(codes), quotient = S / decoded;
    const Lanes encode = (Lanes)quotient & is_less((Lanes)quotient & 0x7FFFFFFF, zero + INFINITY_BITS);
    const Lanes keep = ~is_spoiled & 15;
    const Lanes overflows = is_less(zero + bits_of(E4M3_MAX * SLACK), (Lanes)unclamped) & ~is_spoiled & 1;
    memcpy(out->stored, &codes, sizeof codes), memcpy(out->decoded, &decoded, sizeof decoded);
    memcpy(out->encode, &encode, sizeof encode), memcpy(out->keep, &keep, sizeof keep);
    memcpy(out->overflows, &overflows, sizeof overflows);
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

static float tensor_encode_scale(const Args *args, float tensor_amax) {
    if ((bits_of(tensor_amax) & 0x7FFFFFFF) >= INFINITY_BITS) return float_of(NAN_BITS); /* as given */
    if (!(tensor_amax > 0)) return 1.0f;
    float S = (args->four_over_six ? 256.0f : E4M3_MAX) * 6.0f / tensor_amax;
    float most = args->is_up ? 0x1p118f : 0x1p126f;
    if (args->is_power_of_two) S = float_of(bits_of(S) & INFINITY_BITS), most = 0x1p116f; /* rounded down */
    return S < most ? S : most;
}

/* ---- codes ---- */

/* 16 Philox calls, numbered from `first`; 16 bytes each. */
static void philox(const Args *args, uint8_t *bytes, uint64_t first) {
    const Words zero = {0}, index = {0, 1, 2, 3, 4, 5, 6, 7};
    for (uint64_t half = 0; half < 2; half++) { /* eight calls at once; words in the low half of lanes */
        Words c0 = index + (first + half * 8), c1 = c0 >> 32;
        Words c2 = zero + args->step, c3 = zero + (args->step >> 32);
        uint32_t k0 = (uint32_t)args->key, k1 = (uint32_t)(args->key >> 32);
        for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
            const Words product0 = low_product(c0, 0xD2511F53u), product1 = low_product(c2, 0xCD9E8D57u);
            c0 = product1 >> 32 ^ c1 ^ k0, c2 = product0 >> 32 ^ c3 ^ k1;
            c1 = product1, c3 = product0;
        }
        const Words begin = (c0 & 0xFFFFFFFF) | c1 << 32, end = (c2 & 0xFFFFFFFF) | c3 << 32;
        const Words both[2] = {SHUFFLED(Words, begin, end, 0, 8, 1, 9, 2, 10, 3, 11),
                               SHUFFLED(Words, begin, end, 4, 12, 5, 13, 6, 14, 7, 15)};
        memcpy(bytes + half * sizeof both, both, sizeof both);
    }
}

/* Random bytes of groups from number `first` on, 16 each. */
static const uint8_t *random_bytes(const Args *args, Random *random, uint64_t first, int64_t groups) {
    int is_inside = random->is_filled && first >= random->first;
    if (!is_inside || first + (uint64_t)groups > random->first + GROUPS) {
        philox(args, random->bytes, first);
        random->first = first, random->is_filled = 1;
    }
    return random->bytes + (first - random->first) * GROUP;
}

/* The code is the smallest of 2y, y + 2 and y/2 + 4, each rounded to an integer (ties to even) by one
 * addition. */
SPECIALISED Lanes nearest_codes(const float *v, const Scales *scales, int64_t group) {
    const Lanes bits = (Lanes)((Floats)lanes_at(v + group * GROUP) * scales->encode[group]);
    const Floats y = (Floats)smaller(bits & 0x7FFFFFFF, (Lanes){0} + 0x40C00000); /* 6 */
    const Lanes below2 = (Lanes)(y + 0x1.8p22f) - 0x4AC00000;
    const Lanes below4 = (Lanes)(y + 0x1.8p23f) - (0x4B400000 - 2);
    const Lanes above4 = (Lanes)(y + 0x1.8p24f) - (0x4BC00000 - 4);
    return (smaller(smaller(below2, below4), above4) | (bits >> 28 & 8)) & scales->keep[group];
}

SPECIALISED Lanes stochastic_codes(const float *v, const Scales *scales, int64_t group,
                                     const uint8_t *random) {
    const Lanes bits = (Lanes)((Floats)lanes_at(v + group * GROUP) * scales->encode[group]);
    const Floats y = (Floats)smaller(bits & 0x7FFFFFFF, (Lanes){0} + 0x40C00000);
    const Lanes steep = smaller((Lanes)(y + y), (Lanes)(y + 2.0f));
    const Floats position = (Floats)smaller(steep, (Lanes)(y * 0.5f + 4.0f));
    const Lanes code = stochastic_steps(position, random + group * GROUP);
    return (code | (bits >> 28 & 8)) & scales->keep[group];
}

/* One group: sum of squared differences between codes × scale and v · S, added in a fixed tree order. */
static inline float squared_error(const float *v, Lanes codes, float decoded, float S) {
    const Floats difference = e2m1_values(codes) * decoded - (Floats)lanes_at(v) * S;
    const Floats squares = difference * difference;
    float tree[GROUP];
    memcpy(tree, &squares, sizeof tree);
    for (int j = 0; j < 8; j++) tree[j] = tree[j] + tree[j + 8];
    for (int j = 0; j < 4; j++) tree[j] = tree[j] + tree[j + 4];
    return (tree[0] + tree[2]) + (tree[1] + tree[3]);
}

/* Replaces the scale of groups for which scaling the maximum to 4 instead of 6 has the smaller error. */
static void four_over_six(const Args *args, const float *v, float S, int64_t groups, Scales *scales) {
    Scales other;
    e4m3_scales(scales->a, S, 4.0f, args->is_up, &other);
    float error[GROUPS], other_error[GROUPS];
    for (int64_t g = 0; g < groups; g++) {
        error[g] = squared_error(v + g * GROUP, nearest_codes(v, scales, g), scales->decoded[g], S);
        other_error[g] = squared_error(v + g * GROUP, nearest_codes(v, &other, g), other.decoded[g], S);
    }
    for (int64_t g = 0; g < groups; g++)
        if (other_error[g] < error[g]) {
            scales->stored[g] = other.stored[g], scales->decoded[g] = other.decoded[g];
            scales->encode[g] = other.encode[g], scales->overflows[g] = other.overflows[g];
        }
}

#endif
