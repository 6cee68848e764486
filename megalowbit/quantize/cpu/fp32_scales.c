/* INT8, INT4 and small floats under fp32 scales on CPUs: quantise a matrix, and decode it.
 *
 * A tensor with one scale is read twice: for its largest magnitude and for the codes. If the maximum is
 * given, it is read once, and a second time if it turns out to contain inf or NaN. Block-scaled tensors (16
 * to 128 elements of a row, or tiles) are read once. Mixed blocks are rounded to INT8 first; those codes
 * decide, and blocks that become E5M2 are rounded again.
 *
 * Loading, tasks and threads are as in fp4.c, and so are the rules for bit-exactness: each operation is
 * rounded once, in the order of quantize/reference.py, and no sum depends on the number of threads.
 */
#include "elements.h"
#include "tasks.h"

typedef struct { /* a unit, which is one row of blocks in a segment; one entry per group */
    float a[GROUPS], scale[GROUPS]; /* a: block maximum, NaN if it has inf or NaN; scale: as stored */
    float divisor[GROUPS], decoded[GROUPS];
    uint32_t keep[GROUPS]; /* mask of the codes: 0 if the block has inf or NaN */
    int element[GROUPS];
} Blocks;

typedef struct { /* destinations of a row of a unit */
    uint8_t *packed;
    char *operand;
    float *values; /* for counting */
    const uint8_t *random;
} Row;

static inline int64_t size_of(int64_t dtype) { return dtype == FP32 ? 4 : 2; }

static inline int64_t group_bytes(const Args *args) { return ELEMENTS[args->element].bits * 2; }

static inline int64_t row_bytes(const Args *args) {
    return blocks_across(args, args->cols) * (args->block_cols / GROUP) * group_bytes(args);
}

/* ---- scales ---- */

/* Divisor and multiplier of group g. If the scale is 0, all quotients must be 0, so the divisor is inf. */
static void set_group(Blocks *blocks, int64_t g, int element, float scale, float decoded) {
    const int is_spoiled = (bits_of(scale) & 0x7FFFFFFF) > INFINITY_BITS;
    blocks->scale[g] = scale, blocks->decoded[g] = decoded, blocks->element[g] = element;
    blocks->divisor[g] = scale == 0 ? float_of(INFINITY_BITS) : scale;
    blocks->keep[g] = is_spoiled ? 0 : 0xFF;
}

/* ---- codes ---- */

SPECIALISED void encode_groups(const Args *args, int element, const float *v, const Blocks *blocks,
                               int64_t begin, int64_t end, const Row *row, const uint8_t *random) {
    const uint32_t bits = ELEMENTS[element].bits;
    const int64_t dtype = args->operand_dtype, size = size_of(dtype);
    for (int64_t g = begin; g < end; g++) {
        const Lanes quotients = (Lanes)((Floats)lanes_at(v + g * GROUP) / blocks->divisor[g]);
        Lanes codes = random ? stochastic_elements(element, quotients, random + g * GROUP)
                             : nearest_elements(element, quotients);
        codes &= blocks->keep[g];
        store_codes(bits, codes, row->packed + g * bits * 2);
        if (!row->operand && !row->values) continue;
        const Floats decoded = element_values(element, codes) * blocks->decoded[g];
        if (row->operand) store_rounded(decoded, dtype, row->operand + g * GROUP * size);
        if (row->values) memcpy(row->values + g * GROUP, &decoded, sizeof decoded);
    }
}

