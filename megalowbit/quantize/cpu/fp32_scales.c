/* INT8, INT4 and small floats under fp32 scales on CPUs: quantise a matrix, and decode it.
 *
 * A tensor with one scale is read twice, for its largest magnitude and for the codes; one whose maximum is
 * given is read once, and again if it turns out to hold an infinity or a NaN. Blocks with scales of their own
 * (16 to 128 elements of a row, or tiles) are read once. Blocks of INT8 or E5M2 are rounded to INT8, whose
 * codes decide; what becomes E5M2 is rounded again.
 * Loading, tasks and threads are those of fp4.c, and so are the rules for bits: each operation is
 * rounded once in the order of quantize/reference.py, and no sum depends on the number of threads.
 */
#include "elements.h"
#include "tasks.h"

typedef struct { /* of a unit: one row of blocks in a segment, a number for each group */
    float a[GROUPS], scale[GROUPS]; /* a: block maximum, NaN in a spoiled block; scale: as stored */
    float divisor[GROUPS], decoded[GROUPS];
    uint32_t keep[GROUPS]; /* mask of the codes: 0 in a spoiled block */
    int element[GROUPS];
} Blocks;

typedef struct { /* where a row of a unit goes */
    uint8_t *packed;
    char *operand;
    float *values; /* for counting */
    const uint8_t *random;
} Row;

static inline int64_t size_of(int64_t dtype) { return dtype == FP32 ? 4 : 2; }

static inline int64_t group_bytes(const Job *job) { return ELEMENTS[job->element].bits * 2; }

static inline int64_t row_bytes(const Job *job) {
    return blocks_across(job, job->cols) * (job->block_cols / GROUP) * group_bytes(job);
}

/* ---- scales ---- */

/* Numbers by which group g is divided and multiplied. Under a scale of 0 all quotients are to be 0: x / inf. */
static void set_group(Blocks *blocks, int64_t g, int element, float scale, float decoded) {
    const int is_spoiled = (bits_of(scale) & 0x7FFFFFFF) > INFINITY_BITS;
    blocks->scale[g] = scale, blocks->decoded[g] = decoded, blocks->element[g] = element;
    blocks->divisor[g] = scale == 0 ? float_of(INFINITY_BITS) : scale;
    blocks->keep[g] = is_spoiled ? 0 : 0xFF;
}

/* ---- codes ---- */

SPECIALISED void encode_groups(const Job *job, int element, const float *v, const Blocks *blocks, int64_t begin,
                               int64_t end, const Row *row, const uint8_t *random, int is_unbiased) {
    const uint32_t bits = ELEMENTS[element].bits;
    const int64_t dtype = job->operand_dtype, size = size_of(dtype);
    for (int64_t g = begin; g < end; g++) {
        const Lanes quotients = (Lanes)((Floats)lanes_at(v + g * GROUP) / blocks->divisor[g]);
        Lanes codes = random ? stochastic_elements(element, quotients, random + g * GROUP * (is_unbiased ? 4 : 1),
                                                   is_unbiased)
                             : nearest_elements(element, quotients);
        codes &= blocks->keep[g];
        store_codes(bits, codes, row->packed + g * bits * 2);
        if (!row->operand && !row->values) continue;
        const Floats decoded = element_values(element, codes) * blocks->decoded[g];
        if (row->operand) store_rounded(decoded, dtype, row->operand + g * GROUP * size);
        if (row->values) memcpy(row->values + g * GROUP, &decoded, sizeof decoded);
    }
}

/* Groups of one element format. */
static void encode_run(const Job *job, const float *v, const Blocks *blocks, int64_t begin, int64_t end,
                       const Row *row) {
    const int kind = row->random ? 1 + (int)job->is_unbiased : 0;
    switch (blocks->element[begin] * 3 + kind) {
#define CASE(element) \
    case element * 3: encode_groups(job, element, v, blocks, begin, end, row, NULL, 0); break; \
    case element * 3 + 1: encode_groups(job, element, v, blocks, begin, end, row, row->random, 0); break; \
    case element * 3 + 2: encode_groups(job, element, v, blocks, begin, end, row, row->random, 1); break;
        CASE(INT4)
        CASE(INT8)
        CASE(FP4_E2M1)
        CASE(FP6_E3M2)
        CASE(FP8_E4M3)
        CASE(FP8_E5M2)
#undef CASE
    }
}

