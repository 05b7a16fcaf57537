/* The kernels on CUDA: what cpu.c and cpu_loops.h do, with the arithmetic of arithmetic.h, bit for bit.
 *
 * One thread block of 256 works on one block of values, four neighbours a thread, up to BAGUA_PASSES times: so a block of
 * values is read once and stays in registers. BAGUA_PASSES is defined by the compilation (1, 2, 4 or 8): small blocks
 * of values must not pay for registers that only large ones need. Compiled by NVRTC (on_gpu.py has the launches); the
 * tests also compile it as C++ beside an emulation of threads, so it includes nothing else.
 */
#include "arithmetic.h"

#define THREADS 256
#define WARPS (THREADS / 32)
#define QUAD 4
#define PASS (THREADS * QUAD)             /* elements that all threads take at a time */
#define PASSES BAGUA_PASSES
#define REACH (PASSES * PASS)             /* elements of one thread block */
#define ALL_LANES 0xffffffffu
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define INLINE static __device__ __forceinline__

static_assert(REACH <= BAGUA_MAX_BLOCK, "BAGUA_PASSES is 1, 2, 4 or 8");
static_assert(PASS == BAGUA_SUM_LANES, "a pass is a row of lanes: the order of one_bit's sums");

enum { F32 = 0, F16 = 1, BF16 = 2 };

struct f32 { float bits; };
struct f16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

INLINE float to_float(f32 x) { return x.bits; }
INLINE float to_float(f16 x) { return float_from_half(x.bits); }
INLINE float to_float(bf16 x) { return float_from_bf16(x.bits); }
INLINE void from_float(float x, f32 &to) { to.bits = x; }
INLINE void from_float(float x, f16 &to) { to.bits = half_from_float(x); }
INLINE void from_float(float x, bf16 &to) { to.bits = bf16_from_float(x); }

template <typename T>
struct alignas(QUAD * sizeof(T)) quad_of { T items[QUAD]; };

template <typename T>
INLINE bool quads_are_aligned(const T *p) { return (unsigned long long)p % (QUAD * sizeof(T)) == 0; }

/* Four items at p, of which `left` exist; the others keep what is in x. */
template <typename T>
INLINE void read_quad(const T *p, int64_t left, bool is_aligned, T (&x)[QUAD]) {
  if (is_aligned && left >= QUAD) {
    quad_of<T> quad = *(const quad_of<T> *)p;
#pragma unroll
    for (int s = 0; s < QUAD; s++) x[s] = quad.items[s];
  } else {
#pragma unroll
    for (int s = 0; s < QUAD; s++)
      if (s < left) x[s] = p[s];
  }
}

template <typename T>
INLINE void write_quad(T *p, int64_t left, bool is_aligned, const T (&x)[QUAD]) {
  if (is_aligned && left >= QUAD) {
    quad_of<T> quad;
#pragma unroll
    for (int s = 0; s < QUAD; s++) quad.items[s] = x[s];
    *(quad_of<T> *)p = quad;
  } else {
#pragma unroll
    for (int s = 0; s < QUAD; s++)
      if (s < left) p[s] = x[s];
  }
}

/* This thread's elements of up to REACH: element pass * PASS + threadIdx.x * QUAD + s is x[pass][s]. */
typedef float elements[PASSES][QUAD];

INLINE int64_t first_of(int pass) { return (int64_t)pass * PASS + threadIdx.x * QUAD; }

template <typename T>
INLINE void read_all_of(const T *p, int64_t count, elements &x) {
  bool is_aligned = quads_are_aligned(p);
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    int64_t first = first_of(pass);
    if (first >= count) continue;
    T items[QUAD] = {};
    read_quad(p + first, count - first, is_aligned, items);
#pragma unroll
    for (int s = 0; s < QUAD; s++) x[pass][s] = to_float(items[s]);
  }
}

template <typename T>
INLINE void write_all_of(T *p, int64_t count, const elements &x) {
  bool is_aligned = quads_are_aligned(p);
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    int64_t first = first_of(pass);
    if (first >= count) continue;
    T items[QUAD];
#pragma unroll
    for (int s = 0; s < QUAD; s++) from_float(x[pass][s], items[s]);
    write_quad(p + first, count - first, is_aligned, items);
  }
}