/* Encodes groups of one element format. */
static void encode_run(const Args *args, const float *v, const Blocks *blocks, int64_t begin, int64_t end,
                       const Row *row) {
    switch (blocks->element[begin] * 2 + (row->random != NULL)) {
#define CASE(element) \
    case element * 2: encode_groups(args, element, v, blocks, begin, end, row, NULL); break; \
    case element * 2 + 1: encode_groups(args, element, v, blocks, begin, end, row, row->random); break;
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

/* Encodes one row of a segment. The operand of its last group may be partial. */
static void encode_row(const Args *args, const float *v, const Blocks *blocks, int64_t groups, int64_t cols,
                       const Row *row) {
    const int is_rounded = args->scale_kind == SIGNED_BLOCKS && !row->random && !row->operand && !row->values;
    const int64_t whole = row->operand ? cols / GROUP : groups, size = size_of(args->operand_dtype);
    for (int64_t g = 0, end; g < whole; g = end) {
        end = same_element(blocks, g, whole);
        if (!is_rounded || blocks->element[g] != INT8) encode_run(args, v, blocks, g, end, row);
    }
    for (int64_t g = whole; g < groups; g++) {
        char last[SEGMENT * 4];
        Row cut = *row;
        cut.operand = last;
        encode_run(args, v, blocks, g, g + 1, &cut);
        const int64_t place = g * GROUP * size;
        if (g == whole) memcpy(row->operand + place, last + place, (size_t)(cols % GROUP * size));
    }
}

/* ---- block scales ---- */

static void find_block_scales(const Args *args, const Unit *unit, Blocks *blocks) {
    const float largest = ELEMENTS[args->element].largest;
    block_maxima(args, unit->v, unit->rows, unit->groups, blocks->a);
    for (int64_t g = 0; g < unit->groups; g++) {
        const float scale = blocks->a[g] / largest;
        set_group(blocks, g, (int)args->element, scale, scale);
    }
}

/* Scales and codes in INT8 for all blocks; then E5M2 for blocks whose largest element is far above the
 * others. */
static void find_signed_scales(const Args *args, const Unit *unit, Blocks *blocks, uint8_t *packed) {
    const int64_t step = args->block_cols / GROUP, size = args->block_cols;
    const Row row = {packed, NULL, NULL, NULL};
    block_maxima(args, unit->v, unit->rows, unit->groups, blocks->a);
    for (int64_t g = 0; g < unit->groups; g++) {
        const float scale = blocks->a[g] / 127.0f;
        set_group(blocks, g, INT8, scale == 0 ? 1.0f : scale, scale == 0 ? 1.0f : scale);
    }
    encode_run(args, unit->v, blocks, 0, unit->groups, &row);
    for (int64_t g = 0; g < unit->groups; g += step) {
        const int64_t elements = at_most(size, args->cols - unit->col - g * GROUP);
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

/* Counts one row of a segment; first sets everything after its `cols` elements to zero, which adds
 * nothing. */
static void count_row(Counters *counters, float *v, float *values, const Blocks *blocks, float tensor_scale,
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
    counters->counts[SATURATED] += saturated, counters->counts[UPPER_HALF] += upper_half;
    counters->counts[UNDERFLOW] += underflow, counters->counts[NONFINITE] += nonfinite;
    add_errors(counters, v, values, tensor_scale, groups);
}

/* ---- whole matrices ---- */

static void encode_unit(const Args *args, const Unit *unit, Blocks *blocks, Random *random,
                        Counters *counters) {
    const int64_t col = unit->col, groups = unit->groups, step = args->block_cols / GROUP;
    const int64_t row_blocks = blocks_across(args, args->cols), size = size_of(args->operand_dtype);
    const float tensor_scale = args->scale_kind == ONE_FP32 ? blocks->scale[0] : 1.0f;
    float values[SEGMENT];
    uint8_t *packed = args->codes + unit->row * row_bytes(args) + col / GROUP * group_bytes(args);
    if (args->scale_kind == FP32_BLOCKS) find_block_scales(args, unit, blocks);
    if (args->scale_kind == SIGNED_BLOCKS) find_signed_scales(args, unit, blocks, packed);
    for (int64_t i = 0; i < unit->rows; i++, packed += row_bytes(args)) {
        const int64_t at = unit->row + i;
        const uint64_t first = (uint64_t)at * (uint64_t)(row_blocks * step) + (uint64_t)(col / GROUP);
        const Row row = {
            packed,
            args->operand ? (char *)args->operand + (at * args->cols + col) * size : NULL,
            counters ? values : NULL,
            args->is_stochastic ? random_bytes(args, random, first, groups) : NULL,
        };
        encode_row(args, unit->v + i * PITCH, blocks, groups, unit->cols, &row);
        if (counters) count_row(counters, unit->v + i * PITCH, values, blocks, tensor_scale, unit->cols);
    }
    if (args->scale_kind == ONE_FP32) return;
    float *stored = (float *)args->scales + block_row(args, unit->row) * row_blocks + block_col(args, col);
    for (int64_t g = 0; g < groups; g += step) {
        stored[g / step] = blocks->scale[g];
        if (!counters) continue;
        counters->counts[BLOCKS]++;
        counters->counts[ZERO_BLOCKS] += (args->scale_kind == SIGNED_BLOCKS ? blocks->a : blocks->scale)[g] == 0;
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

/* The same for a task whose rows or columns are contiguous. */
static uint32_t largest_of_task(const Args *args, int64_t top, int64_t bottom, int64_t left, int64_t right) {
    const int is_down = is_column_major(args);
    uint32_t largest = 0;
    for (int64_t i = is_down ? left : top; i < (is_down ? right : bottom); i++) {
        const void *from = address(args, is_down ? top : i, is_down ? i : left);
        const int64_t length = is_down ? bottom - top : right - left;
        largest = larger_of(largest, largest_magnitude(from, args->dtype, length));
    }
    return largest;
}

/* Without `scale`, only finds the largest magnitude of a task. With it, also quantises. */
static uint32_t run_task(const Args *args, Tasks tasks, int64_t task, const float *scale,
                         Counters *counters) {
    _Alignas(64) float v[STRIP * PITCH];
    Unit units[STRIP];
    Blocks blocks;
    Random random = {0};
    uint32_t largest = 0;
    const int64_t top = task / tasks.across * tasks.rows, left = task % tasks.across * tasks.cols;
    const int64_t bottom = at_most(top + tasks.rows, args->rows);
    const int64_t right = at_most(left + tasks.cols, args->cols);
    if (!scale && !args->has_signs && (args->col_stride == 1 || is_column_major(args)))
        return largest_of_task(args, top, bottom, left, right);
    for (int64_t g = 0; scale && g < GROUPS; g++) set_group(&blocks, g, (int)args->element, *scale, 1.0f);
    const int64_t strip = is_column_major(args) ? STRIP : args->block_rows;
    const int64_t span = strip == 1 ? BATCH * SEGMENT : SEGMENT;
    for (int64_t row = top; row < bottom; row += strip)
        for (int64_t col = left; col < right; col += span) {
            const int64_t rows = at_most(strip, bottom - row), end = at_most(col + span, right);
            const int64_t count = load_units(args, row, rows, col, end, v, units);
            for (int64_t i = 0; i < count; i++) {
                if (!scale || args->tensor_amax) largest = larger_of(largest, largest_of_unit(units + i));
                if (scale) encode_unit(args, units + i, &blocks, &random, counters);
            }
        }
    return largest;
}

static uint32_t run_tasks(const Args *args, Tasks tasks, const float *scale, Counters *of_tasks) {
    uint32_t largest = 0;
#pragma omp parallel for schedule(static) num_threads((int)args->threads) reduction(max : largest)
    for (int64_t task = 0; task < tasks.count; task++) {
        const unsigned mode = exact_numbers();
        largest = larger_of(largest, run_task(args, tasks, task, scale, of_tasks ? of_tasks + task : NULL));
        restore_numbers(mode);
    }
    return largest;
}

/* The tensor's only scale, from the bits of its largest magnitude, or from the given maximum. */
static float one_scale(const Args *args, uint32_t largest, const float *given) {
    const unsigned mode = exact_numbers();
    const float a = float_of(largest) * (float)args->q_scalar, amax = given ? *given : a;
    const int is_finite = bits_of(a) < INFINITY_BITS && (bits_of(amax) & 0x7FFFFFFF) < INFINITY_BITS;
    const float scale = is_finite ? amax / ELEMENTS[args->element].largest : float_of(NAN_BITS);
    restore_numbers(mode);
    return scale;
}

static void encode_with_one_scale(const Args *args, Tasks tasks, Counters *of_tasks) {
    const uint32_t found = args->tensor_amax ? 0 : run_tasks(args, tasks, NULL, NULL);
    float scale = one_scale(args, found, args->tensor_amax);
    const uint32_t largest = run_tasks(args, tasks, &scale, of_tasks);
    const float sound = one_scale(args, largest, &scale); /* NaN if a number was not finite */
    if (sound != sound && scale == scale) {
        scale = sound;
        if (of_tasks) memset(of_tasks, 0, (size_t)tasks.count * sizeof(Counters));
        run_tasks(args, tasks, &scale, of_tasks);
    }
    *args->tensor_scale = scale;
    if (of_tasks) of_tasks->counts[BLOCKS] = 1, of_tasks->counts[ZERO_BLOCKS] = scale == 0;
}

/* Returns 0, or -1 if out of memory. */
int megalowbit_encode_8bit(const Args *args) {
    const Tasks tasks = encode_tasks(args);
    const float of_blocks = 0; /* placeholder: each block has its own scale */
    Counters *of_tasks = args->counts ? calloc((size_t)tasks.count, sizeof(Counters)) : NULL;
    if (args->counts && !of_tasks) return -1;
    if (args->scale_kind == ONE_FP32) encode_with_one_scale(args, tasks, of_tasks);
    else run_tasks(args, tasks, &of_blocks, of_tasks);
    if (of_tasks) add_up(args, of_tasks, tasks.count);
    free(of_tasks);
    return 0;
}

/* ---- decoding ---- */

SPECIALISED void decode_groups(const Args *args, int element, const Blocks *blocks, int64_t begin,
                               int64_t end,
                               const uint8_t *packed, char *out) {
    const uint32_t bits = ELEMENTS[element].bits;
    for (int64_t g = begin; g < end; g++) {
        const Floats values = element_values(element, codes_at(bits, packed + g * bits * 2));
        char *to = out + g * GROUP * size_of(args->operand_dtype);
        if (args->scale_kind == ONE_FP32 && args->operand_dtype == BF16) store_exact(values, BF16, to);
        else store_rounded(values * blocks->decoded[g], args->operand_dtype, to);
    }
}

/* Decodes one row of a segment; always writes full groups. */
static void decode_row(const Args *args, int64_t row, int64_t col, int64_t groups, char *out) {
    const uint8_t *packed = args->codes + row * row_bytes(args) + col / GROUP * group_bytes(args);
    const int64_t step = args->block_cols / GROUP;
    Blocks blocks;
    if (args->scale_kind == ONE_FP32)
        for (int64_t g = 0; g < groups; g++) set_group(&blocks, g, (int)args->element, 1.0f, 1.0f);
    else {
        const float *stored = (const float *)args->scales + block_col(args, col);
        stored += block_row(args, row) * blocks_across(args, args->cols);
        const int is_signed = args->scale_kind == SIGNED_BLOCKS;
        for (int64_t g = 0; g < groups; g++) {
            const uint32_t bits = bits_of(stored[g / step]);
            const int element = is_signed && bits >> 31 ? FP8_E5M2 : (int)args->element;
            set_group(&blocks, g, element, 1.0f, float_of(is_signed ? bits & 0x7FFFFFFF : bits));
        }
    }
    for (int64_t g = 0, end; g < groups; g = end) {
        end = same_element(&blocks, g, groups);
        switch (blocks.element[g]) {
#define CASE(element) \
    case element: decode_groups(args, element, &blocks, g, end, packed, out); break;
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

/* Writes the rows of a tile to the columns of a matrix that has args->rows columns. */
static void store_turned(const Args *args, const char *tile, int64_t row, int64_t rows, int64_t col,
                         int64_t cols) {
    const int is_wide = args->operand_dtype == FP32;
    const int64_t whole_rows = is_wide ? 0 : rows & ~7, whole_cols = is_wide ? 0 : cols & ~7;
    uint16_t *out = (uint16_t *)args->operand + col * args->rows + row;
    float *wide_out = (float *)args->operand + col * args->rows + row;
    for (int64_t j = 0; j < whole_cols; j += 8) {
        for (int64_t k = j; k < j + 8; k++) /* too far apart for the hardware prefetcher */
            __builtin_prefetch(out + at_most(k + AHEAD, cols - 1) * args->rows, 1);
        for (int64_t i = 0; i < whole_rows; i += 8)
            transpose_halves(tile + (i * PITCH + j) * 2, PITCH * 2, out + j * args->rows + i, args->rows);
    }
    for (int64_t j = 0; j < cols; j++) {
        if (is_wide) __builtin_prefetch(wide_out + at_most(j + AHEAD, cols - 1) * args->rows, 1);
        for (int64_t i = j < whole_cols ? whole_rows : 0; i < rows; i++) {
            if (is_wide) wide_out[j * args->rows + i] = ((const float *)tile)[i * PITCH + j];
            else out[j * args->rows + i] = ((const uint16_t *)tile)[i * PITCH + j];
        }
    }
}

static void decode_strip(const Args *args, int64_t row, int64_t rows, int64_t col, int64_t cols,
                         int64_t is_transposed) {
    _Alignas(64) char tile[STRIP * PITCH * 4];
    const int64_t groups = blocks_in(cols, GROUP), size = size_of(args->operand_dtype);
    const int is_whole = !is_transposed && cols % GROUP == 0;
    for (int64_t i = 0; i < rows; i++) {
        char *kept = tile + i * PITCH * size;
        char *out = (char *)args->operand + ((row + i) * args->cols + col) * size;
        if (is_transposed) { /* prefetch the same columns of the next strip */
            const uint8_t *next = args->codes + at_most(row + i + STRIP, args->rows - 1) * row_bytes(args);
            next += col / GROUP * group_bytes(args);
            for (int64_t g = 0; g < groups; g += 4) __builtin_prefetch(next + g * group_bytes(args));
        }
        decode_row(args, row + i, col, groups, is_whole ? out : kept);
        if (!is_transposed && !is_whole) memcpy(out, kept, (size_t)(cols * size));
    }
    if (is_transposed) store_turned(args, tile, row, rows, col, cols);
}

/* Reads args->codes and args->scales, writes args->operand: (rows, cols), or (cols, rows). */
void megalowbit_decode_8bit(const Args *args, int64_t is_transposed) {
    const int64_t strip = is_transposed ? STRIP : 1;
    /* If columns are written, tasks are tall: the next strip writes to the same pages. */
    const Tasks tasks = is_transposed ? tasks_of(args->rows, args->cols, 16 * STRIP, SEGMENT)
                                      : tasks_of(args->rows, args->cols, STRIP, 64 * SEGMENT);
#pragma omp parallel for schedule(static) num_threads((int)args->threads)
    for (int64_t task = 0; task < tasks.count; task++) {
        const int64_t top = task / tasks.across * tasks.rows, left = task % tasks.across * tasks.cols;
        const int64_t bottom = at_most(top + tasks.rows, args->rows);
        const int64_t right = at_most(left + tasks.cols, args->cols);
        const unsigned mode = exact_numbers();
        for (int64_t row = top; row < bottom; row += strip)
            for (int64_t col = left; col < right; col += SEGMENT)
                decode_strip(args, row, at_most(strip, bottom - row), col, at_most(SEGMENT, right - col),
                             is_transposed);
        restore_numbers(mode);
    }
}