static int64_t same_element(const Blocks *blocks, int64_t begin, int64_t end) {
    int64_t g = begin + 1;
    while (g < end && blocks->element[g] == blocks->element[begin]) g++;
    return g;
}

/* One row of a segment. The last group's operand may be cut short. */
static void encode_row(const Job *job, const float *v, const Blocks *blocks, int64_t groups, int64_t cols,
                       const Row *row) {
    const int is_rounded = job->scale_kind == SIGNED_BLOCKS && !row->random && !row->operand && !row->values;
    const int64_t whole = row->operand ? cols / GROUP : groups, size = size_of(job->operand_dtype);
    for (int64_t g = 0, end; g < whole; g = end) {
        end = same_element(blocks, g, whole);
        if (!is_rounded || blocks->element[g] != INT8) encode_run(job, v, blocks, g, end, row);
    }
    for (int64_t g = whole; g < groups; g++) {
        char last[SEGMENT * 4];
        Row cut = *row;
        cut.operand = last;
        encode_run(job, v, blocks, g, g + 1, &cut);
        const int64_t place = g * GROUP * size;
        if (g == whole) memcpy(row->operand + place, last + place, (size_t)(cols % GROUP * size));
    }
}

/* ---- blocks of their own ---- */

static void find_block_scales(const Job *job, const Unit *unit, Blocks *blocks) {
    const float largest = ELEMENTS[job->element].largest;
    block_maxima(job, unit->v, unit->rows, unit->groups, blocks->a);
    for (int64_t g = 0; g < unit->groups; g++) {
        const float scale = blocks->a[g] / largest;
        set_group(blocks, g, (int)job->element, scale, scale);
    }
}

/* INT8 for all, with the codes; then E5M2 for blocks whose elements are small beside their largest. */
static void find_signed_scales(const Job *job, const Unit *unit, Blocks *blocks, uint8_t *packed) {
    const int64_t step = job->block_cols / GROUP, size = job->block_cols;
    const Row row = {packed, NULL, NULL, NULL};
    block_maxima(job, unit->v, unit->rows, unit->groups, blocks->a);
    for (int64_t g = 0; g < unit->groups; g++) {
        const float scale = blocks->a[g] / 127.0f;
        set_group(blocks, g, INT8, scale == 0 ? 1.0f : scale, scale == 0 ? 1.0f : scale);
    }
    encode_run(job, unit->v, blocks, 0, unit->groups, &row);
    for (int64_t g = 0; g < unit->groups; g += step) {
        const int64_t elements = at_most(size, job->cols - unit->col - g * GROUP);
        const float scale = blocks->a[g] / 57344.0f;
        int32_t sum = 0;
        for (int64_t j = 0; j < size; j++) sum += packed[g * GROUP + j] & 0x7F;
        if (!(scale >= 0x1p-126f) || (sum - 127) * 32 >= 141 * (elements - 1)) continue;
        for (int64_t i = g; i < g + step; i++) {
            set_group(blocks, i, FP8_E5M2, scale, scale);
            blocks->scale[i] = -scale;
        }
    }
}

/* ---- counting ---- */

/* One row of a segment; everything behind its `cols` elements is set to zero first, which counts nowhere. */
static void count_row(Tally *tally, float *v, float *values, const Blocks *blocks, float tensor_scale,
                      int64_t cols) {
    const int64_t groups = blocks_in(cols, GROUP);
    memset(v + cols, 0, (size_t)(groups * GROUP - cols) * 4);
    memset(values + cols, 0, (size_t)(groups * GROUP - cols) * 4);
    uint32_t saturated = 0, upper_half = 0, underflow = 0, nonfinite = 0;
    for (int64_t g = 0; g < groups; g++) {
        const float limit = ELEMENTS[blocks->element[g]].largest * SLACK;
        const uint32_t is_kept = blocks->keep[g] & 1;
        for (int j = 0; j < GROUP; j++) {
            const float x = v[g * GROUP + j], value = values[g * GROUP + j];
            const float magnitude = float_of(bits_of(x / blocks->divisor[g]) & 0x7FFFFFFF);
            saturated += magnitude > limit;
            upper_half += magnitude > limit / 2;
            underflow += (bits_of(x) << 1 != 0) & (bits_of(value) << 1 == 0) & is_kept;
            nonfinite += (bits_of(x) & 0x7FFFFFFF) >= INFINITY_BITS;
        }
    }
    tally->counts[SATURATED] += saturated, tally->counts[UPPER_HALF] += upper_half;
    tally->counts[UNDERFLOW] += underflow, tally->counts[NONFINITE] += nonfinite;
    add_errors(tally, v, values, tensor_scale, groups);
}