INLINE void read_all(const void *values, int dtype, int64_t at, int64_t count, elements &x) {
  if (dtype == F32) read_all_of((const f32 *)values + at, count, x);
  else if (dtype == F16) read_all_of((const f16 *)values + at, count, x);
  else read_all_of((const bf16 *)values + at, count, x);
}

INLINE void write_all(void *values, int dtype, int64_t at, int64_t count, const elements &x) {
  if (dtype == F32) write_all_of((f32 *)values + at, count, x);
  else if (dtype == F16) write_all_of((f16 *)values + at, count, x);
  else write_all_of((bf16 *)values + at, count, x);
}

/* Does `body` with `pass`, `s` and the element's index for all elements of this thread below count. */
#define FOR_MINE(count)                                 \
  _Pragma("unroll") for (int pass = 0; pass < PASSES; pass++) \
    _Pragma("unroll") for (int s = 0; s < QUAD; s++)    \
      if (first_of(pass) + s < (count))

/* Which block of values is this thread block's? */
struct place {
  int64_t row, block, blocks, at, count;
};

INLINE place my_place(int64_t count, int64_t block_size) {
  place p;
  p.blocks = blocks_in(count, block_size);
  p.row = blockIdx.x / p.blocks;
  p.block = blockIdx.x % p.blocks;
  p.at = p.block * block_size;
  p.count = count - p.at < block_size ? count - p.at : block_size;
  return p;
}

/* Zero what no header and no code fills. */
INLINE void clear_padding(const place &p, uint8_t *row, int64_t headers, int64_t payload_at, int64_t payload, int64_t bytes) {
  if (p.block != 0) return;
  int64_t i = threadIdx.x;
  if (i < payload_at - headers) row[headers + i] = 0;
  if (i < bytes - payload_at - payload) row[payload_at + payload + i] = 0;
}

/* ---- min-max uint8 ---- */

INLINE minmax_grid grid_over(const elements &x, int64_t count) {
  __shared__ int32_t leasts[WARPS], mosts[WARPS];
  int32_t least = 2147483647, most = -2147483647 - 1;
  FOR_MINE(count) {
    int32_t key = order_key(x[pass][s]);
    least = key < least ? key : least;
    most = key > most ? key : most;
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    int32_t other_least = __shfl_xor_sync(ALL_LANES, least, distance);
    int32_t other_most = __shfl_xor_sync(ALL_LANES, most, distance);
    least = other_least < least ? other_least : least;
    most = other_most > most ? other_most : most;
  }
  if (threadIdx.x % 32 == 0) {
    leasts[threadIdx.x / 32] = least;
    mosts[threadIdx.x / 32] = most;
  }
  __syncthreads();
  for (int warp = 0; warp < WARPS; warp++) {
    least = leasts[warp] < least ? leasts[warp] : least;
    most = mosts[warp] > most ? mosts[warp] : most;
  }
  return minmax_grid_of(float_of_key(least), float_of_key(most));
}

INLINE void compress_minmax(const elements &x, const place &p, int64_t count, int64_t block_size, uint8_t *row) {
  int64_t payload_at = minmax_payload_at(count, block_size);
  clear_padding(p, row, 8 * p.blocks, payload_at, count, minmax_bytes(count, block_size));
  minmax_grid grid = grid_over(x, p.count);
  if (threadIdx.x == 0) {
    float *header = (float *)row + 2 * p.block;
    header[0] = grid.low;
    header[1] = grid.step;
  }
  uint8_t *codes = row + payload_at + p.at;
  bool poisoned = minmax_is_poisoned(grid.low);
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    int64_t first = first_of(pass);
    if (first >= p.count) continue;
    uint8_t code[QUAD];
#pragma unroll
    for (int s = 0; s < QUAD; s++) code[s] = poisoned ? 0 : minmax_encode(x[pass][s], grid.low, grid.inverse);
    write_quad(codes + first, p.count - first, true, code);
  }
}

KERNEL bagua_minmax_compress(const void *values, int dtype, int64_t count, int64_t block_size, uint8_t *out,
                             int64_t stride) {
  place p = my_place(count, block_size);
  elements x = {};
  read_all(values, dtype, p.row * count + p.at, p.count, x);
  compress_minmax(x, p, count, block_size, out + p.row * stride);
}

