/* The largest magnitude of a matrix and the sum of its squares, in one pass over memory.
 *
 * Loading, tasks and threads are as in fp4.c. The square of an fp32 number is exact in float64, so only sums
 * round: sixteen lanes over a segment, then segments of a task, then lanes, then tasks in pairs. Each square
 * takes part in at most 16 + 2048 + 16 + 64 additions, each with a relative error of 2^-53. The relative
 * error of the sum is less than 2.4e-13, and the result does not depend on the number of threads.
 */
#include "tasks.h"

typedef float EightFloats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));

typedef struct {
    double squares;
    uint32_t largest; /* fp32 bits; inf and NaN compare largest */
} Moments;

static inline Doubles squares_at(const float *v) {
    EightFloats floats;
    memcpy(&floats, v, sizeof floats);
    const Doubles wide = __builtin_convertvector(floats, Doubles);
    return wide * wide;
}

/* Accumulates groups: squares into sixteen sums, magnitudes into sixteen maxima. */
static inline void add_groups(const float *v, int64_t groups, Doubles *sums, Lanes *largest) {
    Doubles low = {0}, high = {0};
    Lanes most = *largest;
    for (int64_t g = 0; g < groups; g++, v += GROUP) {
        low += squares_at(v), high += squares_at(v + GROUP / 2);
        most = larger(most, lanes_at(v) & 0x7FFFFFFF);
    }
    sums[0] += low, sums[1] += high, *largest = most;
}

static Moments moments_of_task(const Args *args, Tasks tasks, int64_t task) {
    _Alignas(64) float v[STRIP * PITCH];
    Doubles sums[2] = {{0}, {0}};
    Lanes largest = {0};
    Moments found = {0, 0};
    const int64_t top = task / tasks.across * tasks.rows, left = task % tasks.across * tasks.cols;
    const int64_t bottom = at_most(top + tasks.rows, args->rows);
    const int64_t right = at_most(left + tasks.cols, args->cols);
    const int64_t strip = is_column_major(args) ? STRIP : 1;
    for (int64_t row = top; row < bottom; row += strip)
        for (int64_t col = left; col < right; col += SEGMENT) {
            const int64_t rows = at_most(strip, bottom - row), cols = at_most(SEGMENT, right - col);
            const int64_t groups = blocks_in(cols, GROUP);
            load(args, row, rows, col, cols, groups * GROUP, v);
            for (int64_t i = 0; i < rows; i++) add_groups(v + i * PITCH, groups, sums, &largest);
        }
    for (int j = 0; j < GROUP; j++) {
        found.squares += sums[j / 8][j % 8];
        found.largest = largest[j] > found.largest ? largest[j] : found.largest;
    }
    return found;
}

/* Writes the largest magnitude (NaN if the matrix has one) and the sum of squares; returns -1 if out of
 * memory. */
int megalowbit_moments(const Args *args, double *out) {
    const Tasks tasks = encode_tasks(args);
    Moments *parts = calloc((size_t)tasks.count + 1, sizeof(Moments));
    if (!parts) return -1;
#pragma omp parallel for schedule(static) num_threads((int)args->threads)
    for (int64_t task = 0; task < tasks.count; task++) {
        const unsigned mode = exact_numbers();
        parts[task] = moments_of_task(args, tasks, task);
        restore_numbers(mode);
    }
    for (int64_t step = 1; step < tasks.count; step *= 2)
        for (int64_t task = 0; task + step < tasks.count; task += 2 * step) {
            const Moments other = parts[task + step];
            parts[task].squares += other.squares;
            if (other.largest > parts[task].largest) parts[task].largest = other.largest;
        }
    const unsigned mode = exact_numbers();
    out[0] = (double)float_of(parts[0].largest);
    out[1] = parts[0].squares;
    restore_numbers(mode);
    free(parts);
    return 0;
}
