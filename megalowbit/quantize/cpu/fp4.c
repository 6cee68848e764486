/* FP4 on CPUs: quantise a matrix, decode it, and two small passes before and after a GEMM.
 *
 * A row is processed in segments of 16 groups of 16 elements (codes.h), which stay in the L1 cache. A segment
 * is loaded as fp32, transformed and scaled. Then the codes of each group are computed, packed, decoded and
 * stored without leaving the registers (lanes.h). A column-major matrix (a transposed view) is loaded tile by
 * tile.
 *
 * Bit-exactness: each fp32 operation is rounded once, in the order of formats/block_scale.py. Compile without
 * contraction to fused multiply-add and without "fast math". Results do not depend on the number of threads:
 * the division into tasks is always the same, and sums are added in the order of the tasks.
 */
#include "tasks.h"

/* ---- counting ---- */

/* Counts one row of a segment; first sets everything after its `cols` elements to zero, which adds
 * nothing. */
static void count(Counters *counters, float *v, float *values, const Scales *scales, float tensor_scale,
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
    counters->counts[SATURATED] += saturated, counters->counts[UPPER_HALF] += upper_half;
    counters->counts[UNDERFLOW] += underflow, counters->counts[NONFINITE] += nonfinite;
    add_errors(counters, v, values, tensor_scale, groups);
}

static void count_blocks(const Args *args, Counters *counters, const Scales *scales, int64_t blocks) {
    const int64_t step = args->block_cols / GROUP;
    counters->counts[BLOCKS] += blocks;
    for (int64_t g = 0; g < blocks * step; g += step) {
        counters->counts[SATURATED_SCALES] += scales->overflows[g];
        counters->counts[ZERO_BLOCKS] += (args->scale_kind == E4M3 ? scales->decoded[g] : scales->a[g]) == 0;
    }
}

/* ---- whole matrices ---- */

/* Encodes the groups of a row; writes packed codes, operand and values (for counting), each unless NULL. */
SPECIALISED void encode_groups(const float *v, const Scales *scales, const uint8_t *random, int64_t begin,
                               int64_t end, uint8_t *packed, char *operand, int64_t dtype,
                               float operand_scale, float *values) {
    for (int64_t g = begin; g < end; g++) {
        const Lanes codes =
            random ? stochastic_codes(v, scales, g, random) : nearest_codes(v, scales, g);
        pack(codes, packed + g * 8);
        const Floats decoded = e2m1_values(codes) * scales->decoded[g];
        if (operand) store_exact(decoded * operand_scale, dtype, operand + g * GROUP * (dtype == FP32 ? 4 : 2));
        if (values) memcpy(values + g * GROUP, &decoded, sizeof decoded);
    }
}

/* Encodes one row of a segment. The operand of its last group may be partial. */
static void encode_row(const Args *args, const float *v, const Scales *scales, const uint8_t *random,
                       int64_t groups, int64_t cols, uint8_t *packed, char *operand, float operand_scale,
                       float *values) {
    const int64_t dtype = args->operand_dtype, size = dtype == FP32 ? 4 : 2;
    const int64_t whole = operand ? cols / GROUP : groups;
    if (values || (operand && dtype == FP32))
        encode_groups(v, scales, random, 0, whole, packed, operand, dtype, operand_scale, values);
    else if (random && operand) encode_groups(v, scales, random, 0, whole, packed, operand, BF16, operand_scale, NULL);
    else if (random) encode_groups(v, scales, random, 0, whole, packed, NULL, BF16, 1.0f, NULL);
    else if (operand) encode_groups(v, scales, NULL, 0, whole, packed, operand, BF16, operand_scale, NULL);
    else encode_groups(v, scales, NULL, 0, whole, packed, NULL, BF16, 1.0f, NULL);
    for (int64_t g = whole; g < groups; g++) {
        char last[SEGMENT * 4];
        encode_groups(v, scales, random, g, g + 1, packed, last, dtype, operand_scale, values);
        const int64_t place = g * GROUP * size;
        if (g == whole) memcpy(operand + place, last + place, (size_t)(cols % GROUP * size));
    }
}

static void find_scales(const Args *args, float S, const Unit *unit, Scales *scales) {
    block_maxima(args, unit->v, unit->rows, unit->groups, scales->a);
    if (args->scale_kind == E4M3) e4m3_scales(scales->a, S, 6.0f, args->is_up, scales);
    else e8m0_scales(scales->a, args->is_up, scales);
    if (args->four_over_six) four_over_six(args, unit->v, S, unit->groups, scales); /* blocks of one row */
}

