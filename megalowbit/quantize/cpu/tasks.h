/* How the CPU kernels cut a matrix into tasks, what a task loads, and how the sums of all are added up. */
#ifndef KERNELS_CPU_TASKS_H
#define KERNELS_CPU_TASKS_H
#include "codes.h"
#include <stdlib.h>

enum { SATURATED = 1, UPPER_HALF, UNDERFLOW, NONFINITE, BLOCKS, SATURATED_SCALES, ZERO_BLOCKS };

typedef struct {
    int64_t counts[8];
    double squared_error[GROUP], squared_norm[GROUP];
} Tally;

typedef struct { /* tasks of one matrix: rectangles of `rows` × `cols`, numbered row by row */
    int64_t rows, cols, across, count;
} Tasks;

typedef struct { /* one row of blocks in a segment: in v, and its place in the matrix */
    float *v;
    int64_t row, rows, col, cols, groups;
} Unit;

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

/* Loads some rows, columns from `left` to `right`; several segments lie one behind the other in v. */
static int64_t load_units(const Job *job, int64_t row, int64_t rows, int64_t left, int64_t right, float *v,
                          Unit *units) {
    int64_t count = 0;
    for (int64_t col = left; col < right; col += SEGMENT, v += PITCH) {
        const int64_t cols = at_most(SEGMENT, right - col), height = job->block_rows;
        const int64_t width = blocks_across(job, cols) * job->block_cols;
        load_transformed(job, row, rows, col, cols, width, v);
        for (int64_t i = 0; i < rows; i += height)
            units[count++] =
                (Unit){v + i * PITCH, row + i, at_most(height, rows - i), col, cols, width / GROUP};
    }
    return count;
}

/* Sums of one row of a segment, whose elements past the end are zeros. */
static void add_errors(Tally *tally, const float *v, const float *values, float tensor_scale, int64_t groups) {
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

int megalowbit_has_threads(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

#endif