/* ---- whole matrices ---- */

static void encode_unit(const Job *job, const Unit *unit, Blocks *blocks, Random *random, Tally *tally) {
    const int64_t col = unit->col, groups = unit->groups, step = job->block_cols / GROUP;
    const int64_t row_blocks = blocks_across(job, job->cols), size = size_of(job->operand_dtype);
    const float tensor_scale = job->scale_kind == ONE_FP32 ? blocks->scale[0] : 1.0f;
    float values[SEGMENT];
    uint8_t *packed = job->codes + unit->row * row_bytes(job) + col / GROUP * group_bytes(job);
    if (job->scale_kind == FP32_BLOCKS) find_block_scales(job, unit, blocks);
    if (job->scale_kind == SIGNED_BLOCKS) find_signed_scales(job, unit, blocks, packed);
    for (int64_t i = 0; i < unit->rows; i++, packed += row_bytes(job)) {
        const int64_t at = unit->row + i;
        const uint64_t first = (uint64_t)at * (uint64_t)(row_blocks * step) + (uint64_t)(col / GROUP);
        const Row row = {
            packed,
            job->operand ? (char *)job->operand + (at * job->cols + col) * size : NULL,
            tally ? values : NULL,
            job->is_stochastic ? random_bytes(job, random, first, groups) : NULL,
        };
        encode_row(job, unit->v + i * PITCH, blocks, groups, unit->cols, &row);
        if (tally) count_row(tally, unit->v + i * PITCH, values, blocks, tensor_scale, unit->cols);
    }
    if (job->scale_kind == ONE_FP32) return;
    float *stored = (float *)job->scales + block_row(job, unit->row) * row_blocks + block_col(job, col);
    for (int64_t g = 0; g < groups; g += step) {
        stored[g / step] = blocks->scale[g];
        if (!tally) continue;
        tally->counts[BLOCKS]++;
        tally->counts[ZERO_BLOCKS] += (job->scale_kind == SIGNED_BLOCKS ? blocks->a : blocks->scale)[g] == 0;
    }
}

static inline uint32_t larger_of(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* The bits of the largest magnitude of a unit. */
static uint32_t largest_of_unit(const Unit *unit) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < unit->rows; i++)
        largest = larger_of(largest, largest_magnitude(unit->v + i * PITCH, FP32, unit->cols));
    return largest;
}

/* That of a task, where rows are contiguous in one direction. */
static uint32_t largest_of_task(const Job *job, int64_t top, int64_t bottom, int64_t left, int64_t right) {
    const int is_down = is_column_major(job);
    uint32_t largest = 0;
    for (int64_t i = is_down ? left : top; i < (is_down ? right : bottom); i++) {
        const void *from = address(job, is_down ? top : i, is_down ? i : left);
        const int64_t length = is_down ? bottom - top : right - left;
        largest = larger_of(largest, largest_magnitude(from, job->dtype, length));
    }
    return largest;
}

/* Finds the largest magnitude (`scale` is NULL), or quantises; a given scale wants that magnitude as well. */
static uint32_t run_task(const Job *job, Tasks tasks, int64_t task, const float *scale, Tally *tally) {
    _Alignas(64) float v[STRIP * PITCH];
    Unit units[STRIP];
    Blocks blocks;
    Random random = {0};
    uint32_t largest = 0;
    const int64_t top = task / tasks.across * tasks.rows, left = task % tasks.across * tasks.cols;
    const int64_t bottom = at_most(top + tasks.rows, job->rows);
    const int64_t right = at_most(left + tasks.cols, job->cols);
    if (!scale && !job->has_signs && (job->col_stride == 1 || is_column_major(job)))
        return largest_of_task(job, top, bottom, left, right);
    for (int64_t g = 0; scale && g < GROUPS; g++) set_group(&blocks, g, (int)job->element, *scale, 1.0f);
    const int64_t strip = is_column_major(job) ? STRIP : job->block_rows;
    const int64_t span = strip == 1 ? BATCH * SEGMENT : SEGMENT;
    for (int64_t row = top; row < bottom; row += strip)
        for (int64_t col = left; col < right; col += span) {
            const int64_t rows = at_most(strip, bottom - row), end = at_most(col + span, right);
            const int64_t count = load_units(job, row, rows, col, end, v, units);
            for (int64_t i = 0; i < count; i++) {
                if (!scale || job->tensor_amax) largest = larger_of(largest, largest_of_unit(units + i));
                if (scale) encode_unit(job, units + i, &blocks, &random, tally);
            }
        }
    return largest;
}