static void encode_unit(const Args *args, float S, const Unit *unit, const Scales *scales, Random *random,
                        Counters *counters) {
    const int64_t row = unit->row, col = unit->col, cols = unit->cols, groups = unit->groups;
    const int64_t step = args->block_cols / GROUP, blocks = blocks_across(args, cols);
    const int64_t row_blocks = blocks_across(args, args->cols), row_groups = row_blocks * step;
    const float tensor_scale = args->scale_kind == E4M3 ? 1.0f / S : 1.0f;
    const float operand_scale = args->is_power_of_two ? tensor_scale : 1.0f;
    float values[SEGMENT];
    const int64_t size = args->operand_dtype == FP32 ? 4 : 2;
    for (int64_t i = 0; i < unit->rows; i++) {
        float *row_values = unit->v + i * PITCH;
        uint8_t *packed = args->codes + (row + i) * row_groups * 8 + col / 2;
        char *operand = args->operand ? (char *)args->operand + ((row + i) * args->cols + col) * size : NULL;
        uint64_t first = (uint64_t)(row + i) * (uint64_t)row_groups + (uint64_t)(col / GROUP);
        const uint8_t *bytes = args->is_stochastic ? random_bytes(args, random, first, groups) : NULL;
        encode_row(args, row_values, scales, bytes, groups, cols, packed, operand, operand_scale,
                   counters ? values : NULL);
        if (counters) count(counters, row_values, values, scales, tensor_scale, cols);
    }
    uint8_t *stored = args->scales + block_row(args, row) * row_blocks + block_col(args, col);
    for (int64_t b = 0; b < blocks; b++) stored[b] = (uint8_t)scales->stored[b * step];
    if (counters) count_blocks(args, counters, scales, blocks);
}

/* Finds the largest block maximum of a task without dividing it into blocks. Returns 0 if that is not
 * possible: after a Hadamard transform, with other strides, or if a block may have inf or NaN. */
static int scan_task(const Args *args, Tasks tasks, int64_t task, float *largest) {
    const int64_t top = task / tasks.across * tasks.rows, left = task % tasks.across * tasks.cols;
    const int64_t rows = at_most(tasks.rows, args->rows - top), cols = at_most(tasks.cols, args->cols - left);
    const int is_down = is_column_major(args);
    if (args->has_signs || (!is_down && args->col_stride != 1)) return 0;
    uint32_t bits = 0;
    for (int64_t i = 0; i < (is_down ? cols : rows); i++) {
        const void *from = address(args, is_down ? top : top + i, is_down ? left + i : left);
        const uint32_t magnitude = largest_magnitude(from, args->dtype, is_down ? rows : cols);
        bits = magnitude > bits ? magnitude : bits;
    }
    const float a = float_of(bits) * (float)args->q_scalar;
    if (bits >= INFINITY_BITS || bits_of(a) >= INFINITY_BITS) return 0;
    *largest = a > *largest ? a : *largest;
    return 1;
}

/* Computing scales is one long dependency chain; a batch of units overlaps several. */
static void encode_units(const Args *args, float S, const Unit *units, int64_t count, Random *random,
                         Counters *counters) {
    Scales scales[BATCH];
    for (int64_t begin = 0; begin < count; begin += BATCH) {
        const int64_t some = at_most(BATCH, count - begin);
        for (int64_t i = 0; i < some; i++) find_scales(args, S, units + begin + i, scales + i);
        for (int64_t i = 0; i < some; i++) encode_unit(args, S, units + begin + i, scales + i, random, counters);
    }
}

/* Quantises a task; if `largest` is given, only finds the largest finite block maximum. */
static void run_task(const Args *args, Tasks tasks, int64_t task, float S, Counters *counters,
                     float *largest) {
    if (largest && scan_task(args, tasks, task, largest)) return;
    _Alignas(64) float v[STRIP * PITCH];
    Unit units[STRIP];
    Random random = {0};
    const int64_t top = task / tasks.across * tasks.rows, left = task % tasks.across * tasks.cols;
    const int64_t bottom = at_most(top + tasks.rows, args->rows);
    const int64_t right = at_most(left + tasks.cols, args->cols);
    const int64_t strip = is_column_major(args) ? STRIP : args->block_rows;
    const int64_t span = strip == 1 ? BATCH * SEGMENT : SEGMENT;
    for (int64_t row = top; row < bottom; row += strip)
        for (int64_t col = left; col < right; col += span) {
            const int64_t rows = at_most(strip, bottom - row), end = at_most(col + span, right);
            const int64_t count = load_units(args, row, rows, col, end, v, units);
            if (!largest) encode_units(args, S, units, count, &random, counters);
            for (int64_t i = 0; largest && i < count; i++) {
                float a[GROUPS];
                block_maxima(args, units[i].v, units[i].rows, units[i].groups, a);
                for (int g = 0; g < GROUPS; g++) *largest = a[g] > *largest ? a[g] : *largest;
            }
        }
}

