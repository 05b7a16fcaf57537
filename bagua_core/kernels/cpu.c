/* The kernels on the CPU: a C library that Python loads with ctypes (on_cpu.py). No Python and no torch in here.
 *
 * Owns the choice of instruction set (at run time: a wheel meets other processors), the division of work over threads
 * and the floating-point environment. Results depend on none of them. Arguments are checked in Python.
 */
#define _GNU_SOURCE
#include <fenv.h>
#include <stdint.h>
#include <string.h>

#include "arithmetic.h"
#include "threads.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#ifndef BAGUA_SOURCE
#define BAGUA_SOURCE "unknown"
#endif

#define BAGUA_NEAR 1024 /* elements taken at a time where they are used again while they are in the first cache */

enum { F32 = 0, F16 = 1, BF16 = 2, RAW = 3 };

typedef struct {
  void (*minmax_compress)(const void *, int, int64_t, int64_t, float *, uint8_t *);
  void (*minmax_reduce)(const uint8_t *, const uint8_t *, int64_t, int64_t, int64_t, float, float *, uint8_t *);
  void (*one_bit_compress)(const void *, int, int64_t, int64_t, const float *, float *, float *, uint8_t *);
  void (*decode_sum)(int, const uint8_t *, const uint8_t *, int64_t, int64_t, int64_t, float, int, void *, int, int64_t);
  void (*weighted_average)(void *, int, const void *, int, int64_t, int64_t, float, float);
  void (*add_difference)(void *, int, const void *, const void *, int, int64_t, int64_t, float);
  void (*adam_steps)(void *, int, const void *, const float *, float *, int64_t, int64_t, float, float, float);
  void (*adam_gradients)(void *, int, const void *, int64_t, int64_t, float);
  void (*adam_update)(void *, int, const void *, void *, const void *, int64_t, int64_t, float, float, float, float);
  void (*cast)(const void *, int, void *, int, int64_t);
} loops;

#define LOOP(name) name##_baseline
#define TARGET
#include "cpu_loops.h"
#undef LOOP
#undef TARGET

#if defined(__x86_64__)
#define BAGUA_AVX2
#define LOOP(name) name##_avx2
#define TARGET __attribute__((target("avx2,f16c,fma")))
#include "cpu_loops.h"
#undef LOOP
#undef TARGET
#endif

/* ---- instruction sets ---- */

enum { BASELINE = 0, AVX2 = 1 }; /* wider ones were measured and gain nothing: memory is the limit */

static int best_set(void) {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  __builtin_cpu_init(); /* knows too whether the operating system keeps wide registers */
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) ? AVX2 : BASELINE;
#else
  return BASELINE;
#endif
}

static int chosen_set = -1; /* written before any other thread calls, or by a test; each value is right */

static const loops *chosen(void) {
  int set = __atomic_load_n(&chosen_set, __ATOMIC_RELAXED);
  if (set < 0) {
    set = best_set();
    __atomic_store_n(&chosen_set, set, __ATOMIC_RELAXED);
  }
#if defined(__x86_64__)
  if (set == AVX2) return &table_avx2;
#endif
  return &table_baseline;
}

/* Use `set` from now on, or the best there is if it is negative or above that. Returns the set in use. */
EXPORT int bagua_use_instruction_set(int set) {
  int best = best_set();
  __atomic_store_n(&chosen_set, set < 0 || set > best ? best : set, __ATOMIC_RELAXED);
  return __atomic_load_n(&chosen_set, __ATOMIC_RELAXED);
}

EXPORT const char *bagua_source(void) { return BAGUA_SOURCE; }
EXPORT int64_t bagua_minmax_bytes(int64_t count, int64_t block_size) { return minmax_bytes(count, block_size); }
EXPORT int64_t bagua_one_bit_bytes(int64_t count, int64_t block_size) { return one_bit_bytes(count, block_size); }

/* ---- work over blocks ---- */

enum work_kind {
  MINMAX_COMPRESS, MINMAX_REDUCE, ONE_BIT_COMPRESS, DECODE, WEIGHTED_AVERAGE, ADD_DIFFERENCE, ADAM_STEPS, ADAM_GRADIENTS,
  ADAM_UPDATE, PARTS
};

typedef struct {
  enum work_kind kind;
  const loops *with;
  int64_t rows, count, block_size, stride, peers;
  int one_bit, add, dtype, other_dtype;
  float scale, other_scale;
  void *values;
  const void *other, *third;
  const float *error;
  float *left;
  float share, weight_decay, eps, rate, reach, decay;
  void *first;
  const uint8_t *in;
  uint8_t *out;
  int64_t parts;
  void *const *pointers;
  const int64_t *starts;
  int into_flat;
} work;

static const int64_t item_bytes[] = {4, 2, 2, 1};

