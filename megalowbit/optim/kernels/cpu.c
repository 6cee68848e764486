/* The optimizer's passes over memory on CPUs: accumulate a gradient, sum squares, take one step of Adam.
 *
 * Each pass reads and writes everything once, in runs that fit into the L1 cache. Bits: each fp32 operation is
 * rounded once, in the order of torch's fused Adam. If torch is compiled with fused multiply-adds, whole vectors and
 * the remaining elements differ in which product of the second moment is rounded before the sum.
 * Compile without contraction and without any "fast math". Results do not depend on the thread count: tensors are
 * divided into the same blocks for every count, and the sums of blocks are added in block order.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

enum { FP32, BF16, FP16 }; /* as in cpu.py */
/* In elements: a task, a run (buffer), the prefetch distance, a vector of torch. */
enum { BLOCK = 1 << 16, RUN = 128, AHEAD = 512, LANES = 8 };
enum { STREAMS = 4 }; /* positions of a block that are read in turn, to keep more memory requests in flight */
typedef float Floats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));

typedef struct { /* mirrored field by field in cpu.py, like Step; every field has 8 bytes */
    const void *x;
    int64_t dtype, count;
} Numbers;

typedef struct {
    float *master, *exp_avg, *exp_avg_sq, *step; /* step: one number, the count of steps */
    void *gradient;
    void *half; /* the half-precision weight, or NULL */
    int64_t gradient_dtype, half_dtype, is_decoupled, count;
    double learning_rate, beta1, beta2, epsilon, weight_decay;
} Step;

typedef struct { /* the factors of a step, rounded to fp32 as torch does */
    float unscale, shrink, decay, lerp, beta2, square, root, epsilon, rate;
    int is_divided, has_decay; /* has_decay: weight decay is added to the gradient */
} Factors;

static inline uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float float_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t size_of(int64_t dtype) { return dtype == FP32 ? 4 : 2; }

/* ---- conversion between fp32 and half precision ---- */

static inline float float_of_fp16(uint16_t half) {
    const uint32_t magnitude = (uint32_t)(half & 0x7FFF) << 13;
    const uint32_t spoiled = magnitude >= 0x0F800000 ? 0x7F800000 : 0;
    const uint32_t bits = bits_of(float_of(magnitude) * 0x1p112f) | spoiled;
    return float_of(bits | (uint32_t)(half & 0x8000) << 16);
}

static inline uint16_t fp16_of_float(float x) {
    const uint32_t sign = bits_of(x) >> 16 & 0x8000, a = bits_of(x) & 0x7FFFFFFF;
    uint32_t half;
    if (a > 0x7F800000) half = 0x7E00;
    else if (a >= 0x47800000) half = 0x7C00;
    else if (a < 0x38800000) half = bits_of(float_of(a) + 0.5f) - 0x3F000000; /* the sum rounds */
    else half = (a + 0xC8000FFF + (a >> 13 & 1)) >> 13;
    return (uint16_t)(sign | half);
}

static inline uint16_t bf16_of_float(float x) {
    const uint32_t bits = bits_of(x);
    return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* Prefetch what is AHEAD of a run: the hardware prefetcher stops at the end of a memory page. */
static inline void fetch(const void *from, int64_t size, int64_t place) {
    for (int64_t byte = 0; byte < RUN * size; byte += 64)
        __builtin_prefetch((const char *)from + (place + AHEAD) * size + byte);
}

/* A run of numbers as fp32: in place if they are fp32 already, else converted into the buffer. */
static inline const float *loaded(const void *from, int64_t dtype, int64_t place, int64_t count,
                                  float *restrict buffer) {
    if (dtype == FP32) return (const float *)from + place;
    const uint16_t *restrict half = (const uint16_t *)from + place;
    int64_t i = 0;
    if (dtype == BF16) for (; i < count; i++) buffer[i] = float_of((uint32_t)half[i] << 16);
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(buffer + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(half + i))));
#elif defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(buffer + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(half + i))));
#endif
    for (; i < count; i++) buffer[i] = float_of_fp16(half[i]);
    return buffer;
}

#if defined(__AVX512F__)
/* Non-temporal store if aligned: a normal store would first read memory that is then overwritten. */
static inline void store_line(uint16_t *to, __m256i line) {
    if ((uintptr_t)to & 31) _mm256_storeu_si256((__m256i *)to, line);
    else _mm256_stream_si256((__m256i *)to, line);
}

static inline __m256i fp16_line(const float *from) {
    return _mm512_cvtps_ph(_mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline __m256i bf16_line(const float *from) { /* the same as bf16_of_float */
    const __m512 x = _mm512_loadu_ps(from);
    const __m512i bits = _mm512_castps_si512(x), half = _mm512_set1_epi32(0x7FFF);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, half), odd), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7FC0)));
}
#endif

static inline void store_half(const float *restrict from, int64_t dtype, int64_t count,
                              uint16_t *restrict to) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16)
        store_line(to + i, dtype == BF16 ? bf16_line(from + i) : fp16_line(from + i));