/* Adds one peer's decoded block to x, or puts it there if it is the first. */
INLINE void add_minmax(const uint8_t *row, const place &p, int64_t payload_at, bool is_first, elements &x) {
  const float *header = (const float *)row + 2 * p.block;
  float low = header[0], step = header[1];
  const uint8_t *codes = row + payload_at + p.at;
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    int64_t first = first_of(pass);
    if (first >= p.count) continue;
    uint8_t code[QUAD] = {};
    read_quad(codes + first, p.count - first, true, code);
#pragma unroll
    for (int s = 0; s < QUAD; s++) {
      float decoded = minmax_is_poisoned(low) ? canonical_nan() : minmax_decode(code[s], low, step);
      x[pass][s] = is_first ? decoded : x[pass][s] + decoded;
    }
  }
}

KERNEL bagua_minmax_reduce(const uint8_t *in, int64_t stride, int64_t peers, int64_t count, int64_t block_size, float scale,
                           uint8_t *out) {
  place p = my_place(count, block_size);
  int64_t payload_at = minmax_payload_at(count, block_size);
  elements x = {};
  for (int64_t peer = 0; peer < peers; peer++) add_minmax(in + peer * stride, p, payload_at, peer == 0, x);
  FOR_MINE(p.count) x[pass][s] *= scale;
  compress_minmax(x, p, count, block_size, out);
}

/* ---- one bit ---- */

/* The sum over the block in every thread. x: this thread's part of the lanes' sums, by lane. */
INLINE float fold_lanes(const float (&mine)[QUAD]) {
  __shared__ float lanes[PASS];
  __shared__ float total;
  float x[QUAD];
#pragma unroll
  for (int s = 0; s < QUAD; s++) lanes[threadIdx.x * QUAD + s] = x[s] = mine[s];
  __syncthreads();
  for (int width = THREADS / 2; width >= 32; width /= 2) { /* in threads: lanes j and j + width * QUAD */
    if (threadIdx.x < width) {
#pragma unroll
      for (int s = 0; s < QUAD; s++) {
        x[s] = x[s] + lanes[(threadIdx.x + width) * QUAD + s];
        lanes[threadIdx.x * QUAD + s] = x[s];
      }
    }
    __syncthreads();
  }
  if (threadIdx.x < 32) {
    for (int width = 16; width > 0; width /= 2)
#pragma unroll
      for (int s = 0; s < QUAD; s++) x[s] = x[s] + __shfl_down_sync(ALL_LANES, x[s], width);
    if (threadIdx.x == 0) total = (x[0] + x[2]) + (x[1] + x[3]);
  }
  __syncthreads();
  return total;
}

KERNEL bagua_one_bit_compress(const void *values, int dtype, int64_t count, int64_t block_size, const float *error,
                              float *left_over, uint8_t *out, int64_t stride) {
  place p = my_place(count, block_size);
  int64_t where = p.row * count + p.at;
  int64_t payload_at = one_bit_payload_at(count, block_size);
  uint8_t *row = out + p.row * stride;
  clear_padding(p, row, 4 * p.blocks, payload_at, (count + 7) / 8, one_bit_bytes(count, block_size));

  elements t = {}, left = {};
  read_all(values, dtype, where, p.count, t);
  read_all(error, F32, where, p.count, left);
  float sums[QUAD] = {};
  FOR_MINE(p.count) {
    t[pass][s] = t[pass][s] + left[pass][s];
    sums[s] = sums[s] + magnitude_of(t[pass][s]);
  }
  float scale = one_bit_scale(fold_lanes(sums), p.count);
  bool poisoned = scale != scale;
  if (threadIdx.x == 0) ((float *)row)[p.block] = scale;

  uint8_t *bits = row + payload_at + p.at / 8;
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    if ((int64_t)pass * PASS >= p.count) continue; /* the same for all threads: they shuffle together */
    uint32_t nibble = 0;
#pragma unroll
    for (int s = 0; s < QUAD; s++)
      if (first_of(pass) + s < p.count && !poisoned) nibble |= one_bit_encode(t[pass][s]) << s;
    uint32_t neighbour = __shfl_down_sync(ALL_LANES, nibble, 1);
    if (threadIdx.x % 2 == 0 && first_of(pass) < p.count) bits[first_of(pass) / 8] = (uint8_t)(nibble | neighbour << 4);
  }
  FOR_MINE(p.count)
  left[pass][s] = poisoned ? finite_or_zero(left[pass][s])
                           : t[pass][s] - one_bit_decode(one_bit_encode(t[pass][s]), scale);
  write_all(left_over, F32, where, p.count, left);
}