static uint32_t run_tasks(const Job *job, Tasks tasks, const float *scale, Tally *tallies) {
    uint32_t largest = 0;
#pragma omp parallel for schedule(static) num_threads((int)job->threads) reduction(max : largest)
    for (int64_t task = 0; task < tasks.count; task++) {
        const unsigned mode = exact_numbers();
        largest = larger_of(largest, run_task(job, tasks, task, scale, tallies ? tallies + task : NULL));
        restore_numbers(mode);
    }
    return largest;
}

/* The tensor's only scale, from the bits of its largest magnitude and what was given in its place. */
static float one_scale(const Job *job, uint32_t largest, const float *given) {
    const unsigned mode = exact_numbers();
    const float a = float_of(largest) * (float)job->q_scalar, amax = given ? *given : a;
    const int is_finite = bits_of(a) < INFINITY_BITS && (bits_of(amax) & 0x7FFFFFFF) < INFINITY_BITS;
    const float scale = is_finite ? amax / ELEMENTS[job->element].largest : float_of(NAN_BITS);
    restore_numbers(mode);
    return scale;
}

static void encode_with_one_scale(const Job *job, Tasks tasks, Tally *tallies) {
    const uint32_t found = job->tensor_amax ? 0 : run_tasks(job, tasks, NULL, NULL);
    float scale = one_scale(job, found, job->tensor_amax);
    const uint32_t largest = run_tasks(job, tasks, &scale, tallies);
    const float sound = one_scale(job, largest, &scale); /* NaN: not all numbers were finite */
    if (sound != sound && scale == scale) {
        scale = sound;
        if (tallies) memset(tallies, 0, (size_t)tasks.count * sizeof(Tally));
        run_tasks(job, tasks, &scale, tallies);
    }
    *job->tensor_scale = scale;
    if (tallies) tallies->counts[BLOCKS] = 1, tallies->counts[ZERO_BLOCKS] = scale == 0;
}

/* 0, or -1 where memory is lacking. */
int megalowbit_encode_8bit(const Job *job) {
    const Tasks tasks = encode_tasks(job);
    const float of_blocks = 0; /* each block finds its own scale */
    Tally *tallies = job->counts ? calloc((size_t)tasks.count, sizeof(Tally)) : NULL;
    if (job->counts && !tallies) return -1;
    if (job->scale_kind == ONE_FP32) encode_with_one_scale(job, tasks, tallies);
    else run_tasks(job, tasks, &of_blocks, tallies);
    if (tallies) add_up(job, tallies, tasks.count);
    free(tallies);
    return 0;
}

/* ---- decoding ---- */

SPECIALISED void decode_groups(const Job *job, int element, const Blocks *blocks, int64_t begin, int64_t end,
                               const uint8_t *packed, char *out) {
    const uint32_t bits = ELEMENTS[element].bits;
    for (int64_t g = begin; g < end; g++) {
        const Floats values = element_values(element, codes_at(bits, packed + g * bits * 2));
        char *to = out + g * GROUP * size_of(job->operand_dtype);
        if (job->scale_kind == ONE_FP32 && job->operand_dtype == BF16) store_exact(values, BF16, to);
        else store_rounded(values * blocks->decoded[g], job->operand_dtype, to);
    }
}

/* One row of a segment; writes whole groups. */
static void decode_row(const Job *job, int64_t row, int64_t col, int64_t groups, char *out) {
    const uint8_t *packed = job->codes + row * row_bytes(job) + col / GROUP * group_bytes(job);
    const int64_t step = job->block_cols / GROUP;
    Blocks blocks;
    if (job->scale_kind == ONE_FP32)
        for (int64_t g = 0; g < groups; g++) set_group(&blocks, g, (int)job->element, 1.0f, 1.0f);
    else {
        const float *stored = (const float *)job->scales + block_col(job, col);
        stored += block_row(job, row) * blocks_across(job, job->cols);
        const int is_signed = job->scale_kind == SIGNED_BLOCKS;
        for (int64_t g = 0; g < groups; g++) {
            const uint32_t bits = bits_of(stored[g / step]);
            const int element = is_signed && bits >> 31 ? FP8_E5M2 : (int)job->element;
            set_group(&blocks, g, element, 1.0f, float_of(is_signed ? bits & 0x7FFFFFFF : bits));
        }
    }
    for (int64_t g = 0, end; g < groups; g = end) {
        end = same_element(&blocks, g, groups);
        switch (blocks.element[g]) {
#define CASE(element) \
    case element: decode_groups(job, element, &blocks, g, end, packed, out); break;
            CASE(INT4)
            CASE(INT8)
            CASE(FP4_E2M1)
            CASE(FP6_E3M2)
            CASE(FP8_E4M3)
            CASE(FP8_E5M2)
#undef CASE
        }
    }
}