/* Returns 0, or -1 if out of memory. */
int megalowbit_encode(const Args *args) {
    const Tasks tasks = encode_tasks(args);
    const unsigned mode = exact_numbers();
    float S = 1.0f;
    if (args->scale_kind == E4M3) {
        float tensor_amax = 0;
        if (args->tensor_amax) tensor_amax = *args->tensor_amax;
        else {
#pragma omp parallel for schedule(static) num_threads((int)args->threads) reduction(max : tensor_amax)
            for (int64_t task = 0; task < tasks.count; task++) {
                const unsigned thread_mode = exact_numbers();
                run_task(args, tasks, task, S, NULL, &tensor_amax);
                restore_numbers(thread_mode);
            }
        }
        S = tensor_encode_scale(args, tensor_amax);
        *args->tensor_scale = 1.0f / S;
    }
    restore_numbers(mode);
    Counters *of_tasks = NULL;
    if (args->counts && !(of_tasks = calloc((size_t)tasks.count, sizeof(Counters)))) return -1;
#pragma omp parallel for schedule(static) num_threads((int)args->threads)
    for (int64_t task = 0; task < tasks.count; task++) {
        const unsigned thread_mode = exact_numbers();
        run_task(args, tasks, task, S, of_tasks ? of_tasks + task : NULL, NULL);
        restore_numbers(thread_mode);
    }
    if (of_tasks) add_up(args, of_tasks, tasks.count);
    free(of_tasks);
    return 0;
}

/* Decodes one row of a segment: codes × block scale. */
static void decode_row(const Args *args, const float *table, int64_t row, int64_t col, int64_t cols,
                       float *values) {
    const int64_t step = args->block_cols / GROUP, row_blocks = blocks_across(args, args->cols);
    const uint8_t *packed = args->codes + row * row_blocks * args->block_cols / 2 + col / 2;
    const uint8_t *stored = args->scales + block_row(args, row) * row_blocks + block_col(args, col);
    for (int64_t g = 0; g < blocks_in(cols, GROUP); g++) {
        const Floats decoded = e2m1_values(unpacked(packed + g * 8)) * table[stored[g / step]];
        memcpy(values + g * GROUP, &decoded, sizeof decoded);
    }
}

static void decode_strip(const Args *args, const float *table, int64_t row, int64_t rows, int64_t col,
                         int64_t cols, int64_t is_transposed) {
    _Alignas(64) float v[STRIP * PITCH];
    const int64_t is_wide = args->operand_dtype == FP32, size = is_wide ? 4 : 2;
    for (int64_t i = 0; i < rows; i++) decode_row(args, table, row + i, col, cols, v + i * PITCH);
    for (int64_t k = 0; k < (is_transposed ? cols : rows); k++) {
        const float *restrict from = is_transposed ? v + k : v + k * PITCH;
        const int64_t step = is_transposed ? PITCH : 1, length = is_transposed ? rows : cols;
        int64_t place = is_transposed ? (col + k) * args->rows + row : (row + k) * args->cols + col;
        float *restrict wide = (float *)((char *)args->operand + place * size);
        uint16_t *restrict narrow = (uint16_t *)wide;
        if (is_wide) for (int64_t j = 0; j < length; j++) wide[j] = from[j * step];
        else if (is_transposed)
            for (int64_t j = 0; j < length; j++) narrow[j] = (uint16_t)(bits_of(from[j * PITCH]) >> 16);
        else
            for (int64_t j = 0; j < length; j++) narrow[j] = (uint16_t)(bits_of(from[j]) >> 16);
    }
}