/* Elements first to last of the flat buffer, wherever their parts lie. */
static void copy_parts(const work *w, int64_t first, int64_t last) {
  int64_t low = 0, high = w->parts; /* the part that holds `first`: the last one that starts at or before it */
  while (high - low > 1) {
    int64_t middle = (low + high) / 2;
    if (w->starts[middle] <= first) low = middle;
    else high = middle;
  }
  for (int64_t part = low; part < w->parts && w->starts[part] < last; part++) {
    int64_t from = w->starts[part] > first ? w->starts[part] : first;
    int64_t to = w->starts[part + 1] < last ? w->starts[part + 1] : last;
    if (to <= from) continue;
    char *flat = (char *)w->values + from * item_bytes[w->dtype];
    char *own = (char *)w->pointers[part] + (from - w->starts[part]) * item_bytes[w->other_dtype];
    if (w->dtype == w->other_dtype)
      memcpy(w->into_flat ? flat : own, w->into_flat ? own : flat, (size_t)((to - from) * item_bytes[w->dtype]));
    else if (w->into_flat)
      w->with->cast(own, w->other_dtype, flat, w->dtype, to - from);
    else
      w->with->cast(flat, w->dtype, own, w->other_dtype, to - from);
  }
}

/* Zero what no header and no code fills, so that equal tensors have equal compressed forms. */
static void clear_padding(uint8_t *row, int64_t headers, int64_t payload_at, int64_t payload, int64_t bytes) {
  memset(row + headers, 0, (size_t)(payload_at - headers));
  memset(row + payload_at + payload, 0, (size_t)(bytes - payload_at - payload));
}

static void do_block(const work *w, int64_t row, int64_t block) {
  int64_t at = block * w->block_size;
  int64_t here = w->count - at < w->block_size ? w->count - at : w->block_size;
  int64_t blocks = blocks_in(w->count, w->block_size);
  int64_t where = row * w->count + at;
  int one_bit = w->one_bit;
  int64_t header_bytes = one_bit ? 4 : 8;
  int64_t payload_at = one_bit ? one_bit_payload_at(w->count, w->block_size) : minmax_payload_at(w->count, w->block_size);
  int64_t header = header_bytes * block, payload = payload_at + (one_bit ? at / 8 : at);
  if (w->out && block == 0)
    clear_padding(w->out + row * w->stride, header_bytes * blocks, payload_at, one_bit ? (w->count + 7) / 8 : w->count,
                  one_bit ? one_bit_bytes(w->count, w->block_size) : minmax_bytes(w->count, w->block_size));
  const uint8_t *in = w->in ? w->in + row * w->stride : NULL;
  uint8_t *out = w->out ? w->out + row * w->stride : NULL;
  switch (w->kind) {
    case MINMAX_COMPRESS:
      w->with->minmax_compress(w->values, w->dtype, where, here, (float *)(out + header), out + payload);
      break;
    case MINMAX_REDUCE:
      w->with->minmax_reduce(in + header, in + payload, w->stride, w->peers, here, w->scale, (float *)(out + header),
                             out + payload);
      break;
    case ONE_BIT_COMPRESS:
      w->with->one_bit_compress(w->values, w->dtype, where, here, w->error + where, w->left + where,
                                (float *)(out + header), out + payload);
      break;
    case DECODE:
      w->with->decode_sum(one_bit, in + header, in + payload, w->stride, w->peers, here, w->scale, w->add, w->values,
                          w->dtype, where);
      break;
    case WEIGHTED_AVERAGE:
      w->with->weighted_average(w->values, w->dtype, w->other, w->other_dtype, at, here, w->scale, w->other_scale);
      break;
    case ADD_DIFFERENCE:
      w->with->add_difference(w->values, w->dtype, w->other, w->third, w->other_dtype, at, here, w->scale);
      break;
    case ADAM_STEPS:
      w->with->adam_steps(w->values, w->dtype, w->other, w->error, w->left, at, here, w->eps, w->reach, w->decay);
      break;
    case ADAM_GRADIENTS:
      w->with->adam_gradients(w->values, w->dtype, w->other, at, here, w->eps);
      break;
    case ADAM_UPDATE:
      w->with->adam_update(w->values, w->dtype, w->third, w->first, w->other, at, here, w->share, w->weight_decay, w->eps,
                           w->rate);
      break;
    case PARTS:
      copy_parts(w, at, at + here);
      break;
  }
}

static void do_blocks(void *argument, int64_t first, int64_t last) {
  const work *w = argument;
  int64_t blocks = blocks_in(w->count, w->block_size);
  fenv_t environment; /* torch.set_flush_denormal and the like must not change results */
  fegetenv(&environment);
  fesetenv(FE_DFL_ENV);
  for (int64_t item = first; item < last; item++) do_block(w, item / blocks, item % blocks);
  fesetenv(&environment);
}

/* Elements that are worth handing to another thread: about 10 microseconds of work. */
#define GRAIN 32768

static void do_work(work *w, int threads) {
  if (w->rows <= 0 || w->count <= 0) return;
  w->with = chosen();
  int64_t grain = (GRAIN + w->block_size - 1) / w->block_size;
  bagua_share(do_blocks, w, w->rows * blocks_in(w->count, w->block_size), grain, threads);
}