/* A tile of rows to the columns of a matrix that has job->rows of them. */
static void store_turned(const Job *job, const char *tile, int64_t row, int64_t rows, int64_t col,
                         int64_t cols) {
    const int is_wide = job->operand_dtype == FP32;
    const int64_t whole_rows = is_wide ? 0 : rows & ~7, whole_cols = is_wide ? 0 : cols & ~7;
    uint16_t *out = (uint16_t *)job->operand + col * job->rows + row;
    float *wide_out = (float *)job->operand + col * job->rows + row;
    for (int64_t j = 0; j < whole_cols; j += 8) {
        for (int64_t k = j; k < j + 8; k++) /* far apart, where the machine does not look ahead */
            __builtin_prefetch(out + at_most(k + AHEAD, cols - 1) * job->rows, 1);
        for (int64_t i = 0; i < whole_rows; i += 8)
            transpose_halves(tile + (i * PITCH + j) * 2, PITCH * 2, out + j * job->rows + i, job->rows);
    }
    for (int64_t j = 0; j < cols; j++) {
        if (is_wide) __builtin_prefetch(wide_out + at_most(j + AHEAD, cols - 1) * job->rows, 1);
        for (int64_t i = j < whole_cols ? whole_rows : 0; i < rows; i++) {
            if (is_wide) wide_out[j * job->rows + i] = ((const float *)tile)[i * PITCH + j];
            else out[j * job->rows + i] = ((const uint16_t *)tile)[i * PITCH + j];
        }
    }
}

static void decode_strip(const Job *job, int64_t row, int64_t rows, int64_t col, int64_t cols,
                         int64_t is_transposed) {
    _Alignas(64) char tile[STRIP * PITCH * 4];
    const int64_t groups = blocks_in(cols, GROUP), size = size_of(job->operand_dtype);
    const int is_whole = !is_transposed && cols % GROUP == 0;
    for (int64_t i = 0; i < rows; i++) {
        char *kept = tile + i * PITCH * size;
        char *out = (char *)job->operand + ((row + i) * job->cols + col) * size;
        if (is_transposed) { /* the same place of the next strip */
            const uint8_t *next = job->codes + at_most(row + i + STRIP, job->rows - 1) * row_bytes(job);
            next += col / GROUP * group_bytes(job);
            for (int64_t g = 0; g < groups; g += 4) __builtin_prefetch(next + g * group_bytes(job));
        }
        decode_row(job, row + i, col, groups, is_whole ? out : kept);
        if (!is_transposed && !is_whole) memcpy(out, kept, (size_t)(cols * size));
    }
    if (is_transposed) store_turned(job, tile, row, rows, col, cols);
}

/* Reads job->codes and job->scales, writes job->operand: (rows, cols), or (cols, rows). */
void megalowbit_decode_8bit(const Job *job, int64_t is_transposed) {
    const int64_t strip = is_transposed ? STRIP : 1;
    /* Tall where columns are written, so that the next strip goes on in the same pages. */
    const Tasks tasks = is_transposed ? tasks_of(job->rows, job->cols, 16 * STRIP, SEGMENT)
                                      : tasks_of(job->rows, job->cols, STRIP, 64 * SEGMENT);
#pragma omp parallel for schedule(static) num_threads((int)job->threads)
    for (int64_t task = 0; task < tasks.count; task++) {
        const int64_t top = task / tasks.across * tasks.rows, left = task % tasks.across * tasks.cols;
        const int64_t bottom = at_most(top + tasks.rows, job->rows);
        const int64_t right = at_most(left + tasks.cols, job->cols);
        const unsigned mode = exact_numbers();
        for (int64_t row = top; row < bottom; row += strip)
            for (int64_t col = left; col < right; col += SEGMENT)
                decode_strip(job, row, at_most(strip, bottom - row), col, at_most(SEGMENT, right - col),
                             is_transposed);
        restore_numbers(mode);
    }
}