#elif defined(__F16C__)
    for (; dtype == FP16 && i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
    if (dtype == BF16) for (; i < count; i++) to[i] = bf16_of_float(from[i]);
    else for (; i < count; i++) to[i] = fp16_of_float(from[i]);
}

/* ---- sums of squares: in float64, where no square of a finite number is infinite ---- */

/* sum + x². The square of an fp32 number is exact in float64, so a fused operation gives the same bits. */
static inline Doubles plus_squares(Doubles sum, const float *x) {
#if defined(__AVX512F__) /* compilers generate slower code for a converted vector */
    const __m512d wide = _mm512_cvtps_pd(_mm256_loadu_ps(x));
    return (Doubles)_mm512_fmadd_pd(wide, wide, (__m512d)sum);
#else
    Floats narrow;
    memcpy(&narrow, x, sizeof narrow);
    const Doubles wide = __builtin_convertvector(narrow, Doubles);
    return sum + wide * wide;
#endif
}

/* Add the squares of a run to four vectors of partial sums. */
static inline void add_squares(const float *x, int64_t count, Doubles sums[4]) {
    Doubles a = sums[0], b = sums[1], c = sums[2], d = sums[3]; /* in registers */
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        a = plus_squares(a, x + i), b = plus_squares(b, x + i + 8);
        c = plus_squares(c, x + i + 16), d = plus_squares(d, x + i + 24);
    }
    sums[0] = a, sums[1] = b, sums[2] = c, sums[3] = d;
    for (; i < count; i++) sums[0][i % 8] += (double)x[i] * x[i];
}

static inline double total(const Doubles sums[4]) {
    const Doubles all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return ((all[0] + all[1]) + (all[2] + all[3])) + ((all[4] + all[5]) + (all[6] + all[7]));
}

static double in_order(const double *partial, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += partial[i];
    return sum;
}

/* The last of `count` tensors that starts at or before `block`; empty tensors have no blocks. */
static inline int64_t owner(const int64_t *first_blocks, int64_t count, int64_t block) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (first_blocks[middle] <= block) low = middle;
        else high = middle;
    }
    return low;
}

/* first_blocks: first block of each tensor, then the number of all blocks; partial: one sum for each block. */
void megalowbit_sums_of_squares(const Numbers *tensors, const int64_t *first_blocks, int64_t count,
                                double *partial, double *sums, int64_t threads) {
    const int64_t blocks = first_blocks[count];
#pragma omp parallel for schedule(dynamic, 4) num_threads((int)threads)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t index = owner(first_blocks, count, block);
        const Numbers *tensor = tensors + index;
        const int64_t begin = (block - first_blocks[index]) * BLOCK;
        const int64_t end = at_most(begin + BLOCK, tensor->count);
        _Alignas(64) float buffer[RUN];
        Doubles part[4] = {{0}};
        for (int64_t run = 0; run < BLOCK / STREAMS; run += RUN)
            for (int64_t i = begin + run; i < end; i += BLOCK / STREAMS) {
                const int64_t length = at_most(RUN, end - i);
                fetch(tensor->x, size_of(tensor->dtype), i);
                add_squares(loaded(tensor->x, tensor->dtype, i, length, buffer), length, part);
            }
        partial[block] = total(part);
    }
    for (int64_t i = 0; i < count; i++)
        sums[i] = in_order(partial + first_blocks[i], first_blocks[i + 1] - first_blocks[i]);
}

/* main += gradient · factor */
void megalowbit_accumulate(float *main, const void *gradient, int64_t dtype, int64_t count, float factor,
                           int64_t threads) {
    const int64_t blocks = (count + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (blocks > 1)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t begin = block * BLOCK, end = at_most(begin + BLOCK, count);
        _Alignas(64) float buffer[RUN];
        for (int64_t i = begin; i < end; i += RUN) {
            const int64_t length = at_most(RUN, end - i);
            fetch(main, 4, i), fetch(gradient, size_of(dtype), i);
            float *restrict to = main + i;
            const float *restrict from = loaded(gradient, dtype, i, length, buffer);
            for (int64_t j = 0; j < length; j++) to[j] = to[j] + from[j] * factor;
        }
    }
}

/* ---- Adam ---- */

/* Hyperparameters are float64 up to here, as in torch: 1 - βᵗ would lose too many digits in fp32. */
static Factors factors_of(const Step *item, float scale) {
    const double step = (double)(*item->step + 1.0f), lr = item->learning_rate;
    const uint32_t bits = bits_of(scale), exponent = bits >> 23;
    /* The inverse of a power of two is exact if it is a normal number, and multiplying is faster. */
    const int is_power = (bits & 0x7FFFFF) == 0 && exponent >= 1 && exponent <= 252;
    Factors f;
    f.is_divided = !is_power;
    f.unscale = is_power ? 1.0f / scale : scale;
    f.shrink = item->is_decoupled && item->weight_decay != 0 ? (float)(1 - lr * item->weight_decay) : 1.0f;
    f.has_decay = !item->is_decoupled && item->weight_decay != 0;
    f.decay = (float)item->weight_decay;
    f.lerp = (float)(1 - item->beta1);
    f.beta2 = (float)item->beta2;
    f.square = (float)(1 - item->beta2);
    f.root = (float)sqrt(1 - pow(item->beta2, step));
    f.epsilon = (float)item->epsilon;
    f.rate = (float)-(lr / (1 - pow(item->beta1, step)));
    return f;
}