INLINE void add_one_bit(const uint8_t *row, const place &p, int64_t payload_at, bool is_first, elements &x) {
  float scale = ((const float *)row)[p.block];
  const uint8_t *bits = row + payload_at + p.at / 8;
#pragma unroll
  for (int pass = 0; pass < PASSES; pass++) {
    int64_t first = first_of(pass);
    if (first >= p.count) continue;
    uint32_t nibble = (uint32_t)bits[first / 8] >> (first % 8);
#pragma unroll
    for (int s = 0; s < QUAD; s++) {
      float decoded = one_bit_decode(nibble >> s & 1u, scale);
      x[pass][s] = is_first ? decoded : x[pass][s] + decoded;
    }
  }
}

/* ---- from compressed to values ---- */

/* peers 1: each row by itself. Else there is one row, and the peers are summed. */
KERNEL bagua_decode(int one_bit, const uint8_t *in, int64_t stride, int64_t peers, int64_t count, int64_t block_size,
                    float scale, int add, void *values, int dtype) {
  place p = my_place(count, block_size);
  int64_t where = p.row * count + p.at;
  elements x = {};
  for (int64_t peer = 0; peer < peers; peer++) {
    const uint8_t *row = in + (p.row + peer) * stride;
    if (one_bit) add_one_bit(row, p, one_bit_payload_at(count, block_size), peer == 0, x);
    else add_minmax(row, p, minmax_payload_at(count, block_size), peer == 0, x);
  }
  if (add) {
    elements old = {};
    read_all(values, dtype, where, p.count, old);
    FOR_MINE(p.count) x[pass][s] = scaled_onto(old[pass][s], scale, x[pass][s]);
  } else {
    FOR_MINE(p.count) x[pass][s] = canonical(x[pass][s] * scale);
  }
  write_all(values, dtype, where, p.count, x);
}

/* ---- values against values: a thread block takes REACH elements ---- */

KERNEL bagua_weighted_average(void *x, int x_dtype, const void *y, int y_dtype, int64_t count, float x_weight,
                              float y_weight) {
  place p = my_place(count, REACH);
  elements xs = {}, ys = {};
  read_all(x, x_dtype, p.at, p.count, xs);
  read_all(y, y_dtype, p.at, p.count, ys);
  FOR_MINE(p.count) xs[pass][s] = weighted(xs[pass][s], x_weight, ys[pass][s], y_weight);
  write_all(x, x_dtype, p.at, p.count, xs);
}

KERNEL bagua_add_difference(void *x, int x_dtype, const void *newer, const void *older, int other_dtype, int64_t count,
                            float scale) {
  place p = my_place(count, REACH);
  elements xs = {}, news = {}, olds = {};
  read_all(x, x_dtype, p.at, p.count, xs);
  read_all(newer, other_dtype, p.at, p.count, news);
  read_all(older, other_dtype, p.at, p.count, olds);
  FOR_MINE(p.count) xs[pass][s] = moved_by_difference(xs[pass][s], news[pass][s], olds[pass][s], scale);
  write_all(x, x_dtype, p.at, p.count, xs);
}

/* ---- Adam whose second moment rests: a thread block takes BAGUA_STEPS_BLOCK elements ---- */

KERNEL bagua_adam_steps(void *x, int dtype, const void *second, const float *before, float *after, int64_t count, float eps,
                        float reach, float decay) {
  place p = my_place(count, BAGUA_STEPS_BLOCK);
  elements xs = {}, seconds = {}, old = {};
  read_all(x, dtype, p.at, p.count, xs);
  read_all(second, dtype, p.at, p.count, seconds);
  if (before) read_all(before, F32, p.at, p.count, old);
  float sums[QUAD] = {};
  FOR_MINE(p.count) {
    xs[pass][s] = adam_step_of(xs[pass][s], seconds[pass][s], eps);
    sums[s] = sums[s] + magnitude_of(xs[pass][s]);
  }
  float limit = reach * (fold_lanes(sums) / (float)p.count);
  FOR_MINE(p.count) xs[pass][s] = cut_to(xs[pass][s], limit);
  if (before) {
    FOR_MINE(p.count) {
      xs[pass][s] = smoothed(old[pass][s], decay, xs[pass][s]);
      old[pass][s] = finite_or_zero(xs[pass][s]);
    }
    write_all(after, F32, p.at, p.count, old);
  }
  FOR_MINE(p.count) xs[pass][s] = canonical(xs[pass][s]);
  write_all(x, dtype, p.at, p.count, xs);
}

