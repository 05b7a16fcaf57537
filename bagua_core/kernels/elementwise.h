/* What can an elementwise program do? Its operations, once for every instruction set and for Python, which asks by name.
 *
 * x, y, z: operands, each [elements]. s, t: numbers of this run. `fused` ones round once where the others round twice.
 * NaN and signed zeros as torch's operations have them.
 */
#ifndef BAGUA_ELEMENTWISE_H
#define BAGUA_ELEMENTWISE_H

#include <math.h>
#include <stdint.h>

#define BAGUA_ELEMENTWISE(OPERATION)                                                                     \
  OPERATION(copy, x)                                                                                     \
  OPERATION(fill, s)                                                                                     \
  OPERATION(negative, -x)                                                                                \
  OPERATION(absolute, fabsf(x))                                                                          \
  OPERATION(sqrt, sqrtf(x))                                                                              \
  OPERATION(reciprocal, 1.0f / x)                                                                        \
  OPERATION(sign, (x > 0 ? 1.0f : 0.0f) - (x < 0 ? 1.0f : 0.0f))                                         \
  OPERATION(add, x + y)                                                                                  \
  OPERATION(subtract, x - y)                                                                             \
  OPERATION(multiply, x * y)                                                                             \
  OPERATION(divide, x / y)                                                                               \
  OPERATION(maximum, x > y || x != x ? x : y)                                                            \
  OPERATION(minimum, x < y || x != x ? x : y)                                                            \
  OPERATION(add_number, x + s)                                                                           \
  OPERATION(subtract_number, x - s)                                                                      \
  OPERATION(multiply_number, x * s)                                                                      \
  OPERATION(divide_number, x / s)                                                                        \
  OPERATION(at_least, x < s ? s : x)                                                                     \
  OPERATION(at_most, x > s ? s : x)                                                                      \
  OPERATION(add_scaled, x + y * s)                                                                       \
  OPERATION(add_scaled_fused, fmaf(y, s, x))                                                             \
  OPERATION(subtract_scaled, x - y * s)                                                                  \
  OPERATION(subtract_scaled_fused, fmaf(y, -s, x))                                                       \
  OPERATION(add_product, x + s * y * z)                                                                  \
  OPERATION(add_product_fused, fmaf(s * y, z, x))                                                        \
  OPERATION(add_quotient, x + s * y / z)                                                                 \
  OPERATION(interpolate, fabsf(s) < 0.5f ? x + s * (y - x) : y - (1.0f - s) * (y - x))                   \
  OPERATION(interpolate_fused, fabsf(s) < 0.5f ? fmaf(s, y - x, x) : fmaf(s - 1.0f, y - x, y))           \
  OPERATION(above, x > s ? 1.0f : 0.0f)                                                                  \
  OPERATION(below, x < s ? 1.0f : 0.0f)                                                                  \
  OPERATION(equal_to, x == s ? 1.0f : 0.0f)                                                              \
  OPERATION(choose, x != 0 ? y : z)                                                                      \
  OPERATION(replace_where, y != 0 ? s : x)

enum {
#define BAGUA_NAME(name, value) ELEMENTWISE_##name,
  BAGUA_ELEMENTWISE(BAGUA_NAME)
#undef BAGUA_NAME
  ELEMENTWISE_given_sqrt, /* by a function of the caller's: see bagua_elementwise_sqrt */
  ELEMENTWISE_OPERATIONS
};

/* As vmsSqrt of Intel's MKL, with which torch's x86 builds take roots: its last bit may be another than sqrtf's. */
typedef void (*elementwise_sqrt)(int count, const float *x, float *to, int64_t mode);
typedef int (*elementwise_threads)(int threads); /* of the calling thread's calls from now on; returns what it was */
static struct {
  elementwise_sqrt sqrt;
  int64_t mode;
  elementwise_threads use_threads;
} bagua_given; /* written before any program runs */

/* to, x, y, z: registers. s: the place of a number. What an operation does not use is 0. */
typedef struct {
  int32_t operation, to, x, y, z, s;
} elementwise_step;

#define BAGUA_MAX_TEMPORARIES 12 /* of BAGUA_NEAR elements each, on a thread's stack */
#define BAGUA_MAX_MEMORIES 20

#endif