/* Reads args->codes, args->scales and args->tensor_scale (unless NULL), writes args->operand: (rows, cols), or (cols, rows). */
void megalowbit_decode(const Args *args, int64_t is_transposed) {
    const int64_t strip = is_transposed ? STRIP : 1;
    const Tasks tasks = tasks_of(args->rows, args->cols, STRIP, is_transposed ? SEGMENT : 64 * SEGMENT);
    const unsigned mode = exact_numbers();
    float table[256];
    for (uint32_t i = 0; i < 256; i++) table[i] = e8m0_value(i);
    if (args->scale_kind == E4M3)
        for (uint32_t i = 0; i < 256; i += GROUP) {
            const Lanes codes = (Lanes){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + i;
            const Lanes values = (Lanes)e4m3_values(codes & 0x7F) | (codes & 0x80) << 24;
            memcpy(table + i, &values, sizeof values);
        }
    const float tensor_scale = args->tensor_scale ? *args->tensor_scale : 1.0f;
    for (uint32_t i = 0; i < 256; i++) table[i] *= tensor_scale;
    restore_numbers(mode);
#pragma omp parallel for schedule(static) num_threads((int)args->threads)
    for (int64_t task = 0; task < tasks.count; task++) {
        const int64_t top = task / tasks.across * tasks.rows, left = task % tasks.across * tasks.cols;
        const int64_t bottom = at_most(top + tasks.rows, args->rows);
        const int64_t right = at_most(left + tasks.cols, args->cols);
        const unsigned thread_mode = exact_numbers();
        for (int64_t row = top; row < bottom; row += strip)
            for (int64_t col = left; col < right; col += SEGMENT)
                decode_strip(args, table, row, at_most(strip, bottom - row), col,
                             at_most(SEGMENT, right - col), is_transposed);
        restore_numbers(thread_mode);
    }
}

/* ---- before and after a GEMM ---- */

/* args->operand = cast(x · scale + bias), row by row; x may be args->operand. */
void megalowbit_scale_and_bias(const Args *args, float scale, const float *bias, int64_t out_stride) {
#pragma omp parallel for schedule(static) num_threads((int)args->threads)
    for (int64_t row = 0; row < args->rows; row++) {
        float v[SEGMENT];
        const unsigned thread_mode = exact_numbers();
        for (int64_t col = 0; col < args->cols; col += SEGMENT) {
            const int64_t cols = at_most(SEGMENT, args->cols - col), place = row * out_stride + col;
            load_contiguous(address(args, row, col), args->dtype, cols, v);
            for (int64_t j = 0; j < cols; j++) v[j] = v[j] * scale;
            if (bias) for (int64_t j = 0; j < cols; j++) v[j] = v[j] + bias[col + j];
            uint16_t *half = (uint16_t *)args->operand + place;
            if (args->operand_dtype == FP32) memcpy((float *)args->operand + place, v, (size_t)cols * 4);
            else if (args->operand_dtype == BF16)
                for (int64_t j = 0; j < cols; j++) half[j] = bf16_of_float(v[j]);
            else
                for (int64_t j = 0; j < cols; j++) half[j] = half_of_float(v[j]);
        }
        restore_numbers(thread_mode);
    }
}

/* Sums over rows: `block` rows at a time into partial (blocks, cols), those into args->operand (cols,). */
void megalowbit_column_sums(const Args *args, int64_t block, float *partial) {
    const Tasks tasks = tasks_of(args->rows, args->cols, block, 16 * SEGMENT);
    float *out = args->operand;
#pragma omp parallel for schedule(static) num_threads((int)args->threads)
    for (int64_t task = 0; task < tasks.count; task++) {
        const int64_t top = task / tasks.across * block, left = task % tasks.across * tasks.cols;
        const int64_t bottom = at_most(top + block, args->rows);
        const int64_t right = at_most(left + tasks.cols, args->cols);
        float *restrict sums = partial + task / tasks.across * args->cols;
        float v[SEGMENT];
        const unsigned thread_mode = exact_numbers();
        memset(sums + left, 0, (size_t)(right - left) * 4);
        for (int64_t row = top; row < bottom; row++) /* row by row, in memory order */
            for (int64_t col = left; col < right; col += SEGMENT) {
                const int64_t cols = at_most(SEGMENT, right - col);
                load_contiguous(address(args, row, col), args->dtype, cols, v);
                for (int64_t j = 0; j < cols; j++) sums[col + j] += v[j];
            }
        restore_numbers(thread_mode);
    }
    const unsigned mode = exact_numbers();
    memset(out, 0, (size_t)args->cols * 4);
    for (int64_t b = 0; b < blocks_in(args->rows, block); b++)
        for (int64_t col = 0; col < args->cols; col++) out[col] += partial[b * args->cols + col];
    restore_numbers(mode);
}