KERNEL bagua_adam_gradients(void *x, int dtype, const void *second, int64_t count, float eps) {
  place p = my_place(count, REACH);
  elements xs = {}, seconds = {};
  read_all(x, dtype, p.at, p.count, xs);
  read_all(second, dtype, p.at, p.count, seconds);
  FOR_MINE(p.count) xs[pass][s] = gradient_of_step(xs[pass][s], seconds[pass][s], eps);
  write_all(x, dtype, p.at, p.count, xs);
}

KERNEL bagua_adam_update(void *parameter, int dtype, const void *gradient, void *first, const void *second, int64_t count,
                         float share, float weight_decay, float eps, float rate) {
  place p = my_place(count, REACH);
  elements xs = {}, gradients = {}, firsts = {}, seconds = {};
  read_all(parameter, dtype, p.at, p.count, xs);
  read_all(gradient, dtype, p.at, p.count, gradients);
  read_all(first, dtype, p.at, p.count, firsts);
  read_all(second, dtype, p.at, p.count, seconds);
  FOR_MINE(p.count) {
    firsts[pass][s] = adam_first(firsts[pass][s], gradients[pass][s], xs[pass][s], share, weight_decay);
    xs[pass][s] = adam_moved(xs[pass][s], firsts[pass][s], seconds[pass][s], eps, rate);
  }
  write_all(first, dtype, p.at, p.count, firsts);
  write_all(parameter, dtype, p.at, p.count, xs);
}

/* ---- flat buffers: a thread block takes REACH elements of the flat one, wherever their parts lie ---- */

/* Which part holds the element `at`? The last one that starts at or before it. */
INLINE int64_t part_of(const int64_t *starts, int64_t parts, int64_t at) {
  int64_t low = 0, high = parts;
  while (high - low > 1) {
    int64_t middle = (low + high) / 2;
    if (starts[middle] <= at) low = middle;
    else high = middle;
  }
  return low;
}

INLINE float read_one(const void *p, int dtype, int64_t i) {
  if (dtype == F32) return ((const float *)p)[i];
  uint16_t bits = ((const uint16_t *)p)[i];
  return dtype == F16 ? float_from_half(bits) : float_from_bf16(bits);
}

INLINE void write_one(void *p, int dtype, int64_t i, float x) {
  if (dtype == F32) ((float *)p)[i] = x;
  else ((uint16_t *)p)[i] = dtype == F16 ? half_from_float(x) : bf16_from_float(x);
}

template <typename T>
INLINE void move_one(void *flat, int64_t i, void *part, int64_t j, int into_flat) {
  if (into_flat) ((T *)flat)[i] = ((const T *)part)[j];
  else ((T *)part)[j] = ((const T *)flat)[i];
}

/* table: the parts' addresses, then their starts and the total, in elements. unit: bytes of an element if the
 * dtypes are the same (1, 2, 4 or 8), else 0. */
KERNEL bagua_copy_parts(const int64_t *table, int64_t parts, int part_dtype, void *flat, int flat_dtype, int unit,
                        int into_flat) {
  const int64_t *starts = table + parts;
  int64_t total = starts[parts];
  int64_t begin = (int64_t)blockIdx.x * REACH;
  int64_t end = begin + REACH < total ? begin + REACH : total;
  int64_t part = part_of(starts, parts, begin);
  for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
    while (starts[part + 1] <= i) part++;
    void *own = (void *)table[part];
    int64_t j = i - starts[part];
    if (unit == 4) move_one<uint32_t>(flat, i, own, j, into_flat);
    else if (unit == 2) move_one<uint16_t>(flat, i, own, j, into_flat);
    else if (unit == 8) move_one<int64_t>(flat, i, own, j, into_flat);
    else if (unit == 1) move_one<uint8_t>(flat, i, own, j, into_flat);
    else if (into_flat) write_one(flat, flat_dtype, i, read_one(own, part_dtype, j));
    else write_one(own, part_dtype, j, read_one(flat, flat_dtype, i));
  }
}