/* a · b + c, rounded once or twice. */
static inline float product_sum(float a, float b, float c, int is_fused) {
    return is_fused ? fmaf(a, b, c) : a * b + c;
}

/* Unscale a run of gradients, and add Adam's weight decay. */
static inline __attribute__((always_inline)) void prepare(const Factors *f, int is_fused, int64_t count,
                                                          const float *restrict from, const float *restrict p,
                                                          float *restrict g) {
    const float unscale = f->unscale, decay = f->decay;
    if (f->is_divided) for (int64_t j = 0; j < count; j++) g[j] = from[j] / unscale;
    else for (int64_t j = 0; j < count; j++) g[j] = from[j] * unscale;
    if (f->has_decay) for (int64_t j = 0; j < count; j++) g[j] = product_sum(p[j], decay, g[j], is_fused);
}

/* `is_tail` selects which of the two products of the second moment is rounded before the sum. */
static inline __attribute__((always_inline)) void update(const Factors *factors, int is_fused, int is_tail,
                                                         int64_t count, const float *restrict g,
                                                         float *restrict p, float *restrict m,
                                                         float *restrict v) {
    const Factors f = *factors;
    const int is_small = f.lerp < 0.5f;
    const float coefficient = is_small ? f.lerp : is_tail ? -(1.0f - f.lerp) : f.lerp - 1.0f; /* ±0 */
    for (int64_t j = 0; j < count; j++) {
        const float difference = g[j] - m[j], base = is_small ? m[j] : g[j], scaled = f.square * g[j];
        const float square = is_tail ? product_sum(v[j], f.beta2, scaled * g[j], is_fused)
                                     : product_sum(scaled, g[j], v[j] * f.beta2, is_fused);
        const float mean = product_sum(coefficient, difference, base, is_fused);
        m[j] = mean;
        v[j] = square;
        p[j] = p[j] * f.shrink + f.rate * mean / (sqrtf(square) / f.root + f.epsilon);
    }
}

/* A run of `count` elements; the first `whole` of them form whole vectors. */
static void step_run(const Step *item, const Factors *f, int64_t place, int64_t count, int64_t whole,
                     int64_t is_fused, int64_t clears) {
    _Alignas(64) float wide[RUN], g[RUN];
    fetch(item->gradient, size_of(item->gradient_dtype), place);
    fetch(item->master, 4, place), fetch(item->exp_avg, 4, place), fetch(item->exp_avg_sq, 4, place);
    const float *restrict from = loaded(item->gradient, item->gradient_dtype, place, count, wide);
    float *restrict p = item->master + place, *m = item->exp_avg + place, *v = item->exp_avg_sq + place;
    if (is_fused) {
        prepare(f, 1, count, from, p, g);
        update(f, 1, 0, whole, g, p, m, v);
        update(f, 1, 1, count - whole, g + whole, p + whole, m + whole, v + whole);
    } else {
        prepare(f, 0, count, from, p, g);
        update(f, 0, 0, count, g, p, m, v);
    }
    if (clears && item->gradient_dtype == FP32) /* just read, so it is in the L1 cache */
        memset((float *)item->gradient + place, 0, sizeof(float) * (size_t)count);
    if (item->half) store_half(p, item->half_dtype, count, (uint16_t *)item->half + place);
}

/* Make non-temporal stores visible to other threads. */
static inline void finish_stores(void) {
#if defined(__AVX512F__)
    _mm_sfence();
#endif
}

/* One step of all items on gradients ÷ *scale, or nothing if *found_inf is not 0; `clears`: zero fp32 gradients. */
void megalowbit_adam_step(const Step *items, const int64_t *first_blocks, int64_t count, const float *scale,
                          const float *found_inf, int64_t is_fused, int64_t clears, int64_t threads) {
    const int64_t blocks = first_blocks[count];
    if (*found_inf != 0) return;
#pragma omp parallel for schedule(dynamic, 4) num_threads((int)threads)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t index = owner(first_blocks, count, block);
        const Step *item = items + index;
        const Factors factors = factors_of(item, *scale);
        const int64_t whole = item->count - item->count % LANES;
        const int64_t begin = (block - first_blocks[index]) * BLOCK;
        const int64_t end = at_most(begin + BLOCK, item->count);
        for (int64_t i = begin; i < end; i += RUN) {
            const int64_t length = at_most(RUN, end - i);
            step_run(item, &factors, i, length, at_most(length, whole > i ? whole - i : 0), is_fused,
                     clears);
        }
        finish_stores();
    }
    for (int64_t i = 0; i < count; i++) *items[i].step += 1.0f;
}

int megalowbit_has_threads(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
