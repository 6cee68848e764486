/* Division of a matrix into tasks for threads, loading of a task's data, and summation of counters over
 * tasks. */
#ifndef KERNELS_CPU_TASKS_H
#define KERNELS_CPU_TASKS_H
#include "codes.h"
#include <stdlib.h>

enum { SATURATED = 1, UPPER_HALF, UNDERFLOW, NONFINITE, BLOCKS, SATURATED_SCALES, ZERO_BLOCKS };

typedef struct {
    int64_t counts[8];
    double squared_error[GROUP], squared_norm[GROUP];
} Counters;

typedef struct { /* rectangles of `rows` × `cols`, `across` in a row, numbered row by row */
    int64_t rows, cols, across, count;
} Tasks;

typedef struct { /* one row of blocks in a segment: its data v, and its position in the matrix */
    float *v;
    int64_t row, rows, col, cols, groups;
} Unit;

static Tasks tasks_of(int64_t rows, int64_t cols, int64_t task_rows, int64_t task_cols) {
    Tasks tasks = {task_rows, task_cols, blocks_in(cols, task_cols), 0};
    tasks.count = blocks_in(rows, task_rows) * tasks.across;
    return tasks;
}

/* Column-major matrices get tall tasks, because there the next strip of rows is next in memory. */
static Tasks encode_tasks(const Args *args) {
    return is_column_major(args) ? tasks_of(args->rows, args->cols, 16 * STRIP, SEGMENT)
                                : tasks_of(args->rows, args->cols, STRIP, 64 * SEGMENT);
}

/* Bits of the largest magnitude, as fp32. Integer maxima vectorise and need no conversion first. */
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

/* Loads `rows` rows, columns `left` to `right`; segments are stored one after the other in v. Returns the
 * number of units. */
static int64_t load_units(const Args *args, int64_t row, int64_t rows, int64_t left, int64_t right, float *v,
                          Unit *units) {
    int64_t count = 0;
    for (int64_t col = left; col < right; col += SEGMENT, v += PITCH) {
        const int64_t cols = at_most(SEGMENT, right - col), height = args->block_rows;
        const int64_t width = blocks_across(args, cols) * args->block_cols;
        load_transformed(args, row, rows, col, cols, width, v);
        for (int64_t i = 0; i < rows; i += height)
            units[count++] =
                (Unit){v + i * PITCH, row + i, at_most(height, rows - i), col, cols, width / GROUP};
    }
    return count;
}

/* Adds the errors of one row of a segment; elements past the end are zeros. */
static void add_errors(Counters *counters, const float *v, const float *values, float tensor_scale,
                       int64_t groups) {
    for (int64_t g = 0; g < groups; g++)
        for (int j = 0; j < GROUP; j++) {
            uint32_t bits = bits_of(values[g * GROUP + j] * tensor_scale), magnitude = bits & 0x7FFFFFFF;
            /* Decoding the largest numbers may overflow fp32; count the largest finite number instead. */
            uint32_t finite = magnitude == INFINITY_BITS ? bits - 1 : magnitude > INFINITY_BITS ? 0 : bits;
            uint32_t exact = magnitude > INFINITY_BITS ? 0 : bits_of(v[g * GROUP + j]);
            double x = float_of(exact), difference = x - (double)float_of(finite);
            counters->squared_error[j] += difference * difference;
            counters->squared_norm[j] += x * x;
        }
}

static void add_up(const Args *args, const Counters *of_tasks, int64_t num_tasks) {
    memset(args->counts, 0, 8 * sizeof(int64_t));
    args->error[0] = args->error[1] = 0;
    for (int64_t t = 0; t < num_tasks; t++) {
        for (int i = 0; i < 8; i++) args->counts[i] += of_tasks[t].counts[i];
        for (int j = 0; j < GROUP; j++) {
            args->error[0] += of_tasks[t].squared_error[j];
            args->error[1] += of_tasks[t].squared_norm[j];
        }
    }
    args->counts[0] = args->rows * args->cols;
}

int megalowbit_has_threads(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

#endif