/* ---- what Python calls; shapes as in __init__.py, strides in bytes ---- */

EXPORT void bagua_minmax_compress(const void *values, int dtype, int64_t rows, int64_t count, int64_t block_size,
                                  uint8_t *out, int64_t stride, int threads) {
  work w = {.kind = MINMAX_COMPRESS, .rows = rows, .count = count, .block_size = block_size, .stride = stride,
            .values = (void *)values, .dtype = dtype, .out = out};
  do_work(&w, threads);
}

EXPORT void bagua_minmax_reduce(const uint8_t *in, int64_t stride, int64_t peers, int64_t count, int64_t block_size,
                                float scale, uint8_t *out, int threads) {
  work w = {.kind = MINMAX_REDUCE, .rows = 1, .count = count, .block_size = block_size, .stride = stride, .peers = peers,
            .in = in, .scale = scale, .out = out};
  do_work(&w, threads);
}

EXPORT void bagua_one_bit_compress(const void *values, int dtype, int64_t rows, int64_t count, int64_t block_size,
                                   const float *error, float *left, uint8_t *out, int64_t stride, int threads) {
  work w = {.kind = ONE_BIT_COMPRESS, .rows = rows, .count = count, .block_size = block_size, .stride = stride,
            .values = (void *)values, .dtype = dtype, .error = error, .left = left, .out = out, .one_bit = 1};
  do_work(&w, threads);
}

/* peers 1: each of `rows` by itself. Else rows is 1 and the peers are summed. */
EXPORT void bagua_decode(int one_bit, const uint8_t *in, int64_t stride, int64_t rows, int64_t peers, int64_t count,
                         int64_t block_size, float scale, int add, void *values, int dtype, int threads) {
  work w = {.kind = DECODE, .one_bit = one_bit, .rows = rows, .count = count, .block_size = block_size, .stride = stride,
            .peers = peers, .in = in, .scale = scale, .add = add, .values = values, .dtype = dtype};
  do_work(&w, threads);
}

EXPORT void bagua_weighted_average(void *x, int x_dtype, const void *y, int y_dtype, int64_t count, float x_weight,
                                   float y_weight, int threads) {
  work w = {.kind = WEIGHTED_AVERAGE, .rows = 1, .count = count, .block_size = 2048, .values = x, .dtype = x_dtype,
            .other = y, .other_dtype = y_dtype, .scale = x_weight, .other_scale = y_weight};
  do_work(&w, threads);
}

EXPORT void bagua_add_difference(void *x, int x_dtype, const void *newer, const void *older, int other_dtype, int64_t count,
                                 float scale, int threads) {
  work w = {.kind = ADD_DIFFERENCE, .rows = 1, .count = count, .block_size = 2048, .values = x, .dtype = x_dtype,
            .other = newer, .third = older, .other_dtype = other_dtype, .scale = scale};
  do_work(&w, threads);
}

EXPORT void bagua_adam_steps(void *x, int dtype, const void *second, const float *before, float *after, int64_t count,
                             float eps, float reach, float decay, int threads) {
  work w = {.kind = ADAM_STEPS, .rows = 1, .count = count, .block_size = BAGUA_STEPS_BLOCK, .values = x, .dtype = dtype,
            .other = second, .error = before, .left = after, .eps = eps, .reach = reach, .decay = decay};
  do_work(&w, threads);
}

EXPORT void bagua_adam_gradients(void *x, int dtype, const void *second, int64_t count, float eps, int threads) {
  work w = {.kind = ADAM_GRADIENTS, .rows = 1, .count = count, .block_size = 2048, .values = x, .dtype = dtype,
            .other = second, .eps = eps};
  do_work(&w, threads);
}

EXPORT void bagua_adam_update(void *parameter, int dtype, const void *gradient, void *first, const void *second,
                              int64_t count, float share, float weight_decay, float eps, float rate, int threads) {
  work w = {.kind = ADAM_UPDATE, .rows = 1, .count = count, .block_size = BAGUA_NEAR, .values = parameter, .dtype = dtype,
            .other = second, .third = gradient, .first = first, .share = share, .weight_decay = weight_decay, .eps = eps,
            .rate = rate};
  do_work(&w, threads);
}

/* starts: parts + 1 offsets in the flat buffer, in elements (bytes for RAW). */
EXPORT void bagua_copy_parts(int64_t parts, void *const *pointers, const int64_t *starts, int part_dtype, void *flat,
                             int flat_dtype, int into_flat, int threads) {
  work w = {.kind = PARTS, .rows = 1, .count = parts ? starts[parts] : 0, .block_size = GRAIN, .values = flat,
            .dtype = flat_dtype, .other_dtype = part_dtype, .parts = parts, .pointers = pointers, .starts = starts,
            .into_flat = into_flat};
  do_work(&w, threads);
}
